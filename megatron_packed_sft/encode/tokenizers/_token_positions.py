"""Where tokens are in their text, and so which of them are trained.

A position is a character or a UTF-8 byte, whichever the tokenizer gives cheaply. The texts of a batch are placed end to
end, so that one pass marks them all:

    text        u s e r : h i | b o t : h o          trained: (4, 6) of the second text
    tokens      [user] [:] [hi] [bot] [:] [ho]
    train         0     0   0     0    0   1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.encode.sequences import Sequences
from megatron_packed_sft.encode.tokenizers.interface import MarkedText, Segment
from megatron_packed_sft.errors import InvalidInputError

Positions = npt.NDArray[np.int64]


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

    begins: Positions
    ends: Positions
    segments: tuple[Positions, npt.NDArray[np.float32], npt.NDArray[np.uint8]] | None = None  # ends, weights, kinds


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
) -> tuple[Positions, npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
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
    token_starts: Positions,
    token_ends: Positions,
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
