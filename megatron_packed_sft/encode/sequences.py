"""Many sequences in flat arrays, from the tokenizer through the encoder to the token store.

input_ids   5 6 7 8 9      lengths  2 3
train       0 1 0 1 1      record   0 4      the second sequence came from record 4
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


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
