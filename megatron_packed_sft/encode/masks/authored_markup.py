"""Texts that a template marked as safe: what is added to them is escaped, as Markup does it, and authors are kept."""

from __future__ import annotations

from typing import Any

from megatron_packed_sft.encode.masks.authored_text import AuthoredText, concatenate, constant, made_of, plain_text

# What markupsafe.escape replaces, in an order in which nothing is replaced twice.
_ESCAPES = (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("'", "&#39;"), ('"', "&#34;"))


class AuthoredMarkup(AuthoredText):
    """An authored text that `safe` marked."""

    def __html__(self) -> str:
        return plain_text(self)

    def __str__(self) -> str:
        return made_of(plain_text(self), self.authors, self.parts, self.recorder)

    def __add__(self, other: Any) -> Any:
        return _added(self, other) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return _added(other, self) if isinstance(other, str) else NotImplemented


def marked_as_safe(value: Any) -> AuthoredMarkup:
    """Return a value as a text that is not escaped.

    Example:
        >>> str("<b>" + marked_as_safe("<i>"))
        '&lt;b&gt;<i>'
    """
    text = constant(value)
    if text.recorder is not None:
        text.recorder.give_up("safe")
    marked = str.__new__(AuthoredMarkup, plain_text(text))
    marked.authors, marked.parts, marked.recorder = text.authors, text.parts, text.recorder
    return marked


def _added(left: Any, right: Any) -> AuthoredMarkup:
    return marked_as_safe(concatenate([_escaped(left), _escaped(right)]))


def _escaped(value: Any) -> AuthoredText:
    text = constant(value)
    if hasattr(value, "__html__"):
        return text
    for character, entity in _ESCAPES:
        if character in plain_text(text):
            text = constant(text.replace(character, entity))
    return text
