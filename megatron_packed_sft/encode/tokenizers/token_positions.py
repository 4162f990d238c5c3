"""Where tokens are in their text, and therefore which of them are trained.

A position is a character or a UTF-8 byte, whichever is cheaper for the tokenizer. The texts of a batch are placed end
to end, so that one pass marks them all:

    text        u s e r : h i | b o t : h o          trained: (4, 6) of the second text
    tokens      [user] [:] [hi] [bot] [:] [ho]
    train         0     0   0     0    0   1
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.encode.sequences import Sequences
from megatron_packed_sft.encode.tokenizers.interface import SPACE_MARK, MarkedText, Segment
from megatron_packed_sft.errors import InvalidInputError

Positions = npt.NDArray[np.int64]


def utf8_lengths(texts: Sequence[MarkedText]) -> list[int]:
    """Return the length of each text in UTF-8; raise an error if one cannot be encoded.

    Example:
        >>> utf8_lengths([MarkedText("abc"), MarkedText("né")])
        [3, 3]
    """
    lengths = []
    for index, (text, *_) in enumerate(texts):
        if text.isascii():
            lengths.append(len(text))
            continue
        try:
            lengths.append(len(text.encode()))
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"text {index} of the batch holds half a surrogate pair at character {error.start}; fix the "
                "record, for instance with text.encode('utf-16', 'surrogatepass').decode('utf-16')"
            ) from None
    return lengths


class TrainedRanges(NamedTuple):
    """Where all trained ranges of a batch begin and end, with its texts placed end to end."""

    begins: Positions
    ends: Positions
    segments: tuple[Positions, npt.NDArray[np.float32], npt.NDArray[np.uint8]] | None = None  # ends, weights, kinds


def trained_ranges(texts: Sequence[MarkedText], lengths: Sequence[int], *, in_bytes: bool) -> TrainedRanges:
    """Return where the trained ranges of a batch are.

    Args:
        texts: the batch.
        lengths: of each text, in characters or bytes.
        in_bytes: whether positions are bytes.

    Example:
        >>> ranges = trained_ranges([MarkedText("né"), MarkedText("éa", [(1, 2)])], [3, 3], in_bytes=True)
        >>> ranges.begins.tolist(), ranges.ends.tolist()
        ([5], [6])
    """
    begins: list[int] = []
    ends: list[int] = []
    base = 0
    for index, ((text, trained, *_), length) in enumerate(zip(texts, lengths, strict=True)):
        if trained:
            counts_bytes = in_bytes and length != len(text)
            previous = place = 0
            for begin, end in trained:
                if not previous <= begin <= end <= len(text):
                    raise InvalidInputError(
                        f"text {index} of the batch has the trained range ({begin}, {end}) after position {previous} "
                        f"of {len(text)} characters; give ascending ranges inside the text"
                    )
                if counts_bytes:
                    place += len(text[previous:begin].encode())
                    width = len(text[begin:end].encode())
                else:
                    place, width = begin, end - begin
                previous = end
                if width:
                    begins.append(base + place)
                    ends.append(base + place + width)
                place += width
        base += length
    found = TrainedRanges(np.array(begins, np.int64), np.array(ends, np.int64))
    if any(text.segments for text in texts):
        return found._replace(segments=_segments(texts, lengths, in_bytes=in_bytes))
    return found


def _segments(
    texts: Sequence[MarkedText], lengths: Sequence[int], *, in_bytes: bool
) -> tuple[Positions, npt.NDArray[np.float32], npt.NDArray[np.uint8]]:
    """Return where the segments of a batch end, their weights and their kinds; a text without any is one segment."""
    ends, weights, kinds = [], [], []
    base = 0
    for text, length in zip(texts, lengths, strict=True):
        counts_bytes = in_bytes and length != len(text.text)
        for segment in text.segments or (Segment(0, len(text.text)),):
            ends.append(base + (len(text.text[: segment.end].encode()) if counts_bytes else segment.end))
            weights.append(segment.weight)
            kinds.append(segment.kind)
        base += length
    return np.array(ends, np.int64), np.array(weights, np.float32), np.array(kinds, np.uint8)


def with_train_mask(
    input_ids: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int64],
    token_starts: Positions,
    token_ends: Positions,
    ranges: TrainedRanges,
) -> Sequences:
    """Return the sequences of a batch: a token is trained if it overlaps a trained range.

    A token that overlaps several segments has the weight and the kind of the first.

    Example:
        >>> ids, at = np.array([7, 8], np.int32), np.array([0, 2, 5])
        >>> ranges = TrainedRanges(np.array([2]), np.array([5]))
        >>> with_train_mask(ids, np.array([2]), at[:-1], at[1:], ranges).train.tolist()
        [0, 1]
    """
    begins, ends, segments = ranges
    record = np.arange(len(lengths))
    if len(begins) == 0:
        return Sequences(input_ids, np.zeros(len(input_ids), np.uint8), lengths, record)
    # Ranges ascend and do not touch: a token that overlaps any overlaps the first that ends after the token begins.
    candidate = np.searchsorted(ends, token_starts, side="right")
    is_behind_all = candidate == len(ends)
    candidate[is_behind_all] = 0
    trained = ~is_behind_all & (token_starts < token_ends) & (begins[candidate] < token_ends)
    straddling = trained & ((token_starts < begins[candidate]) | (token_ends > ends[candidate]))
    found = Sequences(input_ids, trained.view(np.uint8), lengths, record, int(np.count_nonzero(straddling)))
    if segments is None:
        return found
    segment_ends, weights, kinds = segments
    segment = np.searchsorted(segment_ends, np.maximum(token_starts, begins[candidate]), side="right")
    segment = np.where(trained, segment, 0)
    return found._replace(
        weights=np.where(trained, weights[segment], np.float32(0)), kinds=np.where(trained, kinds[segment], np.uint8(0))
    )


# How many bytes of text each id stands for, where a tokenizer.json tells.
#
# Tokens that spell the unchanged text follow each other without gaps, so their lengths give their positions, and the
# tokenizer need not compute offsets. This holds for two families: byte-level BPE (Qwen, Llama 3, GPT-2), whose tokens
# are bytes in disguise, and BPE that writes a space as a mark and rare characters as bytes (Gemma, Llama 2).

# Model settings with which a token may stand for bytes other than its spelling.
_NOT_BYTES = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
_SPACES_TO_MARKS = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class TokenLengths(NamedTuple):
    """The lengths of a tokenizer's tokens.

    Args:
        num_bytes: of each id.
        composes: whether the normalizer composes characters (NFC), which changes some texts.
        marks_spaces: whether spaces become marks, so that a mark in the text looks like a space.
        takes_prefix: whether the tokenizer may put a space in front of a text, as part of its first token.
    """

    num_bytes: npt.NDArray[np.int64]
    composes: bool = False
    marks_spaces: bool = False
    takes_prefix: bool = False

    def hold_for(self, text: str) -> bool:
        r"""Return whether the tokens of a text spell it as it is.

        Example:
            >>> lengths = TokenLengths(np.ones(3, np.int64), composes=True)
            >>> lengths.hold_for("e\u0301"), lengths.hold_for("\u00e9")
            (False, True)
        """
        if text.isascii():
            return True
        if self.marks_spaces and SPACE_MARK in text:
            return False
        return not self.composes or unicodedata.is_normalized("NFC", text)


def byte_alphabet() -> dict[int, int]:
    """Return the byte that each printable character of a byte-level vocabulary stands for: code point -> byte.

    Example:
        >>> alphabet = byte_alphabet(); alphabet[ord("a")] == ord("a"), alphabet[ord("Ġ")] == ord(" ")
        (True, True)
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + index: byte for index, byte in enumerate(hidden)}


