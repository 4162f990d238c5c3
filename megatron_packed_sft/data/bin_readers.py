"""Readers of packed bins: their interface, several readers as one, and bins that a plan makes from a token store.

Bins of packed shards are read by `shard_readers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.batch.located_bins import (
    LocatedBins,
    locate_in_arrays,
)
from megatron_packed_sft.data.made_with import MadeWith
from megatron_packed_sft.packing.items import sizes_of
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.packing.strategies.packing_problem import Int32
from megatron_packed_sft.storage.bins import NO_WEIGHTS, PackedBin
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import ReadOptions
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.tokens.materialize import plan_block, stored_width
from megatron_packed_sft.tokens.store import TokenStore

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class BinReader(Protocol):
    """Packed bins by number: what every source of a dataset offers."""

    @property
    def fingerprint(self) -> str:
        """Identifies the content."""

    @property
    def figures(self) -> BinFigures:
        """What is known about all bins without opening a shard."""

    @property
    def description(self) -> str:
        """What the data is and where, for logs and messages."""

    @property
    def vocab_size(self) -> int | None:
        """All ids are below it; None if the data does not record it."""

    @property
    def pad_id(self) -> int | None:
        """The id that the data was padded with; None if the data does not record it."""

    def made_with(self) -> list[MadeWith]:
        """Return the tokenizer and template that each part was made with."""

    def __len__(self) -> int:
        """Return the number of bins."""

    def bin(self, index: int) -> PackedBin:
        """Return one bin, 0 <= index < len; its arrays must not be written to."""

    def locate(self, bins: Numbers, positions: Numbers, is_padding: Flags) -> list[LocatedBins]:
        """Return bins for the collate kernel, with their places in the batch."""

    def longest_input(self) -> int:
        """Return how many positions the longest bin takes in a batch. May read all indices."""

    def advise(self, bins: Numbers) -> None:
        """Announce bins that are needed soon."""

    def read_with(self, options: ReadOptions) -> None:
        """Choose how files are read from now on, where there is a choice."""


def made_with_of(
    where: str, figures: BinFigures, vocab_size: Callable[[], int | None], bin_at: Callable[[int], PackedBin]
) -> MadeWith:
    """Return what a source was made with, as far as its figures record it."""
    template, multiple = figures.chat_template_fingerprint, figures.pad_seq_to_mult
    return MadeWith(where, figures.tokenizer, template, vocab_size, figures.num_bins, bin_at, multiple)


def sample_of(packed: PackedBin, is_padding: bool, *, weighted: bool = False) -> dict[str, Any]:
    """Return a bin as a sample with its own arrays, because torch must not get read-only memory.

    In a `weighted` dataset every loss mask is float32, even if all trained tokens of the bin count 1.
    """
    ids, mask, starts = packed
    mask = np.zeros_like(mask) if is_padding else mask.copy()
    boundaries: list[int] = starts.tolist()
    boundaries.append(len(ids))
    sample = {
        "input_ids": ids.copy(),
        "seq_boundaries": boundaries,
        "loss_mask": mask.astype(np.float32) if weighted else mask,
    }
    if is_padding:
        sample["is_padding"] = True  # without it, answer_only_loss=False would count the padding sample's loss
    return sample


class JoinedBinReader:
    """Several readers, one after the other, as one."""

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
        """Return how many positions the longest bin takes in a batch."""
        return max(source.longest_input() for source in self.sources)

    def advise(self, bins: Numbers) -> None:
        """Forward the call to the sources."""
        numbers = np.searchsorted(self._offsets, bins, side="right") - 1
        for number in np.unique(numbers).tolist():
            self.sources[number].advise(bins[numbers == number] - self._offsets[number])

    def read_with(self, options: ReadOptions) -> None:
        """Forward the call to the sources."""
        for source in self.sources:
            source.read_with(options)


class PlanBinReader:
    """Bins of a plan, assembled from a token store on demand: any pack size, no shards."""

    def __init__(self, store: TokenStore, plan: PackPlan, pad_id: int = 0, bins: Int32 | None = None) -> None:
        """Read `bins` of the plan in this order; by default all of them, in the plan's order."""
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
        return [made_with_of(self.description, self.figures, self._recorded_vocab_size, self.bin)]

    def _recorded_vocab_size(self) -> int | None:
        return self.vocab_size

    def __len__(self) -> int:
        return len(self._bins)

    def bin(self, index: int) -> PackedBin:
        """Return one bin, in arrays of its own."""
        return plan_block(self._plan, self._store, self._bins[[index]], self._width, self.pad_id or 0)[0]

    def locate(self, bins: Numbers, positions: Numbers, is_padding: Flags) -> list[LocatedBins]:
        """Assemble the bins and return where they are in memory."""
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
            block.packed_len,
        )
        return [located]

    def longest_input(self) -> int:
        """Return how many positions the longest bin takes in a batch."""
        return longest_input_of_plan(self._plan)

    def advise(self, bins: Numbers) -> None:
        """Do nothing: the sequences of a bin are scattered over the store."""

    def read_with(self, options: ReadOptions) -> None:
        """Choose when sequences are verified against their checksums."""
        self._store.read_with(options)


def figures_of_plan(plan: PackPlan, bins: Numbers, **recorded: Any) -> BinFigures:
    """Return the figures of a plan's bins as they are read; `recorded` adds what else is known about the data."""
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
    """Return how many positions the longest bin takes in a batch."""
    inputs = sizes_of(plan.item_lengths, "tokens", plan.pad_seq_to_mult)[plan.indices].astype(np.int64) - 1
    return int(np.add.reduceat(inputs, plan.bin_offsets[:-1]).max())
