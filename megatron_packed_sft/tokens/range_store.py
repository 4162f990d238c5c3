"""A token store in an object store of which a few sequences are wanted: range requests fetch these and nothing else."""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import PackedSFTError, ShardError
from megatron_packed_sft.remote.filesystem import child
from megatron_packed_sft.remote.objects import object_info, read_object
from megatron_packed_sft.remote.outline import Outline
from megatron_packed_sft.support.paths import redacted
from megatron_packed_sft.tokens.manifest import (
    CHECKSUMS,
    IDS,
    MAX_STORE_BYTES,
    OFFSETS,
    STORE,
    TRAIN,
    WEIGHTS,
    ListedPart,
    TokenPartManifest,
    parse_store,
    part_arrays,
)
from megatron_packed_sft.tokens.part import TokenPart
from megatron_packed_sft.tokens.store import TokenStore


class RangeStore:
    """Opens a store by its store.json; of a part the manifest and headers are fetched when a sequence of it is wanted.

    Args:
        url: of the store, or of a single part.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        index = child(url, STORE)
        has_index = object_info(index) is not None
        self._parts = parse_store(read_object(index, MAX_STORE_BYTES), redacted(index)) if has_index else []
        self._open: dict[int, _RangePart] = {}
        listed = [one.num_sequences for one in self._parts] or [None]
        self._lasts = list(accumulate(size or len(self._part(number).part) for number, size in enumerate(listed)))

    def __len__(self) -> int:
        return self._lasts[-1]

    @property
    def manifest(self) -> TokenPartManifest:
        """The first part's manifest."""
        return self._part(0).part.manifest

    def weighted(self, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """Return (input_ids, weights) of one sequence, as `TokenStore.weighted` does."""
        number = bisect_right(self._lasts, index)
        return self._part(number).weighted(index - (self._lasts[number - 1] if number else 0))

    def _part(self, number: int) -> _RangePart:
        if number not in self._open:
            listed = self._parts[number] if self._parts else None
            url = self._url if listed is None else child(self._url, listed.name)
            self._open[number] = _RangePart(url, listed)
        return self._open[number]


class _RangePart:
    """One part, as an outline whose holes are filled when they are needed."""

    def __init__(self, url: str, listed: ListedPart | None) -> None:
        with contextlib.ExitStack() as resources:
            self._outline = resources.enter_context(Outline.of(url))
            self.part = TokenPart.open(self._outline.path)
            self.part.is_sketch = True
            found = self.part.fingerprint, len(self.part)
            if listed is not None and found != (listed.manifest_checksum, listed.num_sequences or len(self.part)):
                raise ShardError(f"{redacted(url)} is not the part that {STORE} lists; it was swapped or written again")
            self._specs = {spec.name: spec for spec in part_arrays(self.part.manifest)}
            self._fill(OFFSETS, len(self.part), len(self.part) + 1)  # the last offset is checked when it is mapped
            weakref.finalize(self, resources.pop_all().close)  # the scratch directory; also when the process ends

    def weighted(self, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """Fetch a sequence and return its ids and weights."""
        try:
            self._fill(OFFSETS, index, index + 2)
            [start], [length] = self.part.recorded_spans(np.array([index]))
            longest = min(int(length), self.part.manifest.max_seq_len)
            for name in (IDS, TRAIN, WEIGHTS):
                if name in self._specs:
                    self._fill(name, int(start), int(start) + longest)
            if CHECKSUMS in self._specs:
                self._fill(CHECKSUMS, index, index + 1)
            ids, weights = TokenStore(self.part.path, [self.part]).weighted(index)
            return ids.copy(), weights.copy()
        except PackedSFTError as error:
            error.args = (self._outline.at_home(str(error)),)
            raise

    def _fill(self, name: str, first: int, last: int) -> None:
        spec = self._specs[name]
        size = np.dtype(spec.dtype).itemsize
        self._outline.fill(name, spec.header_size + first * size, spec.header_size + last * size)
