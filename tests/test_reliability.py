"""docs/reliability.md keeps its word: every row has a promise, a test that exists, and a word about the peers."""

from __future__ import annotations

import re

import pytest

from tests.named_tests import REFERENCE, ROOT, functions_of, table_cells

PAGE = (ROOT / "docs" / "reliability.md").read_text()
NUM_ROWS = 36  # of the design's list of faults


def test_every_fault_has_a_promise_a_test_and_a_word_about_the_peers() -> None:
    header, _, *rows = table_cells(PAGE.partition("\n## ")[0])
    assert header == ["#", "fault", "promise", "test", "peers"]
    assert [row[0] for row in rows] == [str(number) for number in range(1, NUM_ROWS + 1)]
    for row in rows:
        assert len(row) == len(header), row
        assert all(row), row
        assert REFERENCE.search(row[3]), row


@pytest.mark.parametrize(("path", "name"), sorted(set(REFERENCE.findall(PAGE))), ids="::".join)
def test_every_named_test_exists(path: str, name: str) -> None:
    assert name in functions_of(path)
    assert name.startswith("test_")


def test_tests_are_named_in_a_way_that_can_be_checked() -> None:
    assert not re.search(r"tests/\w+/", REFERENCE.sub("", PAGE)), "write tests as `tests/file.py::test_name`"
