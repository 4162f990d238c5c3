"""manifest.json: typed, canonical, and kept whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_packed_sft import open_shard, validate
from megatron_packed_sft.errors import ManifestError, UnsupportedFormatError
from megatron_packed_sft.storage.memmap_v1.manifest import parse_manifest
from megatron_packed_sft.support import json_document
from tests.packed_bins import make_bins, write_shard


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


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    write_shard(tmp_path / "shard", make_bins(2, 8), 8)
    found: dict[str, Any] = json.loads((tmp_path / "shard" / "manifest.json").read_text())
    return found


def test_a_parsed_manifest_renders_to_the_same_bytes_and_keeps_unknown_keys(document: dict[str, Any]) -> None:
    data = json_document.render({**document, "from_the_future": {"a": [1, 2.5, None]}})
    again = parse_manifest(data, "manifest.json")
    assert again.extra["from_the_future"] == {"a": [1, 2.5, None]}
    assert again.to_bytes() == data


def test_an_edited_manifest_is_refused(document: dict[str, Any]) -> None:
    data = json_document.render({**document, "created_by": "someone"})
    with pytest.raises(ManifestError, match="damaged or edited: its self_checksum does not match"):
        parse_manifest(data.replace(b"someone", b"another"), "manifest.json")
    with pytest.raises(ManifestError, match="damaged or edited"):
        parse_manifest(data.replace(b",\n", b", \n", 1), "manifest.json")


@pytest.mark.parametrize("version", ["1.0", "1.2", "2.0"])
def test_another_version_is_refused_in_one_sentence(version: str, document: dict[str, Any]) -> None:
    data = json_document.render({**document, "version": version})
    problem = f"version is '{version}', and this release reads '1.1'; update megatron_packed_sft"
    with pytest.raises(UnsupportedFormatError, match=problem):
        parse_manifest(data, "manifest.json")


def test_a_manifest_without_its_own_checksum_is_refused(tmp_path: Path, document: dict[str, Any]) -> None:
    document["self_checksul"] = document.pop(json_document.SELF_CHECKSUM)  # a bit of its name has flipped
    (tmp_path / "shard" / "manifest.json").write_text(json.dumps(document))
    [finding] = validate(tmp_path / "shard").findings
    assert "self_checksum is missing" in finding.message
    with pytest.raises(ManifestError, match="self_checksum is missing; restore the file from the original"):
        open_shard(tmp_path / "shard")


def test_validate_says_that_the_vocabulary_was_not_recorded(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", make_bins(3, 8), 8)
    report = validate(tmp_path / "shard")
    assert report.ok
    [note] = report.notes
    assert "vocab_size was not recorded" in note


def test_recorded_totals_that_differ_from_the_arrays_are_findings(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", make_bins(2, 8), 8)
    path = tmp_path / "shard" / "manifest.json"
    document = json.loads(path.read_text())
    document["num_loss_tokens"] += 1
    path.write_bytes(json_document.render(document))
    [finding] = validate(tmp_path / "shard").findings
    assert finding.field == "num_loss_tokens"
    assert "the arrays say" in finding.message
