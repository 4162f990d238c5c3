"""`RecordEncoder` turns records into sequences of ids with a train mask."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from megatron_packed_sft.encode.masks.marker import ChatMarker
from megatron_packed_sft.encode.options import BY_TURNS, EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.record_marker import RecordMarker, RenderedSequence, shorter_by_turns
from megatron_packed_sft.encode.sequences import Bools, MarkedText, Sequences, in_record_order
from megatron_packed_sft.encode.templates.environment import restart_timer, time_limited
from megatron_packed_sft.encode.templates.load import ChatTemplate
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import Conversation, Record, TextRecord, TokenizedRecord
from megatron_packed_sft.support.drop_reasons import DropReason


class Dropped(NamedTuple):
    """A record that gave no sequence: its position in the batch, the reason, and a sentence about it."""

    record: int
    reason: DropReason
    detail: str


class Lost(NamedTuple):
    """Text that the template omitted: the record's position in the batch, the kind of text, and a sentence."""

    record: int
    kind: str
    detail: str


class EncodedRecords(NamedTuple):
    """The sequences of a batch of records, and what was dropped and cut.

    Args:
        sequences: in the order of their records, none empty.
        dropped: the records that gave no sequence, in order.
        num_cut_sequences: sequences that were cut to `max_len`.
        num_cut_tokens: tokens that were cut off, including those of records that were dropped because of it.
        num_cut_trained_tokens: the trained ones among them.
        lost: what the template omitted from records that were encoded nevertheless.
        num_added_sequences: sequences beyond the first of their record, with `render` turns or auto.
        num_cut_turns: trained turns that `truncation=turns` removed.
        num_turns: trained turns of the sequences.
    """

    sequences: Sequences
    dropped: list[Dropped]
    num_cut_sequences: int
    num_cut_tokens: int
    num_cut_trained_tokens: int
    lost: Sequence[Lost] = ()
    num_added_sequences: int = 0
    num_cut_turns: int = 0
    num_turns: int = 0


class _Item(NamedTuple):
    """The source of one sequence: the record's position in the batch, and what is encoded."""

    record: int
    source: Any  # RenderedSequence or TokenizedRecord
    is_text: bool = False

    @property
    def num_turns(self) -> int:
        """The number of its trained turns."""
        return self.source.num_turns if isinstance(self.source, RenderedSequence) else 1


