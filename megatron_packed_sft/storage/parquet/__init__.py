"""Megatron-Bridge's packed Parquet: `input_ids`, `loss_mask` and `seq_start_id` as columns of lists, a bin per row.

Needs pyarrow (the `parquet` extra). A file has no random access to speak of, so it is read into memory whole.
"""
