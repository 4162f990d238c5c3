"""The turns of a rendered chat in tokens: which tokens each message became, and which of them are trained."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_packed_sft.encode.masks.marker import ChatMarker
from megatron_packed_sft.encode.masks.turn_kinds import TurnKind
from megatron_packed_sft.encode.masks.turn_parts import TurnOutline
from megatron_packed_sft.encode.record_marker import MarkedRecord
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.encode.tokenizers.interface import MarkedText
from megatron_packed_sft.inspect.tokens_of_bin import Token

KIND_NAMES = {
    TurnKind.ANSWER: "answer",
    TurnKind.REASONING: "reasoning",
    TurnKind.TOOL_CALL: "tool call",
    TurnKind.END_OF_TURN: "end of turn",
    TurnKind.OTHER: "text",
}


class TurnTokens(NamedTuple):
    """One message of a sequence.

    Args:
        message: its number in the conversation.
        role: who speaks.
        start, end: its tokens; None if tokens and characters do not match one to one.
        before, after: what the template writes around its own text.
        num_trained: its trained tokens.
        kinds: what they are part of, and how many of each.
        weights: the loss weights that they have.
        is_inside: it stands inside the turn of another message.
        characters: where it is in the rendered text.
        is_cut: a limit left some of its tokens out.
    """

    message: int
    role: str
    start: int | None
    end: int | None
    before: str
    after: str
    num_trained: int = 0
    kinds: Mapping[str, int] = {}
    weights: Sequence[float] = ()
    is_inside: bool = False
    characters: tuple[int, int] = (0, 0)
    is_cut: bool = False


def turn_tokens(
    marker: ChatMarker,
    made_of: MarkedRecord,
    tokens: Sequence[Token],
    kinds: Sequence[int] = (),
    kept: tuple[int, int] | None = None,
) -> list[TurnTokens]:
    """Return the messages of a sequence.

    Args:
        marker: what rendered it.
        made_of: its text and its conversation.
        tokens: of the whole text, before any cut.
        kinds: of the tokens that are left; may be empty.
        kept: which tokens are left after a cut, all by default; turns count from the first of them.
    """
    if made_of.conversation is None:
        return []
    try:
        outline = marker.outline(made_of.conversation)
    except RecordRefusedError:
        return []
    if outline.chat.text != made_of.marked.text:
        return []
    starts = _character_starts(tokens, made_of.marked.text)
    low, high = kept or (0, len(tokens))
    found = []
    for turn in outline.turns:
        before, after = _edges(turn, made_of.marked, marker.ends)
        one = TurnTokens(turn.message, turn.role, None, None, before, after)
        one = one._replace(is_inside=turn.is_inside, characters=(turn.start, turn.end))
        if starts is not None:
            # A token that spans two turns belongs to the first.
            begin, end = (bisect_left(starts, at) for at in (turn.start, turn.end))
            first, last = (min(max(at, low), high) for at in (begin, end))
            trained = [number for number in range(max(first, low + 1), last) if tokens[number].is_trained]
            known = [kinds[number - low] for number in trained if number - low < len(kinds)]
            counts = Counter(KIND_NAMES[TurnKind(kind)] for kind in known)
            one = one._replace(
                start=first - low,
                end=last - low,
                num_trained=len(trained),
                is_cut=(begin, end) != (first, last),
                kinds=dict(counts),
                weights=sorted({round(tokens[number].weight, 4) for number in trained}),
            )
        found.append(one)
    return found


def _edges(turn: TurnOutline, marked: MarkedText, ends: Sequence[str]) -> tuple[str, str]:
    """Return what a turn begins with before anything is trained or said, and its end from the end of turn on."""
    text = marked.text
    before, after = turn.before(text), turn.after(text)
    trained = [start for start, end in marked.trained if turn.start <= start < turn.end]
    if trained and trained[0] - turn.start < len(before):
        before = text[turn.start : trained[0]]
    at = max((after.rfind(end) for end in ends if end), default=-1)
    return before, after[max(at, 0) :]


def escaped_texts(marked: MarkedText, turns: Sequence[TurnTokens]) -> list[tuple[str, int | None]]:
    """Return the texts that look like control tokens and are none, each with its message if there is one."""
    found = []
    for start, end in marked.literal:
        own = [turn.message for turn in turns if turn.characters[0] <= start < turn.characters[1]]
        found.append((marked.text[start:end], own[0] if own else None))
    return found


def _character_starts(tokens: Sequence[Token], text: str) -> list[int] | None:
    """Return where each token begins in a text; None if the tokens do not spell it.

    A control token may stand before or behind the text, and some tokenizers write a blank of their own before words.
    """
    starts, position = [], 0
    for token in tokens:
        starts.append(position)
        if text.startswith(token.text, position):
            position += len(token.text)
        elif token.text.startswith(" ") and text.startswith(token.text[1:], position):
            position += len(token.text) - 1
        elif not (token.is_control and position in (0, len(text))):
            return None
    return starts if position == len(text) else None
