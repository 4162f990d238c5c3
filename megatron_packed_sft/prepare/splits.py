"""Which split a row belongs to, and how often it is packed: by its content alone."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from megatron_packed_sft.errors import InvalidInputError

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = (TRAIN, VALIDATION, TEST)
_RANGE = 1 << 64


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Held-out shares, drawn by a keyed hash of a row's content: adding or reordering rows moves no other row.

    Example:
        >>> rule = SplitRule(validation_fraction=0.5, test_fraction=0.0, seed=0)
        >>> rule.split_of(b"one row") == rule.split_of(b"one row")
        True
    """

    validation_fraction: float
    test_fraction: float
    seed: int

    def __post_init__(self) -> None:
        for name in ("validation_fraction", "test_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidInputError(f"split.{name} is {getattr(self, name)}; it must be at least 0 and below 1")
        if self.validation_fraction + self.test_fraction >= 1:
            raise InvalidInputError("split.validation_fraction and split.test_fraction leave nothing to train on")
        if not 0 <= self.seed < _RANGE:
            raise InvalidInputError(f"split.seed is {self.seed}; it must be from 0 to 2**64 - 1")

    @property
    def holds_out(self) -> bool:
        """Whether any row is held out by this rule."""
        return self.validation_fraction + self.test_fraction > 0

    def split_of(self, content: bytes) -> str:
        """The split of the row with this content hash."""
        draw = self._draw(content, 0)
        if draw < self.validation_fraction:
            return VALIDATION
        return TEST if draw < self.validation_fraction + self.test_fraction else TRAIN

    def num_copies(self, content: bytes, weight: float) -> int:
        """How often a training row of a source with this weight is packed; the fraction is drawn by its content."""
        whole = int(weight)
        return whole + (self._draw(content, 1) < weight - whole)

    def _draw(self, content: bytes, purpose: int) -> float:
        """A number from 0 to 1 that depends on the content, the seed and what it is for."""
        return xxhash.xxh3_64_intdigest(content + bytes([purpose]), self.seed) / _RANGE
