"""The options of packing, declared and checked once for `pack`, for prepare's configuration and for the help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.items import MEASURES, OVERFLOWS, longest_that_fits
from megatron_packed_sft.packing.strategies.registry import check_strategy

Balance = Literal["none", "attention", "trained_tokens"]
BALANCES: tuple[str, ...] = get_args(Balance)

# `single` makes bins that are longer than pack_size, which no shard can hold.
STORABLE_OVERFLOWS = tuple(overflow for overflow in OVERFLOWS if overflow != "single")

# Searches keep tables with one entry per possible length; beyond this limit they would cost more than the data.
LARGEST_PACK_SIZE = 1 << 22


@dataclass(kw_only=True)
class PackOptions:
    """How sequences are packed. The defaults are those of `pack`; a configuration may start from others.

    It has only simple types, so it is also the Hydra schema of `packing` in prepare's configuration.

    Args:
        pack_size: what a bin holds, in `measure`.
        strategy: optimal | window | best_fit | first_fit | first_fit_shuffle | greedy, a registered one, or with
            `allow_code` the dotted path of a function of yours, such as my_package.my_packer.
        overflow: what happens to a sequence longer than a bin: error | drop | truncate | split. `split` makes chunks
            that overlap by `stride` tokens. (`pack` also has `single`, a longer bin of its own, for plans alone.)
        stride: tokens shared by neighbouring chunks of a split sequence; they are trained once.
        min_len: shorter sequences, and shorter last chunks of split sequences, are dropped and counted.
        max_len: longer sequences are dropped and counted before `overflow` applies to the rest.
        max_seqs_per_bin: the most sequences or chunks in a bin.
        pad_seq_to_mult: the inputs of each sequence are rounded up to this multiple; 2 * context_parallel_size.
        measure: what a bin counts: tokens (what shards store) | inputs (what the model computes: one fewer per
            sequence).
        order_window: pack windows of this many sequences separately, so that bins stay close to the data's order.
        shuffle_output: read the bins in shuffled order (inside each window, with `order_window`).
        global_batch: bins to an optimizer step; needed by `balance` and `whole_batches`.
        balance: which bins share a step: none (in plan order) | attention (equal sums of squared lengths, so that no
            rank waits) | trained_tokens (equal counts, so that averaging over ranks gives every token the same weight).
        whole_batches: hold back the emptiest bins so that no step is short; held-back sequences are counted and listed.
        seed: of everything that is shuffled.
        allow_code: allow a `strategy` given by its dotted path to be imported and run.
    """

    pack_size: int = 4096
    strategy: str = "optimal"
    overflow: str = "error"
    stride: int = 0
    min_len: int = 1
    max_len: int | None = None
    max_seqs_per_bin: int | None = None
    pad_seq_to_mult: int = 1
    measure: str = "tokens"
    order_window: int | None = None
    shuffle_output: bool = False
    global_batch: int | None = None
    balance: str = "none"
    whole_batches: bool = False
    seed: int = 0
    allow_code: bool = False

    @property
    def longest_item(self) -> int:
        """The most tokens that a sequence or chunk may have to fit into a bin."""
        return longest_that_fits(self.pack_size, self.measure, self.pad_seq_to_mult)

    def check(self, prefix: str = "", overflows: tuple[str, ...] = OVERFLOWS) -> None:
        """Refuse values out of range, and values that contradict each other.

        Args:
            prefix: what comes before an option's name where the user wrote it, such as `packing.`.
            overflows: the choices that the user has for `overflow`.
        """
        check_strategy(self.strategy, allow_code=self.allow_code, prefix=prefix)
        _check_choice(f"{prefix}overflow", self.overflow, overflows)
        _check_choice(f"{prefix}measure", self.measure, MEASURES)
        _check_choice(f"{prefix}balance", self.balance, BALANCES)
        for name in ("pack_size", "min_len", "pad_seq_to_mult"):
            check_count(f"{prefix}{name}", getattr(self, name))
        for name in ("max_len", "max_seqs_per_bin", "order_window", "global_batch"):
            if getattr(self, name) is not None:
                check_count(f"{prefix}{name}", getattr(self, name))
        for name in ("stride", "seed"):
            check_count(f"{prefix}{name}", getattr(self, name), least=0)
        if self.pack_size > LARGEST_PACK_SIZE:
            raise InvalidInputError(f"{prefix}pack_size is at most {LARGEST_PACK_SIZE:,}, not {self.pack_size:,}")
        if self.seed >= 2**64:
            raise InvalidInputError(f"{prefix}seed is at most 2**64 - 1, not {self.seed}")
        self._check_lengths(prefix)
        self._check_steps(prefix)

    def _check_lengths(self, prefix: str) -> None:
        limit = self.longest_item
        if self.stride >= limit:
            raise InvalidInputError(
                f"{prefix}stride is {self.stride}; it must be below the {limit} tokens that a chunk can have"
            )
        if self.min_len > limit or (self.max_len is not None and self.max_len < self.min_len):
            raise InvalidInputError(
                f"{prefix}min_len {self.min_len} leaves nothing to pack: at most {self.max_len or limit} tokens are "
                "allowed"
            )

    def _check_steps(self, prefix: str) -> None:
        if self.order_window is not None and self.balance != "none":
            raise InvalidInputError(
                f"{prefix}order_window keeps the data's order and {prefix}balance={self.balance!r} shuffles it; "
                "choose one"
            )
        for name, asked in (("whole_batches", self.whole_batches), ("balance", self.balance != "none")):
            if asked and self.global_batch is None:
                raise InvalidInputError(f"{prefix}{name} needs the batch size: set {prefix}global_batch")


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How bins become optimizer steps: `global_batch` bins each, of similar cost. `PackOptions` documents the fields.

    Example:
        >>> Steps(global_batch=8, balance="attention")
        Steps(global_batch=8, balance='attention', whole_batches=False)
    """

    global_batch: int
    balance: str = "none"
    whole_batches: bool = False

    def __post_init__(self) -> None:
        check_count("steps.global_batch", self.global_batch)
        _check_choice("steps.balance", self.balance, BALANCES)


def steps_from(given: Steps | Mapping[str, Any]) -> Steps:
    """Return the steps that a caller passed, or make them from a mapping such as {"global_batch": 8}."""
    if isinstance(given, Steps):
        return given
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"steps must be a mapping with global_batch, not {given!r}")
    if "global_batch" not in given or set(given) - {"global_batch", "balance", "whole_batches"}:
        raise InvalidInputError(
            f"steps needs global_batch and may have balance and whole_batches; it has {', '.join(sorted(given))}"
        )
    return Steps(**given)


def check_count(name: str, given: Any, least: int = 1) -> None:
    """Refuse anything but an integer that is at least `least`.

    Example:
        >>> check_count("pack_size", 4096)
    """
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < least:
        kind = {0: "an integer that is not negative", 1: "a positive integer"}[least]
        raise InvalidInputError(f"{name} must be {kind}, not {given!r}")


def _check_choice(name: str, given: str, known: tuple[str, ...]) -> None:
    if given == "single" and "single" not in known:
        raise InvalidInputError(
            f"{name}='single' makes bins longer than pack_size, which no shard can hold; choose from {', '.join(known)}"
        )
    if given not in known:
        raise InvalidInputError(f"{name} {given!r} is unknown; choose from {', '.join(known)}")
