"""Megatron's own indexed datasets: PREFIX.bin holds tokens end to end, PREFIX.idx the document boundaries.

    web_text_document.idx   9 bytes magic, version, dtype; lengths and offsets of sequences, and document boundaries
    web_text_document.bin   5 9 1 7 3 2 8 8 4 2 6 ...
                            └ document ┘└ document

Read as documents (a document is a bin with one sequence) or as a token stream (windows that ignore document
boundaries unless `pack_sequences` finds their EOS). Reading needs NumPy only, and the index is checked against the
files before it is used; tests compare the result with megatron-core's. Writing uses megatron-core's own code, in
`megatron/indexed_writer.py`.

Where to look: `index` (the .idx file, checked), `storage` (documents as bins, and their validation).
"""
