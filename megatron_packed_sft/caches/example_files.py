"""The two files of a split of an SFT cache, opened and checked: the ids of all examples, and where each begins."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.caches.meta import META
from megatron_packed_sft.errors import ShardFileError
from megatron_packed_sft.storage.token_stream.files import FlatFile
from megatron_packed_sft.storage.token_stream.validate import RecordedFiles
from megatron_packed_sft.support.array_files import MAX_HEADER, parse_npy_header
from megatron_packed_sft.support.atomic import os_errors

_DTYPE = "<u2"  # what the tokens are unless a meta.json says otherwise
_OFFSETS_DTYPE = "<i8"

Ids = npt.NDArray[np.int64]


def open_tokens(path: Path, dtype: str | None) -> FlatFile:
    """Open the tokens of all examples; nothing is mapped yet."""
    dtype = dtype or _DTYPE
    with os_errors("open", path):
        size = path.stat().st_size
    itemsize = np.dtype(dtype).itemsize
    if size % itemsize:
        raise ShardFileError(
            f"{path} has {size:,} bytes, which is no whole number of tokens of {itemsize} bytes; it was cut: copy it "
            "again"
        )
    recorded = RecordedFiles(path.with_name(META)).files.get(path)
    if recorded is not None and recorded.bytes != size:
        raise ShardFileError(f"{path} has {size:,} bytes, but its meta.json says {recorded.bytes:,}; copy it again")
    return FlatFile(path, dtype, size // itemsize, 0, size)


def read_offsets(path: Path, tokens: FlatFile) -> Ids:
    """Read the offsets whole (8 bytes per example) and check that each example has tokens of its own."""
    with os_errors("read", path), open(path, "rb") as file:
        data = file.read()
    header = parse_npy_header(data[:MAX_HEADER], str(path))
    if header.dtype != _OFFSETS_DTYPE or len(header.shape) != 1:
        raise ShardFileError(
            f"{path} holds {header.dtype} of shape {header.shape}, not a list of int64 offsets; build the cache again"
        )
    if len(data) != header.data_offset + header.shape[0] * 8:
        raise ShardFileError(f"{path} was cut or appended to; copy it again")
    offsets = np.frombuffer(data, _OFFSETS_DTYPE, header.shape[0], header.data_offset)
    lengths = np.diff(np.append(offsets, tokens.num_tokens))
    if not len(offsets):
        if tokens.num_tokens:
            raise ShardFileError(f"{path} lists no examples, but {tokens.path.name} has tokens; copy both again")
    elif offsets[0] != 0 or (lengths < 1).any():
        wrong = 0 if offsets[0] != 0 else int((lengths < 1).argmax())
        raise ShardFileError(
            f"{path}: example {wrong:,} begins at {int(offsets[wrong]):,} and has "
            f"{int(lengths[wrong]):,} of the {tokens.num_tokens:,} tokens of {tokens.path.name}; the files do not "
            "belong together: copy both again"
        )
    return offsets.astype(np.int64)
