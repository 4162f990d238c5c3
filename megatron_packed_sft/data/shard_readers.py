"""Read bins from shards, one or thousands, each opened when its first bin is needed.

`shortage` tells at the start whether the node's cache can hold what a shuffled order visits at a time.
"""

from __future__ import annotations

import bisect
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_packed_sft.data.batch.located_bins import (
    LocatedBins,
    locate_gathered,
    locate_in_shards,
)
from megatron_packed_sft.data.bin_readers import BinReader, Flags, JoinedBinReader, Numbers, made_with_of
from megatron_packed_sft.data.made_with import MadeWith, refuse_mixed
from megatron_packed_sft.data.options import Tolerance
from megatron_packed_sft.errors import PackedSFTError, ShardError
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.storage.dataset_directory import DatasetDirectory, ShardEntry, open_listed_shard
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import PackedShard, ReadOptions, Storage
from megatron_packed_sft.storage.remote_shard import RemoteShard
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.file_maps import LazyMaps
from megatron_packed_sft.support.wording import byte_count, plural

logger = logging.getLogger(__name__)

_NO_TOLERANCE = Tolerance()
# A download takes longer than a read: so many batches ahead, or two shards if a batch were one bin.
_FETCHED_AHEAD = range(32, 2048)
# What `shortage` has reported in this process: the source, the cache directory and its size.
_REPORTED: set[tuple[str, str, int | None]] = set()
_WINDOWS_AT_ONCE = 2  # the next window is fetched while the last shards of the current one are read
_BESIDE_BINS = 10_000  # bytes: headers and manifest of a memmap_v1 shard, which matter only if it is tiny


