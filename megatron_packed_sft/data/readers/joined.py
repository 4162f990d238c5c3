"""Several sources end to end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_packed_sft.data.batch.located_bins import (
    LocatedBins,
)
from megatron_packed_sft.data.made_with import MadeWith
from megatron_packed_sft.data.readers.interface import BinReader, Flags, Numbers
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import ReadOptions
from megatron_packed_sft.support.checksum import checksum


class JoinedBinReader:
    """Several sources end to end."""

    def __init__(self, sources: Sequence[BinReader]) -> None:
        self.sources = tuple(sources)
        self._offsets = np.cumsum([0, *(len(source) for source in sources)])
        self.fingerprint = checksum("".join(source.fingerprint for source in sources).encode())
        self.description = "; ".join(source.description for source in sources)
        self.figures = BinFigures.over([source.figures for source in sources])

    @property
    def vocab_size(self) -> int | None:
        """The largest vocabulary that a source recorded."""
        return max((size for source in self.sources if (size := source.vocab_size) is not None), default=None)

    @property
    def pad_id(self) -> int | None:
        """The padding id of the first source that records one."""
        return next((pad_id for source in self.sources if (pad_id := source.pad_id) is not None), None)

    def made_with(self) -> list[MadeWith]:
        """Return what each source was made with."""
        return [part for source in self.sources for part in source.made_with()]

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def bin(self, index: int) -> PackedBin:
        """Return one bin, from the source that holds it."""
        number = int(np.searchsorted(self._offsets, index, side="right")) - 1
        return self.sources[number].bin(index - int(self._offsets[number]))

    def locate(self, bins: Numbers, positions: Numbers, is_padding: Flags) -> list[LocatedBins]:
        """Return the bins of all sources that hold some of them."""
        numbers = np.searchsorted(self._offsets, bins, side="right") - 1
        found: list[LocatedBins] = []
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            inside = bins[chosen] - self._offsets[number]
            found += self.sources[number].locate(inside, positions[chosen], is_padding[chosen])
        return found

    def longest_input(self) -> int:
        """Return how many positions the bin that needs most takes in a batch."""
        return max(source.longest_input() for source in self.sources)

    def advise(self, bins: Numbers) -> None:
        """Pass it on to the sources."""
        numbers = np.searchsorted(self._offsets, bins, side="right") - 1
        for number in np.unique(numbers).tolist():
            self.sources[number].advise(bins[numbers == number] - self._offsets[number])

    def read_with(self, options: ReadOptions) -> None:
        """Pass it on to the sources."""
        for source in self.sources:
            source.read_with(options)
