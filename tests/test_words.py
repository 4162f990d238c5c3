"""One word, one meaning: identifiers follow docs/glossary.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_packed_sft"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A word, the rooms in which no identifier may hold it ("" is the whole package), and the better ones.
BANNED = [
    ("unit", "", "slice (of a file), item (of the packer)"),
    ("piece", "", "chunk (of a sequence), part, slice"),
    ("row", "data", "bin"),
    ("row", "storage", "bin"),
    ("row", "tokens", "bin"),
    ("row", "packing", "bin"),
    ("row", "records", "record"),
    ("row", "encode", "record"),
    ("row", "prepare", "record"),
]
# Where a word means what it means to others: a path below the package (or its beginning), and the identifiers.
ALLOWED: list[tuple[str, str]] = [
    ("encode/tokenizers/", r".*[pP]iece.*"),  # SentencePiece's own
    ("records/tables.py", r"(?i).*row.*"),  # of a table
    ("storage/parquet/", r"(?i).*row.*"),  # of a Parquet file
    ("prepare/counts.py", r"num_(cut_)?rows"),  # keys of receipts on disk
    ("prepare/encode_worker.py", r"num_(cut_)?rows"),
    ("prepare/report.py", r"rows"),  # of a printed table
    ("prepare/audit.py", r"rows"),
    ("support/progress.py", r"_?unit|rows"),  # what a progress bar counts
    ("prepare/pipeline.py", r"unit"),
    ("train/report.py", r"unit"),
    ("support/terminal.py", r"rows?"),  # of a printed table
    ("cli/", r"rows"),
    ("train/config.py", r"batch_unit"),  # a key that users write
    ("train/config_checks.py", r"BATCH_UNITS"),
    ("packing/search/linear_program_kernel.py", r"rows?|num_rows"),  # of a matrix
    ("data/batch/collate.py", r"num_rows"),  # of a batch, a matrix that holds one bin per row or all bins in one
    ("data/batch/collate_kernel.py", r"row"),
]


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """Every name that a module defines: functions, classes, arguments, variables, and attributes that it sets."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def words(identifier: str) -> set[str]:
    """The words of an identifier in lower case and singular."""
    found = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)
    return {word.lower().removesuffix("s") for word in found}


def is_allowed(place: str, identifier: str) -> bool:
    return any(place.startswith(path) and re.fullmatch(names, identifier) for path, names in ALLOWED)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_identifiers_follow_the_glossary(path: Path) -> None:
    place = str(path.relative_to(PACKAGE))
    for line, identifier in identifiers(path):
        for word, room, better in BANNED:
            if place.startswith(room) and word in words(identifier) and not is_allowed(place, identifier):
                raise AssertionError(f"{place}:{line}: {identifier}: not {word!r}, but {better}")


def test_the_words_of_an_identifier() -> None:
    assert words("num_loss_rows") == {"num", "los", "row"}
    assert words("PaddedRows") == {"padded", "row"}
    assert words("SentencePieceTokenizer") == {"sentence", "piece", "tokenizer"}


def test_the_glossary_defines_every_word_that_is_asked_for() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    for word in ("record", "sequence", "chunk", "item", "bin", "slice", "source", "plan", "storage", "contract"):
        assert re.search(rf"^\| {word} \|", glossary, flags=re.MULTILINE)
