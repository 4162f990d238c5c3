"""`RecordEncoder`: records to sequences of ids with a train mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_packed_sft.encode.masks.marker import ChatMarker, MarkedChat
from megatron_packed_sft.encode.masks.turn_parts import joined
from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.sequences import Bools, Sequences, in_record_order
from megatron_packed_sft.encode.templates.load import ChatTemplate, load_template
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.encode.tokenizers.control_tokens import control_pattern
from megatron_packed_sft.encode.tokenizers.interface import MarkedText, Tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import Conversation, Record, TextRecord, TokenizedRecord
from megatron_packed_sft.support.drop_reasons import NOTHING_LEFT, DropReason


class Dropped(NamedTuple):
    """A record that gave no sequence: its position in the batch, the reason, and a sentence about it."""

    record: int
    reason: DropReason
    detail: str


class Lost(NamedTuple):
    """Text that the template left out: the record's position in the batch, the kind of text, and a sentence."""

    record: int
    kind: str
    detail: str


class EncodedRecords(NamedTuple):
    """What a batch of records became.

    Args:
        sequences: in the order of their records, none empty.
        dropped: the records that gave no sequence, in order.
        num_cut_sequences: sequences that were cut to `max_len`.
        num_cut_tokens: tokens cut off, including those of records that were dropped because of it.
        num_cut_trained_tokens: the trained ones among them.
        lost: what the template left out of records that were encoded all the same.
    """

    sequences: Sequences
    dropped: list[Dropped]
    num_cut_sequences: int
    num_cut_tokens: int
    num_cut_trained_tokens: int
    lost: Sequence[Lost] = ()


