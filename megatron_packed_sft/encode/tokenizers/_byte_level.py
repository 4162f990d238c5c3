"""A byte-level BPE tokenizer.json: what its tokens are, and whether tiktoken would give the same ids.

tiktoken merges any two neighbours that form a token, lowest id first. `tokenizers` merges only the listed pairs, in the
order of the list. They agree if the list is sorted by the ids it produces and every token can be reached through
it: until a token's own merge is due, its bytes are merged as they would be alone, so the last two parts are always the
same. A token that cannot be reached is harmless if whole words are looked up first (`ignore_merges`), unless its merges
stop at two parts, which tiktoken would still join.
"""

from __future__ import annotations

import unicodedata
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import tokenizers

# The pattern that ByteLevel uses if `use_regex` is on.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Model settings with which a token may stand for other bytes than its spelling.
_NOT_BYTES = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")


def byte_alphabet() -> dict[int, int]:
    """Return the byte that each printable character of a byte-level vocabulary stands for: code point -> byte.

    Example:
        >>> alphabet = byte_alphabet(); alphabet[ord("a")] == ord("a"), alphabet[ord("Ġ")] == ord(" ")
        (True, True)
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + index: byte for index, byte in enumerate(hidden)}


def split_pattern(document: dict[str, Any]) -> str | None:
    """Return the one pattern that splits text into words, or None if words are split in any other way.

    Example:
        >>> split_pattern({"pre_tokenizer": {"type": "Whitespace"}}) is None
        True
    """
    pre_tokenizer = document.get("pre_tokenizer") or {}
    is_sequence = pre_tokenizer.get("type") == "Sequence"
    steps = pre_tokenizer.get("pretokenizers", []) if is_sequence else [pre_tokenizer]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return GPT2_PATTERN if steps[0].get("use_regex", True) else None
    if len(steps) != 2 or steps[1].get("use_regex", True):
        return None
    cut = steps[0]
    if cut.get("type") != "Split" or cut.get("behavior") != "Isolated" or cut.get("invert"):
        return None
    pattern = cut.get("pattern", {}).get("Regex")
    return pattern if isinstance(pattern, str) else None


def token_bytes(document: dict[str, Any], leave_out: set[str]) -> dict[bytes, int] | None:
    """Return bytes -> id of all tokens except those to leave out, or None if a token is not spelled in bytes.

    Example:
        >>> token_bytes({"model": {"vocab": {"Ġa": 3, "<s>": 4}}}, {"<s>"})
        {b' a': 3}
    """
    vocabulary = _spelled_in_bytes(document, leave_out)
    if vocabulary is None:
        return None
    data = "".join(vocabulary).translate(byte_alphabet()).encode("latin-1")  # one byte for each character
    ends = list(accumulate(map(len, vocabulary), initial=0))
    return {data[start:end]: number for (start, end), number in zip(pairwise(ends), vocabulary.values(), strict=True)}


def byte_lengths(document: dict[str, Any]) -> npt.NDArray[np.int64] | None:
    """Return how many bytes of text each id stands for, or None if that depends on more than the id.

    Tokens that are bytes of the unchanged text follow each other without gaps, so their lengths give their positions.

    Example:
        >>> level = {"type": "ByteLevel", "add_prefix_space": False}
        >>> model = {"type": "BPE", "vocab": {"a": 0, "Ġa": 1}}
        >>> byte_lengths({"model": model, "pre_tokenizer": level, "added_tokens": [{"id": 2, "content": "<s>"}]})
        array([1, 2, 3])
    """
    model = document["model"]
    added = {token["content"]: token["id"] for token in document["added_tokens"]}
    if model.get("type", "BPE") != "BPE" or any(model.get(name) for name in _NOT_BYTES) or other_normalizer(document):
        return None
    pre_tokenizer = document.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space", True):
        return None
    vocabulary = _spelled_in_bytes(document, set(added))
    if vocabulary is None:
        return None
    lengths = {number: len(token) for token, number in vocabulary.items()}
    lengths |= {number: len(text.encode()) for text, number in added.items()}
    result = np.zeros(max(lengths) + 1, np.int64)
    result[list(lengths)] = list(lengths.values())
    return result


def other_normalizer(document: dict[str, Any]) -> str | None:
    """Return the type of a normalizer that does more than compose characters (NFC), or None.

    Example:
        >>> other_normalizer({"normalizer": {"type": "NFC"}}), other_normalizer({"normalizer": {"type": "Lowercase"}})
        (None, 'Lowercase')
    """
    normalizer = document.get("normalizer")
    if normalizer is None or normalizer == {"type": "NFC"} or normalizer.get("normalizers") == []:
        return None
    return str(normalizer.get("type"))


def is_left_alone(document: dict[str, Any], text: str) -> bool:
    r"""Return whether the normalizer leaves a text unchanged, given that it does nothing but NFC or nothing at all.

    Example:
        >>> is_left_alone({"normalizer": {"type": "NFC"}}, "e\u0301"), is_left_alone({}, "e\u0301")
        (False, True)
    """
    return text.isascii() or not document.get("normalizer") or unicodedata.is_normalized("NFC", text)


def _spelled_in_bytes(document: dict[str, Any], leave_out: set[str]) -> dict[str, int] | None:
    vocabulary = {token: number for token, number in document["model"]["vocab"].items() if token not in leave_out}
    return vocabulary if set(map(ord, set("".join(vocabulary)))) <= byte_alphabet().keys() else None


def merge_product(merge: str | list[str]) -> str:
    """Return the token that a merge makes; files hold merges as text or as pairs.

    Example:
        >>> merge_product("Ġ a"), merge_product(["Ġ", "a"])
        ('Ġa', 'Ġa')
    """
    return merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)


def structural_refusal(document: dict[str, Any]) -> str | None:
    """Return why the settings of a tokenizer.json rule out tiktoken, or None if they do not.

    Example:
        >>> structural_refusal({"model": {"type": "Unigram"}})
        'its model is Unigram, not BPE'
    """
    model = document["model"]
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        return f"its model is {model.get('type')}, not BPE"
    for name in ("dropout", *_NOT_BYTES):
        if model.get(name):
            return f"its model sets {name}"
    if normalizer := other_normalizer(document):
        return f"its normalizer is {normalizer}"
    if split_pattern(document) is None:
        return "its pre-tokenizer is not one pattern before ByteLevel"
    added = document.get("added_tokens", [])
    for token in added:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            return f"its added token {token['content']!r} depends on its surroundings"
        if not unicodedata.is_normalized("NFC", token["content"]):
            return f"its added token {token['content']!r} is not in Unicode normal form C"
    # `tokenizers` finds those that are not normalized first.
    early = [token["content"] for token in added if not token["normalized"]]
    late = [token["content"] for token in added if token["normalized"]]
    if early and late and _may_overlap(early, late):
        return "its normalized and other added tokens may overlap"
    return None


def merge_refusal(document: dict[str, Any], backend: tokenizers.Tokenizer, leave_out: set[str]) -> str | None:
    """Return why merging by ids would differ from the listed merges (see the top of this file), or None.

    This takes half a second for 150,000 tokens, so it is done once per file, not once per process.
    """
    model = document["model"]
    vocabulary: dict[str, int] = model["vocab"]
    ids = np.array([vocabulary.get(merge_product(merge), -1) for merge in model["merges"]], np.int64)
    if (np.diff(ids) < 0).any() or (ids < 0).any():
        return "its merges are not in the order of ids"
    ignore_merges = bool(model.get("ignore_merges"))
    bpe: Any = backend.model
    bpe.ignore_merges = False  # shows what the merges alone can reach
    try:
        for token, number in vocabulary.items():
            if token in leave_out:
                continue
            found = bpe.tokenize(token)
            if len(found) == 1 and found[0].id == number:
                continue
            if len(found) < 3 or not ignore_merges:
                return f"its token {token!r} cannot be reached through its merges"
    finally:
        bpe.ignore_merges = ignore_merges
    return None


def _may_overlap(early: list[str], late: list[str]) -> bool:
    def touches(left: str, right: str) -> bool:
        return right in left or any(left.endswith(right[:size]) for size in range(1, min(len(left), len(right))))

    return any(touches(one, other) or touches(other, one) for one in early for other in late)
