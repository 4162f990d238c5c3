"""Control tokens in a text: where they are, and where ordinary text only looks like one."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

# SentencePiece writes a space like this.
SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
_HTML_TAG = re.compile(
    "</?(?:a|b|bbox|blockquote|body|br|caption|code|div|em|footer|h[1-6]|head|header|hr|html|i|iframe|img|li|ol|p|pre"
    "|s|span|strong|sub|sup|table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)


class SplitText(NamedTuple):
    """A text split at its control tokens.

    Args:
        parts: ordinary text, control token, ordinary text, ..., ordinary text; ordinary text may be empty.
        has_lookalike: whether an ordinary part holds the text of a control token.
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
        # Almost always each literal range is inside one ordinary part, which is quick to check.
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

    White space and HTML (Gemma has tokens for both) are ordinary text: a message that contains them must get the ids
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
    """Return a pattern for the longest of many words; shared beginnings are tried once, so that thousands are cheap."""
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
