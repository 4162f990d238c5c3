"""Tests that pages name: `tests/file.py::test_name`, and whether they exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def table_cells(text: str) -> list[list[str]]:
    """The cells of a Markdown table, its header first; a bar behind a backslash is text."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@functools.cache
def functions_of(path: str) -> set[str]:
    """The names of all functions of a file."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
