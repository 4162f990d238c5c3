"""Looking at data and runs: what will be trained, before a GPU hour is spent.

tokens_of_bin    a packed bin as tokens: text, id, position, trained or not
info/            what a path is and what is recorded of it
compare/         two pieces of packed data: equal, or what differs and what moved
find_tokenizer   the tokenizer that made some data, by what the data records
report/          one self-contained HTML page about a dataset or a run
"""
