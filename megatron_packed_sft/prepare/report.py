"""What a preparation did: figures for dataset.json, the summary on the terminal, and the dataset card.

counts of the sources, plans ─▶ PrepareReport ─▶ summary(), card(), to_json()
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.encode.masks.lost_text import REASONING
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.items import REASONS
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.prepare.audit import Audit, audit_parts
from megatron_packed_sft.prepare.counts import Counts, SplitCounts, total_of
from megatron_packed_sft.prepare.plan_stage import PackedSequences
from megatron_packed_sft.prepare.usage import how_to_use
from megatron_packed_sft.support.drop_reasons import DropReason, Severity
from megatron_packed_sft.support.terminal import as_text, table
from megatron_packed_sft.support.wording import byte_count, plural

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_WORTH_A_WARNING = 0.01  # share of records or tokens
_WHY = {
    DropReason.BAD_RECORD: "not readable, or of no known schema",
    DropReason.TEMPLATE_ERROR: "refused by the chat template",
    DropReason.UNTRACEABLE_TEMPLATE: "text not traceable through the chat template",
    DropReason.LOST_TEXT: "the template would lose text that is trained",
    DropReason.UNESCAPABLE: "a control token where it cannot be escaped",
    DropReason.INVALID_TEXT: "not valid Unicode",
    DropReason.INVALID_IDS: "ids beyond the vocabulary",
    DropReason.EMPTY: "no text",
    DropReason.NOTHING_TO_TRAIN: "nothing to train on",
    DropReason.ANSWER_CUT_AWAY: "encode.max_len cut off all that is trained",
    DropReason.LOST_TEXT_DROPPED: "the template would lose text (encode.on_lost=drop)",
    DropReason.TOO_LONG: "longer than encode.max_len",
    DropReason.LONGER_THAN_PACK: "longer than packing.pack_size",
    DropReason.TRUNCATED: "cut off by packing.overflow=truncate",
    DropReason.SHORT_TAIL: "last chunks shorter than packing.min_len",
    DropReason.DUPLICATE: "equal to an earlier record",
    DropReason.NOT_TAKEN: "not the chosen answer (take)",
    DropReason.SAMPLED_OUT: "left out by a weight below 1",
    DropReason.BELOW_MIN_LEN: "shorter than packing.min_len",
    DropReason.ABOVE_MAX_LEN: "longer than packing.max_len",
    DropReason.HELD_BACK: "left over by packing.whole_batches",
}
_REMEDIES = {
    DropReason.NOTHING_TO_TRAIN: "check encode.roles_to_train",
    DropReason.EMPTY: "remove them from the input",
    DropReason.ANSWER_CUT_AWAY: "raise encode.max_len, or set encode.truncation=left",
    DropReason.LOST_TEXT_DROPPED: "",  # it is what the user asked for
    DropReason.TOO_LONG: "raise encode.max_len, or set encode.truncation to right or turns",
    DropReason.LONGER_THAN_PACK: "raise packing.pack_size, or set packing.overflow=split or truncate",
    DropReason.TRUNCATED: "raise packing.pack_size, or set packing.overflow=split",
    DropReason.SHORT_TAIL: "lower packing.min_len",
}
_FIX = "fix or remove them"
_STYLES = {"trained": "green", "dropped": "yellow"}


@dataclass(frozen=True)
class SourceReport:
    """One source: what was read and encoded, and what is in the bins."""

    counts: Counts
    packed: Mapping[str, PackedSequences]  # by split

    @property
    def dropped_by_plan(self) -> dict[DropReason, int]:
        """Sequences that are in no bin, by reason."""
        return added_up(one.dropped for one in self.packed.values())

    @property
    def dropped(self) -> dict[DropReason, int]:
        """Records that are in no bin, by reason, dropped in any stage."""
        return added_up([self.counts.dropped, self.dropped_by_plan])

    @property
    def in_bins(self) -> SplitCounts:
        """Sequences and tokens in the bins of all splits."""
        total = SplitCounts()
        for one in self.packed.values():
            total.add(one.counts)
        return total

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers for provenance, without examples, which name files by their paths."""
        document = self.counts.to_json()
        del document["examples"]
        document["in_bins"] = vars(self.in_bins).copy()
        return {**document, "dropped_by_plan": {str(why): count for why, count in sorted(self.dropped_by_plan.items())}}


