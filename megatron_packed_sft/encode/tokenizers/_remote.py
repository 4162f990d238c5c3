"""Tokenizers of an object store: their own files, not the weights beside them, in the cache of the node."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_packed_sft.remote.copies import copy_of
from megatron_packed_sft.support.paths import is_url

_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken")
_MOST_BYTES = 512 << 20


def local_tokenizer(path: str | os.PathLike[str]) -> Path:
    """Return where a tokenizer is on this node; one of a URL is fetched."""
    if not is_url(path):
        return Path(path)
    return copy_of(os.fspath(path), wanted=_belongs_to_tokenizer, most_bytes=_MOST_BYTES, kind="a tokenizer")


def _belongs_to_tokenizer(name: str) -> bool:
    return "/" not in name and name.endswith(_SUFFIXES) and not name.endswith(".index.json")
