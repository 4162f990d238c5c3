"""The weights of a blend: the same over the whole run, or annealed from one proportion to another.

    share of the run    0 ──────────── from ────────────────── to ────────── 1 ─ ...
    weights                  start      │  1,000 equal stages  │      end
                             (constant) │  start ──────▶ end   │  (constant)

Whatever the weights do, they are stages of constant weights here: integers whose sum is the same in all stages, so that
how far a source is behind its share carries over from stage to stage without rounding.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError

_MAX_TOTAL: Final = 1 << 61  # lags and deadlines stay inside 64 bits
_RESOLUTION: Final = 1 << 60  # of weights that have no such common denominator
_MAX_STAGES: Final = 1000  # between the start and the end weights
_NO_END: Final = 2**63 - 1
_SHARES: Final = (("from", 0.0), ("to", 1.0))  # keys of a schedule, and their defaults
_KEYS: Final = {"start", "end", "from", "to"}


@dataclass(frozen=True)
class WeightStages:
    """Constant weights, one stage after the other.

    Args:
        total: the sum of the weights in every stage; a source's share is its weight / total.
        starts: the first position of each stage, ascending from 0; the last stage never ends.
        weights: of each source, by stage.
    """

    total: int
    starts: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]

    @classmethod
    def constant(cls, weights: tuple[int, ...]) -> WeightStages:
        """Return the one stage of weights that never change."""
        return cls(sum(weights), (0,), (weights,))

    def stage_at(self, position: int) -> int:
        """Return the stage that a position of the stream is in.

        Example:
            >>> WeightStages(4, (0, 10), ((1, 3), (2, 2))).stage_at(10)
            1
        """
        return bisect.bisect_right(self.starts, position) - 1

    def due(self, position: int) -> tuple[int, ...]:
        """Return what each source's share of the first `position` samples is, in units of 1 / total: the integral.

        Example:
            >>> WeightStages(4, (0, 10), ((1, 3), (2, 2))).due(12)
            (14, 34)
        """
        stage = self.stage_at(position)
        inside = position - self.starts[stage]
        return tuple(
            before + weight * inside for before, weight in zip(self._dues[stage], self.weights[stage], strict=True)
        )

    @cached_property
    def _dues(self) -> list[tuple[int, ...]]:
        """What is due at the start of each stage; of Python's integers, because no others are long enough."""
        dues = [(0,) * len(self.weights[0])]
        for number in range(1, len(self.starts)):
            length = self.starts[number] - self.starts[number - 1]
            pairs = zip(dues[-1], self.weights[number - 1], strict=True)
            dues.append(tuple(before + weight * length for before, weight in pairs))
        return dues

    @cached_property
    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The weights by stage and source, and the first position after each stage, for the kernel."""
        return np.array(self.weights, np.int64), np.array([*self.starts[1:], _NO_END], np.int64)


@dataclass(frozen=True)
class AnnealedWeights:
    """Weights that move in a straight line, from `start` at sample `first` to `end` at sample `last`.

    Args:
        start: the weights before `first`, as integers.
        end: the weights from `last` on.
        first: the position in the stream where the weights begin to move.
        last: the position from which on they are the end weights.

    Example:
        >>> stages = AnnealedWeights((1, 0), (0, 1), first=4, last=6).stages()
        >>> [[weight / stages.total for weight in weights] for weights in stages.weights], stages.starts
        ([[1.0, 0.0], [0.75, 0.25], [0.25, 0.75], [0.0, 1.0]], (0, 4, 5, 6))
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    first: int
    last: int

    def stages(self) -> WeightStages:
        """Return the stages: the start, up to 1,000 equal ones on the straight line in between, and the end.

        A stage has the weights of the middle of it. With at most 1,000 samples in between, every sample is a stage.
        """
        num_between = min(self.last - self.first, _MAX_STAGES)
        scale = max(2 * num_between, 1)
        total = math.lcm(sum(self.start), sum(self.end)) * scale
        if total > _MAX_TOTAL:
            total = _RESOLUTION // scale * scale
        start, end = (_with_sum(weights, total // scale) for weights in (self.start, self.end))
        stages = {0: tuple(weight * scale for weight in start)}  # a later stage that begins at 0 replaces it
        for number in range(num_between):
            position = self.first + (self.last - self.first) * number // num_between
            moved = 2 * number + 1
            pairs = zip(start, end, strict=True)
            stages[position] = tuple(before * (scale - moved) + after * moved for before, after in pairs)
        stages[self.last] = tuple(weight * scale for weight in end)
        return WeightStages(total, tuple(stages), tuple(stages.values()))

    def __str__(self) -> str:
        return f"to {':'.join(map(str, self.end))} over samples {self.first} to {self.last}"


@dataclass(frozen=True)
class BlendSchedule:
    """Weights that change over a run, by share of the run: what `weights={"start": ..., "end": ...}` says.

    Args:
        start: the weights before the share `begin` of the run, as integers.
        end: the weights from the share `finish` on.
        begin: where the weights begin to move, 0 to 1.
        finish: where they have arrived, `begin` to 1.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    begin: Fraction
    finish: Fraction

    @classmethod
    def parse(
        cls, document: Any, names: Sequence[str], *, num_sources: int | None, where: str = "blend"
    ) -> BlendSchedule:
        """Read `{"start": weights, "end": weights, "from": 0.8, "to": 1.0}`; from and to may be left out: 0 and 1.

        Args:
            document: that mapping; weights are a list, or a mapping by name.
            names: of the sources; empty if they have none.
            num_sources: how many there are; None if that is not known yet.
            where: what the user calls the mapping, for messages.

        Example:
            >>> document = {"start": {"chats": 1, "web": 0}, "end": {"chats": 0.5, "web": 0.5}, "from": 0.8}
            >>> BlendSchedule.parse(document, ["chats", "web"], num_sources=2).over(1000)
            AnnealedWeights(start=(1, 0), end=(1, 1), first=800, last=1000)
        """
        if not isinstance(document, Mapping) or not {"start", "end"} <= set(document) <= _KEYS:
            raise InvalidInputError(
                f"{where} is {document!r}; give it start and end weights, and from and to as shares of the run, as in "
                "{start: {chats: 1, web: 0}, end: {chats: 0.5, web: 0.5}, from: 0.8, to: 1.0}"
            )
        shares = {key: _share_of_run(document.get(key, default), f"{where}.{key}") for key, default in _SHARES}
        if shares["from"] > shares["to"]:
            raise InvalidInputError(
                f"{where}.from is {document['from']} and {where}.to is {document.get('to', 1.0)}; from must not be "
                "above to"
            )
        start, end = (
            whole_weights(weights_in_order(document[key], names, num_sources=num_sources, where=f"{where}.{key}"))
            for key in ("start", "end")
        )
        return cls(start, end, shares["from"], shares["to"])

    def over(self, num_samples: int) -> AnnealedWeights:
        """Return the weights over a run of that many samples; the edges are rounded down to whole samples."""
        return AnnealedWeights(
            self.start, self.end, math.floor(self.begin * num_samples), math.floor(self.finish * num_samples)
        )


def is_schedule(weights: Any) -> bool:
    """Return whether these are weights that change over the run.

    Example:
        >>> is_schedule({"chats": 1, "web": 2}), is_schedule({"start": [1, 0], "end": [1, 1]})
        (False, True)
    """
    return isinstance(weights, Mapping) and any(isinstance(one, Mapping | list | tuple) for one in weights.values())


def mixing_of(
    weights: Any, names: Sequence[str], *, num_sources: int | None, where: str = "weights"
) -> tuple[int, ...] | BlendSchedule | None:
    """Return how sources are mixed: by whole weights, by weights that change over the run, or not at all.

    Args:
        weights: one per source, as a list or by name; what `BlendSchedule.parse` reads; or None.
        names: of the sources; empty if they have none.
        num_sources: how many there are; None if that is not known yet.
        where: what the user calls the weights, for messages.

    Example:
        >>> mixing_of({"chats": 0.5, "web": 1}, ["chats", "web"], num_sources=2)
        (1, 2)
    """
    if weights is None:
        return None
    if is_schedule(weights):
        return BlendSchedule.parse(weights, names, num_sources=num_sources, where=where)
    return whole_weights(weights_in_order(weights, names, num_sources=num_sources, where=where))


def _share_of_run(value: Any, where: str) -> Fraction:
    is_number = isinstance(value, int | float | Fraction) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise InvalidInputError(f"{where} is {value!r}; it is a share of the run, from 0 to 1")
    return Fraction(str(value))


def weights_in_order(
    weights: Any, names: Sequence[str], *, num_sources: int | None, where: str = "weights"
) -> list[Fraction]:
    """Return one exact weight for each source, in their order.

    Args:
        weights: a list, or a mapping by name.
        names: of the sources; empty if they have none.
        num_sources: how many there are; None if that is not known yet.
        where: what the user calls the weights, for messages.

    Example:
        >>> weights_in_order({"web": 0.5, "chats": 1}, ["chats", "web"], num_sources=2)
        [Fraction(1, 1), Fraction(1, 2)]
    """
    if isinstance(weights, Mapping):
        listed = _by_name(weights, names, where)
    elif isinstance(weights, Sequence) and not isinstance(weights, str):
        listed = {str(number): weight for number, weight in enumerate(weights)}
    else:
        raise InvalidInputError(f"{where} is {weights!r}; give a list of numbers, or a number for each name")
    if num_sources not in (None, len(listed)):
        raise InvalidInputError(f"{len(listed)} weights were given for {num_sources} paths in {where}; give one each")
    exact = [_exact(weight, f"{where}.{name}") for name, weight in listed.items()]
    if not any(exact):
        raise InvalidInputError(f"{where} is all zero; give at least one source a positive weight")
    return exact


def _by_name(weights: Mapping[str, Any], names: Sequence[str], where: str) -> dict[str, Any]:
    if not names:
        raise InvalidInputError(
            f"{where} goes by names, but the paths have none; name them as in {{chats: PATH, web: PATH}}, or give a "
            "list of weights"
        )
    unknown = [str(name) for name in weights if name not in names]
    if unknown:
        raise InvalidInputError(
            f"{where} names {', '.join(unknown)}, which is not a source; choose from {_list(names)}"
        )
    missing = [name for name in names if name not in weights]
    if missing:
        raise InvalidInputError(
            f"{where} has no weight for {_list(missing)}; give every source one, and 0 to one that is not wanted"
        )
    return {name: weights[name] for name in names}


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


def whole_weights(weights: Sequence[Any]) -> tuple[int, ...]:
    """Return weights as integers without a common divisor, in the same proportions.

    Weights whose common denominator is too large are rounded to 2^-60 of their sum: one sample in 10^18.

    Example:
        >>> whole_weights([0.1, 0.25, 2])
        (2, 5, 40)
    """
    exact = [_exact(weight, f"weight {number} of the blend") for number, weight in enumerate(weights)]
    total = sum(exact)
    if total == 0:
        raise InvalidInputError("the weights of a blend are all zero; give at least one source a positive weight")
    denominator = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * denominator) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) > _MAX_TOTAL:
        whole = [max(1, round(weight * _RESOLUTION / total)) if weight else 0 for weight in exact]
    return tuple(whole)


def _with_sum(weights: tuple[int, ...], wanted: int) -> list[int]:
    """Return the same proportions with another sum; what rounding leaves over goes to the largest."""
    total = sum(weights)
    scaled = [max(1, weight * wanted // total) if weight else 0 for weight in weights]
    scaled[weights.index(max(weights))] += wanted - sum(scaled)
    return scaled


def _exact(weight: Any, where: str) -> Fraction:
    try:
        # A float as text is what its owner wrote; its exact value has a denominator of 2^55 and no pattern.
        exact = weight if isinstance(weight, Fraction) else Fraction(str(weight))
    except (ValueError, ZeroDivisionError):
        raise InvalidInputError(f"{where} is {weight!r}; give a number of at least 0") from None
    if exact < 0:
        raise InvalidInputError(f"{where} is {weight!r}; give a number of at least 0")
    return exact