@dataclass(frozen=True)
class SplitReport:
    """One split: what was encoded, and what is in the bins."""

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
    """A whole preparation, or a dry run, which may have looked at a part of the input only."""

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
        """Assert that nothing is missing: records read + repeated + added == packed + dropped, and tokens likewise."""
        total = self.total
        assert total.num_rows + total.num_repeated + total.num_added == self.num_packed + sum(self.dropped.values())
        for split in self.splits.values():
            accounting = split.plan.accounting
            assert accounting.num_tokens == split.encoded.num_tokens
            assert accounting.num_sequences_packed == split.packed.num_sequences
            assert int(split.plan.bin_tokens.sum()) == accounting.num_tokens_packed == split.packed.num_tokens

    def refuse_large_loss(self, max_drop_share: float) -> None:
        """Raise an error, before anything is published, if more sound data would be lost than the user allows."""
        if max(self._lost_shares(Severity.ANNOUNCED)) > max_drop_share:
            raise InvalidInputError(
                f"{self._loss(Severity.ANNOUNCED)}, more than max_drop_share={max_drop_share:g} allows; nothing was "
                "published (rejects=PATH lists the records)"
            )

    def warning(self) -> str | None:
        """Return a sentence about lost data, if it is more than 1 % of the records or tokens."""
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
        """Return a sentence that says what was lost, and what to do about it."""
        records, tokens = self._lost_shares(*severities)
        dropped, dropped_tokens = self.dropped, self.dropped_tokens
        parts = []
        for reason in DropReason:
            if reason.severity in severities and (reason in dropped or reason in dropped_tokens):
                by_record = reason in dropped
                amount = plural(dropped[reason], "record") if by_record else plural(dropped_tokens[reason], "token")
                remedy = _REMEDIES.get(reason, _FIX)
                parts.append(f"{amount}: {_WHY[reason]}" + (f" ({remedy})" if remedy else ""))
        shares = f"{100 * records:.1f} % of the records and {100 * tokens:.1f} % of the tokens"
        return f"{shares} were dropped; {'; '.join(parts)}"


def added_up(counts: Iterable[Mapping[DropReason, int]]) -> dict[DropReason, int]:
    """Return the sums of counts by reason."""
    total: dict[DropReason, int] = {}
    for one in counts:
        for reason, count in one.items():
            total[reason] = total.get(reason, 0) + count
    return total


def summary(report: PrepareReport) -> list[RenderableType]:
    """Return texts and tables: what was done, what became of every record, and how to use the result."""
    total = report.total
    lines: list[RenderableType] = [f"{stage:<8} {what}" for stage, what in report.stages]
    lines += ["", _accounting(report), "", _source_table(report), "", _split_table(report)]
    if report.looked_at < 1:
        share = f"{100 * report.looked_at:.1f} %"
        lines += ["", f"Counted in {share} of the input; multiply by {1 / report.looked_at:.1f} to estimate all of it."]
    if report.audits is not None:
        lines += ["", *audit_parts(report.audits)]
    notes = _notes(report)
    if notes:
        lines += ["", *notes]
    if total.num_rows and not report.stages[-1][0].startswith("dry"):
        first = next(iter(report.splits.values()))
        lines += [
            "",
            *how_to_use(
                report.output,
                packed_storage=report.packed_storage,
                pack_size=first.plan.pack_size,
                tokenizer_path=report.tokenizer_path,
            ),
        ]
    return lines


def card(report: PrepareReport, provenance: dict[str, Any]) -> str:
    """Return the README.md of the published directory. It depends on the data and the settings, not on their paths."""
    settings = provenance["settings"]
    tokenizer, template = provenance["tokenizer"], provenance["chat_template"]
    sources: list[str] = []
    for name, source in provenance["sources"].items():
        split = f", all of it {source['split']}" if source["split"] else ""
        sources.append(f"- **{name}** (schema {source['schema']}, weight {source['weight']:g}{split})")
        sources += [f"  - `{file['name']}`, {file['size']:,} bytes, {file['checksum']}" for file in source["files"]]
    return "\n".join(
        [
            "# Packed SFT data",
            "",
            f"Made by `packed-sft prepare`, storage `{report.packed_storage}`. dataset.json holds the same facts for",
            "programs. `packed-sft validate` checks the files.",
            "",
            "## Made from",
            "",
            *sources,
            f"- Tokenizer `{tokenizer['name']}`, {tokenizer['fingerprint']}",
            f"- Chat template `{template['name']}`, {template['fingerprint']}" if template else "- No chat template",
            "",
            "## What is in it",
            "",
            "```",
            as_text(_split_table(report), "", _accounting(report), "", _source_table(report)),
            "```",
            "",
            "## Settings",
            "",
            "```",
            *(f"{key}: {_plain(value)}" for group, values in settings.items() for key, value in _flat(group, values)),
            "```",
            "",
        ]
    )


