"""What came in, what was packed, and what was dropped or cut, and why: nothing is lost without being counted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

BELOW_MIN_LEN = "below_min_len"
ABOVE_MAX_LEN = "above_max_len"
LONGER_THAN_PACK = "longer_than_pack"
TRUNCATED = "truncated"  # tokens only: the sequences themselves are packed
SHORT_TAIL = "short_tail"  # tokens only: last pieces of split sequences, shorter than min_len
HELD_BACK = "held_back"
REASONS = (BELOW_MIN_LEN, ABOVE_MAX_LEN, LONGER_THAN_PACK, TRUNCATED, SHORT_TAIL, HELD_BACK)


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """Rows and tokens, conserved: in + overlap == packed + dropped, exactly.

    Example:
        >>> Accounting(num_sequences=3, num_tokens=30, dropped_sequences={"below_min_len": 1}).num_sequences_packed
        2
    """

    num_sequences: int
    num_tokens: int
    dropped_sequences: dict[str, int] = field(default_factory=dict)
    dropped_tokens: dict[str, int] = field(default_factory=dict)
    num_truncated: int = 0
    num_split: int = 0
    num_chunks: int = 0  # pieces made of the split sequences, dropped tails not counted
    num_overlap_tokens: int = 0  # tokens that stand in two pieces
    num_oversized: int = 0  # sequences longer than the pack, in bins of their own (overflow=single)

    @property
    def num_sequences_packed(self) -> int:
        """Sequences of which at least one token is packed."""
        return self.num_sequences - sum(self.dropped_sequences.values())

    @property
    def num_tokens_packed(self) -> int:
        """Tokens in the bins, those of overlaps counted twice."""
        return self.num_tokens + self.num_overlap_tokens - sum(self.dropped_tokens.values())

    def with_drop(self, reason: str, num_sequences: int, num_tokens: int) -> Accounting:
        """Return a copy with a further drop; nothing is noted when nothing was dropped."""
        sequences = {**self.dropped_sequences, reason: num_sequences} if num_sequences else self.dropped_sequences
        tokens = {**self.dropped_tokens, reason: num_tokens} if num_tokens else self.dropped_tokens
        return replace(self, dropped_sequences=sequences, dropped_tokens=tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and dictionaries, as stored with a plan."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}
