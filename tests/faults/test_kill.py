"""reliability.md row 1: kill -9 before and in the middle of every write, fsync and rename."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("scenario", ["shard", "legacy", "dataset", "plan", "pretrain_cache", "sft_cache"])
def test_a_killed_writer_leaves_nothing_or_a_whole_result_and_a_rerun_gives_the_same_bytes(
    scenario: str, tmp_path: Path
) -> None:
    driver = subprocess.run(
        [sys.executable, "-m", "tests.faults.kill_driver", scenario, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert driver.returncode == 0, driver.stderr
    seen = json.loads(driver.stdout)
    assert seen["problems"] == []
    assert {"fsync", "pwrite", "mkdir"} <= set(seen["steps"])
    assert ("link" if scenario == "legacy" else "rename") in seen["steps"]
    # Killed after the publishing call the result is there, before it is not: both must have been seen.
    assert seen["outcomes"]["absent"] > 10
    assert seen["outcomes"]["whole"] >= 2
