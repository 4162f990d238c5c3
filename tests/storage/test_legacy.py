"""The legacy reader: what NumPy, Megatron-Bridge and NeMo write is read equal, all else is refused by name."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft.errors import InvalidInputError, LegacyFormatError, StorageIOError
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.storage.legacy import storage as legacy_storage
from megatron_packed_sft.storage.legacy.storage import LegacyShard
from tests.packed_bins import assert_same_bins, bins, block_of, make_bins

PROTOCOLS = (2, 3, 4, 5)
Row = dict[str, Any]


def as_rows(packed: list[PackedBin]) -> list[Row]:
    """Bins as Megatron-Bridge has them before it saves: dicts of lists."""
    names = ("input_ids", "loss_mask", "seq_start_id")
    return [dict(zip(names, (field.tolist() for field in row), strict=True)) for row in packed]


def npy_bytes(rows: list[Any], pickled: bytes) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|O", "fortran_order": False, "shape": (len(rows),)})
    return buffer.getvalue() + pickled


def object_array(rows: list[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


def save(path: Path, rows: list[Any], protocol: int) -> Path:
    path.write_bytes(npy_bytes(rows, pickle.dumps(object_array(rows), protocol)))
    return path


def under_old_names(pickled: bytes) -> bytes:
    """The same pickle as NumPy 1 writes it: numpy.core instead of numpy._core, with all lengths right."""
    text = pickled.replace(b"cnumpy._core.", b"cnumpy.core.")
    text = text.replace(b"\x16numpy._core.multiarray", b"\x15numpy.core.multiarray")
    text = text.replace(b"\x13numpy._core.numeric", b"\x12numpy.core.numeric")
    if pickled[2] == 0x95:
        frame = int.from_bytes(pickled[3:11], "little") - (len(pickled) - len(text))
        text = text[:3] + frame.to_bytes(8, "little") + text[11:]
    return text


def assert_reads(path: Path, rows: list[Row]) -> None:
    expected = [
        PackedBin(*(np.asarray(row[name]).astype(np.int64) for name in ("input_ids", "loss_mask", "seq_start_id")))
        for row in rows
    ]
    assert_same_bins(LegacyShard(path), expected)


@settings(max_examples=40, deadline=None)
@given(drawn=bins(vocab_size=2**31), protocol=st.sampled_from(PROTOCOLS))
def test_lists_saved_with_any_protocol_are_read_equal(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[int, list[PackedBin]], protocol: int
) -> None:
    path = tmp_path_factory.mktemp("legacy") / "packed.npy"
    assert_reads(save(path, as_rows(drawn[1]), protocol), as_rows(drawn[1]))


@settings(max_examples=40, deadline=None)
@given(
    drawn=bins(vocab_size=100),
    protocol=st.sampled_from(PROTOCOLS),
    dtypes=st.tuples(*[st.sampled_from(["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])] * 3),
    is_old=st.booleans(),
    is_strided=st.booleans(),
)
def test_arrays_of_any_integer_width_are_read_equal(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[int, list[PackedBin]],
    protocol: int,
    dtypes: tuple[str, str, str],
    is_old: bool,
    is_strided: bool,
) -> None:
    rows = as_rows(drawn[1])
    arrays = [{key: np.array(row[key], dtype) for key, dtype in zip(row, dtypes, strict=True)} for row in rows]
    if is_strided:
        arrays = [{key: np.repeat(value, 2)[::2] for key, value in row.items()} for row in arrays]
    pickled = pickle.dumps(object_array(arrays), protocol)
    path = tmp_path_factory.mktemp("legacy") / "packed.npy"
    path.write_bytes(npy_bytes(rows, under_old_names(pickled) if is_old else pickled))
    assert_reads(path, rows)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_pickles_under_the_old_module_names_load_in_numpy_and_here(tmp_path: Path, protocol: int) -> None:
    rows = as_rows(make_bins(3, 20))
    arrays = [{key: np.array(value, np.int32) for key, value in row.items()} for row in rows]
    old = under_old_names(pickle.dumps(object_array(arrays), protocol))
    assert b"numpy.core" in old
    assert b"numpy._core" not in old
    path = tmp_path / "old.npy"
    path.write_bytes(npy_bytes(rows, old))
    assert_reads(path, rows)
    if protocol < 5:  # NumPy 2 warns about numpy.core.numeric
        assert [row["input_ids"].tolist() for row in pickle.loads(old)] == [row["input_ids"] for row in rows]


def test_a_file_of_numpy_save_is_read_equal(tmp_path: Path) -> None:
    rows = as_rows(make_bins(2500, 12, vocab_size=200_000))
    np.save(tmp_path / "packed.npy", rows)  # as Megatron-Bridge calls it
    assert_reads(tmp_path / "packed.npy", rows)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_rows_longer_than_a_pickle_batch_and_a_pickle_frame_are_read_equal(tmp_path: Path, protocol: int) -> None:
    rng = np.random.default_rng(1)
    rows = []
    for length in (999, 1000, 1001, 2001, 70_000):
        ids = rng.integers(0, 2**31, length) >> rng.integers(0, 31, length)
        rows.append({"input_ids": ids.tolist(), "loss_mask": [0] * length, "seq_start_id": [0, length - 1]})
    assert_reads(save(tmp_path / "packed.npy", rows, protocol), rows)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_masks_of_bools_and_ints_mixed_as_bridge_makes_them_are_read_as_zero_and_one(
    tmp_path: Path, protocol: int
) -> None:
    chat = [*np.array([False, True, True, True]).tolist()[1:], False]
    padded = [*np.array([0, 1, 1, 0]).tolist()[1:], False]
    rows = [{"input_ids": [5, 6, 7, 8] * 2, "loss_mask": chat + padded, "seq_start_id": [0, 4]}]
    shard = LegacyShard(save(tmp_path / "packed.npy", rows, protocol))
    assert shard[0].loss_mask.tolist() == [1, 1, 1, 0, 1, 1, 0, 0]
    rows[0]["loss_mask"] = np.array(rows[0]["loss_mask"], bool)
    assert_reads(save(tmp_path / "packed.npy", rows, protocol), rows)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tuples_of_any_length_and_keys_in_any_order_are_read_equal(tmp_path: Path, protocol: int) -> None:
    rows = [
        {"seq_start_id": tuple(range(length)), "loss_mask": (0,) * length, "input_ids": tuple(range(length))}
        for length in (1, 2, 3, 4, 5, 64, 65, 3000)
    ]
    assert_reads(save(tmp_path / "packed.npy", rows, protocol), rows)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_lists_arrays_and_whole_rows_are_read_for_each_row(tmp_path: Path, protocol: int) -> None:
    mask, starts, ids = [1, 1, 0], np.array([0]), np.array([7, 8, 9], np.uint16)
    shared = {"input_ids": [1, 2, 3], "loss_mask": mask, "seq_start_id": starts}
    rows = [shared, {"input_ids": ids, "loss_mask": mask, "seq_start_id": starts}, shared]
    rows.append({"input_ids": mask, "loss_mask": mask, "seq_start_id": [0, 2]})
    rows.append({"input_ids": ids, "loss_mask": (0, 0, 0), "seq_start_id": (0,)})
    assert_reads(save(tmp_path / "packed.npy", rows, protocol), rows)


def test_integers_of_rare_opcodes_are_read(tmp_path: Path) -> None:
    """LONG1 of every length and the INT of protocol 0, which no NumPy writes for small numbers."""
    items = [b"\x8a\x00", b"\x8a\x01\x05", b"\x8a\x04\xff\xff\xff\x7f", b"\x8a\x05\x00\x00\x01\x00\x00", b"I01\n"]
    items += [b"I00\n", b"I123456\n"]
    rows = [{"input_ids": [11] * len(items), "loss_mask": [0] * len(items), "seq_start_id": [0]}]
    pickled = pickle.dumps(object_array(rows), 2)
    assert pickled.count(b"K\x0b" * len(items)) == 1
    path = tmp_path / "packed.npy"
    path.write_bytes(npy_bytes(rows, pickled.replace(b"K\x0b" * len(items), b"".join(items))))
    assert LegacyShard(path)[0].input_ids.tolist() == [0, 5, 2**31 - 1, 65536, 1, 0, 123456]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_npy_version_is_read(tmp_path: Path, version: tuple[int, int]) -> None:
    rows = as_rows(make_bins(2, 9))
    text = b"{'descr': '|O', 'fortran_order': False, 'shape': (2,), }\n"
    length = len(text).to_bytes(2 if version == (1, 0) else 4, "little")
    path = tmp_path / "packed.npy"
    path.write_bytes(b"\x93NUMPY" + bytes(version) + length + text + pickle.dumps(object_array(rows), 4))
    assert_reads(path, rows)


def test_the_shard_tells_its_totals_and_hands_out_read_only_arrays(tmp_path: Path) -> None:
    packed = make_bins(20, 30, vocab_size=5000)
    shard = LegacyShard(save(tmp_path / "packed.npy", as_rows(packed), 4))
    lengths = [len(row.input_ids) for row in packed]
    assert shard.path == tmp_path / "packed.npy"
    assert len(shard) == 20
    assert shard.packed_len.tolist() == lengths
    assert shard.packed_len.dtype == np.uint32
    assert shard.pack_size == max(lengths)
    assert shard.num_tokens == sum(lengths)
    assert shard.num_sequences == sum(len(row.seq_start_id) for row in packed)
    assert shard.vocab_bound == max(int(row.input_ids.max()) for row in packed) + 1
    assert shard.num_masks_at_sequence_end == 0
    assert [field.dtype.str for field in shard[3]] == ["<i4", "|u1", "<u4"]
    for array in [*shard[0], shard.packed_len]:
        assert not array.flags.writeable
    for index in (-1, 20):
        with pytest.raises(IndexError, match=f"bin {index} of "):
            shard[index]


@settings(max_examples=25, deadline=None)
@given(drawn=bins(), extra=st.integers(0, 5), pad_id=st.sampled_from([0, 1, 2**31 - 1]), data=st.data())
def test_a_block_is_the_padded_form_of_its_rows(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[int, list[PackedBin]],
    extra: int,
    pad_id: int,
    data: st.DataObject,
) -> None:
    rows = drawn[1]
    shard = LegacyShard(save(tmp_path_factory.mktemp("legacy") / "packed.npy", as_rows(rows), 4))
    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    width = shard.pack_size + extra
    expected = block_of(rows[start:stop], width, pad_id)
    block = shard.block(start, stop, width, pad_id)
    for name in ("input_ids", "loss_mask", "packed_len", "seq_offsets", "seq_starts"):
        found = getattr(block, name)
        assert found.dtype == getattr(expected, name).dtype
        np.testing.assert_array_equal(found, getattr(expected, name))


def test_a_block_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    rows = [{"input_ids": [1] * n, "loss_mask": [0] * n, "seq_start_id": [0]} for n in (3, 6, 4)]
    shard = LegacyShard(save(tmp_path / "packed.npy", rows, 4))
    assert shard.block(0, 3).input_ids.shape == (3, 6)
    assert shard.block(1, 1).input_ids.shape == (0, 6)
    assert shard.block(2, 3, width=4).input_ids.shape == (1, 4)
    with pytest.raises(InvalidInputError, match="bin 1 has 6 tokens, more than the width 5; use a width of at least 6"):
        shard.block(0, 3, width=5)
    with pytest.raises(InvalidInputError, match="pad_id is -1"):
        shard.block(0, 1, pad_id=-1)
    for start, stop in ((-1, 2), (2, 1), (0, 4)):
        with pytest.raises(IndexError, match=f"bins {start}:{stop} of "):
            shard.block(start, stop)


def test_masks_at_sequence_ends_are_kept_and_counted(tmp_path: Path) -> None:
    """What Bridge writes for data that is not chat: the mask continues over the last token."""
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [False, True, True, True, True], "seq_start_id": [0, 3]},
        {"input_ids": [1, 2], "loss_mask": [True, False], "seq_start_id": [0, 1]},
    ]
    shard = LegacyShard(save(tmp_path / "packed.npy", rows, 4))
    assert shard.num_masks_at_sequence_end == 3
    assert shard[0].loss_mask.tolist() == [0, 1, 1, 1, 1]
    assert shard.block(0, 2).loss_mask.tolist() == [[0, 1, 1, 1, 1], [1, 0, 0, 0, 0]]


OTHER = "holds something other than integers of up to 64 bits"
GOOD: Row = {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1, 0], "seq_start_id": [0, 2]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"loss_mask": [1, 0, 1]}, "bin 1: loss_mask has 3 entries, but input_ids has 4"),
        ({"loss_mask": [1, 0, 1, 0, 0]}, "bin 1: loss_mask has 5 entries, but input_ids has 4"),
        ({"loss_mask": [1, 0, 2, 0]}, r"bin 1: loss_mask is 2 at position 2, not in 0\.\.1"),
        ({"loss_mask": [1, 0, -1, 0]}, "bin 1: loss_mask is -1 at position 2"),
        ({"loss_mask": [1.0, 0.0, 1.0, 0.0]}, f"bin 1: loss_mask {OTHER}"),
        ({"loss_mask": [0] * 3000 + [0.5]}, f"bin 1: loss_mask {OTHER}"),
        ({"loss_mask": np.ones(4)}, r"refused: the pickle holds an array that is not of integers \('f8'\)"),
        ({"loss_mask": None}, "bin 1: loss_mask is not a list or an array of integers"),
        ({"loss_mask": []}, "bin 1: loss_mask is empty"),
        ({"input_ids": []}, "bin 1: input_ids is empty"),
        ({"input_ids": ()}, "bin 1: input_ids is empty"),
        ({"input_ids": np.array([], np.int32)}, "bin 1: input_ids is empty"),
        ({"input_ids": [5, 6, -7, 8]}, r"bin 1: input_ids is -7 at position 2, not in 0\.\.2147483647"),
        ({"input_ids": [5, 6, 2**31, 8]}, "bin 1: input_ids is 2147483648 at position 2"),
        ({"input_ids": [5, 6, 7, 10**400]}, f"bin 1: input_ids {OTHER}"),
        ({"input_ids": [5, 6, 7, -(2**90)]}, f"bin 1: input_ids {OTHER}"),
        ({"input_ids": np.array([5, 6, 7, 2**63], np.uint64)}, "bin 1: input_ids is 9223372036854775808 at position 3"),
        ({"input_ids": np.array([5, 6, -7, 8], np.int16)}, "bin 1: input_ids is -7 at position 2"),
        ({"input_ids": "abcd"}, "bin 1: input_ids is not a list or an array of integers"),
        ({"input_ids": [5, "6", 7, 8]}, f"bin 1: input_ids {OTHER}"),
        ({"input_ids": [[5], [6], [7], [8]]}, f"bin 1: input_ids {OTHER}"),
        ({"input_ids": np.array([[5, 6], [7, 8]])}, "refused: .* not one-dimensional"),
        ({"input_ids": np.array(5)}, "refused: .* not one-dimensional"),
        ({"input_ids": np.array([5, 6, 7, 8], ">i4")}, "refused: the pickle holds an array that is not little-endian"),
        ({"input_ids": np.array([5, 6, 7, 8], object)}, "bin 1: input_ids is not a list or an array of integers"),
        ({"input_ids": np.array(["5"])}, r"refused: the pickle holds an array that is not of integers \('U1'"),
        ({"input_ids": [np.int64(5)] * 4}, r"refused: the pickle calls numpy\._core\.multiarray\.scalar, which is not"),
        ({"seq_start_id": []}, "bin 1: seq_start_id is empty"),
        ({"seq_start_id": [1, 2]}, "bin 1: seq_start_id does not rise from 0"),
        ({"seq_start_id": [0, 2, 2]}, "bin 1: seq_start_id does not rise from 0"),
        ({"seq_start_id": [0, -1]}, "bin 1: seq_start_id is -1 at position 1"),
        ({"seq_start_id": [0, 4]}, "bin 1: seq_start_id ends beyond its input_ids"),
        ({"seq_start_id": [0, 1, 2, 3, 4]}, "bin 1: seq_start_id ends beyond its input_ids"),
        (
            {"extra": [1]},
            "bin 1: has 'input_ids', .* 'extra'; a packed bin has exactly input_ids, loss_mask",
        ),
        ({5: [1]}, "bin 1: has .* int; a packed bin has exactly"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_wrong_bin_is_refused_by_name(tmp_path: Path, change: Row, sentence: str, protocol: int) -> None:
    path = save(tmp_path / "packed.npy", [GOOD, {**GOOD, **change}, GOOD], protocol)
    with pytest.raises(LegacyFormatError, match=rf"^{path}: {sentence}"):
        LegacyShard(path)


@pytest.mark.parametrize("key", list(GOOD))
def test_a_missing_key_is_refused_by_name(tmp_path: Path, key: str) -> None:
    short = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises(LegacyFormatError, match=r"packed\.npy: bin 2: has .*; a packed bin has exactly"):
        LegacyShard(save(tmp_path / "packed.npy", [GOOD, GOOD, short], 4))


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (np.arange(5, dtype=np.int32), "holds values of type '<i4', not packed bins"),
        (np.zeros(3), "holds values of type '<f8'"),
        (object_array([]), "holds no bins"),
        (np.array(GOOD, object), r"has shape \(\); packed bins are a one-dimensional array"),
        (object_array([GOOD, GOOD]).reshape(1, 2), r"has shape \(1, 2\)"),
        (object_array([5, 6]), "bin 0: has int; a packed bin has exactly"),
        (object_array([[1], [2]]), "bin 0: has list; a packed bin has exactly"),
        (np.zeros(2, [("input_ids", "i4"), ("loss_mask", "i4")]), "holds values of type"),
    ],
)
def test_another_npy_file_is_refused_by_name(tmp_path: Path, array: np.ndarray[Any, Any], sentence: str) -> None:
    np.save(tmp_path / "other.npy", array)
    with pytest.raises(LegacyFormatError, match=f"other.npy:? {sentence}"):
        LegacyShard(tmp_path / "other.npy")


def test_what_is_not_a_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.npy")
    with pytest.raises(LegacyFormatError, match=r"pipe\.npy is not a file"):
        LegacyShard(tmp_path / "pipe.npy")
    with pytest.raises(LegacyFormatError, match="is not a file"):
        LegacyShard(tmp_path)
    with pytest.raises(StorageIOError, match=r"cannot open .*missing\.npy: No such file"):
        LegacyShard(tmp_path / "missing.npy")
    with pytest.raises(LegacyFormatError, match="is not a path"):
        LegacyShard("a\0b.npy")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "packed.npy", [GOOD], 4)
    read = legacy_storage._unpickled

    def read_and_touch(*arguments: Any) -> Any:
        rows = read(*arguments)
        os.utime(path, ns=(0, 12345))
        return rows

    monkeypatch.setattr(legacy_storage, "_unpickled", read_and_touch)
    with pytest.raises(LegacyFormatError, match=r"packed\.npy was changed while it was read"):
        LegacyShard(path)
