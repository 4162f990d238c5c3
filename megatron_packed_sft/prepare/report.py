"""What a preparation did, in numbers: for the summary on the terminal, the dataset card and dataset.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.prepare.audit import Audit
from megatron_packed_sft.prepare.counts import Counts, SplitCounts, total_of
from megatron_packed_sft.prepare.plan_stage import PackedSequences
from megatron_packed_sft.support.drop_reasons import DropReason, Severity
from megatron_packed_sft.support.wording import plural

_WORTH_A_WARNING = 0.01  # share of records or tokens
_REMEDIES = {
    DropReason.LONGER_THAN_PACK: "raise packing.pack_size, or set packing.overflow=split or truncate",
    DropReason.TRUNCATED: "raise packing.pack_size, or set packing.overflow=split",
    DropReason.SHORT_TAIL: "lower packing.min_len",
    DropReason.TOO_LONG: "raise encode.max_len, or set encode.truncation to right or turns",
    DropReason.ANSWER_CUT_AWAY: "raise encode.max_len, or set encode.truncation=left",
    DropReason.NOTHING_TO_TRAIN: "check encode.roles_to_train",
    DropReason.EMPTY: "remove them from the input",
}
_FIX = "fix or remove them"


@dataclass(frozen=True)
class SourceReport:
    """One source: what was read and encoded, and what the plans made of it."""

    counts: Counts
    packed: Mapping[str, PackedSequences]  # by split

    @property
    def dropped_by_plan(self) -> dict[DropReason, int]:
        """Sequences that are in no bin, by reason."""
        return added_up(one.dropped for one in self.packed.values())

    @property
    def dropped(self) -> dict[DropReason, int]:
        """Records that are in no bin, by reason, wherever they were dropped."""
        return added_up([self.counts.dropped, self.dropped_by_plan])

    @property
    def in_bins(self) -> SplitCounts:
        """Sequences and tokens in the bins of all splits."""
        total = SplitCounts()
        for one in self.packed.values():
            total.add(one.counts)
        return total

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, for provenance, without examples: they name files by their path."""
        document = self.counts.to_json()
        del document["examples"]
        document["in_bins"] = vars(self.in_bins).copy()
        return {**document, "dropped_by_plan": {str(why): count for why, count in sorted(self.dropped_by_plan.items())}}


