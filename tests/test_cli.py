"""The command line, as a person types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_packed_sft import __version__, open_shard
from megatron_packed_sft.cli.main import main
from tests.packed_bins import assert_same_bins, make_bins, write_shard

ROWS = make_bins(5, 16, seed=3)


def test_validate_says_sound_and_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path / "shard", ROWS, 16)
    assert main(["validate", str(tmp_path / "shard")]) == 0
    out = capsys.readouterr().out
    assert "sound (full: 1 shard, 5 bins" in out
    assert f"{sum(len(row.input_ids) for row in ROWS):,} tokens" in out
    assert main(["validate", str(tmp_path / "shard"), "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_validate_names_what_is_wrong_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path / "shard", ROWS, 16)
    path = tmp_path / "shard" / "loss_mask.npy"
    data = bytearray(path.read_bytes())
    data[4096] = 7
    path.write_bytes(data)
    assert main(["validate", str(tmp_path / "shard")]) == 1
    out = capsys.readouterr().out
    assert "loss_mask.npy, bin 0: loss_mask is 7 at position 0, not 0 or 1" in out
    assert "2 findings" in out
    assert main(["validate", str(tmp_path / "shard"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["findings"][0] == {
        "file": str(path),
        "message": "loss_mask is 7 at position 0, not 0 or 1",
        "bin": 0,
        "field": "loss_mask",
    }
    assert main(["validate", str(tmp_path / "shard"), "--level", "structure"]) == 0
    assert main(["validate", str(tmp_path / "shard"), "--max-findings", "1"]) == 1
    assert "... and 1 more findings" in capsys.readouterr().out


def test_convert_goes_both_ways_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path / "shard", ROWS, 16)
    assert main(["convert", str(tmp_path / "shard"), str(tmp_path / "a.npy"), "--to", "legacy"]) == 0
    assert "1 file, 5 bins" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "a.npy"), str(tmp_path / "again"), "--pack-size", "8"]) == 0
    assert "note: pack size grew from 8 to" in capsys.readouterr().out
    assert_same_bins(open_shard(tmp_path / "again"), ROWS)
    assert main(["convert", str(tmp_path / "a.npy"), str(tmp_path / "b"), "--json", "--overwrite"]) == 0
    assert json.loads(capsys.readouterr().out)["num_bins"] == 5


def test_errors_are_one_line_on_stderr_without_a_stack_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(tmp_path / "nothing")]) == 2
    assert main(["convert", str(tmp_path / "nothing.npy"), str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("packed-sft: error: ") for line in lines)


@pytest.mark.parametrize("arguments", [["--help"], ["validate", "--help"], ["convert", "--help"], ["--version"]])
def test_help_shows_examples_and_the_module_runs(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "megatron_packed_sft", *arguments], capture_output=True, text=True)
    assert done.returncode == 0
    assert ("example" in done.stdout) or (__version__ in done.stdout)


def test_no_command_is_wrong_usage() -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
