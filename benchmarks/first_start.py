"""The cost of the first run on a machine: kernels are compiled, and cached for every later run.

python -m benchmarks.first_start

Each case runs twice in processes of its own: with an empty kernel cache, then with the one that the first has left.
Seconds are those of the processor, so that a busy machine does not change them; imports are included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from numba.core import event as numba_events

from benchmarks.measure import print_table

_PREPARE = ("template=chatml", "packing.pack_size=2048", "executor.num_workers=1", "split.validation_fraction=0.05")


def packed_sft(*arguments: str) -> None:
    """Run a command in this process."""
    from megatron_packed_sft.cli.main import main as command

    with contextlib.redirect_stdout(sys.stderr):
        if command(list(arguments)) != 0:
            sys.exit(f"packed-sft {' '.join(arguments)} failed")


def first_batch(home: Path) -> None:
    """Open a dataset and take a shuffled batch."""
    from megatron_packed_sft import PackedLoader, create_sft_dataset

    dataset = create_sft_dataset(home / "data", seq_length=2048)
    next(iter(PackedLoader(dataset, micro_batch_size=2, shuffle=True)))


def prepare(home: Path, packing: str = "optimal") -> None:
    """Prepare a small file of chats."""
    inputs = (f"input={home}/chats/chats.jsonl", f"tokenizer.path={home}/sp.model", f"packing={packing}")
    packed_sft("prepare", *inputs, f"output={home}/again/data", *_PREPARE)


def train(home: Path) -> None:
    """Train for one step on one rank."""
    model = ("model=tiny", "train.global_batch_size=2", "train.steps=1")
    packed_sft("train", f"data.path={home}/data", f"output={home}/again/run", *model)


CASES: dict[str, Callable[[Path], None]] = {
    "open + first batch": first_batch,
    "prepare": prepare,
    "prepare, greedy": lambda home: prepare(home, "greedy"),
    "validate": lambda home: packed_sft("validate", f"{home}/data"),
    "train, first step": train,
    "convert to legacy": lambda home: packed_sft(
        "convert", f"{home}/data/train/shard_000000", f"{home}/again/legacy.npy", "--to", "legacy"
    ),
    "convert from legacy": lambda home: packed_sft("convert", f"{home}/legacy.npy", f"{home}/again/shard"),
}


class CompileTimes(numba_events.Listener):  # type: ignore[misc]
    """Processor seconds of each compilation of a kernel, without those of the kernels that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.num_compilations = 0
        self._open = threading.local()

    def on_start(self, event: Any) -> None:
        """Note the beginning; calls of kernels nest."""
        self._open.stack = [*getattr(self._open, "stack", []), [time.thread_time(), 0.0]]

    def on_end(self, event: Any) -> None:
        """Count what the kernel itself took."""
        start, of_others = self._open.stack.pop()
        whole = time.thread_time() - start
        function = event.data["dispatcher"].py_func
        name = function.__name__ if function.__module__.startswith("megatron_packed_sft") else "numba's own"
        self.seconds[name] = self.seconds.get(name, 0.0) + whole - of_others
        self.num_compilations += 1
        if self._open.stack:
            self._open.stack[-1][1] += whole


def run_case(name: str, home: Path) -> None:
    """Run a case in this process and print what it took, as JSON."""
    times = CompileTimes()
    numba_events.register("numba:compile", times)
    CASES[name](home)
    with contextlib.suppress(ChildProcessError):
        os.wait()
    spent = os.times()
    total = spent.user + spent.system + spent.children_user + spent.children_system
    print(json.dumps({"seconds": total, "kernels": times.seconds, "count": times.num_compilations}))


def measured(name: str, home: Path, cache: Path) -> dict[str, Any]:
    """Run a case in a process of its own; return its processor seconds and those of each kernel that it compiled."""
    shutil.rmtree(home / "again", ignore_errors=True)
    (home / "again").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_start", "--case", name, "--home", str(home)],
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{name}: {done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def make_data(home: Path) -> None:
    """Make chats, a dataset and a legacy file."""
    packed_sft("sample-data", f"{home}/chats", "--rows", "300", "--tokenizer", f"{home}/sp.model")
    packed_sft("prepare", f"input={home}/chats/*", f"tokenizer.path={home}/sp.model", f"output={home}/data", *_PREPARE)
    packed_sft("convert", f"{home}/data/train/shard_000000", f"{home}/legacy.npy", "--to", "legacy")


def main(argv: Sequence[str]) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="run this one in this process")
    parser.add_argument("--home", type=Path, help="a directory for the data, used again if it is there")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args(argv)
    if arguments.case:
        run_case(arguments.case, arguments.home)
        return
    with tempfile.TemporaryDirectory() as temporary:
        home = arguments.home or Path(temporary, "home")
        if not home.exists():
            home.mkdir()
            make_data(home)
        rows, kernels = [], []
        for number, name in enumerate(arguments.only):
            cache = Path(temporary, f"cache_{number}")
            first, second = measured(name, home, cache), measured(name, home, cache)
            compiling = sum(first["kernels"].values())
            seconds = (first["seconds"], compiling, second["seconds"])
            rows.append([name, *(f"{one:.1f}" for one in seconds), first["count"]])
            kernels += [[name, kernel, f"{seconds:.2f}"] for kernel, seconds in first["kernels"].items()]
    print_table("Kernel by kernel, without what it calls", ["case", "kernel", "compiling, s"], kernels)
    header = ["case", "first run ever, CPU s", "of which compiling", "later runs, CPU s", "compilations"]
    print_table("The first start", header, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
