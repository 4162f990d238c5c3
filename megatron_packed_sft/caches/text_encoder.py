"""Any tokenizer as a `TextEncoder`: many texts in, flat ids out, with its special tokens and its SHA-256.

| tokenizer | how its texts are encoded | the text of a special token inside a text |
|---|---|---|
| ours (`load_tokenizer`) | `encode_many` | is ordinary text |
| a SentencePiece processor | `encode`, nothing added | refused |
| Hugging Face, `tokenizers` | in batches, nothing added | refused |
| tiktoken | `encode_ordinary_batch` | is ordinary text |
| anything else with `encode` | one by one | refused |
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.caches.meta import ALGORITHM, sha256_file
from megatron_packed_sft.encode.tokenizers.interface import MarkedText
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.checksum import checksum

SPECIAL_TOKENS: Mapping[str, str] = {
    name: f"<|ngpt_{name}_84a5023f67d74cf29cc4001becde983c|>" for name in ("sys", "usr", "asst", "eot")
}
_TOKENIZER_FILE = "tokenizer.json"
# What decides the ids of a Hugging Face tokenizer that has no tokenizer.json.
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
    """Encodes texts with any tokenizer.

    Args:
        tokenizer: from `load_tokenizer`, of SentencePiece or Hugging Face, or anything with `encode`.
        special_tokens: the texts of the tokens called sys, usr, asst and eot.

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
            raise InvalidInputError(
                f"special_tokens names {', '.join(special_tokens) or 'nothing'}; name exactly "
                f"{', '.join(SPECIAL_TOKENS)}"
            )
        self._tokenizer = tokenizer
        self.special_tokens = dict(special_tokens)
        self._encode = _encode_function(tokenizer)
        self._reads_literally = hasattr(tokenizer, "encode_many") or _is_tiktoken(tokenizer)
        self.vocab_size = _vocab_size(tokenizer)
        self.special_ids = {name: self._special_id(name) for name in SPECIAL_TOKENS}

    def encode(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the ids of some texts, each as it is on its own; nothing is added."""
        found = self._encode(texts)
        ids = found.ids
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.vocab_size):
            wrong = int(ids[(ids < 0) | (ids >= self.vocab_size)][0])
            raise InvalidInputError(
                f"the tokenizer gave the id {wrong}, but its vocabulary has {self.vocab_size:,} ids; give a tokenizer "
                "whose vocab_size is right"
            )
        return found

    def first_with_special(self, found: EncodedTexts, ids: Iterable[int]) -> int | None:
        """Return the first text whose ids hold one of some special ids, because it has the text of that token."""
        if self._reads_literally:
            return None
        hits = np.zeros(len(found.ids), np.bool_)
        for number in ids:
            hits |= found.ids == number
        if not hits.any():
            return None
        return int(np.searchsorted(np.cumsum(found.lengths), int(hits.argmax()), side="right"))

    def required(self, names: Iterable[str]) -> dict[str, int]:
        """Return the ids of special tokens that must be there."""
        ids = {name: self.special_ids[name] for name in names}
        missing = [self.special_tokens[name] for name, number in ids.items() if number is None]
        if missing:
            raise InvalidInputError(
                f"the tokenizer has no token {' and no token '.join(missing)}; add it to the vocabulary, or name the "
                "tokens that it has with special_tokens={'sys': ..., 'usr': ..., 'asst': ..., 'eot': ...}"
            )
        return {name: number for name, number in ids.items() if number is not None}

    def separator_id(self) -> int:
        """Return the id that ends each document: the eot token, or else the tokenizer's end of sequence."""
        if self.special_ids["eot"] is not None:
            return self.special_ids["eot"]
        number = _end_of_sequence(self._tokenizer)
        if number is None:
            raise InvalidInputError(
                f"the tokenizer has neither {self.special_tokens['eot']} nor an end-of-sequence token to end documents "
                "with; name a token that it has with special_tokens"
            )
        return number

    def sha256(self) -> str:
        """Return the SHA-256 of the tokenizer: of its file if it has one, else of its vocabulary."""
        return _sha256(self._tokenizer)

    def identity(self) -> dict[str, str] | None:
        """Return name and fingerprint as packed data records them, so that both can be trained on together."""
        fingerprint = getattr(self._tokenizer, "fingerprint", None)
        if not isinstance(fingerprint, str):
            return None
        return {"name": str(getattr(self._tokenizer, "name", "")), "fingerprint": fingerprint}

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens[name]
        own = _value(self._tokenizer, "special_token_ids")
        if isinstance(own, Mapping):
            number = own.get(name)
            return None if number is None else int(number)
        return _token_id(self._tokenizer, text)


def _encode_function(tokenizer: Any) -> Callable[[Sequence[str]], EncodedTexts]:
    if hasattr(tokenizer, "encode_many"):
        return lambda texts: _encode_ours(tokenizer, texts)
    if _is_sentencepiece(tokenizer):
        return lambda texts: _flat(tokenizer.encode(list(texts), add_bos=False, add_eos=False, num_threads=1))
    if _is_tiktoken(tokenizer):
        return lambda texts: _flat(tokenizer.encode_ordinary_batch(list(texts), num_threads=1))
    if hasattr(tokenizer, "encode_batch"):  # of the package `tokenizers`
        return lambda texts: _flat([one.ids for one in tokenizer.encode_batch(list(texts), add_special_tokens=False)])
    if hasattr(tokenizer, "convert_tokens_to_ids") and callable(tokenizer):  # of transformers
        return lambda texts: _encode_transformers(tokenizer, texts)
    if hasattr(tokenizer, "encode"):
        return lambda texts: _flat([tokenizer.encode(text) for text in texts])
    raise InvalidInputError(
        f"tokenizer is of the type {type(tokenizer).__name__}, which has no `encode`; give what load_tokenizer "
        "returns, a SentencePiece processor or a Hugging Face tokenizer"
    )


def _encode_ours(tokenizer: Any, texts: Sequence[str]) -> EncodedTexts:
    found = tokenizer.encode_many([MarkedText(text, (), ((0, len(text)),)) for text in texts])
    return EncodedTexts(found.input_ids.astype(np.int64), found.lengths)


def _encode_transformers(tokenizer: Any, texts: Sequence[str]) -> EncodedTexts:
    # verbose: a document may be longer than the model's context; windows are cut later.
    encoded = tokenizer(
        list(texts),
        add_special_tokens=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return _flat(encoded["input_ids"])


def _flat(found: Sequence[Sequence[int]]) -> EncodedTexts:
    lengths = np.fromiter(map(len, found), np.int64, len(found))
    try:
        ids = np.fromiter(chain.from_iterable(found), np.int64, int(lengths.sum()))
    except (TypeError, ValueError):
        raise InvalidInputError("tokenizer.encode did not return a list of integers; give one that does") from None
    return EncodedTexts(ids, lengths)


def _is_sentencepiece(tokenizer: Any) -> bool:
    return hasattr(tokenizer, "serialized_model_proto") and hasattr(tokenizer, "piece_to_id")


def _is_tiktoken(tokenizer: Any) -> bool:
    return hasattr(tokenizer, "encode_ordinary_batch") and hasattr(tokenizer, "special_tokens_set")


def _value(tokenizer: Any, name: str) -> Any:
    """Return an attribute, or what it returns if it is a method."""
    value = getattr(tokenizer, name, None)
    return value() if callable(value) else value


def _vocab_size(tokenizer: Any) -> int:
    if hasattr(tokenizer, "get_vocab_size"):
        return int(tokenizer.get_vocab_size())
    if hasattr(tokenizer, "convert_tokens_to_ids"):
        return 1 + int(max(tokenizer.get_vocab().values()))  # added tokens included, unlike its vocab_size
    size = _value(tokenizer, "n_vocab" if _is_tiktoken(tokenizer) else "vocab_size")
    if not isinstance(size, int) or size < 1:
        raise InvalidInputError(
            f"tokenizer.vocab_size is {size!r}; give a tokenizer that says how many ids it has, as a positive integer"
        )
    return size


def _token_id(tokenizer: Any, text: str) -> int | None:
    """Return the id of a token that is recognised as a whole, or None."""
    number: Any = None
    if hasattr(tokenizer, "control_tokens"):
        number = tokenizer.control_tokens.get(text)
    elif _is_sentencepiece(tokenizer):
        number = tokenizer.piece_to_id(text)
        number = number if tokenizer.id_to_piece(number) == text else None
    elif _is_tiktoken(tokenizer):
        number = tokenizer.encode_single_token(text) if text in tokenizer.special_tokens_set else None
    elif hasattr(tokenizer, "token_to_id"):
        number = tokenizer.token_to_id(text)
    elif hasattr(tokenizer, "get_vocab"):
        number = tokenizer.get_vocab().get(text)
    return None if number is None else int(number)


def _end_of_sequence(tokenizer: Any) -> int | None:
    if _is_tiktoken(tokenizer):  # whose `eot_token` raises where there is none
        return _token_id(tokenizer, "<|endoftext|>")
    names = ("eos_id", "eos_token_id", "eod")
    number = next((value for name in names if isinstance(value := _value(tokenizer, name), int) and value >= 0), None)
    return None if number is None else int(number)


def _sha256(tokenizer: Any) -> str:
    if _is_sentencepiece(tokenizer):
        return checksum(tokenizer.serialized_model_proto(), ALGORITHM)
    if _is_tiktoken(tokenizer):
        special = sorted((text, tokenizer.encode_single_token(text)) for text in tokenizer.special_tokens_set)
        words = b"\0".join(tokenizer.token_byte_values())
        return checksum(words + json.dumps(special).encode(), ALGORITHM)
    if hasattr(tokenizer, "to_str"):  # of the package `tokenizers`
        return checksum(tokenizer.to_str().encode(), ALGORITHM)
    if not hasattr(tokenizer, "encode_many") and hasattr(tokenizer, "get_vocab"):
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        text = backend.to_str() if hasattr(backend, "to_str") else json.dumps(sorted(tokenizer.get_vocab().items()))
        return checksum(text.encode(), ALGORITHM)
    path = getattr(tokenizer, "path", None) or getattr(tokenizer, "model_path", None)
    if path and os.path.exists(path):
        return tokenizer_files_sha256(Path(path))
    parts = [type(tokenizer).__name__, str(_vocab_size(tokenizer)), str(_value(tokenizer, "special_token_ids"))]
    return checksum("\0".join(parts).encode(), ALGORITHM)


def tokenizer_files(path: Path) -> list[Path]:
    """Return the files that decide a tokenizer's ids: its .model file, its tokenizer.json, or what stands for it."""
    if path.is_file():
        return [path]
    if (path / _TOKENIZER_FILE).is_file():
        return [path / _TOKENIZER_FILE]
    return [path / name for name in _OTHER_FILES if (path / name).is_file()] or sorted(path.glob("*.model"))


def tokenizer_files_sha256(path: Path) -> str:
    """Return the SHA-256 of a tokenizer's file; of several, that of their names and checksums."""
    files = tokenizer_files(path)
    if len(files) == 1:
        return sha256_file(files[0])
    return checksum("".join(f"{file.name}\0{sha256_file(file)}\n" for file in files).encode(), ALGORITHM)
