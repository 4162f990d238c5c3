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

from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.packing.options import PackOptions
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.prepare.counts import MAX_EXAMPLES
from megatron_packed_sft.prepare.plan_stage import drop_reasons, reason_of
from megatron_packed_sft.prepare.work_directory import part_number, places_of, record_numbers_path, slice_receipt
from megatron_packed_sft.storage.dataset_directory import DatasetDirectory
from megatron_packed_sft.support import json_document
from megatron_packed_sft.tokens.part import TokenPart
from megatron_packed_sft.tokens.remote_store import open_outlines
from megatron_packed_sft.tokens.store import TokenStore, open_token_store


class Origin(NamedTuple):
    """Where a sequence came from: a file, and the line, record or row in it.

    Example:
        >>> str(Origin("chats.jsonl.gz", 3)), str(Origin("chats.json", 3))
        ('chats.jsonl.gz, line 3', 'chats.json, record 3')
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}, {'line' if '.jsonl' in self.file else 'record'} {self.line}"


@dataclass(frozen=True)
class PreparedFrom:
    """The work directory of a published dataset, opened to look at.

    Args:
        path: of the work directory.
        dataset: what was published from it.
        tokenizer_path: of the tokenizer that made the dataset, at that time.
    """

    path: Path
    dataset: DatasetDirectory
    tokenizer_path: str | None

    @staticmethod
    def of(dataset: DatasetDirectory, work_dir: Path | None = None) -> PreparedFrom | None:
        """Return the work directory that made a dataset, or None.

        Args:
            dataset: the published dataset.
            work_dir: where to look; by default where `prepare` puts it, beside a local dataset.
        """
        path = work_dir or places_of(str(dataset.path) if dataset.url is None else dataset.url, None).work_dir
        for file in sorted((path / "published").glob("*.json")):
            noted = _receipt(file)
            if dataset.fingerprint in (noted.get("published"), noted.get("dataset")):
                return PreparedFrom(path, dataset, noted.get("tokenizer_path"))
        return None

    def drop_examples(self) -> dict[str, list[str]]:
        """Return reason -> a few dropped records: file, line and what is wrong."""
        counts = _receipt(self.path / "encode.json").get("counts", {})
        published: Mapping[str, Any] = self.dataset.provenance.get("sources", {})
        found: dict[str, list[str]] = {}
        for name, one in counts.items():
            # The receipt may be of a later run with other settings.
            if one["dropped"] == published.get(name, {}).get("dropped"):
                for reason, shown in one["examples"].items():
                    found.setdefault(reason, []).extend(shown)
        options = self.dataset.provenance.get("settings", {}).get("packing")
        for split in self.dataset.splits if options else ():
            if (origins := self.origins(split)) is not None:
                for reason, shown in origins.dropped_by_plan(PackOptions(**options)).items():
                    found.setdefault(reason, []).extend(shown)
        return found

    def origins(self, split: str) -> BinOrigins | None:
        """Return the origins of a split's sequences; None if the plan or the tokens are gone."""
        recorded = self.dataset.provenance.get("splits", {}).get(split, {}).get("order_fingerprint")
        try:
            plan = PackPlan.load(self.path / "plans" / f"{split}.npz")
            store = _store(self.path / "tokens" / split)
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
        return self._of_sequences(sequences)

    def _of_sequences(self, sequences: npt.NDArray[np.int64]) -> list[Origin | None]:
        found: list[Origin | None] = [None] * len(sequences)
        for part, positions, inside in self._store.by_part(sequences):
            read = self._part(part)
            if read is not None:
                file, lines = read
                for place, line in zip(positions.tolist(), lines[inside].tolist(), strict=True):
                    found[place] = Origin(file, line)
        return found

    def dropped_by_plan(self, options: PackOptions) -> dict[str, list[str]]:
        """Return reason -> a few records of which no token is in a bin."""
        lengths = self._store.lengths
        reasons = drop_reasons(self._plan, lengths, options)
        found: dict[str, list[str]] = {}
        for index in np.unique(reasons[reasons >= 0]).tolist():
            some = np.flatnonzero(reasons == index)[:MAX_EXAMPLES].astype(np.int64)
            for sequence, origin in zip(some.tolist(), self._of_sequences(some), strict=True):
                where = "" if origin is None else f"{origin}: "
                shown = f"{where}{lengths[sequence]:,} tokens; at most {options.longest_item:,} fit into a bin"
                found.setdefault(str(reason_of(index)), []).append(shown)
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
    """Return the paths of the tokenizers that made a work directory's datasets, as far as it noted them."""
    noted = (_receipt(file).get("tokenizer_path") for file in sorted((work_dir / "published").glob("*.json")))
    return [path for path in dict.fromkeys(noted) if isinstance(path, str) and path]


def _store(path: Path) -> TokenStore:
    """Open a token store, or the local outline of one in an object store; lengths are enough."""
    try:
        return open_token_store(path)
    except PackedSFTError:
        return open_outlines(path)


def _receipt(file: Path) -> dict[str, Any]:
    """Return what a stage noted; empty if the receipt is missing or damaged."""
    try:
        result = json_document.parse(file.read_bytes(), str(file)).get("result")
    except (OSError, PackedSFTError):
        return {}
    return result if isinstance(result, dict) else {}
