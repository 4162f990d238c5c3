"""Stop a run whose validation loss no longer falls."""

from __future__ import annotations

import math
from collections.abc import Iterable


class EarlyStopping:
    """Counts validations in a row that were no better than the best before.

    All that it knows follows from the recorded losses, so a resumed run goes on counting where it was.

    Args:
        patience: how many of them end the run.
        min_delta: how much lower a loss must be to be better.
        losses: those that were recorded before.

    Example:
        >>> stopping = EarlyStopping(patience=2, min_delta=0.1, losses=[3.0, 2.0])
        >>> for loss in (1.95, 2.1):
        ...     stopping.add(loss)
        >>> stopping.is_due, stopping.best
        (True, 2.0)
    """

    def __init__(self, *, patience: int, min_delta: float = 0.0, losses: Iterable[float] = ()) -> None:
        self._patience = patience
        self._min_delta = min_delta
        self._num_worse = 0
        self.best = math.inf
        for loss in losses:
            self.add(loss)

    def add(self, loss: float) -> None:
        """Take note of a validation."""
        if loss < self.best - self._min_delta:
            self.best, self._num_worse = loss, 0
        else:  # also one that is not a number
            self._num_worse += 1

    @property
    def is_due(self) -> bool:
        """Whether the run should end now."""
        return self._num_worse >= self._patience
