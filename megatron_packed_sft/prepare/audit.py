"""What is trained: per sequence for `prepare audit=true` and `packed-sft report`, and per source for the audit.

flat mask ─▶ TrainedTokens: trained tokens of each sequence, the first of them, odd masks ─▶ Audit, suspicions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.encode.masks.trained_kinds import TurnKind
from megatron_packed_sft.encode.sequences import Sequences
from megatron_packed_sft.support.terminal import table
from megatron_packed_sft.support.wording import plural

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLUMNS = {
    TurnKind.ANSWER: "answer",
    TurnKind.REASONING: "reasoning",
    TurnKind.TOOL_CALL: "tool call",
    TurnKind.END_OF_TURN: "end of turn",
    TurnKind.OTHER: "other",
}
ONLY_END, EVERYTHING, LATE = "only_end", "everything", "late"
_ODD = {
    ONLY_END: "trained on nothing but an end of turn",
    EVERYTHING: "trained on everything",
    LATE: "trained on nothing before its last twentieth",
}
LATE_SHARE, LATE_LENGTH = 0.95, 512  # in a short sequence, a long question before a short answer is normal
_MAX_EXAMPLES = 3

Int64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class TrainedTokens:
    """Which tokens of some sequences are trained.

    Args:
        is_trained: of all tokens, sequences end to end.
        starts: where each sequence begins.

    Example:
        >>> masks = TrainedTokens(np.array([0, 1, 1, 0, 0], bool), np.array([0, 3]))
        >>> masks.num_trained.tolist(), masks.first_trained.tolist()
        ([2, 0], [1, 2])
    """

    def __init__(self, is_trained: Flags, starts: Int64) -> None:
        self.is_trained = is_trained
        self.starts = starts

    @cached_property
    def ends(self) -> Int64:
        """Where each sequence ends."""
        return np.append(self.starts[1:], len(self.is_trained))

    @cached_property
    def lengths(self) -> Int64:
        """Tokens of each sequence."""
        return self.ends - self.starts

    @cached_property
    def num_trained(self) -> Int64:
        """Trained tokens of each sequence."""
        return np.add.reduceat(self.is_trained, self.starts, dtype=np.int64)

    @cached_property
    def first_trained(self) -> Int64:
        """Position of the first trained token of each sequence; its length if there is none."""
        places = np.flatnonzero(self.is_trained)
        following = np.append(places, len(self.is_trained))[np.searchsorted(places, self.starts)]
        first: Int64 = np.minimum(following, self.ends) - self.starts
        return first

    @cached_property
    def is_late(self) -> Flags:
        """Whether a long sequence is trained only in its last twentieth."""
        is_long = (self.lengths >= LATE_LENGTH) & (self.num_trained > 0)
        late: Flags = is_long & (self.first_trained >= LATE_SHARE * self.lengths)
        return late


class Extreme(NamedTuple):
    """The fewest or the most trained tokens of a sequence, and the record that it came from."""

    num_tokens: int
    where: str


@dataclass
class Audit:
    """The masks of some records."""

    num_records: int = 0
    num_sequences: int = 0
    num_turns: int = 0
    num_tokens: int = 0
    by_kind: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(TurnKind), np.int64))
    shortest: Extreme | None = None
    longest: Extreme | None = None
    odd: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def look_at(self, sequences: Sequences, num_turns: int, where: Sequence[str]) -> None:
        """Count a batch of sequences; `where` says where each record of the batch is."""
        if not len(sequences.lengths):
            return
        train = sequences.train.astype(bool)
        kinds = sequences.all_kinds()
        masks = TrainedTokens(train, sequences.ends - sequences.lengths)
        num_trained = masks.num_trained
        places = [where[record] for record in sequences.record.tolist()]
        few, many = int(num_trained.argmin()), int(num_trained.argmax())
        self.add(
            Audit(
                num_records=len(np.unique(sequences.record)),
                num_sequences=len(sequences.lengths),
                num_turns=num_turns,
                num_tokens=len(train),
                by_kind=np.bincount(kinds[train], minlength=len(TurnKind)).astype(np.int64),
                shortest=Extreme(int(num_trained[few]), places[few]),
                longest=Extreme(int(num_trained[many]), places[many]),
            )
        )
        is_end = train & (kinds == TurnKind.END_OF_TURN)
        found = {
            ONLY_END: num_trained == np.add.reduceat(is_end, masks.starts, dtype=np.int64),
            EVERYTHING: num_trained >= np.maximum(masks.lengths - 1, 1),
            LATE: masks.is_late,
        }
        for name, is_odd in found.items():
            if is_odd.any():
                some = [places[number] for number in np.flatnonzero(is_odd)[:_MAX_EXAMPLES]]
                self._note(name, int(is_odd.sum()), some)

    def add(self, other: Audit) -> None:
        """Add the masks of other records."""
        for name in ("num_records", "num_sequences", "num_turns", "num_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.by_kind = self.by_kind + other.by_kind
        shortest = [one for one in (self.shortest, other.shortest) if one is not None]
        longest = [one for one in (self.longest, other.longest) if one is not None]
        self.shortest = min(shortest, key=lambda one: one.num_tokens, default=None)
        self.longest = max(longest, key=lambda one: one.num_tokens, default=None)
        for name, count in other.odd.items():
            self._note(name, count, other.examples[name])

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, for programs."""
        counts = {name: getattr(self, name) for name in ("num_records", "num_sequences", "num_turns", "num_tokens")}
        extremes = {
            name: one and one._asdict() for name, one in (("shortest", self.shortest), ("longest", self.longest))
        }
        by_kind = {kind.name.lower(): int(self.by_kind[kind]) for kind in TurnKind}
        return {**counts, "trained_by_kind": by_kind, **extremes, "odd": self.odd, "examples": self.examples}

    def _note(self, name: str, count: int, examples: Sequence[str]) -> None:
        self.odd[name] = self.odd.get(name, 0) + count
        shown = self.examples.setdefault(name, [])
        shown += examples[: _MAX_EXAMPLES - len(shown)]


