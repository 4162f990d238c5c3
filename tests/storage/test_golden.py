"""reliability.md row 23: golden files of every format version are read the same forever."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import PackedBin, open_shard, validate
from tests.golden.make_golden import BINS, PACK_SIZE, PAD_ID, WEIGHTS
from tests.packed_bins import assert_same_bins, files_of, write_shard

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = [PackedBin(*(np.array(field) for field in row)) for row in BINS]
WEIGHTED = [row._replace(loss_mask=np.array(weights, np.float32)) for row, weights in zip(ROWS, WEIGHTS, strict=True)]


CHECKSUMMED = ("memmap_1_1_checksums", "memmap_1_1_weighted_checksums")
OLDER = ("memmap_1_0_seed_only", "memmap_1_0_u2", "memmap_1_0_i4", "memmap_1_1_weighted")


@pytest.mark.parametrize("name", [*OLDER, *CHECKSUMMED])
def test_golden_shards_are_read_the_same(name: str) -> None:
    shard = open_shard(GOLDEN / name)
    assert shard.pack_size == PACK_SIZE
    assert_same_bins(shard, WEIGHTED if "weighted" in name else ROWS)
    report = validate(GOLDEN / name)
    assert report.ok, report.findings
    assert bool(report.notes) == (name in OLDER)
    if name in OLDER and "seed_only" not in name:
        assert "without checksums of bins, so bins are not verified as they are read" in report.notes[0]


@pytest.mark.parametrize(
    ("name", "vocab_size"), [("memmap_1_1_checksums", 100_000), ("memmap_1_1_weighted_checksums", 100)]
)
def test_our_writer_gives_the_golden_bytes(name: str, vocab_size: int, tmp_path: Path) -> None:
    manifest = write_shard(
        tmp_path / "shard",
        WEIGHTED if "weighted" in name else ROWS,
        PACK_SIZE,
        vocab_size=vocab_size,
        pad_id=PAD_ID,
        tokenizer={"name": "golden", "fingerprint": "0123"},
        chat_template_fingerprint="4567",
        plan_fingerprint="89ab",
    )
    ours, golden = files_of(tmp_path / "shard"), files_of(GOLDEN / name)
    theirs = json.loads(golden["manifest.json"])
    for key, value in theirs.items():
        assert key in ("created_by", "self_checksum") or json.loads(json.dumps(manifest.to_json()))[key] == value
    assert theirs.keys() == json.loads(ours["manifest.json"]).keys()
    del ours["manifest.json"], golden["manifest.json"]  # they differ in created_by
    assert ours == golden
