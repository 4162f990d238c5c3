"""Start real training processes: torchrun for several ranks, plain Python for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "sft.py"
_RUN_IN_TURN = Path(__file__).with_name("run_in_turn.py")
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def torchrun(num_ranks: int, *arguments: str | Path) -> list[str]:
    """The command line of torchrun, on a port of its own."""
    return [*_TORCHRUN, "--standalone", "--nproc-per-node", str(num_ranks), *map(str, arguments)]


def environment() -> dict[str, str]:
    """Without what pytest's own surroundings may say about ranks; one thread per rank."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_in_turn(num_ranks: int, runs: list[list[str]], timeout: float = 200) -> str:
    """Do several runs in the same processes; returns what they printed."""
    arguments = [str(_RUN_IN_TURN), json.dumps(runs)]
    command = [sys.executable, *arguments] if num_ranks == 1 else torchrun(num_ranks, *arguments)
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
