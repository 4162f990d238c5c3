"""The interface of tokenizers, how one is loaded, and how control tokens are found in a text."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron_packed_sft.encode.sequences import MarkedText, Sequences
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.remote.copies import copy_of
from megatron_packed_sft.support.paths import is_url


class Tokenizer(Protocol):
    """What the package needs of a tokenizer. Tokenizers are pickled by their paths and are cheap to load again."""

    @property
    def path(self) -> str:
        """The file or folder it was loaded from."""

    @property
    def name(self) -> str:
        """A short name for manifests, from the folder or file."""

    @property
    def fingerprint(self) -> str:
        """A hash of everything that determines ids; equal files have equal fingerprints anywhere."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-sequence id, if any."""

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence id, if any."""

    @property
    def pad_id(self) -> int | None:
        """The padding id, if any."""

    @property
    def chat_template(self) -> str | None:
        """Its own Jinja template, if any."""

    @property
    def tool_template(self) -> str | None:
        """Its separate Jinja template for chats with tools, if any."""

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """Variables for its template: bos_token, eos_token and the other special tokens, as text."""

    @property
    def stop_tokens(self) -> Sequence[str]:
        """The texts at which generation stops: the end of sequence and those of generation_config.json."""

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Text -> id of every token that is recognised as a whole (added tokens, user-defined symbols)."""

    def encode_many(self, texts: Sequence[MarkedText]) -> Sequences:
        """Tokenize many texts and map their trained characters to tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, control tokens included."""


# Control tokens in a text: where they are, and where ordinary text only looks like one.

