"""What every reader of bins offers, a bin as a sample, and several readers one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.batch.located_bins import (
    LocatedBins,
)
from megatron_packed_sft.data.made_with import MadeWith
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import ReadOptions
from megatron_packed_sft.support.checksum import checksum

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class BinReader(Protocol):
    """Packed bins by number. Everything that datasets can read offers this."""

    @property
    def fingerprint(self) -> str:
        """Identifies the content."""

    @property
    def figures(self) -> BinFigures:
        """What is known of all bins without opening a shard."""

    @property
    def description(self) -> str:
        """For logs and messages: what it is and where."""

    @property
    def vocab_size(self) -> int | None:
        """All ids are below it, as far as anybody recorded."""

    @property
    def pad_id(self) -> int | None:
        """What the data was padded with, as far as anybody recorded."""

    def made_with(self) -> list[MadeWith]:
        """Return what each of its parts was made with."""

    def __len__(self) -> int:
        """Return the number of bins."""

    def bin(self, index: int) -> PackedBin:
        """Return one bin, 0 <= index < len; its arrays must not be written to."""

    def locate(self, bins: Numbers, positions: Numbers, is_padding: Flags) -> list[LocatedBins]:
        """Return bins for the collate kernel, with their places in the batch."""

    def longest_input(self) -> int:
        """Return how many positions the bin that needs most takes in a batch. May read all indices."""

    def advise(self, bins: Numbers) -> None:
        """Announce bins that are needed soon."""

    def read_with(self, options: ReadOptions) -> None:
        """Choose how files are read from now on, where there is a choice."""


def made_with_of(
    where: str, figures: BinFigures, vocab_size: Callable[[], int | None], bin_at: Callable[[int], PackedBin]
) -> MadeWith:
    """Return what a source was made with, as far as its figures say."""
    template, multiple = figures.chat_template_fingerprint, figures.pad_seq_to_mult
    return MadeWith(where, figures.tokenizer, template, vocab_size, figures.num_bins, bin_at, multiple)


def sample_of(packed: PackedBin, is_padding: bool, *, weighted: bool = False) -> dict[str, Any]:
    """Return a bin as a sample, in arrays of its own: torch must not get read-only memory.

    In a `weighted` dataset every loss mask is float32, also those of bins whose trained tokens all count 1.
    """
    ids, mask, starts = packed
    mask = np.zeros_like(mask) if is_padding else mask.copy()
    boundaries: list[int] = starts.tolist()
    boundaries.append(len(ids))
    sample = {
        "input_ids": ids.copy(),
        "seq_boundaries": boundaries,
        "loss_mask": mask.astype(np.float32) if weighted else mask,
    }
    if is_padding:
        sample["is_padding"] = True  # without it, answer_only_loss=False would count the padding sample's loss
    return sample


class JoinedBinReader:
    """Several readers, one after the other, as one."""

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
