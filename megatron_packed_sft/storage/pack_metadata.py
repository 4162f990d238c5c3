"""The figures that Megatron-Bridge keeps in a JSON file beside packed data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.storage.bins import BinFigures
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.paths import local_path

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
