"""Time, memory and tables, the same for every benchmark.

Each case runs in its own process, so that its peak memory is its own; all cases of a table run one after the other, so
that their ratios are meaningful on a shared machine.
"""

from __future__ import annotations

import gc
import multiprocessing
import resource
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def resident_megabytes() -> float:
    """Return the memory of this process alone: anonymous pages, not the shared pages of mapped files."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) / 1024


def private_megabytes() -> float:
    """Return the dirty private pages: the memory that every further process would need again."""
    with open("/proc/self/smaps_rollup") as rollup:
        return sum(int(line.split()[1]) for line in rollup if line.startswith("Private_Dirty")) / 1024


def peak_megabytes() -> float:
    """Return the peak of resident memory, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class PeakOfOwnMemory:
    """The most memory this process held for itself inside the block, looked at every 10 ms."""

    def __init__(self) -> None:
        self.megabytes = 0.0
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakOfOwnMemory:
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.01):
            self.megabytes = max(self.megabytes, resident_megabytes())


def timed(function: Callable[[], Any]) -> float:
    """Seconds one call takes."""
    gc.collect()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_own_process(case: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Run a case in a fresh process and return what it measured."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(case, *arguments).result()


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, its columns lined up."""
    widths = [max(len(str(row[column])) for row in [header, *rows]) for column in range(len(header))]
    print(f"\n## {title}\n")
    for number, row in enumerate([header, *rows]):
        cells = [
            str(cell).ljust(width) if column == 0 else str(cell).rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("| " + " | ".join(cells) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
