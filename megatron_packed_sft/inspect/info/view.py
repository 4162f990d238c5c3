"""The facts about a path as text, tables and bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from megatron_packed_sft.support.terminal import drawable, table
from megatron_packed_sft.support.wording import byte_count

Facts = Mapping[str, Any]

_BAR_WIDTH = 40
_STYLES = {"trained": "green", "dropped": "yellow", "": "cyan"}
_PERCENTAGES = ("trained_share", "fullness", "padding_share", "data_share")
_LOSSES = ("loss", "first_loss")
_WORDS = {
    "max_seq_len": "longest sequence",
    "mean_seq_len": "tokens per sequence",
    "max_seqs_per_bin": "most sequences in a bin",
    "min_packed_len": "shortest bin",
    "pad_seq_to_mult": "sequences padded to a multiple of",
    "num_trained_tokens": "trained tokens",
    "sum_loss_weights": "sum of loss weights",
}


def view(facts: Facts) -> Iterator[RenderableType]:
    """Yield what to show of the facts that `describe` returns."""
    storage = f", storage {facts['storage']}" if facts.get("storage") else ""
    yield Text.assemble((facts["path"], "bold"), f": {facts['kind']}{storage}, {_size(facts)}")
    if facts.get("splits"):
        yield ""
        yield _splits(facts["splits"])
    else:
        yield ""
        yield table(["", ""], [(f"  {_word(name)}", _value(name, value)) for name, value in facts["total"].items()
                               if value is not None], left=1)  # fmt: skip
    for name, draw in _TABLES.items():
        if facts.get(name):
            yield ""
            yield draw(facts[name])
    drops = _drops(facts)
    if drops:
        yield ""
        yield table(["dropped", "records"], drops, styles=_STYLES)
    yield ""
    yield table(["", ""], list(_made_with(facts)), left=2)
    for note in facts.get("notes", ()):
        yield Text(f"note: {note}", "yellow")
    for split, found in facts.get("histograms", {}).items():
        for title, one in found.items():
            yield ""
            yield Text(title if split == "all" else f"{split}: {title}", "bold")
            yield _bars(one)
    if facts.get("how_to_use"):
        yield ""
        yield from facts["how_to_use"]


def _splits(splits: Facts) -> RenderableType:
    header = [
        "split",
        "shards",
        "bins",
        "sequences",
        "tokens",
        "trained",
        "pack size",
        "full",
        "sequences/bin",
        "longest",
    ]
    rows = [
        [
            name,
            *(_value(key, one.get(key)) for key in ("num_shards", "num_bins", "num_sequences", "num_tokens")),
            *(_value(key, one.get(key)) for key in ("trained_share", "pack_size", "fullness", "sequences_per_bin")),
            _value("max_seq_len", one.get("max_seq_len")),
        ]
        for name, one in splits.items()
    ]
    return table(header, rows, styles=_STYLES)


def _sources(sources: Facts) -> RenderableType:
    rows = [
        [
            name,
            _value("num_records", one["num_records"]),
            sum(one["dropped"].values()),
            one["num_sequences"],
            one["num_tokens"],
            _value("trained_share", one["trained_share"]),
            len(one["files"]),
        ]
        for name, one in sources.items()
    ]
    return table(["source", "records", "dropped", "sequences", "tokens", "trained", "files"], rows, styles=_STYLES)


def _drops(facts: Facts) -> list[tuple[str, int]]:
    found: dict[str, int] = dict(facts.get("accounting", {}).get("dropped_sequences", {}))
    for source in facts.get("sources", {}).values():
        for reason, count in source["dropped"].items():
            found[reason] = found.get(reason, 0) + count
    return sorted(found.items())


def _validations(found: Facts) -> RenderableType:
    rows = [[name, _value("step", one["step"]), *(_value(key, one[key]) for key in ("loss", "perplexity"))]
            for name, one in found.items()]  # fmt: skip
    return table(["validation", "step", "loss", "perplexity"], rows)


def _checkpoints(found: Sequence[Facts]) -> RenderableType:
    rows = [[one["name"], one["step"], byte_count(one["num_bytes"])] for one in found]
    return table(["checkpoint", "step", "on disk"], rows)


def _made_with(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield names and values of what identifies the thing and what it was made with."""
    tokenizer, template = facts.get("tokenizer"), facts.get("chat_template")
    if tokenizer:
        where = f", {facts['tokenizer_path']}" if facts.get("tokenizer_path") else ""
        yield "tokenizer", f"{_named(tokenizer)}{where}"
    elif "tokenizer" in facts:
        yield "tokenizer", "not recorded"
    if template:
        yield "chat template", _named(template)
    for name in ("model", "adapters", "pretrained"):
        if facts.get(name):
            yield (
                name,
                ", ".join(f"{key}={value}" for key, value in facts[name].items() if value not in (None, [], False)),
            )
    for name in ("dtype", "bin_checksum_algorithm", "sequence_checksum_algorithm", "strategy", "method", "format",
                 "fingerprint", "order_fingerprint", "plan_fingerprint", "data_fingerprint", "settings", "made_by",
                 "created_by"):  # fmt: skip
        if facts.get(name):
            yield name.replace("_", " "), str(facts[name])
    for split, one in facts.get("plan_fingerprints", {}).items():
        if one:
            yield f"plan of {split}", one


def _bars(one: Facts) -> RenderableType:
    """Draw a histogram: a line per step, its share as a bar."""
    edges, counts = one["edges"], one["counts"]
    total, largest = sum(counts) + one["num_beyond"], max(counts)
    block = drawable("█", "#")
    rows = []
    for number, count in enumerate(counts):
        low, high = edges[number], edges[number + 1]
        last = high - 1 if one["is_whole"] else high
        label = f"{low:,}" if low == last else f"{low:,} to {last:,}"
        width = max(1, round(_BAR_WIDTH * count / largest)) if count else 0
        rows.append([f"  {label}", count, f"{100 * count / max(total, 1):.1f} %", block * width])
    if one["num_beyond"]:
        rows.append(["  beyond", one["num_beyond"], f"{100 * one['num_beyond'] / total:.1f} %", ""])
    drawn = table(["  ", "count", "share", "."], rows, styles={".": "cyan"})
    drawn.show_header = False
    drawn.columns[-1].justify = "left"
    return drawn


def _size(facts: Facts) -> str:
    return f"{'about ' if facts.get('num_bytes_is_estimated') else ''}{byte_count(facts['num_bytes'])}"


def _named(one: Facts) -> str:
    name = f"{one['name']} " if one.get("name") else ""
    return f"{name}({one.get('fingerprint')})"


def _word(name: str) -> str:
    return _WORDS.get(name) or name.removeprefix("num_").replace("_", " ")


def _value(name: str, value: Any) -> str | int:
    if value is None:
        return "-"
    if name in _PERCENTAGES:
        return f"{100 * value:.2f} %" if name == "fullness" else f"{100 * value:.1f} %"
    if name in _LOSSES:
        return f"{value:.4f}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1 else f"{value:.3g}"
    return value if isinstance(value, int) and not isinstance(value, bool) else str(value)


_TABLES: dict[str, Callable[[Any], RenderableType]] = {
    "sources": _sources,
    "validation": _validations,
    "checkpoints": _checkpoints,
}