class RecordEncoder:
    """Encode records with one tokenizer, template and set of options.

    A record gives the same sequence whatever else is in its batch. The encoder is pickled by its arguments, and each
    worker process builds its own.

    Args:
        tokenizer: the tokenizer to encode with.
        template: a `ChatTemplate`, `TemplateOptions`, what `load_template` takes, or None for the tokenizer's own. It
            is loaded with the first conversation; text records need none.
        options: what is trained, and how long a sequence may be.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | TemplateOptions | str | None = None,
        options: EncodeOptions | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.options = options or EncodeOptions()
        for name, token in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)):
            if getattr(self.options, f"add_{name}") and token is None:
                raise InvalidInputError(
                    f"encode.add_{name} is true, but tokenizer {tokenizer.name} has no {name} token; set it to false"
                )
        self._loaded: tuple[ChatTemplate, TemplateOptions] | None = None
        self._markers: dict[bool, ChatMarker] = {}
        escapes_text = self.options.special_tokens_in_text == "escape"
        # Some tokenizers have control tokens of white space only; escaping those would be pointless.
        escaped = [token for token in tokenizer.control_tokens if escapes_text and token.strip()]
        self._escaped_in_text = control_pattern(escaped)

    def __reduce__(self) -> Any:
        """Pickle the arguments only: a compiled template is faster to rebuild than to send."""
        return type(self), (self.tokenizer, self.template, self.options)

    def marker(self, *, with_tools: bool = False) -> ChatMarker:
        """Return the renderer of conversations; its template is compiled on first use."""
        if self._loaded is None:
            given = self.template
            options = given if isinstance(given, TemplateOptions) else TemplateOptions()
            name = given.name if isinstance(given, TemplateOptions) else given
            loaded = name if isinstance(name, ChatTemplate) else load_template(name, self.tokenizer)
            self._loaded = loaded, options
        template, options = self._loaded
        with_tools = with_tools and template.tool_source is not None
        if with_tools not in self._markers:
            if with_tools:
                template = ChatTemplate(f"{template.name} (tool_use)", template.tool_source or "")
            self._markers[with_tools] = ChatMarker(self.tokenizer, template, self.options, options)
        return self._markers[with_tools]

    def mark(self, record: Conversation | TextRecord) -> MarkedText:
        """Return a record's text as it is tokenized, with its trained characters; raise RecordRefusedError if empty."""
        return self._mark(record).marked

    def _mark(self, record: Conversation | TextRecord) -> MarkedChat:
        if isinstance(record, Conversation):
            chat = self.marker(with_tools=record.tools is not None).mark(record)
        else:
            chat = MarkedChat(self._mark_text(record))
        text = chat.marked.text
        if not text:
            raise RecordRefusedError(DropReason.EMPTY, "the record has no text")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RecordRefusedError(
                    DropReason.INVALID_TEXT, f"character {error.start} is half a surrogate pair"
                ) from None
        return chat

    def encode_records(self, records: Sequence[Record]) -> EncodedRecords:
        """Encode a batch of records; those that give no sequence are in `dropped`, with their reasons."""
        dropped: list[Dropped] = []
        texts: list[MarkedText] = []
        text_numbers: list[int] = []
        tokenized: list[TokenizedRecord] = []
        tokenized_numbers: list[int] = []
        lost: list[Lost] = []
        for number, record in enumerate(records):
            try:
                if isinstance(record, TokenizedRecord):
                    tokenized.append(self._checked(record))
                    tokenized_numbers.append(number)
                else:
                    chat = self._mark(record)
                    texts.append(chat.marked)
                    text_numbers.append(number)
                    lost += [Lost(number, loss.kind, loss.sentence("the template")) for loss in chat.losses]
            except RecordRefusedError as refusal:
                dropped.append(Dropped(number, refusal.reason, refusal.detail))
        encoded = self.tokenizer.encode_many(texts)._replace(record=np.array(text_numbers, np.int64))
        is_text = np.array([isinstance(records[number], TextRecord) for number in text_numbers], bool)
        batches = [self._with_ends(encoded, is_text), _flat(tokenized, tokenized_numbers)]
        sequences = in_record_order(batches)._replace(num_straddling=encoded.num_straddling)
        result = self._finish(sequences, dropped)._replace(lost=lost)
        if self.options.on_empty == "error":
            _refuse_nothing_left(result.dropped)
        return result

    def _mark_text(self, record: TextRecord) -> MarkedText:
        text = "".join(part for part, _ in record.parts)
        trained, position = [], 0
        for part, is_trained in record.parts:
            if is_trained:
                trained.append((position, position + len(part)))
            position += len(part)
        literal = joined(match.span() for match in self._escaped_in_text.finditer(text))
        return MarkedText(text, joined(trained), literal)

    def _checked(self, record: TokenizedRecord) -> TokenizedRecord:
        if len(record.input_ids) != len(record.train):
            raise RecordRefusedError(
                DropReason.INVALID_IDS, f"{len(record.input_ids)} input_ids but {len(record.train)} train values"
            )
        if len(record.input_ids) == 0:
            raise RecordRefusedError(DropReason.EMPTY, "the record has no tokens")
        low, high = int(min(record.input_ids)), int(max(record.input_ids))
        if low < 0 or high >= self.tokenizer.vocab_size:
            wrong = low if low < 0 else high
            raise RecordRefusedError(DropReason.INVALID_IDS, f"id {wrong} is not in 0..{self.tokenizer.vocab_size - 1}")
        return record

    def _with_ends(self, sequences: Sequences, is_text: Bools) -> Sequences:
        options, tokenizer = self.options, self.tokenizer
        if options.add_bos and tokenizer.bos_id is not None:
            sequences = sequences.with_bos(np.ones(len(is_text), bool), tokenizer.bos_id)
        if options.add_eos is not False and tokenizer.eos_id is not None:
            wanted = np.ones(len(is_text), bool) if options.add_eos else is_text
            if wanted.any():
                sequences = sequences.with_eos(wanted, tokenizer.eos_id)
        return sequences

    def _finish(self, sequences: Sequences, dropped: list[Dropped]) -> EncodedRecords:
        """Cut long sequences, drop those with nothing left to train, and count both."""
        num_trained = sequences.num_trained()
        kept = sequences
        max_len, truncation = self.options.max_len, self.options.truncation
        is_long = sequences.lengths > (max_len if max_len is not None else np.iinfo(np.int64).max)
        if max_len is not None and truncation != "drop" and is_long.any():
            kept = sequences.cut(max_len, truncation)
        left = kept.num_trained()
        is_kept = (left > 0) & ~(is_long if truncation == "drop" else np.zeros_like(is_long))
        for number in np.flatnonzero(~is_kept):
            too_long = bool(is_long[number]) and truncation == "drop"
            length = int(sequences.lengths[number])
            reason, detail = _why_dropped(length, int(num_trained[number]), max_len, too_long=too_long)
            dropped.append(Dropped(int(sequences.record[number]), reason, detail))
        return EncodedRecords(
            kept.only(is_kept),
            dropped=sorted(dropped),
            num_cut_sequences=int((kept.lengths < sequences.lengths)[is_kept].sum()),
            num_cut_tokens=int((sequences.lengths - kept.lengths).sum()),
            num_cut_trained_tokens=int((num_trained - left).sum()),
        )


def _why_dropped(length: int, num_trained: int, max_len: int | None, *, too_long: bool) -> tuple[DropReason, str]:
    if too_long:
        return DropReason.TOO_LONG, f"{length} tokens, but encode.max_len is {max_len}"
    if num_trained > 0:
        detail = f"encode.max_len {max_len} of {length} tokens leaves none of the {num_trained} trained ones"
        return DropReason.ANSWER_CUT_AWAY, detail
    if length == 0:
        return DropReason.EMPTY, "the record has no tokens"
    return DropReason.NOTHING_TO_TRAIN, f"none of its {length} tokens is trained"


def _refuse_nothing_left(dropped: Sequence[Dropped]) -> None:
    for number, reason, detail in dropped:
        if reason in NOTHING_LEFT:
            raise InvalidInputError(f"record {number}: {reason}: {detail}; fix it, or set encode.on_empty to drop")


def _flat(records: Sequence[TokenizedRecord], numbers: Sequence[int]) -> Sequences:
    return Sequences(
        np.concatenate([np.asarray(record.input_ids, np.int32) for record in records] or [np.empty(0, np.int32)]),
        np.concatenate([np.asarray(record.train) != 0 for record in records] or [np.empty(0, bool)]).astype(np.uint8),
        np.array([len(record.input_ids) for record in records], np.int64),
        np.array(numbers, np.int64),
    )