def token_lengths(document: dict[str, Any]) -> TokenLengths | None:
    """Return the lengths of all tokens, or None if they depend on more than the id.

    Example:
        >>> level = {"type": "ByteLevel", "add_prefix_space": False}
        >>> model = {"type": "BPE", "vocab": {"a": 0, "Ġa": 1}}
        >>> token_lengths(
        ...     {"model": model, "pre_tokenizer": level, "added_tokens": [{"id": 2, "content": "<s>"}]}
        ... ).num_bytes
        array([1, 2, 3])
    """
    model = document["model"]
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        return None
    added = {token["content"]: token["id"] for token in document["added_tokens"]}
    vocabulary = {token: number for token, number in model["vocab"].items() if token not in added}
    if _is_byte_level(document):
        # A token not spelled in bytes (Command R has emoji) never occurs; if it did, the lengths would not add up.
        sizes = list(map(len, vocabulary))
        disguises = "".join(map(chr, byte_alphabet()))
        if not set("".join(vocabulary)) <= set(disguises):
            sizes = [0 if token.strip(disguises) else len(token) for token in vocabulary]
        return TokenLengths(_table(vocabulary, sizes, added), composes=_composes(document))
    prefix = _prefix_of_marked_spaces(document)
    if prefix is None or not all(
        f"<0x{value:02X}>" in vocabulary or (value < 0x80 and chr(value) in vocabulary) for value in range(256)
    ):
        return None  # some characters have no token
    sizes = [
        1 if token[0] == "<" and _BYTE_TOKEN.fullmatch(token) else len(token.replace(SPACE_MARK, " ").encode())
        for token in vocabulary
    ]
    return TokenLengths(_table(vocabulary, sizes, added), marks_spaces=True, takes_prefix=prefix)


