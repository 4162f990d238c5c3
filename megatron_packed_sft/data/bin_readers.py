"""Where bins come from, behind one interface: shards of any storage, or a token store with a plan.

ShardBinReader    shards of one storage, one or thousands, opened when their bins are first needed
PlanBinReader     token store + plan: bins are put together when they are asked for, no shards needed
JoinedBinReader   several of these end to end
"""

from __future__ import annotations

import bisect
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.batch.located_bins import (
    LocatedBins,
    locate_in_arrays,
    locate_in_samples,
    locate_in_shard,
    locate_in_stream,
)
from megatron_packed_sft.data.made_with import MadeWith, Tolerance, refuse_mixed
from megatron_packed_sft.disk.checksum import checksum
from megatron_packed_sft.errors import ShardError
from megatron_packed_sft.packing.items import sizes_of
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.packing.strategies.packing_problem import Int32
from megatron_packed_sft.storage.bins import BinFigures, PackedBin
from megatron_packed_sft.storage.dataset_directory import DatasetDirectory, ShardEntry, open_listed_shard
from megatron_packed_sft.storage.flat_shard import FlatShard
from megatron_packed_sft.storage.interface import PackedShard, Storage
from megatron_packed_sft.storage.loss_weights import NO_WEIGHTS
from megatron_packed_sft.storage.megatron_indexed.reader import IndexedDocuments
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
from megatron_packed_sft.storage.token_stream.reader import TokenStream
from megatron_packed_sft.support.wording import counted
from megatron_packed_sft.tokens.materialize import plan_block, stored_width
from megatron_packed_sft.tokens.store import TokenStore

logger = logging.getLogger(__name__)

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_NO_TOLERANCE = Tolerance()


