"""The work directory: one preparation at a time, receipts that are true or not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.work_directory import WorkDirectory, fingerprint_of


def test_a_receipt_is_found_by_its_fingerprint_only(tmp_path: Path) -> None:
    with WorkDirectory(tmp_path / "work") as work:
        work.write_receipt("plans/train", "one", {"num_bins": 3})
        assert work.receipt("plans/train", "one") == {"num_bins": 3}
        assert work.receipt("plans/train", "two") is None
        assert work.receipt("other", "one") is None


def test_a_damaged_receipt_counts_as_none(tmp_path: Path) -> None:
    with WorkDirectory(tmp_path / "work") as work:
        work.write_receipt("plan", "one", {"num_bins": 3})
        file = tmp_path / "work" / "plan.json"
        whole = file.read_bytes()
        for damaged in (whole.replace(b"3", b"4"), whole[:-5], b"", b"[]"):
            file.write_bytes(damaged)
            assert work.receipt("plan", "one") is None


def test_a_second_preparation_is_refused_while_the_first_works(tmp_path: Path) -> None:
    script = (
        "import sys; from megatron_packed_sft.prepare.work_directory import WorkDirectory; WorkDirectory(sys.argv[1])"
    )
    with WorkDirectory(tmp_path / "work"):
        with pytest.raises(InvalidInputError, match="another preparation is working in"):
            WorkDirectory(tmp_path / "work")
        other = subprocess.run([sys.executable, "-c", script, str(tmp_path / "work")], capture_output=True, text=True)
        assert "another preparation is working in" in other.stderr
    with WorkDirectory(tmp_path / "work"):
        pass


def test_fingerprints_depend_on_every_value_and_not_on_the_order() -> None:
    assert fingerprint_of({"a": 1, "b": [1, 2]}) == fingerprint_of({"b": [1, 2], "a": 1})
    assert fingerprint_of({"a": 1, "b": [1, 2]}) != fingerprint_of({"a": 1, "b": [2, 1]})
