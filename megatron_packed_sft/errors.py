"""The exception tree: one class per kind of fault; each message says what is wrong, where, and what to do.

    PackedSFTError
    ├── InvalidInputError      an argument or a row handed to us is wrong        (also a ValueError)
    │   └── StateMismatchError     a loader's state is from other data or another order
    ├── WriterStateError       a writer was used out of turn: bin twice, bin missing, written after the end
    ├── TargetExistsError      something is already published under that name    (also a FileExistsError)
    ├── StorageIOError         the operating system said no                      (also an OSError)
    │   └── NoSpaceError       no space, quota or file-size limit left
    ├── ShardError             what is on disk is not a whole, sound shard
    │   ├── ManifestError          manifest.json or dataset.json
    │   ├── ShardFileError         an array file: missing, cut, swapped, foreign
    │   ├── ShardChangedError      replaced on disk since it was opened
    │   ├── UnsupportedFormatError a version, dtype or byte order this release does not read
    │   └── LegacyFormatError      a legacy .npy or Parquet file that is not packed SFT data
    └── MissingDependencyError an optional package is not installed              (also an ImportError)

Catch `PackedSFTError` for all of them.
"""

from __future__ import annotations


class PackedSFTError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidInputError(PackedSFTError, ValueError):
    """An argument, or a row of data handed to us, is wrong."""


class StateMismatchError(InvalidInputError):
    """A loader's state is from other data or another order: `problem` says so, `differing` names the fields."""

    def __init__(self, problem: str, differing: tuple[str, ...]) -> None:
        super().__init__(problem, differing)  # both, so that it can be pickled
        self.problem = problem
        self.differing = differing

    def __str__(self) -> str:
        return f"{self.problem}, or pass allow_mismatch={self.differing} to the sampler or loader to go on anyway"


class WriterStateError(PackedSFTError):
    """A writer was used out of turn: a bin twice, a bin missing, a write after the end."""


class TargetExistsError(PackedSFTError, FileExistsError):
    """Something is already published under the target's name."""


class StorageIOError(PackedSFTError, OSError):
    """The operating system refused a file operation."""


class NoSpaceError(StorageIOError):
    """The disk, the quota or the file-size limit is exhausted."""


class ShardError(PackedSFTError):
    """What is on disk is not a whole, sound shard."""


class ManifestError(ShardError):
    """A manifest.json or dataset.json that cannot be trusted."""


class ShardFileError(ShardError):
    """An array file that is missing, cut, swapped, padded or foreign."""


class ShardChangedError(ShardError):
    """A shard was replaced on disk after it had been opened."""


class UnsupportedFormatError(ShardError):
    """A format version, dtype or byte order that this release does not read."""


class LegacyFormatError(ShardError):
    """A legacy .npy or Parquet file that does not hold packed SFT data."""


class MissingDependencyError(PackedSFTError, ImportError):
    """An optional package is not installed."""
