"""Read a token store: many parts as one list of sequences, by random access through memory maps."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, ShardChangedError, ShardError, ShardFileError
from megatron_packed_sft.storage.interface import FIRST_READ, ReadOptions
from megatron_packed_sft.storage.memmap_v1.manifest import CREATED_BY, MAX_MANIFEST_BYTES
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.atomic import os_errors, replace_file
from megatron_packed_sft.support.checked_files import CheckedDirectory
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, checksum, file_checksum
from megatron_packed_sft.support.file_maps import Holder, LazyMaps
from megatron_packed_sft.support.json_document import MANIFEST
from megatron_packed_sft.support.paths import is_url, local_path
from megatron_packed_sft.support.wording import plural
from megatron_packed_sft.tokens.manifest import (
    CHECKSUMS,
    IDS,
    OFFSETS,
    TRAIN,
    WEIGHTS,
    TokenPartManifest,
    parse_part_manifest,
    part_arrays,
)
from megatron_packed_sft.tokens.open_arrays import PartArrays
from megatron_packed_sft.tokens.store_index import MAX_STORE_BYTES, PART_NAME, STORE, STORE_FORMAT, parse_store


class TokenPart(LazyMaps[PartArrays]):
    """An open part: its manifest is checked, its arrays are mapped at the first read.

    Sequences are compared with their checksums when they are first read; see `ReadOptions`. Of a part in an object
    store, `path` is a directory with its manifest and offsets only, and `holder` fetches all of it, on whatever node it
    is read.
    """

    has_copies: bool | None = None  # whether neighbours are equal, where somebody has looked
    verify: str = FIRST_READ  # when sequences are compared with their checksums
    is_sketch: bool = False  # its files have holes, which are filled as they are read

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
        """Open a part of an object store, of which only manifest and offsets are here.

        Args:
            path: where they are.
            holder_of: returns what fetches the part with a fingerprint.
        """
        with CheckedDirectory.open(path) as directory:
            part = cls(path, *_read_manifest(directory))
        part.holder = holder_of(part.fingerprint)
        return part

    def __len__(self) -> int:
        return self.manifest.num_sequences

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The length of every sequence, read without touching, or fetching, a token."""
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
                raise ShardError(f"{self.path / OFFSETS} is damaged; remove it, and it is fetched again")
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
        """Return (start, length) as the offsets have them; impossible ones are an error, and no token is looked at."""
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
            return "it is a copy of an object store's: fetch it again after `packed-sft cache clear`"
        return "restore the part from its original, or write it again"

    def damaged(self, sequence: int) -> PackedSFTError:
        """Return the error for a sequence that does not match its checksum: it names the file that was damaged."""
        what = f"damaged at sequence {sequence}, which does not match the checksum that was written with it"
        if self.is_sketch:
            return ShardFileError(f"{self.path} is {what}; run `packed-sft validate` on it")
        try:
            name = self._damaged_file()
        except PackedSFTError as error:  # a file is gone or cut: that is the news
            return error
        if name is None:
            return ShardFileError(
                f"{self.path} is {what}, but its files match theirs: look for a fault of the memory or of the network "
                "storage, and read again"
            )
        return ShardFileError(f"{self.path / name} is {what}; {self._remedy}")

    def _damaged_file(self) -> str | None:
        """Return the first file whose content is not what the manifest says; all of them are read."""
        folder, algorithm = self.arrays.path, self.manifest.checksum_algorithm or DEFAULT_ALGORITHM
        with os_errors("read", folder):
            # What is small first: a damaged offset or checksum is told from damaged tokens.
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
        verified = np.zeros(manifest.num_sequences if manifest.has_checksums else 0, np.uint8)
        offsets = files[OFFSETS].view(np.int64)  # beyond 2**63 one would be negative, which is refused when it is used
        optional = files.get(WEIGHTS), files.get(CHECKSUMS)
        return PartArrays(files[IDS], files[TRAIN], offsets[:-1], offsets[1:], *optional, verified, path)


