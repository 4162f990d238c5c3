"""Hugging Face tokenizers from a local folder: the ids of `tokenizers`, through tiktoken where that is the same."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from megatron_packed_sft.encode.control_tokens import ControlTokens, is_control_text
from megatron_packed_sft.encode.interface import EncodedTexts, MarkedText
from megatron_packed_sft.encode.literal_document import private_names, renamed
from megatron_packed_sft.encode.positions import encoded_texts, interleave, trained_ranges, utf8_lengths
from megatron_packed_sft.encode.tiktoken_path import TiktokenPath, open_tiktoken_path
from megatron_packed_sft.encode.tokenizer_folder import INSTALL, TOKENIZER_FILE, read_tokenizer_folder
from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError

logger = logging.getLogger(__name__)


class HuggingFaceTokenizer:
    """A tokenizer folder as Hugging Face saves it. Satisfies `encode.interface.Tokenizer`.

    Ids are those of `AutoTokenizer.apply_chat_template(tokenize=True)`: text as it is, nothing added.

    Args:
        path: the folder, or a tokenizer.json in it.
        fast: go through tiktoken where it gives the same ids; `fast_path` says whether it does, and
            `fast_path_refusal` why it does not.

    Example:
        >>> tokenizer = HuggingFaceTokenizer("qwen2.5")  # doctest: +SKIP
        >>> tokenizer.encode_many([MarkedText("Hello there", trained=[(5, 11)])]).train  # doctest: +SKIP
        array([0, 1], dtype=uint8)
    """

    def __init__(self, path: str | os.PathLike[str], *, fast: bool = True) -> None:
        self._load(path, fast, None)

    def _load(self, path: str | os.PathLike[str], fast: bool, expected: tuple[str, bool] | None) -> None:
        """Read the files; `expected` is the fingerprint they had before, and whether the fast path was in use."""
        folder = Path(os.path.abspath(path))
        folder = folder.parent if folder.name == TOKENIZER_FILE else folder
        if not folder.is_dir():
            raise InvalidInputError(f"{path} is not a folder; give the folder that holds {TOKENIZER_FILE}")
        self._path, self._fast = str(folder), fast
        files = read_tokenizer_folder(folder)
        self._document = _only_what_decides_ids(files.document)
        self._template_variables = files.special_tokens
        self._chat_template = files.chat_template
        self._fingerprint = _fingerprint(self._document)
        if expected is not None and expected[0] != self._fingerprint:
            raise InvalidInputError(
                f"the tokenizer in {folder} changed while it was in use ({expected[0]} before, {self._fingerprint} "
                "now); start again with one tokenizer"
            )
        self._backend = _backend(self._document, folder)
        added = self._document["added_tokens"]
        for token in added:
            if self._backend.token_to_id(token["content"]) != token["id"]:
                raise InvalidInputError(
                    f"{folder} declares id {token['id']} for {token['content']!r}, but loading gives "
                    f"{self._backend.token_to_id(token['content'])}; save the tokenizer again with transformers"
                )
        self._controls = ControlTokens(
            {
                token["content"]: token["id"]
                for token in added
                if is_control_text(token["content"], special=token["special"]) and not token["single_word"]
            }
        )
        self._tiktoken: TiktokenPath | None = None
        self.fast_path: str | None = None
        self.fast_path_refusal: str | None = "fast=False"
        if fast:
            self._open_fast_path(merges_are_sound=expected is not None and expected[1])

    def _open_fast_path(self, *, merges_are_sound: bool) -> None:
        found = open_tiktoken_path(self._document, self._controls, self._backend, merges_are_sound=merges_are_sound)
        if isinstance(found, TiktokenPath):
            self._tiktoken, self.fast_path, self.fast_path_refusal = found, "tiktoken", None
        else:
            self.fast_path_refusal = found
            logger.info("%s: no fast path through tiktoken, because %s", self.name, found)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_again, (self._path, self._fast, (self._fingerprint, self.fast_path is not None))

    @property
    def path(self) -> str:
        """The folder it was loaded from."""
        return self._path

    @property
    def name(self) -> str:
        """The folder's name."""
        return Path(self._path).name

    @property
    def fingerprint(self) -> str:
        """A hash of model, normalizer, pre-tokenizer and added tokens."""
        return self._fingerprint

    @cached_property
    def vocab_size(self) -> int:
        """All ids are below it, those of added tokens too."""
        return 1 + int(max(self._backend.get_vocab(with_added_tokens=True).values()))

    @property
    def bos_id(self) -> int | None:
        """Beginning of sequence, if it has one."""
        return self._id_of("bos_token")

    @property
    def eos_id(self) -> int | None:
        """End of sequence, if it has one."""
        return self._id_of("eos_token")

    @property
    def pad_id(self) -> int | None:
        """Padding, if it has one."""
        return self._id_of("pad_token")

    @property
    def chat_template(self) -> str | None:
        """Its own Jinja template, if it has one."""
        return self._chat_template

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """Its special tokens by name, as text."""
        return self._template_variables

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Its added tokens, but for those that are text: white space, HTML, whole words."""
        return self._controls.ids

    def encode_many(self, texts: Sequence[MarkedText]) -> EncodedTexts:
        """Tokenize many texts and map their trained characters to tokens."""
        num_bytes = utf8_lengths(texts)
        path = self._tiktoken
        if path is None:
            return self._encode_slowly(texts)
        accepted = [path.accepts(text.text) for text in texts]
        if all(accepted):
            return self._encode_fast(path, texts, num_bytes)
        quick = [index for index, accept in enumerate(accepted) if accept]
        slow = [index for index, accept in enumerate(accepted) if not accept]
        return interleave(
            len(texts),
            [
                (quick, self._encode_fast(path, [texts[index] for index in quick], [num_bytes[k] for k in quick])),
                (slow, self._encode_slowly([texts[index] for index in slow])),
            ],
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, control tokens included."""
        return str(self._backend.decode([int(number) for number in ids], skip_special_tokens=False))

    def _encode_fast(self, path: TiktokenPath, texts: Sequence[MarkedText], num_bytes: Sequence[int]) -> EncodedTexts:
        ids, lengths = path.encode(texts)
        widths = path.byte_lengths[ids]
        ends = np.cumsum(widths)
        text_ends = np.concatenate([np.zeros(1, np.int64), ends])[np.cumsum(lengths)]
        if not np.array_equal(text_ends, np.cumsum(num_bytes)):
            # The pattern left characters out. `tokenizers` keeps them as words of their own, tiktoken drops them.
            return self._encode_slowly(texts)
        return encoded_texts(ids, lengths, ends - widths, ends, trained_ranges(texts, num_bytes, in_bytes=True))

    def _encode_slowly(self, texts: Sequence[MarkedText]) -> EncodedTexts:
        plain: list[int] = []
        disguised: list[int] = []
        for index, (text, _, literal) in enumerate(texts):
            has_lookalike = bool(literal) and self._controls.split(text, literal).has_lookalike
            (disguised if has_lookalike else plain).append(index)
        encodings: list[Any] = [None] * len(texts)
        if plain:
            found = self._backend.encode_batch([texts[index].text for index in plain], add_special_tokens=False)
            for index, encoding in zip(plain, found, strict=True):
                encodings[index] = encoding
        for index in disguised:
            text = self._under_private_names(texts[index], index)
            encodings[index] = self._literal_backend.encode(text, add_special_tokens=False)
        lengths = np.array([len(encoding) for encoding in encodings], np.int64)
        num_tokens = int(lengths.sum())
        ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), np.int32, num_tokens)
        offsets: npt.NDArray[np.int64] = np.fromiter(
            chain.from_iterable(chain.from_iterable(encoding.offsets for encoding in encodings)),
            np.int64,
            2 * num_tokens,
        ).reshape(-1, 2)
        num_characters = [len(text.text) for text in texts]
        bases = np.repeat(np.cumsum([0, *num_characters[:-1]])[: len(texts)], lengths)
        ranges = trained_ranges(texts, num_characters, in_bytes=False)
        return encoded_texts(ids, lengths, offsets[:, 0] + bases, offsets[:, 1] + bases, ranges)

    def _under_private_names(self, text: MarkedText, index: int) -> str:
        parts = self._controls.split(text.text, text.literal).parts
        if any(name in text.text for name in self._private_names.values()):
            raise InvalidInputError(
                f"text {index} of the batch holds private characters (U+F0000 to U+FFFFD) and the text of a control "
                "token; take one of them out of the row"
            )
        parts[1::2] = [self._private_names[part] for part in parts[1::2]]
        return "".join(parts)

    @cached_property
    def _private_names(self) -> dict[str, str]:
        return private_names(self._controls.ids)

    @cached_property
    def _literal_backend(self) -> Any:
        return _backend(renamed(self._document, self._private_names), Path(self._path))

    def _id_of(self, name: str) -> int | None:
        token = self._template_variables.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _load_again(path: str, fast: bool, expected: tuple[str, bool]) -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer.__new__(HuggingFaceTokenizer)
    tokenizer._load(path, fast, expected)
    return tokenizer


def _only_what_decides_ids(document: dict[str, Any]) -> dict[str, Any]:
    """Without truncation and padding, and without a post-processor, which adds tokens and trims positions."""
    return document | {"truncation": None, "padding": None, "post_processor": None}


def _fingerprint(document: dict[str, Any]) -> str:
    """A hash that does not depend on how the file is written: order of keys, and merges as text or as pairs."""
    model = dict(document["model"])
    if "merges" in model:
        model["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    added = sorted(document["added_tokens"], key=lambda token: int(token["id"]))
    parts = [model, document.get("normalizer"), document.get("pre_tokenizer"), added]
    return xxhash.xxh3_128(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _backend(document: dict[str, Any], folder: Path) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise MissingDependencyError(f"the tokenizer in {folder} needs tokenizers; {INSTALL}") from None
    try:
        return tokenizers.Tokenizer.from_str(orjson.dumps(document).decode())
    except Exception as error:  # tokenizers raises plain Exception
        raise InvalidInputError(
            f"{folder / TOKENIZER_FILE} is not a tokenizer that `tokenizers` can load ({error}); download it again"
        ) from None
