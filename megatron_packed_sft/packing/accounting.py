"""What came in, what was packed, and what was dropped or cut, and why: nothing is lost without being counted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from megatron_packed_sft.support.drop_reasons import DropReason

# The reasons that packing itself can have. TRUNCATED and SHORT_TAIL count tokens only: their sequences are packed.
REASONS = (
    DropReason.BELOW_MIN_LEN,
    DropReason.ABOVE_MAX_LEN,
    DropReason.LONGER_THAN_PACK,
    DropReason.TRUNCATED,
    DropReason.SHORT_TAIL,
    DropReason.HELD_BACK,
)


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """Sequences and tokens, conserved: in + overlap == packed + dropped, exactly.

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
    num_chunks: int = 0  # chunks of the split sequences, dropped tails not counted
    num_overlap_tokens: int = 0  # tokens that are in two chunks
    num_oversized: int = 0  # sequences longer than the pack, in bins of their own (overflow=single)
    num_copies_together: int = 0  # copies that share a bin with another one, because nothing else fits

    @property
    def num_sequences_packed(self) -> int:
        """Sequences of which at least one token is packed."""
        return self.num_sequences - sum(self.dropped_sequences.values())

    @property
    def num_tokens_packed(self) -> int:
        """Tokens in the bins, those of overlaps counted twice."""
        return self.num_tokens + self.num_overlap_tokens - sum(self.dropped_tokens.values())

    def with_drop(self, reason: DropReason, num_sequences: int, num_tokens: int) -> Accounting:
        """Return a copy with one more drop; nothing is noted when nothing was dropped."""
        name = str(reason)
        sequences = {**self.dropped_sequences, name: num_sequences} if num_sequences else self.dropped_sequences
        tokens = {**self.dropped_tokens, name: num_tokens} if num_tokens else self.dropped_tokens
        return replace(self, dropped_sequences=sequences, dropped_tokens=tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and dictionaries, as stored with a plan; `num_copies_together` only if there are any."""
        result = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if not self.num_copies_together:
            del result["num_copies_together"]
        return result
