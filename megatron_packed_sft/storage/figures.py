"""The figures of a shard, a split or a dataset: how many bins, tokens and sequences, and what they were made with.

`PackMetadata` is the part of them that Megatron-Bridge keeps in a JSON file beside packed data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.paths import local_path

# How the figures of several shards become those of all: what adds up, and the largest or smallest of all.
TOTALS = ("num_bins", "num_sequences", "num_tokens", "num_loss_tokens")
EXTREMES: dict[str, Callable[..., int]] = {
    "pack_size": max,
    "max_seqs_per_bin": max,
    "max_seq_len": max,
    "min_packed_len": min,
    "pad_seq_to_mult": max,
}
SUM_OF_WEIGHTS = "sum_loss_weights"
PROVENANCE_KEYS = ("tokenizer", "chat_template_fingerprint", "plan_fingerprint", "pad_seq_to_mult")


@dataclass(frozen=True, kw_only=True)
class BinFigures:
    """What is known of all bins of a shard, a split or a dataset; None where it was not recorded."""

    num_bins: int
    pack_size: int
    num_sequences: int | None = None
    num_tokens: int | None = None
    num_loss_tokens: int | None = None
    max_seqs_per_bin: int | None = None
    max_seq_len: int | None = None
    min_packed_len: int | None = None
    pad_seq_to_mult: int | None = None
    vocab_size: int | None = None
    pad_id: int | None = None
    tokenizer: Mapping[str, Any] | None = None
    chat_template_fingerprint: str | None = None
    has_weights: bool = False
    sum_loss_weights: float | None = None  # with weights
    max_input_len: int | None = None  # positions that a bin needs at most, where that is known to be below pack_size

    @property
    def num_positions(self) -> int:
        """Positions that any bin takes in a batch at most: its last token is a label only, so often fewer."""
        return self.pack_size if self.max_input_len is None else self.max_input_len

    @property
    def most_tokens(self) -> int:
        """The number of tokens, or the most that there can be."""
        return self.num_bins * self.pack_size if self.num_tokens is None else self.num_tokens

    @property
    def least_sequences(self) -> int:
        """The number of sequences, or the least that there can be: one per bin."""
        return self.num_bins if self.num_sequences is None else self.num_sequences

    @classmethod
    def counted(cls, bins: Iterable[PackedBin], pack_size: int) -> Self:
        """Count over all bins."""
        num_bins = num_sequences = num_tokens = num_loss_tokens = max_seqs_per_bin = max_seq_len = 0
        min_packed_len = pack_size
        has_weights, weights = False, []
        for one in bins:
            length = len(one.input_ids)
            num_bins += 1
            num_sequences += one.num_sequences
            num_tokens += length
            num_loss_tokens += int(np.count_nonzero(one.loss_mask))
            has_weights |= one.loss_mask.dtype.kind == "f"
            weights.append(float(np.sum(one.loss_mask, dtype=np.float64)))
            max_seqs_per_bin = max(max_seqs_per_bin, one.num_sequences)
            max_seq_len = max(max_seq_len, int(np.diff([*one.seq_start_id.tolist(), length]).max()))
            min_packed_len = min(min_packed_len, length)
        return cls(
            num_bins=num_bins,
            pack_size=pack_size,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            num_loss_tokens=num_loss_tokens,
            max_seqs_per_bin=max_seqs_per_bin,
            max_seq_len=max_seq_len,
            min_packed_len=min_packed_len,
            has_weights=has_weights,
            sum_loss_weights=math.fsum(weights) if has_weights else None,
        )

    @classmethod
    def over(cls, parts: Sequence[BinFigures]) -> Self:
        """Return the figures of several parts together; what one of them did not record is unknown.

        Example:
            >>> parts = [BinFigures(num_bins=2, pack_size=8, num_tokens=9), BinFigures(num_bins=1, pack_size=4)]
            >>> both = BinFigures.over(parts)
            >>> both.num_bins, both.pack_size, both.num_tokens
            (3, 8, None)
        """

        def reduced(name: str, reduce: Callable[..., Any]) -> Any:
            values = [getattr(part, name) for part in parts]
            return None if None in values else reduce(values)

        def common(values: Sequence[Any]) -> Any:
            return values[0] if all(value == values[0] for value in values) else None

        reductions: dict[str, Callable[..., Any]] = {**dict.fromkeys(TOTALS, sum), **EXTREMES, "vocab_size": max}
        reductions |= dict.fromkeys(("pad_id", "tokenizer", "chat_template_fingerprint"), common)
        together = cls(**{name: reduced(name, reduce) for name, reduce in reductions.items()})
        if any(part.max_input_len is not None for part in parts):
            together = replace(together, max_input_len=max(part.num_positions for part in parts))
        if not any(part.has_weights for part in parts):
            return together
        sums = [part.sum_loss_weights if part.has_weights else part.num_loss_tokens for part in parts]
        known = [one for one in sums if one is not None]
        total = math.fsum(known) if len(known) == len(sums) else None
        return replace(together, has_weights=True, sum_loss_weights=total)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def numbers(self) -> dict[str, int | float]:
        """Return the known totals and extremes by name."""
        values = {name: getattr(self, name) for name in (*TOTALS, *EXTREMES, SUM_OF_WEIGHTS)}
        return {name: value for name, value in values.items() if value is not None}


FILE_NAME = "metadata.json"
_NEEDED = ("dataset_max_seqlen", "max_samples_per_bin", "min_packed_seqlen")


@dataclass(frozen=True, kw_only=True)
class PackMetadata:
    """What `pad_cu_seqlens` needs to give every batch the same shape, under Bridge's names."""

    dataset_max_seqlen: int
    max_samples_per_bin: int
    min_packed_seqlen: int
    packing_factor: float | None = None
    packing_efficiency: float | None = None
    pack_size: int | None = None

    @classmethod
    def of(cls, figures: BinFigures, description: str) -> PackMetadata:
        """Return the metadata of data with these figures; `description` names the data in the error."""
        if figures.max_seq_len is None or figures.max_seqs_per_bin is None or figures.min_packed_len is None:
            raise InvalidInputError(
                f"{description} did not record its longest sequence and the most sequences per bin; pass "
                "pack_metadata_file_path, or write the shards again"
            )
        known = figures.num_tokens is not None and figures.num_sequences is not None
        capacity = figures.num_bins * figures.pack_size
        return cls(
            dataset_max_seqlen=figures.max_seq_len,
            max_samples_per_bin=figures.max_seqs_per_bin,
            min_packed_seqlen=figures.min_packed_len,
            packing_factor=round((figures.num_sequences or 0) / figures.num_bins, 2) if known else None,
            packing_efficiency=round(100 * (figures.num_tokens or 0) / capacity, 2) if known else None,
            pack_size=figures.pack_size,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PackMetadata:
        """Read Bridge's JSON file: a list of such objects (the last one counts), or one."""
        local_path(path, "pack_metadata_file_path")  # refuses a URL
        with os_errors("read", path), open(path, encoding="utf-8") as file:
            try:
                document = json.load(file)
            except ValueError as error:
                raise InvalidInputError(f"{os.fspath(path)} is not valid JSON ({error})") from None
        entry = document[-1] if isinstance(document, list) and document else document
        for name in _NEEDED:
            if not isinstance(entry, dict) or type(entry.get(name)) is not int:
                raise InvalidInputError(f"{os.fspath(path)}: {name} is missing or not an integer; pack the data again")
        return cls(**{name: entry[name] for name in _NEEDED})

    @classmethod
    def recorded_beside(cls, path: Path) -> dict[str, int]:
        """Return what the file beside some packed data says, by the names of `BinFigures`; nothing without one."""
        try:
            found = cls.load(path.parent / FILE_NAME)
        except PackedSFTError:
            return {}
        return {
            "max_seq_len": found.dataset_max_seqlen,
            "max_seqs_per_bin": found.max_samples_per_bin,
            "min_packed_len": found.min_packed_seqlen,
        }

    @classmethod
    def file_beside(cls, figures: BinFigures) -> Mapping[str, bytes]:
        """Return the file to put beside packed data, by its name."""
        return {FILE_NAME: cls.of(figures, "the data").to_bytes()}

    def to_bytes(self) -> bytes:
        """Return the file's content: a list with one object; what is not known is left out."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return (json.dumps([known], indent=2) + "\n").encode()

    def collate_arguments(self) -> dict[str, int]:
        """Return the three numbers that `CollateOptions` takes."""
        return {name: getattr(self, name) for name in _NEEDED}
