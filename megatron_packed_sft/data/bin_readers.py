"""Where rows come from, behind one interface: shards, legacy files, or a token store with a plan.

ShardBinReader    memmap_v1 shards, one or thousands, opened when their rows are first needed
LegacyBinReader   one legacy .npy
PlanBinReader     token store + plan: rows are put together when they are asked for, no shards needed
JoinedBinReader   several of these end to end
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.batch.located_bins import LocatedBins, locate_in_arrays, locate_in_shard
from megatron_packed_sft.disk.checksum import checksum, new_hasher
from megatron_packed_sft.errors import InvalidInputError, ShardError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.storage.dataset_directory import EXTREMES, DatasetDirectory, summarize
from megatron_packed_sft.storage.legacy.reader import LegacyShard
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard, open_memmap_shard
from megatron_packed_sft.tokens.materialize import plan_block, stored_width
from megatron_packed_sft.tokens.store import TokenStore

Rows = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class BinFigures:
    """What is known of all rows of a source before any is read; None where nobody recorded it."""

    pack_size: int
    max_seqs_per_bin: int | None = None
    max_seq_len: int | None = None
    min_packed_len: int | None = None
    pad_seq_to_mult: int | None = None
    num_tokens: int | None = None
    num_sequences: int | None = None
    tokenizer: Mapping[str, Any] | None = None
    chat_template_fingerprint: str | None = None


class BinReader(Protocol):
    """Packed rows by number. Every storage that datasets can read offers this."""

    @property
    def fingerprint(self) -> str:
        """Identifies the content."""

    @property
    def figures(self) -> BinFigures:
        """What is known of all rows."""

    @property
    def description(self) -> str:
        """For logs and messages: what it is and where."""

    def __len__(self) -> int:
        """Number of rows."""

    def row(self, index: int) -> PackedBin:
        """One row; 0 <= index < len."""

    def pieces(self, rows: Rows, positions: Rows, is_padding: Flags) -> list[LocatedBins]:
        """Rows for the collate kernel, with their places in the batch."""

    def advise(self, rows: Rows) -> None:
        """These rows are needed soon."""


class ShardReference(NamedTuple):
    """A shard that may not be open yet; what is known of it must hold when it is opened."""

    path: Path
    num_bins: int
    fingerprint: str


@dataclass(eq=False)
class ShardBinReader:
    """Rows of memmap_v1 shards, end to end. A shard is opened when one of its rows is needed.

    Example:
        >>> ShardBinReader.of_shards([open_memmap_shard("shard_000000")])  # doctest: +SKIP
    """

    references: Sequence[ShardReference]
    figures: BinFigures
    description: str
    _open: dict[int, MemmapShard] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._first_row = np.cumsum([0, *(reference.num_bins for reference in self.references)])
        self._first_row_list: list[int] = self._first_row.tolist()

    @classmethod
    def of_shards(cls, shards: Sequence[MemmapShard]) -> ShardBinReader:
        """Over shards that are open already; they must be made with the same tokenizer and template."""
        manifests = [shard.manifest for shard in shards]
        for name in ("tokenizer", "chat_template_fingerprint"):
            for shard, manifest in zip(shards, manifests, strict=True):
                if getattr(manifest, name) != getattr(manifests[0], name):
                    raise InvalidInputError(
                        f"{shard.path} was made with another {name} than {shards[0].path}; open them as separate "
                        "datasets, or prepare them again with one"
                    )
        figures = summarize(manifests)
        return cls(
            [ShardReference(shard.path, len(shard), shard.fingerprint) for shard in shards],
            BinFigures(
                **{name: figures[name] for name in (*EXTREMES, "num_tokens", "num_sequences") if name in figures},
                tokenizer=manifests[0].tokenizer,
                chat_template_fingerprint=manifests[0].chat_template_fingerprint,
            ),
            f"{_shards(len(shards))}, {shards[0].path}{' ...' if len(shards) > 1 else ''}",
            dict(enumerate(shards)),
        )

    @classmethod
    def of_dataset(cls, dataset: DatasetDirectory, split: str) -> ShardBinReader:
        """Over a split of a dataset directory; only dataset.json is read now."""
        entries, figures = dataset.entries(split), dataset.figures[split]
        names = (*EXTREMES, "num_tokens", "num_sequences", "tokenizer", "chat_template_fingerprint")
        if "pack_size" not in figures:
            return cls.of_shards(dataset.open_shards(split))
        return cls(
            [
                ShardReference(dataset.shard_path(split, entry), entry.num_bins, entry.manifest_checksum)
                for entry in entries
            ],
            BinFigures(**{name: figures[name] for name in names if name in figures}),
            f"split {split!r} of {dataset.path}, {_shards(len(entries))}",
        )

    @property
    def fingerprint(self) -> str:
        """Of all shards, in order."""
        return checksum("".join(reference.fingerprint for reference in self.references).encode())

    def __len__(self) -> int:
        return int(self._first_row[-1])

    def shard(self, number: int) -> MemmapShard:
        """Shard `number`, opened now if it was not."""
        shard = self._open.get(number)
        if shard is None:
            reference = self.references[number]
            shard = open_memmap_shard(reference.path)
            if shard.fingerprint != reference.fingerprint or len(shard) != reference.num_bins:
                raise ShardError(
                    f"{reference.path} is not the shard that its dataset.json lists; it was swapped or written again, "
                    "so restore it or publish the dataset again"
                )
            self._open[number] = shard
        return shard

    def row(self, index: int) -> PackedBin:
        """One row, as read-only views."""
        number = int(np.searchsorted(self._first_row, index, side="right")) - 1
        return self.shard(number).bin(index - int(self._first_row[number]))

    def pieces(self, rows: Rows, positions: Rows, is_padding: Flags) -> list[LocatedBins]:
        """One piece per shard that holds some of the rows."""
        return [
            locate_in_shard(self.shard(number), inside, positions[chosen], is_padding[chosen])
            for number, chosen, inside in self._by_shard(rows)
        ]

    def advise(self, rows: Rows) -> None:
        """Have the kernel read the rows ahead."""
        for number, _, inside in self._by_shard(rows):
            self.shard(number).advise(inside.tolist())

    def _by_shard(self, rows: Rows) -> list[tuple[int, list[int], Rows]]:
        # In Python: for the few rows of a batch that takes a tenth of the time of np.unique and masks.
        places: dict[int, list[int]] = {}
        for place, row in enumerate(rows.tolist()):
            places.setdefault(bisect.bisect_right(self._first_row_list, row) - 1, []).append(place)
        return [(number, chosen, rows[chosen] - self._first_row[number]) for number, chosen in places.items()]


class LegacyBinReader:
    """Rows of one legacy .npy, which is held in memory whole.

    Example:
        >>> LegacyBinReader("training_4096.npy").figures.pack_size  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._shard = LegacyShard(path)
        flat = self._shard.flat
        lengths = np.diff(flat.bin_offsets)
        ends = np.append(flat.seq_starts[1:].astype(np.int64), 0)
        ends[flat.seq_offsets[1:] - 1] = lengths  # a row's last sequence ends with the row
        self.figures = BinFigures(
            pack_size=self._shard.pack_size,
            max_seqs_per_bin=int(np.diff(flat.seq_offsets).max()),
            max_seq_len=int((ends - flat.seq_starts).max()),
            min_packed_len=int(lengths.min()),
            num_tokens=self._shard.num_tokens,
            num_sequences=self._shard.num_sequences,
        )
        self.description = f"legacy {self._shard.path}"
        hasher = new_hasher("xxh3_128")
        for array in flat[:5]:
            hasher.update(np.ascontiguousarray(array).view(np.uint8).data)
        self.fingerprint = hasher.hexdigest()

    def __len__(self) -> int:
        return len(self._shard)

    def row(self, index: int) -> PackedBin:
        """One row, as read-only views."""
        return self._shard[index]

    def pieces(self, rows: Rows, positions: Rows, is_padding: Flags) -> list[LocatedBins]:
        """All rows as one piece."""
        flat = self._shard.flat
        return [
            locate_in_arrays(
                flat.input_ids,
                flat.loss_mask,
                flat.bin_offsets,
                flat.seq_starts,
                flat.seq_offsets,
                rows,
                positions,
                is_padding,
                str(self._shard.path),
            )
        ]

    def advise(self, rows: Rows) -> None:
        """Nothing to do: everything is in memory."""