def _accounting(report: PrepareReport) -> Table:
    total = report.total
    plans = [split.plan.accounting for split in report.splits.values()]
    rows: list[tuple[str, int | str, int | str]] = [("records read", total.num_rows, "")]
    if total.num_repeated:
        rows.append(("repeated by weight", total.num_repeated, ""))
    if total.num_added:
        rows.append(("added by encode.render", total.num_added, ""))
    rows += [(f"dropped: {_WHY[reason]}", count, "") for reason, count in sorted(total.dropped.items())]
    rows.append(("encoded", total.num_sequences, sum(plan.num_tokens for plan in plans)))
    if overlap := sum(plan.num_overlap_tokens for plan in plans):
        rows.append(("repeated by packing.stride", "", overlap))
    by_plan = added_up(source.dropped_by_plan for source in report.sources.values())
    tokens = report.dropped_tokens
    rows += [
        (f"dropped: {_WHY[why]}", by_plan.get(why, 0), tokens.get(why, 0))
        for why in map(DropReason.named, REASONS)
        if why in {**by_plan, **tokens}
    ]
    rows.append(("packed", report.num_packed, sum(plan.num_tokens_packed for plan in plans)))
    return table(["", "records", "tokens"], rows)


def _source_table(report: PrepareReport) -> Table:
    """Return a table of what was read of each source, and what of it is in the bins."""
    rows = []
    for name, source in report.sources.items():
        packed = source.in_bins
        share = _percent(packed.num_trained_tokens, packed.num_tokens)
        num_dropped = sum(source.dropped.values())
        rows.append([name, source.counts.num_rows, num_dropped, packed.num_sequences, packed.num_tokens, share])
    return table(["source", "records", "dropped", "sequences", "tokens", "trained"], rows, styles=_STYLES)


def _split_table(report: PrepareReport) -> Table:
    """Return a table of what is in the bins of each split."""
    rows = []
    for name, split in report.splits.items():
        packed = split.packed
        rows.append(
            [
                name,
                packed.num_sequences,
                packed.num_tokens,
                _percent(packed.num_trained_tokens, packed.num_tokens),
                split.plan.num_bins,
                split.plan.pack_size,
                f"{100 * split.plan.stats().utilization:.2f} %",
                split.num_shards,
                byte_count(split.num_bytes),
            ]
        )
    return table(
        ["split", "sequences", "tokens", "trained", "bins", "pack size", "full", "files", "on disk"],
        rows,
        styles=_STYLES,
    )


def _notes(report: PrepareReport) -> list[str]:
    total = report.total
    notes = []
    for reason, shown in sorted(total.examples.items()):
        notes.append(f"{plural(total.dropped[reason], 'record')} dropped, {_WHY[reason]}; for example {shown[0]}")
    for kind, count in sorted(total.lost.items()):
        remedy = "encode.render=turns keeps it" if kind == REASONING else "see encode.on_lost"
        what, where = kind.replace("_", " "), total.lost_examples[kind]
        notes.append(f"the template left out {what} {plural(count, 'time')} ({remedy}); for example {where}")
    if total.num_cut_rows:
        cut = [plural(total.num_cut_tokens, "token")]
        cut += [plural(total.num_cut_turns, "trained turn")] if total.num_cut_turns else []
        notes.append(f"encode.max_len cut {' and '.join(cut)} from {plural(total.num_cut_rows, 'record')}")
    if total.num_straddling:
        notes.append(
            f"{plural(total.num_straddling, 'token')} with trained and untrained characters, such as the blank after a "
            "header, are trained (docs/masks.md)"
        )
    return notes


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [entry for key, inner in value.items() for entry in _flat(f"{prefix}.{key}", inner)]
    return [(prefix, value)]


def _plain(value: Any) -> str:
    """Return a setting as a configuration writes it, not as Python does."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