class RecordEncoder:
    """Encode records with one tokenizer, template and set of options.

    A record gives the same sequences in any batch. The encoder is pickled by its arguments, and each
    worker process builds its own.

    Args:
        tokenizer: the tokenizer to encode with.
        template: a `ChatTemplate`, `TemplateOptions`, what `load_template` takes, or None for the tokenizer's own. It
            is loaded with the first conversation; text records need none.
        options: what is trained, and how long a sequence may be.
        with_kinds: also return what every trained token is part of (`Sequences.kinds`), for audits.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | TemplateOptions | str | None = None,
        options: EncodeOptions | None = None,
        *,
        with_kinds: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.options = options or EncodeOptions()
        for name, token in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)):
            if getattr(self.options, f"add_{name}") and token is None:
                raise InvalidInputError(
                    f"encode.add_{name} is true, but tokenizer {tokenizer.name} has no {name} token; set it to false"
                )
        self._with_kinds = with_kinds
        self._records = RecordMarker(tokenizer, template, self.options, with_kinds=with_kinds)

    def __reduce__(self) -> Any:
        """Pickle the arguments only: a compiled template is faster to rebuild than to send."""
        return partial(type(self), with_kinds=self._with_kinds), (self.tokenizer, self.template, self.options)

    def marker(self, conversation: Conversation | None = None) -> ChatMarker:
        """Return the marker that a conversation gets; its template is compiled on first use."""
        return self._records.marker(conversation)

    def mark(self, record: Conversation | TextRecord) -> MarkedText:
        """Return the text of a record with its trained characters; raise RecordRefusedError if there is none.

        With `render=turns`, this is the text of the last turn.
        """
        return self._records.mark(record)[-1].marked

    def render(self, record: Conversation | TextRecord) -> list[RenderedSequence]:
        """Return the text of each sequence of a record, before any cut; raise RecordRefusedError if there is none."""
        return self._records.mark(record)

    def encode_records(self, records: Sequence[Record]) -> EncodedRecords:
        """Encode a batch of records; those that give no sequence are in `dropped`, with their reasons."""
        dropped: list[Dropped] = []
        items: list[_Item] = []
        lost: list[Lost] = []
        with time_limited():
            for number, record in enumerate(records):
                restart_timer()
                try:
                    if isinstance(record, TokenizedRecord):
                        items.append(_Item(number, self._check_ids(record)))
                        continue
                    marked = self._records.mark(record)
                    items += [_Item(number, one, isinstance(record, TextRecord)) for one in marked]
                    for one in marked:
                        lost += [Lost(number, loss.kind, loss.sentence("the template")) for loss in one.losses]
                except RecordRefusedError as refusal:
                    dropped.append(Dropped(number, refusal.reason, refusal.detail))
        result = self._finish(self._encode(items), items, dropped)
        num_records = len({item.record for item in items})
        return result._replace(lost=lost, num_added_sequences=len(items) - num_records)

    def _encode(self, items: Sequence[_Item]) -> Sequences:
        """Return the sequences of some items, before any cut; `record` numbers the items."""
        numbers = [number for number, item in enumerate(items) if isinstance(item.source, RenderedSequence)]
        texts = [item.source.marked for item in items if isinstance(item.source, RenderedSequence)]
        tokenized = [(n, item.source) for n, item in enumerate(items) if isinstance(item.source, TokenizedRecord)]
        encoded = self.tokenizer.encode_many(texts)._replace(record=np.array(numbers, np.int64))
        is_text = np.array([items[number].is_text for number in numbers], bool)
        batches = [self._with_ends(encoded, is_text), _flatten(tokenized)]
        sequences = in_record_order(batches)._replace(num_straddling=encoded.num_straddling)
        if sequences.weights is not None and np.array_equal(sequences.weights, sequences.train):
            return sequences._replace(weights=None)  # kinds were asked for, not weights
        return sequences

    def _check_ids(self, record: TokenizedRecord) -> TokenizedRecord:
        if len(record.input_ids) != len(record.train):
            raise RecordRefusedError(
                DropReason.INVALID_IDS, f"{len(record.input_ids)} input_ids, but {len(record.train)} train values"
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

    def _finish(self, sequences: Sequences, items: Sequence[_Item], dropped: list[Dropped]) -> EncodedRecords:
        """Cut long sequences, drop those with nothing left to train, and count both."""
        num_trained = sequences.num_trained()
        max_len, truncation = self.options.max_len, self.options.truncation
        is_long = sequences.lengths > (max_len if max_len is not None else np.iinfo(np.int64).max)
        kept, num_cut_turns = sequences, 0
        if max_len is not None and is_long.any():
            if truncation in BY_TURNS:
                kept, num_cut_turns = self._cut_at_turns(sequences, items, max_len)
            elif truncation != "drop":
                kept = sequences.cut(max_len, truncation)
        left = kept.num_trained()
        fits = np.ones_like(is_long) if max_len is None else kept.lengths <= max_len
        is_kept = (left > 0) & fits
        record = np.array([item.record for item in items], np.int64)
        for number in np.flatnonzero(~is_kept):
            length = int(sequences.lengths[number])
            reason, detail = _why_dropped(length, int(num_trained[number]), max_len, too_long=not fits[number])
            dropped.append(Dropped(int(record[number]), reason, detail))
        return EncodedRecords(
            kept._replace(record=record).only(is_kept),
            dropped=sorted(dropped),
            num_cut_sequences=int((kept.lengths < sequences.lengths)[is_kept].sum()),
            num_cut_tokens=int((sequences.lengths - kept.lengths).sum()),
            num_cut_trained_tokens=int((num_trained - left).sum()),
            num_cut_turns=num_cut_turns,
            num_turns=sum(items[number].num_turns for number in np.flatnonzero(is_kept).tolist()) - num_cut_turns,
        )

    def _cut_at_turns(self, sequences: Sequences, items: Sequence[_Item], max_len: int) -> tuple[Sequences, int]:
        """Remove whole turns from long chats; return the sequences, and the number of trained turns removed.

        A chat stays too long if not even one turn fits. Texts have no turns; they are cut on the right.
        """
        batches, num_cut = [sequences.only(sequences.lengths <= max_len)], 0
        for number in np.flatnonzero(sequences.lengths > max_len).tolist():
            source = items[number].source
            one = sequences.take(np.array([number]))
            if not isinstance(source, RenderedSequence) or source.conversation is None:
                batches.append(one.cut(max_len, "right"))
                continue
            found = self._longest_that_fits(source, max_len)
            if found is not None:
                one = found[1]._replace(record=np.array([number]))
                num_cut += source.num_turns - found[0].num_turns
            batches.append(one)
        return in_record_order(batches)._replace(num_straddling=sequences.num_straddling), num_cut

    def _longest_that_fits(self, source: RenderedSequence, max_len: int) -> tuple[RenderedSequence, Sequences] | None:
        assert source.conversation is not None
        shorter = list(shorter_by_turns(source.conversation, self.options.truncation))
        best = None
        low, high = 0, len(shorter)  # fewer turns are fewer tokens, so a binary search works
        while low < high:
            middle = (low + high) // 2
            try:
                marked = self._records.mark_chat(shorter[middle], is_turn=source.is_turn)
            except RecordRefusedError:  # nothing left to train, or the template needs what was removed
                marked = None
            one = None if marked is None else self._encode([_Item(0, marked)])
            if marked is not None and one is not None and one.lengths[0] <= max_len and one.num_trained()[0] > 0:
                best, high = (marked, one), middle
            else:
                low = middle + 1
        return best


def _why_dropped(length: int, num_trained: int, max_len: int | None, *, too_long: bool) -> tuple[DropReason, str]:
    if too_long:
        return DropReason.TOO_LONG, f"{length} tokens, but encode.max_len is {max_len}"
    if num_trained > 0:
        detail = f"cutting its {length} tokens to encode.max_len={max_len} removes all {num_trained} trained ones"
        return DropReason.ANSWER_CUT_AWAY, detail
    if length == 0:
        return DropReason.EMPTY, "the record has no tokens"
    return DropReason.NOTHING_TO_TRAIN, f"none of its {length} tokens is trained"


def _flatten(records: Sequence[tuple[int, TokenizedRecord]]) -> Sequences:
    train = np.concatenate([np.asarray(record.train, np.float32) for _, record in records] or [np.empty(0, np.float32)])
    is_trained = train > 0
    return Sequences(
        np.concatenate([np.asarray(record.input_ids, np.int32) for _, record in records] or [np.empty(0, np.int32)]),
        is_trained.view(np.uint8),
        np.array([len(record.input_ids) for _, record in records], np.int64),
        np.array([number for number, _ in records], np.int64),
        weights=None if np.array_equal(train, is_trained) else train,
    )
