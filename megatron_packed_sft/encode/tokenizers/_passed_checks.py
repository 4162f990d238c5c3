"""Which tokenizers have passed the self-check of the fast path on this machine: one small file each.

The check needs the tokenizer in `tokenizers`, which takes longer to load than gigatoken takes for many megabytes of
chats. What passed is remembered by the tokenizer's fingerprint; other versions of either library check again.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_packed_sft.support.own_directories import private_temporary_directory, user_cache

_CHECKS = 1  # raised when the checks change, so that everything is checked again


def checked_by() -> str | None:
    """Return what a check depends on besides the tokenizer: versions and the machine; None if a library is missing."""
    try:
        versions = [f"{name} {version(name)}" for name in ("gigatoken", "tokenizers")]
    except PackageNotFoundError:
        return None
    return ", ".join([*versions, f"checks {_CHECKS}", platform.node()])


def recall(fingerprint: str) -> str | None:
    """Return the `checked_by` with which a tokenizer passed, if it did."""
    directory = _directory()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return None if directory is None else (directory / fingerprint).read_text()
    return None


def remember(fingerprint: str, passed_with: str) -> None:
    """Note that a tokenizer passed; where nothing can be written, the next process checks again."""
    directory = _directory()
    if directory is None:
        return
    target = directory / fingerprint
    temporary = target.with_name(f".{fingerprint}.{os.getpid()}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(passed_with)
        temporary.replace(target)


def _directory() -> Path | None:
    cache = user_cache() or private_temporary_directory()
    return None if cache is None else Path(cache, "megatron_packed_sft", "checked_tokenizers")