class PlanBinReader:
    """Rows of a plan, put together from the token store when they are asked for; any pack size, no shards.

    Example:
        >>> PlanBinReader(open_token_store("store"), PackPlan.load("plan.npz"))  # doctest: +SKIP
    """

    def __init__(self, store: TokenStore, plan: PackPlan, pad_id: int = 0) -> None:
        self._store = store
        self._plan = plan
        self._pad_id = pad_id
        self._bins = plan.bin_order.astype(np.int64)
        self._width = stored_width(plan)
        counts = np.diff(plan.bin_offsets)
        self.figures = BinFigures(
            pack_size=self._width,
            max_seqs_per_bin=int(counts.max()),
            max_seq_len=int(plan.item_lengths[plan.indices].max()),
            min_packed_len=int(plan.bin_tokens.min()),
            pad_seq_to_mult=plan.pad_seq_to_mult,
            num_tokens=int(plan.bin_tokens.sum()),
            num_sequences=len(plan.indices),
            tokenizer=store.manifest.tokenizer,
            chat_template_fingerprint=store.manifest.chat_template_fingerprint,
        )
        self.description = f"token store {store.path} with {plan!r}"
        self.fingerprint = checksum((store.fingerprint + plan.order_fingerprint).encode())

    def __len__(self) -> int:
        return len(self._bins)

    def row(self, index: int) -> PackedBin:
        """One row, in arrays of its own."""
        return plan_block(self._plan, self._store, self._bins[[index]], self._width, self._pad_id)[0]

    def pieces(self, rows: Rows, positions: Rows, is_padding: Flags) -> list[LocatedBins]:
        """The rows as one piece, put together now."""
        block = plan_block(self._plan, self._store, self._bins[rows], self._width, self._pad_id)
        starts = np.arange(len(rows) + 1) * self._width
        piece = locate_in_arrays(
            block.input_ids.reshape(-1),
            block.loss_mask.reshape(-1),
            starts,
            block.seq_starts,
            block.seq_offsets.astype(np.int64),
            np.arange(len(rows)),
            positions,
            is_padding,
            self.description,
        )
        piece.lengths[:] = block.packed_len
        return [piece]

    def advise(self, rows: Rows) -> None:
        """Nothing is announced: sequences lie all over the store."""


