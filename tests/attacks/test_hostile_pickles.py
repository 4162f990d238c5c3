"""Hostile and damaged legacy files: never executed, never more memory than a few times the file, one clear error."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_packed_sft.errors import LegacyFormatError
from megatron_packed_sft.storage.legacy.reader import MEMORY_MULTIPLE, LegacyShard

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
OTHER_OPCODE = "the pickle uses opcode {} at byte"
HUGE = (2**31 - 1).to_bytes(4, "little")
HUGE8 = (2**31).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (b"cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85R", FOREIGN.format("builtins.bytearray")),
        (b"cnumpy\nndarray\nJ\x00\x00\x00\x7f\x85\x85R", "opcode TUPLE1 at byte .* builds nothing that NumPy writes"),
        (b"cnumpy\nndarray\n)R", r"the pickle calls numpy\.ndarray as NumPy never does"),
        (b"cnumpy\ndtype\n)R", r"the pickle calls numpy\.dtype as NumPy never does"),
        (b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf-8\x86R", "opcode TUPLE2 .* builds nothing"),
        (b"cnumpy.core.multiarray\nscalar\n", FOREIGN.format(r"numpy\.core\.multiarray\.scalar")),
        (b"cnumpy\nload\n", FOREIGN.format(r"numpy\.load")),
        (b"cnumpy.core.multiarray\nndarray\n", FOREIGN.format(r"numpy\.core\.multiarray\.ndarray")),
        (b"cos\x00\nsystem\n", FOREIGN.format(r"os\\x00\.system")),
        (b"\x8c\x02os\x8c\x06system\x93", FOREIGN.format(r"os\.system")),
        (b"\x8c\x02osC\x06system\x93", "opcode STACK_GLOBAL at byte .* builds nothing"),
        (b"\x8c\x02os)\x93", "opcode STACK_GLOBAL at byte .* builds nothing"),
        (b"\x82\x01", OTHER_OPCODE.format("EXT1")),
        (b"\x83\x01\x00", OTHER_OPCODE.format("EXT2")),
        (b"\x84\x01\x00\x00\x00", OTHER_OPCODE.format("EXT4")),
        (b"Pid\n", OTHER_OPCODE.format("PERSID")),
        (b"NQ", OTHER_OPCODE.format("BINPERSID")),
        (b"(ios\nsystem\n", OTHER_OPCODE.format("INST")),
        (b"(cnumpy\ndtype\no", OTHER_OPCODE.format("OBJ")),
        (b"cnumpy\nndarray\n)\x81", OTHER_OPCODE.format("NEWOBJ")),
        (b"cnumpy\nndarray\n)}\x92", OTHER_OPCODE.format("NEWOBJ_EX")),
        (b"\x97", OTHER_OPCODE.format("NEXT_BUFFER")),
        (b"](K\x01K\x02e2", OTHER_OPCODE.format("DUP")),
        (b"N0", OTHER_OPCODE.format("POP")),
        (b"(K\x01l", OTHER_OPCODE.format("LIST")),
        (b"\x8f", OTHER_OPCODE.format("EMPTY_SET")),
        (b"\x8b\xff\xff\xff\x7f", OTHER_OPCODE.format("LONG4")),
        (b"\xff", OTHER_OPCODE.format("0xff")),
        (b"\x80\x04", OTHER_OPCODE.format("PROTO")),
        (b"r" + HUGE, "opcode LONG_BINPUT at byte .* stores into slot 2147483647 of the memo"),
        (b"j" + HUGE, "opcode LONG_BINGET at byte .* reads slot 2147483647 of the memo, which is empty"),
        (b"h\xff", "reads slot 255 of the memo, which is empty"),
        (b"]\x94(h\x00e", "a list of the pickle holds something that does not belong there"),
        (b"]\x94h\x00a", "a list of the pickle holds something that does not belong there"),
        (b"}\x94(" + KEYS[0] + b"h\x00u", "input_ids is not a list or an array of integers"),
        (b"]\x94(K\x01e](K\x02eh\x00(K\x03e", "opcode MARK at byte .* builds nothing"),
        (b"(" * 20_000, "the pickle nests or queues more than 16384 objects"),
        (b"]" * 20_000, "the pickle nests or queues more than 16384 objects"),
        (b"](" * 20_000, "the pickle nests or queues more than 16384 objects"),
        (b")" + b"\x85" * 20_000, "opcode TUPLE1 at byte .* builds nothing"),
        (b"K\x01" * 20_000, "the pickle nests or queues more than 16384 objects"),
        (b"](" + b"K\x01" * 20_000 + b"(e", "a list of the pickle holds something that does not belong there"),
        (ARRAY + b"b", "opcode BUILD at byte .* builds nothing"),
        (b"}}b", "opcode BUILD at byte .* builds nothing"),
        (ARRAY + b"(K\x01" + count(2**31 - 1) + b"\x85" + BYTE + b"\x89C\x02\x00\x00tb", "bytes do not fit its shape"),
        (ARRAY + b"(K\x01J\xff\xff\xff\xff\x85" + BYTE + b"\x89C\x02\x00\x00tb", "bytes do not fit its shape"),
        (ARRAY + b"(K\x01K\x02\x85" + OBJECT + b"\x89](K\x01K\x00etb", "an array that is not of integers"),
        (ARRAY.replace(b"K\x00\x85", b"K\x05\x85"), "opcode TUPLE3 at byte .* builds nothing"),
        (
            ARRAY + b"(K\x01K\x02\x85" + BYTE.replace(b"u1", b"b1") + b"\x89C\x02\x01\x02tb",
            "do not fit its type and shape",
        ),
        (BYTE.replace(b"K\x00tb", b"K\x3ftb"), "opcode BUILD at byte .* builds nothing"),
        (BYTE.replace(b"\x8c\x01|", b"\x8c\x01="), "opcode TUPLE at byte .* builds nothing"),
    ],
)
def test_what_is_not_packed_data_is_refused_by_name(tmp_path: Path, value: bytes, sentence: str) -> None:
    path = write(tmp_path / "x.npy", around(row_with(value), 1))
    with pytest.raises(LegacyFormatError, match=rf"^{path}: (refused|bin \d): .*{sentence}"):
        LegacyShard(path)
    write(path, header(1) + b"\x80\x05" + value + b".")
    with pytest.raises(LegacyFormatError, match=rf"^{path}: (refused: .*; nothing was executed|bin \d: )"):
        LegacyShard(path)


ASKING = [
    b"\x8e" + HUGE8,
    b"\x96" + HUGE8,
    b"\x8d" + HUGE8,
    b"\x95" + HUGE8,
    b"\x8e" + b"\xff" * 8,
    b"\x95" + b"\xff" * 8,
    b"B" + HUGE,
    b"X" + HUGE,
    b"\x8a\xff",
    b"\x8c\xff",
    b"C\xff",
    b"K",
    b"M\x00",
    b"J\x00",
    b"h",
    b"cnumpy",
    b"cnumpy\nndarray",
]


@pytest.mark.parametrize("opcodes", ASKING)
def test_an_opcode_that_asks_for_more_than_the_file_has_is_refused(tmp_path: Path, opcodes: bytes) -> None:
    path = write(tmp_path / "x.npy", header(1) + b"\x80\x05" + opcodes)
    with pytest.raises(
        LegacyFormatError, match=r"x\.npy: the file ends inside its pickle \(opcode \w+ at byte \d+ asks"
    ):
        LegacyShard(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (around(ROW, 2), "does not hold as many bins as the header says"),
        (around(ROW + ROW, 1), "does not hold as many bins as the header says"),
        (header(2) + around(ROW, 1)[len(header(1)) :], "does not hold as many bins as the header says"),
        (around(ROW, 1) + b".", "there are bytes behind the end of the pickle"),
        (around(ROW, 1) + around(ROW, 1), "there are bytes behind the end of the pickle"),
        (around(ROW + b"}", 2), "bin 1: input_ids is missing"),
        (around(ROW.replace(KEYS[1], KEYS[0]), 1), "bin 0: has the key input_ids twice"),
        (around(ROW[:-1] + KEYS[0] + LIST + b"u", 1), "bin 0: has the key input_ids twice"),
        (around(b"K\x01" + ROW, 2), "a list of the pickle holds something that does not belong there"),
        (around(ROW + b"e(" + ROW + b"eN(" + ROW, 3), "builds nothing that NumPy writes"),
        (header(1) + b"\x80\x05" + ROW + b".", "the pickle is not an object array of bins"),
        (header(1) + b"\x80\x05" + ARRAY + b".", "the pickle is not an object array of bins"),
        (header(1) + b"\x80\x01.", "no pickle of protocol 2 to 5"),
        (header(1) + b"\x80\x06.", "no pickle of protocol 2 to 5"),
        (header(1) + b"(lp0\n.", "no pickle of protocol 2 to 5"),
        (header(1), "no pickle of protocol 2 to 5"),
        (header(10**9) + around(ROW, 1)[len(header(1)) :], "promises 1000000000 bins, more than its .* bytes can hold"),
        (header(10**30) + around(ROW, 1)[len(header(1)) :], "promises 10{30} bins, more than"),
        (b"", "is not an .npy file"),
        (b"\x93NUMPY", "is not an .npy file"),
        (b"PK\x03\x04" + bytes(100), "is not an .npy file"),
        (b"\x93NUMPY\x04\x00" + bytes(100), "has .npy version 4.0"),
        (b"\x93NUMPY\x01\x00\xff\xff" + bytes(100), "header has 65535 bytes, more than the 4096 allowed"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(100), "header has 4294967295 bytes"),
        (b"\x93NUMPY\x01\x00\x00\x05" + bytes(100), "the file ends inside its .npy header"),
        (b"\x93NUMPY\x01\x00\x00\x0f" + b"(" * 4000, "header is damaged"),
        (b"\x93NUMPY\x01\x00\x00\x0f" + b"-" * 4000, "header is damaged"),
        (b"\x93NUMPY\x01\x00\x10\x00" + b"__import__('os')", "header is damaged"),
        (b"\x93NUMPY\x01\x00\x04\x00" + b"'\\q'", "header is damaged"),
        (b"\x93NUMPY\x01\x00\x02\x00" + b"\xff\xfe", "header is damaged"),
        (header(1).replace(b"(1,)", b"True"), "has shape True"),
        (header(1).replace(b"(1,)", b"(-1,)").replace(b"\x3a", b"\x3b", 1), "header is damaged|has shape"),
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


class OnlyNumpy(pickle.Unpickler):
    """Python's own unpickler, for files that our reader has accepted already."""

    def find_class(self, module: str, name: str) -> Any:
        assert (module.replace("_core", "core"), name) in {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy.core.numeric", "_frombuffer"),
            ("_codecs", "encode"),
            ("builtins", "bytes"),
        }
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def check(path: Path) -> bool:
    """Open a file: it is refused with our error, or its rows are what Python makes of it. True when accepted."""
    try:
        shard = LegacyShard(path)
    except LegacyFormatError:
        return False
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        expected = OnlyNumpy(file).load()
    assert len(expected) == len(shard)
    for row, packed in zip(expected, shard, strict=True):
        assert [[int(value) for value in row[name]] for name in ("input_ids", "loss_mask", "seq_start_id")] == [
            field.tolist() for field in packed
        ]
    return True


