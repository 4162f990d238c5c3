"""Hostile and damaged legacy files: nothing in them is executed, and the outcome is bins or one of our errors."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_packed_sft.errors import LegacyFormatError
from megatron_packed_sft.storage.legacy.storage import LegacyShard

KEYS = [b"\x8c\x09input_ids", b"\x8c\x09loss_mask", b"\x8c\x0cseq_start_id"]
ARRAY = b"\x8c\x16numpy._core.multiarray\x8c\x0c_reconstruct\x93\x8c\x05numpy\x8c\x07ndarray\x93K\x00\x85C\x01b\x87R"
OBJECT = (
    b"\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02O8\x89\x88\x87R(K\x03\x8c\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"
)
BYTE = (
    b"\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02u1\x89\x88\x87R(K\x03\x8c\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
)
LIST = b"](K\x01K\x00e"
ROW = b"}(" + KEYS[0] + LIST + KEYS[1] + LIST + KEYS[2] + b"](K\x00e" + b"u"


def header(num_rows: int) -> bytes:
    text = b"{'descr': '|O', 'fortran_order': False, 'shape': (%d,), }" % num_rows
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def count(number: int) -> bytes:
    return b"J" + number.to_bytes(4, "little")


def around(rows: bytes, num_rows: int, before: bytes = b"") -> bytes:
    """A whole file with these opcodes in place of the rows."""
    body = b"\x80\x05" + before + ARRAY + b"(K\x01" + count(num_rows) + b"\x85" + OBJECT + b"\x89](" + rows + b"etb."
    return header(num_rows) + body


def row_with(value: bytes, field: int = 0) -> bytes:
    """A row with these opcodes in place of a field's list."""
    values = [LIST, LIST, b"](K\x00e"]
    values[field] = value
    return b"}(" + b"".join(key + item for key, item in zip(KEYS, values, strict=True)) + b"u"


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_the_files_these_attacks_are_made_of_are_sound(tmp_path: Path) -> None:
    path = write(tmp_path / "x.npy", around(ROW + ROW, 2))
    loaded = list(np.load(path, allow_pickle=True))
    assert loaded == [{"input_ids": [1, 0], "loss_mask": [1, 0], "seq_start_id": [0]}] * 2
    shard = LegacyShard(path)
    assert [[field.tolist() for field in row] for row in shard] == [list(row.values()) for row in loaded]


class Payload:
    """Unpickling it makes a file: with this call, or with one call inside another."""

    def __init__(self, call: str, target: Path) -> None:
        self.call = call
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        if self.call == "system":
            return os.system, (f"touch {self.target}",)
        if self.call == "eval":
            return eval, (f"open({str(self.target)!r}, 'w').close()",)
        if self.call == "getattr":
            return map, (Payload("system", self.target), [])
        if self.call == "state":
            return Path, ("x",), {"x": Payload("system", self.target)}
        return list, ([Payload("system", self.target)],)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("call", ["system", "eval", "getattr", "state", "nested"])
@pytest.mark.parametrize("place", ["alone", "row", "value", "item", "key"])
def test_a_pickle_that_would_make_a_file_does_not(tmp_path: Path, protocol: int, call: str, place: str) -> None:
    target = tmp_path / "made"
    payload = Payload(call, target)
    good: dict[Any, Any] = {"input_ids": [1, 0], "loss_mask": [1, 0], "seq_start_id": [0]}
    hostile: Any = {
        "alone": payload,
        "row": [good, payload],
        "value": [good, {**good, "loss_mask": payload}],
        "item": [good, {**good, "loss_mask": [1, payload]}],
        "key": [good, {**good, payload: [1]}],
    }[place]
    if place != "alone":
        hostile = np.array(hostile, object)
    pickled = pickle.dumps(hostile, protocol)
    path = write(tmp_path / "x.npy", header(2) + pickled)
    with pytest.raises(
        LegacyFormatError, match=r"x\.npy: refused: the pickle calls .*, which is not part of packed SFT"
    ):
        LegacyShard(path)
    assert not target.exists()
    if call == "system":
        try:
            pickle.loads(pickled)  # the proof that the attack is one
        except TypeError:
            assert place == "key"
        assert target.exists()


