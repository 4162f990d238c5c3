"""A plan on disk: the same after reading, readable with NumPy alone, and refused when anything is wrong."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft.errors import (
    PackedSFTError,
    ShardFileError,
    StorageIOError,
    UnsupportedFormatError,
)
from megatron_packed_sft.packing.options import PackOptions
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.packing.plan import PackPlan
from tests.packing import lengths as made


def small_plan() -> PackPlan:
    """A plan with everything in it: chunks, drops, held-back bins, steps."""
    return pack(
        [30, 4, 7, 7, 1, 9, 3, 10, 10],
        PackOptions(pack_size=10, overflow="split", stride=2, min_len=2),
        steps={"global_batch": 2, "balance": "attention", "whole_batches": True},
    )


PLANS: dict[str, Callable[[], PackPlan]] = {
    "plain": lambda: pack([3, 1, 2, 2], pack_size=4),
    "large": lambda: pack(made.chat(3000), pack_size=2048, strategy="window"),
    "shuffled": lambda: pack([4] * 9, pack_size=4, shuffle_output=True, seed=2),
    "dropped": lambda: pack([5, 20, 1, 8], PackOptions(pack_size=10, overflow="drop", min_len=2)),
    "single": lambda: pack([5, 20, 8], pack_size=10, overflow="single"),
    "inputs": lambda: pack([6, 6, 11], PackOptions(pack_size=10, measure="inputs")),
    "padded": lambda: pack([6, 6, 9], pack_size=20, pad_seq_to_mult=4),
    "everything": small_plan,
}


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS.keys())
def test_a_plan_is_the_same_after_saving_and_loading(make: Callable[[], PackPlan], tmp_path: Path) -> None:
    plan = make()
    plan.save(tmp_path / "plan.npz")
    loaded = PackPlan.load(tmp_path / "plan.npz")
    assert loaded.fingerprint == plan.fingerprint
    assert loaded.order_fingerprint == plan.order_fingerprint
    assert loaded.stats() == plan.stats()
    for name in ("bin_offsets", "indices", "item_lengths", "order", "held_back"):
        before, after = getattr(plan, name), getattr(loaded, name)
        assert (before is None and after is None) or np.array_equal(before, after)
    assert (plan.chunks is None) == (loaded.chunks is None)
    for name in ("pack_size", "strategy", "method", "measure", "pad_seq_to_mult", "global_batch", "lower_bound"):
        assert getattr(loaded, name) == getattr(plan, name)


def test_equal_plans_are_equal_files_and_nothing_else_is_left_behind(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        small_plan().save(tmp_path / name)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.npz", "b.npz"]


def test_numpy_alone_can_read_it(tmp_path: Path) -> None:
    plan = small_plan()
    plan.save(tmp_path / "plan.npz")
    with np.load(tmp_path / "plan.npz", allow_pickle=False) as arrays:
        assert np.array_equal(arrays["indices"], plan.indices)
        assert json.loads(arrays["plan.json"].tobytes())["fingerprint"] == plan.fingerprint


def test_saving_again_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    pack([1], pack_size=2).save(path)
    pack([2, 2], pack_size=2).save(path)
    assert PackPlan.load(path).num_bins == 2


def test_a_path_that_cannot_be_written_or_read_is_our_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageIOError, match=r"cannot create a directory for .*file/plan.npz"):
        pack([1], pack_size=2).save(tmp_path / "file" / "plan.npz")
    with pytest.raises(StorageIOError, match=r"cannot read the plan .*No such file"):
        PackPlan.load(tmp_path / "plan.npz")
    with pytest.raises(StorageIOError, match="cannot read the plan"):
        PackPlan.load(tmp_path)
    (tmp_path / "taken").mkdir()
    with pytest.raises(StorageIOError, match=r"cannot publish .*taken: Is a directory"):
        pack([1], pack_size=2).save(tmp_path / "taken")
    assert sorted(os.listdir(tmp_path)) == ["file", "taken"]


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    small_plan().save(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ShardFileError, match="not a valid pack plan"):
            PackPlan.load(path)


def test_a_flipped_bit_is_never_read_as_another_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    plan = small_plan()
    plan.save(path)
    whole = bytearray(path.read_bytes())
    num_refused = 0
    positions = range(0, len(whole), 3)
    for position in positions:
        changed = bytearray(whole)
        changed[position] ^= 1 << (position % 8)
        path.write_bytes(changed)
        try:
            loaded = PackPlan.load(path)
        except PackedSFTError:
            num_refused += 1
        else:
            # Some bytes of a zip mean nothing (dates, attributes): then the plan is the same.
            assert loaded.order_fingerprint == plan.order_fingerprint
            assert loaded.stats() == plan.stats()
    assert num_refused > 0.75 * len(positions)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=400))
def test_random_bytes_give_our_error(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.npz"
    path.write_bytes(data)
    with pytest.raises(ShardFileError):
        PackPlan.load(path)


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], **zip_options: Any) -> None:
    """Change the arrays and the header of a plan's file, and write it as a proper .npz again."""
    with np.load(path) as arrays:
        content = {name: arrays[name].copy() for name in arrays.files if name != "plan.json"}
        header = json.loads(arrays["plan.json"].tobytes())
    change(content, header)
    content["plan.json"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with zipfile.ZipFile(path, "w", **zip_options) as archive:
        for name, array in content.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array)
            archive.writestr(f"{name}.npy", buffer.getvalue())


