"""CONTRIBUTING.md names files and functions that exist, and its walk stays short."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
FUNCTIONS = re.findall(r"`([\w/]+\.py)::([\w.]+)`", TEXT)
PATHS = sorted(set(re.findall(r"`([\w./-]+(?:/|\.(?:py|yaml|md|toml|jinja)))(?:::[\w.]+)?`", TEXT)))
MOST_IN_THE_WALK = 60
MOST_FILES = 3


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, f"CONTRIBUTING.md has no section {title}"
    return found[1]


def where(path: str) -> Path:
    """A path is written from the package, or from the repository."""
    return next((base / path for base in (ROOT / "megatron_packed_sft", ROOT) if (base / path).exists()), ROOT / path)


@pytest.mark.parametrize("path", PATHS)
def test_every_file_and_folder_exists(path: str) -> None:
    placeholders = ("my_", "acme", "_name")
    if not any(part.startswith(placeholders) for part in path.split("/")):
        assert where(path).exists()


@pytest.mark.parametrize(("path", "name"), FUNCTIONS, ids=[f"{path}::{name}" for path, name in FUNCTIONS])
def test_every_function_exists(path: str, name: str) -> None:
    scope: list[ast.stmt] = ast.parse(where(path).read_text()).body
    for part in name.split("."):
        found = [node for node in scope if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part]
        assert found, f"{path} has no {name}"
        scope = found[0].body


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Every function that preparing and training called, with its place in the order of first calls."""
    command = [sys.executable, "-m", "tests.walk", str(tmp_path_factory.mktemp("walk"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: place for place, name in enumerate(json.loads(done.stdout.splitlines()[-1]))}


def test_the_walk_is_what_happens(called: dict[str, int]) -> None:
    begins = []
    for stage in re.split(r"^\*\*\w+\*\*", section("The walk of a record"), flags=re.MULTILINE)[1:]:
        places = {
            name: [place for one, place in called.items() if one == name or one.startswith(f"{name}.")]
            for name in re.findall(r"`([\w/]+\.py::[\w.]+)`", stage)
        }
        assert [name for name, found in places.items() if not found] == [], "named in the walk, but never called"
        begins.append(min(next(iter(places.values()))))
    assert len(begins) == 6
    assert begins == sorted(begins), "the stages of the walk are not in the order in which things happen"


def test_the_walk_is_short() -> None:
    named = re.findall(r"`[\w/]+\.py::[\w.]+`", section("The walk of a record"))
    assert 20 <= len(named) <= MOST_IN_THE_WALK
    assert len(named) == len(set(named))


def test_the_eight_changes_take_at_most_three_files_each() -> None:
    tests = re.split(r"^### ", section("Eight changes"), flags=re.MULTILINE)[1:]
    assert len(tests) == 8
    for text in tests:
        listed = re.findall(r"^\d\. `([\w./-]+)`", text, flags=re.MULTILINE)
        assert 1 <= len(listed) <= MOST_FILES, text.splitlines()[0]
        assert not any(path.startswith(("tests/", "docs/")) for path in listed)
        assert re.search(r"`tests/[\w/.]+`", text), f"{text.splitlines()[0]} names no test"
