"""The CPU adaptation, and starting and stopping a run."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch

from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError
from megatron_packed_sft.megatron.backend import Backend, choose_backend, start_distributed, stop_distributed
from megatron_packed_sft.megatron.cpu import adapt_to_cpu
from tests.megatron import tiny_gpt

pytestmark = [pytest.mark.filterwarnings(text) for text in tiny_gpt.WARNINGS]

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29999"}


def replaced_names() -> list[Any]:
    """Everything in torch and Megatron-Core that the adaptation replaces."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    cuda = ("current_device", "synchronize", "get_rng_state", "manual_seed")
    return [
        *(getattr(torch.cuda, name) for name in cuda),
        torch.Tensor.cuda,
        random._get_cuda_rng_state,
        random._set_cuda_rng_state,
        *(vars(module)["torch"] for module in (utils, clip_grads, optimizer, schedules)),
        clip_grads.clip_grad_by_total_norm_fp32,
        optimizer.clip_grad_by_total_norm_fp32,
    ]


def test_adapting_twice_changes_nothing_more() -> None:
    adapt_to_cpu()
    once = replaced_names()
    filters = list(logging.getLogger("megatron.core.tensor_parallel.random").filters)
    adapt_to_cpu()
    assert all(after is before for after, before in zip(replaced_names(), once, strict=True))
    assert logging.getLogger("megatron.core.tensor_parallel.random").filters == filters
    assert torch.cuda.current_device() == torch.device("cpu")


def test_with_cuda_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    adapt_to_cpu()  # so that there is nothing left to do but for the next line
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = replaced_names()
    adapt_to_cpu()
    assert all(after is earlier for after, earlier in zip(replaced_names(), before, strict=True))


def test_only_what_is_asked_for_on_cuda_is_created_on_the_cpu() -> None:
    adapt_to_cpu()
    from megatron.core.pipeline_parallel import schedules

    assert schedules.torch.zeros(2, device="cuda").device.type == "cpu"
    assert schedules.torch.tensor([1.0], device="cuda").tolist() == [1.0]
    assert schedules.torch.zeros(2, device="meta").device.type == "meta"
    assert schedules.torch.matmul is torch.matmul


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_gradients_are_clipped_as_torch_does(max_norm: float) -> None:
    adapt_to_cpu()
    from megatron.core.optimizer import clip_grads

    ours, theirs = ([torch.nn.Parameter(torch.ones(3, 4)) for _ in range(3)] for _ in range(2))
    for parameters in (ours, theirs):
        for index, parameter in enumerate(parameters[:2]):  # the third has no gradient
            parameter.grad = torch.arange(12.0).reshape(3, 4) + index
    total_norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm).item()
    clip_grads.clip_grad_by_total_norm_fp32(ours, max_norm, total_norm)
    for one, two in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(one.grad, two.grad)
    assert ours[2].grad is None


def test_the_tracker_forks_the_cpus_random_numbers_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    start_distributed(choose_backend(), seed=7)
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    outside = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        first = torch.rand(4)
    with get_cuda_rng_tracker().fork():
        second = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), outside)
    assert not torch.equal(first, second)
    assert not caplog.records
    stop_distributed()
    start_distributed(choose_backend(), seed=7)
    with get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(4), first)
    stop_distributed()


def test_a_plain_process_is_a_run_of_one_and_can_start_again() -> None:
    for _ in range(2):
        start_distributed(choose_backend())
        assert torch.distributed.get_world_size() == 1
        with pytest.raises(InvalidInputError, match="is already running; call stop_distributed"):
            start_distributed(choose_backend())
        stop_distributed()
        stop_distributed()
        assert not torch.distributed.is_initialized()


def test_on_a_machine_without_cuda_everything_is_on_the_cpu() -> None:
    backend = choose_backend()
    assert backend == Backend(device_type="cpu", distributed_backend="gloo", device=torch.device("cpu"))
    assert backend.default_dtype == torch.float32
    assert not backend.uses_transformer_engine


def test_with_cuda_each_local_rank_has_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    backend = choose_backend()
    assert (backend.device, backend.distributed_backend) == (torch.device("cuda:3"), "nccl")
    assert backend.default_dtype == torch.bfloat16
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(InvalidInputError, match="LOCAL_RANK is 4, but this machine has 4 CUDA devices"):
        choose_backend()


@pytest.mark.parametrize("module", ["megatron.core.optimizer", "psutil"])
def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(
        MissingDependencyError, match=rf"needs the package {package}; .*megatron-packed-sft\[megatron\]"
    ):
        start_distributed(choose_backend())
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("environment", "sizes", "message"),
    [
        ({}, {"tensor_parallel": 2}, "1 processes cannot be split into groups of tensor_parallel 2"),
        (TORCHRUN, {"tensor_parallel": 2, "pipeline_parallel": 3}, "2 processes.*pipeline_parallel 3.*= 6"),
        ({}, {"pipeline_parallel": 0}, "pipeline_parallel 0.*at least 1"),
        (TORCHRUN, {"context_parallel": 2}, "context_parallel is 2, which needs CUDA and Transformer Engine"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT; start with torchrun"),
        ({"LOCAL_RANK": "0"}, {}, "unset LOCAL_RANK to run alone"),
    ],
    ids=str,
)
def test_a_run_that_cannot_be_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], sizes: dict[str, int], message: str
) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInputError, match=message):
        start_distributed(choose_backend(), **sizes)
    assert not torch.distributed.is_initialized()
