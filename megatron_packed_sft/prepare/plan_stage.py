"""Plan every split over all its sequences at once, and report what became of the sequences of each source."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.packing.options import STORABLE_OVERFLOWS, PackOptions
from megatron_packed_sft.packing.packer import pack_with
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.packing.strategies.registry import is_dotted
from megatron_packed_sft.prepare.counts import SplitCounts
from megatron_packed_sft.prepare.sources import TRAIN
from megatron_packed_sft.prepare.work_directory import WorkDirectory, fingerprint_of
from megatron_packed_sft.support.drop_reasons import DropReason
from megatron_packed_sft.support.imports import function_named
from megatron_packed_sft.support.processes import Executor
from megatron_packed_sft.tokens.part import TokenPart
from megatron_packed_sft.tokens.store import TokenStore

_PREFIX = "packing."
# The order in which the packer drops sequences; one that fits and is in no bin was held back.
_REASONS = (DropReason.BELOW_MIN_LEN, DropReason.ABOVE_MAX_LEN, DropReason.LONGER_THAN_PACK, DropReason.HELD_BACK)


@dataclass(frozen=True)
class Planned:
    """A split's plan, and whether it was reused from an earlier run."""

    plan: PackPlan
    reused: bool


@dataclass
class PackedSequences:
    """What became of the sequences of one source."""

    counts: SplitCounts = field(default_factory=SplitCounts)  # what is in the bins
    dropped: dict[DropReason, int] = field(default_factory=dict)  # sequences


def check_packing(options: PackOptions) -> None:
    """Refuse impossible settings before any work is done."""
    options.check(_PREFIX, STORABLE_OVERFLOWS)


def pack_split(
    split: str,
    options: PackOptions,
    lengths: npt.ArrayLike,
    trained_tokens: npt.ArrayLike | None = None,
) -> PackPlan:
    """Return the plan of a split; options for steps and whole batches apply to training only."""
    if split != TRAIN:
        options = replace(options, whole_batches=False, global_batch=None, balance="none")
    if trained_tokens is None and options.balance == "trained_tokens":
        options = replace(options, balance="none")  # a dry run gets the same bins in another order
    try:
        return pack_with(
            options,
            lengths,
            trained_tokens=trained_tokens,
            prefix=_PREFIX,
            overflows=STORABLE_OVERFLOWS,
        )
    except InvalidInputError as error:
        raise error if split == TRAIN else InvalidInputError(f"split {split}: {error}") from error


def plan_splits(
    stores: Mapping[str, TokenStore], options: PackOptions, work: WorkDirectory, executor: Executor
) -> dict[str, Planned]:
    """Return the plan of every split; one of an earlier run is reused if sequences and options are the same.

    Args:
        stores: the sequences of each split.
        options: how to pack them.
        work: where plans and their receipts are.
        executor: reads the tokens of stores that are not here, where lengths are not enough.
    """
    return {split: _plan_split(split, store, options, work, executor) for split, store in stores.items()}


def drop_reasons(plan: PackPlan, lengths: npt.NDArray[np.int64], options: PackOptions) -> npt.NDArray[np.int8]:
    """Return for each sequence why no token of it is in a bin: a number for `reason_of`, or -1 if it is packed.

    Example:
        >>> from megatron_packed_sft.packing.packer import pack
        >>> lengths = np.array([2, 9])
        >>> options = PackOptions(pack_size=4, overflow="drop")
        >>> reasons = drop_reasons(pack(lengths, pack_size=4, overflow="drop"), lengths, options)
        >>> reasons.tolist(), str(reason_of(reasons[1]))
        ([-1, 2], 'longer_than_pack')
    """
    is_packed = np.zeros(len(lengths), bool)
    is_packed[_sequence_of_item(plan)[plan.indices]] = True
    is_below = lengths < options.min_len
    is_above = lengths > (options.max_len or np.iinfo(np.int64).max)
    is_long = lengths > options.longest_item
    reasons: npt.NDArray[np.int8] = np.select([is_packed, is_below, is_above, is_long], [-1, 0, 1, 2], 3).astype(
        np.int8
    )
    return reasons


def reason_of(index: int) -> DropReason:
    """Return the reason that an entry of `drop_reasons` stands for."""
    return _REASONS[index]


