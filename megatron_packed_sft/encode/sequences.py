"""Marked texts, and the sequences that tokenizers make of them: flat arrays, from the encoder to the token store.

input_ids   5 6 7 8 9      lengths  2 3
train       0 1 0 1 1      record   0 4      the second sequence came from record 4
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError

Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


class Segment(NamedTuple):
    """Trained characters of one weight and kind.

    Args:
        start, end: a half-open range of characters.
        weight: how much the loss of its tokens counts, above 0.
        kind: what it is part of, a `TurnKind`; audits count it.
    """

    start: int
    end: int
    weight: float = 1.0
    kind: int = 0


class MarkedText(NamedTuple):
    """A rendered text and which of its characters are trained.

    Args:
        text: what is tokenized; no token is added at either end.
        trained: half-open character ranges, ascending, not touching or overlapping.
        literal: half-open character ranges, ascending, in which no control token may begin or end: text of a message
            that only looks like one.
        segments: the trained ranges cut at every change of weight or kind, ascending; empty if all have weight 1 and
            kinds were not requested.
    """

    text: str
    trained: Sequence[tuple[int, int]] = ()
    literal: Sequence[tuple[int, int]] = ()
    segments: Sequence[Segment] = ()

    def composed(self) -> MarkedText | None:
        r"""Return the text with composed characters (NFC), or None if that would compose across the edge of a range.

        Example:
            >>> MarkedText("e\u0301 e\u0301", [(2, 5)]).composed()
            MarkedText(text='é é', trained=[(1, 3)], literal=[], segments=[])
        """
        ranges = [*self.trained, *self.literal, *(segment[:2] for segment in self.segments)]
        edges = sorted({0, len(self.text), *(edge for both in ranges for edge in both)})
        parts = [unicodedata.normalize("NFC", self.text[start:end]) for start, end in pairwise(edges)]
        text = "".join(parts)
        if text != unicodedata.normalize("NFC", self.text):
            return None
        at = dict(zip(edges, accumulate(map(len, parts), initial=0), strict=True))
        return MarkedText(
            text,
            [(at[start], at[end]) for start, end in self.trained],
            [(at[start], at[end]) for start, end in self.literal],
            [segment._replace(start=at[segment.start], end=at[segment.end]) for segment in self.segments],
        )


class Sequences(NamedTuple):
    """Flat ids and train mask of some sequences.

    Args:
        input_ids: int32, flat.
        train: uint8, flat: 1 where the model should learn to produce the token.
        lengths: int64, one per sequence; a tokenizer may return empty ones.
        record: int64: the position of each sequence's text or record in its batch.
        num_straddling: tokens with both trained and untrained characters, which are trained; counted before any cut.
        weights: float32, flat: how much the loss of each trained token counts, 0 elsewhere; None if all count 1.
        kinds: uint8, flat: the kind of each trained token; None unless requested.
    """

    input_ids: npt.NDArray[np.int32]
    train: npt.NDArray[np.uint8]
    lengths: Integers
    record: Integers
    num_straddling: int = 0
    weights: npt.NDArray[np.float32] | None = None
    kinds: npt.NDArray[np.uint8] | None = None

    @property
    def ends(self) -> Integers:
        """The end of each sequence, one past its last token."""
        return np.cumsum(self.lengths)

    def num_trained(self) -> Integers:
        """Count each sequence's trained tokens; the first token of a sequence is never predicted."""
        sums = np.concatenate(([0], np.cumsum(self.train, dtype=np.int64)))
        ends = self.ends
        starts = np.minimum(ends - self.lengths + 1, ends)
        return np.asarray(sums[ends] - sums[starts], np.int64)

    def all_weights(self) -> npt.NDArray[np.float32]:
        """Return the weight of every token; 0 and 1 if the sequences carry no weights."""
        return self.train.astype(np.float32) if self.weights is None else self.weights

    def all_kinds(self) -> npt.NDArray[np.uint8]:
        """Return the kind of every token, 0 unless they were requested."""
        return np.zeros(len(self.train), np.uint8) if self.kinds is None else self.kinds

    def with_bos(self, wanted: Bools, bos_id: int) -> Sequences:
        """Insert a token before the wanted sequences that do not start with it."""
        starts = self.ends - self.lengths
        missing = self._lacking(wanted, bos_id, starts)
        return self._insert(missing, starts[missing], bos_id, None)

    def with_eos(self, wanted: Bools, eos_id: int) -> Sequences:
        """Append a token to the wanted sequences that do not end with it; it is trained if the token before it is."""
        missing = self._lacking(wanted, eos_id, self.ends - 1)
        ends = self.ends[missing]
        return self._insert(missing, ends, eos_id, ends - 1)

    def cut(self, max_len: int, side: str) -> Sequences:
        """Cut all sequences to a length, on the right or on the left."""
        position = np.arange(len(self.input_ids)) - np.repeat(self.ends - self.lengths, self.lengths)
        if side == "left":
            position = np.repeat(self.lengths, self.lengths) - 1 - position
        kept = position < max_len
        return self._tokens_at(kept)._replace(lengths=np.minimum(self.lengths, max_len))

    def only(self, kept: Bools) -> Sequences:
        """Return only the sequences to keep."""
        if kept.all():
            return self
        tokens = np.repeat(kept, self.lengths)
        return self._tokens_at(tokens)._replace(lengths=self.lengths[kept], record=self.record[kept])

    def take(self, chosen: Integers) -> Sequences:
        """Return the chosen sequences in the given order; one may be chosen more than once.

        Example:
            >>> two = Sequences(*(np.array(values) for values in ([5, 6, 7], [0, 1, 1], [2, 1], [0, 1])))
            >>> two.take(np.array([1, 0, 1])).input_ids.tolist()
            [7, 5, 6, 7]
        """
        lengths = self.lengths[chosen]
        # One flat index: each sequence's start, repeated, plus a count that restarts with each sequence.
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        index = np.repeat((self.ends - self.lengths)[chosen], lengths) + within
        return self._tokens_at(index)._replace(lengths=lengths, record=self.record[chosen])

    def _tokens_at(self, index: Bools | Integers) -> Sequences:
        return self._replace(
            input_ids=self.input_ids[index],
            train=self.train[index],
            weights=None if self.weights is None else self.weights[index],
            kinds=None if self.kinds is None else self.kinds[index],
        )

    def _lacking(self, wanted: Bools, token: int, at: Integers) -> Bools:
        lacking = wanted & (self.lengths > 0)
        lacking[lacking] = self.input_ids[at[lacking]] != token
        return lacking

    def _insert(self, chosen: Bools, at: Integers, token: int, like: Integers | None) -> Sequences:
        """Insert a token; it is trained as the tokens at `like` are, or not at all."""

        def inserted(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.insert(values, at, 0 if like is None else values[like])

        return self._replace(
            input_ids=np.insert(self.input_ids, at, token),
            train=inserted(self.train),
            lengths=self.lengths + chosen,
            weights=None if self.weights is None else inserted(self.weights),
            kinds=None if self.kinds is None else inserted(self.kinds),
        )


def in_record_order(batches: Sequence[Sequences]) -> Sequences:
    """Merge batches into one, in the order of their records.

    Example:
        >>> one = Sequences(*(np.array(values) for values in ([5, 6], [0, 1], [2], [1])))
        >>> two = Sequences(*(np.array(values) for values in ([7], [1], [1], [0])))
        >>> in_record_order([one, two]).input_ids.tolist()
        [7, 5, 6]
    """
    filled = [batch for batch in batches if len(batch.record)] or list(batches[:1])
    if len(filled) == 1:
        return filled[0]
    has_weights = any(batch.weights is not None for batch in filled)
    has_kinds = any(batch.kinds is not None for batch in filled)
    merged = Sequences(
        np.concatenate([batch.input_ids for batch in filled]),
        np.concatenate([batch.train for batch in filled]),
        np.concatenate([batch.lengths for batch in filled]),
        np.concatenate([batch.record for batch in filled]),
        sum(batch.num_straddling for batch in filled),
        np.concatenate([batch.all_weights() for batch in filled]) if has_weights else None,
        np.concatenate([batch.all_kinds() for batch in filled]) if has_kinds else None,
    )
    return merged.take(np.argsort(merged.record, kind="stable"))  # a record may have several sequences


# Where tokens are in their text, and therefore which of them are trained.
#
# A position is a character or a UTF-8 byte, whichever is cheaper for the tokenizer. The texts of a batch are placed end
# to end, so that one pass marks them all:
#
#     text        u s e r : h i | b o t : h o          trained: (4, 6) of the second text
#     tokens      [user] [:] [hi] [bot] [:] [ho]
#     train         0     0   0     0    0   1


def utf8_lengths(texts: Sequence[MarkedText]) -> list[int]:
    """Return the length of each text in UTF-8; raise an error if one cannot be encoded.

    Example:
        >>> utf8_lengths([MarkedText("abc"), MarkedText("né")])
        [3, 3]
    """
    lengths = []
    for index, (text, *_) in enumerate(texts):
        if text.isascii():
            lengths.append(len(text))
            continue
        try:
            lengths.append(len(text.encode()))
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"text {index} of the batch holds half a surrogate pair at character {error.start}; fix the "
                "record, for instance with text.encode('utf-16', 'surrogatepass').decode('utf-16')"
            ) from None
    return lengths


