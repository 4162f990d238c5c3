"""Flat shards of token ids, written as tokens arrive: `shard_00000.bin`, `shard_00001.bin`, ...

A shard holds little-endian ids and nothing else: uint16 if every id of the vocabulary fits, else uint32. Each shard but
the last has exactly as many tokens as fit into `shard_bytes`; documents may continue in the next shard.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.array_files import AppendedFile
from megatron_packed_sft.support.atomic import fsync_directory, os_errors
from megatron_packed_sft.support.json_document import FileRecord

TOKEN_DTYPES = {"uint16-le": "<u2", "uint32-le": "<u4"}  # as meta.json names them
_MAX_UINT16_VOCABULARY = 1 << 16


def token_dtype_for(vocab_size: int) -> str:
    """Return the name of the smallest dtype that holds every id of the vocabulary.

    Example:
        >>> token_dtype_for(16_004), token_dtype_for(128_256)
        ('uint16-le', 'uint32-le')
    """
    return "uint16-le" if vocab_size <= _MAX_UINT16_VOCABULARY else "uint32-le"


class TokenShardWriter:
    """Writes a directory of flat shards.

    The caller publishes the directory, which is inside its staging directory. As a context manager, closes its files.

    Args:
        directory: created by the writer; its parent must exist.
        token_dtype: a key of `TOKEN_DTYPES`.
        shard_bytes: the maximum size of a shard.
        algorithm: the checksum algorithm.

    Example:
        >>> import tempfile
        >>> home = Path(tempfile.mkdtemp())
        >>> with TokenShardWriter(home / "train", "uint16-le", shard_bytes=4) as writer:
        ...     writer.append(np.array([1, 2, 3]))
        ...     records = writer.finish()
        >>> {name: record.bytes for name, record in records.items()}
        {'shard_00000.bin': 4, 'shard_00001.bin': 2}
    """

    def __init__(self, directory: Path, token_dtype: str, shard_bytes: int, algorithm: str = "sha256") -> None:
        self._dtype = np.dtype(TOKEN_DTYPES[token_dtype])
        self._tokens_per_shard = shard_bytes // self._dtype.itemsize
        if self._tokens_per_shard < 1:
            raise InvalidInputError(f"shard_bytes is {shard_bytes}; a shard must hold at least one token")
        self._directory, self._algorithm = directory, algorithm
        self._shard: AppendedFile | None = None
        self._records: dict[str, FileRecord] = {}
        self._cleanup = contextlib.ExitStack()
        self.num_tokens = 0
        with os_errors("create", directory):
            os.mkdir(directory)

    def append(self, ids: npt.NDArray[Any]) -> None:
        """Append tokens; they must fit the dtype."""
        stored = ids.astype(self._dtype, copy=False)
        while len(stored):
            place = self.num_tokens % self._tokens_per_shard
            if place == 0:
                self._finish_shard()
            if self._shard is None:
                number = self.num_tokens // self._tokens_per_shard
                self._shard = AppendedFile(self._directory / f"shard_{number:05d}.bin", self._algorithm)
                self._cleanup.callback(self._shard.close)
            part, stored = np.split(stored, [self._tokens_per_shard - place])
            self._shard.append(part)
            self.num_tokens += len(part)

    def finish(self) -> dict[str, FileRecord]:
        """Flush the shards to disk; return the size and checksum of each."""
        self._finish_shard()
        with os_errors("write", self._directory):
            fsync_directory(self._directory)
        return self._records

    def __enter__(self) -> TokenShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self._records[self._shard.path.name] = self._shard.finish()
            self._shard = None
