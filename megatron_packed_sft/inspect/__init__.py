"""Looking at data and runs: what will be trained, before a GPU hour is spent.

record_preview   a record as prepare will tokenize it: preview_command shows it
bin_preview      bins and sequences of token stores, likewise
explain_template what a chat template writes around each kind of turn, and what it loses
painting         tokens in colour, or in brackets
tokens_of_bin    a packed bin as tokens: text, id, position, trained or not
info/            what a path is and what is recorded of it
compare/         two pieces of packed data: equal, or what differs and what moved
find_tokenizer   the tokenizer that made some data, by what the data records
report/          one self-contained HTML page about a dataset or a run
"""
