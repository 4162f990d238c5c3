"""The pickled .npy that Megatron-Bridge and NeMo read and write: an object array of dicts of integer lists.

file ─▶ storage (an unpickler that can build packed bins and nothing else) ─▶ flat arrays
bins ─▶ encode_kernel ─▶ writer ─▶ file
"""
