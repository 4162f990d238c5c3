"""Control tokens in what people wrote: which texts are never to become one."""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from megatron_packed_sft.encode.masks.traced_renderer import Span
from megatron_packed_sft.encode.masks.turn_parts import Range, joined

# <think>, </tool_call>, <h1>: people write these on purpose, and mean the token.
_MARKUP = re.compile(r"</?[a-z][a-z0-9_]*>")


def tokens_to_escape(
    control_tokens: Collection[str], variables: Mapping[str, Any], structure: str, sought: Collection[str]
) -> list[str]:
    """Return the control tokens that the text of a message must not turn into.

    These are all but markup tags such as `<think>`, `<tool_call>` and `<h1>` and what the template itself looks for in
    messages; of these, too, the tokens that the tokenizer names (`<s>`) and by which the template holds turns apart
    (`<end_of_turn>`).

    Args:
        control_tokens: of the tokenizer.
        variables: what the tokenizer hands to templates: its special tokens as text, or lists of them.
        structure: what the template writes between turns.
        sought: what it looks for in messages.

    Example:
        >>> tokens_to_escape(["<|im_end|>", "<think>", "</s>"], {"eos_token": "</s>"}, "", [])
        ['<|im_end|>', '</s>']
    """
    named = {value for value in variables.values() if isinstance(value, str)}
    meant = {text.strip() for text in sought}
    return [
        token
        for token in control_tokens
        if token.strip() and (token in named or token in structure or not (token in meant or _MARKUP.fullmatch(token)))
    ]


class ControlMarks:
    """Counts the places of a text where a control token may begin, to see without a search that strings hold none.

    A rendered text has at least as many of these places as its constants; if it has no more, no string holds the
    beginning of a control token, and none begins in a string and ends behind it.

    Args:
        tokens: that are escaped.

    Example:
        >>> marks = ControlMarks(["<|im_start|>", "<|im_end|>"])
        >>> marks.count("<|im_end|>"), marks.count("a < b"), marks.count("<|im_end|> is a <|token|>")
        (1, 0, 2)
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        # Two characters, or one where two could overlap with themselves.
        self._beginnings = sorted({token[: 2 if token[:1] != token[1:2] else 1] for token in tokens})

    def count(self, text: str) -> int:
        """Return how many there are."""
        return sum(map(text.count, self._beginnings))


def literal_ranges(text: str, spans: Sequence[Span], pattern: re.Pattern[str]) -> list[Range]:
    """Return where control tokens of a text lie, wholly or in part, in what messages say.

    Example:
        >>> from megatron_packed_sft.encode.masks.authored_text import Author
        >>> literal_ranges("<e>Hi<e><e>", [Span(3, 8, Author(0, ()))], re.compile("<e>"))
        [(5, 8)]
    """
    starts = [span.start for span in spans]
    found = []
    for match in pattern.finditer(text):
        number = bisect.bisect_left(starts, match.end()) - 1
        if number >= 0 and spans[number].end > match.start():
            found.append(match.span())
    return joined(found)
