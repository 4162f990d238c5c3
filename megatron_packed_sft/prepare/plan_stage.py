"""One plan per split, over all its sequences at once; kept as long as the sequences and the settings stay the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.prepare.splits import TRAIN
from megatron_packed_sft.prepare.work_directory import WorkDirectory, fingerprint_of
from megatron_packed_sft.tokens.store import TokenStore

OVERFLOWS = ("drop", "split", "error")


@dataclass(frozen=True, kw_only=True)
class PackingOptions:
    """Arguments of `pack`; steps and whole batches are for training rows only."""

    pack_size: int
    strategy: str = "optimal"
    overflow: str = "drop"
    stride: int = 0
    min_len: int = 1
    max_len: int | None = None
    max_seqs_per_bin: int | None = None
    pad_seq_to_mult: int = 1
    order_window: int | None = None
    shuffle_output: bool = True
    global_batch: int | None = None
    balance: str = "none"
    whole_batches: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.overflow not in OVERFLOWS:
            raise InvalidInputError(
                f"packing.overflow is {self.overflow!r}; choose one of {', '.join(OVERFLOWS)}; to cut rows, set "
                "encode.max_len, which also drops and counts the rows whose answer is cut away"
            )

    def check(self) -> None:
        """Refuse settings that no plan can be made with, before any work is done."""
        length = max(1, min(self.min_len, self.pack_size))
        replace(self, whole_batches=False).pack(TRAIN, [length], [1])

    def pack(
        self,
        split: str,
        lengths: npt.ArrayLike,
        trained_tokens: npt.ArrayLike | None = None,
        copies_of: npt.ArrayLike | None = None,
    ) -> PackPlan:
        """Pack sequences of these lengths."""
        arguments: dict[str, Any] = asdict(self)
        steps = {"global_batch": arguments.pop("global_batch"), "balance": arguments.pop("balance")}
        if split != TRAIN:
            arguments["whole_batches"] = False
        elif steps["global_batch"] is not None:
            arguments |= {"steps": steps, "trained_tokens": trained_tokens}
        try:
            return pack(lengths, copies_of=copies_of, **arguments)
        except InvalidInputError as error:
            raise error if split == TRAIN else InvalidInputError(f"split {split}: {error}") from error


@dataclass(frozen=True)
class Planned:
    """A split's plan, and whether an earlier run had made it."""

    plan: PackPlan
    reused: bool


def plan_splits(stores: Mapping[str, TokenStore], options: PackingOptions, work: WorkDirectory) -> dict[str, Planned]:
    """Plan every split."""
    return {split: _plan_split(split, store, options, work) for split, store in stores.items()}


def _plan_split(split: str, store: TokenStore, options: PackingOptions, work: WorkDirectory) -> Planned:
    inputs = {"stage": "plan", "split": split, "store": store.fingerprint, "copies": "apart"}
    fingerprint = fingerprint_of({**inputs, **asdict(options)})
    name = f"plans/{split}"
    noted = work.receipt(name, fingerprint)
    if noted is not None:
        try:
            plan = PackPlan.load(work.plan(split))
            if plan.order_fingerprint == noted["order_fingerprint"]:
                return Planned(plan, reused=True)
        except PackedSFTError:
            pass  # damaged or gone: made again
    needs_trained = split == TRAIN and options.balance == "trained_tokens"
    plan = options.pack(split, store.lengths, _trained_tokens(store) if needs_trained else None, store.copies())
    work.plan(split).parent.mkdir(exist_ok=True)
    plan.save(work.plan(split))
    work.write_receipt(name, fingerprint, {"order_fingerprint": plan.order_fingerprint, "num_bins": plan.num_bins})
    return Planned(plan, reused=False)


def _trained_tokens(store: TokenStore) -> npt.NDArray[np.int64]:
    """How many tokens of each sequence are trained."""
    return np.concatenate(
        [
            np.add.reduceat(part.arrays.train, part.arrays.offsets[:-1].astype(np.int64), dtype=np.int64)
            for part in store.parts
        ]
    )
