"""A tokenizer of `load_tokenizer` as a cache needs it: many texts in, flat ids out, and its four special tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.encode.sequences import MarkedText
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.checksum import checksum, file_checksum

SPECIAL_TOKENS: Mapping[str, str] = {
    name: f"<|ngpt_{name}_84a5023f67d74cf29cc4001becde983c|>" for name in ("sys", "usr", "asst", "eot")
}
ALGORITHM = "sha256"
# The files that decide the ids of a Hugging Face tokenizer: the first, or without it the others.
_TOKENIZER_FILE = "tokenizer.json"
_OTHER_FILES = ("vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "tokenizer_config.json")

Ids = npt.NDArray[np.int64]


class EncodedTexts(NamedTuple):
    """The ids of some texts, end to end.

    Args:
        ids: flat.
        lengths: one per text; 0 for a text without tokens.
    """

    ids: Ids
    lengths: Ids


class TextEncoder:
    """Encodes texts; the text of a special token inside a text is ordinary text.

    Args:
        tokenizer: of `load_tokenizer`.
        special_tokens: the texts of the tokens called sys, usr, asst and eot.

    Attributes:
        vocab_size: one more than the largest id.
        special_ids: by the four names; None for a token that the tokenizer lacks.
        separator_id: the id that ends each document: eot, or else the end of sequence; None without both.
    """

    def __init__(self, tokenizer: Tokenizer, special_tokens: Mapping[str, str] = SPECIAL_TOKENS) -> None:
        if set(special_tokens) != set(SPECIAL_TOKENS):
            given, wanted = ", ".join(special_tokens), ", ".join(SPECIAL_TOKENS)
            raise InvalidInputError(f"special_tokens names {given or 'nothing'}; name exactly {wanted}")
        if not hasattr(tokenizer, "encode_many"):
            raise InvalidInputError(
                f"tokenizer is of the type {type(tokenizer).__name__}; load it from its file or folder with "
                "load_tokenizer(PATH)"
            )
        self._tokenizer = tokenizer
        self.special_tokens = dict(special_tokens)
        self.vocab_size = tokenizer.vocab_size
        self.special_ids = {name: tokenizer.control_tokens.get(special_tokens[name]) for name in SPECIAL_TOKENS}
        self.separator_id = tokenizer.eos_id if self.special_ids["eot"] is None else self.special_ids["eot"]
        # As packed data records them, so that both can be trained on together.
        self.identity = {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the ids of some texts, each as it is alone; nothing is added."""
        found = self._tokenizer.encode_many([MarkedText(text, (), ((0, len(text)),)) for text in texts])
        return EncodedTexts(found.input_ids.astype(np.int64), found.lengths)

    def sha256(self) -> str:
        """Return the SHA-256 of the tokenizer's file; of several, that of their names and checksums."""
        sums = {file.name: file_checksum(file, ALGORITHM) for file in tokenizer_files(self._tokenizer.path)}
        if len(sums) == 1:
            return next(iter(sums.values()))
        return checksum("".join(f"{name}\0{one}\n" for name, one in sums.items()).encode(), ALGORITHM)


def tokenizer_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files that decide a tokenizer's ids: its .model file, its tokenizer.json, or those in its place."""
    folder = Path(path)
    if folder.is_file():
        return [folder]
    if (folder / _TOKENIZER_FILE).is_file():
        return [folder / _TOKENIZER_FILE]
    return [folder / name for name in _OTHER_FILES if (folder / name).is_file()] or sorted(folder.glob("*.model"))
