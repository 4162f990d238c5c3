"""reliability.md row 23: golden files of every format version are read the same forever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import PackedBin, open_shard, validate
from tests.golden.make_golden import BINS, PACK_SIZE, PAD_ID
from tests.packed_bins import assert_same_bins, files_of, write_shard

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = [PackedBin(*(np.array(field) for field in row)) for row in BINS]


@pytest.mark.parametrize("name", ["memmap_1_0_seed_only", "memmap_1_0_u2", "memmap_1_0_i4"])
def test_golden_shards_are_read_the_same(name: str) -> None:
    shard = open_shard(GOLDEN / name)
    assert shard.pack_size == PACK_SIZE
    assert_same_bins(shard, ROWS)
    report = validate(GOLDEN / name)
    assert report.ok, report.findings
    assert bool(report.notes) == name.endswith("seed_only")


@pytest.mark.parametrize(("name", "vocab_size"), [("memmap_1_0_u2", 100), ("memmap_1_0_i4", 100_000)])
def test_our_writer_gives_the_golden_bytes(name: str, vocab_size: int, tmp_path: Path) -> None:
    write_shard(
        tmp_path / "shard",
        ROWS,
        PACK_SIZE,
        vocab_size=vocab_size,
        pad_id=PAD_ID,
        tokenizer={"name": "golden", "fingerprint": "0123"},
        chat_template_fingerprint="4567",
        plan_fingerprint="89ab",
    )
    ours, golden = files_of(tmp_path / "shard"), files_of(GOLDEN / name)
    del ours["manifest.json"], golden["manifest.json"]  # they differ in created_by
    assert ours == golden
