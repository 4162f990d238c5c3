"""`packed-sft compare`: compare two pieces of packed data bin by bin and, if they differ, match their sequences."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect.compare_bins import (
    FIELDS,
    Moves,
    Pair,
    Place,
    Side,
    differs,
    find_moves,
    first_positions,
    in_step,
    open_side,
)
from megatron_packed_sft.inspect.opened_data import FoundTokenizer
from megatron_packed_sft.inspect.tokens_of_bin import TokenDecoder, escape_invisible, sequence_ends
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.support.progress import Progress
from megatron_packed_sft.support.terminal import table
from megatron_packed_sft.support.wording import plural

Facts = dict[str, Any]

_CONTEXT = 8  # tokens on each side of a difference
_SHOWN_TOKENS = 24  # of a sequence given as an example
_MOVES = {
    "in_same_bin": "in the same bin",
    "in_other_bin": "in another bin",
    "other_mask": "with another loss mask",
    "only_in_a": "only in A",
    "only_in_b": "only in B",
}
_STYLES = {"a": "red", "b": "green"}


def compare(
    path_a: str | os.PathLike[str],
    path_b: str | os.PathLike[str],
    *,
    split: str | None = None,
    max_differences: int = 10,
    tokenizer: str | None = None,
    progress: bool = False,
) -> Facts:
    """Return whether two pieces of packed data are equal, the first differences, and which sequences moved.

    They are equal if they have the same splits and the same bins in the same order, each with the same ids, masks or
    weights, and sequences. Storage, padding and dtype do not matter.

    Args:
        path_a, path_b: dataset directories, shards or files of any storage, or directories of them; or their URLs.
        split: compare only this split.
        max_differences: how many of each kind to describe; all are counted.
        tokenizer: the path of the tokenizer that decodes the differences, if it is not found.
        progress: show a bar.
    """
    if max_differences < 0:
        raise InvalidInputError(f"--max-differences is {max_differences}; it must be 0 or more")
    a, b = open_side(path_a, split), open_side(path_b, split)
    result = _Result(a, b, max_differences)
    with Progress("compare", None, "bin", quiet=not progress) as bar:
        for name in dict.fromkeys([*a.splits, *b.splits]):
            for pair in in_step(a.chunks(name), b.chunks(name)):
                result.add(name, pair)
                bar.update(max(len(pair.a), len(pair.b)))
        facts = result.facts()
        if not facts["equal"]:
            bar.begin("match sequences")
            moves = find_moves(a, b, max(result.num_sequences), max_differences)
            facts["sequences"] |= {name: value for name, value in asdict(moves).items() if name != "examples"}
            facts |= _described(result, moves, tokenizer)
    facts["notes"] = [*_notes(a, b), *facts.get("notes", ())]
    return facts


class _Result:
    """The result of comparing bin by bin."""

    def __init__(self, a: Side, b: Side, max_differences: int) -> None:
        self.a, self.b = a, b
        self._max_differences = max_differences
        self.splits: dict[str, dict[str, int]] = {}
        self.found: list[Facts] = []
        self.num_sequences = [0, 0]
        self._num_tokens = [0, 0]

    def add(self, split: str, pair: Pair) -> None:
        """Count a pair of chunks, and keep its first differences."""
        counts = self.splits.setdefault(split, {"num_bins_a": 0, "num_bins_b": 0, "num_differing": 0})
        for number, chunk in enumerate((pair.a, pair.b)):
            counts[f"num_bins_{'ab'[number]}"] += len(chunk)
            self.num_sequences[number] += len(chunk.starts)
            self._num_tokens[number] += len(chunk.ids)
        if len(pair.a) != len(pair.b):  # bins that one side lacks
            counts["num_differing"] += max(len(pair.a), len(pair.b))
            return
        positions = first_positions(pair.a, pair.b)
        is_different = differs(positions)
        bins = np.flatnonzero(is_different.any(axis=1))
        counts["num_differing"] += len(bins)
        for number in bins[: max(0, self._max_differences - len(self.found))].tolist():
            fields = [FIELDS[one] for one in np.flatnonzero(is_different[number]).tolist()]
            first = int(positions[number].argmin())
            self.found.append(
                {
                    "split": split,
                    "bin": pair.first_bin + number,
                    "fields": fields,
                    "field": FIELDS[first],
                    "position": int(positions[number, first]),
                }
            )

    def facts(self) -> Facts:
        num_differing = sum(one["num_differing"] for one in self.splits.values())
        missing = set(self.a.splits) ^ set(self.b.splits)
        sides = zip((self.a, self.b), self._num_tokens, strict=True)
        described = [{"path": side.path, "storage": side.storage, "num_tokens": tokens} for side, tokens in sides]
        return {
            "equal": not num_differing and not missing,
            "a": described[0],
            "b": described[1],
            "splits": self.splits,
            "num_differing_bins": num_differing,
            "sequences": {"num_a": self.num_sequences[0], "num_b": self.num_sequences[1]},
        }


def _described(result: _Result, moves: Moves, given: str | None) -> Facts:
    """Return the differences and the examples with their ids, and their text if the tokenizer is found."""
    found = [side.find_tokenizer(given) for side in (result.a, result.b)]
    decoders = [TokenDecoder(one.tokenizer) for one in found]
    differences = []
    for one in result.found:
        bins = [side.bin(one["split"], one["bin"]) for side in (result.a, result.b)]
        around = [
            _around(packed, one["position"], decoder, with_text=tokenizer.tokenizer is not None)
            for packed, decoder, tokenizer in zip(bins, decoders, found, strict=True)
        ]
        differences.append({**one, "a": around[0], "b": around[1]})
    examples: Facts = {}
    for name, some in moves.examples.items():
        number = 1 if name == "only_in_b" else 0
        side = (result.b, result.a)[number == 0]
        examples[name] = [_example(places, side, decoders[number], found[number]) for places in some]
    notes = list(dict.fromkeys(one.note for one in found if one.note))
    return {"differences": differences, "examples": examples, "notes": notes}


def _around(packed: PackedBin, position: int, decoder: TokenDecoder, *, with_text: bool) -> Facts:
    """Return the tokens around a position, within its sequence."""
    last = len(packed.input_ids) - 1
    sequence = int(np.searchsorted(packed.seq_start_id, min(position, last), side="right")) - 1
    start, end = int(packed.seq_start_id[sequence]), int(sequence_ends(packed)[sequence])
    low, high = max(start, position - _CONTEXT), min(end, position + _CONTEXT + 1)
    ids = packed.input_ids[low:high].tolist()
    is_inside = position <= last
    return {
        "sequence": sequence,
        "position_in_sequence": position - start,
        "id": int(packed.input_ids[position]) if is_inside else None,
        "loss_mask": float(packed.loss_mask[position]) if is_inside else None,
        "ids": ids,
        "at": min(position - low, len(ids)),
        "texts": decoder.texts(ids) if with_text else None,
    }


def _example(places: tuple[Place, ...], side: Side, decoder: TokenDecoder, found: FoundTokenizer) -> Facts:
    own, *others = places
    packed = side.bin(own.split, own.bin)
    start, end = int(packed.seq_start_id[own.sequence]), int(sequence_ends(packed)[own.sequence])
    ids = packed.input_ids[start : min(end, start + _SHOWN_TOKENS)].tolist()
    text = None if found.tokenizer is None else "".join(decoder.texts(ids))
    facts = {**own._asdict(), "num_tokens": end - start, "ids": ids, "text": text}
    return facts | ({"in_b": others[0]._asdict()} if others else {})


def _notes(a: Side, b: Side) -> list[str]:
    """Return what else differs or was not compared."""
    notes = []
    for side in (a, b):
        if side.num_cleared:
            notes.append(
                f"{side.path}: ignored {plural(side.num_cleared, 'loss mask')} at the last token of a sequence, which "
                "predicts nothing"
            )
    names = {"tokenizer": "tokenizers", "chat_template_fingerprint": "chat templates", "pack_size": "pack sizes"}
    for name, words in names.items():
        values = [side.recorded.get(name) for side in (a, b)]
        if None not in values and values[0] != values[1]:
            notes.append(f"the {words} differ: {_short(values[0])} and {_short(values[1])}")
    return notes


def _short(value: Any) -> str:
    return f"{value.get('name')} ({value.get('fingerprint')})" if isinstance(value, dict) else str(value)


def view(facts: Facts) -> Iterator[RenderableType]:
    """Yield what to print of the facts that `compare` returns."""
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
            yield from _example_line(name, one)
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


def _example_line(name: str, one: Facts) -> Iterator[RenderableType]:
    where = f"{one['split']}, bin {one['bin']:,}, sequence {one['sequence']}"
    if "in_b" in one:
        other = one["in_b"]
        where += f" is in B {other['split']}, bin {other['bin']:,}, sequence {other['sequence']}"
    text = one["text"] if one["text"] is not None else " ".join(map(str, one["ids"]))
    yield Text.assemble(f"{_MOVES[name]}: {where} ({plural(one['num_tokens'], 'token')}): ", (_shown(text), "dim"))


def _shown(text: str) -> str:
    return escape_invisible(text).replace("\n", "\\n").replace("\t", "\\t")
