"""The tokenizer that made some data: given by the user, or found by what the data and its work directory record.

Data records a tokenizer's name and fingerprint, never its path, so that equal data has equal bytes. The path is in the
work directory of `packed-sft prepare`. Whatever is found counts only if its fingerprint is the recorded one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.encode.tokenizers.load import load_tokenizer
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.support.paths import is_url, redacted


class FoundTokenizer(NamedTuple):
    """A tokenizer, or in one sentence why there is none."""

    tokenizer: Tokenizer | None
    note: str = ""


def find_tokenizer(
    recorded: Mapping[str, Any] | None,
    *,
    given: str | os.PathLike[str] | None = None,
    candidates: Iterable[str | os.PathLike[str]] = (),
) -> FoundTokenizer:
    """Return the tokenizer that made some data.

    Args:
        recorded: name and fingerprint, as the data records them; None if it records none.
        given: the path that the user names; one with another fingerprint is refused.
        candidates: paths where it may be, such as the one it was loaded from when the data was made.

    Example:
        >>> find_tokenizer({"name": "qwen3", "fingerprint": "ab12"}).note
        "the tokenizer 'qwen3' (ab12) was not found; give its path with --tokenizer to see text"
    """
    name, fingerprint = (recorded or {}).get("name"), (recorded or {}).get("fingerprint")
    if given is not None:
        tokenizer = load_tokenizer(given)
        if fingerprint and tokenizer.fingerprint != fingerprint:
            raise InvalidInputError(
                f"the data was made with the tokenizer {name!r} ({fingerprint}), not with {redacted(os.fspath(given))} "
                f"({tokenizer.fingerprint}), so its text would be wrong; give that tokenizer"
            )
        return FoundTokenizer(tokenizer)
    if not fingerprint:
        return FoundTokenizer(None, "the data records no tokenizer; give its path with --tokenizer to see text")
    for path in dict.fromkeys(os.fspath(one) for one in candidates):
        if not is_url(path) and not Path(path).exists():
            continue
        try:
            tokenizer = load_tokenizer(path)
        except PackedSFTError:
            continue
        if tokenizer.fingerprint == fingerprint:
            return FoundTokenizer(tokenizer)
    return FoundTokenizer(
        None, f"the tokenizer {name!r} ({fingerprint}) was not found; give its path with --tokenizer to see text"
    )