class JoinedBinReader:
    """Several sources end to end.

    Example:
        >>> JoinedBinReader([LegacyBinReader("a.npy"), LegacyBinReader("b.npy")])  # doctest: +SKIP
    """

    def __init__(self, sources: Sequence[BinReader]) -> None:
        self.sources = tuple(sources)
        self._first_row = np.cumsum([0, *(len(source) for source in sources)])
        self.fingerprint = checksum("".join(source.fingerprint for source in sources).encode())
        self.description = "; ".join(source.description for source in sources)
        figures = [source.figures for source in sources]

        def over(name: str, reduce: Any) -> Any:
            values = [getattr(figure, name) for figure in figures]
            return None if None in values else reduce(values)

        self.figures = BinFigures(
            **{name: over(name, reduce) for name, reduce in EXTREMES.items()},
            num_tokens=over("num_tokens", sum),
            num_sequences=over("num_sequences", sum),
            tokenizer=over("tokenizer", lambda found: found[0] if all(one == found[0] for one in found) else None),
            chat_template_fingerprint=over(
                "chat_template_fingerprint", lambda found: found[0] if len(set(found)) == 1 else None
            ),
        )

    def __len__(self) -> int:
        return int(self._first_row[-1])

    def row(self, index: int) -> PackedBin:
        """One row of the source it lies in."""
        number = int(np.searchsorted(self._first_row, index, side="right")) - 1
        return self.sources[number].row(index - int(self._first_row[number]))

    def pieces(self, rows: Rows, positions: Rows, is_padding: Flags) -> list[LocatedBins]:
        """The pieces of all sources that hold some of the rows."""
        numbers = np.searchsorted(self._first_row, rows, side="right") - 1
        found: list[LocatedBins] = []
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            inside = rows[chosen] - self._first_row[number]
            found += self.sources[number].pieces(inside, positions[chosen], is_padding[chosen])
        return found

    def advise(self, rows: Rows) -> None:
        """Pass it on to the sources."""
        numbers = np.searchsorted(self._first_row, rows, side="right") - 1
        for number in np.unique(numbers).tolist():
            self.sources[number].advise(rows[numbers == number] - self._first_row[number])


def _shards(count: int) -> str:
    return f"{count:,} memmap_v1 shard{'' if count == 1 else 's'}"
