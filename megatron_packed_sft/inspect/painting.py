r"""Show tokens to people: in colour on a terminal, with brackets in a pipe, and with every character visible.

on a terminal    green: trained    dim: given    bold or blue: control tokens    underlined: text like a control token
in a pipe        ⟦trained⟧  ⟦×0.5 trained with a weight⟧  given  ‹text:<|im_end|>›
a line break     ⏎ and a new line        a tab                ⇥
ESC and others   ␛ ␀ ␡                   invisible characters ‹U+202E›

No text of a record can move the cursor, hide text or reverse its direction.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from megatron_packed_sft.encode.tokenizers.interface import control_pattern
from megatron_packed_sft.inspect.tokens_of_bin import Token
from megatron_packed_sft.support.wording import plural

if TYPE_CHECKING:
    from rich.text import Text

LINE_END = "⏎"
OPEN_NOTE, CLOSE_NOTE = (
    "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}",
    "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}",
)
_TAB = "⇥ "
_DELETE = 0x7F
# Format characters that scripts and emoji need.
_JOINERS = frozenset("\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_PRINTABLE_ASCII = re.compile(r"[ -~]*")
TRAINED, GIVEN = "green", "dim"
TRAINED_CONTROL, GIVEN_CONTROL = "bold green", "cyan"
TEXT_ONLY, CUT, NOTE, WEIGHT, LABEL = "underline", "red strike", "red", "magenta", "bold cyan"
OPEN, CLOSE, OPEN_CUT, CLOSE_CUT = "⟦", "⟧", "⟪", "⟫"
_TIMES = "\N{MULTIPLICATION SIGN}"
_RESERVED = OPEN + CLOSE + OPEN_CUT + CLOSE_CUT + OPEN_NOTE
_FEWEST_PADS = 2


def visible(text: str, *, reserved: str = "", breaks: bool = True) -> str:
    r"""Return text with every character visible and none that controls a terminal.

    Args:
        text: any text.
        reserved: characters with a meaning in the output, to be written by their number.
        breaks: start a new line after the sign of a line break.

    Example:
        >>> visible("a\x1b[31mb\tc\u202e", breaks=False)
        'a␛[31mb⇥ c‹U+202E›'
        >>> visible("one\n", breaks=False), visible("[x]", reserved="[")
        ('one⏎', '‹U+005B›x]')
    """
    if _PRINTABLE_ASCII.fullmatch(text) and not any(character in text for character in reserved):
        return text
    return "".join(_shown(character, reserved, breaks) for character in text)


def quoted(text: str, *, longest: int = 60) -> str:
    r"""Return text on one line, cut in the middle if it is long.

    Example:
        >>> quoted("<|im_end|>\n"), quoted("x" * 100, longest=11)
        ('<|im_end|>⏎', 'xxxxx…xxxxx')
    """
    shown = visible(text, breaks=False)
    if len(shown) <= longest:
        return shown
    half = (longest - 1) // 2
    return f"{shown[:half]}…{shown[len(shown) - half :]}"


def note(text: str) -> str:
    """Return a note to insert into a text.

    Example:
        >>> note("U+202E")
        '‹U+202E›'
    """
    return f"{OPEN_NOTE}{text}{CLOSE_NOTE}"


def _shown(character: str, reserved: str, breaks: bool) -> str:
    if " " <= character <= "~" and character not in reserved:
        return character
    if character == "\n":
        return f"{LINE_END}\n" if breaks else LINE_END
    if character == "\t":
        return _TAB
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's pictures of control characters
    if code == _DELETE:
        return "\N{SYMBOL FOR DELETE}"
    is_hidden = unicodedata.category(character) in _HIDDEN and character not in _JOINERS
    return note(f"U+{code:04X}") if is_hidden or character in reserved else character


class Stretch(NamedTuple):
    """Neighbouring tokens that are shown the same way.

    Args:
        text: of all tokens.
        weight: of their loss, 0 if they are not trained.
        is_control: they are control tokens.
        is_lookalike: they are text that spells a control token.
        is_padding: they are padding at the end of a sequence.
    """

    text: str
    weight: float
    is_control: bool = False
    is_lookalike: bool = False
    is_padding: bool = False


class Painter:
    """Turns tokens into rich text.

    Args:
        control_tokens: texts of the tokenizer's control tokens, to find text that looks like one.
        in_colour: use colours, otherwise brackets.
        pad_id: the padding id, if it is known.
    """

    def __init__(self, control_tokens: Iterable[str] = (), *, in_colour: bool, pad_id: int | None = None) -> None:
        self._pattern = control_pattern(token for token in control_tokens if token.strip())
        self._in_colour = in_colour
        self._pad_id = pad_id
        self.has_lookalikes = self.has_weights = False

    def text(self, tokens: Sequence[Token]) -> Text:
        """Return tokens as one text."""
        return self.stretches(self._stretches(tokens))

    def stretches(self, stretches: Iterable[Stretch]) -> Text:
        """Return stretches as one text."""
        from rich.text import Text

        shown = Text()
        for is_trained, run in groupby(stretches, key=lambda one: (one.weight > 0, one.weight)):
            self._append_run(shown, list(run), *is_trained)
        if shown.plain.endswith("\n"):
            shown.right_crop(1)  # printing it ends the line
        return shown

    def cut(self, tokens: Sequence[Token], *, longest: int = 300) -> Text:
        """Return tokens that were cut off, shortened if they are long."""
        from rich.text import Text

        text = "".join(token.text for token in tokens)
        shown = self._visible(text[:longest])
        if len(text) > longest:
            shown += f" … {plural(len(text) - longest, 'character')} more"
        if self._in_colour:
            return Text(shown.removesuffix("\n"), style=CUT)
        return Text(f"{OPEN_CUT}{shown}{CLOSE_CUT}")

    def legend(self) -> Text:
        """Return a legend of the colours or brackets."""
        from rich.text import Text

        parts: list[tuple[str, str]]
        if self._in_colour:
            parts = [("trained", TRAINED), ("given", GIVEN)]
            parts += [("<trained control token>", TRAINED_CONTROL), ("<given control token>", GIVEN_CONTROL)]
            parts += [("<text like a control token>", f"{TEXT_ONLY} {GIVEN}")] if self.has_lookalikes else []
            parts += [(f"{_TIMES}0.5", WEIGHT), ("loss weight", "")] if self.has_weights else []
            return Text.assemble(*(part for one in parts for part in (one, "  ")))
        words = f"{OPEN}trained{CLOSE}  given"
        words += f"  {note('text:<...>')} text like a control token" if self.has_lookalikes else ""
        words += f"  {OPEN}{_TIMES}0.5 trained with a loss weight{CLOSE}" if self.has_weights else ""
        return Text(words)

    def token(self, token: Token) -> str:
        """Return the text of one token, on one line."""
        return visible(token.text, reserved=_RESERVED, breaks=False)

    def style_of(self, token: Token) -> str:
        """Return the colours of one token."""
        return _style(token.is_trained, token.is_control)

    def _append_run(self, shown: Text, run: Sequence[Stretch], is_trained: bool, weight: float) -> None:
        has_weight = is_trained and weight != 1
        self.has_weights |= has_weight
        if is_trained and not self._in_colour:
            shown.append(OPEN)
        if has_weight:
            shown.append(f"{times(weight)} ", style=WEIGHT if self._in_colour else "")
        for one in run:
            self.has_lookalikes |= one.is_lookalike
            style, text = _style(is_trained, one.is_control), self._visible(one.text)
            if one.is_lookalike:
                style, text = f"{TEXT_ONLY} {style}", text if self._in_colour else note(f"text:{text}")
            if one.is_padding:
                style, text = NOTE, one.text
            shown.append(text, style=style if self._in_colour else "")
        if is_trained and not self._in_colour:
            # The closing bracket belongs in front of the line break.
            if shown.plain.endswith("\n"):
                shown.right_crop(1)
                shown.append(f"{CLOSE}\n")
            else:
                shown.append(CLOSE)

    def _visible(self, text: str) -> str:
        return visible(text, reserved="" if self._in_colour else _RESERVED)

    def _stretches(self, tokens: Sequence[Token]) -> Iterator[Stretch]:
        num_pads = self._num_pads(tokens)
        body = tokens[: len(tokens) - num_pads] if num_pads else tokens
        for is_control, run in groupby(body, key=lambda token: token.is_control):
            if is_control:
                yield from (Stretch(token.text, token.weight, is_control=True) for token in run)
            else:
                yield from self._ordinary(list(run))
        if num_pads:
            yield Stretch(note(plural(num_pads, "padding token")), 0.0, is_padding=True)

    def _ordinary(self, tokens: Sequence[Token]) -> Iterator[Stretch]:
        """Yield ordinary text, split where it looks like a control token and where its weight changes."""
        text = "".join(token.text for token in tokens)
        hits = [(*match.span(), True) for match in self._pattern.finditer(text)] if text else []
        edges = [0, *(edge for start, end, _ in hits for edge in (start, end)), len(text)]
        waiting = [(edges[place], edges[place + 1], place % 2 == 1) for place in range(len(edges) - 1)]
        position, number = 0, 0
        for weight, run in groupby(tokens, key=lambda token: token.weight):
            stop = position + sum(len(token.text) for token in run)
            while position < stop:
                _, end, is_hit = waiting[number]
                if position < min(end, stop):
                    yield Stretch(text[position : min(end, stop)], weight, is_lookalike=is_hit)
                position = max(position, min(end, stop))
                number += end <= stop and position >= end

    def _num_pads(self, tokens: Sequence[Token]) -> int:
        number = 0
        while number < len(tokens) and tokens[-1 - number].id == self._pad_id and not tokens[-1 - number].is_trained:
            number += 1
        return number if number >= _FEWEST_PADS else 0


def times(weight: float) -> str:
    """Return how a loss weight is written."""
    return f"{_TIMES}{weight:g}"


def _style(is_trained: bool, is_control: bool) -> str:
    if is_control:
        return TRAINED_CONTROL if is_trained else GIVEN_CONTROL
    return TRAINED if is_trained else GIVEN
