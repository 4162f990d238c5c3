"""The totals and tables of a dataset's page.

To add a column, add a `Column` here: its title, how the page shows its cells (the formats of static/page.js), and its
value, taken from the facts about a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.inspect.info_of_data import source_facts
from megatron_packed_sft.inspect.opened_data import OpenedData
from megatron_packed_sft.inspect.report.charts import SEED, StepShape, balance, other_shapes
from megatron_packed_sft.inspect.report.read_bins import BinLengths, Int64
from megatron_packed_sft.inspect.tokens_of_bin import escape_invisible
from megatron_packed_sft.packing.items import REASONS
from megatron_packed_sft.packing.packer import balanced, pack
from megatron_packed_sft.packing.strategies.registry import known_strategies
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.support.drop_reasons import DropReason

Facts = dict[str, Any]

_MOST_REPACKED = 1_000_000  # sequences; more take minutes and change nothing
_MOST_EXAMPLES = 6
_RECORD_PLACE = re.compile(r"(?P<file>[^\0]+?\.jsonl), line (?P<line>\d+)\b")
_LAST_LINE = 1_000_000  # files are read from their beginning
_LONGEST_RECORD = 600
_SEVERITIES = {"error": "cannot be used", "announced": "sound data lost", "harmless": "asked for"}


class Column(NamedTuple):
    """A column of a table; `value` returns None for a cell without a value."""

    title: str
    format: str  # text, count, percent, percent2, decimal, times or bar
    value: Callable[[Mapping[str, Any]], Any]


SOURCES = (
    Column("source", "text", lambda one: one["name"]),
    Column("share of tokens", "bar", lambda one: one["share"]),
    Column("records", "count", lambda one: one["num_records"]),
    Column("dropped", "count", lambda one: sum(one["dropped"].values())),
    Column("sequences", "count", lambda one: one["num_sequences"]),
    Column("tokens", "count", lambda one: one["num_tokens"]),
    Column("trained", "percent", lambda one: one["trained_share"]),
    Column("weight", "text", lambda one: None if one["weight"] is None else f"{one['weight']:g}"),
    Column("schema", "text", lambda one: one["schema"]),
)
DROPS = (
    Column("reason", "text", lambda one: one["reason"]),
    Column("records", "count", lambda one: one["num_records"]),
    Column("tokens", "count", lambda one: one["num_tokens"]),
    Column("while", "text", lambda one: one["stage"]),
    Column("meaning", "text", lambda one: _SEVERITIES[one["severity"]]),
    Column("by source", "text", lambda one: ", ".join(f"{name} {n:,}" for name, n in one["sources"].items()) or None),
)
STRATEGIES = (
    Column("strategy", "text", lambda one: one["strategy"]),
    Column("bins", "count", lambda one: one.get("num_bins", one.get("error"))),
    Column("full", "percent2", lambda one: one.get("fullness")),
    Column("above the bound", "count", lambda one: one.get("above_bound")),
    Column("sequences per bin", "decimal", lambda one: one.get("mean_sequences")),
    Column("attention per bin", "percent", lambda one: one.get("mean_attention")),
)
BALANCE = (
    Column("order", "text", lambda one: one["order"]),
    Column("mean", "times", lambda one: one["mean"]),
    Column("worst step", "times", lambda one: one["worst"]),
)
OTHER_BALANCE = (
    Column("ranks", "count", lambda one: one["ranks"]),
    Column("bins per step", "count", lambda one: one["global_batch"]),
    *BALANCE[1:],
)


def table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> Facts:
    """Return a table as the page draws it.

    Example:
        >>> table([Column("source", "text", lambda one: one["name"])], [{"name": "web"}])
        {'columns': [{'title': 'source', 'format': 'text'}], 'rows': [['web']]}
    """
    return {
        "columns": [{"title": one.title, "format": one.format} for one in columns],
        "rows": [[one.value(row) for one in columns] for row in rows],
    }


def totals(figures: BinFigures, lengths: BinLengths) -> Facts:
    """Return the numbers of a split; None for those that are not recorded and would take reading every token."""
    tokens = lengths.bin_tokens
    capacity = lengths.num_bins * figures.pack_size
    num_tokens = int(tokens.sum())
    return {
        "num_bins": lengths.num_bins,
        "num_sequences": len(lengths.lengths),
        "num_tokens": num_tokens,
        "num_trained": figures.num_loss_tokens,
        "pack_size": figures.pack_size,
        "fullness": num_tokens / capacity,
        "num_padding": capacity - num_tokens,
        "mean_sequences": len(lengths.lengths) / lengths.num_bins,
        "most_sequences": int(lengths.sequences_per_bin.max()),
        "longest": int(lengths.lengths.max()),
        "shortest": int(lengths.lengths.min()),
        "median": float(np.median(lengths.lengths)),
        "emptiest_bin": int(tokens.argmin()),
        "emptiest": int(tokens.min()),
        "has_weights": figures.has_weights,
        "sum_weights": figures.sum_loss_weights,
    }


def balance_tables(costs: Int64, shape: StepShape) -> Facts:
    """Return the balance over ranks for three orders of the bins, and for other shapes of steps."""
    orders = {
        "stored order": costs,
        "shuffled": costs[np.random.default_rng(SEED).permutation(len(costs))],
        "packing.balance=attention": costs[balanced(costs, shape.global_batch, SEED)],
    }
    by_order = [
        {"order": name, **balance(one, shape)} for name, one in orders.items() if len(one) >= shape.global_batch
    ]
    others = [{**one._asdict(), **balance(costs, one)} for one in other_shapes(len(costs), shape)]
    return {"orders": table(BALANCE, by_order), "others": table(OTHER_BALANCE, others)}


def strategies(lengths: Int64, pack_size: int, max_seqs_per_bin: int | None = None) -> Facts:
    """Pack the same sequences by every strategy.

    They are shuffled first, because their stored order is that of a packing, which favours strategies that keep it.
    """
    order = np.random.default_rng(SEED).permutation(len(lengths))[:_MOST_REPACKED]
    chosen = lengths[order]
    rows: list[Facts] = []
    for name in known_strategies():
        try:
            plan = pack(chosen, pack_size=pack_size, strategy=name, max_seqs_per_bin=max_seqs_per_bin)
        except PackedSFTError as error:  # a broken plugin must not prevent the report
            rows.append({"strategy": name, "error": str(error)})
            continue
        stats = plan.stats()
        rows.append(
            {
                "strategy": name,
                "num_bins": stats.num_bins,
                "fullness": stats.utilization,
                "above_bound": stats.num_bins - stats.lower_bound,
                "mean_sequences": stats.mean_items_per_bin,
                "mean_attention": stats.mean_squared_lengths / pack_size**2,
            }
        )
    rows.sort(key=lambda one: (one.get("num_bins", 1 << 62), one["strategy"]))
    return {"num_sequences": len(chosen), "of": len(lengths), "rows": rows, "table": table(STRATEGIES, rows)}


def sources(data: OpenedData) -> list[Facts]:
    """Return the facts about each source, and its share of all tokens."""
    facts = source_facts(data.provenance)
    num_tokens = sum(one["num_tokens"] for one in facts.values()) or 1
    return [{"name": name, **one, "share": one["num_tokens"] / num_tokens} for name, one in facts.items()]


def drops(data: OpenedData) -> list[Facts]:
    """Return each reason for drops, with its records and tokens, by source, and examples where they are known."""
    examples = {} if data.prepared_from is None else data.prepared_from.drop_examples()
    records: dict[str, dict[str, int]] = {}
    for name, source in source_facts(data.provenance).items():
        for reason, count in source["dropped"].items():
            records.setdefault(reason, {})[name] = count
    tokens: dict[str, int] = {}
    for split in data.provenance.get("splits", {}).values():
        for reason, count in split.get("accounting", {}).get("dropped_tokens", {}).items():
            tokens[reason] = tokens.get(reason, 0) + count
    by_plan = {str(reason) for reason in REASONS}
    return [
        {
            "reason": reason,
            "severity": _severity(reason),
            "num_records": sum(records.get(reason, {}).values()),
            "num_tokens": tokens.get(reason),
            "sources": records.get(reason, {}),
            "stage": "packing" if reason in by_plan else "encoding",
            "examples": [
                {"where": one, "record": record_text(one)} for one in examples.get(reason, [])[:_MOST_EXAMPLES]
            ],
        }
        for reason in sorted({*records, *tokens})
    ]


def record_text(where: str) -> str | None:
    r"""Return the beginning of the record that a message such as `chats.jsonl, line 3: ...` names.

    It returns None for files that are gone, and for all but plain JSONL files.

    Example:
        >>> import pathlib, tempfile; path = pathlib.Path(tempfile.mkdtemp()) / "chats.jsonl"
        >>> _ = path.write_text('{"a": 1}\n{"b": 2}\n')
        >>> record_text(f"{path}, line 2: it has no messages")
        '{"b": 2}'
    """
    found = _RECORD_PLACE.match(where)
    if found is None or int(found["line"]) > _LAST_LINE:
        return None
    try:
        with open(found["file"], "rb") as file:
            line = next(islice(file, int(found["line"]) - 1, None), b"")
    except OSError:
        return None
    text = line.decode("utf-8", errors="replace").strip()
    return escape_invisible(text if len(text) <= _LONGEST_RECORD else f"{text[:_LONGEST_RECORD]} ...") or None


def _severity(name: str) -> str:
    return next((reason.severity.value for reason in DropReason if reason == name), "announced")
