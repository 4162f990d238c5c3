"""Megatron's own indexed datasets: PREFIX.bin holds tokens end to end, PREFIX.idx says where documents begin.

    web_text_document.idx   9 bytes magic, version, dtype; lengths and places of sequences, and where documents begin
    web_text_document.bin   5 9 1 7 3 2 8 8 4 2 6 ...
                            └ document ┘└ document

Read as documents (a document is a bin with one sequence) or as a token stream (windows that do not care about
documents, unless `pack_sequences` finds their EOS). Reading needs NumPy only, and trusts nothing that the index says
before it was compared with the files; that it gives what megatron-core gives is tested. Writing is megatron-core's own
code, in `megatron/indexed_writer.py`.

Where to look: `index` (the .idx file, checked), `storage` (documents as bins, and their validation).
"""
