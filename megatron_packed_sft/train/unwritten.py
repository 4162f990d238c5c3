"""What a run could not write down: counted and announced once, because no record of a run is worth ending it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from megatron_packed_sft.support.wording import plural

_NUM_TRIES: Final = 3  # in a row; a server that does not answer may take a minute to fail


class Unwritten:
    """Counts what could not be written, by place, and warns once for each place.

    Example:
        >>> unwritten = Unwritten()
        >>> for _ in range(2):
        ...     with unwritten.tolerated("metrics.jsonl"):
        ...         raise OSError("No space left on device")
        >>> unwritten.take_warnings()
        ['warning: cannot write to metrics.jsonl (No space left on device); training goes on']
        >>> unwritten.summary()
        'not written: 2 records of metrics.jsonl'
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._num_failures: Counter[str] = Counter()  # in a row
        self._warnings: list[str] = []

    @contextmanager
    def tolerated(self, place: str, num_records: int = 1) -> Iterator[None]:
        """Count the records that the block fails to write, instead of raising what it raises.

        Args:
            place: where they should go, as a user knows it.
            num_records: how many the block writes.
        """
        try:
            yield
        except Exception as error:  # trackers raise whatever their servers and files make them
            if place not in self.counts:
                reason = str(error).partition("\n")[0][:300] or type(error).__name__
                self._warnings.append(f"warning: cannot write to {place} ({reason}); training goes on")
            self.counts[place] += num_records
            self._num_failures[place] += 1
        else:
            self._num_failures[place] = 0

    def is_given_up(self, place: str) -> bool:
        """Return whether a place has failed so often that trying again only costs time."""
        return self._num_failures[place] >= _NUM_TRIES

    def take_warnings(self) -> list[str]:
        """Return the warnings since the last call."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def summary(self) -> str | None:
        """Say how much was not written; None if everything was."""
        parts = [f"{plural(count, 'record')} of {place}" for place, count in self.counts.items() if count]
        return f"not written: {', '.join(parts)}" if parts else None
