"""Options that several verbs share."""

from __future__ import annotations

import argparse
import sys


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add --quiet."""
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no summary")


def wants_progress(arguments: argparse.Namespace) -> bool:
    """Return whether a progress bar would be seen and is wanted."""
    return not arguments.quiet and not arguments.json and sys.stderr.isatty()
