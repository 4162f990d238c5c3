"""The figures that Megatron-Bridge keeps beside a packed file, and that our manifests hold themselves."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.disk.atomic import os_errors
from megatron_packed_sft.errors import InvalidInputError

if TYPE_CHECKING:
    from megatron_packed_sft.data.bin_readers import BinReader

_NEEDED = ("dataset_max_seqlen", "max_samples_per_bin", "min_packed_seqlen")


@dataclass(frozen=True, kw_only=True)
class PackMetadata:
    """What `pad_cu_seqlens` needs to give every batch the same shape, under Bridge's names.

    Example:
        >>> PackMetadata(dataset_max_seqlen=900, max_samples_per_bin=12, min_packed_seqlen=4000).to_json()
        {'dataset_max_seqlen': 900, 'max_samples_per_bin': 12, 'min_packed_seqlen': 4000}
    """

    dataset_max_seqlen: int
    max_samples_per_bin: int
    min_packed_seqlen: int
    packing_factor: float | None = None
    packing_efficiency: float | None = None
    pack_size: int | None = None

    @classmethod
    def of(cls, source: BinReader) -> PackMetadata:
        """From what a source knows of its rows."""
        figures = source.figures
        if figures.max_seq_len is None or figures.max_seqs_per_bin is None or figures.min_packed_len is None:
            raise InvalidInputError(
                f"{source.description} did not record its longest sequence and the most sequences per row; pass "
                "pack_metadata_file_path, or write the shards again"
            )
        known = figures.num_tokens is not None and figures.num_sequences is not None
        return cls(
            dataset_max_seqlen=figures.max_seq_len,
            max_samples_per_bin=figures.max_seqs_per_bin,
            min_packed_seqlen=figures.min_packed_len,
            packing_factor=round((figures.num_sequences or 0) / len(source), 2) if known else None,
            packing_efficiency=(
                round(100 * (figures.num_tokens or 0) / (len(source) * figures.pack_size), 2) if known else None
            ),
            pack_size=figures.pack_size,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PackMetadata:
        """From Bridge's JSON file: a list of such objects (the last one counts), or one."""
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

    def to_json(self) -> dict[str, Any]:
        """The JSON object; what is not known is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def collate_arguments(self) -> dict[str, int]:
        """The three numbers that `CollateOptions` takes."""
        return {name: getattr(self, name) for name in _NEEDED}
