r"""Text of records, made safe and visible: nothing that it holds can move a cursor, hide or turn other text.

a line break       ⏎ and a new line        a tab              ⇥
ESC and its kind   ␛ ␀ ␡                   what cannot be seen  ‹U+202E›
"""

from __future__ import annotations

import re
import unicodedata

LINE_END = "⏎"
OPEN_NOTE, CLOSE_NOTE = (
    "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}",
    "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}",
)
_TAB = "⇥ "
_DELETE = 0x7F
# Format characters that belong to how a script or an emoji is written.
_JOINERS = frozenset("\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_PRINTABLE_ASCII = re.compile(r"[ -~]*")


def visible(text: str, *, reserved: str = "", breaks: bool = True) -> str:
    r"""Return a text in which every character can be seen and none controls a terminal.

    Args:
        text: anything.
        reserved: characters that mean something where it is shown, and are written by their number.
        breaks: write a new line behind the sign of a line break.

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
    r"""Return a text on one line, cut in the middle if it is long.

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
    """Return words of ours that stand inside a text.

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
        return chr(0x2400 + code)  # Unicode's own pictures of them
    if code == _DELETE:
        return "\N{SYMBOL FOR DELETE}"
    is_hidden = unicodedata.category(character) in _HIDDEN and character not in _JOINERS
    return note(f"U+{code:04X}") if is_hidden or character in reserved else character
