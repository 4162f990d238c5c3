"""The sequences of some bins, copied out of a token store part by part into one local part of their own.

Bins are shuffled, so the bins of one shard need a little of every part. Where the parts must be fetched first, they are
held one after the other, once for several shards, and a cache that is smaller than the store does no harm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import ShardFileError
from megatron_packed_sft.storage.interface import FIRST_READ
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.tokens.manifest import CHECKSUM_DTYPE, TokenPartManifest
from megatron_packed_sft.tokens.open_arrays import PartArrays
from megatron_packed_sft.tokens.store import TokenPart, TokenStore

_NUM_AHEAD = 4  # parts that are fetched while one is read
_COPIED_AT_ONCE = 4 << 20  # tokens; the memory that copying takes


class GatheredSequences:
    """Some sequences of a token store, in local files; asked as the store, and a part of it, would be.

    Args:
        store: whose sequences.
        sequences: their numbers, each once, sorted.
        folder: an empty directory for the files.
        first_part: where to begin with the parts, so that several processes of a node do not wait for the same one.
    """

    verify = FIRST_READ

    def __init__(self, store: TokenStore, sequences: npt.NDArray[np.int64], folder: Path, first_part: int = 0) -> None:
        self.path = store.path
        self._manifest, self._has_weights = store.manifest, store.has_weights
        self._sequences = sequences
        groups = store.by_part(sequences)
        first = min(first_part, len(groups))
        self.arrays = self._gathered([*groups[first:], *groups[:first]], folder)

    @property
    def manifest(self) -> TokenPartManifest:
        """Of the store: the type of its ids, and what they were made with."""
        return self._manifest

    @property
    def has_weights(self) -> bool:
        """Whether the store has weights."""
        return self._has_weights

    def by_part(
        self, sequences: npt.NDArray[np.int64]
    ) -> list[tuple[GatheredSequences, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Return (this, positions, places here), as a store would for each of its parts."""
        return [(self, np.arange(len(sequences)), np.searchsorted(self._sequences, sequences))]

    def spans(self, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (start, length) of each sequence in the arrays; one that does not match its checksum is an error."""
        unsound = self.arrays.find_unsound(places, self.verify)
        if unsound is not None:
            raise self.damaged(unsound)
        return self.arrays.begins[places], self.arrays.ends[places] - self.arrays.begins[places]

    def damaged(self, place: int) -> ShardFileError:
        """Return the error for a sequence that does not match its checksum."""
        return ShardFileError(
            f"the copy of sequence {self._sequences[place]} of {self.path} in {self.arrays.path} does not match the "
            "checksum that was written with it; check that disk, and run again"
        )

    def _gathered(
        self, groups: Sequence[tuple[TokenPart, npt.NDArray[np.int64], npt.NDArray[np.int64]]], folder: Path
    ) -> PartArrays:
        types = {"ids": np.dtype(self._manifest.dtype), "train": np.dtype(np.uint8)}
        if self._has_weights:
            types["weights"] = np.dtype(np.float32)
        num_tokens = 0
        begins, ends = np.zeros((2, len(self._sequences)), np.int64)
        checksums = np.zeros(len(self._sequences), CHECKSUM_DTYPE)
        verified = np.ones(len(self._sequences), np.uint8)  # until there is something to compare a copy with
        with os_errors("write", folder):
            files = {name: open(folder / name, "wb") for name in types}  # noqa: SIM115  # closed below
            try:
                for part, places, inside in _held(groups):
                    starts, lengths = part.spans(inside)
                    ends[places] = num_tokens + np.cumsum(lengths)
                    begins[places] = ends[places] - lengths
                    num_tokens += int(lengths.sum())
                    # Where weights are filled in, a copy is not what its checksum was taken of.
                    if part.arrays.checksums is not None and part.manifest.has_weights == self._has_weights:
                        checksums[places] = part.arrays.checksums[inside]
                        verified[places] = 0
                    for name, values in _copied(part.arrays, starts, lengths, types):
                        files[name].write(values)
                    part.unmap()  # so that the cache may let it go
            finally:
                for file in files.values():
                    file.close()
            mapped = {name: np.memmap(folder / name, dtype, "r") for name, dtype in types.items()}
        for array in (begins, ends, checksums):
            array.flags.writeable = False  # as maps are; numba would compile again
        return PartArrays(
            mapped["ids"], mapped["train"], begins, ends, mapped.get("weights"), checksums, verified, folder
        )


def _held(groups: Sequence[tuple[TokenPart, Any, Any]]) -> Iterator[tuple[TokenPart, Any, Any]]:
    """Yield every group when its part is mapped; the next ones are fetched meanwhile."""
    with ThreadPoolExecutor(_NUM_AHEAD, thread_name_prefix="packed-sft-parts") as threads:
        coming: deque[Any] = deque()
        remaining = iter(groups)
        try:
            for group in groups:
                while len(coming) <= _NUM_AHEAD and (following := next(remaining, None)) is not None:
                    coming.append(threads.submit(getattr, following[0], "arrays"))
                coming.popleft().result()
                yield group
        finally:
            threads.shutdown(wait=True, cancel_futures=True)


def _copied(
    arrays: PartArrays, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], types: dict[str, Any]
) -> Iterator[tuple[str, bytes]]:
    """Yield the tokens, masks and weights of some sequences, in pieces."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(starts):
        before = ends[first] - lengths[first]
        stop = max(first + 1, int(np.searchsorted(ends, before + _COPIED_AT_ONCE, side="right")))
        count = int(ends[stop - 1] - before)
        places = np.repeat(starts[first:stop] - (ends[first:stop] - lengths[first:stop] - before), lengths[first:stop])
        places += np.arange(count)
        train = arrays.train[places]
        yield "ids", arrays.ids[places].tobytes()
        yield "train", train.tobytes()
        if "weights" in types:
            weights = train.astype(np.float32) if arrays.weights is None else arrays.weights[places]
            yield "weights", weights.tobytes()
        first = stop