class TokenStore:
    """All parts as one list of sequences; `store[i]` is (input_ids, train)."""

    def __init__(self, path: Path, parts: Sequence[TokenPart]) -> None:
        first = parts[0].manifest
        for part in parts:
            for name in ("dtype", "vocab_size", "tokenizer", "chat_template_fingerprint"):
                if getattr(part.manifest, name) != getattr(first, name):
                    raise ShardError(
                        f"{part.path}: its {name} is {getattr(part.manifest, name)!r}, that of {parts[0].path} is "
                        f"{getattr(first, name)!r}; the parts of one store must agree; write the store again"
                    )
        self.path = path
        self.parts = tuple(parts)
        self._first_sequence = np.cumsum([0, *(len(part) for part in parts)])

    def __len__(self) -> int:
        return int(self._first_sequence[-1])

    @property
    def manifest(self) -> TokenPartManifest:
        """The first part's manifest; dtype, vocabulary, tokenizer and template are the same in all parts."""
        return self.parts[0].manifest

    @property
    def num_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(part.manifest.num_tokens for part in self.parts)

    @functools.cached_property
    def has_weights(self) -> bool:
        """Whether a trained token of some part counts other than 1."""
        return any(part.manifest.has_weights for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """Identifies the content of all parts, in order."""
        return checksum("".join(part.fingerprint for part in self.parts).encode())

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The length of every sequence, read without touching a token."""
        return np.concatenate([part.lengths for part in self.parts])

    @property
    def verification_note(self) -> str | None:
        """What to say of a store whose sequences cannot be verified as they are read; None if all can."""
        older = [part.manifest for part in self.parts if not part.manifest.has_checksums]
        if not older:
            return None
        some = "" if len(older) == len(self.parts) else f"{plural(len(older), 'part')} of {len(self.parts)}: "
        return (
            f"{some}format {older[0].version} without checksums of sequences, so sequences are not verified as they "
            "are read; `packed-sft prepare` writes token stores that have them"
        )

    def read_with(self, options: ReadOptions) -> None:
        """Choose when sequences are compared with their checksums from now on; all parts are mapped in any case."""
        for part in self.parts:
            part.verify = options.verify

    @property
    def is_remote(self) -> bool:
        """Whether its tokens are in an object store."""
        return any(part.holder is not None for part in self.parts)

    def copies(self) -> npt.NDArray[np.int64] | None:
        """Return one number per sequence, the same for neighbours of the same tokens and weights; None when all differ.

        Weights above 1 store the copies of a sequence next to each other. `pack(copies_of=...)` takes the result.
        """
        return self.numbered(map(copies_of_part, self.parts))

    def numbered(self, copies: Iterable[npt.NDArray[np.int64] | None]) -> npt.NDArray[np.int64] | None:
        """Join what `copies_of_part` found in each part."""
        numbers = np.arange(len(self))
        found = False
        for first, part, inside in zip(self._first_sequence[:-1].tolist(), self.parts, copies, strict=True):
            if inside is not None:
                numbers[first : first + len(part)] = first + inside
                found = True
        return numbers if found else None

    def __getitem__(self, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
        """Return (input_ids, train) of one sequence, as read-only views."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path}: sequence {index} of {len(self)}")
        number = int(np.searchsorted(self._first_sequence, index, side="right")) - 1
        arrays = self.parts[number].arrays
        [start], [length] = self.parts[number].spans(np.array([index - int(self._first_sequence[number])]))
        return arrays.ids[start : start + length], arrays.train[start : start + length]

    def weighted(self, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """Return (input_ids, weights) of one sequence: how much the loss of each token counts, 0 if untrained."""
        ids, train = self[index]
        number = int(np.searchsorted(self._first_sequence, index, side="right")) - 1
        arrays = self.parts[number].arrays
        if arrays.weights is None:
            return ids, train.astype(np.float32)
        [start], [length] = self.parts[number].spans(np.array([index - int(self._first_sequence[number])]))
        return ids, np.where(train > 0, arrays.weights[start : start + length], np.float32(0))

    def by_part(
        self, sequences: npt.NDArray[np.int64]
    ) -> list[tuple[TokenPart, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Return (part, positions in `sequences`, sequence numbers inside the part) for every part that holds some."""
        if len(sequences) and not 0 <= int(sequences.min()) <= int(sequences.max()) < len(self):
            raise InvalidInputError(f"{self.path}: sequences must be in 0..{len(self) - 1}")
        numbers = np.searchsorted(self._first_sequence, sequences, side="right") - 1
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange(len(self.parts) + 1))
        groups = []
        for number, part in enumerate(self.parts):
            positions = order[bounds[number] : bounds[number + 1]]
            if len(positions):
                groups.append((part, positions, sequences[positions] - self._first_sequence[number]))
        return groups


def copies_of_part(part: TokenPart) -> npt.NDArray[np.int64] | None:
    """Return, for each sequence of a part, the first of the neighbours that equal it; None when all differ."""
    from megatron_packed_sft.tokens import gather_kernel

    part.spans(np.arange(len(part)))  # refuses damage, which compiled code would follow
    arrays = part.arrays
    numbers = np.empty(len(part), np.int64)
    begins, ends = arrays.begins, arrays.ends
    found = gather_kernel.number_copies(arrays.ids, arrays.train, arrays.kernel_weights(), begins, ends, numbers)
    return numbers if found else None


def open_token_store(path: str | os.PathLike[str]) -> TokenStore:
    """Open a token store, or a single part of one.

    Args:
        path: of the store, or its URL: then it is fetched whole into the cache of the node.
    """
    if is_url(path):
        from megatron_packed_sft.tokens.remote_store import fetch_store

        path = fetch_store(os.fspath(path))
    location = local_path(path)
    if (location / MANIFEST).exists():
        return TokenStore(location, [TokenPart.open(location)])
    with CheckedDirectory.open(location) as directory:
        data = directory.read(STORE, MAX_STORE_BYTES)
    file = str(location / STORE)
    parts = []
    for listed in parse_store(data, file):
        part = TokenPart.open(location / listed.name)
        if part.fingerprint != listed.manifest_checksum:
            raise ShardError(f"{part.path} is not the part that {file} lists; it was swapped or written again")
        parts.append(part)
    return TokenStore(location, parts)


def publish_store(path: str | os.PathLike[str]) -> TokenStore:
    """List the parts of a directory in its store.json, and open the store.

    Many processes publish parts one by one; this call comes last, so a store that opens is complete. An existing
    store.json is replaced in one step.
    """
    location = local_path(path)
    with os_errors("list", location):
        names = [entry.name for entry in os.scandir(location) if PART_NAME.fullmatch(entry.name)]
    names.sort(key=lambda name: (len(name), name))  # by number
    if not names:
        raise InvalidInputError(f"{location} holds no part_NNNNNN; write at least one part first")
    store = TokenStore(location, [TokenPart.open(location / name) for name in names])
    write_index(store)
    return store


def write_index(store: TokenStore) -> None:
    """Write the store.json of a store, whose parts are all there, in one step."""
    document = {
        "format": STORE_FORMAT,
        "version": "1.0",
        "parts": [
            {"name": part.path.name, "manifest_checksum": part.fingerprint, "num_sequences": len(part)}
            for part in store.parts
        ],
        "num_sequences": len(store),
        "num_tokens": store.num_tokens,
        "created_by": CREATED_BY,
    }
    replace_file(store.path / STORE, json_document.render(document))


def _read_manifest(directory: CheckedDirectory) -> tuple[TokenPartManifest, str]:
    data = directory.read(MANIFEST, MAX_MANIFEST_BYTES)
    return parse_part_manifest(data, str(directory.path / MANIFEST)), checksum(data)