def changed_files(path: Path, content: bytes, values: Callable[[int], Iterable[int]]) -> Iterator[Path]:
    """The file with one byte changed, for each byte and each of its new values."""
    with write(path, content).open("r+b", buffering=0) as file:
        for place, byte in enumerate(content):
            for value in values(byte):
                os.pwrite(file.fileno(), bytes([value]), place)
                yield path
            os.pwrite(file.fileno(), bytes([byte]), place)


def test_every_change_of_one_byte_is_refused_or_read_as_python_reads_it(tmp_path: Path) -> None:
    content = sound_files()[0]
    others = changed_files(tmp_path / "x.npy", content, lambda byte: {*range(256)} - {byte})
    num_accepted = sum(map(check, others))
    assert 100 < num_accepted < 0.2 * 256 * len(content)  # most changes of an id are still an id


@pytest.mark.parametrize("content", sound_files()[1:], ids=["2", "3", "4", "5"])
def test_every_flip_of_one_bit_is_refused_or_read_as_python_reads_it(tmp_path: Path, content: bytes) -> None:
    flipped = changed_files(tmp_path / "x.npy", content, lambda byte: [byte ^ 1 << bit for bit in range(8)])
    assert sum(map(check, flipped)) > 10


OPCODES = b"(.KMJ\x8aI\x88\x89NXC\x8c\x8e\x96]ae}su)t\x85\x86\x87c\x93Rbqrhj\x94\x95"
PIECES = [
    *KEYS,
    ARRAY,
    OBJECT,
    BYTE,
    LIST,
    ROW,
    b"K\x00",
    b"K\x01",
    b"h\x00",
    b"\x94",
    b"e(",
    *(bytes([op]) for op in OPCODES),
]