class TrainedRanges(NamedTuple):
    """Where all trained ranges of a batch begin and end, with its texts placed end to end."""

    begins: Integers
    ends: Integers
    segments: tuple[Integers, npt.NDArray[np.float32], npt.NDArray[np.uint8]] | None = None  # ends, weights, kinds


def trained_ranges(texts: Sequence[MarkedText], lengths: Sequence[int], *, in_bytes: bool) -> TrainedRanges:
    """Return where the trained ranges of a batch are.

    Args:
        texts: the batch.
        lengths: of each text, in characters or bytes.
        in_bytes: whether positions are bytes.

    Example:
        >>> ranges = trained_ranges([MarkedText("né"), MarkedText("éa", [(1, 2)])], [3, 3], in_bytes=True)
        >>> ranges.begins.tolist(), ranges.ends.tolist()
        ([5], [6])
    """
    begins: list[int] = []
    ends: list[int] = []
    base = 0
    for index, ((text, trained, *_), length) in enumerate(zip(texts, lengths, strict=True)):
        if trained:
            counts_bytes = in_bytes and length != len(text)
            previous = place = 0
            for begin, end in trained:
                if not previous <= begin <= end <= len(text):
                    raise InvalidInputError(
                        f"text {index} of the batch has the trained range ({begin}, {end}) after position {previous} "
                        f"of {len(text)} characters; give ascending ranges inside the text"
                    )
                if counts_bytes:
                    place += len(text[previous:begin].encode())
                    width = len(text[begin:end].encode())
                else:
                    place, width = begin, end - begin
                previous = end
                if width:
                    begins.append(base + place)
                    ends.append(base + place + width)
                place += width
        base += length
    found = TrainedRanges(np.array(begins, np.int64), np.array(ends, np.int64))
    if any(text.segments for text in texts):
        return found._replace(segments=_segments(texts, lengths, in_bytes=in_bytes))
    return found