def merge_product(merge: str | list[str]) -> str:
    """Return the token that a merge makes; files hold merges as text or as pairs.

    Example:
        >>> merge_product("Ġ a"), merge_product(["Ġ", "a"])
        ('Ġa', 'Ġa')
    """
    return merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)


def _is_byte_level(document: dict[str, Any]) -> bool:
    normalizer = document.get("normalizer")
    if normalizer and not _composes(document) and normalizer.get("normalizers") != []:
        return False
    if any(document["model"].get(name) for name in _NOT_BYTES):
        return False
    pre_tokenizer = document.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return bool(steps) and steps[-1].get("type") == "ByteLevel" and not steps[-1].get("add_prefix_space", True)


def _composes(document: dict[str, Any]) -> bool:
    return bool(document.get("normalizer") == {"type": "NFC"})


def _prefix_of_marked_spaces(document: dict[str, Any]) -> bool | None:
    """Return whether a text gets a space in front; None if spaces are marked in another way, or not at all."""
    normalizer, pre_tokenizer = document.get("normalizer"), document.get("pre_tokenizer")
    if not document["model"].get("byte_fallback"):
        return None
    if normalizer is None and pre_tokenizer is not None and pre_tokenizer.get("type") == "Metaspace":
        if pre_tokenizer.get("replacement") != SPACE_MARK:
            return None
        return {"first": True, "never": False}.get(str(pre_tokenizer.get("prepend_scheme")))
    if normalizer is not None and normalizer.get("type") == "Sequence" and len(normalizer["normalizers"]) == 1:
        normalizer = normalizer["normalizers"][0]
    # After spaces have become marks, a split at spaces finds none.
    is_idle = pre_tokenizer is None or (
        pre_tokenizer.get("type") == "Split" and pre_tokenizer.get("pattern") == {"String": " "}
    )
    return False if normalizer == _SPACES_TO_MARKS and is_idle else None


def _table(vocabulary: dict[str, int], sizes: list[int], added: dict[str, int]) -> npt.NDArray[np.int64]:
    result = np.zeros(1 + max([*vocabulary.values(), *added.values()]), np.int64)
    result[list(vocabulary.values())] = sizes
    result[list(added.values())] = [len(text.encode()) for text in added]
    return result
