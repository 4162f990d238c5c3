"""A stream in random order, in bounded memory, with torch's random numbers alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import torch

from megatron_packed_sft.errors import InvalidInputError

Item = TypeVar("Item")
_DRAWS_AT_ONCE = 1024  # a single draw costs as much as a hundred
_LARGEST_SEED = (1 << 63) - 1


def seeded(seed: int, purpose: int | None = None) -> torch.Generator:
    """Return a generator; one seed gives independent generators for different purposes, and a plain one for none.

    Example:
        >>> seeded(42).initial_seed(), seeded(42, 0).initial_seed() != seeded(42, 1).initial_seed()
        (42, True)
    """
    if type(seed) is not int or not 0 <= seed <= _LARGEST_SEED:
        raise InvalidInputError(f"seed is {seed!r}; give an integer from 0 to 2**63 - 1")
    if purpose is None:
        return torch.Generator().manual_seed(seed)
    draws = torch.randint(_LARGEST_SEED, (purpose + 1,), generator=torch.Generator().manual_seed(seed))
    return torch.Generator().manual_seed(int(draws[purpose]))


def shuffled(items: Iterable[Item], buffer_size: int, generator: torch.Generator) -> Iterator[Item]:
    """Yield items in random order, holding `buffer_size` of them at most.

    The buffer is filled; then each draw yields one of its items, whose place the next item takes. An item is yielded at
    most `buffer_size` places before its own; with a buffer as large as the stream the order is a uniform permutation.

    Example:
        >>> sorted(shuffled(range(5), 3, torch.Generator().manual_seed(0)))
        [0, 1, 2, 3, 4]
    """
    if buffer_size < 1:
        raise InvalidInputError(f"shuffle_buffer is {buffer_size}; give at least 1, or None for the order of the input")
    stream = iter(items)
    held = list(islice(stream, buffer_size))
    if len(held) == buffer_size:
        while True:
            for place in torch.randint(buffer_size, (_DRAWS_AT_ONCE,), generator=generator).tolist():
                try:
                    following = next(stream)
                except StopIteration:
                    break
                yield held[place]
                held[place] = following
            else:
                continue
            break
    for place in torch.randperm(len(held), generator=generator).tolist():
        yield held[place]


class HeldOut:
    """Chooses a share of a stream by position: one place, drawn at random, of every 1 / share places.

    So the share is right in every part of the stream, and its length need not be known.

    Example:
        >>> held_out = HeldOut(0.25, torch.Generator().manual_seed(0))
        >>> sum(held_out.next() for _ in range(40))
        10
    """

    def __init__(self, share: float, generator: torch.Generator) -> None:
        self._share, self._generator = share, generator
        self._position = self._stratum = 0
        self._chosen = self._draw(0)

    def next(self) -> bool:
        """Return whether the next item is chosen."""
        is_chosen = self._position == self._chosen
        if is_chosen:
            self._stratum += 1
            self._chosen = self._draw(self._position + 1)
        self._position += 1
        return is_chosen

    def _draw(self, earliest: int) -> int:
        if not self._share:
            return -1
        draw = float(torch.rand((), generator=self._generator, dtype=torch.float64))
        return max(int((self._stratum + draw) / self._share), earliest)
