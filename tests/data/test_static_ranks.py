"""Ranks that open the same samples: one computes the lengths, all plan the same packs, and nobody waits forever."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from megatron_packed_sft.data.sample_packs import compute_lengths
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.checksum import checksum
from tests.data.test_static_packs import LENGTHS, sample_of, samples_of, static
from tests.train.launch import environment, torchrun


class Counted:
    """Samples that leave a byte in a file for every read, by any process."""

    fingerprint = "counted 1"

    def __init__(self, directory: Path) -> None:
        self._reads = directory / "reads"

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self._reads.open("ab") as file:
            file.write(b".")
        return sample_of(LENGTHS[index], index)


def plan_on_a_rank(directory: Path) -> None:
    """What every rank of the torchrun below does."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dataset = static(Counted(directory), world_size=world_size, length_cache=directory / "lengths")
    aligned = dataset.static_plan.aligned
    result = [aligned.plan.fingerprint, aligned.fingerprint, aligned.bins.tolist(), dataset.static_plan.lines]
    (directory / f"rank_{rank}.json").write_text(json.dumps(result))


def test_the_plans_are_identical_across_ranks_and_lengths_are_computed_once(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "from pathlib import Path\nfrom tests.data.test_static_ranks import plan_on_a_rank\n"
        f"plan_on_a_rank(Path({str(tmp_path)!r}))\n"
    )
    subprocess.run(torchrun(3, script), env=environment(), check=True, timeout=200)
    results = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(3)]
    assert results[0] == results[1] == results[2]
    alone = static(samples_of(LENGTHS), world_size=3).static_plan.aligned
    assert results[0][:3] == [alone.plan.fingerprint, alone.fingerprint, alone.bins.tolist()]
    # 16 samples are measured twice by the rank that computes; each rank looks at sample 0 for weights.
    assert len((tmp_path / "reads").read_bytes()) == len(LENGTHS) + 16 + 3
    [entry] = (tmp_path / "lengths").iterdir()  # keyed by the fingerprint; no lock and no staging directory is left
    assert entry.name == checksum(b"counted 1")


class Stuck(Counted):
    """Says that it is reading sample 5, and never comes back."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            self._reads.with_name("stuck").write_text("")
            time.sleep(1000)
        return super().__getitem__(index)


def compute(directory: Path, kind: type[Counted]) -> None:
    logging.basicConfig(filename=directory / f"{kind.__name__}.log", level=logging.INFO)
    lengths = compute_lengths(
        kind(directory), lambda sample: len(sample["input_ids"]), cache_path=directory / "lengths"
    )
    (directory / "computed").write_text(json.dumps(lengths.tolist()))


def wait_until(path: Path, text: str = "") -> None:
    for _ in range(600):
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} does not say {text!r}")


def test_when_the_computing_rank_is_killed_another_takes_over(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    kinds: list[type[Counted]] = [Stuck, Counted]
    processes: list[BaseProcess] = [context.Process(target=compute, args=(tmp_path, kind)) for kind in kinds]
    try:
        processes[0].start()
        wait_until(tmp_path / "stuck")
        processes[1].start()
        wait_until(tmp_path / "Counted.log", "another process is computing lengths; waiting")
        assert not (tmp_path / "lengths").exists()
        assert processes[0].pid is not None
        os.kill(processes[0].pid, signal.SIGKILL)
        processes[1].join(timeout=100)
        assert processes[1].exitcode == 0
    finally:
        for process in processes:
            process.kill()
    assert json.loads((tmp_path / "computed").read_text()) == LENGTHS
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_other_settings_have_lengths_of_their_own_in_one_cache(tmp_path: Path) -> None:
    samples = Counted(tmp_path)
    static(samples, length_cache=tmp_path / "lengths")
    num_reads = len((tmp_path / "reads").read_bytes())
    static(samples, 64, length_cache=tmp_path / "lengths")  # another length of packs: nothing is measured again
    assert len((tmp_path / "reads").read_bytes()) == num_reads + 1
    static(samples, length_cache=tmp_path / "lengths", fingerprint="another template")
    assert len(list((tmp_path / "lengths").iterdir())) == 2
    with pytest.raises(InvalidInputError, match="a length cache needs a fingerprint, and list has none"):
        static(samples_of([3]), length_cache=tmp_path / "lengths")
