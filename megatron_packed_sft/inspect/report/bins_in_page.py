"""The bins that a page carries: which ones, and in a form that is small and decoded by the page.

page     vocabulary: id and text of every token that occurs, the most frequent first
bin      numbers into the vocabulary, one to three bytes each, as base64
         runs of one loss weight, starts of sequences, where they came from
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.readers.interface import BinReader
from megatron_packed_sft.inspect.report.lengths import BinLengths
from megatron_packed_sft.inspect.report.reading import Int64, spread
from megatron_packed_sft.inspect.tokens_of_bin import TokenDecoder, sequence_ends, trained_weights, visible
from megatron_packed_sft.prepare.origins import BinOrigins
from megatron_packed_sft.storage.bins import PackedBin

_MOST_BINS = 2_000


def choose_bins(lengths: BinLengths, asked: Iterable[int], suspicious: Iterable[int], num_tokens: int) -> Int64:
    """Return the bins for a page: those asked for, those of suspicious examples, then an even spread of the others.

    Args:
        lengths: of all bins.
        asked: bins that the user wants to see.
        suspicious: bins that findings point at; they take at most half of the room.
        num_tokens: about how many tokens the page has room for.
    """
    sizes = lengths.bin_tokens
    if int(sizes.sum()) <= num_tokens and lengths.num_bins <= _MOST_BINS:
        return np.arange(lengths.num_bins)
    chosen: dict[int, None] = dict.fromkeys(asked)
    used = int(sum(sizes[one] for one in chosen))
    for one in suspicious:
        if one not in chosen and used + int(sizes[one]) <= num_tokens // 2:
            chosen[one] = None
            used += int(sizes[one])
    left = max(1 if not chosen else 0, (num_tokens - used) // max(1, int(sizes.mean())))
    for one in spread(lengths.num_bins, min(left, _MOST_BINS)).tolist() if left else []:
        if one not in chosen and (used + int(sizes[one]) <= num_tokens or not chosen):
            chosen[one] = None
            used += int(sizes[one])
    return np.array(sorted(chosen), np.int64)


class BinsInPage:
    """Collects bins of all splits, which share one vocabulary, and returns them as plain values.

    Args:
        decoder: gives tokens their texts.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._counts: Counter[int] = Counter()
        self._files: dict[str, int] = {}
        self._bins: dict[str, list[tuple[int, PackedBin, list[Any] | None]]] = {}

    def add(self, split: str, reader: BinReader, numbers: Int64, origins: BinOrigins | None) -> None:
        """Take bins of a split."""
        for number in numbers.tolist():
            packed = reader.bin(number)
            packed = PackedBin(packed.input_ids.copy(), packed.loss_mask.copy(), packed.seq_start_id.copy())
            ids, counts = np.unique(packed.input_ids, return_counts=True)
            self._counts.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
            from_where = None
            if origins is not None:
                found = origins.of_bin(number)
                if len(found) == packed.num_sequences:
                    from_where = [None if one is None else [self._file(one.file), one.line] for one in found]
            self._bins.setdefault(split, []).append((number, packed, from_where))

    def _file(self, path: str) -> int:
        return self._files.setdefault(path, len(self._files))

    def to_json(self) -> dict[str, Any]:
        """Return the vocabulary, the files, and the bins of each split."""
        ordered = sorted(self._counts, key=lambda one: (-self._counts[one], one))
        place = {one: number for number, one in enumerate(ordered)}
        return {
            "has_text": self._decoder.tokenizer is not None,
            "ids": ordered,
            "texts": [visible(self._decoder.text(one)) for one in ordered],
            "control": [place[one] for one in ordered if one in self._decoder.control_ids],
            "files": list(self._files),
            "splits": {split: [self._bin(place, *one) for one in bins] for split, bins in self._bins.items()},
        }

    def _bin(self, place: dict[int, int], number: int, packed: PackedBin, origins: list[Any] | None) -> dict[str, Any]:
        ids = packed.input_ids.tolist()
        return {
            "number": number,
            "tokens": _as_text([place[one] for one in ids]),
            "starts": packed.seq_start_id.tolist(),
            "runs": _runs(trained_weights(packed)),
            "texts": self._other_texts(packed),
            **({} if origins is None else {"origins": origins}),
        }

    def _other_texts(self, packed: PackedBin) -> list[Any]:
        """Return [position, text, ...] of tokens whose text is another one here: parts of characters."""
        found: list[Any] = []
        for start, end in zip(packed.seq_start_id.tolist(), sequence_ends(packed).tolist(), strict=True):
            ids = packed.input_ids[start:end].tolist()
            for position, (one, text) in enumerate(zip(ids, self._decoder.texts(ids), strict=True)):
                if text != self._decoder.text(one):
                    found += [start + position, visible(text)]
        return found


def _as_text(numbers: list[int]) -> str:
    """Return numbers as base64 of seven bits per byte, the lowest first; the eighth bit says that more follow."""
    data = bytearray()
    for number in numbers:
        while number >= 128:
            data.append(number & 127 | 128)
            number >>= 7
        data.append(number)
    return base64.b64encode(bytes(data)).decode()


def _runs(weights: npt.NDArray[np.float32]) -> list[float]:
    """Return [length, weight, length, weight, ...] of tokens that count the same.

    Example:
        >>> _runs(np.array([0, 0, 1, 0.5], np.float32))
        [2, 0, 1, 1, 1, 0.5]
    """
    edges = np.concatenate([[0], np.flatnonzero(np.diff(weights)) + 1, [len(weights)]])
    runs: list[float] = []
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        weight = round(float(weights[start]), 6)
        runs += [end - start, int(weight) if weight.is_integer() else weight]
    return runs
