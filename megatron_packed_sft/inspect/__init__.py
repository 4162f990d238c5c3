"""Look at data and runs before a GPU hour is spent.

preview            records as prepare will tokenize them, and packed data; chosen_records, preview_records (what prepare
                   makes of a record), preview_record_view, preview_bins
explain_template   what a chat template writes around each kind of turn, and what it loses
info               what a path is and what is recorded there; info_of_data, info_of_training
compare            two pieces of packed data: equal, or what differs and what moved; compare_bins
report/            one self-contained HTML page about a dataset or a run

opened_data        open packed data and find its tokenizer
tokens_of_bin      a packed bin as tokens: text, id, position, trained or not
painting           tokens in colour or in brackets
settings           the words of a command: a path, and keys of prepare
"""
