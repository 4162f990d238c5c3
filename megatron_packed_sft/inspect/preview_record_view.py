"""Show the preview of a record, for people and as JSON: its text, its turns, and what is cut, lost or dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.encode.masks.trained_kinds import TurnKind
from megatron_packed_sft.inspect.painting import LABEL, NOTE, TRAINED, Painter, quoted, times, visible
from megatron_packed_sft.inspect.preview_records import (
    KIND_NAMES,
    Cut,
    RecordPreview,
    RecordPreviewer,
    SequencePreview,
    TurnTokens,
)
from megatron_packed_sft.inspect.tokens_of_bin import Token
from megatron_packed_sft.support.terminal import table
from megatron_packed_sft.support.wording import plural

if TYPE_CHECKING:
    from rich.console import RenderableType

_NARROW = 100  # columns; on narrower terminals, tables omit what the text shows as well
_LONGEST_RECORD = 600
_MOST_ESCAPED = 12  # different texts in the list; the text itself marks all of them


def record_view(
    preview: RecordPreview, previewer: RecordPreviewer, painter: Painter, *, width: int, ids: bool = False
) -> Iterator[RenderableType]:
    """Yield what to print about a record.

    Args:
        preview: the record.
        previewer: what made the preview.
        painter: for the text.
        width: columns of the terminal.
        ids: print one token per line, with its id.
    """
    from rich.text import Text

    yield Text.assemble((visible(preview.where, breaks=False), "bold"), f"  {_summary(preview)}")
    made_with = f"tokenizer {previewer.tokenizer.name}, {_template_words(preview, previewer)}"
    yield Text(visible(made_with, breaks=False), style="dim")
    for drop in preview.drops:
        detail = visible(drop.detail, breaks=False)
        yield Text.assemble((f"dropped, {drop.reason}: ", NOTE), f"{detail} ({drop.consequence})")
    for number, one in enumerate(preview.sequences):
        yield Text("")
        if len(preview.sequences) > 1:
            whole = ", one turn of the chat" if one.is_turn else ""
            yield Text(f"sequence {number}: {_tokens_words(one)}{whole}", LABEL)
        yield from _sequence_view(one, painter, width=width, ids=ids)
        yield from _notes(one, previewer)
    for sentence in preview.lost:
        yield Text.assemble(
            ("lost: ", NOTE),
            f"{visible(sentence, breaks=False)}; encode.on_lost decides what prepare does",
        )
    if preview.shown_text:
        yield Text(f"the record: {quoted(preview.shown_text, longest=_LONGEST_RECORD)}", style="dim")
    if preview.sequences and not ids:
        yield Text("")
        yield painter.legend()


def record_json(preview: RecordPreview, previewer: RecordPreviewer) -> dict[str, Any]:
    """Return a preview as plain values."""
    return {
        "file": preview.path,
        "line": preview.number,
        "source": preview.source,
        "kind": preview.kind,
        "split": preview.split,
        "copies": preview.num_copies,
        "tokenizer": {"name": previewer.tokenizer.name, "fingerprint": previewer.tokenizer.fingerprint},
        "dropped": [
            {"reason": str(one.reason), "severity": one.reason.severity.value, "detail": one.detail}
            for one in preview.drops
        ],
        "lost": list(preview.lost),
        "sequences": [_sequence_json(one) for one in preview.sequences],
    }


def tokens_json(tokens: Sequence[Token], kinds: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Return tokens as plain values."""
    found = [
        {
            "position": token.position,
            "id": token.id,
            "text": token.text,
            "trained": token.is_trained,
            "weight": round(token.weight, 6),
            "control": token.is_control,
        }
        for token in tokens
    ]
    for one, token, kind in zip(found, tokens, kinds, strict=False):
        if token.is_trained:
            one["kind"] = KIND_NAMES[TurnKind(kind)]
    return found


def tokens_table(tokens: Sequence[Token], painter: Painter, kinds: Sequence[int] = ()) -> RenderableType:
    """Return one line per token: position, id, weight, kind and text."""
    from rich.text import Text

    shown = Text()
    width = len(str(max((token.id for token in tokens), default=0)))
    for token in tokens:
        kind = KIND_NAMES[TurnKind(kinds[token.position])] if kinds and token.is_trained else ""
        mark = times(token.weight) if token.weight not in (0, 1) else "●" if token.is_trained else ""
        shown.append(f"{token.position:>6}  {token.id:>{width}}  {mark:<5} {kind:<11}  ")
        shown.append(f"{painter.token(token)}", style=painter.style_of(token))
        shown.append("\n" if token is not tokens[-1] else "")
    return shown


def _sequence_view(one: SequencePreview, painter: Painter, *, width: int, ids: bool) -> Iterator[RenderableType]:
    from rich.text import Text

    for cut in one.cuts:
        if cut.at_start:
            yield painter.cut(cut.tokens)
    yield tokens_table(one.tokens, painter, one.kinds) if ids else painter.text(one.tokens)
    for cut in one.cuts:
        if not cut.at_start:
            yield painter.cut(cut.tokens)
    if one.turns:
        yield Text("")
        yield _turns_table(one.turns, wide=width >= _NARROW)


