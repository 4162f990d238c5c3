"""A part of a token store: its mapped arrays, and the checksum of each sequence, compared when the sequence is read.

checksums.npy of a part has one checksum per sequence:

    numbers   length, XXH3 of its bytes in ids.npy, in train.npy and, in a part with weights, in weights.npy
    checksum  the lower 32 bits of the XXH3 of these numbers, each as <u8

XXH3 is XXH3-64 with seed 0. A checksum covers the content of a sequence and not its place: a wrong offset gives another
sequence, and so another checksum.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_packed_sft.errors import PackedSFTError, ShardChangedError, ShardError, ShardFileError
from megatron_packed_sft.storage.bins import NO_WEIGHTS
from megatron_packed_sft.storage.interface import ALWAYS, FIRST_READ, NEVER
from megatron_packed_sft.storage.memmap_v1.manifest import MAX_MANIFEST_BYTES
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.checked_files import CheckedDirectory
from megatron_packed_sft.support.checksum import (
    DEFAULT_ALGORITHM,
    checksum,
    file_checksum,
    hash_function,
    span_checksums,
)
from megatron_packed_sft.support.file_maps import Holder, LazyMaps
from megatron_packed_sft.support.json_document import MANIFEST
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.tokens.manifest import (
    CHECKSUM_DTYPE,
    CHECKSUMS,
    IDS,
    OFFSETS,
    TRAIN,
    WEIGHTS,
    TokenPartManifest,
    parse_part_manifest,
    part_arrays,
)

Checksums = npt.NDArray[np.uint32]
Numbers = npt.NDArray[np.int64]
Arrays = tuple[npt.NDArray[Any], npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]
KernelArguments = tuple[
    int,
    npt.NDArray[Any],
    npt.NDArray[np.uint8],
    npt.NDArray[np.float32],
    Numbers,
    Numbers,
    Checksums,
    npt.NDArray[np.uint8],
    bool,
]

_NO_CHECKSUMS = np.empty(0, CHECKSUM_DTYPE)
_NO_CHECKSUMS.flags.writeable = False  # as memory maps are; numba compiles separately for writable arrays


def checksums_of_sequences(arrays: Arrays, starts: Numbers, lengths: Numbers, *, compiled: bool = True) -> Checksums:
    """Return the checksums of sequences in flat arrays.

    Args:
        arrays: ids, train and weights of a part, as in its files.
        starts, lengths: of the sequences in these arrays.
        compiled: use compiled code, which takes a moment to load; otherwise one sequence at a time.
    """
    if not compiled:
        ids, train, weights = arrays
        spans = [slice(start, start + length) for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
        found = (checksum_of_sequence(ids[s], train[s], None if weights is None else weights[s]) for s in spans)
        return np.fromiter(found, np.uint32, len(spans))
    given = [array for array in arrays if array is not None]
    numbers = np.empty((len(starts), 1 + len(given)), "<u8")
    numbers[:, 0] = lengths
    for column, array in enumerate(given, start=1):
        numbers[:, column] = span_checksums(array.ctypes.data + starts * array.itemsize, lengths * array.itemsize)
    places = numbers.ctypes.data + np.arange(len(starts)) * numbers.strides[0]
    return span_checksums(places, np.full(len(starts), numbers.strides[0])).astype(np.uint32)


def checksum_of_sequence(
    ids: npt.NDArray[Any], train: npt.NDArray[np.uint8], weights: npt.NDArray[np.float32] | None = None
) -> int:
    """Return the checksum of one sequence without compiled code, so that a first look at a sequence is quick.

    Example:
        >>> f"{checksum_of_sequence(np.array([5, 6], '<i4'), np.array([0, 1], 'u1')):08x}"
        '926ea36b'
    """
    given = [array for array in (ids, train, weights) if array is not None]
    numbers = np.array([len(ids), *(xxhash.xxh3_64_intdigest(array.data) for array in given)], "<u8")
    return xxhash.xxh3_64_intdigest(numbers.data) & 0xFFFFFFFF


class PartArrays(NamedTuple):
    """The mapped arrays of one part, read-only."""

    ids: npt.NDArray[Any]
    train: npt.NDArray[np.uint8]
    begins: Numbers  # of the sequences, inside the arrays
    ends: Numbers
    weights: npt.NDArray[np.float32] | None  # None: every trained token counts 1
    checksums: Checksums
    verified: npt.NDArray[np.uint8]  # 1: this process has compared the sequence with its checksum
    path: Path  # of the files

    def kernel_weights(self) -> npt.NDArray[np.float32]:
        """Return the weights as kernels take them: an empty array if there are none."""
        return NO_WEIGHTS if self.weights is None else self.weights

    def for_kernels(self, verify: str) -> KernelArguments:
        """Return the first arguments of the kernels that compare sequences when `verify` asks for it."""
        function = hash_function()
        return (
            function,
            self.ids,
            self.train,
            self.kernel_weights(),
            self.begins,
            self.ends,
            self.checksums if function and verify != NEVER else _NO_CHECKSUMS,
            self.verified,
            verify == ALWAYS,
        )

    def find_unsound(self, sequences: Numbers, verify: str) -> int | None:
        """Compare sequences with their checksums where `verify` asks for it; return the first one that differs.

        Args:
            sequences: their numbers in the part; they must be inside the arrays.
            verify: one of `VERIFY`.
        """
        if verify == NEVER:
            return None
        if len(sequences) == 1:  # loading compiled code takes longer than hashing one sequence
            return self._find_unsound_of_one(int(sequences[0]), verify)
        if not hash_function():  # this build of xxhash does not export its functions
            due = sequences[(self.verified[sequences] == 0) | (verify == ALWAYS)]
            starts, lengths = self.begins[due], self.ends[due] - self.begins[due]
            wrong = checksums_of_sequences((self.ids, self.train, self.weights), starts, lengths) != self.checksums[due]
            if wrong.any():
                return int(due[wrong.argmax()])
            self.verified[sequences] = 1
            return None
        from megatron_packed_sft.tokens import gather_kernel

        place = gather_kernel.find_unsound(*self.for_kernels(verify), sequences)
        return None if place < 0 else int(sequences[place])

    def _find_unsound_of_one(self, sequence: int, verify: str) -> int | None:
        if verify == ALWAYS or not self.verified[sequence]:
            inside = slice(int(self.begins[sequence]), int(self.ends[sequence]))
            weights = None if self.weights is None else self.weights[inside]
            if checksum_of_sequence(self.ids[inside], self.train[inside], weights) != self.checksums[sequence]:
                return sequence
            self.verified[sequence] = 1
        return None


class TokenPart(LazyMaps[PartArrays]):
    """An open part: its manifest is checked, its arrays are mapped at the first read.

    Sequences are compared with their checksums when they are first read; see `ReadOptions`. For a part in an object
    store, `path` has only its manifest and offsets, and `holder` fetches all of it on the node that reads it.
    """

    verify: str = FIRST_READ  # when sequences are compared with their checksums

    def __init__(self, path: Path, manifest: TokenPartManifest, fingerprint: str) -> None:
        self.path = path
        self.manifest = manifest
        self.fingerprint = fingerprint

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TokenPart:
        """Open a part directory; nothing is mapped yet."""
        location = local_path(path)
        with CheckedDirectory.open(location) as directory:
            manifest, fingerprint = _read_manifest(directory)
            for spec in part_arrays(manifest):
                directory.array(spec, manifest.files[spec.name])
        return cls(location, manifest, fingerprint)

    @classmethod
    def outlined(cls, path: Path, holder_of: Callable[[str], Holder]) -> TokenPart:
        """Open a part of an object store, of which only manifest and offsets are on this machine.

        Args:
            path: of the local manifest and offsets.
            holder_of: takes the part's fingerprint and returns the object that fetches it.
        """
        with CheckedDirectory.open(path) as directory:
            part = cls(path, *_read_manifest(directory))
        part.holder = holder_of(part.fingerprint)
        return part

    def __len__(self) -> int:
        return self.manifest.num_sequences

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The length of every sequence, without reading or fetching a token."""
        if self.holder is None:
            return self.arrays.ends - self.arrays.begins
        spec = next(one for one in part_arrays(self.manifest) if one.name == OFFSETS)
        record = self.manifest.files[OFFSETS]
        with CheckedDirectory.open(self.path) as directory:
            offsets = directory.array(spec, record).map()
            if (
                file_checksum(self.path / OFFSETS, self.manifest.checksum_algorithm or DEFAULT_ALGORITHM)
                != record.checksum
            ):
                raise ShardError(f"{self.path / OFFSETS} is damaged; remove it and run again: it is then fetched again")
        ends: npt.NDArray[np.int64] = offsets.view(np.int64)
        return ends[1:] - ends[:-1]

    def spans(self, sequences: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (start, length) of each sequence inside the part's flat arrays; damaged ones are an error."""
        spans = self.recorded_spans(sequences)
        unsound = self.arrays.find_unsound(sequences, self.verify)
        if unsound is not None:
            raise self.damaged(unsound)
        return spans

    def recorded_spans(self, sequences: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (start, length) of each sequence by its offsets, which are checked; no token is read."""
        arrays = self.arrays
        starts, ends = arrays.begins[sequences], arrays.ends[sequences]
        bad = np.flatnonzero((starts < 0) | (ends <= starts) | (ends > len(arrays.ids)))
        if bad.size:
            raise ShardFileError(
                f"{self.path / OFFSETS} is damaged at sequence {int(sequences[bad[0]])}; {self._remedy}"
            )
        return starts, ends - starts

    @property
    def _remedy(self) -> str:
        if self.holder is not None:
            return "it is a cached copy: run `packed-sft cache clear`, and it is fetched again"
        return "restore the part from its original, or write it again"

    def damaged(self, sequence: int) -> PackedSFTError:
        """Return the error for a sequence that does not match its checksum; it names the damaged file."""
        what = f"damaged at sequence {sequence}, which does not match the checksum that was written with it"
        try:
            name = self._damaged_file()
        except PackedSFTError as error:  # a file is missing or cut, which explains more
            return error
        if name is None:
            return ShardFileError(
                f"{self.path} is {what}, but its files match their checksums: check the memory and the network storage "
                "for faults, and read again"
            )
        return ShardFileError(f"{self.path / name} is {what}; {self._remedy}")

    def _damaged_file(self) -> str | None:
        """Return the first file whose content is not what the manifest says; all of them are read."""
        folder, algorithm = self.arrays.path, self.manifest.checksum_algorithm or DEFAULT_ALGORITHM
        with os_errors("read", folder):
            # Small files first, so that damaged offsets or checksums are not reported as damaged tokens.
            for name in sorted(self.manifest.files, key=lambda name: (name not in (OFFSETS, CHECKSUMS), name)):
                if file_checksum(folder / name, algorithm) != self.manifest.files[name].checksum:
                    return name
        return None

    def _open_arrays(self, keep: object) -> PartArrays:
        path = getattr(keep, "path", self.path)
        with CheckedDirectory.open(path) as directory:
            manifest, fingerprint = _read_manifest(directory)
            if fingerprint != self.fingerprint:
                raise ShardChangedError(f"{self.path} was replaced since it was opened; open it again")
            files = {
                spec.name: directory.array(spec, manifest.files[spec.name]).map(keep) for spec in part_arrays(manifest)
            }
        if files[OFFSETS][0] != 0 or files[OFFSETS][-1] != manifest.num_tokens:
            raise ShardError(f"{self.path / OFFSETS} is damaged; {self._remedy}")
        offsets = files[OFFSETS].view(np.int64)  # one beyond 2**63 turns negative, which is refused when it is used
        verified = np.zeros(manifest.num_sequences, np.uint8)
        return PartArrays(
            files[IDS], files[TRAIN], offsets[:-1], offsets[1:], files.get(WEIGHTS), files[CHECKSUMS], verified, path
        )


def _read_manifest(directory: CheckedDirectory) -> tuple[TokenPartManifest, str]:
    data = directory.read(MANIFEST, MAX_MANIFEST_BYTES)
    return parse_part_manifest(data, str(directory.path / MANIFEST)), checksum(data)