def test_the_message_names_the_call_and_says_that_nothing_ran(tmp_path: Path) -> None:
    path = write(tmp_path / "x.npy", header(1) + b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.")
    sentence = "refused: the pickle calls os.system, which is not part of packed SFT data; nothing was executed"
    with pytest.raises(LegacyFormatError) as caught:
        LegacyShard(path)
    assert str(caught.value) == f"{path}: {sentence}"


FOREIGN = "the pickle calls {}, which is not part of packed SFT data"
UNFIT = "content does not fit its shape"
DAMAGED = "the pickle is damaged, or not packed SFT data"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (b"cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85R", FOREIGN.format("builtins.bytearray")),
        (b"cnumpy\nndarray\nJ\x00\x00\x00\x7f\x85\x85R", r"the pickle calls numpy\.ndarray as NumPy never does"),
        (b"cnumpy\ndtype\n)R", DAMAGED),
        (b"cnumpy\ndtype\n\x8c\x02f8\x85R", r"an array that is not of integers \('f8'\)"),
        (b"cnumpy.core.multiarray\nscalar\n", FOREIGN.format(r"numpy\.core\.multiarray\.scalar")),
        (b"cnumpy\nload\n", FOREIGN.format(r"numpy\.load")),
        (b"cnumpy\nndarray.__subclasses__\n", FOREIGN.format(r"numpy\.ndarray\.__subclasses__")),
        (b"cos\x00\nsystem\n", FOREIGN.format(r"os\\x00\.system")),
        (b"\x8c\x02os\x8c\x06system\x93", FOREIGN.format(r"os\.system")),
        (b"\x8c\x02os)\x93", DAMAGED),
        (b"\x82\x01", DAMAGED),  # an extension code
        (b"Pid\n", DAMAGED),  # a persistent id
        (b"(ios\nsystem\n", FOREIGN.format(r"os\.system")),
        (b"(cos\nsystem\no", FOREIGN.format(r"os\.system")),
        (b"cnumpy\nndarray\n)\x81", DAMAGED),  # NEWOBJ: a stand-in is no class
        (b"cnumpy\nndarray\n)}\x92", DAMAGED),
        (b"cnumpy\ndtype\n}\x8c\x05_make\x8c\x01xsb", "the pickle changes a function"),
        (b"cnumpy\ndtype\nN}\x8c\x05_make\x8c\x01xs\x86b", "the pickle changes a function"),
        (b"\x97", DAMAGED),  # a buffer from elsewhere
        (b"c_codecs\nencode\n\x8c\x01a\x8c\x05utf-8\x86R", "the pickle encodes text as NumPy never does"),
        (b"cbuiltins\nbytes\nJ\x00\x00\x00\x40\x85R", "the pickle makes bytes as NumPy never does"),
        (ARRAY + b"b", DAMAGED),
        (
            ARRAY + b"(K\x01" + count(2**31 - 1) + b"\x85" + BYTE + b"\x89C\x02\x00\x00tb",
            UNFIT,
        ),
        (ARRAY + b"(K\x01J\xff\xff\xff\xff\x85" + BYTE + b"\x89C\x02\x00\x00tb", UNFIT),
        (ARRAY + b"(K\x01K\x02\x85" + OBJECT + b"\x89C\x10" + bytes(16) + b"tb", UNFIT),
        (ARRAY + b"(K\x01K\x02\x85" + OBJECT + b"\x89](K\x01K\x00etb", "is not a list or an array of integers"),
        (ARRAY + b"(K\x01K\x02\x85\x8c\x02u1\x89C\x02\x00\x00tb", "an array that is not one-dimensional"),
        (ARRAY.replace(b"K\x00\x85", b"K\x05\x85"), "builds an array as NumPy never does"),
        (
            ARRAY + b"(K\x01K\x02\x85" + BYTE.replace(b"u1", b"b1") + b"\x89C\x02\x01\x02tb",
            "input_ids|is 2 at position",
        ),
        (BYTE.replace(b"\x8c\x01|", b"\x8c\x01>"), "an array that is not little-endian"),
    ],
)
def test_what_is_not_packed_data_is_refused(tmp_path: Path, value: bytes, sentence: str) -> None:
    path = write(tmp_path / "x.npy", around(row_with(value, 1), 1))
    with pytest.raises(LegacyFormatError, match=rf"^{path}: (refused|bin \d): .*({sentence})"):
        LegacyShard(path)
    write(path, header(1) + b"\x80\x05" + value + b".")
    with pytest.raises(LegacyFormatError, match=rf"^{path}: (refused: .*; nothing was executed|its header says)"):
        LegacyShard(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (around(ROW, 2), "whose content does not fit its shape"),
        (header(2) + around(ROW, 1)[len(header(1)) :], "its header says 2 bins, and its pickle has 1"),
        (around(ROW, 1) + b".", "the pickle has bytes behind its end"),
        (around(ROW + b"}", 2), "bin 1: has ; a packed bin has exactly"),
        (header(1) + b"\x80\x05" + ROW + b".", "the pickle is not an object array of bins"),
        (header(1) + b"\x80\x05" + ARRAY + b".", "the pickle is not an object array of bins"),
        (header(1) + b"\x80\x06.", "the pickle is damaged, or not packed SFT data"),
        (header(1), "ends inside its pickle; it was truncated"),
        (header(10**30) + around(ROW, 1)[len(header(1)) :], "its pickle has 1"),
        (b"", "is not an .npy file"),
        (b"\x93NUMPY", "is not an .npy file"),
        (b"PK\x03\x04" + bytes(100), "is not an .npy file"),
        (b"\x93NUMPY\x04\x00" + bytes(100), "has .npy version 4.0"),
        (b"\x93NUMPY\x01\x00\xff\xff" + bytes(100), "header has 65535 bytes, more than the 4096 allowed"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100), "header has 4294967295 bytes"),
        (b"\x93NUMPY\x01\x00\x00\x05" + bytes(100), "ends inside its .npy header"),
        (b"\x93NUMPY\x01\x00\x00\x0f" + b"(" * 4000, "header is damaged"),
        (b"\x93NUMPY\x01\x00\x00\x0f" + b"-" * 4000, "header is damaged"),
        (b"\x93NUMPY\x01\x00\x10\x00" + b"__import__('os')", "header is damaged"),
        (b"\x93NUMPY\x01\x00\x04\x00" + b"'\\q'", "header is damaged"),
        (b"\x93NUMPY\x01\x00\x02\x00" + b"\xff\xfe", "header is damaged"),
        (header(1).replace(b"(1,)", b"True"), "has shape True"),
        (header(1).replace(b"'|O'", b"'<O'"), "holds values of type '<O'"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_by_name(tmp_path: Path, content: bytes, sentence: str) -> None:
    with pytest.raises(LegacyFormatError, match=rf"x\.npy.*({sentence})"):
        LegacyShard(write(tmp_path / "x.npy", content))


def sound_files() -> list[bytes]:
    """Small files of every shape: lists and arrays, each protocol, shared parts, several rows."""
    mask = [True, 0]
    starts = np.array([0])
    rows = [
        {"input_ids": [1, 70_000], "loss_mask": mask, "seq_start_id": (0,)},
        {"input_ids": np.array([200, 3], np.uint8), "loss_mask": mask, "seq_start_id": starts},
        {"input_ids": np.array([1, 2], np.int16), "loss_mask": (0, 1), "seq_start_id": starts},
    ]
    files = [header(3) + pickle.dumps(np.array(rows, object), protocol) for protocol in (2, 3, 4, 5)]
    return [around(ROW, 1), *files]


@pytest.mark.parametrize("content", sound_files(), ids=["plain", "2", "3", "4", "5"])
def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path, content: bytes) -> None:
    assert len(LegacyShard(write(tmp_path / "x.npy", content))) in (1, 3)
    for length in range(len(content)):
        with pytest.raises(LegacyFormatError):
            LegacyShard(write(tmp_path / "x.npy", content[:length]))


