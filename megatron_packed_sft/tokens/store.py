"""Read a token store: many parts as one list of sequences, with random access through memory maps."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, ShardError
from megatron_packed_sft.storage.interface import ReadOptions
from megatron_packed_sft.storage.memmap_v1.manifest import CREATED_BY
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.atomic import os_errors, replace_file
from megatron_packed_sft.support.checked_files import CheckedDirectory
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.json_document import MANIFEST
from megatron_packed_sft.support.paths import is_url, local_path
from megatron_packed_sft.tokens.manifest import (
    MAX_STORE_BYTES,
    PART_NAME,
    STORE,
    STORE_FORMAT,
    STORE_VERSION,
    TokenPartManifest,
    parse_store,
)
from megatron_packed_sft.tokens.part import TokenPart


class TokenStore:
    """All parts as one list of sequences; `store[i]` is (input_ids, train)."""

    def __init__(self, path: Path, parts: Sequence[TokenPart]) -> None:
        first = parts[0].manifest
        for part in parts:
            for name in ("dtype", "vocab_size", "tokenizer", "chat_template_fingerprint"):
                if getattr(part.manifest, name) != getattr(first, name):
                    raise ShardError(
                        f"{part.path}: its {name} is {getattr(part.manifest, name)!r}, that of {parts[0].path} is "
                        f"{getattr(first, name)!r}; the parts of a store must agree: write the store again"
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
        """The length of every sequence, without reading a token."""
        return np.concatenate([part.lengths for part in self.parts])

    def read_with(self, options: ReadOptions) -> None:
        """Choose when sequences are compared with their checksums from now on."""
        for part in self.parts:
            part.verify = options.verify

    @property
    def is_remote(self) -> bool:
        """Whether its tokens are in an object store."""
        return any(part.holder is not None for part in self.parts)

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
        """Return (part, positions in `sequences`, numbers inside the part) for every part that holds some of them."""
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


def open_token_store(path: str | os.PathLike[str]) -> TokenStore:
    """Open a token store, or a single part of one.

    Args:
        path: of the store, or its URL; then it is fetched whole into the node's cache.
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
    """Write the store.json of a store, whose parts are all published, in one step."""
    document = {
        "format": STORE_FORMAT,
        "version": STORE_VERSION,
        "parts": [
            {"name": part.path.name, "manifest_checksum": part.fingerprint, "num_sequences": len(part)}
            for part in store.parts
        ],
        "num_sequences": len(store),
        "num_tokens": store.num_tokens,
        "created_by": CREATED_BY,
    }
    replace_file(store.path / STORE, json_document.render(document))
