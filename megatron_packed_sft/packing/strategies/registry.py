"""Strategies by name: built-in ones, those of installed packages, and functions of users; results are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.strategies.packing_problem import Bins, Int32, PackingProblem, bins_from_numbers
from megatron_packed_sft.plugins import Registry
from megatron_packed_sft.support.imports import function_named

# (lengths, capacity) -> bins: a list of lists of indices, or an array with the bin number of each sequence.
CustomStrategy = Callable[[npt.NDArray[np.int64], int], Iterable[Iterable[int]] | npt.NDArray[Any]]

_HERE = "megatron_packed_sft.packing.strategies"
# Built-in strategies take a PackingProblem and return Bins, which need no check.
_BUILT_IN = {
    "best_fit": f"{_HERE}.fit:pack_best_fit",
    "first_fit": f"{_HERE}.fit:pack_first_fit",
    "first_fit_shuffle": f"{_HERE}.fit:pack_first_fit_shuffle",
    "greedy": f"{_HERE}.fit:pack_greedy",
    "optimal": f"{_HERE}.optimal:pack_optimal",
    "window": f"{_HERE}.window:pack_window",
}
STRATEGIES: Registry[Callable[..., Any]] = Registry("strategies", "strategy", _BUILT_IN)


def known_strategies() -> list[str]:
    """Return the names that `pack` knows, sorted.

    Example:
        >>> "optimal" in known_strategies()
        True
    """
    return sorted(STRATEGIES.names())


def register_strategy(name: str, function: CustomStrategy, *, replace: bool = False) -> None:
    """Add a packer of your own under `name`.

    It is called with the room that each sequence takes (int64 array) and the capacity of a bin, and returns the bins: a
    list of lists of indices, or an array with each sequence's bin number. The result is checked before it becomes a
    plan: every sequence in exactly one bin, no bin over capacity. It must be deterministic, or plans are not
    reproducible. An installed package needs no call: it offers a strategy by an entry point in the group
    `megatron_packed_sft.strategies`.

    Example:
        >>> register_strategy("one_each", lambda lengths, capacity: [[i] for i in range(len(lengths))], replace=True)
        >>> from megatron_packed_sft.packing.packer import pack
        >>> pack([3, 4], pack_size=8, strategy="one_each").num_bins
        2
    """
    if name in _BUILT_IN:
        raise InvalidInputError(f"strategy {name!r} is built in and cannot be replaced; choose another name")
    if not callable(function):
        raise InvalidInputError(f"strategy {name!r} must be a function of (lengths, capacity), not {function!r}")
    STRATEGIES.register(name, function, replace=replace)


class GivenStrategy(str):
    """A function that was passed as a strategy: a string, its name for plans and messages, that carries the function.

    Example:
        >>> GivenStrategy.of(len), GivenStrategy.of(len).function is len
        ('builtins.len', True)
    """

    function: CustomStrategy

    @classmethod
    def of(cls, function: CustomStrategy) -> GivenStrategy:
        """Return the name of a function, `module.name` as in a configuration, with the function attached."""
        given = cls(f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}")
        given.function = function
        return given


def is_dotted(name: str) -> bool:
    """Return whether a strategy is the path of a function, such as my_package.my_packer."""
    return name not in STRATEGIES and ("." in name or ":" in name)


def check_strategy(name: str, *, allow_code: bool = False, prefix: str = "") -> None:
    """Refuse an unknown name, and code that the user did not allow; only code that is allowed is imported.

    Args:
        name: a known strategy, or the dotted path of a function.
        allow_code: the user allows such a function to be imported and called.
        prefix: the configuration group of `allow_code`, such as `packing.`, for messages.
    """
    if isinstance(name, GivenStrategy) or name in STRATEGIES:
        return
    if not is_dotted(name):
        raise InvalidInputError(STRATEGIES.unknown(name))
    if not allow_code:
        raise InvalidInputError(
            f"strategy {name!r} is code, which runs only if you allow it; set {prefix}allow_code=true if you trust it"
        )
    function_named(name, "strategy")


def run_strategy(name: str, problem: PackingProblem) -> Bins:
    """Pack `problem` by the strategy called `name`, which `check_strategy` accepted."""
    if name in _BUILT_IN:
        bins: Bins = STRATEGIES[name](problem)
        return bins
    if isinstance(name, GivenStrategy):
        function: Callable[..., Any] = name.function
    else:
        function = function_named(name, "strategy") if is_dotted(name) else STRATEGIES[name]
    if not callable(function):
        raise InvalidInputError(f"strategy {name!r} must be a function of (lengths, capacity), not {function!r}")
    result = function(problem.sizes.astype(np.int64), problem.capacity)
    numbers = (
        _numbers_from_array(name, result)
        if isinstance(result, np.ndarray)
        else _numbers_from_lists(name, result, problem.sizes.size)
    )
    return _checked_bins(name, numbers, problem)


def _numbers_from_array(name: str, result: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    if result.ndim != 1 or result.dtype.kind not in "iu" or (result.size and result.min() < 0):
        raise InvalidInputError(
            f"strategy {name!r} returned an array of {result.dtype} with shape {result.shape}; "
            "an array must hold one bin number >= 0 per sequence"
        )
    return result.astype(np.int64)


def _numbers_from_lists(name: str, result: Iterable[Iterable[int]], num_sequences: int) -> npt.NDArray[np.int64]:
    try:
        bins = [np.asarray(list(members)) for members in result]
    except (TypeError, ValueError):
        raise InvalidInputError(
            f"strategy {name!r} must return lists of indices, not {type(result).__name__}"
        ) from None
    numbers = np.full(num_sequences, -1, np.int64)
    for number, members in enumerate(bins):
        if members.size == 0:
            raise InvalidInputError(f"strategy {name!r} left bin {number} empty; leave empty bins out")
        if members.dtype.kind not in "iu" or members.min() < 0 or members.max() >= num_sequences:
            raise InvalidInputError(
                f"strategy {name!r} put something into bin {number} that is not an index from 0 to {num_sequences - 1}"
            )
        if np.unique(members).size < members.size or (numbers[members] >= 0).any():
            raise InvalidInputError(f"strategy {name!r} packed a sequence of bin {number} more than once")
        numbers[members] = number
    if (numbers < 0).any():
        missing = int(np.argmax(numbers < 0))
        raise InvalidInputError(f"strategy {name!r} left out sequence {missing}; every sequence needs a bin")
    return numbers


def _checked_bins(name: str, numbers: npt.NDArray[np.int64], problem: PackingProblem) -> Bins:
    if numbers.size != problem.sizes.size:
        raise InvalidInputError(
            f"strategy {name!r} returned {numbers.size} bin numbers for {problem.sizes.size} sequences"
        )
    used, dense = np.unique(numbers, return_inverse=True)
    bin_of: Int32 = dense.astype(np.int32)
    # Exact although bincount adds floats: a bin's sum is far below 2^53.
    filled = np.bincount(bin_of, weights=problem.sizes)
    if filled.max() > problem.capacity:
        worst = int(np.argmax(filled))
        raise InvalidInputError(
            f"strategy {name!r} filled bin {used[worst]} with {int(filled[worst]):,}; it holds {problem.capacity:,}"
        )
    most = int(np.bincount(bin_of).max())
    if most > problem.max_per_bin:
        raise InvalidInputError(
            f"strategy {name!r} put {most} sequences into a bin; max_seqs_per_bin is {problem.max_per_bin}"
        )
    return bins_from_numbers(bin_of, used.size)
