"""What happened to the rows of a unit, a source or a whole run: each is packed, or dropped for a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BAD_ROW = "bad_row"
DUPLICATE = "duplicate"
SAMPLED_OUT = "sampled_out"
# Faults of a row or of the template, unlike rows that were dropped because the options say so.
ERRORS = (BAD_ROW, "template_error", "untraceable_template", "unescapable", "invalid_text", "invalid_ids")
# Sound rows in which nothing is left to learn.
NOTHING_LEFT = ("empty", "nothing_to_train", "answer_cut_away")
MAX_EXAMPLES = 3  # of dropped rows, per reason


@dataclass
class SplitCounts:
    """Sequences and tokens that went to one split."""

    num_sequences: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0


@dataclass
class Counts:
    """Rows in + repeated == sequences + dropped, exactly.

    Example:
        >>> counts = Counts(num_rows=2)
        >>> counts.drop("duplicate", "chats.jsonl, line 2")
        >>> counts.dropped, counts.examples
        ({'duplicate': 1}, {'duplicate': ['chats.jsonl, line 2']})
    """

    num_rows: int = 0
    num_repeated: int = 0  # further copies of rows, by their source's weight
    num_bytes: int = 0
    num_cut_rows: int = 0
    num_cut_tokens: int = 0
    num_straddling: int = 0  # tokens that hold a character of a trained turn and one that is not
    splits: dict[str, SplitCounts] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, example: str) -> None:
        """Count a row that is not packed."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < MAX_EXAMPLES:
            shown.append(example)

    def split(self, name: str) -> SplitCounts:
        """The counts of one split, from zero on."""
        return self.splits.setdefault(name, SplitCounts())

    def add(self, other: Counts) -> None:
        """Take in the counts of another unit; examples stay those that came first."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for split, counts in other.splits.items():
            mine = self.split(split)
            for name in SplitCounts.__dataclass_fields__:
                setattr(mine, name, getattr(mine, name) + getattr(counts, name))
        for reason, count in other.dropped.items():
            self.dropped[reason] = self.dropped.get(reason, 0) + count
            shown = self.examples.setdefault(reason, [])
            shown += other.examples.get(reason, [])[: MAX_EXAMPLES - len(shown)]

    @property
    def num_sequences(self) -> int:
        """Sequences of all splits."""
        return sum(counts.num_sequences for counts in self.splits.values())

    @property
    def num_dropped(self) -> int:
        """Rows dropped for any reason."""
        return sum(self.dropped.values())

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and dictionaries, in a stable order."""
        return {
            **{name: getattr(self, name) for name in _SUMS},
            "splits": {name: vars(counts).copy() for name, counts in sorted(self.splits.items())},
            "dropped": dict(sorted(self.dropped.items())),
            "examples": dict(sorted(self.examples.items())),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Counts:
        """The inverse of `to_json`."""
        splits = {name: SplitCounts(**counts) for name, counts in document["splits"].items()}
        return Counts(
            **{name: document[name] for name in _SUMS},
            splits=splits,
            dropped=dict(document["dropped"]),
            examples={reason: list(shown) for reason, shown in document["examples"].items()},
        )


_SUMS = ("num_rows", "num_repeated", "num_bytes", "num_cut_rows", "num_cut_tokens", "num_straddling")
