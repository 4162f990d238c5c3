"""`make demo`, smaller: the whole job from chats to a resumed model, in real processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from megatron_packed_sft.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]


def test_the_demo_prepares_validates_trains_stops_resumes_and_sums_up(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    command = [sys.executable, "-m", "recipes.demo", "--output", str(home), "--rows", "300", "--steps", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{home / 'data'}: sound (full: 2 shards" in done.stdout
    assert "stopped by SIGTERM at step" in done.stdout
    assert f"resumed from {home / 'run' / 'checkpoints' / 'step_'}" in done.stdout
    assert "Traceback" not in done.stderr

    summary = done.stdout.partition("### Done in ")[2]
    assert re.search(r"^data +waiting for batches took \d+\.\d\d % of the step time$", summary, re.MULTILINE)
    for path in re.findall(rf"{re.escape(str(home))}[^\s:,]*", summary):
        assert Path(path).exists()
    steps = read_metrics(home / "run" / "metrics.jsonl")
    assert [record["step"] for record in steps] == list(range(1, 9))
    assert f"loss        {steps[0]['loss']:.3f} at step 1, {steps[-1]['loss']:.3f} at step 8" in summary