def setter(name: str, place: int, value: int) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(content: dict[str, Any], header: dict[str, Any]) -> None:
        content[name][place] = value

    return change


def in_header(**values: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(content: dict[str, Any], header: dict[str, Any]) -> None:
        header.update(values)

    return change


def without(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda content, header: content.pop(name)


def drop_key(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda content, header: header.pop(name)


def as_type(name: str, dtype: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(content: dict[str, Any], header: dict[str, Any]) -> None:
        content[name] = content[name].astype(dtype)

    return change


def in_accounting(**values: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda content, header: header["accounting"].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setter("bin_offsets", 0, 1), "bin_offsets does not cut"),
        (setter("bin_offsets", 1, 0), "at least one item"),
        (setter("bin_offsets", -1, 3), "bin_offsets does not cut"),
        (setter("indices", 0, -1), "names an item that is not there"),
        (setter("indices", 0, 99), "names an item that is not there"),
        (setter("indices", 1, 0), "an item is in two bins"),
        (setter("unit_lengths", 0, 0), "an item has no tokens"),
        (setter("unit_lengths", 0, 11), "holds more than pack_size|longer than pack_size|tokens"),
        (setter("order", 0, 7), "order does not hold each bin once"),
        (setter("held_back", 0, 0), "held_back names an item"),
        (setter("held_back", 0, -5), "held_back names an item that is not there"),
        (setter("chunk_sequence", 0, 50), "a sequence that is not there"),
        (setter("chunk_sequence", 0, 8), "not ordered by sequence"),
        (setter("chunk_start", 1, 0), "not ordered by sequence"),
        (setter("chunk_start", 0, -1), "not ordered by sequence"),
        (setter("chunk_masked_prefix", 0, 10), "trains nothing"),
        (setter("chunk_masked_prefix", 1, 1), "its fingerprint is"),
        (without("indices"), "arrays are missing"),
        (without("chunk_start"), "arrays are missing"),
        (as_type("indices", np.int64), "indices is <i8"),
        (as_type("bin_offsets", ">i8"), "bin_offsets is >i8"),
        (as_type("unit_lengths", np.float32), "unit_lengths is <f4"),
        (lambda content, header: content.update(extra=np.zeros(1)), "it holds .*extra"),
        (lambda content, header: content.update(indices=content["indices"][:, None]), "one dimension"),
        (lambda content, header: content.update(indices=content["indices"][::-1].copy()), "canonical order"),
        (in_header(fingerprint="0" * 32), "its fingerprint is"),
        (in_header(order_fingerprint="0" * 32), "its order_fingerprint is"),
        (in_header(pack_size=5), "holds more than pack_size|longer than pack_size"),
        (in_header(pack_size=-1), "does not fit"),
        (in_header(pack_size=True), "does not fit"),
        (in_header(pack_size="10"), "does not fit"),
        (in_header(lower_bound=10**6), "out of range"),
        (in_header(global_batch=0), "global_batch is below 1"),
        (in_header(measure="bytes"), "does not fit"),
        (in_header(accounting=[]), "does not fit"),
        (drop_key("strategy"), "does not fit"),
        (in_accounting(num_tokens=1), "tokens, not"),
        (in_accounting(dropped_sequences={"below_min_len": 3}), "it packs"),
        (in_accounting(num_sequences=-1), "does not fit"),
        (in_accounting(surprise=1), "does not fit"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(
    change: Callable[[dict[str, Any], dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.npz"
    small_plan().save(path)
    rewrite(path, change)
    with pytest.raises(ShardFileError, match=message):
        PackPlan.load(path)


def test_a_sound_rewrite_is_accepted(tmp_path: Path) -> None:
    """What refuses the files above is the change, not the rewriting."""
    path = tmp_path / "plan.npz"
    small_plan().save(path)
    rewrite(path, lambda content, header: None)
    assert PackPlan.load(path).fingerprint == small_plan().fingerprint


def test_another_version_is_told_apart_from_damage(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    small_plan().save(path)
    rewrite(path, in_header(version=2))
    with pytest.raises(UnsupportedFormatError, match="version 2; this release reads version 1"):
        PackPlan.load(path)


def test_compressed_arrays_are_refused_before_they_grow(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    small_plan().save(path)
    rewrite(path, lambda content, header: None, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ShardFileError, match="compressed"):
        PackPlan.load(path)


def test_a_header_that_promises_more_than_the_file_holds_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.npz"
    small_plan().save(path)
    whole = path.read_bytes()
    assert whole.count(b"'shape': (") >= 2
    content = whole.replace(b"'shape': (", b"'shape': (9", 2).replace(b"), }  ", b"), } ", 2)
    path.write_bytes(content)
    with pytest.raises(ShardFileError):
        PackPlan.load(path)


def test_loading_a_plan_does_not_need_the_compiler(tmp_path: Path) -> None:
    """Every rank loads the plan; numba would cost each of them a fifth of a second."""
    path = tmp_path / "plan.npz"
    small_plan().save(path)
    script = (
        "import sys; from megatron_packed_sft.packing.plan import PackPlan; "
        f"PackPlan.load({str(path)!r}).aligned(2, True); PackPlan.load({str(path)!r}).stats(); "
        "assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
