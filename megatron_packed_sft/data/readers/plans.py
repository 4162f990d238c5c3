"""Bins of a token store and a plan: put together when they are asked for, no shards needed."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from megatron_packed_sft.data.batch.located_bins import (
    LocatedBins,
    locate_in_arrays,
)
from megatron_packed_sft.data.made_with import MadeWith
from megatron_packed_sft.data.readers.interface import Flags, Numbers, made_with_of
from megatron_packed_sft.packing.items import sizes_of
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.packing.strategies.packing_problem import Int32
from megatron_packed_sft.storage.bins import NO_WEIGHTS, PackedBin
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import ReadOptions
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.tokens.materialize import plan_block, stored_width
from megatron_packed_sft.tokens.store import TokenStore

logger = logging.getLogger(__name__)


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
        return [made_with_of(self.description, self.figures, self._recorded_vocab_size, self.bin)]

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
            block.packed_len,
        )
        return [located]

    def longest_input(self) -> int:
        """Return how many positions the bin that needs most takes in a batch."""
        return longest_input_of_plan(self._plan)

    def advise(self, bins: Numbers) -> None:
        """Nothing is announced: sequences lie all over the store."""

    def read_with(self, options: ReadOptions) -> None:
        """Choose when sequences are compared with their checksums."""
        self._store.read_with(options)


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
