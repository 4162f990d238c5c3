"""Tokenizers as a cache needs them: many texts in, flat ids out, with the four special tokens and a SHA-256.

| tokenizer | the text of a special token inside a text |
|---|---|
| of `load_tokenizer` | is ordinary text |
| a SentencePiece processor | is refused |
| any object with `encode`, `vocab_size` and `special_token_ids` | is refused |
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.encode.tokenizers.interface import MarkedText
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
    """Encodes texts with one of the tokenizers above.

    Args:
        tokenizer: of `load_tokenizer`, a SentencePiece processor, or an object with `encode`, `vocab_size` and
            `special_token_ids`.
        special_tokens: the texts of the tokens called sys, usr, asst and eot.

    Attributes:
        vocab_size: one more than the largest id.
        special_ids: by the four names; None for a token that the tokenizer lacks.
        separator_id: the id that ends each document: eot, or else the end of sequence; None without both.

    Example:
        >>> class Letters:
        ...     vocab_size = 30
        ...     special_token_ids = {"sys": 26, "usr": 27, "asst": 28, "eot": 29}
        ...     def encode(self, text): return [ord(letter) - 97 for letter in text]
        >>> encoder = TextEncoder(Letters())
        >>> encoder.encode(["ab", "c"]).ids.tolist(), encoder.special_ids["eot"]
        ([0, 1, 2], 29)
    """

    def __init__(self, tokenizer: Any, special_tokens: Mapping[str, str] = SPECIAL_TOKENS) -> None:
        if set(special_tokens) != set(SPECIAL_TOKENS):
            given, wanted = ", ".join(special_tokens), ", ".join(SPECIAL_TOKENS)
            raise InvalidInputError(f"special_tokens names {given or 'nothing'}; name exactly {wanted}")
        self._tokenizer = tokenizer
        self._is_ours = hasattr(tokenizer, "encode_many")
        self._is_sentencepiece = hasattr(tokenizer, "serialized_model_proto")
        self.special_tokens = dict(special_tokens)
        self.vocab_size = _attribute(tokenizer, "vocab_size")
        ids = {} if self._is_ours or self._is_sentencepiece else _attribute(tokenizer, "special_token_ids")
        if (not hasattr(tokenizer, "encode") and not self._is_ours) or type(self.vocab_size) is not int or ids is None:
            raise InvalidInputError(
                f"tokenizer is of the type {type(tokenizer).__name__}; give one of load_tokenizer(FOLDER), a "
                "SentencePiece processor, or an object with encode, vocab_size and special_token_ids"
            )
        end = None
        if self._is_ours:
            ids = {name: tokenizer.control_tokens.get(text) for name, text in special_tokens.items()}
            end = tokenizer.eos_id
        elif self._is_sentencepiece:
            found = {name: tokenizer.piece_to_id(text) for name, text in special_tokens.items()}
            ids = {name: one for name, one in found.items() if tokenizer.id_to_piece(one) == special_tokens[name]}
            end = tokenizer.eos_id() if tokenizer.eos_id() >= 0 else None
        self.special_ids = {name: ids.get(name) for name in SPECIAL_TOKENS}
        self.separator_id = end if self.special_ids["eot"] is None else self.special_ids["eot"]

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the ids of some texts, each as it is on its own; nothing is added."""
        if self._is_ours:
            sequences = self._tokenizer.encode_many([MarkedText(text, (), ((0, len(text)),)) for text in texts])
            ids, lengths = sequences.input_ids.astype(np.int64), sequences.lengths
        else:
            found = [self._tokenizer.encode(text) for text in texts]
            lengths = np.fromiter(map(len, found), np.int64, len(found))
            try:
                ids = np.fromiter(chain.from_iterable(found), np.int64, int(lengths.sum()))
            except (TypeError, ValueError):
                raise InvalidInputError("tokenizer.encode did not return a list of integers") from None
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.vocab_size):
            wrong = int(ids[(ids < 0) | (ids >= self.vocab_size)][0])
            raise InvalidInputError(f"the tokenizer gave the id {wrong}, but vocab_size is {self.vocab_size:,}; fix it")
        return EncodedTexts(ids, lengths)

    def first_with_special(self, found: EncodedTexts, ids: Iterable[int]) -> int | None:
        """Return the first text whose ids hold one of some special ids, because it has the text of that token."""
        hits = np.isin(found.ids, list(ids)) if not self._is_ours else np.zeros(0, np.bool_)
        if not hits.any():
            return None
        return int(np.searchsorted(np.cumsum(found.lengths), int(hits.argmax()), side="right"))

    def sha256(self) -> str:
        """Return the SHA-256 of the tokenizer's file; of several files, or without any, one of what decides its ids."""
        if self._is_sentencepiece:
            return checksum(self._tokenizer.serialized_model_proto(), ALGORITHM)
        if not self._is_ours:
            parts = (type(self._tokenizer).__name__, self.vocab_size, sorted(self.special_ids.items()))
            return checksum(repr(parts).encode(), ALGORITHM)
        sums = {file.name: file_checksum(file, ALGORITHM) for file in tokenizer_files(self._tokenizer.path)}
        if len(sums) == 1:
            return next(iter(sums.values()))
        return checksum("".join(f"{name}\0{one}\n" for name, one in sums.items()).encode(), ALGORITHM)

    def identity(self) -> dict[str, Any]:
        """Return name and fingerprint as packed data records them, so that both can be trained on together."""
        if not self._is_ours:
            return {}
        return {"tokenizer": {"name": self._tokenizer.name, "fingerprint": self._tokenizer.fingerprint}}


def tokenizer_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files that decide a tokenizer's ids: its .model file, its tokenizer.json, or those in its place."""
    folder = Path(path)
    if folder.is_file():
        return [folder]
    if (folder / _TOKENIZER_FILE).is_file():
        return [folder / _TOKENIZER_FILE]
    return [folder / name for name in _OTHER_FILES if (folder / name).is_file()] or sorted(folder.glob("*.model"))


def _attribute(tokenizer: Any, name: str) -> Any:
    """Return an attribute, or the result of calling it if it is a method."""
    value = getattr(tokenizer, name, None)
    return value() if callable(value) else value
