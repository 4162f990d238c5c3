"""What is fuzzed: for each kind of file, sound data, how it is changed, and how it is opened and read.

A document that carries its own checksum is sealed again after most changes: an attacker would do so, and the fields
behind the checksum would never be reached otherwise. `make soak` runs the same targets for hours.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from megatron_packed_sft import DatasetWriter, open_dataset, open_shard, pack, validate
from megatron_packed_sft.encode.templates.renderer import Renderer
from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.packing.plan_file import load_plan, save_plan
from megatron_packed_sft.storage.legacy.writer import LegacyPickleWriter
from megatron_packed_sft.support import json_document
from megatron_packed_sft.tokens.materialize import plan_block
from megatron_packed_sft.tokens.store import open_token_store
from megatron_packed_sft.tokens.validate import validate_token_store
from tests.packed_bins import block_of, make_bins, write_shard
from tests.tokens.stores import make_sequences, write_store

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
PIECES = [
    b"\x00", b"\xff" * 8, b"\x7f\xff\xff\xff", b"-1", b"9" * 30, b"1e999", b"NaN", b"null", b"..", b"/", b'"', b"{",
    b"[" * 3000, b"}", b"\n", b"(", b"',", b"'<i4'", b"'|O'", b"2147483648", b"cos\nsystem\n", b"\x80\x05",
    b"\x8c\x05posix", b"R.", b"\x95",
]  # fmt: skip
WORDS = [
    "{{", "}}", "{%", "%}", "{#", "#}", "-", "|", "~", ".", "(", ")", "[", "]", ",", "'", "messages", "m",
    "content", " ", "0", "9" * 12, "loop", "for", "in", "if", "endif", "endfor", "set", "macro", "endmacro",
    "namespace", "range", "join", "tojson", "center", "indent", "*", "**", "format", "__class__", "self", "caller",
    "recursive", "generation", "endgeneration", "raise_exception", "{% for m in messages %}", "{{ m.content }}",
    "{% endfor %}", "{{ 'a' * 9999999999 }}", "{{ 'a'.center(3000000000) }}", "{% for i in range(99999) %}",
    "{{ m['content'] | indent(99999999) }}", "{% set x = x ~ x %}", "{{ lipsum(9999) }}",
]  # fmt: skip
numbers = st.integers() | st.sampled_from([-1, 0, 1, 2**31, 2**32, 2**53, 2**63, 2**64, 10**30]) | st.floats()
texts = st.text(max_size=20) | st.sampled_from(
    ["..", "../x", "/etc/passwd", "a/b", "\0", "<i8", ">i4", "|O8", "x" * 5000]
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=6,
)


@dataclass(frozen=True)
class Target:
    """`build` makes sound data and returns the file that is changed; `use` opens the data and reads all."""

    build: Callable[[Path], Path]
    use: Callable[[Path], object]
    is_sealed: bool = False


@st.composite
def changed_bytes(draw: st.DrawFn, sound: bytes) -> bytes:
    """The bytes after one to four edits: a piece written over, put in, or cut out, anywhere."""
    data = bytearray(sound)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        piece = draw(st.binary(max_size=9) | st.sampled_from(PIECES))
        removed = draw(st.sampled_from([len(piece), 0, 1, 8, len(data)]))
        data[place : place + removed] = piece
    return bytes(data)


@st.composite
def changed_document(draw: st.DrawFn, sound: bytes) -> bytes:
    """A JSON document with one to three values replaced or removed, at any depth, and sealed again."""
    document = json.loads(sound)
    for _ in range(draw(st.integers(1, 3))):
        inside = document
        while True:
            keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(inside[key], dict | list) and inside[key] and draw(st.booleans()):
                inside = inside[key]
                continue
            if draw(st.integers(0, 4)) == 0:
                del inside[key]
            else:
                inside[key] = draw(values)
            break
    try:
        return json_document.render(document)
    except ValueError:  # NaN has no canonical form
        return json.dumps(document).encode()


@st.composite
def templates(draw: st.DrawFn) -> str:
    """Texts of pieces of Jinja, most of which do not parse."""
    begin, end = draw(st.sampled_from([("", ""), ("{% for m in messages %}", "{% endfor %}"), ("{{ ", " }}")]))
    return begin + "".join(draw(st.lists(st.sampled_from(WORDS), max_size=12))) + end


def _shard(home: Path, name: str) -> Path:
    write_shard(home / "shard", make_bins(3, 8), 8)
    return home / "shard" / name


def _dataset(home: Path) -> Path:
    with DatasetWriter(home / "data") as writer:
        with writer.shard_writer("train", 0, num_bins=3, pack_size=8) as shard:
            shard.write_block(0, block_of(make_bins(3, 8), 8))
            shard.finalize()
        writer.finalize()
    return home / "data" / "dataset.json"


def _plan(home: Path) -> Path:
    save_plan(pack([3, 4, 5, 2, 8], pack_size=8), home / "plan.npz")
    return home / "plan.npz"


def _store(home: Path, name: str) -> Path:
    write_store(home / "store", [make_sequences(5)])
    return home / "store" / "part_000000" / name


def _read_store(file: Path) -> None:
    validate_token_store(file.parent)
    store = open_token_store(file.parent.parent)
    _read_all(store)
    plan = pack([len(ids) for ids, _ in make_sequences(5)], pack_size=64)
    plan_block(plan, store, np.arange(plan.num_bins), 64)


def _legacy(home: Path) -> Path:
    with LegacyPickleWriter(home / "packed.npy") as writer:
        writer.write_block(0, block_of(make_bins(3, 8), 8))
        writer.finalize()
    return home / "packed.npy"


def _checkpoint(home: Path) -> Path:
    import torch
    from torch.distributed import checkpoint

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        checkpoint.save({"weight": torch.arange(6.0)}, checkpoint_id=home / "step", no_dist=True)
    return home / "step" / ".metadata"


def _read_checkpoint(file: Path) -> None:
    from megatron_packed_sft.megatron.weights.torch_dist import TorchDistCheckpoint

    with TorchDistCheckpoint(file.parent) as opened:
        for name in opened.tensors:
            opened.read(name)


def _read_all(rows: Any) -> None:
    for index in range(len(rows)):
        rows[index]


def _read_shard(file: Path) -> None:
    validate(file.parent)
    _read_all(open_shard(file.parent))


def _read_dataset(file: Path) -> None:
    validate(file.parent)
    for shard in open_dataset(file.parent).open_shards("train"):
        _read_all(shard)


TARGETS = {
    "manifest": Target(lambda home: _shard(home, "manifest.json"), _read_shard, is_sealed=True),
    "dataset.json": Target(_dataset, _read_dataset, is_sealed=True),
    "token store": Target(lambda home: _store(home, "manifest.json"), _read_store, is_sealed=True),
    "token store offsets": Target(lambda home: _store(home, "offsets.npy"), _read_store),
    "token store checksums": Target(lambda home: _store(home, "checksums.npy"), _read_store),
    "plan": Target(_plan, load_plan),
    "npy header": Target(lambda home: _shard(home, "input_ids.npy"), _read_shard),
    "legacy pickle": Target(_legacy, lambda file: _read_all(open_shard(file))),
    "checkpoint metadata": Target(_checkpoint, _read_checkpoint),
}


def read_or_refuse(target: Target, file: Path) -> None:
    """Read, or get one of our errors, in one line; anything else is what the fuzzer looks for."""
    try:
        target.use(file)
    except PackedSFTError as error:
        assert "\n" not in str(error)


def render_or_refuse(source: str) -> None:
    """Compile and render a template, or get one of our errors."""
    try:
        Renderer(source).render(CHAT)
    except PackedSFTError as error:
        assert "\n" not in str(error)
