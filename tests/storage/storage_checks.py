"""Checks that any storage must pass. To test a storage of your own, copy this file beside your tests:

    import pytest
    from megatron_packed_sft import register_storage
    from storage_checks import CHECKS

    register_storage(MyStorage())  # or an entry point

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_storage(check, tmp_path):
        check("mine", tmp_path)

A check raises AssertionError and says which promise of `megatron_packed_sft.storage.interface` is broken. It needs an
empty directory of its own. A writer derived from `OrderedShardWriter` keeps the promises about writing without further
code.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, TargetExistsError, WriterStateError
from megatron_packed_sft.storage.bins import PackedBin, block_of
from megatron_packed_sft.storage.convert import convert
from megatron_packed_sft.storage.dataset_directory import DatasetWriter, open_dataset
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import PackedShardWriter, Storage, WriterOptions
from megatron_packed_sft.storage.registry import DEFAULT_STORAGE, open_shard, shards_inside, storage_named, storage_of
from megatron_packed_sft.storage.validate import validate

_PACK_SIZE = 32
_VOCAB_SIZE = 70_000  # above 16 bits
_BINS_PER_BLOCK = 7


def make_bin(rng: np.random.Generator, pack_size: int, vocab_size: int = 1000) -> PackedBin:
    """Return one sound bin of random length, sequences and mask."""
    length = int(rng.integers(1, pack_size + 1))
    num_sequences = int(rng.integers(1, min(length, 6) + 1))
    later = np.sort(rng.choice(np.arange(1, length), num_sequences - 1, replace=False)) if length > 1 else np.array([])
    starts = np.concatenate(([0], later)).astype(np.uint32)
    mask = rng.integers(0, 2, length).astype(np.uint8)
    mask[np.append(starts[1:].astype(np.int64), length) - 1] = 0
    return PackedBin(rng.integers(0, vocab_size, length).astype(np.int32), mask, starts)


def with_weights(one: PackedBin) -> PackedBin:
    """Return a bin whose trained tokens count 0.5, 1, 1.5, ...

    Example:
        >>> with_weights(PackedBin(np.array([5, 6, 7]), np.array([1, 1, 0]), np.array([0]))).loss_mask.tolist()
        [0.5, 1.0, 0.0]
    """
    steps = np.cumsum(one.loss_mask, dtype=np.float32) / 2
    return one._replace(loss_mask=(steps * one.loss_mask).astype(np.float32))


def make_bins(num_bins: int, pack_size: int, vocab_size: int = 1000, seed: int = 0) -> list[PackedBin]:
    """Return several sound bins.

    Example:
        >>> [len(one.input_ids) <= 16 for one in make_bins(3, pack_size=16)]
        [True, True, True]
    """
    rng = np.random.default_rng(seed)
    return [make_bin(rng, pack_size, vocab_size) for _ in range(num_bins)]


def assert_same_bins(actual: Iterable[PackedBin], expected: Sequence[PackedBin]) -> None:
    """Check that bins are equal in number, lengths and every element."""
    found = list(actual)
    assert len(found) == len(expected), f"{len(found)} bins came back, not {len(expected)}"
    for index, (got, want) in enumerate(zip(found, expected, strict=True)):
        for field, got_values, want_values in zip(PackedBin._fields, got, want, strict=True):
            np.testing.assert_array_equal(got_values, want_values, err_msg=f"bin {index}: {field} differs")


def check_names(name: str, directory: Path) -> None:
    """The storage is found by its names, and its shards have plain names that sort by their number."""
    storage = storage_named(name)
    for one in (storage.name, *storage.aliases):
        assert storage_named(one) is storage, f"{one!r} does not find the storage"
    assert storage.summary, "summary is empty; say in one line what the storage is"
    names = [storage.shard_name(number) for number in (0, 1, 9, 10, 999_999)]
    assert names == sorted(set(names)), f"shard names do not sort by number: {names}"
    for one in names:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", one), f"{one!r} is not a plain name"
        assert storage_of(directory / one) in (storage, None), f"{one} is taken for another storage"
    figures = BinFigures(num_bins=2, pack_size=8, num_tokens=10, vocab_size=100)
    assert storage.stored_bytes(figures) > 0, "stored_bytes is not positive"


def check_round_trip(name: str, directory: Path) -> None:
    """Bins come back in order and unchanged, whether written one by one or in blocks; other orders are refused."""
    storage, bins = storage_named(name), _bins(20)
    one_by_one, blocks = directory / storage.shard_name(0), directory / storage.shard_name(1)
    _write(storage, one_by_one, bins)
    with _writer(storage, blocks, len(bins)) as writer:
        block_starts = range(0, len(bins), _BINS_PER_BLOCK)
        if not storage.takes_any_order:
            late = partial(writer.write_bin, 1, *bins[1])
            _expect(WriterStateError, late, "the writer takes bins out of their order, and takes_any_order is False")
        for first in reversed(block_starts) if storage.takes_any_order else block_starts:
            writer.write_block(first, block_of(bins[first : first + _BINS_PER_BLOCK], _PACK_SIZE, 1))
        writer.finalize()
    for path in (one_by_one, blocks):
        assert storage_of(path) is storage, f"recognises({path.name!r}) is not true of a shard that was just written"
        shard = storage.open(path)
        assert len(shard) == len(bins)
        assert_same_bins([shard[index] for index in range(len(shard))], bins)
        assert_same_bins(shard, bins)
        longest = max(len(one.input_ids) for one in bins)
        assert longest <= shard.pack_size <= _PACK_SIZE, (
            f"pack_size is {shard.pack_size}, the longest bin has {longest}"
        )
        for outside in (-1, len(bins)):
            _expect(IndexError, partial(shard.__getitem__, outside), f"bin {outside} can be read")
    assert storage.checksum(one_by_one) == storage.checksum(one_by_one), "checksum differs from call to call"
    assert [path for path, _ in shards_inside(directory)] == [one_by_one, blocks], "a writer left other files behind"


def check_figures(name: str, directory: Path) -> None:
    """What the writer and the reader say of all bins is what the bins say."""
    storage, bins = storage_named(name), _bins(9)
    writer = _write(storage, directory / storage.shard_name(0), bins)
    lengths = [len(one.input_ids) for one in bins]
    expected = {
        "num_bins": len(bins),
        "num_sequences": sum(one.num_sequences for one in bins),
        "num_tokens": sum(lengths),
        "num_loss_tokens": sum(int(one.loss_mask.sum()) for one in bins),
        "max_seqs_per_bin": max(one.num_sequences for one in bins),
        "min_packed_len": min(lengths),
    }
    for figures in (storage.open(directory / storage.shard_name(0)).figures, writer.figures):
        if figures is not None:
            assert isinstance(figures, BinFigures)
            assert {key: figures[key] for key in expected} == expected, "the figures differ from those of the bins"


def check_publishing(name: str, directory: Path) -> None:
    """A shard is published whole or not at all, and an existing one is replaced only when that is asked for."""
    storage, bins = storage_named(name), _bins(3)
    path = directory / storage.shard_name(0)
    with _writer(storage, path, len(bins)) as writer:
        writer.write_bin(0, *bins[0])
        assert not os.path.lexists(path), "the shard is visible before finalize"
        _expect(WriterStateError, writer.finalize, "finalize accepts a shard with missing bins")
    assert os.listdir(directory) == [], "a writer that was not finalized left files behind"
    _write(storage, path, bins)
    _expect(TargetExistsError, lambda: _write(storage, path, bins), "an existing shard is replaced without overwrite")
    _write(storage, path, bins[:2], overwrite=True)
    assert_same_bins(storage.open(path), bins[:2])
    assert os.listdir(directory) == [path.name], "overwriting left files behind"
    _expect(InvalidInputError, lambda: _writer(storage, "s3://bucket/shard", 1), "a URL is taken for a local path")


def check_refusals(name: str, directory: Path) -> None:
    """A writer refuses bins that break a rule, and bins that it has already."""
    storage = storage_named(name)
    sound = PackedBin(np.array([5, 6, 7]), np.array([1, 1, 0]), np.array([0]))
    long = _PACK_SIZE + 1
    wrong: dict[str, tuple[Any, Any, Any]] = {
        "an id that is not in the vocabulary": ([_VOCAB_SIZE], [0], [0]),
        "a negative id": ([-1], [0], [0]),
        "a bin that is longer than pack_size": ([1] * long, [0] * long, [0]),
        "a mask that is neither 0 nor 1": ([1, 2], [2, 0], [0]),
        "a mask that trains the last token of a sequence": ([1, 2], [0, 1], [0]),
        "a mask of another length": ([1, 2], [0], [0]),
        "a bin without tokens": ([], [], [0]),
        "a bin without sequences": ([1], [0], []),
        "a first sequence that does not start at 0": ([1, 2], [0, 0], [1]),
        "starts that do not increase": ([1, 2], [0, 0], [0, 0]),
        "a start at the end of the bin": ([1, 2], [0, 0], [0, 2]),
    }
    with _writer(storage, directory / storage.shard_name(0), 2) as writer:
        for problem, one in wrong.items():
            _expect(InvalidInputError, partial(writer.write_bin, 0, *one), f"the writer accepts {problem}")
        _expect(InvalidInputError, lambda: writer.write_bin(2, *sound), "the writer accepts more bins than num_bins")
        writer.write_bin(0, *sound)
        _expect(WriterStateError, lambda: writer.write_bin(0, *sound), "the writer accepts a bin twice")
        writer.write_bin(1, *sound)
        writer.finalize()
    assert_same_bins(storage.open(directory / storage.shard_name(0)), [sound, sound])


def check_pickling(name: str, directory: Path) -> None:
    """An open shard survives pickling, as the workers of a loader need it."""
    storage, bins = storage_named(name), _bins(5)
    _write(storage, directory / storage.shard_name(0), bins)
    shard = storage.open(directory / storage.shard_name(0))
    assert_same_bins(pickle.loads(pickle.dumps(shard)), bins)


def check_damage(name: str, directory: Path) -> None:
    """A shard that was cut short is an error of this package when it is opened, and a finding of `validate`."""
    storage, bins = storage_named(name), _bins(20)
    path = directory / storage.shard_name(0)
    _write(storage, path, bins)
    largest = max((file for file in [path, *path.rglob("*")] if file.is_file()), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    _expect(PackedSFTError, lambda: list(storage.open(path)), "a shard that was cut short can be read")
    assert not validate(path).ok, "validate finds nothing wrong with a shard that was cut short"


def check_dataset_directory(name: str, directory: Path) -> None:
    """Several splits and shards make a dataset directory that is whole, sound and found again."""
    storage, bins = storage_named(name), _bins(12)
    with DatasetWriter(directory / "dataset", storage=name) as dataset:
        for split, number, part in (("train", 0, bins[:5]), ("train", 1, bins[5:9]), ("validation", 0, bins[9:])):
            with dataset.shard_writer(split, number, _options(len(part))) as writer:
                for index, one in enumerate(part):
                    writer.write_bin(index, *one)
                writer.finalize()
        dataset.finalize()
    opened = open_dataset(directory / "dataset")
    assert opened.storage is storage
    assert opened.is_whole()
    assert_same_bins([one for shard in opened.open_shards("train") for one in shard], bins[:9])
    report = validate(directory / "dataset")
    assert report.ok, f"validate finds {report.findings[0]}"
    assert (report.num_shards, report.num_bins) == (3, len(bins))
    assert report.num_tokens == sum(len(one.input_ids) for one in bins)


def check_conversion(name: str, directory: Path) -> None:
    """Bins survive the way to the default storage (from that one: to legacy) and back."""
    storage, bins = storage_named(name), _bins(10)
    other = storage_named("legacy" if storage.name == DEFAULT_STORAGE else DEFAULT_STORAGE)
    first, between, last = (
        directory / f"{number}_{one.shard_name(number)}" for number, one in enumerate((storage, other, storage))
    )
    _write(storage, first, bins)
    convert(first, between, to=other.name)
    convert(between, last, to=storage.name)
    assert_same_bins(open_shard(between), bins)
    assert_same_bins(open_shard(last), bins)


def check_weights(name: str, directory: Path) -> None:
    """A loss mask of floats comes back as it was, or is refused; never as one of 0 and 1."""
    storage, plain = storage_named(name), _bins(12)
    bins = [with_weights(one) if index % 3 == 2 else one for index, one in enumerate(plain)]
    path = directory / storage.shard_name(0)
    if not storage.keeps_weights:
        for write in (
            lambda writer: writer.write_bin(0, *bins[2]),
            lambda writer: writer.write_block(0, block_of(bins, _PACK_SIZE, 1)),
        ):
            with _writer(storage, path, len(bins)) as writer:
                _expect(InvalidInputError, partial(write, writer), "the writer takes weights that it cannot keep")
        return
    writer = _write(storage, path, bins)
    shard = storage.open(path)
    assert_same_bins(shard, bins)
    total = sum(float(one.loss_mask.sum(dtype=np.float64)) for one in bins)
    for figures in (shard.figures, writer.figures):
        if figures is not None:
            assert figures.has_weights, "the figures do not say that there are weights"
            assert figures.sum_loss_weights == total, "sum_loss_weights differs from that of the bins"
    _write(storage, directory / storage.shard_name(1), [one._replace(loss_mask=one.loss_mask * 1.0) for one in plain])
    unweighted = storage.open(directory / storage.shard_name(1))
    assert not unweighted.figures.has_weights, "weights of 0 and 1 are kept as weights"
    assert validate(path).ok, f"validate finds {validate(path).findings[0]}"


CHECKS: tuple[Callable[[str, Path], None], ...] = (
    check_names,
    check_round_trip,
    check_figures,
    check_publishing,
    check_refusals,
    check_pickling,
    check_damage,
    check_dataset_directory,
    check_conversion,
    check_weights,
)


def _bins(count: int) -> list[PackedBin]:
    return make_bins(count, _PACK_SIZE, _VOCAB_SIZE, seed=count)


def _options(num_bins: int, *, overwrite: bool = False) -> WriterOptions:
    return WriterOptions(num_bins=num_bins, pack_size=_PACK_SIZE, vocab_size=_VOCAB_SIZE, pad_id=1, overwrite=overwrite)


def _writer(storage: Storage, path: str | Path, num_bins: int, *, overwrite: bool = False) -> PackedShardWriter:
    return storage.create_writer(path, _options(num_bins, overwrite=overwrite))


def _write(storage: Storage, path: Path, bins: Sequence[PackedBin], *, overwrite: bool = False) -> PackedShardWriter:
    odd_first = [*range(1, len(bins), 2), *range(0, len(bins), 2)]
    with _writer(storage, path, len(bins), overwrite=overwrite) as writer:
        for index in odd_first if storage.takes_any_order else range(len(bins)):
            writer.write_bin(index, *bins[index])
        writer.finalize()
    return writer


def _expect(error: type[Exception], call: Callable[[], object], problem: str) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"{problem}; it must be {error.__name__}")
