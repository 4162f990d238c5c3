"""Bins for tests: made by hypothesis or by a seeded generator, and a shard of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from megatron_packed_sft import PackedBin
from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.memmap_v1.manifest import ShardManifest
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter
from tests.storage.storage_checks import assert_same_bins, make_bin, make_bins

__all__ = [
    "assert_same_bins",
    "bins",
    "block_of",
    "files_of",
    "make_bin",
    "make_bins",
    "write_shard",
]


@st.composite
def bins(draw: st.DrawFn, max_pack_size: int = 24, vocab_size: int = 70_000) -> tuple[int, list[PackedBin]]:
    """(pack_size, bins): arbitrary sound bins that fit the pack size."""
    pack_size = draw(st.integers(1, max_pack_size))
    result = []
    for _ in range(draw(st.integers(1, 6))):
        ids = draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=pack_size))
        cuts = draw(st.sets(st.integers(1, len(ids) - 1), max_size=5)) if len(ids) > 1 else set()
        starts = sorted({0} | cuts)
        mask = draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
        for end in [*starts[1:], len(ids)]:
            mask[end - 1] = 0
        result.append(PackedBin(np.array(ids, np.int32), np.array(mask, np.uint8), np.array(starts, np.uint32)))
    return pack_size, result


def block_of(rows: list[PackedBin], pack_size: int, pad_id: int = 0, dtype: str = "<i4") -> BinBlock:
    """The padded form of bins, laid out the slow and obvious way."""
    block = BinBlock(
        np.full((len(rows), pack_size), pad_id, dtype),
        np.zeros((len(rows), pack_size), np.uint8),
        np.array([len(row.input_ids) for row in rows], np.uint32),
        np.cumsum([0] + [len(row.seq_start_id) for row in rows]).astype(np.uint32),
        np.concatenate([row.seq_start_id for row in rows]).astype(np.uint32),
    )
    for index, row in enumerate(rows):
        block.input_ids[index, : len(row.input_ids)] = row.input_ids
        block.loss_mask[index, : len(row.loss_mask)] = row.loss_mask
    return block


def write_shard(path: Path, rows: list[PackedBin], pack_size: int, **arguments: object) -> ShardManifest:
    """Write bins with our writer, one by one."""
    with MemmapShardWriter(path, len(rows), pack_size, **arguments) as writer:  # type: ignore[arg-type]
        for index, row in enumerate(rows):
            writer.write_bin(index, *row)
        return writer.finalize()


def files_of(path: Path) -> dict[str, bytes]:
    """Every file below a directory with its bytes."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
