"""The exception tree: one class per kind of failure. Each message says what is wrong, where, and what to do.

    PackedSFTError
    ├── InvalidInputError          an argument, a setting or a record is wrong          (also a ValueError)
    │   └── StateMismatchError     a loader's state belongs to other data or another order
    ├── WriterStateError           a writer was misused: bin written twice, bin missing, write after finalize
    ├── TargetExistsError          something is already published at the target         (also a FileExistsError)
    ├── StorageIOError             the operating system refused a file operation        (also an OSError)
    │   └── NoSpaceError           the disk, the quota or the file-size limit is full
    ├── ShardError                 the data on disk is incomplete or damaged
    │   ├── ManifestError          manifest.json or dataset.json is invalid
    │   ├── ShardFileError         an array file is missing, truncated, swapped or foreign
    │   ├── ShardChangedError      the shard was replaced on disk after it was opened
    │   ├── UnsupportedFormatError a version, dtype or byte order that this release does not read
    │   └── LegacyFormatError      a legacy .npy or Parquet file that is not packed SFT data
    └── MissingDependencyError     an optional package or a plugin cannot be imported   (also an ImportError)

Catch `PackedSFTError` for all of them. On the command line, `InvalidInputError` exits with 2 and the others with 1.
"""

from __future__ import annotations

from megatron_packed_sft.support.wording import without_url_secrets


class PackedSFTError(Exception):
    """Base class of every error that this package raises on purpose. No message shows the credentials of a URL."""

    def __str__(self) -> str:
        return without_url_secrets(super().__str__())


class InvalidInputError(PackedSFTError, ValueError):
    """An argument, a setting or a record is wrong."""


class StateMismatchError(InvalidInputError):
    """A loader's state belongs to other data or another order; `differing` names the fields that differ."""

    def __init__(self, problem: str, differing: tuple[str, ...]) -> None:
        super().__init__(problem, differing)  # both, so that the error can be pickled
        self.problem = problem
        self.differing = differing

    def __str__(self) -> str:
        problem = without_url_secrets(self.problem)
        return f"{problem}, or pass allow_mismatch={self.differing} to the sampler or loader to resume anyway"


class WriterStateError(PackedSFTError):
    """A writer was misused: a bin written twice, a bin missing, or a write after `finalize`."""


class TargetExistsError(PackedSFTError, FileExistsError):
    """Something is already published at the target."""


class StorageIOError(PackedSFTError, OSError):
    """The operating system refused a file operation."""


class NoSpaceError(StorageIOError):
    """The disk, the quota or the file-size limit is full."""


class ShardError(PackedSFTError):
    """The data on disk is incomplete or damaged."""


class ManifestError(ShardError):
    """A manifest.json or dataset.json is invalid."""


class ShardFileError(ShardError):
    """An array file is missing, truncated, swapped, padded or foreign."""


class ShardChangedError(ShardError):
    """A shard was replaced on disk after it was opened."""


class UnsupportedFormatError(ShardError):
    """A format version, dtype or byte order that this release does not read."""


class LegacyFormatError(ShardError):
    """A legacy .npy or Parquet file does not hold packed SFT data."""


class MissingDependencyError(PackedSFTError, ImportError):
    """An optional package or a plugin cannot be imported."""
