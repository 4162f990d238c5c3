"""What a storage is: how it names, opens, writes, checks and sizes its shards.

A storage keeps packed bins on disk in one way. Everything else in this package asks the registry for a `Storage` and
works through this interface, so a new storage is one class:

    class MyStorage(Storage):
        name = "mine"
        summary = "one .mine file per shard"

        def recognises(self, path): return path.suffix == ".mine"
        def shard_name(self, number): return f"shard_{number:06d}.mine"
        def open(self, path): return MyShard(path)  # __len__, pack_size and __getitem__ are enough
        def create_writer(self, path, **options): return MyWriter(path, **options)  # an `OrderedShardWriter`

Without `create_writer` a storage is read-only. Bins are read one by one, unless the shard is a `MemmapShard` or a
`FlatShard`, whose arrays are read directly. `storage.testing` checks that a storage keeps its promises.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.bins import BinBlock, BinFigures, PackedBin
from megatron_packed_sft.support.atomic import StagedWriter
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, file_checksum
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.paths import redacted

if TYPE_CHECKING:
    from megatron_packed_sft.remote.downloads import Contents
    from megatron_packed_sft.storage.validate import ValidationReport
    from megatron_packed_sft.support.progress import Progress


class PackedShard(Protocol):
    """What every open shard offers: its length and its bins, as arrays that must not be written to."""

    def __len__(self) -> int:
        """Return the number of bins."""
        ...

    @property
    def pack_size(self) -> int:
        """No bin is longer."""
        ...

    def __getitem__(self, index: int) -> PackedBin:
        """Return bin `index`; an index outside 0..len-1 is an IndexError."""
        ...

    def __iter__(self) -> Iterator[PackedBin]:
        """Iterate over all bins in order."""
        ...


class PackedShardWriter(StagedWriter, abc.ABC):
    """What every writer of packed bins offers: bins in any order, each exactly once, published whole or not at all.

    After `finalize`, `figures` holds what is known of all bins.
    """

    figures: BinFigures | None = None

    @abc.abstractmethod
    def write_bin(self, bin_id: int, input_ids: Any, loss_mask: Any, seq_start_id: Any) -> None:
        """Write one bin; a loss mask of floats is one of weights."""

    def write_block(self, first_bin: int, block: BinBlock) -> None:
        """Write consecutive bins in padded form."""
        for index in range(len(block)):
            self.write_bin(first_bin + index, *block[index])

    @abc.abstractmethod
    def finalize(self) -> Any:
        """Check that all bins are there, and publish."""


class Storage(abc.ABC):
    """One way to keep packed bins on disk."""

    name: str
    aliases: tuple[str, ...] = ()
    summary: str = ""  # one line, for help texts
    in_memory: bool = False  # opening reads the whole shard
    one_shard_per_split: bool = False  # its consumers take one file and not several
    has_manifest: bool = False  # its shards record their own sizes, checksums, vocabulary and padding id
    keeps_masks: bool = True  # otherwise its readers train on every token, and it makes no dataset directories
    keeps_weights: bool = False  # a loss mask of floats comes back as it was; otherwise its writer refuses one

    @abc.abstractmethod
    def recognises(self, path: Path) -> bool:
        """Return whether `path` is one shard of this storage, sound or not."""

    @abc.abstractmethod
    def shard_name(self, number: int) -> str:
        """Return the file or directory name of shard `number` of a split."""

    @abc.abstractmethod
    def open(self, path: Path) -> PackedShard:
        """Open one shard."""

    def create_writer(
        self,
        path: str | os.PathLike[str],
        *,
        num_bins: int,
        pack_size: int,
        vocab_size: int | None = None,
        pad_id: int = 0,
        overwrite: bool = False,
        provenance: Mapping[str, Any] | None = None,
    ) -> PackedShardWriter:
        """Create a writer of one shard; `provenance` are `PROVENANCE_KEYS` of `bins`, to keep where there is room."""
        raise self._read_only()

    def refuse_read_only(self) -> None:
        """Refuse to be written to, if there is no writer: for callers who have much to do before they need one."""
        if type(self).create_writer is Storage.create_writer:
            raise self._read_only()

    def _read_only(self) -> InvalidInputError:
        return InvalidInputError(f"storage {self.name!r} is read-only; choose another one to write")

    def stored_bytes(self, *, num_bins: int, width: int, num_tokens: int, vocab_size: int | None) -> int:
        """Return about how many bytes bins take on disk."""
        return num_tokens * 5

    def is_outdated(self, shard: PackedShard) -> bool:
        """Return whether an open shard lacks something that its writer would write now."""
        return False

    def figures(self, shard: PackedShard) -> BinFigures:
        """Return what is known of all bins of an open shard."""
        return BinFigures.of(shard)

    def recorded(self, path: Path) -> dict[str, Any]:
        """Return what is known of a shard without reading its bins, by the names of `BinFigures`."""
        if self.in_memory:
            return {}
        shard = self.open(path)
        if isinstance(getattr(shard, "figures", None), BinFigures):
            return vars(self.figures(shard)).copy()
        return {"num_bins": len(shard), "pack_size": shard.pack_size}

    def checksum(self, path: Path) -> str:
        """Return what identifies the shard's content, as dataset.json records it."""
        return file_checksum(path, DEFAULT_ALGORITHM)

    def contents(self, url: str, checksum: str, num_bytes: int | None, read: Callable[[str, int], bytes]) -> Contents:
        """Return the files of a shard that lies in an object store, with sizes and checksums, for its download.

        Args:
            url: of the shard.
            checksum, num_bytes: as dataset.json records them.
            read: returns a small file of the shard, by its name and the most bytes that it may have.
        """
        from megatron_packed_sft.remote.downloads import Contents

        if self.has_manifest or num_bytes is None:
            raise InvalidInputError(f"{redacted(url)}: {self.name} cannot be read from a URL; copy it to a local disk")
        return Contents({"": FileRecord(num_bytes, checksum)}, DEFAULT_ALGORITHM)

    def sidecars(self, figures: BinFigures) -> Mapping[str, bytes]:
        """Return the small files that consumers of this storage expect beside the shards of a split."""
        return {}

    def validate(
        self, path: Path, report: ValidationReport, bar: Progress, shard: PackedShard | None = None
    ) -> BinFigures | None:
        """Check one shard; add findings to `report`, and return its figures unless it cannot be opened.

        Args:
            path: the shard.
            report: takes the findings and the counts.
            bar: shows the bytes read.
            shard: the same shard, if it is open already, so that it need not be read twice.
        """
        from megatron_packed_sft.storage.validate import validate_bins

        return validate_bins(self, path, report, bar, shard)