# How SentencePiece writes a space.
SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
_HTML_TAG = re.compile(
    "</?(?:a|b|bbox|blockquote|body|br|caption|code|div|em|footer|h[1-6]|head|header|hr|html|i|iframe|img|li|ol|p|pre"
    "|s|span|strong|sub|sup|table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)


class SplitText(NamedTuple):
    """A text split at its control tokens.

    Args:
        parts: ordinary text, control token, ordinary text, ..., ordinary text; ordinary text may be empty.
        has_lookalike: whether an ordinary part contains the text of a control token.
    """

    parts: list[str]
    has_lookalike: bool


class ControlTokens:
    """Find control tokens as tokenizers do: the leftmost first, then the longest.

    Args:
        ids: text -> id of each control token.

    Example:
        >>> controls = ControlTokens({"<s>": 1, "</s>": 2})
        >>> controls.split("<s>a</s>").parts
        ['', '<s>', 'a', '</s>', '']
        >>> controls.split("<s>a</s>", literal=[(3, 8)])
        SplitText(parts=['', '<s>', 'a</s>'], has_lookalike=True)
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = dict(ids)
        self._pattern = control_pattern(self.ids)

    def split(self, text: str, literal: Sequence[tuple[int, int]] = ()) -> SplitText:
        """Split a text at its control tokens, except those that begin or end in a literal range."""
        parts = self._pattern.split(text)
        if not literal or len(parts) == 1:
            return SplitText(parts, has_lookalike=False)
        # Nearly always, each literal range lies inside one ordinary part, which is quick to check.
        ends = list(accumulate(map(len, parts)))
        for begin, end in literal:
            place = bisect_right(ends, begin)
            if begin < end and (place % 2 or ends[place] < end):
                return self._split_around(text, literal)
        return SplitText(parts, has_lookalike=False)

    def _split_around(self, text: str, literal: Sequence[tuple[int, int]]) -> SplitText:
        """Split match by match; after a lookalike the search continues one character later."""
        parts: list[str] = []
        has_lookalike = False
        begins = [begin for begin, _ in literal]
        done = position = 0
        while match := self._pattern.search(text, position):
            start, end = match.span()
            if _holds(literal, begins, start) or _holds(literal, begins, end - 1):
                has_lookalike = True
                position = start + 1
                continue
            parts += (text[done:start], match[0])
            done = position = end
        parts.append(text[done:])
        return SplitText(parts, has_lookalike)


def control_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern with one group that matches the longest of some tokens; without tokens it matches nothing.

    Example:
        >>> control_pattern(["<s>", "</s>"]).findall("<s>Hi</s>")
        ['<s>', '</s>']
    """
    nothing = r"\0\A"  # a character before the start of the text: never matches, and fails fast
    return re.compile(f"({_any_of(tokens) or nothing})")


def is_control_text(text: str, *, special: bool) -> bool:
    r"""Return whether a token that is recognised as a whole controls the model.

    White space and HTML, for which Gemma has tokens, are ordinary text: a message that contains them must get the ids
    that the model knows.

    Example:
        >>> [is_control_text(text, special=False) for text in ("<|im_end|>", "<think>", "\n\n", "</td>")]
        [True, True, False, False]
    """
    if special:
        return True
    return bool(text.replace(SPACE_MARK, " ").strip()) and not _HTML_TAG.fullmatch(text)


def _holds(ranges: Sequence[tuple[int, int]], begins: list[int], position: int) -> bool:
    index = bisect_right(begins, position) - 1
    return index >= 0 and position < ranges[index][1]


def _any_of(words: Iterable[str]) -> str:
    """Return a pattern for the longest of many words; shared beginnings are tried once, so thousands are cheap."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern_of(tree)


def _pattern_of(node: dict[str, Any]) -> str:
    branches = [re.escape(character) + _pattern_of(rest) for character, rest in node.items() if character]
    if not branches:
        return ""
    if len(branches) == 1 and "" not in node:
        return branches[0]
    # A word that ends here matches only if no longer one does.
    return f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")


# Loading: from a path, or from a URL through the cache of the node; never from a hub.

_HUGGINGFACE_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


def load_tokenizer(path: str | os.PathLike[str], *, kind: str = "auto", fast: bool = True) -> Tokenizer:
    """Load a tokenizer from a file or folder.

    Args:
        path: a SentencePiece .model file, a folder with one, or a Hugging Face tokenizer folder; or the URL of one of
            these, of which only the tokenizer's own files are fetched.
        kind: sentencepiece, huggingface, or auto to decide by the files.
        fast: for Hugging Face, use gigatoken if it gives the same ids.
    """
    if kind not in ("auto", "sentencepiece", "huggingface"):
        raise InvalidInputError(f"tokenizer.kind {kind!r} is unknown; use one of auto, sentencepiece, huggingface")
    location = local_tokenizer(path)
    if not location.exists():
        raise InvalidInputError(
            f"{path} does not exist; give a local tokenizer folder or .model file (nothing is downloaded from a hub, "
            "so fetch a tokenizer from there first)"
        )
    models = [location] if location.is_file() else sorted(location.glob("*.model"))
    if kind == "auto":
        kind = "huggingface" if _looks_like_huggingface(location) else "sentencepiece"
    if kind == "huggingface":
        from megatron_packed_sft.encode.tokenizers.huggingface import HuggingFaceTokenizer

        return HuggingFaceTokenizer(location, fast=fast)
    if len(models) != 1:
        if not models:
            raise InvalidInputError(
                f"{path} has no tokenizer.json and no SentencePiece .model file; give the folder or file of a tokenizer"
            )
        names = ", ".join(model.name for model in models)
        raise InvalidInputError(f"{path} holds several SentencePiece models ({names}); give the path of one of them")
    from megatron_packed_sft.encode.tokenizers.sentencepiece import SentencePieceTokenizer

    return SentencePieceTokenizer(models[0])


def _looks_like_huggingface(location: Path) -> bool:
    if location.is_file():
        return location.name in _HUGGINGFACE_FILES
    return any((location / name).is_file() for name in _HUGGINGFACE_FILES)


# What a tokenizer in an object store consists of: its own files, not the weights beside them.
_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken")
_MOST_BYTES = 512 << 20


def local_tokenizer(path: str | os.PathLike[str]) -> Path:
    """Return the local path of a tokenizer, fetching it if it is a URL."""
    if not is_url(path):
        return Path(path)
    return copy_of(os.fspath(path), wanted=belongs_to_tokenizer, most_bytes=_MOST_BYTES, kind="a tokenizer")


def belongs_to_tokenizer(name: str) -> bool:
    """Return whether a file of a folder is one of its tokenizer's."""
    return "/" not in name and name.endswith(_SUFFIXES) and not name.endswith(".index.json")
