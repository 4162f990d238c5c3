"""What a storage is: how it names, opens, writes, checks and sizes its shards.

A storage keeps packed bins on disk in one way. The rest of this package gets a `Storage` from the registry and uses
only this interface, so a new storage is one class, and an open shard is another:

    class MyStorage(Storage):
        name = "mine"
        summary = "one .mine file per shard"

        def recognises(self, path): return path.suffix == ".mine"
        def shard_name(self, number): return f"shard_{number:06d}.mine"
        def open(self, path): return MyShard(path)  # a `PackedShard`: __len__, pack_size and __getitem__ are enough
        def create_writer(self, path, options): return MyWriter(path, options)  # an `OrderedShardWriter`

Without `create_writer` a storage is read-only. A shard that defines no more than that is read bin by bin; one whose
bins lie in larger arrays replaces the methods that would be slow. tests/storage/storage_checks.py tests that a storage
keeps its promises.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, ShardError, ShardFileError
from megatron_packed_sft.storage.bins import BinBlock, GatheredBins, PackedBin, block_of, gather
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.support.atomic import StagedWriter
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, file_checksum
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.paths import redacted

if TYPE_CHECKING:
    from megatron_packed_sft.remote.downloads import Contents
    from megatron_packed_sft.storage.memmap_v1.reader import ShardArrays
    from megatron_packed_sft.storage.token_stream.options import StreamOptions
    from megatron_packed_sft.storage.validate import ValidationReport
    from megatron_packed_sft.support.progress import Progress

FIRST_READ = "first_read"
ALWAYS = "always"
NEVER = "never"
VERIFY = (FIRST_READ, ALWAYS, NEVER)

_BLOCK_BYTES = 4 << 20

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How bins are read.

    Args:
        verify: compare a bin with its checksum at the `first_read` by a process, `always` or `never`.

    Example:
        >>> ReadOptions(verify="sometimes")
        Traceback (most recent call last):
        megatron_packed_sft.errors.InvalidInputError: verify is 'sometimes'; choose from first_read, always, never
    """

    verify: str = FIRST_READ

    def __post_init__(self) -> None:
        if self.verify not in VERIFY:
            raise InvalidInputError(f"verify is {self.verify!r}; choose from {', '.join(VERIFY)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """How one shard is written.

    Args:
        num_bins: how many bins will be written; storages with files of any length also take None.
        pack_size: no bin is longer; likewise.
        vocab_size: ids must be below it; None for any id.
        pad_id: fills the arrays behind each bin, where a storage pads; recorded otherwise.
        overwrite: replace whatever is published at the target.
        provenance: `PROVENANCE_KEYS` of `figures`, kept where the storage has room for them.
        drop_masks: for storages without loss masks: accept tokens that are not trained.
    """

    num_bins: int | None = None
    pack_size: int | None = None
    vocab_size: int | None = None
    pad_id: int = 0
    overwrite: bool = False
    provenance: Mapping[str, Any] = field(default_factory=dict)
    drop_masks: bool = False


class PackedShard(abc.ABC):
    """An open shard: bins by number, as arrays that must not be written to."""

    path: Path
    warnings: Sequence[str] = ()  # about its content, to be logged when it is opened
    notes: Sequence[str] = ()

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of bins."""

    @property
    @abc.abstractmethod
    def pack_size(self) -> int:
        """No bin is longer."""

    @abc.abstractmethod
    def __getitem__(self, index: int) -> PackedBin:
        """Return bin `index`; an index outside 0..len-1 is an IndexError."""

    def __iter__(self) -> Iterator[PackedBin]:
        return (self[index] for index in range(len(self)))

    @property
    def figures(self) -> BinFigures:
        """What is known of all bins; unless a shard records it, counted over all of them."""
        return BinFigures.counted(self, self.pack_size)

    @property
    def fingerprint(self) -> str | None:
        """Identifies the content; None: only the checksum of the files does."""
        return None

    @property
    def vocab_bound(self) -> int:
        """A vocabulary that holds every id, for shards that do not record one."""
        return max(int(one.input_ids.max()) for one in self) + 1

    @property
    def num_masks_at_sequence_end(self) -> int:
        """How many sequences have a loss mask of 1 at their last token, where nothing is predicted."""
        return 0

    @property
    def num_files(self) -> int:
        """How many files it has that are read as one."""
        return 1

    def longest_input(self) -> int:
        """Return how many positions the bin that needs most takes in a batch; may read all indices."""
        return max(len(one.input_ids) - one.num_sequences for one in self)

    def sequence_lengths(self) -> tuple[Lengths, Lengths]:
        """Return the length of every sequence, and how many sequences each bin has; may read all indices."""
        found = [np.diff([*one.seq_start_id.tolist(), len(one.input_ids)]) for one in self]
        return np.concatenate(found).astype(np.int64), np.array([len(one) for one in found], np.int64)

    def blocks(self, width: int, pad_id: int) -> Iterator[BinBlock]:
        """Yield all bins in order, in padded form.

        Args:
            width, pad_id: of the padded form. A shard that stores padded arrays gives read-only views of these, with
                their own width and padding; other blocks may be written to.
        """
        for start, stop in self.block_ranges(width):
            yield block_of([self[index] for index in range(start, stop)], width, pad_id)

    def block_ranges(self, width: int) -> Iterator[tuple[int, int]]:
        """Yield (first bin, last bin + 1) of blocks of a few megabytes."""
        bins_at_once = max(1, _BLOCK_BYTES // (width * 5))
        for start in range(0, len(self), bins_at_once):
            yield start, min(start + bins_at_once, len(self))

    def gather(self, bins: Sequence[int]) -> GatheredBins:
        """Return some bins in flat arrays, for a batch."""
        return gather([self[index] for index in bins], f"bins of {self.path}")

    def mapped_bins(self) -> ShardArrays | None:
        """Return all bins with their addresses, for compiled code, if they are memory-mapped; else None."""
        return None

    def damaged_bin(self, index: int, problem: Literal["length", "sequences", "checksum"]) -> PackedSFTError:
        """Return the error for a bin that compiled code found to be damaged."""
        return ShardFileError(f"{self.path} is damaged at bin {index} ({problem}); run `packed-sft validate` on it")

    def read_with(self, options: ReadOptions) -> None:  # noqa: B027
        """Choose how bins are read from now on."""

    def advise(self, bins: Iterable[int]) -> None:  # noqa: B027
        """Have the kernel read these bins ahead: they are needed soon."""


class PackedShardWriter(StagedWriter, abc.ABC):
    """What every writer of packed bins offers: each bin exactly once, published whole or not at all.

    Bins come in the order of their numbers, unless the storage's writer takes them in any order. After `finalize`,
    `figures` holds what is known of all bins.
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
    keeps_masks: bool = True  # otherwise its readers train on every token, and dataset directories cannot use it
    keeps_weights: bool = False  # otherwise its writer refuses loss weights other than 0 and 1
    takes_any_order: bool = False  # its writer takes bins in any order
    is_flat: bool = False  # tokens end to end: cut into windows, no shard of several in a directory
    stream_options: frozenset[str] = frozenset()  # the `StreamOptions` that mean something to it

    @abc.abstractmethod
    def recognises(self, path: Path) -> bool:
        """Return whether `path` is one shard of this storage, sound or not."""

    @abc.abstractmethod
    def shard_name(self, number: int) -> str:
        """Return the file or directory name of shard `number` of a split."""

    @abc.abstractmethod
    def open(self, path: Path) -> PackedShard:
        """Open one shard."""

    def create_writer(self, path: str | os.PathLike[str], options: WriterOptions) -> PackedShardWriter:
        """Create a writer of one shard."""
        raise self._read_only()

    def refuse_read_only(self) -> None:
        """Raise an error if there is no writer, for callers that have much to do before they need one."""
        if type(self).create_writer is Storage.create_writer:
            raise self._read_only()

    def _read_only(self) -> InvalidInputError:
        return InvalidInputError(f"storage {self.name!r} is read-only; choose another one to write")

    def configured(self, options: StreamOptions) -> Storage:
        """Return this storage, reading token streams as `options` say; storages without streams ignore them."""
        return self

    def as_one_shard(self, paths: Sequence[Path]) -> tuple[Storage, Sequence[Path]]:
        """Return how to read several shards: each by itself, unless their files make one shard together."""
        return self, paths

    def describe(self, paths: Sequence[Path], shards: Sequence[PackedShard]) -> str:
        """Return what to call some open shards in messages."""
        return f"{self.count(len(paths))}, {paths[0]}{' ...' if len(paths) > 1 else ''}"

    def count(self, num_shards: int) -> str:
        """Return a number of shards in words."""
        return f"{num_shards:,} {self.name} shard{'' if num_shards == 1 else 's'}"

    def stored_bytes(self, figures: BinFigures) -> int:
        """Return about how many bytes bins with these figures take on disk, all columns included."""
        return figures.most_tokens * 5

    def recorded(self, path: Path) -> dict[str, Any]:
        """Return what is known of a shard without reading its bins, by the names of `BinFigures`."""
        if self.in_memory:
            return {}
        shard = self.open(path)
        return {"num_bins": len(shard), "pack_size": shard.pack_size}

    def checksum(self, path: Path) -> str:
        """Return what identifies the shard's content, as dataset.json records it."""
        return file_checksum(path, DEFAULT_ALGORITHM)

    def contents(self, url: str, checksum: str, num_bytes: int | None, read: Callable[[str, int], bytes]) -> Contents:
        """Return the files of a shard in an object store, with sizes and checksums, for its download.

        Args:
            url: of the shard.
            checksum, num_bytes: as dataset.json records them.
            read: returns a small file of the shard, given its name and the most bytes that it may have.
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
            shard: the same shard, if it is open already.
        """
        from megatron_packed_sft.storage.validate import validate_bins

        return validate_bins(self, path, report, bar, shard)


def lengths_of_index(
    packed_len: npt.NDArray[Any], seq_offsets: npt.NDArray[Any], seq_starts: npt.NDArray[Any], path: Path
) -> tuple[Lengths, Lengths]:
    """Return `PackedShard.sequence_lengths` of a shard by its index; an index that contradicts itself is an error."""
    offsets = seq_offsets.astype(np.int64)
    counts = np.diff(offsets)
    damaged = ShardError(f"the index of {path} is damaged; run `packed-sft validate` on it")
    if (counts < 1).any() or offsets[0] != 0 or offsets[-1] != len(seq_starts):
        raise damaged
    ends = np.append(np.asarray(seq_starts[1:], np.int64), 0)
    ends[offsets[1:] - 1] = packed_len  # a bin's last sequence ends with the bin
    lengths = ends - np.asarray(seq_starts, np.int64)
    if (lengths < 1).any():
        raise damaged
    return lengths, counts