@dataclass(frozen=True)
class SplitReport:
    """One split: what was encoded for it, and what the plan made of it."""

    encoded: SplitCounts
    packed: SplitCounts
    plan: PackPlan
    num_shards: int
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, for provenance."""
        stats = self.plan.stats()
        return {
            **vars(self.encoded),
            "pack_size": self.plan.pack_size,
            "num_bins": self.plan.num_bins,
            "utilization": round(stats.utilization, 6),
            "gap_to_lower_bound": round(stats.gap, 6),
            "plan_fingerprint": self.plan.fingerprint,
            "order_fingerprint": self.plan.order_fingerprint,
            "accounting": self.plan.accounting.as_dict(),
        }


@dataclass(frozen=True)
class PrepareReport:
    """The whole preparation, or a dry run of it, which may have looked at a part of the input only."""

    output: str
    packed_storage: str
    tokenizer_path: str
    sources: Mapping[str, SourceReport]
    splits: Mapping[str, SplitReport]
    stages: Sequence[tuple[str, str]] = ()  # name of the stage, what it did
    looked_at: float = 1.0  # share of the input's bytes, in a dry run
    audits: Mapping[str, Audit] | None = None  # what is trained of each source, if that was asked for

    @property
    def total(self) -> Counts:
        """Counts of all sources together."""
        return total_of(source.counts for source in self.sources.values())

    @property
    def dropped(self) -> dict[DropReason, int]:
        """Records that are in no bin, by reason."""
        return added_up(source.dropped for source in self.sources.values())

    @property
    def dropped_tokens(self) -> dict[DropReason, int]:
        """Encoded tokens that are in no bin, by reason."""
        plans = (split.plan.accounting.dropped_tokens for split in self.splits.values())
        return added_up({DropReason.named(why): count for why, count in plan.items()} for plan in plans)

    @property
    def num_packed(self) -> int:
        """Sequences of which at least one token is in a bin."""
        return sum(split.packed.num_sequences for split in self.splits.values())

    def to_json(self) -> dict[str, Any]:
        """Return the same facts for programs."""
        return {
            "output": self.output,
            "packed_storage": self.packed_storage,
            "stages": dict(self.stages),
            "share_of_input": self.looked_at,
            "num_records": self.total.num_rows,
            "num_packed": self.num_packed,
            "dropped": {str(why): count for why, count in sorted(self.dropped.items())},
            "dropped_tokens": {str(why): count for why, count in sorted(self.dropped_tokens.items())},
            "sources": {name: source.to_json() for name, source in self.sources.items()},
            "splits": {
                name: {
                    **split.to_json(),
                    "packed": vars(split.packed).copy(),
                    "num_shards": split.num_shards,
                    "num_bytes": split.num_bytes,
                }
                for name, split in self.splits.items()
            },
            "audits": None if self.audits is None else {name: one.to_json() for name, one in self.audits.items()},
            "warning": self.warning(),
        }

    def check(self) -> None:
        """Make sure that nothing is lost: records read + repeated + added == packed + dropped, and tokens likewise."""
        total = self.total
        assert total.num_rows + total.num_repeated + total.num_added == self.num_packed + sum(self.dropped.values())
        for split in self.splits.values():
            accounting = split.plan.accounting
            assert accounting.num_tokens == split.encoded.num_tokens
            assert accounting.num_sequences_packed == split.packed.num_sequences
            assert int(split.plan.bin_tokens.sum()) == accounting.num_tokens_packed == split.packed.num_tokens

    def refuse_large_loss(self, max_drop_share: float) -> None:
        """Stop before anything is published when more sound data would be lost than the user allows."""
        if max(self._lost_shares(Severity.ANNOUNCED)) > max_drop_share:
            raise InvalidInputError(
                f"{self._loss(Severity.ANNOUNCED)}, more than max_drop_share={max_drop_share:g} allows; nothing was "
                "published (rejects=PATH lists the records)"
            )

    def warning(self) -> str | None:
        """Return a sentence about lost data, if there is more than a little."""
        lost = (Severity.ANNOUNCED, Severity.ERROR)
        return self._loss(*lost) if max(self._lost_shares(*lost)) > _WORTH_A_WARNING else None

    def _lost_shares(self, *severities: Severity) -> tuple[float, float]:
        """Return the shares of records and of tokens that were lost."""
        num_records = self.total.num_rows + self.total.num_repeated + self.total.num_added
        num_tokens = sum(split.encoded.num_tokens for split in self.splits.values())
        records = sum(count for reason, count in self.dropped.items() if reason.severity in severities)
        tokens = sum(count for reason, count in self.dropped_tokens.items() if reason.severity in severities)
        return records / max(num_records, 1), tokens / max(num_tokens, 1)

    def _loss(self, *severities: Severity) -> str:
        """Say what was lost and what to do about it."""
        records, tokens = self._lost_shares(*severities)
        dropped, dropped_tokens = self.dropped, self.dropped_tokens
        parts = []
        for reason in DropReason:
            if reason.severity in severities and (reason in dropped or reason in dropped_tokens):
                by_record = reason in dropped
                amount = plural(dropped[reason], "record") if by_record else plural(dropped_tokens[reason], "token")
                parts.append(f"{reason} {amount} ({_REMEDIES.get(reason, _FIX)})")
        return (
            f"{100 * records:.1f} % of the records and {100 * tokens:.1f} % of the tokens are lost: {', '.join(parts)}"
        )


def added_up(counts: Iterable[Mapping[DropReason, int]]) -> dict[DropReason, int]:
    """Return the sums of counts by reason."""
    total: dict[DropReason, int] = {}
    for one in counts:
        for reason, count in one.items():
            total[reason] = total.get(reason, 0) + count
    return total
