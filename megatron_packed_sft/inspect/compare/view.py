"""A comparison as text: equal, or the first differences in their context, and what moved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from megatron_packed_sft.inspect.tokens_of_bin import visible
from megatron_packed_sft.support.terminal import table
from megatron_packed_sft.support.wording import plural

Facts = Mapping[str, Any]

_MOVES = {
    "in_same_bin": "in the same bin",
    "in_other_bin": "in another bin",
    "other_mask": "with another loss mask",
    "only_in_a": "only in A",
    "only_in_b": "only in B",
}
_STYLES = {"a": "red", "b": "green"}


def view(facts: Facts) -> Iterator[RenderableType]:
    """Yield what to show of the facts that `compare` returns."""
    sizes = f"{plural(_num_bins(facts), 'bin')}, {plural(facts['sequences']['num_a'], 'sequence')}"
    if facts["equal"]:
        tokens = plural(facts["a"]["num_tokens"], "token")
        yield Text.assemble(("equal", "bold green"), f": {sizes}, {tokens}")
        yield from (f"note: {note}" for note in facts["notes"])
        return
    yield Text.assemble(
        ("different", "bold red"), f": {plural(facts['num_differing_bins'], 'bin')} of {_num_bins(facts):,}"
    )
    for side in ("a", "b"):
        yield Text(f"{side.upper()}: {facts[side]['path']} ({facts[side]['storage']})", _STYLES[side])
    yield ""
    rows = [[name, one["num_bins_a"], one["num_bins_b"], one["num_differing"]] for name, one in facts["splits"].items()]
    yield table(["split", "bins of A", "bins of B", "differing"], rows)
    for one in facts["differences"]:
        yield ""
        yield from _difference(one)
    more = facts["num_differing_bins"] - len(facts["differences"])
    if more > 0:
        yield f"... and {plural(more, 'more differing bin')}"
    yield ""
    yield table(["sequences", ""], [[_MOVES[name], facts["sequences"][name]] for name in _MOVES])
    for name, some in facts["examples"].items():
        for one in some:
            yield from _example(name, one)
    yield from (f"note: {note}" for note in facts["notes"])


def _num_bins(facts: Facts) -> int:
    return sum(max(one["num_bins_a"], one["num_bins_b"]) for one in facts["splits"].values())


def _difference(one: Facts) -> Iterator[RenderableType]:
    yield Text(f"{one['split']}, bin {one['bin']:,}, position {one['position']:,}: {', '.join(one['fields'])}", "bold")
    for side in ("a", "b"):
        there = one[side]
        texts = there["texts"] or [f"{number} " for number in there["ids"]]
        line = Text(f"  {side.upper()}  sequence {there['sequence']}, ")
        mask = "" if there["loss_mask"] is None else f", loss mask {there['loss_mask']:g}"
        line.append("the bin ends here: " if there["id"] is None else f"id {there['id']}{mask}: ")
        line.append(_shown("".join(texts[: there["at"]])), "dim")
        line.append(_shown("".join(texts[there["at"] : there["at"] + 1])), f"bold reverse {_STYLES[side]}")
        line.append(_shown("".join(texts[there["at"] + 1 :])), "dim")
        yield line


def _example(name: str, one: Facts) -> Iterator[RenderableType]:
    where = f"{one['split']}, bin {one['bin']:,}, sequence {one['sequence']}"
    if "in_b" in one:
        other = one["in_b"]
        where += f" is in B {other['split']}, bin {other['bin']:,}, sequence {other['sequence']}"
    text = one["text"] if one["text"] is not None else " ".join(map(str, one["ids"]))
    yield Text.assemble(f"{_MOVES[name]}: {where} ({plural(one['num_tokens'], 'token')}): ", (_shown(text), "dim"))


def _shown(text: str) -> str:
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")
