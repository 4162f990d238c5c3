"""Count what became of the records of a slice, a source or a run: packed, or dropped for a reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.drop_reasons import DropReason, Severity

MAX_EXAMPLES = 3  # of dropped records, per reason


@dataclass
class SplitCounts:
    """Sequences and tokens of one split."""

    num_sequences: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0

    def add(self, other: SplitCounts) -> None:
        """Add other sequences to these."""
        self.num_sequences += other.num_sequences
        self.num_tokens += other.num_tokens
        self.num_trained_tokens += other.num_trained_tokens


@dataclass
class Counts:
    """Records read + repeated + added == sequences + dropped, exactly.

    Example:
        >>> counts = Counts(num_rows=2)
        >>> counts.drop(DropReason.DUPLICATE, "chats.jsonl, line 2")
        >>> {str(reason): count for reason, count in counts.dropped.items()}
        {'duplicate': 1}
    """

    num_rows: int = 0  # records read; dataset.json calls them so
    num_repeated: int = 0  # further copies of records, by the weight of their source
    num_added: int = 0  # further sequences of records that were rendered turn by turn
    num_bytes: int = 0
    num_cut_rows: int = 0
    num_cut_tokens: int = 0
    num_cut_turns: int = 0  # trained turns that were left out of long conversations
    num_straddling: int = 0  # tokens that hold a character of a trained turn and one that is not
    splits: dict[str, SplitCounts] = field(default_factory=dict)
    dropped: dict[DropReason, int] = field(default_factory=dict)
    examples: dict[DropReason, list[str]] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)  # text that the template left out, by kind
    lost_examples: dict[str, str] = field(default_factory=dict)

    def drop(self, reason: DropReason, example: str) -> None:
        """Count a record that is dropped."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < MAX_EXAMPLES:
            shown.append(example)

    def lose(self, kind: str, example: str, count: int = 1) -> None:
        """Count text that the template left out of records that are packed nevertheless."""
        self.lost[kind] = self.lost.get(kind, 0) + count
        self.lost_examples.setdefault(kind, example)

    def split(self, name: str) -> SplitCounts:
        """Return the counts of one split, zeros at first."""
        return self.splits.setdefault(name, SplitCounts())

    def add(self, other: Counts) -> None:
        """Add the counts of other records; the first examples stay."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for split, counts in other.splits.items():
            self.split(split).add(counts)
        for reason, count in other.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
            shown = self.examples.setdefault(reason, [])
            shown += other.examples.get(reason, [])[: MAX_EXAMPLES - len(shown)]
        for kind, count in other.lost.items():
            self.lose(kind, other.lost_examples[kind], count)

    @property
    def num_sequences(self) -> int:
        """Sequences of all splits."""
        return sum(counts.num_sequences for counts in self.splits.values())

    @property
    def num_dropped(self) -> int:
        """Records dropped for any reason."""
        return sum(self.dropped.values())

    @property
    def num_errors(self) -> int:
        """Records that could not be read or encoded."""
        return sum(count for reason, count in self.dropped.items() if reason.severity is Severity.ERROR)

    def refuse_errors(self, max_errors: int) -> None:
        """Raise an error if more records could not be used than the user allows."""
        if self.num_errors > max_errors:
            errors = (reason for reason in self.examples if reason.severity is Severity.ERROR)
            shown = "; ".join(chain.from_iterable(self.examples[reason] for reason in errors))
            raise InvalidInputError(
                f"{self.num_errors:,} records could not be used, more than max_errors={max_errors:,} allows; "
                f"the first: {shown}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers and dictionaries, in a stable order."""
        return {
            **{name: getattr(self, name) for name in _SUMS},
            "splits": {name: vars(counts).copy() for name, counts in sorted(self.splits.items())},
            "dropped": {str(reason): count for reason, count in sorted(self.dropped.items())},
            "examples": {str(reason): shown for reason, shown in sorted(self.examples.items())},
            **({"lost": self.lost, "lost_examples": self.lost_examples} if self.lost else {}),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Counts:
        """Return the inverse of `to_json`."""
        return Counts(
            **{name: document[name] for name in _SUMS},
            splits={name: SplitCounts(**counts) for name, counts in document["splits"].items()},
            dropped={DropReason.named(reason): count for reason, count in document["dropped"].items()},
            examples={DropReason.named(reason): list(shown) for reason, shown in document["examples"].items()},
            lost=dict(document.get("lost", {})),
            lost_examples=dict(document.get("lost_examples", {})),
        )


def total_of(counts: Iterable[Counts]) -> Counts:
    """Return the sum of several counts."""
    total = Counts()
    for one in counts:
        total.add(one)
    return total


_SUMS = (
    *("num_rows", "num_repeated", "num_added", "num_bytes", "num_cut_rows", "num_cut_tokens", "num_cut_turns"),
    "num_straddling",
)