@dataclass(eq=False)
class ShardBinReader:
    """Bins of shards of one storage, end to end. A shard is opened when one of its bins is needed."""

    storage: Storage
    paths: Sequence[Path]
    entries: Sequence[ShardEntry]  # what must hold when a shard is opened
    figures: BinFigures
    description: str
    of_directory: bool = False  # opened by the name of a directory that holds the shards
    is_listed: bool = False  # in a dataset.json, which the entries are from
    remote: Sequence[RemoteShard] | None = None  # the shards' places in an object store
    _open: dict[int, PackedShard] = field(default_factory=dict, repr=False)
    _reading: ReadOptions = field(default_factory=ReadOptions, repr=False)

    def __post_init__(self) -> None:
        self.shard_offsets = np.cumsum([0, *(entry.num_bins for entry in self.entries)])
        self._offsets_list: list[int] = self.shard_offsets.tolist()

    @classmethod
    def of_shards(
        cls,
        storage: Storage,
        paths: Sequence[Path],
        tolerance: Tolerance = _NO_TOLERANCE,
        *,
        of_directory: bool = False,
    ) -> ShardBinReader:
        """Open shards now; those made with different tokenizers or templates are refused."""
        _announce(storage, paths)
        shards = [storage.open(path) for path in paths]
        _pass_on(shards)
        figures = [shard.figures for shard in shards]
        parts = [
            made_with_of(str(path), one, functools.partial(getattr, one, "vocab_size"), shard.__getitem__)
            for path, one, shard in zip(paths, figures, shards, strict=True)
        ]
        recorded = next((part.tokenizer for part in parts if part.tokenizer), None)
        if recorded or not of_directory:
            refuse_mixed(parts, tolerance)
        together = BinFigures.over(figures)
        if not tolerance.tokenizer:  # then all that record one agree
            together = replace(together, tokenizer=recorded)
        return cls(
            storage,
            paths,
            [
                ShardEntry(path.name, len(shard), shard.fingerprint or storage.checksum(path))
                for path, shard in zip(paths, shards, strict=True)
            ],
            together,
            storage.describe(paths, shards),
            of_directory,
            _open=dict(enumerate(shards)),
        )

    @classmethod
    def of_dataset(cls, dataset: DatasetDirectory, split: str) -> ShardBinReader:
        """Read a split of a dataset directory; shards stay closed until their bins are needed."""
        entries = dataset.entries(split)
        paths = [dataset.shard_path(split, entry) for entry in entries]
        _announce(dataset.storage, paths)
        description = f"split {split!r} of {dataset.location}, {dataset.storage.count(len(entries))}"
        found = [dataset.remote_shard(split, entry) for entry in entries]
        return cls(
            dataset.storage,
            paths,
            entries,
            dataset.figures[split],
            description,
            of_directory=True,
            is_listed=True,
            remote=None if dataset.url is None else [one for one in found if one is not None],
        )

    @property
    def fingerprint(self) -> str:
        """Identifies all shards, in order."""
        if len(self.entries) == 1 and not self.storage.has_manifest:
            return self.entries[0].checksum
        return checksum("".join(entry.checksum for entry in self.entries).encode())

    @functools.cached_property
    def vocab_size(self) -> int | None:
        """All ids are below it. Without a tokenizer every shard recorded only the ids that it has seen."""
        if self.figures.vocab_size is not None:
            return self.figures.vocab_size
        num_needed = 1 if self.figures.tokenizer else len(self.entries)
        return BinFigures.over([self.shard(number).figures for number in range(num_needed)]).vocab_size

    @functools.cached_property
    def pad_id(self) -> int | None:
        """What the first shard was padded with; memmap_v1 shards that do not say so were padded with 0."""
        if self.figures.pad_id is not None or not self.storage.has_manifest:
            return self.figures.pad_id
        return self.shard(0).figures.pad_id or 0

    def made_with(self) -> list[MadeWith]:
        """Return what the shards were made with: they agree, as far as they say."""
        return [made_with_of(self.description, self.figures, self._recorded_vocab_size, self.bin)]

    def _recorded_vocab_size(self) -> int | None:
        return self.vocab_size

    def __len__(self) -> int:
        return self._offsets_list[-1]

    def shard(self, number: int) -> PackedShard:
        """Return shard `number`, opened now if it was not."""
        shard = self._open.get(number)
        if shard is None:
            path, entry = self.paths[number], self.entries[number]
            remote = None if self.remote is None else self.remote[number]
            listed = self.is_listed
            shard = open_listed_shard(self.storage, path, entry, remote) if listed else self._reopened(path, entry)
            shard.read_with(self._reading)
            self._open[number] = shard
        return shard

    def read_with(self, options: ReadOptions) -> None:
        """Choose how the shards' files are read from now on; see `ReadOptions`."""
        self._reading = options
        for shard in list(self._open.values()):
            shard.read_with(self._reading)

    def _reopened(self, path: Path, entry: ShardEntry) -> PackedShard:
        shard = self.storage.open(path)
        if (shard.fingerprint or self.storage.checksum(path)) != entry.checksum:
            raise ShardError(f"{path} was changed after its dataset was opened; open the dataset again")
        return shard

    def __getstate__(self) -> dict[str, Any]:
        # Workers open the shards that they read; the arrays of a legacy file would be gigabytes to send.
        return {**self.__dict__, "_open": {}}

    def bin(self, index: int) -> PackedBin:
        """Return one bin, as read-only views where the storage has some."""
        number = bisect.bisect_right(self._offsets_list, index) - 1
        shard = self._open.get(number) or self.shard(number)
        return shard[index - self._offsets_list[number]]

    def place(self, index: int) -> tuple[PackedShard, int]:
        """Return the shard that holds a bin, and the bin's number there."""
        number = bisect.bisect_right(self._offsets_list, index) - 1
        return self.shard(number), index - self._offsets_list[number]

    def locate(self, bins: Numbers, positions: Numbers, is_padding: Flags) -> list[LocatedBins]:
        """Return the bins of each shard that holds some of them; of mapped shards, those of all shards at once."""
        owners: dict[int, int] = {}
        owner_of, inside = [], []
        for index in bins.tolist():
            number = bisect.bisect_right(self._offsets_list, index) - 1
            owner_of.append(owners.setdefault(number, len(owners)))
            inside.append(index - self._offsets_list[number])
        shards = [self.shard(number) for number in owners]
        if shards and shards[0].mapped_bins() is not None:
            return [locate_in_shards(shards, owner_of, inside, positions, is_padding)]
        located = []
        for number, chosen, numbers in self._by_shard(bins):
            gathered = self.shard(number).gather(numbers.tolist())
            origin = str(self.paths[number])
            located.append(locate_gathered(gathered, numbers, positions[chosen], is_padding[chosen], origin))
        return located

    def longest_input(self) -> int:
        """Return how many positions the bin that needs most takes in a batch."""
        return max(self.shard(number).longest_input() for number in range(len(self.entries)))

    def advise(self, bins: Numbers) -> None:
        """Have the kernel read the bins ahead, where the storage is memory-mapped; fetch shards that are not here."""
        by_shard = self._by_shard(bins)
        if self.remote is not None:
            by_shard = [one for one in by_shard if self._is_here_or_wanted(self.remote, one[0])]
        if self.storage.in_memory:
            return
        for number, _, inside in by_shard:
            self.shard(number).advise(inside.tolist())

    def _is_here_or_wanted(self, remote: Sequence[RemoteShard], number: int) -> bool:
        """Return whether a shard of a store is on this node; one that is not is fetched from now on."""
        shard = self._open.get(number)
        if isinstance(shard, LazyMaps) and shard.is_mapped:  # nearly always, and nothing is asked of the disk
            return True
        cache, item = remote[number].cache, remote[number].item
        is_here = cache.has(item)
        if not is_here:
            cache.ahead.want([item])
        return is_here

    @property
    def num_batches_advised(self) -> int | None:
        """How many batches ahead `advise` is useful; None for as many as usual."""
        if self.remote is None:
            return None
        return min(max(_FETCHED_AHEAD.start, 2 * len(self) // len(self.entries)), _FETCHED_AHEAD.stop)

    def _by_shard(self, bins: Numbers) -> list[tuple[int, list[int], Numbers]]:
        # In Python: for the few bins of a batch that takes a tenth of the time of np.unique and masks.
        places: dict[int, list[int]] = {}
        for place, index in enumerate(bins.tolist()):
            places.setdefault(bisect.bisect_right(self._offsets_list, index) - 1, []).append(place)
        return [(number, chosen, bins[chosen] - self._offsets_list[number]) for number, chosen in places.items()]


def _announce(storage: Storage, paths: Sequence[Path]) -> None:
    if storage.in_memory:
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        logger.info("%s%s: %s is read into memory", paths[0], more, storage.name)


def _pass_on(shards: Sequence[PackedShard]) -> None:
    """Log remarks about the content, where shards are first opened and not again in every worker."""
    for shard in shards:
        for warning in shard.warnings:
            logger.warning("%s", warning)
        for note in shard.notes:
            logger.info("%s", note)


def shortage(source: BinReader, window: int | None, key: str = "{}") -> str | None:
    """Return a warning if a shuffled pass would fetch evicted shards again; once per process and source.

    Args:
        source: the data.
        window: how many shards are mixed at a time; None for a full shuffle.
        key: the user's spelling of a setting, such as `data.{}`.
    """
    parts = source.sources if isinstance(source, JoinedBinReader) else (source,)
    remote = [part for part in parts if isinstance(part, ShardBinReader) and part.remote]
    if not remote or not remote[0].remote:
        return None
    cache = remote[0].remote[0].cache
    reported = (source.description, str(cache.directory), cache.asked_size)
    if reported in _REPORTED:
        return None
    _REPORTED.add(reported)
    room, num_shards = cache.size, sum(len(part.entries) for part in remote)
    for look in (_estimated, _measured):  # send a request only if the estimate does not fit
        sizes = [look(part) for part in remote]
        num_bytes = sum(sizes)
        shard = max((size / len(part.entries) for size, part in zip(sizes, remote, strict=True) if size), default=1.0)
        needed = num_bytes if window is None else int(min(_WINDOWS_AT_ONCE * window, num_shards) * shard)
        if needed <= room:
            return None
    fitting = max(int(room / shard / _WINDOWS_AT_ONCE), 1)
    smaller = f"set {key.format('shard_window')}={fitting} to visit few shards at a time, or "
    if not isinstance(source, ShardBinReader) or (window is not None and window <= fitting):
        smaller = ""  # a list or a blend has no shard window
    what = "a full shuffle visits all of it at any time"
    if window is not None:
        what = f"{key.format('shard_window')}={window} visits {byte_count(needed)} of it at a time"
    return (
        f"{source.description} has about {byte_count(num_bytes)}, and {what}, but the cache {cache.directory} holds "
        f"{byte_count(room)} (about {plural(int(room / shard), 'shard')} of {num_shards:,}), so shards will be "
        f"fetched repeatedly; {smaller}raise {key.format('cache_size')} to {byte_count(int(needed * 1.05))}"
    )


def _measured(part: ShardBinReader) -> int:
    """Estimate the size of the shards from the manifest of the first one: only a manifest says how wide ids are."""
    if part.remote is None or part.entries[0].num_bytes is not None:
        return _estimated(part)
    try:
        return part.remote[0].contents.num_bytes * len(part) // part.entries[0].num_bins
    except PackedSFTError:  # reading the shard reports what is wrong
        return _estimated(part)


def _estimated(part: ShardBinReader) -> int:
    """Return the size of the shards as listed in dataset.json, or else an upper bound."""
    listed = [entry.num_bytes for entry in part.entries]
    known = [size for size in listed if size is not None]
    if len(known) == len(listed):
        return sum(known)
    return len(part.entries) * _BESIDE_BINS + part.storage.stored_bytes(part.figures)
