"""A part of a token store in an object store: fetched into the cache of whatever node reads its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_packed_sft.errors import ShardError, ShardFileError
from megatron_packed_sft.remote.downloads import Contents
from megatron_packed_sft.remote.filesystem import child
from megatron_packed_sft.remote.node_cache import CacheItem, Hold, node_cache
from megatron_packed_sft.remote.objects import read_object
from megatron_packed_sft.storage.memmap_v1.manifest import MAX_MANIFEST_BYTES
from megatron_packed_sft.support.checked_files import CheckedDirectory
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, checksum
from megatron_packed_sft.support.json_document import MANIFEST, FileRecord
from megatron_packed_sft.support.paths import redacted
from megatron_packed_sft.tokens.manifest import parse_part_manifest
from megatron_packed_sft.tokens.store import TokenPart, TokenStore
from megatron_packed_sft.tokens.store_index import MAX_STORE_BYTES, STORE, parse_store


@dataclass(frozen=True)
class RemotePart:
    """Fetches a part. It can be pickled: every node has a cache of its own.

    Args:
        url: of the part.
        fingerprint: of its manifest.
        group: what it belongs to, for `packed-sft cache status`: the URL of the work directory.
    """

    url: str
    fingerprint: str
    group: str

    @property
    def item(self) -> CacheItem:
        """What the cache calls it."""
        return CacheItem(self.url, self.fingerprint, self._contents, self.group)

    def hold(self) -> Hold:
        """Fetch the part unless it is there, and keep it while the returned object lives."""
        try:
            return node_cache().hold(self.item)
        except ShardFileError as error:
            problem = str(error).partition("; ")[0]
            raise ShardError(
                f"{problem}; remove {redacted(self.url)} and run again, and its slice is encoded again"
            ) from error

    def adopt(self, part: TokenPart) -> bool:
        """Move a part that was just sent into the cache, so that this node need not fetch it."""
        return node_cache().adopt(self.item, part.path)

    def _contents(self) -> Contents:
        data = read_object(child(self.url, MANIFEST), MAX_MANIFEST_BYTES)
        if checksum(data) != self.fingerprint:
            raise ShardFileError(f"{redacted(self.url)} is not the part that its receipt names; run again")
        manifest = parse_part_manifest(data, redacted(child(self.url, MANIFEST)))
        files = {**manifest.files, MANIFEST: FileRecord(len(data), "")}
        return Contents(files, manifest.checksum_algorithm or DEFAULT_ALGORITHM, {MANIFEST: data})


def outlined_part(path: Path, url: str, group: str) -> TokenPart:
    """Open a part of an object store, of which manifest and offsets are at a local path."""
    return TokenPart.outlined(path, lambda fingerprint: RemotePart(url, fingerprint, group))


def open_outlines(path: Path) -> TokenStore:
    """Open the local copy of a token store in an object store: lengths can be read, tokens cannot."""
    with CheckedDirectory.open(path) as directory:
        listed = parse_store(directory.read(STORE, MAX_STORE_BYTES), str(path / STORE))
    return TokenStore(path, [outlined_part(path / one.name, "", "") for one in listed])
