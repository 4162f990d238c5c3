"""Rows to sequences of ids with a train mask: the whole of `encode` behind one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.encode.masks.marker import ChatMarker
from megatron_packed_sft.encode.masks.turns import joined
from megatron_packed_sft.encode.options import EncodeOptions
from megatron_packed_sft.encode.sequences import Bools, Sequences, in_record_order
from megatron_packed_sft.encode.templates.load import ChatTemplate, load_template
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.encode.tokenizers.control_tokens import control_pattern
from megatron_packed_sft.encode.tokenizers.interface import MarkedText, Tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import Conversation, Record, TextRecord, TokenizedRecord

# Reasons of `on_empty`: the row is sound, but there is nothing in it to learn.
_NOTHING_LEFT = frozenset({"empty", "nothing_to_train", "answer_cut_away"})


class Dropped(NamedTuple):
    """A row that gave no sequence: its number, a reason to count by, and a sentence."""

    row: int
    reason: str
    detail: str


class EncodedRecords(NamedTuple):
    """What some rows became.

    Args:
        input_ids: int32, flat.
        train: uint8, flat: 1 where the model should learn to produce the token.
        lengths: int64, one per sequence, at least one.
        row: int64: the row each sequence came from, ascending.
        dropped: the rows that gave none, in their order.
        num_cut_rows: sequences that were cut to `max_len`.
        num_cut_tokens: tokens cut off sequences, those of rows that were dropped for it too.
        num_cut_trained_tokens: those of them that were to be trained.
        num_straddling: tokens that hold both trained and untrained characters, before any cut.
    """

    input_ids: npt.NDArray[np.int32]
    train: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]
    dropped: list[Dropped]
    num_cut_rows: int
    num_cut_tokens: int
    num_cut_trained_tokens: int
    num_straddling: int


class RecordEncoder:
    """Encodes rows with one tokenizer, template and set of options.

    Pickled by its arguments, so a worker process builds its own. The same row gives the same sequence whatever rows
    come with it or before it.

    Args:
        tokenizer: to encode with.
        template: a `ChatTemplate`, what `load_template` takes, or None for the tokenizer's own. It is read with the
            first conversation, so text rows need none.
        options: see `EncodeOptions`.

    Example:
        >>> encoder = RecordEncoder(load_tokenizer("qwen2_5"), None, EncodeOptions(max_len=4096))  # doctest: +SKIP
        >>> encoded = encoder.encode_records(rows)  # doctest: +SKIP
        >>> encoded.lengths, encoded.dropped  # doctest: +SKIP
        (array([131, 88]), [Dropped(row=1, reason='nothing_to_train', detail='...')])
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | str | None = None,
        options: EncodeOptions | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.options = options or EncodeOptions()
        for name, token in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)):
            if getattr(self.options, f"add_{name}") and token is None:
                raise InvalidInputError(f"add_{name} is set, but tokenizer {tokenizer.name} has no {name} token")
        self._marker: ChatMarker | None = None
        escapes_text = self.options.special_tokens_in_text == "escape"
        # Some tokenizers list whitespace, which nobody means to escape.
        escaped = [token for token in tokenizer.control_tokens if escapes_text and token.strip()]
        self._escaped_in_text = control_pattern(escaped)

    def __reduce__(self) -> Any:
        """Pickle the arguments only: a compiled template is quicker to make than to move."""
        return type(self), (self.tokenizer, self.template, self.options)

    @property
    def marker(self) -> ChatMarker:
        """What renders conversations; its template is compiled on first use."""
        if self._marker is None:
            template = self.template
            if not isinstance(template, ChatTemplate):
                template = load_template(template, self.tokenizer)
            self._marker = ChatMarker(self.tokenizer, template, self.options)
        return self._marker

    def mark(self, row: Conversation | TextRecord) -> MarkedText:
        """Return a record's text as it is tokenized, with its trained characters; RecordRefusedError if it is empty."""
        marked = self.marker.mark(row) if isinstance(row, Conversation) else self._mark_text(row)
        if not marked.text:
            raise RecordRefusedError("empty", "the row has no text")
        if not marked.text.isascii():
            try:
                marked.text.encode()
            except UnicodeEncodeError as error:
                raise RecordRefusedError("invalid_text", f"character {error.start} is half a surrogate pair") from None
        return marked

    def encode_records(self, rows: Sequence[Record]) -> EncodedRecords:
        """Encode rows; those that give no sequence are in `dropped` with their reasons."""
        dropped: list[Dropped] = []
        texts: list[MarkedText] = []
        text_rows: list[int] = []
        ready: list[TokenizedRecord] = []
        ready_rows: list[int] = []
        for number, row in enumerate(rows):
            try:
                if isinstance(row, TokenizedRecord):
                    ready.append(self._checked(row))
                    ready_rows.append(number)
                else:
                    texts.append(self.mark(row))
                    text_rows.append(number)
            except RecordRefusedError as refusal:
                dropped.append(Dropped(number, refusal.reason, refusal.detail))
        encoded = self.tokenizer.encode_many(texts)
        tokenized = Sequences(encoded.input_ids, encoded.train, encoded.lengths, np.array(text_rows, np.int64))
        tokenized = self._with_ends(
            tokenized, np.array([isinstance(rows[number], TextRecord) for number in text_rows], bool)
        )
        sequences = in_record_order([tokenized, _flat(ready, ready_rows)])
        return self._finish(sequences, dropped, encoded.num_straddling)

    def _mark_text(self, row: TextRecord) -> MarkedText:
        text = "".join(piece for piece, _ in row.pieces)
        trained, position = [], 0
        for piece, is_trained in row.pieces:
            if is_trained:
                trained.append((position, position + len(piece)))
            position += len(piece)
        literal = joined(match.span() for match in self._escaped_in_text.finditer(text))
        return MarkedText(text, joined(trained), literal)

    def _checked(self, row: TokenizedRecord) -> TokenizedRecord:
        if len(row.input_ids) != len(row.train):
            raise RecordRefusedError("invalid_ids", f"{len(row.input_ids)} input_ids but {len(row.train)} train values")
        if len(row.input_ids) == 0:
            raise RecordRefusedError("empty", "the row has no tokens")
        low, high = int(min(row.input_ids)), int(max(row.input_ids))
        if low < 0 or high >= self.tokenizer.vocab_size:
            wrong = low if low < 0 else high
            raise RecordRefusedError("invalid_ids", f"id {wrong} is not in 0..{self.tokenizer.vocab_size - 1}")
        return row

    def _with_ends(self, sequences: Sequences, is_text: Bools) -> Sequences:
        options, tokenizer = self.options, self.tokenizer
        if options.add_bos and tokenizer.bos_id is not None:
            sequences = sequences.with_bos(np.ones(len(is_text), bool), tokenizer.bos_id)
        if options.add_eos is not False and tokenizer.eos_id is not None:
            wanted = np.ones(len(is_text), bool) if options.add_eos else is_text
            if wanted.any():
                sequences = sequences.with_eos(wanted, tokenizer.eos_id)
        return sequences

    def _finish(self, sequences: Sequences, dropped: list[Dropped], num_straddling: int) -> EncodedRecords:
        """Cut, drop what has nothing left to train, and count all of it."""
        targets = sequences.num_trained()
        kept = sequences
        max_len, truncation = self.options.max_len, self.options.truncation
        is_long = sequences.lengths > (max_len if max_len is not None else np.iinfo(np.int64).max)
        if max_len is not None and truncation != "drop" and is_long.any():
            kept = sequences.cut(max_len, truncation)
        left = kept.num_trained()
        is_kept = (left > 0) & ~(is_long if truncation == "drop" else np.zeros_like(is_long))
        for number in np.flatnonzero(~is_kept):
            length, row = int(sequences.lengths[number]), int(sequences.row[number])
            if is_long[number] and truncation == "drop":
                reason, detail = "too_long", f"{length} tokens, max_len is {max_len}"
            elif targets[number] > 0:
                reason = "answer_cut_away"
                detail = f"max_len {max_len} of {length} tokens leaves none of the {targets[number]} trained ones"
            elif length == 0:
                reason, detail = "empty", "the row has no tokens"
            else:
                reason, detail = "nothing_to_train", f"none of its {length} tokens is trained"
            dropped.append(Dropped(row, reason, detail))
        dropped.sort()
        if self.options.on_empty == "error":
            for row, reason, detail in dropped:
                if reason in _NOTHING_LEFT:
                    raise InvalidInputError(f"row {row}: {reason}: {detail}; correct it, or set on_empty='drop'")
        final = kept.only(is_kept)
        return EncodedRecords(
            *final,
            dropped=dropped,
            num_cut_rows=int((kept.lengths < sequences.lengths)[is_kept].sum()),
            num_cut_tokens=int((sequences.lengths - kept.lengths).sum()),
            num_cut_trained_tokens=int((targets - left).sum()),
            num_straddling=num_straddling,
        )


def _flat(ready: Sequence[TokenizedRecord], rows: Sequence[int]) -> Sequences:
    return Sequences(
        np.concatenate([np.asarray(row.input_ids, np.int32) for row in ready] or [np.empty(0, np.int32)]),
        np.concatenate([np.asarray(row.train) != 0 for row in ready] or [np.empty(0, bool)]).astype(np.uint8),
        np.array([len(row.input_ids) for row in ready], np.int64),
        np.array(rows, np.int64),
    )