def _segments(
    texts: Sequence[MarkedText], lengths: Sequence[int], *, in_bytes: bool
) -> tuple[Integers, npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Return where the segments of a batch end, their weights and their kinds; a text without any is one segment."""
    ends, weights, kinds = [], [], []
    base = 0
    for text, length in zip(texts, lengths, strict=True):
        counts_bytes = in_bytes and length != len(text.text)
        for segment in text.segments or (Segment(0, len(text.text)),):
            ends.append(base + (len(text.text[: segment.end].encode()) if counts_bytes else segment.end))
            weights.append(segment.weight)
            kinds.append(segment.kind)
        base += length
    return np.array(ends, np.int64), np.array(weights, np.float32), np.array(kinds, np.uint8)


def with_train_mask(
    input_ids: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int64],
    token_starts: Integers,
    token_ends: Integers,
    ranges: TrainedRanges,
) -> Sequences:
    """Return the sequences of a batch: a token is trained if it overlaps a trained range.

    A token that overlaps several segments has the weight and the kind of the first.

    Example:
        >>> ids, at = np.array([7, 8], np.int32), np.array([0, 2, 5])
        >>> ranges = TrainedRanges(np.array([2]), np.array([5]))
        >>> with_train_mask(ids, np.array([2]), at[:-1], at[1:], ranges).train.tolist()
        [0, 1]
    """
    begins, ends, segments = ranges
    record = np.arange(len(lengths))
    if len(begins) == 0:
        return Sequences(input_ids, np.zeros(len(input_ids), np.uint8), lengths, record)
    # Ranges ascend and do not touch: a token that overlaps any overlaps the first that ends after the token begins.
    candidate = np.searchsorted(ends, token_starts, side="right")
    is_behind_all = candidate == len(ends)
    candidate[is_behind_all] = 0
    trained = ~is_behind_all & (token_starts < token_ends) & (begins[candidate] < token_ends)
    straddling = trained & ((token_starts < begins[candidate]) | (token_ends > ends[candidate]))
    found = Sequences(input_ids, trained.view(np.uint8), lengths, record, int(np.count_nonzero(straddling)))
    if segments is None:
        return found
    segment_ends, weights, kinds = segments
    segment = np.searchsorted(segment_ends, np.maximum(token_starts, begins[candidate]), side="right")
    segment = np.where(trained, segment, 0)
    return found._replace(
        weights=np.where(trained, weights[segment], np.float32(0)), kinds=np.where(trained, kinds[segment], np.uint8(0))
    )
