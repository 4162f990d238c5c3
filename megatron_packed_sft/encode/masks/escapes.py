"""Control tokens in what people wrote: which texts are never to become one."""

from __future__ import annotations

import bisect
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_packed_sft.encode.masks.trace import Span
from megatron_packed_sft.encode.masks.turns import Range, joined

# <think>, </tool_call>, <h1>: people write these on purpose, and mean the token.
_MARKUP = re.compile(r"</?[a-z][a-z0-9_]*>")


def tokens_to_escape(
    control_tokens: Collection[str], variables: Mapping[str, Any], structure: Collection[str]
) -> list[str]:
    """Return the control tokens that the text of a message must not turn into.

    These are all except markup tags such as `<think>`, `<tool_call>` and `<h1>`; and of the tags, those that the
    tokenizer names as special (`<s>`) and those by which the template holds turns apart (`<end_of_turn>`).

    Args:
        control_tokens: of the tokenizer.
        variables: what the tokenizer hands to templates: its special tokens as text, or lists of them.
        structure: control tokens that the template writes between turns.

    Example:
        >>> tokens_to_escape(["<|im_end|>", "<think>", "</s>"], {"eos_token": "</s>"}, [])
        ['<|im_end|>', '</s>']
    """
    named = {text for value in variables.values() for text in ([value] if isinstance(value, str) else value or [])}
    return [
        token
        for token in control_tokens
        if token.strip() and (token in named or token in structure or not _MARKUP.fullmatch(token))
    ]


def literal_ranges(text: str, spans: Sequence[Span], pattern: re.Pattern[str]) -> list[Range]:
    """Return where control tokens of a text lie, wholly or in part, in what messages say.

    Example:
        >>> literal_ranges("<e>Hi<e><e>", [Span(3, 8, 0)], re.compile("<e>"))
        [(5, 8)]
    """
    starts = [span.start for span in spans]
    found = []
    for match in pattern.finditer(text):
        number = bisect.bisect_left(starts, match.end()) - 1
        if number >= 0 and spans[number].end > match.start():
            found.append(match.span())
    return joined(found)