class BinReader(Protocol):
    """Packed bins by number. Everything that datasets can read offers this."""

    @property
    def fingerprint(self) -> str:
        """Identifies the content."""

    @property
    def figures(self) -> BinFigures:
        """What is known of all bins without opening a shard."""

    @property
    def description(self) -> str:
        """For logs and messages: what it is and where."""

    @property
    def vocab_size(self) -> int | None:
        """All ids are below it, as far as anybody recorded."""

    @property
    def pad_id(self) -> int | None:
        """What the data was padded with, as far as anybody recorded."""

    def made_with(self) -> list[MadeWith]:
        """Return what each of its parts was made with."""

    def __len__(self) -> int:
        """Return the number of bins."""

    def bin(self, index: int) -> PackedBin:
        """Return one bin, 0 <= index < len; its arrays must not be written to."""

    def locate(self, bins: Numbers, positions: Numbers, is_padding: Flags) -> list[LocatedBins]:
        """Return bins for the collate kernel, with their places in the batch."""

    def longest_input(self) -> int:
        """Return how many positions the bin that needs most takes in a batch. May read all indices."""

    def advise(self, bins: Numbers) -> None:
        """Announce bins that are needed soon."""


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
    _open: dict[int, PackedShard] = field(default_factory=dict, repr=False)

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
        figures = [storage.figures(shard) for shard in shards]
        parts = [
            _made_with(str(path), one, functools.partial(getattr, one, "vocab_size"), shard.__getitem__)
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
                ShardEntry(path.name, len(shard), _identity(storage, path, shard))
                for path, shard in zip(paths, shards, strict=True)
            ],
            together,
            _described(storage, paths, shards),
            of_directory,
            _open=dict(enumerate(shards)),
        )

    @classmethod
    def of_dataset(cls, dataset: DatasetDirectory, split: str) -> ShardBinReader:
        """Read a split of a dataset directory; shards stay closed until their bins are needed."""
        entries = dataset.entries(split)
        paths = [dataset.shard_path(split, entry) for entry in entries]
        _announce(dataset.storage, paths)
        description = f"split {split!r} of {dataset.path}, {_count(dataset.storage, len(entries))}"
        return cls(
            dataset.storage, paths, entries, dataset.figures[split], description, of_directory=True, is_listed=True
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
        return BinFigures.over([self.storage.figures(self.shard(number)) for number in range(num_needed)]).vocab_size

    @functools.cached_property
    def pad_id(self) -> int | None:
        """What the first shard was padded with; memmap_v1 shards that do not say so were padded with 0."""
        if self.figures.pad_id is not None or not self.storage.has_manifest:
            return self.figures.pad_id
        return self.storage.figures(self.shard(0)).pad_id or 0

    def made_with(self) -> list[MadeWith]:
        """Return what the shards were made with: they agree, as far as they say."""
        return [_made_with(self.description, self.figures, self._recorded_vocab_size, self.bin)]

    def _recorded_vocab_size(self) -> int | None:
        return self.vocab_size

    def __len__(self) -> int:
        return self._offsets_list[-1]

    def shard(self, number: int) -> PackedShard:
        """Return shard `number`, opened now if it was not."""
        shard = self._open.get(number)
        if shard is None:
            path, entry = self.paths[number], self.entries[number]
            shard = open_listed_shard(self.storage, path, entry) if self.is_listed else self._reopened(path, entry)
            self._open[number] = shard
        return shard

    def _reopened(self, path: Path, entry: ShardEntry) -> PackedShard:
        shard = self.storage.open(path)
        if _identity(self.storage, path, shard) != entry.checksum:
            raise ShardError(f"{path} was changed after its dataset was opened; open the dataset again")
        return shard

    def __getstate__(self) -> dict[str, Any]:
        # Workers open the shards that they read; the arrays of a legacy file would be gigabytes to send.
        return {**self.__dict__, "_open": {}}

    def bin(self, index: int) -> PackedBin:
        """Return one bin, as read-only views where the storage has some."""
        shard, inside = self.place(index)
        return shard[inside]

    def place(self, index: int) -> tuple[PackedShard, int]:
        """Return the shard that holds a bin, and the bin's number there."""
        number = bisect.bisect_right(self._offsets_list, index) - 1
        return self.shard(number), index - self._offsets_list[number]

    def locate(self, bins: Numbers, positions: Numbers, is_padding: Flags) -> list[LocatedBins]:
        """Return the bins of each shard that holds some of them."""
        return [
            _locate_in(self.shard(number), str(self.paths[number]), inside, positions[chosen], is_padding[chosen])
            for number, chosen, inside in self._by_shard(bins)
        ]

    def longest_input(self) -> int:
        """Return how many positions the bin that needs most takes in a batch."""
        return max(_longest_input(self.shard(number)) for number in range(len(self.entries)))

    def advise(self, bins: Numbers) -> None:
        """Have the kernel read the bins ahead, where the storage is memory-mapped."""
        if self.storage.in_memory:
            return
        for number, _, inside in self._by_shard(bins):
            shard = self.shard(number)
            if isinstance(shard, MemmapShard | TokenStream | IndexedDocuments):
                shard.advise(inside.tolist())

    def _by_shard(self, bins: Numbers) -> list[tuple[int, list[int], Numbers]]:
        # In Python: for the few bins of a batch that takes a tenth of the time of np.unique and masks.
        places: dict[int, list[int]] = {}
        for place, index in enumerate(bins.tolist()):
            places.setdefault(bisect.bisect_right(self._offsets_list, index) - 1, []).append(place)
        return [(number, chosen, bins[chosen] - self._offsets_list[number]) for number, chosen in places.items()]


def _made_with(
    where: str, figures: BinFigures, vocab_size: Callable[[], int | None], bin_at: Callable[[int], PackedBin]
) -> MadeWith:
    template, multiple = figures.chat_template_fingerprint, figures.pad_seq_to_mult
    return MadeWith(where, figures.tokenizer, template, vocab_size, figures.num_bins, bin_at, multiple)


def _identity(storage: Storage, path: Path, shard: Any) -> str:
    """Return what identifies the content of a shard that no dataset.json lists."""
    return getattr(shard, "fingerprint", None) or storage.checksum(path)


def _locate_in(shard: Any, source: str, bins: Numbers, positions: Numbers, is_padding: Flags) -> LocatedBins:
    """Find bins in a shard the fastest way that it offers: its maps, its flat arrays, or bin by bin."""
    if isinstance(shard, MemmapShard):
        return locate_in_shard(shard, bins, positions, is_padding)
    if isinstance(shard, FlatShard):
        return locate_in_arrays(*shard.flat, bins, positions, is_padding, source)
    if isinstance(shard, TokenStream):
        return locate_in_stream(shard, bins, positions, is_padding)
    samples = [
        sample_of(shard[index], padding) for index, padding in zip(bins.tolist(), is_padding.tolist(), strict=True)
    ]
    return locate_in_samples(samples, positions, source)


def _longest_input(shard: Any) -> int:
    if isinstance(shard, MemmapShard):
        arrays = shard.arrays
        return int((arrays.packed_len.astype(np.int64) - np.diff(arrays.seq_offsets.astype(np.int64))).max())
    if isinstance(shard, FlatShard):
        return int((shard.packed_len.astype(np.int64) - np.diff(shard.flat.seq_offsets)).max())
    if isinstance(shard, TokenStream | IndexedDocuments):
        return shard.pack_size - 1
    return max(int(len(one.input_ids) - one.num_sequences) for one in shard)


def sample_of(packed: PackedBin, is_padding: bool, *, weighted: bool = False) -> dict[str, Any]:
    """Return a bin as a sample, in arrays of its own: torch must not get read-only memory.

    In a `weighted` dataset every loss mask is float32, also those of bins whose trained tokens all count 1.
    """
    mask = np.zeros_like(packed.loss_mask) if is_padding else packed.loss_mask.copy()
    sample = {
        "input_ids": packed.input_ids.copy(),
        "seq_boundaries": [*packed.seq_start_id.tolist(), len(packed.input_ids)],
        "loss_mask": mask.astype(np.float32) if weighted else mask,
    }
    if is_padding:
        sample["is_padding"] = True  # without it, answer_only_loss=False would count the padding sample's loss
    return sample


class PlanBinReader:
    """Bins of a plan, put together from the token store when they are asked for; any pack size, no shards."""

    def __init__(self, store: TokenStore, plan: PackPlan, pad_id: int = 0, bins: Int32 | None = None) -> None:
        """`bins` are those to read, in this order; by default all, in the plan's."""
        chosen = plan.bin_order if bins is None else bins
        self._store = store
        self._plan = plan
        self._bins = chosen.astype(np.int64)
        self._width = stored_width(plan)
        self.pad_id: int | None = pad_id
        self.vocab_size = store.manifest.vocab_size
        self.figures = figures_of_plan(
            plan,
            self._bins,
            vocab_size=store.manifest.vocab_size,
            pad_id=pad_id,
            tokenizer=store.manifest.tokenizer,
            chat_template_fingerprint=store.manifest.chat_template_fingerprint,
            has_weights=store.has_weights,
        )
        self.description = f"token store {store.path} with {plan!r}"
        self.fingerprint = checksum((store.fingerprint + plan.fingerprint_of_bins(chosen)).encode())

    def made_with(self) -> list[MadeWith]:
        """Return what the store was made with."""
        return [_made_with(self.description, self.figures, self._recorded_vocab_size, self.bin)]

    def _recorded_vocab_size(self) -> int | None:
        return self.vocab_size

    def __len__(self) -> int:
        return len(self._bins)

    def bin(self, index: int) -> PackedBin:
        """Return one bin, in arrays of its own."""
        return plan_block(self._plan, self._store, self._bins[[index]], self._width, self.pad_id or 0)[0]

    def locate(self, bins: Numbers, positions: Numbers, is_padding: Flags) -> list[LocatedBins]:
        """Put the bins together now."""
        block = plan_block(self._plan, self._store, self._bins[bins], self._width, self.pad_id or 0)
        located = locate_in_arrays(
            block.input_ids.reshape(-1),
            block.loss_mask.reshape(-1),
            np.arange(len(bins) + 1) * self._width,
            block.seq_starts,
            block.seq_offsets.astype(np.int64),
            np.arange(len(bins)),
            positions,
            is_padding,
            self.description,
            NO_WEIGHTS if block.loss_weights is None else block.loss_weights.reshape(-1),
        )
        located.lengths[:] = block.packed_len
        return [located]

    def longest_input(self) -> int:
        """Return how many positions the bin that needs most takes in a batch."""
        return longest_input_of_plan(self._plan)

    def advise(self, bins: Numbers) -> None:
        """Nothing is announced: sequences lie all over the store."""


def figures_of_plan(plan: PackPlan, bins: Numbers, **recorded: Any) -> BinFigures:
    """Return the figures of a plan's bins as they are read, with what else is recorded about the data."""
    counts = np.diff(plan.bin_offsets)[bins]
    tokens = plan.bin_tokens[bins]
    return BinFigures(
        num_bins=len(bins),
        pack_size=stored_width(plan),
        max_seqs_per_bin=int(counts.max()),
        max_seq_len=int(plan.item_lengths[plan.indices].max()),
        min_packed_len=int(tokens.min()),
        pad_seq_to_mult=plan.pad_seq_to_mult,
        num_tokens=int(tokens.sum()),
        num_sequences=int(counts.sum()),
        **recorded,
    )


def longest_input_of_plan(plan: PackPlan) -> int:
    """Return how many positions the bin that needs most takes in a batch."""
    inputs = sizes_of(plan.item_lengths, "tokens", plan.pad_seq_to_mult)[plan.indices].astype(np.int64) - 1
    return int(np.add.reduceat(inputs, plan.bin_offsets[:-1]).max())


class JoinedBinReader:
    """Several sources end to end."""

    def __init__(self, sources: Sequence[BinReader]) -> None:
        self.sources = tuple(sources)
        self._offsets = np.cumsum([0, *(len(source) for source in sources)])
        self.fingerprint = checksum("".join(source.fingerprint for source in sources).encode())
        self.description = "; ".join(source.description for source in sources)
        self.figures = BinFigures.over([source.figures for source in sources])

    @property
    def vocab_size(self) -> int | None:
        """The largest vocabulary that a source recorded."""
        return max((size for source in self.sources if (size := source.vocab_size) is not None), default=None)

    @property
    def pad_id(self) -> int | None:
        """The padding id of the first source that records one."""
        return next((pad_id for source in self.sources if (pad_id := source.pad_id) is not None), None)

    def made_with(self) -> list[MadeWith]:
        """Return what each source was made with."""
        return [part for source in self.sources for part in source.made_with()]

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def bin(self, index: int) -> PackedBin:
        """Return one bin, from the source that holds it."""
        number = int(np.searchsorted(self._offsets, index, side="right")) - 1
        return self.sources[number].bin(index - int(self._offsets[number]))

    def locate(self, bins: Numbers, positions: Numbers, is_padding: Flags) -> list[LocatedBins]:
        """Return the bins of all sources that hold some of them."""
        numbers = np.searchsorted(self._offsets, bins, side="right") - 1
        found: list[LocatedBins] = []
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            inside = bins[chosen] - self._offsets[number]
            found += self.sources[number].locate(inside, positions[chosen], is_padding[chosen])
        return found

    def longest_input(self) -> int:
        """Return how many positions the bin that needs most takes in a batch."""
        return max(source.longest_input() for source in self.sources)

    def advise(self, bins: Numbers) -> None:
        """Pass it on to the sources."""
        numbers = np.searchsorted(self._offsets, bins, side="right") - 1
        for number in np.unique(numbers).tolist():
            self.sources[number].advise(bins[numbers == number] - self._offsets[number])


def _announce(storage: Storage, paths: Sequence[Path]) -> None:
    if storage.in_memory:
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        logger.info("%s%s: %s is read into memory", paths[0], more, storage.name)


def _pass_on(shards: Sequence[PackedShard]) -> None:
    """Log what token streams have to say, where they are first opened and not again in every worker."""
    for stream in (shard for shard in shards if isinstance(shard, TokenStream)):
        for warning in stream.warnings:
            logger.warning("%s", warning)
        for note in stream.notes:
            logger.info("%s", note)


def _described(storage: Storage, paths: Sequence[Path], shards: Sequence[PackedShard]) -> str:
    more = " ..." if len(shards) > 1 else ""
    num_files = sum(len(shard.files) for shard in shards if isinstance(shard, TokenStream))
    if num_files:
        return f"token stream {paths[0]}{more}, {counted(num_files, 'file')}"
    return f"{_count(storage, len(shards))}, {paths[0]}{more}"


def _count(storage: Storage, count: int) -> str:
    return f"{count:,} {storage.name} shard{'' if count == 1 else 's'}"
