"""Hugging Face tokenizers from a local folder: the ids of `tokenizers`, from gigatoken where it gives the same."""

from __future__ import annotations

import logging
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from megatron_packed_sft.encode.sequences import (
    MarkedText,
    Sequences,
    in_record_order,
    trained_ranges,
    utf8_lengths,
    with_train_mask,
)
from megatron_packed_sft.encode.tokenizers.gigatoken_path import (
    GigatokenPath,
    TokenLengths,
    checked_by,
    merge_product,
    open_gigatoken_path,
    recall,
    remember,
    token_lengths,
)
from megatron_packed_sft.encode.tokenizers.huggingface_folder import (
    INSTALL,
    TOKENIZER_FILE,
    TokenizerFolder,
    document_of_folder,
    read_tokenizer_folder,
)
from megatron_packed_sft.encode.tokenizers.interface import ControlTokens, is_control_text, local_tokenizer
from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError
from megatron_packed_sft.remote.copies import origin_of

logger = logging.getLogger(__name__)
# Private code points, which no normalizer changes.
_FIRST_PRIVATE, _LAST_PRIVATE = 0xF0000, 0xFFFFD
_FILLER = "\U0010fffd"


class HuggingFaceTokenizer:
    """A tokenizer folder as Hugging Face saves it. Implements the `Tokenizer` protocol.

    Ids are those of `AutoTokenizer.apply_chat_template(tokenize=True)`: the text as it is, with nothing added.

    Args:
        path: the folder, or the tokenizer.json in it.
        fast: use gigatoken if it gives the same ids; `fast_path` says whether it does, `fast_path_refusal` why not.
    """

    def __init__(self, path: str | os.PathLike[str], *, fast: bool = True) -> None:
        folder = Path(os.path.abspath(path))
        folder = folder.parent if folder.name == TOKENIZER_FILE else folder
        if not folder.is_dir():
            raise InvalidInputError(f"{path} is not a folder; give the folder that holds {TOKENIZER_FILE}")
        self._load(folder, fast, read_tokenizer_folder(folder), None)

    def _load(self, folder: Path, fast: bool, files: TokenizerFolder, expected: tuple[str, str | None] | None) -> None:
        """Take over what the files say; `expected` is their earlier fingerprint and the fast path's `checked_by`."""
        self.path, self.name, self._fast = str(folder), folder.name, fast
        self._document = _only_what_decides_ids(files.document)
        self.template_variables: Mapping[str, Any] = files.special_tokens
        self.chat_template, self.tool_template = files.chat_template, files.tool_template
        self.stop_tokens: Sequence[str] = files.stop_tokens
        # Pickled with the tokenizer, since asking transformers again takes seconds.
        self._asked = None if files.reason is None else files._replace(document={}) if files.keeps_file else files
        self.fingerprint = _fingerprint(self._document)
        passed_with = (recall(self.fingerprint) if fast else None) if expected is None else expected[1]
        has_passed = passed_with is not None and passed_with == checked_by()
        if expected is None:
            if not has_passed:
                self._check_added_tokens()
        elif expected[0] != self.fingerprint:
            raise InvalidInputError(
                f"the tokenizer in {folder} changed while it was in use ({expected[0]} before, {self.fingerprint} "
                "now); run again, and leave the tokenizer unchanged"
            )
        self._controls = ControlTokens(
            {
                token["content"]: token["id"]
                for token in self._document["added_tokens"]
                if is_control_text(token["content"], special=token["special"]) and not token["single_word"]
            }
        )
        self._gigatoken: GigatokenPath | None = None
        self.fast_path: str | None = None
        self.fast_path_refusal: str | None = "fast=False"
        if fast:
            self._open_fast_path(has_passed=has_passed)

    @cached_property
    def _backend(self) -> Any:
        """The tokenizer of `tokenizers`; loading takes half a second, which the fast path may never need."""
        return _backend(self._document, Path(self.path))

    def _check_added_tokens(self) -> None:
        backend = self._backend  # loaded here, so that a broken file is found even without added tokens
        for token in self._document["added_tokens"]:
            found = backend.token_to_id(token["content"])
            if found != token["id"]:
                raise InvalidInputError(
                    f"{self.path} declares id {token['id']} for {token['content']!r}, but loading gives {found}; save "
                    "the tokenizer again with transformers"
                )

    def _open_fast_path(self, *, has_passed: bool) -> None:
        found = open_gigatoken_path(self._document, self._lengths, lambda: self._backend, has_passed=has_passed)
        if isinstance(found, GigatokenPath):
            self._gigatoken, self.fast_path, self.fast_path_refusal = found, "gigatoken", None
            if not has_passed and (passed_with := checked_by()) is not None:
                remember(self.fingerprint, passed_with)
            vars(self).pop("_backend", None)  # a hundred megabytes that the fast path rarely needs
        else:
            self.fast_path_refusal = found
            logger.info("%s: gigatoken is not used, because %s", self.name, found)

    def __reduce__(self) -> tuple[Any, ...]:
        passed_with = None if self._gigatoken is None else checked_by()
        return _load_again, (origin_of(self.path), self._fast, self._asked, (self.fingerprint, passed_with))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        vocabulary = self._document["model"]["vocab"]
        last = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
        return 1 + int(max([last, *(token["id"] for token in self._document["added_tokens"])]))

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-sequence id, if any."""
        return self._id_of("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence id, if any."""
        return self._id_of("eos_token")

    @property
    def pad_id(self) -> int | None:
        """The padding id, if any."""
        return self._id_of("pad_token")

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Text -> id of its added tokens, except those that are text: white space, HTML, whole words."""
        return self._controls.ids

    def encode_many(self, texts: Sequence[MarkedText]) -> Sequences:
        """Tokenize many texts and map their trained characters to tokens."""
        num_bytes = utf8_lengths(texts)
        path = self._gigatoken
        if path is None:
            return self._encode_slowly(texts, num_bytes)
        if self._lengths is not None and self._lengths.composes and not all(text.text.isascii() for text in texts):
            texts = [self._composed(text) for text in texts]
            num_bytes = utf8_lengths(texts)
        accepted = [
            path.accepts(text) and not (literal and self._has_lookalike(text, literal)) for text, _, literal, _ in texts
        ]
        if all(accepted):
            return self._encode_fast(path, texts, num_bytes)
        batches = []
        for places, encode in (
            (np.flatnonzero(accepted).tolist(), partial(self._encode_fast, path)),
            (np.flatnonzero(~np.array(accepted)).tolist(), self._encode_slowly),
        ):
            batch = encode([texts[place] for place in places], [num_bytes[place] for place in places])
            batches.append(batch._replace(record=np.array(places, np.int64)))
        return in_record_order(batches)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, control tokens included."""
        return str(self._backend.decode([int(number) for number in ids], skip_special_tokens=False))

    def _encode_fast(self, path: GigatokenPath, texts: Sequence[MarkedText], num_bytes: Sequence[int]) -> Sequences:
        encoded = self._in_place(*path.encode([text.text for text in texts]), texts, num_bytes)
        # None: a control token has absorbed the blanks around it.
        return encoded or self._encode_slowly(texts, num_bytes)

    def _encode_slowly(self, texts: Sequence[MarkedText], num_bytes: Sequence[int]) -> Sequences:
        """Encode through `tokenizers`; without offsets, in a third of the time, if the lengths of ids are known."""
        lengths = self._lengths
        if lengths is not None and all(lengths.hold_for(text.text) for text in texts):
            encodings = self._encodings(texts, "encode_batch_fast")
            if (encoded := self._in_place(*_flat_ids(encodings), texts, num_bytes)) is not None:
                return encoded
        encodings = self._encodings(texts, "encode_batch")
        ids, num_tokens = _flat_ids(encodings)
        offsets: npt.NDArray[np.int64] = np.fromiter(
            chain.from_iterable(chain.from_iterable(encoding.offsets for encoding in encodings)), np.int64, 2 * len(ids)
        ).reshape(-1, 2)
        num_characters = [len(text.text) for text in texts]
        bases = np.repeat(np.cumsum([0, *num_characters[:-1]])[: len(texts)], num_tokens)
        ranges = trained_ranges(texts, num_characters, in_bytes=False)
        return with_train_mask(ids, num_tokens, offsets[:, 0] + bases, offsets[:, 1] + bases, ranges)

    @cached_property
    def _lengths(self) -> TokenLengths | None:
        return token_lengths(self._document)

    def _in_place(
        self,
        ids: npt.NDArray[np.int32],
        num_tokens: npt.NDArray[np.int64],
        texts: Sequence[MarkedText],
        num_bytes: Sequence[int],
    ) -> Sequences | None:
        """Place tokens by their lengths in bytes; return None if the lengths do not add up to those of the texts."""
        if self._lengths is None:
            return None
        widths = self._lengths.num_bytes[ids]
        last = np.cumsum(num_tokens)
        expected = np.cumsum(num_bytes)
        ends, found = _token_ends(widths, last)
        starts = ends - widths
        if self._lengths.takes_prefix and not np.array_equal(found, expected):
            # The first token of a text may hold a space that the tokenizer put in front.
            firsts = (last - num_tokens)[np.diff(found, prepend=0) == np.diff(expected, prepend=0) + 1]
            widths[firsts] -= 1
            ends, found = _token_ends(widths, last)
            starts = ends - widths
            ends[firsts] = np.maximum(
                ends[firsts], starts[firsts] + 1
            )  # a token of that space alone takes the next byte
        if not np.array_equal(found, expected):
            return None
        return with_train_mask(ids, num_tokens, starts, ends, trained_ranges(texts, num_bytes, in_bytes=True))

    def _composed(self, text: MarkedText) -> MarkedText:
        """Compose a text's characters (NFC) as the normalizer will, unless that changes its control tokens."""
        if text.text.isascii() or unicodedata.is_normalized("NFC", text.text):
            return text
        composed = text.composed()
        if composed is None:
            return text
        before, after = (self._controls.split(one.text, one.literal).parts[1::2] for one in (text, composed))
        return composed if before == after else text

    def _has_lookalike(self, text: str, literal: Sequence[tuple[int, int]]) -> bool:
        return self._controls.split(text, literal).has_lookalike

    def _encodings(self, texts: Sequence[MarkedText], method: str) -> list[Any]:
        plain: list[int] = []
        disguised: list[int] = []
        for index, (text, _, literal, _) in enumerate(texts):
            (disguised if literal and self._has_lookalike(text, literal) else plain).append(index)
        jobs = [(self._backend, plain, [texts[index].text for index in plain])]
        if disguised:
            names = [self._under_private_names(texts[index], index) for index in disguised]
            jobs.append((self._literal_backend, disguised, names))
        result: list[Any] = [None] * len(texts)
        for backend, indices, given in jobs:
            try:
                found = getattr(backend, method)(given, add_special_tokens=False)
            except BaseException as error:  # also a panic of Rust, as in _backend
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                raise InvalidInputError(
                    f"the tokenizer in {self.path} cannot encode a text ({error}); choose one that knows every "
                    "character, or has an unknown token"
                ) from None
            for index, encoding in zip(indices, found, strict=True):
                result[index] = encoding
        return result

    def _under_private_names(self, text: MarkedText, index: int) -> str:
        parts = self._controls.split(text.text, text.literal).parts
        if any(name in text.text for name in self._private_names.values()):
            raise InvalidInputError(
                f"text {index} of the batch holds private characters (U+F0000 to U+FFFFD) and the text of a control "
                "token; remove one of them from the record"
            )
        parts[1::2] = [self._private_names[part] for part in parts[1::2]]
        return "".join(parts)

    @cached_property
    def _private_names(self) -> dict[str, str]:
        return _private_names(self._controls.ids)

    @cached_property
    def _literal_backend(self) -> Any:
        return _backend(_with_private_names(self._document, self._private_names), Path(self.path))

    def _id_of(self, name: str) -> int | None:
        token = self.template_variables.get(name)
        if token is None:
            return None
        added: dict[str, int] = {one["content"]: one["id"] for one in self._document["added_tokens"]}
        return added[token] if token in added else self._backend.token_to_id(token)