def audit_parts(audits: Mapping[str, Audit]) -> list[RenderableType]:
    """Return a table of what is trained of each source, and its odd records.

    Example:
        >>> one = Audit(num_records=1, num_turns=1, num_tokens=8, by_kind=np.array([0, 3, 0, 0, 1]))
        >>> from megatron_packed_sft.support.terminal import as_text
        >>> print(as_text(*audit_parts({"input": one})))
        trained by kind  records  turns  answer  end of turn  trained  shortest  longest
        input                  1      1       3            1   50.0 %         -        -
    """
    shown = [kind for kind in _COLUMNS if any(audit.by_kind[kind] for audit in audits.values())]
    rows = []
    for name, audit in audits.items():
        num_trained = int(audit.by_kind.sum())
        rows.append(
            [
                name,
                audit.num_records,
                audit.num_turns,
                *(int(audit.by_kind[kind]) for kind in shown),
                f"{100 * num_trained / audit.num_tokens:.1f} %" if audit.num_tokens else "-",
                audit.shortest.num_tokens if audit.shortest else "-",
                audit.longest.num_tokens if audit.longest else "-",
            ]
        )
    header = ["trained by kind", "records", "turns", *(_COLUMNS[kind] for kind in shown)]
    lines: list[RenderableType] = [
        table([*header, "trained", "shortest", "longest"], rows, styles={"trained": "green"})
    ]
    for name, audit in audits.items():
        if audit.shortest and audit.longest and audit.shortest.where != audit.longest.where:
            lines.append(
                f"{name}: the fewest trained tokens are in {audit.shortest.where}, the most in {audit.longest.where}"
            )
        for odd, count in audit.odd.items():
            places = "; ".join(audit.examples[odd])
            lines.append(f"{name}: {plural(count, 'sequence')} {_ODD[odd]}, such as {places}")
    return lines
