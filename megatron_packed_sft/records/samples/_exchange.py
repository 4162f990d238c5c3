"""A question and its answer, and what all topics share."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

NAMES = (
    "Ada", "Ben", "Carla", "Dario", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kemal", "Lena", "Mila", "Nora",
    "Omar", "Petra", "Quentin", "Rosa", "Samir", "Tara", "Umut", "Vera", "Wanda", "Xenia", "Yusuf", "Zoe",
)  # fmt: skip


class Exchange(NamedTuple):
    """One turn of each: what is asked, how it may be thought through, what is answered."""

    question: str
    answer: str
    reasoning: str


def joined(words: Sequence[str], last: str = "and") -> str:
    """Words as one says them.

    Example:
        >>> joined(["tea", "milk", "bread"])
        'tea, milk and bread'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def counted(number: int, noun: str) -> str:
    """A number with its noun; the plural takes an s.

    Example:
        >>> counted(1, "pear"), counted(12, "pear")
        ('1 pear', '12 pears')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def money(cents: int) -> str:
    """An amount in euros.

    Example:
        >>> money(1205)
        '12.05 euros'
    """
    return f"{cents // 100}.{cents % 100:02d} euros"


def clock(minutes: int) -> str:
    """A time of day.

    Example:
        >>> clock(8 * 60 + 5)
        '08:05'
    """
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def asked(random: Random, question: str) -> str:
    """A question as different people would put it: some are short, some are polite."""
    before = random.choice(("", "", "", "", "Quick question. ", "Please help me with this. ", "Hi! ", "Good morning. "))
    after = random.choice(("", "", "", "", " Thanks!", " Thank you.", " I am in a hurry."))
    return f"{before}{question}{after}"
