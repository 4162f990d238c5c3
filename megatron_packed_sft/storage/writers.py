"""The two writers behind one protocol, chosen by the name that recipes use: `packed_storage`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.legacy.writer import LegacyPickleWriter
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter

MEMMAP_V1 = "memmap_v1"
LEGACY = "legacy_npy_pickle"
PACKED_STORAGE = {MEMMAP_V1: MEMMAP_V1, LEGACY: LEGACY, "legacy": LEGACY}


class PackedShardWriter(Protocol):
    """What every writer of packed bins offers. Bins come in any order, each exactly once."""

    def write_bin(self, bin_id: int, input_ids: Any, loss_mask: Any, seq_start_id: Any) -> None:
        """Write one bin."""

    def write_block(self, first_bin: int, block: BinBlock) -> None:
        """Write consecutive bins in padded form."""

    def finalize(self) -> Any:
        """Check that all bins are there and publish."""

    def abort(self) -> None:
        """Give up and leave nothing behind; harmless after `finalize`."""

    def __enter__(self) -> Self:
        """Enter the block in which the writer lives."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort unless `finalize` was reached."""


def storage_name(packed_storage: str) -> str:
    """The canonical name of a storage, or one sentence about the names there are.

    Example:
        >>> storage_name("legacy")
        'legacy_npy_pickle'
    """
    if packed_storage not in PACKED_STORAGE:
        raise InvalidInputError(
            f"packed_storage {packed_storage!r} is unknown; use one of {', '.join(sorted(PACKED_STORAGE))}"
        )
    return PACKED_STORAGE[packed_storage]


def create_shard_writer(
    packed_storage: str,
    output: str | os.PathLike[str],
    *,
    num_bins: int,
    pack_size: int,
    vocab_size: int | None = None,
    pad_id: int = 0,
    overwrite: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> PackedShardWriter:
    """The writer for a storage: a shard directory for `memmap_v1`, a .npy file for `legacy`.

    Args:
        packed_storage: `memmap_v1`, `legacy` or `legacy_npy_pickle`.
        output: the shard directory or .npy file to publish.
        num_bins, pack_size, vocab_size, pad_id, overwrite: as in `MemmapShardWriter`.
        provenance: further arguments of `MemmapShardWriter` that end up in its manifest; a legacy file has no place
            for them.

    Example:
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> with create_shard_writer("memmap_v1", f"{home}/shard", num_bins=1, pack_size=4) as writer:
        ...     writer.write_bin(0, [1, 2], [1, 0], [0])
        ...     _ = writer.finalize()
    """
    if storage_name(packed_storage) == MEMMAP_V1:
        return MemmapShardWriter(
            output,
            num_bins,
            pack_size,
            vocab_size=vocab_size,
            pad_id=pad_id,
            overwrite=overwrite,
            **(provenance or {}),
        )
    return LegacyPickleWriter(
        output, num_bins=num_bins, pack_size=pack_size, vocab_size=vocab_size, overwrite=overwrite
    )
