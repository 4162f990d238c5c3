"""What a dataset was made from, as far as the work directory beside it still knows: tokenizer, drops, files and lines.

    bin ─▶ plan: its items ─▶ token store: part and number ─▶ receipts: input file and line

A dataset holds no paths, so that equal data has equal bytes. The work directory does, and it counts only if it made
exactly this dataset: its receipt names the dataset's fingerprint, and its plan has the recorded one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.disk import json_document
from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.prepare.work_directory import part_number, record_numbers_path, slice_receipt
from megatron_packed_sft.storage.dataset_directory import DatasetDirectory
from megatron_packed_sft.tokens.store import TokenPart, TokenStore, open_token_store


class Origin(NamedTuple):
    """Where a sequence came from: a file, and the line or row in it."""

    file: str
    line: int


@dataclass(frozen=True)
class PreparedFrom:
    """The work directory of a published dataset, opened to look at.

    Args:
        path: of the work directory.
        dataset: what was published from it.
        tokenizer_path: what the dataset was tokenized with, where it was then.
    """

    path: Path
    dataset: DatasetDirectory
    tokenizer_path: str | None

    @staticmethod
    def of(dataset: DatasetDirectory, work_dir: Path | None = None) -> PreparedFrom | None:
        """Return the work directory that made a dataset, or None.

        Args:
            dataset: the published dataset.
            work_dir: where to look; by default beside the dataset, where `prepare` puts it.
        """
        path = work_dir or dataset.path.with_name(f"{dataset.path.name}.work")
        for file in sorted((path / "published").glob("*.json")):
            noted = _receipt(file)
            if noted.get("published") == dataset.fingerprint:
                return PreparedFrom(path, dataset, noted.get("tokenizer_path"))
        return None

    def drop_examples(self) -> dict[str, dict[str, list[str]]]:
        """Return source -> reason -> a few dropped records: file, line and what is wrong."""
        counts = _receipt(self.path / "encode.json").get("counts", {})
        published: Mapping[str, Any] = self.dataset.provenance.get("sources", {})
        return {
            name: dict(one["examples"])
            for name, one in counts.items()
            # The receipt may be of a later run with other settings.
            if one["dropped"] == published.get(name, {}).get("dropped") and one["examples"]
        }

    def origins(self, split: str) -> BinOrigins | None:
        """Return where the sequences of a split's bins came from; None if the plan or the tokens are gone."""
        recorded = self.dataset.provenance.get("splits", {}).get(split, {}).get("order_fingerprint")
        try:
            plan = PackPlan.load(self.path / "plans" / f"{split}.npz")
            store = open_token_store(self.path / "tokens" / split)
        except PackedSFTError:
            return None
        if plan.order_fingerprint != recorded or plan.accounting.num_sequences != len(store):
            return None
        return BinOrigins(self.path / "tokens", split, plan, store)


class BinOrigins:
    """Where the sequences of a split's bins came from."""

    def __init__(self, tokens: Path, split: str, plan: PackPlan, store: TokenStore) -> None:
        self._tokens, self._split = tokens, split
        self._plan, self._store = plan, store
        self._order = plan.bin_order
        self._part = functools.lru_cache(maxsize=256)(self._read_part)

    def of_bin(self, number: int) -> list[Origin | None]:
        """Return the origin of each sequence of a bin, in the order of the split's bins; None where it is not known."""
        items = self._plan.bin(int(self._order[number])).astype(np.int64)
        sequences = items if self._plan.chunks is None else self._plan.chunks.sequence[items].astype(np.int64)
        found: list[Origin | None] = [None] * len(items)
        for part, positions, inside in self._store.by_part(sequences):
            read = self._part(part)
            if read is not None:
                file, lines = read
                for place, line in zip(positions.tolist(), lines[inside].tolist(), strict=True):
                    found[place] = Origin(file, line)
        return found

    def _read_part(self, part: TokenPart) -> tuple[str, npt.NDArray[np.int64]] | None:
        number = part_number(part)
        noted = _receipt(self._tokens.parent / f"{slice_receipt(number)}.json")
        if noted.get("parts", {}).get(self._split) != part.fingerprint:
            return None
        try:
            lines = np.load(record_numbers_path(self._tokens, self._split, number))
        except (OSError, ValueError):
            return None
        return (noted["file"], lines) if len(lines) == len(part) else None


def noted_tokenizer_paths(work_dir: Path) -> list[str]:
    """Return where the tokenizers were that a work directory's datasets were made with, as far as it noted them."""
    noted = (_receipt(file).get("tokenizer_path") for file in sorted((work_dir / "published").glob("*.json")))
    return [path for path in dict.fromkeys(noted) if isinstance(path, str) and path]


def _receipt(file: Path) -> dict[str, Any]:
    """Return what a stage noted; nothing when the receipt is missing or damaged."""
    try:
        result = json_document.parse(file.read_bytes(), str(file)).get("result")
    except (OSError, PackedSFTError):
        return {}
    return result if isinstance(result, dict) else {}
