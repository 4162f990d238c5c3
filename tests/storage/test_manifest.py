"""manifest.json: typed, canonical, and kept whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_packed_sft import open_shard, validate
from megatron_packed_sft.errors import ManifestError
from megatron_packed_sft.storage.memmap_v1.manifest import ShardManifest, parse_manifest
from megatron_packed_sft.support import json_document
from tests.packed_bins import make_bins, write_seed_shard, write_shard

GOLDEN = Path(__file__).parents[1] / "golden"


def test_the_manifest_has_one_line_per_key_sorted_and_ends_with_a_newline(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", make_bins(2, 8), 8, vocab_size=1000, tokenizer={"name": "t", "fingerprint": "f"})
    text = (tmp_path / "shard" / "manifest.json").read_text()
    keys = [line.split('"')[1] for line in text.splitlines()[1:-1]]
    assert keys == sorted(json.loads(text))
    assert text.endswith("\n}\n")


def test_the_manifest_holds_every_key_of_the_format(tmp_path: Path) -> None:
    write_shard(
        tmp_path / "shard",
        make_bins(2, 8),
        8,
        vocab_size=1000,
        tokenizer={"name": "t", "fingerprint": "f"},
        chat_template_fingerprint="c",
        plan_fingerprint="p",
    )
    assert set(json.loads((tmp_path / "shard" / "manifest.json").read_text())) == {
        *("version", "format", "num_bins", "pack_size", "dtype", "loss_mask_dtype", "index_dtype", "bins_written"),
        *("files", "checksum_algorithm", "num_sequences", "num_tokens", "num_loss_tokens", "max_seqs_per_bin"),
        *("max_seq_len", "min_packed_len", "pad_id", "vocab_size", "tokenizer", "chat_template_fingerprint"),
        *("plan_fingerprint", "pad_seq_to_mult", "created_by", "self_checksum", "bin_checksum_algorithm"),
    }


def test_a_parsed_manifest_renders_to_the_same_bytes_and_keeps_unknown_keys() -> None:
    manifest = ShardManifest(num_bins=2, pack_size=8, dtype="<i4", extra={"from_the_future": {"a": [1, 2.5, None]}})
    again = parse_manifest(manifest.to_bytes(), "manifest.json")
    assert again.extra["from_the_future"] == {"a": [1, 2.5, None]}
    assert again.to_bytes() == manifest.to_bytes()


def test_an_edited_manifest_is_refused() -> None:
    data = ShardManifest(num_bins=2, pack_size=8, dtype="<i4", created_by="someone").to_bytes()
    with pytest.raises(ManifestError, match="damaged or edited: its self_checksum does not match"):
        parse_manifest(data.replace(b"someone", b"another"), "manifest.json")
    with pytest.raises(ManifestError, match="damaged or edited"):
        parse_manifest(data.replace(b",\n", b", \n", 1), "manifest.json")


def test_a_seed_only_shard_opens_and_validate_says_what_it_could_not_check(tmp_path: Path) -> None:
    write_seed_shard(tmp_path / "shard", make_bins(3, 8), 8)
    manifest = open_shard(tmp_path / "shard").manifest
    assert manifest.files is None
    assert manifest.vocab_size is None
    report = validate(tmp_path / "shard")
    assert report.ok
    assert any("without checksums" in note for note in report.notes)
    assert any("vocab_size was not recorded" in note for note in report.notes)
    assert any("pad_id was not recorded" in note for note in report.notes)


@pytest.mark.parametrize("kind", ["memmap_1_0_i4", "memmap_1_1_checksums"])
def test_a_manifest_with_checksums_but_without_its_own_is_a_finding_and_from_1_1_on_refused(
    kind: str, tmp_path: Path
) -> None:
    shutil.copytree(GOLDEN / kind, tmp_path / "shard")
    path = tmp_path / "shard" / "manifest.json"
    document = json.loads(path.read_text())
    document["self_checksul"] = document.pop(json_document.SELF_CHECKSUM)  # a bit of its name has flipped
    path.write_text(json.dumps(document))
    [finding] = validate(tmp_path / "shard").findings
    assert "self_checksum is missing" in finding.message
    if kind == "memmap_1_0_i4":
        assert len(open_shard(tmp_path / "shard")[0].input_ids)
    else:
        with pytest.raises(ManifestError, match="self_checksum is missing; restore the file from the original"):
            open_shard(tmp_path / "shard")


def test_recorded_totals_that_differ_from_the_arrays_are_findings(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", make_bins(2, 8), 8)
    path = tmp_path / "shard" / "manifest.json"
    document = json.loads(path.read_text())
    document["num_loss_tokens"] += 1
    path.write_bytes(json_document.render(document))
    [finding] = validate(tmp_path / "shard").findings
    assert finding.field == "num_loss_tokens"
    assert "the arrays say" in finding.message