def _turns_table(turns: Sequence[TurnTokens], *, wide: bool) -> RenderableType:
    header = ["turn", "role", "tokens", "trained", "of which"]
    lines = []
    for turn in turns:
        where = "?" if turn.start is None or turn.end is None else f"{turn.start}-{turn.end - 1}"
        if turn.start is not None and turn.start == turn.end:
            where = "cut" if turn.is_cut else "none"
        parts = [f"{name} {count:,}" for name, count in turn.kinds.items()]
        parts += [f"weight {weight:g}" for weight in turn.weights if weight != 1]
        parts += ["inside another turn"] if turn.is_inside else []
        parts += ["cut"] if turn.is_cut and where != "cut" else []
        cells = [
            str(turn.message),
            quoted(turn.role, longest=20),
            where,
            "?" if turn.start is None else f"{turn.num_trained:,}",
            ", ".join(parts),
        ]
        if wide:
            cells += [quoted(turn.before, longest=44), quoted(turn.after, longest=28)]
        lines.append(cells)
    if wide:
        header += ["begins with", "ends with"]
    return table(header, lines, styles={"trained": TRAINED}, left=len(header))


def _notes(one: SequencePreview, previewer: RecordPreviewer) -> Iterator[RenderableType]:
    from rich.text import Text

    for cut in one.cuts:
        yield Text.assemble(("cut: ", NOTE), _cut_words(cut, previewer))
    if one.left_out:
        numbers = ", ".join(map(str, one.left_out))
        encode = previewer.config.encode
        limit = f"encode.max_len={encode.max_len} encode.truncation={encode.truncation}"
        yield Text.assemble(("cut: ", NOTE), f"messages {numbers}, by {limit}")
    for start, end, masked in one.chunks:
        again = f", the first {masked} of them not trained again" if masked else ""
        yield Text(f"chunk: tokens {start}-{end - 1}{again}, by packing.overflow=split")
    for (text, message), count in Counter(one.escaped).most_common(_MOST_ESCAPED):
        where = "" if message is None else f" in message {message}"
        where += f", {count:,} times," if count > 1 else ""
        key = "text" if not one.turns else "content"
        yield Text.assemble(
            ("escaped: ", NOTE),
            f"{quoted(text)}{where} is text, not the control token (encode.special_tokens_in_{key}=escape)",
        )


def _cut_words(cut: Cut, previewer: RecordPreviewer) -> str:
    trained = sum(token.is_trained for token in cut.tokens)
    side = "the start" if cut.at_start else "the end"
    return f"{plural(len(cut.tokens), 'token')} ({trained:,} trained) at {side}, by {cut.limit}"


def _summary(preview: RecordPreview) -> str:
    words = [preview.kind] if preview.kind else []
    if preview.split != "train":
        words.append(f"split {preview.split}")
    if preview.num_copies > 1:
        words.append(f"packed {preview.num_copies} times")
    if len(preview.sequences) == 1:
        words.append(_tokens_words(preview.sequences[0]))
    elif preview.sequences:
        words.append(plural(len(preview.sequences), "sequence"))
    return ", ".join(words)


def _tokens_words(one: SequencePreview) -> str:
    share = one.num_trained / max(1, len(one.tokens))
    return f"{plural(len(one.tokens), 'token')}, {one.num_trained:,} trained ({share:.1%})"


def _template_words(preview: RecordPreview, previewer: RecordPreviewer) -> str:
    if preview.kind in ("text", "tokenized"):
        return "no template"
    return f"template: {previewer.template_name}"


def _sequence_json(one: SequencePreview) -> dict[str, Any]:
    return {
        "tokens": tokens_json(one.tokens, one.kinds),
        "turns": [
            {
                "message": turn.message,
                "role": turn.role,
                "start": turn.start,
                "end": turn.end,
                "begins_with": turn.before,
                "ends_with": turn.after,
                "num_trained": turn.num_trained,
                "kinds": dict(turn.kinds),
                "weights": list(turn.weights),
                "is_inside": turn.is_inside,
                "is_cut": turn.is_cut,
            }
            for turn in one.turns
        ],
        "cut": [
            {
                "limit": cut.limit,
                "at": "start" if cut.at_start else "end",
                "num_tokens": len(cut.tokens),
                "num_trained": sum(token.is_trained for token in cut.tokens),
                "text": "".join(token.text for token in cut.tokens),
            }
            for cut in one.cuts
        ],
        "left_out_messages": list(one.left_out),
        "chunks": [{"start": start, "end": end, "masked_prefix": masked} for start, end, masked in one.chunks],
        "stored": one.is_stored,
        "dropped": None if one.drop is None else str(one.drop.reason),
        "escaped": [{"text": text, "message": message} for text, message in one.escaped],
    }
