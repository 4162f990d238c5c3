"""Kills `packed-sft prepare` at every step that changes the disk, runs it again, and compares. Run by tests/prepare.

A separate program, so that it can fork: each forked child prepares in this one process (a single worker), and is killed
by SIGKILL before or in the middle of its n-th disk-changing call, whichever stage that belongs to.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from megatron_packed_sft import validate
from megatron_packed_sft.prepare.config import PrepareConfig
from megatron_packed_sft.prepare.pipeline import Pipeline
from megatron_packed_sft.prepare.sources import SplitRule
from tests.faults.injection import Injector
from tests.packed_bins import files_of


def run(rows: Path, model: str, output: Path) -> int:
    """One preparation of two files and two splits, in this process; returns how many slices it could reuse."""
    config = PrepareConfig(output=str(output), input=f"{rows}/*.jsonl", quiet=True)
    config.tokenizer.path = model
    config.template.name = "chatml"
    config.packing.pack_size = 64
    config.split = SplitRule(validation_fraction=0.3)
    config.executor.num_workers = 1
    stages = dict(Pipeline(config).run().stages)
    return int(stages["encode"].split(": ")[1].split()[0])


def main(rows: Path, model: str, home: Path, every: int) -> None:
    """Kill at every n-th step; print what was seen as JSON."""
    run(rows, model, home / "warm_up" / "data")
    (home / "reference").mkdir()
    with Injector() as counter:
        run(rows, model, home / "reference" / "data")
    reference = files_of(home / "reference" / "data")
    problems: list[str] = []
    stages = {"encode": 0, "plan": 0, "publish": 0, "done": 0}
    reused = 0
    for number, step in enumerate(range(0, len(counter.calls), every)):
        place = home / f"step_{step}"
        place.mkdir()
        child = os.fork()
        if child == 0:
            with Injector(step, after=bool(number % 2)):
                run(rows, model, place / "data")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        name = f"{counter.calls[step]} (step {step})"
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            problems.append(f"{name}: prepare was not killed, status {status}")
        if (place / "data").exists():
            if not validate(place / "data").ok or files_of(place / "data") != reference:
                problems.append(f"{name}: what is published is not whole")
            stages["done"] += 1
        else:
            work = place / "data.work"
            planned = (work / "plans" / "validation.json").exists()
            stages["publish" if planned else "plan" if (work / "encode.json").exists() else "encode"] += 1
        reused += run(rows, model, place / "data") > 0
        if files_of(place / "data") != reference:
            problems.append(f"{name}: a rerun gives other bytes")
        if sorted(os.listdir(place)) != ["data", "data.work"]:
            problems.append(f"{name}: leftovers stay: {sorted(os.listdir(place))}")
        shutil.rmtree(place)
    print(
        json.dumps(
            {
                "steps": len(counter.calls),
                "stages": stages,
                "reused": reused,
                "problems": problems,
                "calls": counter.calls,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
