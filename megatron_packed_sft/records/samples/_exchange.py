"""A question with its answer, and helpers that all topics share."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

NAMES = (
    "Ada", "Ben", "Carla", "Dario", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kemal", "Lena", "Mila", "Nora",
    "Omar", "Petra", "Quentin", "Rosa", "Samir", "Tara", "Umut", "Vera", "Wanda", "Xenia", "Yusuf", "Zoe",
)  # fmt: skip


class Exchange(NamedTuple):
    """A question, its answer, and the reasoning between them."""

    question: str
    answer: str
    reasoning: str


def joined(words: Sequence[str], last: str = "and") -> str:
    """Return words as an English list.

    Example:
        >>> joined(["tea", "milk", "bread"])
        'tea, milk and bread'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun; the plural takes an s.

    Example:
        >>> counted(1, "pear"), counted(12, "pear")
        ('1 pear', '12 pears')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def money(cents: int) -> str:
    """Return an amount in euros.

    Example:
        >>> money(1205)
        '12.05 euros'
    """
    return f"{cents // 100}.{cents % 100:02d} euros"


def clock(minutes: int) -> str:
    """Return a time of day.

    Example:
        >>> clock(8 * 60 + 5)
        '08:05'
    """
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def asked(random: Random, question: str) -> str:
    """Return a question as different people would put it: briefly, or politely."""
    before = random.choice(("", "", "", "", "Quick question. ", "Please help me with this. ", "Hi! ", "Good morning. "))
    after = random.choice(("", "", "", "", " Thanks!", " Thank you.", " I am in a hurry."))
    return f"{before}{question}{after}"
