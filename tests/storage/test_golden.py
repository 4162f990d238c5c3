"""reliability.md row 23: golden files of every format version are read the same forever."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import PackedBin, create_sft_dataset, open_shard, open_token_store, pack, validate
from megatron_packed_sft.errors import UnsupportedFormatError
from megatron_packed_sft.tokens import manifest as part_manifest
from megatron_packed_sft.tokens.validate import validate_token_store
from megatron_packed_sft.tokens.writer import TokenPartWriter
from tests.golden.make_golden import BINS, PACK_SIZE, PAD_ID, SEQUENCES, WEIGHTS
from tests.packed_bins import assert_same_bins, files_of, write_shard

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = [PackedBin(*(np.array(field) for field in row)) for row in BINS]
WEIGHTED = [row._replace(loss_mask=np.array(weights, np.float32)) for row, weights in zip(ROWS, WEIGHTS, strict=True)]


SHARDS = ("memmap_1_1_checksums", "memmap_1_1_weighted_checksums")


@pytest.mark.parametrize("name", SHARDS)
def test_golden_shards_are_read_the_same(name: str) -> None:
    shard = open_shard(GOLDEN / name)
    assert shard.pack_size == PACK_SIZE
    assert_same_bins(shard, WEIGHTED if "weighted" in name else ROWS)
    report = validate(GOLDEN / name)
    assert report.ok, report.findings
    assert not report.notes


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


STORES = ("token_store_1_2", "token_store_1_2_weighted")


@pytest.mark.parametrize("name", STORES)
def test_golden_token_stores_are_read_the_same(name: str) -> None:
    store = open_token_store(GOLDEN / name)
    for index, (ids, train, weights) in enumerate(SEQUENCES):
        assert [one.tolist() for one in store[index]] == [ids, train]
        assert store.weighted(index)[1].tolist() == (weights if "weighted" in name else train)
    report = validate_token_store(GOLDEN / name)
    assert report.ok, report.findings
    planned = create_sft_dataset(GOLDEN / name, 2, plan=pack(store.lengths, pack_size=8))
    assert sorted(planned[0]["input_ids"].tolist()) == sorted(token for ids, _, _ in SEQUENCES for token in ids)


@pytest.mark.parametrize(("name", "vocab_size"), [("token_store_1_2", 100), ("token_store_1_2_weighted", 100_000)])
def test_our_writer_gives_the_bytes_of_golden_token_stores(name: str, vocab_size: int, tmp_path: Path) -> None:
    with TokenPartWriter(
        tmp_path / "part",
        vocab_size=vocab_size,
        tokenizer={"name": "golden", "fingerprint": "0123"},
        chat_template_fingerprint="4567",
    ) as writer:
        for ids, train, weights in SEQUENCES:
            writer.append(ids, train, weights if "weighted" in name else None)
        manifest = json.loads(json.dumps(writer.finalize().to_json()))
    ours, golden = files_of(tmp_path / "part"), files_of(GOLDEN / name / "part_000000")
    theirs = json.loads(golden["manifest.json"])
    assert theirs.keys() == manifest.keys() | {"self_checksum"}
    assert all(manifest[key] == theirs[key] for key in manifest if key != "created_by")
    del ours["manifest.json"], golden["manifest.json"]  # they differ in created_by
    assert ours == golden


@pytest.mark.parametrize("known", ["1.1", "2.0"])
def test_a_token_store_of_another_version_is_refused(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_manifest, "VERSION", known)
    with pytest.raises(UnsupportedFormatError, match=rf"version '1\.2' is not token_store_v1 {known}"):
        open_token_store(GOLDEN / STORES[0])
