"""Preview one record as `packed-sft prepare` will tokenize it: its sequences, its turns, and what is cut or lost.

a record ─▶ prepare's reader ─▶ prepare's encoder ─▶ ids and train mask ─▶ tokens with text
                                       └▶ the same without a length limit: what is cut

Ids and masks are those of `RecordEncoder.encode_records` with prepare's settings; nothing is computed in another way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from megatron_packed_sft.encode.encoder import EncodedRecords, RecordEncoder
from megatron_packed_sft.encode.masks.marker import ChatMarker
from megatron_packed_sft.encode.masks.trained_kinds import TurnKind
from megatron_packed_sft.encode.masks.turn_parts import TurnOutline
from megatron_packed_sft.encode.options import BY_TURNS
from megatron_packed_sft.encode.record_marker import RenderedSequence, shorter_by_turns
from megatron_packed_sft.encode.sequences import MarkedText
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer, load_tokenizer
from megatron_packed_sft.inspect.chosen_records import ChosenRecord
from megatron_packed_sft.inspect.tokens_of_bin import Token, TokenDecoder
from megatron_packed_sft.packing.items import make_items
from megatron_packed_sft.packing.options import PackOptions
from megatron_packed_sft.prepare.config import PrepareConfig
from megatron_packed_sft.prepare.encode_worker import ReadRecord, read_record
from megatron_packed_sft.prepare.plan_stage import check_packing
from megatron_packed_sft.prepare.sources import TRAIN
from megatron_packed_sft.records.record import Conversation, NotTakenError, Record, RecordError, TokenizedRecord
from megatron_packed_sft.records.schemas.registry import adapter
from megatron_packed_sft.support.drop_reasons import DropReason, Severity
from megatron_packed_sft.support.wording import without_url_secrets

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
        role: its role.
        start, end: its tokens; None if tokens and characters do not match one to one.
        before, after: what the template writes around its text.
        num_trained: number of its trained tokens.
        kinds: number of trained tokens of each kind, such as answer or tool call.
        weights: loss weights of its trained tokens.
        is_inside: it is inside the turn of another message.
        characters: its range in the rendered text.
        is_cut: a limit removed some of its tokens.
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


class Drop(NamedTuple):
    """Why a record or a sequence is dropped. Reason and detail are those of the rejects file."""

    reason: DropReason
    detail: str
    consequence: str


class Cut(NamedTuple):
    """Tokens that a limit removed."""

    limit: str  # the key and its value
    tokens: Sequence[Token]
    at_start: bool


@dataclass(frozen=True)
class SequencePreview:
    """One sequence of a record.

    Args:
        tokens: as prepare stores them.
        kinds: the kind of each token, such as answer or tool call; empty if it is unknown.
        turns: the messages with their tokens; empty for text and tokenized records.
        cuts: tokens that the template wrote and a limit removed.
        left_out: numbers of the messages that encode.truncation=turns removed.
        chunks: the parts that packing splits it into: (first token, one past the last, tokens already trained before).
        drop: why it is not packed.
        escaped: texts that look like control tokens but are plain text, with their messages.
        is_turn: it is one turn of a longer chat, with the turns before it.
        is_stored: prepare keeps it.
    """

    tokens: Sequence[Token]
    kinds: Sequence[int] = ()
    turns: Sequence[TurnTokens] = ()
    cuts: Sequence[Cut] = ()
    left_out: Sequence[int] = ()
    chunks: Sequence[tuple[int, int, int]] = ()
    drop: Drop | None = None
    escaped: Sequence[tuple[str, int | None]] = ()
    is_turn: bool = False
    is_stored: bool = True

    @property
    def num_trained(self) -> int:
        """Number of trained tokens; the first token of a sequence has no prediction."""
        return sum(token.is_trained for token in self.tokens[1:])


@dataclass(frozen=True)
class RecordPreview:
    """What prepare makes of a record.

    Args:
        path, number, noun: its file, its number, and whether that counts lines or records.
        source: the name of its source.
        kind: conversation, text or tokenized; empty if it cannot be read.
        split: the split that it goes to.
        num_copies: how often it is packed.
        sequences: its sequences.
        drops: why it, or some of its sequences, are dropped.
        lost: sentences about text that the template loses.
        shown_text: the record itself, if it cannot be encoded.
    """

    path: str
    number: int
    noun: str
    source: str
    kind: str = ""
    split: str = TRAIN
    num_copies: int = 1
    sequences: Sequence[SequencePreview] = ()
    drops: Sequence[Drop] = ()
    lost: Sequence[str] = ()
    shown_text: str = ""

    @property
    def where(self) -> str:
        """File and line, as in error messages."""
        return f"{self.path}, {self.noun} {self.number}"


@dataclass
class RecordPreviewer:
    """Previews records as `packed-sft prepare` with some settings would encode them.

    Args:
        config: the settings of `packed-sft prepare`.
    """

    config: PrepareConfig
    tokenizer: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        given = self.config.tokenizer
        self._packing = self.config.packing.options()
        check_packing(self._packing)
        # The fast path gives the same ids, and takes longer to load than a few records to encode.
        self.tokenizer = load_tokenizer(given.path, fast=False)
        options, template = self.config.encode, self.config.template
        self._encoder = RecordEncoder(self.tokenizer, template, options)
        self._by_kind = RecordEncoder(self.tokenizer, template, options, with_kinds=True)
        self._uncut = RecordEncoder(self.tokenizer, template, replace(options, max_len=None))
        self.decoder = TokenDecoder(self.tokenizer)

    @property
    def template_name(self) -> str:
        """The name of the template that turns chats into text."""
        return self.config.template.name or "the tokenizer's template"

    def preview(self, chosen: ChosenRecord) -> RecordPreview:
        """Return what prepare makes of a record."""
        source, raw = chosen
        where = raw.where
        found = RecordPreview(without_url_secrets(where.path), where.number, where.noun, source.name)
        read = read_record(raw, adapter(source.schema, source.mapping or None, source.take))
        if isinstance(read, RecordError):
            reason = DropReason.NOT_TAKEN if isinstance(read, NotTakenError) else DropReason.BAD_RECORD
            text = "" if isinstance(raw.value, RecordError) else repr(raw.value)
            detail = f"{read.field or 'the record'} {read.problem}"
            return replace(found, drops=[self._drop(reason, detail)], shown_text=text)
        rule = self.config.split
        split = source.split or rule.split_of(read.content)
        copies = rule.num_copies(read.content, source.weight) if split == TRAIN else 1
        found = replace(found, kind=_kind(read.record), split=split, num_copies=copies)
        if copies == 0:
            detail = f"sources.{source.name}.weight is {source.weight:g}, and this record is not in that share"
            found = replace(found, drops=[self._drop(DropReason.SAMPLED_OUT, detail)])
        return self._encoded(found, read)

    def _encoded(self, found: RecordPreview, read: ReadRecord) -> RecordPreview:
        encoded = self._encoder.encode_records([read.record])
        drops = [*found.drops, *(self._drop(one.reason, one.detail) for one in encoded.dropped)]
        sequences = self._sequences(read.record, encoded)
        drops += [one.drop for one in sequences if one.drop is not None]
        return replace(
            found,
            sequences=sequences,
            drops=drops,
            lost=[one.detail for one in encoded.lost],
            shown_text="" if sequences else repr(read.raw.value),
        )

    def _sequences(self, record: Record, encoded: EncodedRecords) -> list[SequencePreview]:
        """Return the sequences of a record; if a limit removes all of them, return them as they were before it."""
        uncut = self._uncut.encode_records([record])
        marked = self._render(record)
        by_kind = self._by_kind.encode_records([record]) if not isinstance(record, TokenizedRecord) else encoded
        found: list[SequencePreview] = []
        place = 0
        for number in range(len(encoded.sequences.lengths)):
            tokens = _tokens(encoded, number, self.decoder)
            kinds = _kinds(by_kind, encoded, number)
            whole = tokens
            while place < len(uncut.sequences.lengths):
                whole = _tokens(uncut, place, self.decoder)
                place += 1
                if self._is_cut_from(tokens, whole):
                    break
            rendered = marked[place - 1] if 0 < place <= len(marked) else None
            found.append(self._one(tokens, kinds, whole, rendered))
        if not found:
            found = [
                self._one(tokens, (), tokens, marked[number] if number < len(marked) else None)
                for number in range(len(uncut.sequences.lengths))
                for tokens in [_tokens(uncut, number, self.decoder)]
            ]
            return [replace(one, drop=None, chunks=(), is_stored=False) for one in found]
        return found

    def _is_cut_from(self, tokens: Sequence[Token], whole: Sequence[Token]) -> bool:
        if len(tokens) == len(whole):
            return _ids(tokens) == _ids(whole)
        options = self.config.encode
        if options.max_len is None or len(whole) <= options.max_len:
            return False
        if options.truncation == "left":
            return _ids(whole[-len(tokens) :]) == _ids(tokens)
        return options.truncation in BY_TURNS or _ids(whole[: len(tokens)]) == _ids(tokens)

    def _one(
        self, tokens: Sequence[Token], kinds: Sequence[int], whole: Sequence[Token], rendered: RenderedSequence | None
    ) -> SequencePreview:
        encode = self.config.encode
        is_turn = rendered is not None and rendered.is_turn
        cuts: list[Cut] = []
        kept_messages: Sequence[int] | None = None
        num_before = 0
        limit = f"encode.max_len={encode.max_len}"
        conversation = None if rendered is None else rendered.conversation
        is_cut = len(tokens) < len(whole)
        if is_cut and encode.truncation in BY_TURNS and rendered is not None and conversation is not None:
            rendered, kept_messages = self._shorter(conversation, tokens)
            whole = tokens
        elif is_cut and encode.truncation == "left":
            num_before = len(whole) - len(tokens)
            cuts.append(Cut(limit, whole[:num_before], at_start=True))
        elif is_cut:
            cuts.append(Cut(limit, whole[len(tokens) :], at_start=False))
        packed, drop, chunks, packing_cut = self._packed(tokens)
        cuts += packing_cut
        turns: list[TurnTokens] = []
        if rendered is not None and rendered.conversation is not None:
            kept = num_before, num_before + len(packed)
            turns = turn_tokens(self._encoder.marker(rendered.conversation), rendered, whole, kinds, kept)
        left_out: list[int] = []
        if kept_messages is not None and conversation is not None:
            turns = [one._replace(message=kept_messages[one.message]) for one in turns]
            left_out = [number for number in range(len(conversation.messages)) if number not in kept_messages]
        escaped = escaped_texts(rendered.marked, turns) if rendered is not None else []
        return SequencePreview(packed, kinds[: len(packed)], turns, cuts, left_out, chunks, drop, escaped, is_turn)

    def _shorter(
        self, conversation: Conversation, tokens: Sequence[Token]
    ) -> tuple[RenderedSequence | None, list[int] | None]:
        """Return the shorter conversation that a sequence was made of, and the numbers of its messages."""
        for shorter in shorter_by_turns(conversation, self.config.encode.truncation):
            encoded = self._uncut.encode_records([shorter])
            if len(encoded.sequences.lengths) == 1 and encoded.sequences.input_ids.tolist() == _ids(tokens):
                kept = {id(message) for message in shorter.messages}
                numbers = [number for number, one in enumerate(conversation.messages) if id(one) in kept]
                return self._uncut.render(shorter)[-1], numbers
        return None, None

    def _render(self, record: Record) -> list[RenderedSequence]:
        if isinstance(record, TokenizedRecord):
            return []
        try:
            return self._uncut.render(record)
        except RecordRefusedError:
            return []

    def _packed(
        self, tokens: Sequence[Token]
    ) -> tuple[Sequence[Token], Drop | None, list[tuple[int, int, int]], list[Cut]]:
        """Return what packing makes of a sequence: the tokens left, why it is dropped, its chunks, and what it cuts."""
        options, length = self._packing, len(tokens)
        reason = _packing_reason(length, options)
        if reason is not None:
            detail = f"{length} tokens, but at most {options.longest_item} fit into a bin"
            if reason is not DropReason.LONGER_THAN_PACK:
                most = "null" if options.max_len is None else options.max_len
                detail = f"{length} tokens, but packing.min_len is {options.min_len} and packing.max_len {most}"
            return tokens, self._drop(reason, detail), [], []
        if length <= options.longest_item:
            return tokens, None, [], []
        overflow, stride = options.overflow, options.stride
        items = make_items(
            [length], limit=options.longest_item, overflow=overflow, stride=stride, min_len=options.min_len
        )
        assert items.chunks is not None  # truncated or split
        if options.overflow == "truncate":
            kept = tokens[: options.longest_item]
            return kept, None, [], [Cut(f"packing.pack_size={options.pack_size}", tokens[len(kept) :], at_start=False)]
        starts, masked = items.chunks.start.tolist(), items.chunks.masked_prefix.tolist()
        ends = [start + size for start, size in zip(starts, items.lengths.tolist(), strict=True)]
        return tokens, None, list(zip(starts, ends, masked, strict=True)), []

    def _drop(self, reason: DropReason, detail: str) -> Drop:
        config = self.config
        consequence = "it is dropped and counted"
        if reason.severity is Severity.ERROR and not config.max_errors:
            consequence = "prepare stops here; set max_errors=100 to drop and count up to 100 such records"
        elif reason is DropReason.LONGER_THAN_PACK and config.packing.overflow == "error":
            consequence = "prepare stops here; choose another packing.overflow or a larger packing.pack_size"
        elif reason.severity is Severity.HARMLESS:
            consequence = "as the settings ask"
        return Drop(reason, detail, consequence)


def _packing_reason(length: int, options: PackOptions) -> DropReason | None:
    if length < options.min_len:
        return DropReason.BELOW_MIN_LEN
    if options.max_len is not None and length > options.max_len:
        return DropReason.ABOVE_MAX_LEN
    is_long = length > options.longest_item
    return DropReason.LONGER_THAN_PACK if is_long and options.overflow in ("drop", "error") else None


def _kind(record: Record) -> str:
    if isinstance(record, Conversation):
        return "conversation"
    return "tokenized" if isinstance(record, TokenizedRecord) else "text"


def _tokens(encoded: EncodedRecords, number: int, decoder: TokenDecoder) -> list[Token]:
    sequences = encoded.sequences
    own = slice(int(sequences.ends[number] - sequences.lengths[number]), int(sequences.ends[number]))
    weights = np.where(sequences.train[own] > 0, sequences.all_weights()[own], 0)
    return decoder.tokens(sequences.input_ids[own], weights, sequence=number)


def _kinds(by_kind: EncodedRecords, encoded: EncodedRecords, number: int) -> list[int]:
    """Return the kind of each token, if rendering with kinds gave the same sequences."""
    one, other = by_kind.sequences, encoded.sequences
    is_same = np.array_equal(one.input_ids, other.input_ids) and np.array_equal(one.train, other.train)
    if not is_same or one.kinds is None:
        return []
    own = slice(int(one.ends[number] - one.lengths[number]), int(one.ends[number]))
    kinds: list[Any] = one.kinds[own].tolist()
    return kinds


def _ids(tokens: Sequence[Token]) -> list[int]:
    return [token.id for token in tokens]


def turn_tokens(
    marker: ChatMarker,
    rendered: RenderedSequence,
    tokens: Sequence[Token],
    kinds: Sequence[int] = (),
    kept: tuple[int, int] | None = None,
) -> list[TurnTokens]:
    """Return the messages of a sequence with their tokens.

    Args:
        marker: what rendered the conversation.
        rendered: the rendered text and its conversation.
        tokens: of the whole text, before any cut.
        kinds: of the remaining tokens; may be empty.
        kept: the range of tokens that remains after a cut, by default all; positions count from its start.
    """
    if rendered.conversation is None:
        return []
    try:
        outline = marker.outline(rendered.conversation)
    except RecordRefusedError:
        return []
    if outline.chat.text != rendered.marked.text:
        return []
    starts = _character_starts(tokens, rendered.marked.text)
    low, high = kept or (0, len(tokens))
    found = []
    for turn in outline.turns:
        before, after = _edges(turn, rendered.marked, marker.ends)
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
    """Return the text of a turn before its first trained or written text, and from its end-of-turn token on."""
    text = marked.text
    before, after = turn.before(text), turn.after(text)
    trained = [start for start, end in marked.trained if turn.start <= start < turn.end]
    if trained and trained[0] - turn.start < len(before):
        before = text[turn.start : trained[0]]
    at = max((after.rfind(end) for end in ends if end), default=-1)
    return before, after[max(at, 0) :]


def escaped_texts(marked: MarkedText, turns: Sequence[TurnTokens]) -> list[tuple[str, int | None]]:
    """Return the texts that look like control tokens but are plain text, each with its message if it has one."""
    found = []
    for start, end in marked.literal:
        own = [turn.message for turn in turns if turn.characters[0] <= start < turn.characters[1]]
        found.append((marked.text[start:end], own[0] if own else None))
    return found


def _character_starts(tokens: Sequence[Token], text: str) -> list[int] | None:
    """Return where each token begins in a text, or None if the tokens do not spell the text.

    A control token may precede or follow the text, and some tokenizers add a blank before words.
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
