"""`make bench`: every benchmark, or the ones named: `python -m benchmarks storage`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if "def main(" in path.read_text())


def run(names: list[str]) -> None:
    """Run the benchmarks called by name, each with its default arguments."""
    for name in names or NAMES:
        if name not in NAMES:
            sys.exit(f"benchmark {name!r} is unknown; choose from {', '.join(NAMES)}")
        importlib.import_module(f"benchmarks.{name}").main([])


if __name__ == "__main__":
    run(sys.argv[1:])
