"""The pickled .npy that Megatron-Bridge and NeMo read and write: an object array of dicts of integer lists.

    file ─▶ pickle_kernel (a machine that can build packed bins and nothing else) ─▶ decode_kernel ─▶ reader
    bins ─▶ encode_kernel ─▶ writer ─▶ file

The pickle is never given to Python; what is not packed SFT data is refused by name (`error_messages`).
"""
