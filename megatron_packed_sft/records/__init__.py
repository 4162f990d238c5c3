"""Files to records: JSON lines, JSON arrays, Parquet and Hugging Face datasets, in every common schema.

    find_files ──▶ scan_slices ──▶ read_slice ──▶ adapter ──▶ Conversation | TextRecord | TokenizedRecord
    paths, globs   one process    any process   schema      content_hash: splits, duplicates
    and URLs       cuts           parses        or mapping

A record that cannot be used is a `RecordError` with file, line and field; a bad file is an `InvalidInputError`.
"""
