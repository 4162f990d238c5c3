"""Checkpoints on a disk without room: what is said, wherever the space ends."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed_sft.errors import NoSpaceError
from megatron_packed_sft.megatron.checkpoint_writer import write_tensors

pytest.importorskip("megatron.core")

NUM_BYTES = 1_048_576


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    from megatron_packed_sft.megatron.backend import choose_backend, start_distributed, stop_distributed

    start_distributed(choose_backend())
    yield
    stop_distributed()


FORKS: list[int] = []
os.register_at_fork(before=lambda: FORKS.append(os.getpid()))


@pytest.fixture
def forks() -> list[int]:
    """Whoever forks from here on."""
    FORKS.clear()
    return FORKS


def state() -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    weight = torch.zeros(NUM_BYTES // 4)
    return {"weight": ShardedTensor.from_rank_offsets("weight", weight), "notes": list(range(20_000))}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_nothing_is_forked_and_the_files_are_those_of_megatron(tmp_path: Path, forks: list[int]) -> None:
    """A process that writes could be killed alone, or outlive its rank."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    weights = [torch.full((1000,), float(number)) for number in range(3)]
    state = {
        f"weight_{number}": ShardedTensor.from_rank_offsets(f"weight_{number}", one)
        for number, one in enumerate(weights)
    }
    write_tensors(state, tmp_path, tmp_path)
    assert forks == []
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    loaded = dist_checkpointing.load(state, str(tmp_path))
    assert [loaded[f"weight_{number}"].mean() for number in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    "num_bytes", [8192, 65536, 98304, 1 << 20]
)  # in common.pt, behind it, in the tensor, at its end
def test_a_disk_that_fills_up_is_named_with_the_bytes_that_it_lacks(tmp_path: Path, num_bytes: int) -> None:
    options = ["-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs"]
    if subprocess.run(["mount", *options, tmp_path], capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        with pytest.raises(NoSpaceError) as caught:
            write_tensors(state(), tmp_path, tmp_path / "step_000001")
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
    assert str(caught.value) == (
        f"cannot write {tmp_path / 'step_000001'}: No space left on device; it needs 1,048,576 bytes; free some space "
        "or choose another output, then run the same command again"
    )


@pytest.mark.parametrize("num_bytes", [8192, 500_000])
def test_a_limit_of_the_size_of_files_is_named(tmp_path: Path, num_bytes: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        with pytest.raises(NoSpaceError) as caught:
            write_tensors(state(), tmp_path, tmp_path / "step_000001")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == (
        f"cannot write {tmp_path / 'step_000001'}: File too large; it needs 1,048,576 bytes; raise the file-size limit "
        "(ulimit -f), then run the same command again"
    )
    assert not (tmp_path / ".probe").exists()