def packed_by_source(
    plan: PackPlan,
    lengths: npt.NDArray[np.int64],
    options: PackOptions,
    source_of_sequence: npt.NDArray[np.int64],
    names: Sequence[str],
    trained_of_item: npt.NDArray[np.int64],
) -> dict[str, PackedSequences]:
    """Return for each source what is in the bins, and how many sequences were dropped.

    Args:
        plan: of one split.
        lengths: of all its sequences.
        options: that the plan was made with.
        source_of_sequence: an index into `names` for each sequence.
        names: of the sources.
        trained_of_item: trained tokens of each item of the plan.
    """
    reasons = drop_reasons(plan, lengths, options)
    source_of_item = source_of_sequence[_sequence_of_item(plan)[plan.indices]]
    num_sources = len(names)
    sequences = np.bincount(source_of_sequence[reasons < 0], minlength=num_sources)
    tokens = np.bincount(source_of_item, weights=plan.item_lengths[plan.indices], minlength=num_sources)
    trained = np.bincount(source_of_item, weights=trained_of_item[plan.indices], minlength=num_sources)
    result = {
        name: PackedSequences(SplitCounts(int(sequences[number]), int(tokens[number]), int(trained[number])))
        for number, name in enumerate(names)
    }
    for index in np.unique(reasons[reasons >= 0]).tolist():
        dropped = np.bincount(source_of_sequence[reasons == index], minlength=num_sources)
        for number in np.flatnonzero(dropped).tolist():
            result[names[number]].dropped[reason_of(index)] = int(dropped[number])
    return result


def trained_of_items(plan: PackPlan, store: TokenStore, executor: Executor) -> npt.NDArray[np.int64]:
    """Return the number of trained tokens of every item of a plan; tokens that two chunks share count once."""
    sequence = _sequence_of_item(plan)
    zeros = np.zeros(len(sequence), np.int64)
    start, masked = (zeros, zeros) if plan.chunks is None else (plan.chunks.start, plan.chunks.masked_prefix)
    tasks = []
    first = 0
    for number, part in enumerate(store.parts):
        some = slice(*np.searchsorted(sequence, [first, first + len(part)]))  # items are in the order of sequences
        items = np.stack([sequence[some] - first, start[some], masked[some], plan.item_lengths[some]]).astype(np.int64)
        tasks.append(_PartTask(number, part, items))
        first += len(part)
    return _trained_of_parts(tasks, store, executor)


class _PartTask(NamedTuple):
    """A part whose trained tokens are counted."""

    number: int
    part: TokenPart
    items: npt.NDArray[np.int64] | None = None  # [sequence inside the part, start, masked prefix, length] of each


def _trained_of_parts(tasks: Sequence[_PartTask], store: TokenStore, executor: Executor) -> npt.NDArray[np.int64]:
    """Count in this process if the parts are here, else in the executor's processes, which fetch them."""
    counts = (
        executor.fitting(store.num_tokens).run(_trained_of_part, tasks, _no_setup)
        if store.is_remote
        else map(_trained_of_part, tasks)
    )
    return np.concatenate([trained for _, trained in sorted(counts, key=lambda one: one[0])])


def _trained_of_part(task: _PartTask) -> tuple[int, npt.NDArray[np.int64]]:
    arrays = task.part.arrays
    counted = np.concatenate(([0], np.cumsum(arrays.train, dtype=np.int64)))
    starts, lengths = task.part.spans(np.arange(len(task.part)))
    if task.items is None:
        return task.number, counted[starts + lengths] - counted[starts]
    sequence, start, masked, lengths = task.items
    begin = starts[sequence] + start
    return task.number, counted[begin + lengths] - counted[begin + masked]


def _no_setup() -> None:
    """Counting needs no set-up."""


def estimated_trained_of_items(
    plan: PackPlan, lengths: npt.NDArray[np.int64], trained: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return about how many trained tokens each item has: its share of its sequence. Dry runs keep no tokens."""
    sequence = _sequence_of_item(plan)
    return np.rint(trained[sequence] * plan.item_lengths / lengths[sequence]).astype(np.int64)


def _plan_split(
    split: str, store: TokenStore, options: PackOptions, work: WorkDirectory, executor: Executor
) -> Planned:
    inputs = {"stage": "plan", "split": split, "store": store.fingerprint}
    fingerprint = fingerprint_of({**inputs, **asdict(options), **_code_of(options.strategy)})
    name = f"plans/{split}"
    noted = work.receipt(name, fingerprint)
    if noted is not None:
        try:
            plan = work.load_plan(split)
            if plan.order_fingerprint == noted["order_fingerprint"]:
                return Planned(plan, reused=True)
        except PackedSFTError:
            pass  # damaged or gone: plan again
    trained = None
    if split == TRAIN and options.balance == "trained_tokens":
        tasks = [_PartTask(number, part) for number, part in enumerate(store.parts)]
        trained = _trained_of_parts(tasks, store, executor)
    plan = pack_split(split, options, store.lengths, trained)
    work.save_plan(split, plan)
    work.write_receipt(name, fingerprint, {"order_fingerprint": plan.order_fingerprint, "num_bins": plan.num_bins})
    return Planned(plan, reused=False)


def _code_of(strategy: str) -> dict[str, str]:
    """Return the source code of a user's own strategy, so that its plans are not reused once it changes."""
    if not is_dotted(strategy):
        return {}
    function = function_named(strategy, "strategy")
    return {"code": inspect.getsource(inspect.getmodule(function) or function)}


def _sequence_of_item(plan: PackPlan) -> npt.NDArray[np.int64]:
    items = np.arange(len(plan.item_lengths)) if plan.chunks is None else plan.chunks.sequence
    return items.astype(np.int64)
