"""What a preparation did, in numbers: for the summary on the terminal, the dataset card and dataset.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.prepare.counts import Counts, SplitCounts


@dataclass(frozen=True)
class SplitReport:
    """One split: what was encoded for it, and what the plan made of it."""

    counts: SplitCounts
    plan: PackPlan
    num_shards: int
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, for provenance."""
        stats = self.plan.stats()
        return {
            **vars(self.counts),
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

    output: Path
    packed_storage: str
    tokenizer_path: str
    sources: Mapping[str, Counts]
    splits: Mapping[str, SplitReport]
    stages: Sequence[tuple[str, str]]  # name of the stage, what it did
    looked_at: float = 1.0  # share of the input's bytes, in a dry run

    @property
    def total(self) -> Counts:
        """All sources together."""
        total = Counts()
        for counts in self.sources.values():
            total.add(counts)
        return total

    def dropped(self) -> dict[str, int]:
        """Rows that are not packed, by reason; those of the encode stage and those of the plans."""
        dropped = dict(self.total.dropped)
        for split in self.splits.values():
            for reason, count in split.plan.accounting.dropped_sequences.items():
                dropped[reason] = dropped.get(reason, 0) + count
        return dropped

    @property
    def num_packed(self) -> int:
        """Sequences of which at least one token is in a bin."""
        return sum(split.plan.accounting.num_sequences_packed for split in self.splits.values())

    def check(self) -> None:
        """Nothing is lost: rows in + repeated == packed + dropped, and tokens likewise."""
        total = self.total
        assert total.num_rows + total.num_repeated == self.num_packed + sum(self.dropped().values())
        for split in self.splits.values():
            accounting = split.plan.accounting
            assert accounting.num_tokens == split.counts.num_tokens
            assert int(split.plan.bin_tokens.sum()) == accounting.num_tokens_packed