@settings(max_examples=1500, deadline=None)
@given(pieces=st.lists(st.one_of(st.sampled_from(PIECES), st.binary(max_size=4)), max_size=30))
@example(pieces=[b"]\x94(", ROW, b"eh\x00"])
def test_random_opcodes_are_refused_or_read_as_python_reads_them(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.npy"
    check(write(path, header(1) + b"\x80\x05" + b"".join(pieces)))
    check(write(path, around(b"".join(pieces), 1)))
    check(write(path, around(row_with(b"".join(pieces), 1), 1)))


@settings(max_examples=300, deadline=None)
@given(content=st.binary(max_size=400))
def test_random_bytes_behind_a_sound_header_are_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.npy"
    check(write(path, content))
    check(write(path, header(1) + content))
    check(write(path, header(1) + b"\x80\x04" + content))


MEASURE = """
import os, resource, sys
from megatron_packed_sft.errors import LegacyFormatError
from megatron_packed_sft.storage.legacy.reader import LegacyShard

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

LegacyShard(sys.argv[1])  # numba and the kernels are in memory from here on
try:
    LegacyShard(sys.argv[2])  # and so is what words a refusal: each child would pay for loading it
except LegacyFormatError:
    pass
for path in sys.argv[3:]:
    reader, writer = os.pipe()
    if os.fork() == 0:
        before = peak()
        if path.endswith("asking.npy"):
            used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        try:
            LegacyShard(path)
            outcome = "accepted"
        except LegacyFormatError as error:
            outcome = "refused " + str(error).replace(path, "")
        os.write(writer, f"{peak() - before} {outcome}".encode())
        os._exit(0)
    os.wait()
    print(os.read(reader, 1000).decode())
    os.close(reader); os.close(writer)
"""


def memory_bombs(size: int) -> dict[str, tuple[bytes, str]]:
    """Files of about `size` bytes that would take far more in a naive reader, and what must become of them."""
    batch = b"e(" + b"h\x00" * 1000
    many = size // len(batch)
    long_list = b"](" + b"\x89" * (size // 2) + b"e"
    long_row = b"}\x94(" + KEYS[0] + long_list + b"\x94" + KEYS[1] + b"h\x01" + KEYS[2] + b"](K\x00eu"
    same_lists = b"}(" + KEYS[0] + b"h\x01" + KEYS[1] + b"h\x01" + KEYS[2] + b"](K\x00eu"
    array = ARRAY + b"(K\x01" + count(size) + b"\x85" + BYTE + b"\x89B" + count(size)[1:] + bytes(size) + b"tb\x94"
    first = b"}(" + KEYS[0] + b"\x94]K\x01a" + KEYS[1] + b"\x94]K\x00a" + KEYS[2] + b"\x94]K\x00au"
    tiny = b"}\x94(h\x00]\x94K\x01ah\x01]\x94K\x00ah\x02]\x94K\x00au"
    num_batches = size // len(1000 * tiny)
    return {
        "memo": (around(b"]" + b"\x94" * size, 1), "makes more objects than packed bins need"),
        "frames": (around((b"\x95" + bytes(8)) * (size // 9) + ROW, 1), "accepted"),
        "one row often": (around(long_row + batch * (many // 9), 1000 * (many // 9) + 1), "share their lists so often"),
        "one list often": (around(long_row + same_lists * 900, 901), "share their lists so often"),
        "rows of two bytes": (around(b"}\x94" + ROW[1:] + batch * many, 1000 * many + 1), "promises"),
        "pairs": (around(b"K\x01K\x02\x86" * (size // 5), 1), "nests or queues more than"),
        "an array as ids and mask": (
            around(b"}(" + KEYS[0] + array + KEYS[1] + b"h\x00" + KEYS[2] + b"](K\x00eu", 1),
            "accepted",
        ),
        "the smallest rows": (around(first + (b"e(" + 1000 * tiny) * num_batches, 1000 * num_batches + 1), "accepted"),
        "promised rows": (header(size // 5) + bytes(size), "no pickle of protocol 2 to 5"),
    }


def test_memory_stays_below_the_promised_multiple_of_the_file(tmp_path: Path) -> None:
    size = 6 << 20
    good = write(tmp_path / "good.npy", around(ROW, 1))
    bombs = memory_bombs(size)
    paths = [write(tmp_path / f"{name}.npy", content) for name, (content, _) in bombs.items()]
    asking = [
        write(tmp_path / f"{index}-asking.npy", header(1) + b"\x80\x05" + opcodes)
        for index, opcodes in enumerate(ASKING)
    ]
    refused = write(tmp_path / "refused.npy", header(1) + b"\x80\x05" + ASKING[0])
    command = [sys.executable, "-c", MEASURE, *map(str, [good, refused, *paths, *asking])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = result.stdout.splitlines()
    assert len(lines) == len(paths) + len(asking)
    for path, line, (name, (_, outcome)) in zip(paths, lines, bombs.items(), strict=False):
        taken = int(line.split()[0])
        assert outcome in line, (name, line)
        # The mapped file itself counts once more.
        assert taken < (MEMORY_MULTIPLE + 1) * path.stat().st_size + (3 << 20), (name, line)
    for line in lines[len(paths) :]:
        assert "refused" in line
        assert int(line.split()[0]) < 3 << 20, line
