"""validate: what it says about sound and unsound data (damage byte by byte is in tests/faults)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import DatasetWriter, validate
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.memmap_v1 import validate as shard_content
from megatron_packed_sft.storage.registry import storage_named
from megatron_packed_sft.support import json_document
from tests.packed_bins import make_bins, write_shard

ROWS = make_bins(30, 16, seed=2)


def write_dataset(path: Path) -> None:
    with DatasetWriter(path) as dataset:
        for split, number in (("train", 0), ("train", 1), ("validation", 0)):
            rows = ROWS[number * 10 : number * 10 + 10]
            with dataset.shard_writer(split, number, num_bins=10, pack_size=16, vocab_size=1000) as writer:
                for index, row in enumerate(rows):
                    writer.write_bin(index, *row)
                writer.finalize()
        dataset.finalize(provenance={"seed": 2}, card="# Card\n")


def test_a_sound_shard_gives_counts_and_no_findings(tmp_path: Path) -> None:
    manifest = write_shard(tmp_path / "shard", ROWS, 16, vocab_size=1000)
    report = validate(tmp_path / "shard")
    assert report.ok
    assert (report.num_shards, report.num_bins, report.num_tokens) == (1, 30, manifest.num_tokens)
    assert report.num_loss_tokens == manifest.num_loss_tokens
    assert report.num_sequences == manifest.num_sequences
    assert report.num_bytes == sum(p.stat().st_size for p in (tmp_path / "shard").glob("*.npy"))
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


def test_a_directory_of_shards_and_a_dataset_are_validated_shard_by_shard(tmp_path: Path) -> None:
    for number in range(3):
        write_shard(tmp_path / "loose" / f"shard_{number}", ROWS[:4], 16)
    assert validate(tmp_path / "loose").num_shards == 3
    write_dataset(tmp_path / "dataset")
    report = validate(tmp_path / "dataset")
    assert report.ok, report.findings
    assert (report.num_shards, report.num_bins) == (3, 30)


def test_rows_are_checked_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(tmp_path / "shard", ROWS, 16)
    for size in (1, 100, 333, 1 << 20):
        monkeypatch.setattr(shard_content, "_BLOCK_BYTES", size)
        report = validate(tmp_path / "shard")
        assert report.ok
        assert report.num_tokens == sum(len(row.input_ids) for row in ROWS)


def test_findings_beyond_the_limit_are_counted_and_not_kept(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", ROWS, 16)
    mask = np.load(tmp_path / "shard" / "loss_mask.npy", mmap_mode="r+")
    mask[:] = 9
    mask.flush()
    report = validate(tmp_path / "shard", max_findings=5)
    assert len(report.findings) == 5
    assert report.num_findings == 30 + 1  # every bin, and the file's checksum


def test_structure_does_not_read_the_rows_and_full_does(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", ROWS, 16)
    path = tmp_path / "shard" / "input_ids.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert validate(tmp_path / "shard", level="structure").ok
    [finding] = [f for f in validate(tmp_path / "shard").findings if "checksum" in f.message]
    assert finding.file == str(path)


def test_a_missing_path_and_an_unknown_level_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="nothing does not exist; check the path"):
        validate(tmp_path / "nothing")
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "photos").mkdir()
    with pytest.raises(
        InvalidInputError, match=r"is not packed data: it holds no dataset\.json and no shard"
    ) as raised:
        validate(tmp_path)
    assert "remove" not in str(raised.value)
    with pytest.raises(InvalidInputError, match="use one of structure, full"):
        validate(tmp_path, level="deep")  # type: ignore[arg-type]


def test_totals_in_dataset_json_are_compared_with_the_shards(tmp_path: Path) -> None:
    write_dataset(tmp_path / "dataset")
    path = tmp_path / "dataset" / "dataset.json"
    document = json.loads(path.read_text())
    document["splits"]["train"]["num_tokens"] += 1
    path.write_bytes(json_document.render(document))
    [finding] = validate(tmp_path / "dataset").findings
    assert finding.field == "num_tokens"
    assert "splits.train.num_tokens" in finding.message


# reliability.md row 14: each row = (field, where, value, what the finding says).
@pytest.mark.parametrize(
    ("name", "where", "value", "says"),
    [
        ("packed_len", 3, 0, "packed_len is 0, not in 1..16"),
        ("packed_len", 3, 17, "packed_len is 17, not in 1..16"),
        ("seq_offsets", 0, 1, "begins with 1, not 0"),
        ("seq_offsets", 4, 0, "decreases after this bin"),
        ("seq_offsets", -1, 10**6, "but there are"),
        ("seq_starts", "first of row 3", 1, "seq_starts begin with 1, not 0"),
        ("seq_starts", "last of row 3", 16, "is not below its length"),
        ("loss_mask", (3, 0), 2, "loss_mask is 2 at position 0, not 0 or 1"),
        ("loss_mask", "end of row 3", 1, "the last token of a sequence"),
        ("loss_mask", "padding of row 3", 1, "is not 0 in the padding"),
        ("input_ids", (3, 0), 1000, "input_ids is 1000 at position 0, not in 0..999"),
        ("input_ids", (3, 0), -5, "input_ids is -5 at position 0, not in 0..999"),
        ("input_ids", "padding of row 3", 8, "is 8 in the padding"),
    ],
)
def test_every_broken_invariant_is_found_with_row_and_field(
    name: str, where: object, value: int, says: str, tmp_path: Path
) -> None:
    rows = [row for row in make_bins(60, 16, seed=4) if 4 < len(row.input_ids) < 14 and row.num_sequences > 1][:6]
    write_shard(tmp_path / "shard", rows, 16, vocab_size=1000, dtype=np.int32)
    assert validate(tmp_path / "shard").ok
    length = len(rows[3].input_ids)
    offset = sum(row.num_sequences for row in rows[:3])
    place = {
        "first of row 3": offset,
        "last of row 3": offset + rows[3].num_sequences - 1,
        "end of row 3": (3, length - 1),
        "padding of row 3": (3, length),
    }.get(where, where)  # type: ignore[call-overload]
    array = np.load(tmp_path / "shard" / f"{name}.npy", mmap_mode="r+")
    array[place] = value
    array.flush()
    found = [finding for finding in validate(tmp_path / "shard").findings if says in finding.message]
    assert len(found) == 1
    assert found[0].field == name
    assert found[0].file.endswith(f"{name}.npy")
    assert found[0].bin is not None
    if name != "seq_offsets":
        assert found[0].bin == 3


def test_a_block_that_points_outside_its_starts_is_found_not_read() -> None:
    from megatron_packed_sft.storage.bins import find_violations

    block = BinBlock(
        np.zeros((2, 4), np.int32),
        np.zeros((2, 4), np.uint8),
        np.array([4, 4], np.uint32),
        np.array([0, 5, 4_000_000_000], np.uint32),
        np.array([0], np.uint32),
    )
    violations, _ = find_violations(block, vocab_size=10, pad_id=0)
    assert [violation.field for violation in violations] == ["seq_offsets", "seq_offsets"]


@pytest.mark.parametrize("storage", ["legacy", "parquet"])
def test_a_file_that_is_read_whole_is_opened_once(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DatasetWriter(tmp_path / "dataset", storage=storage) as dataset:
        with dataset.shard_writer("train", 0, num_bins=30, pack_size=16) as writer:
            for index, one in enumerate(ROWS):
                writer.write_bin(index, *one)
            writer.finalize()
        dataset.finalize()
    kind = type(storage_named(storage))
    opened = []
    real = kind.open
    monkeypatch.setattr(kind, "open", lambda self, path: opened.append(path) or real(self, path))
    assert validate(tmp_path / "dataset").ok
    assert len(opened) == 1


def edit_dataset(path: Path, **changes: object) -> None:
    """Change keys of a dataset.json, with a checksum that fits; None removes one."""
    document = json.loads((path / "dataset.json").read_text()) | changes
    document = {key: value for key, value in document.items() if value is not None}
    (path / "dataset.json").write_bytes(json_document.render(document))


@pytest.mark.parametrize("storage", ["memmap_v1", "legacy"])
def test_every_bit_of_the_card_and_of_files_beside_shards_is_covered(storage: str, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "dataset", storage=storage) as dataset:
        with dataset.shard_writer("train", 0, num_bins=1, pack_size=16) as writer:
            writer.write_bin(0, *ROWS[0])
            writer.finalize()
        dataset.finalize(card="# Card\n")
    assert validate(tmp_path / "dataset").ok
    names = ["README.md"] if storage == "memmap_v1" else ["README.md", "train/metadata.json"]
    for name in names:
        path = tmp_path / "dataset" / name
        content = path.read_bytes()
        for place in range(len(content)):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            [finding] = validate(tmp_path / "dataset").findings
            assert finding.file == str(path)
            assert "was changed: it is not the file that dataset.json lists" in finding.message
        path.write_bytes(content + b" ")
        assert len(validate(tmp_path / "dataset", level="structure").findings) == 1
        path.unlink()
        [finding] = validate(tmp_path / "dataset", level="structure").findings
        assert (finding.file, finding.message[:10]) == (str(path), "is missing")
        path.write_bytes(content)


def test_a_dataset_of_an_earlier_release_has_no_checksum_of_its_card(tmp_path: Path) -> None:
    write_dataset(tmp_path / "dataset")
    edit_dataset(tmp_path / "dataset", files=None)
    (tmp_path / "dataset" / "README.md").write_text("edited")
    assert validate(tmp_path / "dataset").ok


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "train/../../secret", "train/", "other/x", "x.html"])
def test_a_dataset_that_lists_files_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "dataset")
    edit_dataset(tmp_path / "dataset", files={name: {"bytes": 0, "checksum": 32 * "0"}})
    [finding] = validate(tmp_path / "dataset").findings
    assert f"files lists {name!r}, which is neither README.md nor a file beside shards" in finding.message


@pytest.mark.parametrize("name", ["train/shard_000001", "validation", "README.md"])
def test_a_part_of_a_dataset_that_lies_elsewhere_is_named_and_a_linked_dataset_is_fine(
    name: str, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "dataset")
    (tmp_path / "link").symlink_to("dataset")
    assert validate(tmp_path / "link").ok
    (tmp_path / "dataset" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "dataset" / name).symlink_to(tmp_path / "elsewhere")
    for level in ("structure", "full"):
        [finding] = validate(tmp_path / "dataset", level=level).findings  # type: ignore[arg-type]
        assert finding.file == str(tmp_path / "dataset" / name)
        assert f"is a symbolic link to {tmp_path}/elsewhere; a dataset holds its own files" in finding.message


def test_a_linked_card_of_an_earlier_release_is_named_and_an_own_one_is_fine(tmp_path: Path) -> None:
    write_dataset(tmp_path / "dataset")
    edit_dataset(tmp_path / "dataset", files=None)
    card = tmp_path / "dataset" / "README.md"
    card.unlink()
    assert validate(tmp_path / "dataset").ok
    card.symlink_to("/etc/hostname")
    [finding] = validate(tmp_path / "dataset").findings
    assert (finding.file, finding.message[:37]) == (str(card), "is a symbolic link to /etc/hostname; ")
    (tmp_path / "dataset" / "notes.txt").write_text("mine")
    stranger, _ = validate(tmp_path / "dataset").findings
    assert stranger.message == "is not part of the dataset; move it away"
