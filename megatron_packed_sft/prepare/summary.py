"""A preparation's report as text: the summary on the terminal, and the dataset card."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.encode.masks.lost_text import REASONING
from megatron_packed_sft.packing.items import REASONS
from megatron_packed_sft.prepare.audit import audit_parts
from megatron_packed_sft.prepare.how_to_use import how_to_use
from megatron_packed_sft.prepare.report import PrepareReport, added_up
from megatron_packed_sft.support.terminal import as_text, table
from megatron_packed_sft.support.wording import byte_count, plural

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_STYLES = {"trained": "green", "dropped": "yellow"}


def summary(report: PrepareReport) -> list[RenderableType]:
    """Return what was done, what became of every record, and how to use the result: texts and tables to show."""
    total = report.total
    lines: list[RenderableType] = [f"{stage:<8} {what}" for stage, what in report.stages]
    lines += ["", _accounting(report), "", _source_table(report), "", _split_table(report)]
    if report.looked_at < 1:
        share = f"{100 * report.looked_at:.1f} %"
        lines += [
            "",
            f"These are counts over {share} of the input; multiply by {1 / report.looked_at:.1f} for all of it.",
        ]
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
    rows += [(f"dropped: {reason}", count, "") for reason, count in sorted(total.dropped.items())]
    rows.append(("encoded", total.num_sequences, sum(plan.num_tokens for plan in plans)))
    if overlap := sum(plan.num_overlap_tokens for plan in plans):
        rows.append(("repeated by packing.stride", "", overlap))
    by_plan = added_up(source.dropped_by_plan for source in report.sources.values())
    tokens = report.dropped_tokens
    rows += [
        (f"dropped: {why}", by_plan.get(why, 0), tokens.get(why, 0)) for why in REASONS if why in {**by_plan, **tokens}
    ]
    rows.append(("packed", report.num_packed, sum(plan.num_tokens_packed for plan in plans)))
    return table(["", "records", "tokens"], rows)


def _source_table(report: PrepareReport) -> Table:
    """What was read of each source, and what of it is in the bins."""
    rows = []
    for name, source in report.sources.items():
        packed = source.in_bins
        share = _percent(packed.num_trained_tokens, packed.num_tokens)
        num_dropped = sum(source.dropped.values())
        rows.append([name, source.counts.num_rows, num_dropped, packed.num_sequences, packed.num_tokens, share])
    return table(["source", "records", "dropped", "sequences", "tokens", "trained"], rows, styles=_STYLES)


def _split_table(report: PrepareReport) -> Table:
    """What is in the bins of each split."""
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
        notes.append(f"dropped as {reason}, such as: {shown[0]}")
    for kind, count in sorted(total.lost.items()):
        words = kind.replace("_", " ")
        remedy = "encode.render=turns keeps it" if kind == REASONING else "encode.on_lost"
        notes.append(f"the template left {words} out {count:,} times, such as: {total.lost_examples[kind]} ({remedy})")
    if total.num_cut_rows:
        cut = [plural(total.num_cut_rows, "record"), plural(total.num_cut_tokens, "token")]
        cut += [plural(total.num_cut_turns, "trained turn")] if total.num_cut_turns else []
        notes.append(f"cut at encode.max_len: {', '.join(cut)}")
    if total.num_straddling:
        tokens = plural(total.num_straddling, "token")
        notes.append(
            f"{tokens} with trained and untrained characters, such as a header's blank: trained (docs/masks.md)"
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