def _load_again(
    path: str, fast: bool, asked: TokenizerFolder | None, expected: tuple[str, str | None]
) -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer.__new__(HuggingFaceTokenizer)
    folder = local_tokenizer(path)
    files = asked or read_tokenizer_folder(folder)
    if files.reason and files.keeps_file:
        files = files._replace(document=document_of_folder(folder))
    tokenizer._load(folder, fast, files, expected)
    return tokenizer


def _token_ends(
    widths: npt.NDArray[np.int64], last: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the end of each token, and of each text."""
    ends = np.cumsum(widths)
    return ends, np.concatenate([np.zeros(1, np.int64), ends])[last]


def _flat_ids(encodings: Sequence[Any]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    lengths = np.array([len(encoding) for encoding in encodings], np.int64)
    ids = chain.from_iterable(encoding.ids for encoding in encodings)
    return np.fromiter(ids, np.int32, int(lengths.sum())), lengths


def _only_what_decides_ids(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document without truncation, padding and post-processor, which adds tokens and trims positions."""
    return document | {"truncation": None, "padding": None, "post_processor": None}


def _fingerprint(document: dict[str, Any]) -> str:
    """Return a hash that depends neither on the order of keys nor on merges being text or pairs."""
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
    except BaseException as error:  # tokenizers raises plain Exception, and for a panic of Rust a BaseException
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise InvalidInputError(
            f"{folder / TOKENIZER_FILE} is not a tokenizer that `tokenizers` can load ({error}); download it again"
        ) from None


def _private_names(control_tokens: Iterable[str]) -> dict[str, str]:
    """Return a name of private characters for each control token, of the same length."""
    codes = range(_FIRST_PRIVATE, _LAST_PRIVATE + 1)
    return {token: chr(code) + _FILLER * (len(token) - 1) for code, token in zip(codes, control_tokens, strict=False)}


def _with_private_names(document: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a tokenizer.json with other names for its control tokens, in its vocabulary as well.

    `tokenizers` recognises added tokens wherever they occur, and some models also know them as words. Under private
    names of the same length, the text of a control token is ordinary text; ids and positions stay the same.
    """
    model = dict(document["model"])
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(token, token), *rest] for token, *rest in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if merge_product(merge) not in names]
    added = [{**token, "content": names.get(token["content"], token["content"])} for token in document["added_tokens"]]
    return {**document, "model": model, "added_tokens": added}
