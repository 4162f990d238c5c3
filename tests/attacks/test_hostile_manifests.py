"""reliability.md rows 12, 13 and 15: manifests and files that want something else than to be read."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_packed_sft import open_dataset, open_shard, validate
from megatron_packed_sft.errors import ManifestError, PackedSFTError, ShardError, ShardFileError, UnsupportedFormatError
from megatron_packed_sft.storage.interface import VERIFY, ReadOptions
from megatron_packed_sft.storage.memmap_v1.manifest import ARRAY_FILES
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.json_document import MANIFEST
from tests.packed_bins import make_bins, write_shard

KEYS = ("version", "format", "num_bins", "pack_size", "dtype", "loss_mask_dtype", "index_dtype", "bins_written")


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    write_shard(tmp_path / "shard", make_bins(3, 8), 8)
    return tmp_path / "shard"


def put(shard: Path, text: str | bytes) -> None:
    (shard / "manifest.json").write_bytes(text.encode() if isinstance(text, str) else text)


def document_of(shard: Path) -> dict[str, Any]:
    """The manifest as an attacker takes it: without the checksum, which is made again."""
    document: dict[str, Any] = json.loads((shard / "manifest.json").read_text())
    del document["self_checksum"]
    return document


def test_duplicate_keys_are_refused(shard: Path) -> None:
    put(shard, json.dumps(document_of(shard))[:-1] + ', "num_bins": 3}')
    with pytest.raises(ManifestError, match="has the key 'num_bins' twice"):
        open_shard(shard)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_no_json_are_refused(constant: str, shard: Path) -> None:
    put(shard, json.dumps(document_of(shard))[:-1] + f', "note": {constant}}}')
    with pytest.raises(ManifestError, match=f"contains {constant}"):
        open_shard(shard)


@pytest.mark.parametrize("key", ["num_bins", "pack_size", "bins_written"])
@pytest.mark.parametrize("value", [-1, 0, 2**31, 2**63, 10**400, 1.5, "3", True, None, [3], {}])
def test_numbers_out_of_range_and_of_other_types_are_refused(key: str, value: Any, shard: Path) -> None:
    put(shard, json_document.render({**document_of(shard), key: value}))
    with pytest.raises(ShardError, match=r"manifest.json"):
        open_shard(shard)


def test_more_digits_than_an_integer_may_have_are_refused(shard: Path) -> None:
    put(shard, json.dumps(document_of(shard)).replace('"num_bins": 3', '"num_bins": ' + "9" * 5000))
    with pytest.raises(ManifestError, match="not valid JSON"):
        open_shard(shard)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", '"x"', "{", "{}", "[" * 100_000, '{"a":' * 50_000, "\ufeff{}", b"\xff\xfe", b"\0" * 100]
)
def test_what_is_no_json_object_is_refused(text: str | bytes, shard: Path) -> None:
    put(shard, text)
    with pytest.raises(ManifestError):
        open_shard(shard)


def test_a_huge_manifest_is_refused_before_it_is_read(shard: Path) -> None:
    with open(shard / "manifest.json", "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ManifestError, match="has 1,073,741,824 bytes, more than the 1,048,576 allowed"):
        open_shard(shard)


@pytest.mark.parametrize(
    "name", ["../input_ids.npy", "/etc/passwd", "a\0b", "input_ids.npy/../x", "", "manifest.json", "INPUT_IDS.npy"]
)
def test_names_other_than_the_five_fixed_ones_are_refused(name: str, tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", make_bins(3, 8), 8)
    path = tmp_path / "shard" / "manifest.json"
    document = json.loads(path.read_text())
    document["files"][name] = document["files"].pop("input_ids.npy")
    path.write_bytes(json_document.render(document))
    with pytest.raises(ManifestError, match=r"files must list exactly input_ids\.npy"):
        open_shard(tmp_path / "shard")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checksum_algorithm", "md5"),
        ("checksum_algorithm", None),
        ("files", None),
        ("files", []),
        ("tokenizer", "name"),
        ("created_by", "a\0b"),
        ("created_by", ["x"]),
        ("plan_fingerprint", "line\nbreak"),
        ("vocab_size", 0),
        ("vocab_size", 2**31 + 1),
        ("pad_id", -1),
        ("num_sequences", 2),
        ("num_tokens", 10**9),
        ("num_loss_tokens", -1),
        ("max_seq_len", 9),
    ],
)
def test_values_outside_their_meaning_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", make_bins(3, 8), 8)
    path = tmp_path / "shard" / "manifest.json"
    path.write_bytes(json_document.render(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ManifestError, match=key if value is not None else "is missing"):
        open_shard(tmp_path / "shard")


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"bytes": -1, "checksum": "0" * 32}, "bytes is -1"),
        ({"bytes": 2**63, "checksum": "0" * 32}, "bytes"),
        ({"bytes": 10, "checksum": "0" * 31}, "checksum"),
        ({"bytes": 10, "checksum": "Z" * 32}, "checksum"),
        ({"bytes": 10}, "checksum"),
        ("0" * 32, "is not an object"),
    ],
)
def test_file_records_of_another_form_are_refused(record: Any, says: str, tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", make_bins(3, 8), 8)
    path = tmp_path / "shard" / "manifest.json"
    document = json.loads(path.read_text())
    document["files"]["loss_mask.npy"] = record
    path.write_bytes(json_document.render(document))
    with pytest.raises(ManifestError, match=f"loss_mask.npy.*{says}"):
        open_shard(tmp_path / "shard")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", "2.0"),
        ("version", "1.0"),
        ("bin_checksum_algorithm", "crc32"),
        ("format", "memmap_ragged_v1"),
        ("dtype", ">i4"),
        ("dtype", "<i8"),
        ("dtype", "|O"),
        ("loss_mask_dtype", "<f4"),
        ("index_dtype", ">u4"),
        ("index_dtype", "<u8"),
    ],
)
def test_another_version_dtype_or_byte_order_is_one_clear_error(key: str, value: str, shard: Path) -> None:
    put(shard, json_document.render({**document_of(shard), key: value}))
    with pytest.raises(UnsupportedFormatError, match=f"{key} is '{value}'".replace("|", r"\|")):
        open_shard(shard)


@pytest.mark.parametrize("name", [*ARRAY_FILES, MANIFEST])
def test_symbolic_links_directories_and_pipes_in_place_of_a_file_are_refused(name: str, shard: Path) -> None:
    (shard / name).rename(shard.parent / "aside")
    (shard / name).symlink_to(shard.parent / "aside")
    with pytest.raises(ShardFileError, match=f"{name} is a symbolic link"):
        open_shard(shard)
    (shard / name).unlink()
    (shard / name).mkdir()
    with pytest.raises(ShardFileError, match=f"{name} is not a regular file"):
        open_shard(shard)
    (shard / name).rmdir()
    os.mkfifo(shard / name)
    with pytest.raises(ShardFileError, match=f"{name} is not a regular file"):
        open_shard(shard)


@pytest.mark.parametrize(
    "change",
    [
        {"splits": {"../train": {}}},
        {"splits": {"train": {"shards": [{"name": "../../etc", "num_bins": 1, "manifest_checksum": "0" * 32}]}}},
        {"splits": {"train": {"shards": [{"name": "/etc", "num_bins": 1, "manifest_checksum": "0" * 32}]}}},
        {"splits": {"train": {"shards": [{"name": "a\0", "num_bins": 1, "manifest_checksum": "0" * 32}]}}},
        {"splits": {"train": {"shards": [{"name": "a", "num_bins": 0, "manifest_checksum": "0" * 32}]}}},
        {"splits": {"train": {"shards": [{"name": "a", "num_bins": 1, "manifest_checksum": "0"}]}}},
        {"splits": {"train": {"shards": [{"name": "a", "num_bins": 1, "manifest_checksum": "0" * 32}] * 2}}},
        {"splits": {"train": {"shards": ["a"]}}},
        {"splits": {"train": []}},
        {"splits": {}},
        {"splits": None},
        {"version": "9"},
        {"format": "other"},
    ],
)
def test_a_hostile_dataset_json_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    document = {"format": "packed_sft_dataset_v1", "version": "1.0", "splits": {}, **change}
    (tmp_path / "dataset.json").write_bytes(json_document.render(document))
    with pytest.raises(ShardError, match=r"dataset.json"):
        open_dataset(tmp_path)
    assert not validate(tmp_path).ok


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(change=st.dictionaries(st.sampled_from([*KEYS, "files", "num_sequences", "pad_id", "x"]), json_values))
def test_any_manifest_gives_a_shard_or_one_of_our_errors(change: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as home:
        shard = Path(home, "shard")
        write_shard(shard, make_bins(3, 8), 8)
        put(shard, json_document.render({**document_of(shard), **change}))
        read_or_refuse(shard)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from([*ARRAY_FILES, MANIFEST]),
    position=st.floats(0, 1),
    patch=st.binary(max_size=12),
)
def test_any_bytes_in_any_file_give_rows_or_one_of_our_errors(name: str, position: float, patch: bytes) -> None:
    with tempfile.TemporaryDirectory() as home:
        shard = Path(home, "shard")
        write_shard(shard, make_bins(3, 8), 8)
        data = bytearray((shard / name).read_bytes())
        start = int(position * len(data))
        data[start : start + len(patch)] = patch
        (shard / name).write_bytes(data)
        read_or_refuse(shard)
        validate(shard)


def read_or_refuse(path: Path) -> None:
    for verify in VERIFY:  # without the checksums, too, damage leads nowhere
        _read_or_refuse(path, verify)


def _read_or_refuse(path: Path, verify: str) -> None:
    try:
        shard = open_shard(path)
        shard.read_with(ReadOptions(verify))
        for index in range(len(shard)):
            row = shard[index]
            assert len(row.input_ids) == len(row.loss_mask) <= shard.pack_size
            assert np.all(row.seq_start_id[-1:] < len(row.input_ids))
    except PackedSFTError as error:
        assert "\n" not in str(error)
