"""convert: rows stay equal, token by token, in every direction."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from megatron_packed_sft import PackedBin, convert, open_dataset, open_shard, validate
from megatron_packed_sft.errors import InvalidInputError, LegacyFormatError, TargetExistsError
from tests.packed_bins import assert_same_bins, bins, files_of, make_bins, write_shard

ROWS = make_bins(9, 32, seed=9)


def save_legacy(path: Path, rows: list[PackedBin]) -> None:
    """As Megatron-Bridge does: np.save of a list of dicts of lists."""
    data = [
        {
            "input_ids": row.input_ids.tolist(),
            "loss_mask": row.loss_mask.astype(bool).tolist(),
            "seq_start_id": row.seq_start_id.tolist(),
        }
        for row in rows
    ]
    np.save(path, np.array(data, dtype=object), allow_pickle=True)


def save_parquet(path: Path, rows: list[PackedBin], **columns: pa.Array) -> None:
    """As Megatron-Bridge does: int32 ids and starts, int8 masks."""
    table = {
        "input_ids": pa.array([row.input_ids.tolist() for row in rows], pa.list_(pa.int32())),
        "loss_mask": pa.array([row.loss_mask.tolist() for row in rows], pa.list_(pa.int8())),
        "seq_start_id": pa.array([row.seq_start_id.tolist() for row in rows], pa.list_(pa.int32())),
        **columns,
    }
    pq.write_table(pa.table(table), path, row_group_size=4)


def load_legacy(path: Path) -> list[PackedBin]:
    """As Megatron-Bridge does, with real unpickling."""
    rows = np.load(path, allow_pickle=True)
    return [
        PackedBin(np.array(row["input_ids"]), np.array(row["loss_mask"]), np.array(row["seq_start_id"])) for row in rows
    ]


@settings(max_examples=25, deadline=None)
@given(packed=bins())
def test_legacy_to_memmap_and_back_is_equal_element_by_element(packed) -> None:
    pack_size, rows = packed
    with tempfile.TemporaryDirectory() as home:
        save_legacy(Path(home, "a.npy"), rows)
        report = convert(f"{home}/a.npy", f"{home}/shard", pack_size=pack_size)
        assert report.pack_size == pack_size
        assert_same_bins(open_shard(f"{home}/shard"), rows)
        assert validate(f"{home}/shard").ok
        convert(f"{home}/shard", f"{home}/b.npy", to="legacy")
        assert_same_bins(load_legacy(Path(home, "b.npy")), rows)
        assert_same_bins(open_shard(f"{home}/b.npy"), rows)


def test_parquet_to_memmap_is_equal_over_row_groups(tmp_path: Path) -> None:
    save_parquet(tmp_path / "a.idx.parquet", ROWS)
    report = convert(tmp_path / "a.idx.parquet", tmp_path / "shard", vocab_size=50_000, pad_id=3)
    assert (report.num_bins, report.num_tokens) == (9, sum(len(row.input_ids) for row in ROWS))
    shard = open_shard(tmp_path / "shard")
    assert_same_bins(shard, ROWS)
    assert shard.manifest.pad_id == 3
    assert shard.manifest.vocab_size == 50_000
    assert validate(tmp_path / "shard").ok


def test_the_pack_size_is_derived_given_grown_or_refused(tmp_path: Path) -> None:
    save_legacy(tmp_path / "a.npy", ROWS)
    longest = max(len(row.input_ids) for row in ROWS)
    assert convert(tmp_path / "a.npy", tmp_path / "derived").pack_size == longest
    assert convert(tmp_path / "a.npy", tmp_path / "given", pack_size=64).pack_size == 64
    grown = convert(tmp_path / "a.npy", tmp_path / "grown", pack_size=16)
    assert (grown.pack_size, grown.asked_pack_size) == (longest, 16)
    assert_same_bins(open_shard(tmp_path / "grown"), ROWS)
    with pytest.raises(InvalidInputError, match=f"has a bin of {longest} tokens, longer than pack_size 16"):
        convert(tmp_path / "a.npy", tmp_path / "refused", pack_size=16, overlong="error")
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("save", [save_legacy, save_parquet])
def test_masks_at_the_last_token_of_a_sequence_are_cleared_and_counted(save, tmp_path: Path) -> None:
    mask = np.array([0, 1, 1, 1, 1], np.uint8)
    name = "a.npy" if save is save_legacy else "a.parquet"
    save(tmp_path / name, [PackedBin(np.arange(5), mask, np.array([0, 3]))])
    report = convert(tmp_path / name, tmp_path / "shard")
    assert report.num_cleared_masks == 2
    assert open_shard(tmp_path / "shard")[0].loss_mask.tolist() == [0, 1, 0, 1, 0]


def test_many_files_become_a_dataset_and_a_dataset_becomes_many_files(tmp_path: Path) -> None:
    for number in range(3):
        save_legacy(tmp_path / f"part_{number}.npy", ROWS[number * 3 : number * 3 + 3])
    report = convert(str(tmp_path / "part_*.npy"), tmp_path / "dataset", split="validation")
    assert report.num_files == 3
    dataset = open_dataset(tmp_path / "dataset")
    shards = dataset.open_shards("validation")
    assert len({shard.pack_size for shard in shards}) == 1
    assert_same_bins([row for shard in shards for row in shard], ROWS)
    assert validate(tmp_path / "dataset").ok
    convert(tmp_path / "dataset", tmp_path / "files", to="legacy_npy_pickle")
    names = sorted((tmp_path / "files" / "validation").iterdir())
    assert [path.name for path in names] == ["metadata.json", *(f"shard_00000{number}.npy" for number in range(3))]
    assert_same_bins([row for path in names[1:] for row in load_legacy(path)], ROWS)


def test_a_directory_a_list_and_a_mixture_of_formats_are_sources(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_legacy(tmp_path / "in" / "a.npy", ROWS[:3])
    save_parquet(tmp_path / "in" / "b.parquet", ROWS[3:])
    for number, sources in enumerate(
        (tmp_path / "in", [tmp_path / "in" / "a.npy", str(tmp_path / "in" / "b.parquet")])
    ):
        convert(sources, tmp_path / f"dataset_{number}")
        shards = open_dataset(tmp_path / f"dataset_{number}").open_shards("train")
        assert_same_bins([row for shard in shards for row in shard], ROWS)
    assert files_of(tmp_path / "dataset_0") == files_of(tmp_path / "dataset_1")


def test_nothing_is_published_when_one_of_many_files_is_broken(tmp_path: Path) -> None:
    save_legacy(tmp_path / "a.npy", ROWS)
    (tmp_path / "b.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-7])
    with pytest.raises(LegacyFormatError, match=r"b\.npy"):
        convert([tmp_path / "a.npy", tmp_path / "b.npy"], tmp_path / "dataset")
    assert sorted(os.listdir(tmp_path)) == ["a.npy", "b.npy"]


def test_an_existing_target_is_refused_or_replaced(tmp_path: Path) -> None:
    save_legacy(tmp_path / "a.npy", ROWS)
    convert(tmp_path / "a.npy", tmp_path / "shard")
    with pytest.raises(TargetExistsError):
        convert(tmp_path / "a.npy", tmp_path / "shard")
    convert(tmp_path / "a.npy", tmp_path / "shard", overwrite=True, pack_size=100)
    assert open_shard(tmp_path / "shard").pack_size == 100


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"sources": "nothing.npy"}, "does not exist and matches nothing"),
        ({"sources": []}, "nothing to convert"),
        ({"sources": "README.txt"}, "is not packed data of a known storage"),
        ({"to": "zarr"}, "storage 'zarr' is unknown; use one of memmap_v1, legacy, parquet"),
        ({"to": "legacy"}, "is already legacy; choose another storage with --to"),
        ({"sources": "shard"}, "is already memmap_v1"),
        ({"overlong": "cut"}, "overlong is 'cut'; use 'grow' or 'error'"),
        ({"pack_size": 0}, "pack_size is 0"),
        ({"vocab_size": 5}, r"a\.npy: .*bin 0: input_ids is \d+ at position"),
        ({"sources": "empty"}, "is not packed data of a known storage"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    arguments: dict[str, object], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_legacy(tmp_path / "a.npy", ROWS)
    write_shard(tmp_path / "shard", ROWS, 32)
    (tmp_path / "README.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInputError, match=sentence):
        convert(**{"sources": "a.npy", "target": "out", **arguments})  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"input_ids": pa.array([[-1], [2]])}, "bin 0: input_ids is -1 at position 0"),
        ({"loss_mask": pa.array([[0], [2]])}, "bin 1: loss_mask is 2 at position 0"),
        ({"loss_mask": pa.array([[0], [0, 0]])}, "bin 1: loss_mask has 2 entries, but input_ids has 1"),
        ({"input_ids": pa.array([[0.5], [0.5]])}, "column input_ids is list.* not lists of integers"),
        ({"input_ids": pa.array([1, 2])}, "column input_ids is int64, not lists of integers"),
        ({"seq_start_id": pa.array([[0], None], pa.list_(pa.int32()))}, "column seq_start_id has empty"),
        ({"seq_start_id": pa.array([[0], []], pa.list_(pa.int32()))}, "bin 1: seq_start_id is empty"),
        ({"seq_start_id": pa.array([[0], [3]])}, "bin 1: seq_start_id does not rise from 0"),
    ],
)
def test_unsound_parquet_is_refused_with_row_and_column(columns, sentence: str, tmp_path: Path) -> None:
    rows = [PackedBin(np.array([1]), np.array([0]), np.array([0]))] * 2
    save_parquet(tmp_path / "a.parquet", rows, **columns)
    with pytest.raises((LegacyFormatError, InvalidInputError), match=sentence):
        convert(tmp_path / "a.parquet", tmp_path / "shard")


def test_what_is_no_packed_parquet_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "text.parquet")
    with pytest.raises(LegacyFormatError, match="has no column input_ids; it is not packed SFT data"):
        convert(tmp_path / "text.parquet", tmp_path / "shard")
    (tmp_path / "no.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(LegacyFormatError, match="cannot be read as Parquet"):
        convert(tmp_path / "no.parquet", tmp_path / "shard")
    save_parquet(tmp_path / "empty.parquet", [])
    with pytest.raises(LegacyFormatError, match="holds no bins"):
        convert(tmp_path / "empty.parquet", tmp_path / "shard")
