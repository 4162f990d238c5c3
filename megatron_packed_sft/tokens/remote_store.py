"""Token stores in object stores: whole ones, single parts, and the sequences of some bins.

`fetch_store` copies a whole store into the node's cache, each file checked on arrival. `RemotePart` fetches one part
into the cache of the node that reads it. `GatheredSequences` copies the sequences of some bins, part by part, into one
local part: bins are shuffled, so the bins of a shard need a few sequences of every part. Parts are held in the cache
one after the other, once for several shards, so the cache may be smaller than the store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, ShardError, ShardFileError
from megatron_packed_sft.remote.copies import kept_copy
from megatron_packed_sft.remote.downloads import Contents
from megatron_packed_sft.remote.filesystem import child
from megatron_packed_sft.remote.node_cache import CacheItem, Hold, NodeCache, node_cache
from megatron_packed_sft.remote.objects import object_info, read_object
from megatron_packed_sft.storage.interface import FIRST_READ
from megatron_packed_sft.storage.memmap_v1.manifest import MAX_MANIFEST_BYTES
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.checked_files import CheckedDirectory
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, checksum
from megatron_packed_sft.support.json_document import MANIFEST, FileRecord
from megatron_packed_sft.support.paths import redacted
from megatron_packed_sft.tokens.manifest import (
    CHECKSUM_DTYPE,
    MAX_STORE_BYTES,
    OFFSETS,
    STORE,
    ListedPart,
    TokenPartManifest,
    parse_part_manifest,
    parse_store,
)
from megatron_packed_sft.tokens.part import PartArrays, TokenPart
from megatron_packed_sft.tokens.store import TokenStore

_NUM_AHEAD = 4  # parts that are fetched while one is read
_COPIED_AT_ONCE = 4 << 20  # tokens; bounds the memory of copying


@dataclass(frozen=True)
class RemotePart:
    """Fetches a part into the cache of the node it is used on; it can be pickled.

    Args:
        url: of the part.
        fingerprint: of its manifest.
        group: the URL of the work directory, for `packed-sft cache status`.
    """

    url: str
    fingerprint: str
    group: str

    @property
    def item(self) -> CacheItem:
        """The part as an item of the cache."""
        return CacheItem(self.url, self.fingerprint, self._contents, self.group)

    def hold(self) -> Hold:
        """Fetch the part if it is not cached, and keep it cached while the returned object lives."""
        try:
            return node_cache().hold(self.item)
        except ShardFileError as error:
            problem = str(error).partition("; ")[0]
            raise ShardError(
                f"{problem}; remove {redacted(self.url)} and run again: its slice is then encoded again"
            ) from error

    def adopt(self, part: TokenPart) -> bool:
        """Move a part that was just uploaded into the cache, so that this node need not fetch it."""
        return node_cache().adopt(self.item, part.path)

    def _contents(self) -> Contents:
        data = read_object(child(self.url, MANIFEST), MAX_MANIFEST_BYTES)
        if checksum(data) != self.fingerprint:
            raise ShardFileError(
                f"{redacted(self.url)} is not the part that its receipt names; run packed-sft prepare again"
            )
        manifest = parse_part_manifest(data, redacted(child(self.url, MANIFEST)))
        files = {**manifest.files, MANIFEST: FileRecord(len(data), "")}
        return Contents(files, manifest.checksum_algorithm or DEFAULT_ALGORITHM, {MANIFEST: data})


def outlined_part(path: Path, url: str, group: str) -> TokenPart:
    """Open a part of an object store whose manifest and offsets are at a local path."""
    return TokenPart.outlined(path, lambda fingerprint: RemotePart(url, fingerprint, group))


def open_outlines(path: Path) -> TokenStore:
    """Open the local copy of a token store in an object store: lengths can be read, tokens cannot."""
    with CheckedDirectory.open(path) as directory:
        listed = parse_store(directory.read(STORE, MAX_STORE_BYTES), str(path / STORE))
    return TokenStore(path, [outlined_part(path / one.name, "", "") for one in listed])


def is_remote_store(url: str) -> bool:
    """Return whether a URL is a token store or one of its parts."""
    return object_info(child(url, STORE)) is not None or object_info(child(url, OFFSETS)) is not None


def fetch_store(url: str, cache: NodeCache | None = None) -> Path:
    """Return the local path of a token store, or of a single part; it stays there until this process ends.

    Args:
        url: of the directory.
        cache: of the node; by default the user's.
    """
    cache = cache or node_cache()
    index = child(url, STORE)
    if cache.has_document(index) or object_info(index) is not None:
        data = cache.document(index, MAX_STORE_BYTES)
        parts = parse_store(data, redacted(index))
        item = CacheItem(url, checksum(data), lambda: _store_contents(url, data, parts), url)
        return kept_copy(item, cache)
    manifest = child(url, MANIFEST)
    if object_info(child(url, OFFSETS)) is None or object_info(manifest) is None:
        raise InvalidInputError(f"{redacted(url)} is not a token store or a part of one; check the URL")
    found = checksum(cache.document(manifest, MAX_MANIFEST_BYTES))
    return kept_copy(CacheItem(url, found, lambda: _contents(url, "", [ListedPart("", found)]), url), cache)


def _store_contents(url: str, data: bytes, parts: list[ListedPart]) -> Contents:
    contents = _contents(url, "/", parts)
    files = {**contents.files, STORE: FileRecord(len(data), "")}
    return Contents(files, contents.algorithm, {**contents.ready, STORE: data})


def _contents(url: str, separator: str, parts: list[ListedPart]) -> Contents:
    """Return the files that the manifests of some parts list, with their sizes and checksums."""
    files: dict[str, FileRecord] = {}
    ready = {}
    algorithm = DEFAULT_ALGORITHM
    for part in parts:
        name = f"{part.name}{separator}{MANIFEST}"
        data = read_object(child(url, name), MAX_MANIFEST_BYTES)
        file = redacted(child(url, name))
        if checksum(data) != part.manifest_checksum:
            raise ShardError(f"{file} is not the one that {STORE} lists; publish the store again")
        manifest = parse_part_manifest(data, file)
        algorithm = manifest.checksum_algorithm or DEFAULT_ALGORITHM
        files |= {f"{part.name}{separator}{one}": record for one, record in manifest.files.items()}
        files[name] = FileRecord(len(data), "")
        ready[name] = data
    return Contents(files, algorithm, ready)


class GatheredSequences:
    """Some sequences of a token store, in local files. It is read like a store, and like a part of one.

    Args:
        store: has the sequences.
        sequences: their numbers, sorted, without duplicates.
        folder: an empty directory for the files.
        first_part: the part to start with, so that processes of a node do not all wait for the same one.
    """

    verify = FIRST_READ

    def __init__(self, store: TokenStore, sequences: npt.NDArray[np.int64], folder: Path, first_part: int = 0) -> None:
        self.path = store.path
        self._manifest, self._has_weights = store.manifest, store.has_weights
        self._sequences = sequences
        groups = store.by_part(sequences)
        first = min(first_part, len(groups))
        self.arrays = self._gathered([*groups[first:], *groups[:first]], folder)

    @property
    def manifest(self) -> TokenPartManifest:
        """The store's manifest: the type of its ids, its tokenizer and its template."""
        return self._manifest

    @property
    def has_weights(self) -> bool:
        """Whether the store has weights."""
        return self._has_weights

    def by_part(
        self, sequences: npt.NDArray[np.int64]
    ) -> list[tuple[GatheredSequences, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Return one group, (self, positions, places here), as a store does for each of its parts."""
        return [(self, np.arange(len(sequences)), np.searchsorted(self._sequences, sequences))]

    def spans(self, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (start, length) of each sequence in the arrays; one that does not match its checksum is an error."""
        unsound = self.arrays.find_unsound(places, self.verify)
        if unsound is not None:
            raise self.damaged(unsound)
        return self.arrays.begins[places], self.arrays.ends[places] - self.arrays.begins[places]

    def damaged(self, place: int) -> ShardFileError:
        """Return the error for a sequence that does not match its checksum."""
        return ShardFileError(
            f"the copy of sequence {self._sequences[place]} of {self.path} in {self.arrays.path} does not match the "
            "checksum that was written with it; check that disk, and run again"
        )

    def _gathered(
        self, groups: Sequence[tuple[TokenPart, npt.NDArray[np.int64], npt.NDArray[np.int64]]], folder: Path
    ) -> PartArrays:
        types = {"ids": np.dtype(self._manifest.dtype), "train": np.dtype(np.uint8)}
        if self._has_weights:
            types["weights"] = np.dtype(np.float32)
        num_tokens = 0
        begins, ends = np.zeros((2, len(self._sequences)), np.int64)
        checksums = np.zeros(len(self._sequences), CHECKSUM_DTYPE)
        verified = np.ones(len(self._sequences), np.uint8)  # 0 where a copy can be compared with its checksum
        with os_errors("write", folder):
            files = {name: open(folder / name, "wb") for name in types}  # noqa: SIM115  # closed below
            try:
                for part, places, inside in _held(groups):
                    starts, lengths = part.spans(inside)
                    ends[places] = num_tokens + np.cumsum(lengths)
                    begins[places] = ends[places] - lengths
                    num_tokens += int(lengths.sum())
                    # A copy whose weights are filled in does not match the checksum of its original.
                    if part.manifest.has_weights == self._has_weights:
                        checksums[places] = part.arrays.checksums[inside]
                        verified[places] = 0
                    for name, values in _copied(part.arrays, starts, lengths, types):
                        files[name].write(values)
                    part.unmap()  # so that the cache may evict it
            finally:
                for file in files.values():
                    file.close()
            mapped = {name: np.memmap(folder / name, dtype, "r") for name, dtype in types.items()}
        for array in (begins, ends, checksums):
            array.flags.writeable = False  # as memory maps are; numba compiles separately for writable arrays
        return PartArrays(
            mapped["ids"], mapped["train"], begins, ends, mapped.get("weights"), checksums, verified, folder
        )


def _held(groups: Sequence[tuple[TokenPart, Any, Any]]) -> Iterator[tuple[TokenPart, Any, Any]]:
    """Yield every group once its part is mapped, while the next parts are fetched."""
    with ThreadPoolExecutor(_NUM_AHEAD, thread_name_prefix="packed-sft-parts") as threads:
        coming: deque[Any] = deque()
        remaining = iter(groups)
        try:
            for group in groups:
                while len(coming) <= _NUM_AHEAD and (following := next(remaining, None)) is not None:
                    coming.append(threads.submit(getattr, following[0], "arrays"))
                coming.popleft().result()
                yield group
        finally:
            threads.shutdown(wait=True, cancel_futures=True)


def _copied(
    arrays: PartArrays, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], types: dict[str, Any]
) -> Iterator[tuple[str, bytes]]:
    """Yield the ids, masks and weights of some sequences as bytes, some sequences at a time."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(starts):
        before = ends[first] - lengths[first]
        stop = max(first + 1, int(np.searchsorted(ends, before + _COPIED_AT_ONCE, side="right")))
        count = int(ends[stop - 1] - before)
        places = np.repeat(starts[first:stop] - (ends[first:stop] - lengths[first:stop] - before), lengths[first:stop])
        places += np.arange(count)
        train = arrays.train[places]
        yield "ids", arrays.ids[places].tobytes()
        yield "train", train.tobytes()
        if "weights" in types:
            weights = train.astype(np.float32) if arrays.weights is None else arrays.weights[places]
            yield "weights", weights.tobytes()
        first = stop