def read_or_refuse(path: Path) -> bool:
    """Open a file: True when its bins come back, False for one of our errors. Anything else is a bug."""
    try:
        return len(LegacyShard(path)) > 0
    except LegacyFormatError:
        return False


@pytest.mark.parametrize("content", sound_files()[1:], ids=["2", "3", "4", "5"])
def test_every_flip_of_one_bit_is_refused_or_read(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "x.npy", content)
    num_read = 0
    with path.open("r+b", buffering=0) as file:
        for place, byte in enumerate(content):
            for bit in range(0, 8, 3):
                if byte in b"jrT\x8e" or byte ^ 1 << bit in b"jrT\x8e":
                    continue  # opcodes with a number of four bytes or more, which may ask for gigabytes
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), place)
                num_read += read_or_refuse(path)
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert num_read > 10


OPCODES = b"(.KMI\x88\x89NC\x8c]ae}su)t\x85\x86\x87c\x93RbqhQPio\x81\x92\x82\x94"
PIECES = [
    *KEYS,
    ARRAY,
    OBJECT,
    BYTE,
    LIST,
    ROW,
    b"K\x00",
    b"cnumpy\ndtype\n",
    b"\x94",
    b"e(",
    *(bytes([op]) for op in OPCODES),
]


@settings(max_examples=800, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30))
@example(pieces=[b"]\x94(", ROW, b"eh\x00"])
def test_random_opcodes_are_refused_or_read(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    path = tmp_path_factory.getbasetemp() / "random.npy"
    read_or_refuse(write(path, header(1) + b"\x80\x05" + b"".join(pieces)))
    read_or_refuse(write(path, around(b"".join(pieces), 1)))
    read_or_refuse(write(path, around(row_with(b"".join(pieces), 1), 1)))
