"""Many sequences of ids, one after the other, and what is done to them after tokenizing: ends, cuts, drops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]


class Sequences(NamedTuple):
    """Flat ids and train values, the sequences' lengths, and the row each came from."""

    input_ids: npt.NDArray[np.int32]
    train: npt.NDArray[np.uint8]
    lengths: Counts
    row: Counts

    @property
    def ends(self) -> Counts:
        """One past each sequence's last token."""
        return np.cumsum(self.lengths)

    def num_trained(self) -> Counts:
        """Count each sequence's tokens that count in the loss; the first token of a sequence is never predicted."""
        counted = np.concatenate(([0], np.cumsum(self.train, dtype=np.int64)))
        ends = self.ends
        starts = np.minimum(ends - self.lengths + 1, ends)
        return np.asarray(counted[ends] - counted[starts], np.int64)

    def with_bos(self, wanted: Bools, bos_id: int) -> Sequences:
        """Put a token before the wanted sequences that do not begin with it."""
        missing = self._lacking(wanted, bos_id, self.ends - self.lengths)
        return self._insert(missing, (self.ends - self.lengths)[missing], bos_id, np.zeros(len(self.row), np.uint8))

    def with_eos(self, wanted: Bools, eos_id: int) -> Sequences:
        """Put a token behind the wanted sequences that do not end with it; it is trained if the last token is."""
        missing = self._lacking(wanted, eos_id, self.ends - 1)
        trained = np.zeros(len(self.row), np.uint8)
        trained[missing] = self.train[self.ends[missing] - 1]
        return self._insert(missing, self.ends[missing], eos_id, trained)

    def cut(self, max_len: int, side: str) -> Sequences:
        """Cut all sequences to a length, on the right or on the left."""
        position = np.arange(len(self.input_ids)) - np.repeat(self.ends - self.lengths, self.lengths)
        if side == "left":
            position = np.repeat(self.lengths, self.lengths) - 1 - position
        kept = position < max_len
        return Sequences(self.input_ids[kept], self.train[kept], np.minimum(self.lengths, max_len), self.row)

    def only(self, kept: Bools) -> Sequences:
        """Keep some of the sequences."""
        if kept.all():
            return self
        tokens = np.repeat(kept, self.lengths)
        return Sequences(self.input_ids[tokens], self.train[tokens], self.lengths[kept], self.row[kept])

    def _lacking(self, wanted: Bools, token: int, at: Counts) -> Bools:
        lacking = wanted & (self.lengths > 0)
        lacking[lacking] = self.input_ids[at[lacking]] != token
        return lacking

    def _insert(self, chosen: Bools, at: Counts, token: int, trained: npt.NDArray[np.uint8]) -> Sequences:
        return Sequences(
            np.insert(self.input_ids, at, token),
            np.insert(self.train, at, trained[chosen]),
            self.lengths + chosen,
            self.row,
        )


def in_record_order(parts: Sequence[Sequences]) -> Sequences:
    """Put sequences of several kinds into the order of their rows.

    Example:
        >>> one = Sequences(*(np.array(values) for values in ([5, 6], [0, 1], [2], [1])))
        >>> two = Sequences(*(np.array(values) for values in ([7], [1], [1], [0])))
        >>> in_record_order([one, two]).input_ids.tolist()
        [7, 5, 6]
    """
    filled = [part for part in parts if len(part.row)] or list(parts[:1])
    if len(filled) == 1:
        return filled[0]
    row = np.concatenate([part.row for part in filled])
    order = np.argsort(row)
    ids = [piece for part in filled for piece in np.split(part.input_ids, part.ends[:-1])]
    train = [piece for part in filled for piece in np.split(part.train, part.ends[:-1])]
    return Sequences(
        np.concatenate([ids[number] for number in order]),
        np.concatenate([train[number] for number in order]),
        np.concatenate([part.lengths for part in filled])[order],
        row[order],
    )
