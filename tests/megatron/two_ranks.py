"""Run by torchrun in two processes: the same training steps with each layout of the ranks, results in a folder.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.megatron.two_ranks FOLDER
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from megatron_packed_sft.megatron.backend import choose_backend, start_distributed, stop_distributed
from megatron_packed_sft.megatron.parameters import FinalizeGradients
from tests.megatron.context_ranks import run_context_parallel
from tests.megatron.tiny_gpt import batch_of, build, load, make_row, save, train, with_weights

LAYOUTS: dict[str, dict[str, int]] = {
    "data": {},
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
}
# How the loss is made of the tokens': as it always was, by weights, and with conversations that count the same.
LOSSES: dict[str, dict[str, Any]] = {
    "per_token": {},
    "weighted": {"weighted": True},
    "per_conversation": {"loss": "per_conversation"},
    "weighted_per_conversation": {"weighted": True, "loss": "per_conversation"},
}
NUM_STEPS = 3
CHECKPOINT = "checkpoint"
# Tied embeddings, on which two stages of a pipeline must agree, and rows of lengths that they tell each other.
MODEL: dict[str, Any] = {"dtype": torch.float64, "tie_embeddings": True, "variable_seq_lengths": True}


def rows_of_step(step: int) -> list[dict[str, Any]]:
    """The global batch; its rows have different numbers of trained tokens, so a mean over rows would be wrong."""
    return [make_row(10 * step), make_row(10 * step + 1, lengths=(50, 3))]


def rows_of_loss(name: str, step: int) -> list[dict[str, Any]]:
    """The same for one of `LOSSES`: four rows, so that every rank accumulates gradients."""
    rows = [*rows_of_step(step), make_row(10 * step + 2, lengths=(5, 40, 2)), make_row(10 * step + 3, lengths=(20,))]
    return [with_weights(row, seed) for seed, row in enumerate(rows)] if LOSSES[name].get("weighted") else rows


def run_loss(name: str, layout_name: str, folder: Path) -> None:
    """Train from the checkpoint with one of `LOSSES`; of four rows, data-parallel ranks have two each."""
    layout = LAYOUTS[layout_name]
    start_distributed(choose_backend(), seed=len(name), timeout_minutes=2, **layout)
    rank = torch.distributed.get_rank()
    model = build(**MODEL)
    load(model, folder / CHECKPOINT)
    steps = []
    for step in range(NUM_STEPS):
        batches = [batch_of(row, multiple=16, **LOSSES[name]) for row in rows_of_loss(name, step)]
        steps.append(batches if layout else batches[2 * rank : 2 * rank + 2])
    shown, gradients = train(model, steps, finalize=FinalizeGradients())
    (folder / f"{name}_{layout_name}_{rank}.json").write_text(json.dumps([step._asdict() for step in shown]))
    torch.save({"gradients": gradients}, folder / f"{name}_{layout_name}_{rank}.pt")
    stop_distributed()


def run_layout(name: str, folder: Path) -> None:
    """Train from the checkpoint; the first layout also writes it."""
    layout = LAYOUTS[name]
    start_distributed(choose_backend(), seed=len(name), timeout_minutes=2, **layout)
    rank = torch.distributed.get_rank()
    model = build(**MODEL)
    if not layout:
        (folder / CHECKPOINT).mkdir(exist_ok=True)
        save(model, folder / CHECKPOINT)
        torch.nn.init.zeros_(next(model.parameters()))  # so that loading has something to bring back
    load(model, folder / CHECKPOINT)
    steps = []
    for step in range(NUM_STEPS):
        batches = [batch_of(row, multiple=16) for row in rows_of_step(step)]
        steps.append(batches if layout else [batches[rank]])
    shown, gradients = train(model, steps)
    (folder / f"{name}_{rank}.json").write_text(json.dumps([step._asdict() for step in shown]))
    splits = {weight: _split_of(parameter) for weight, parameter in model.named_parameters()}
    torch.save({"gradients": gradients, "splits": splits}, folder / f"{name}_{rank}.pt")
    stop_distributed()


def _split_of(parameter: Any) -> tuple[int, int] | None:
    """Over which dimension tensor-parallel ranks share a weight, and of how many parts joined together it consists."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return parameter.partition_dim, parameter.partition_stride


def main() -> None:
    """All layouts, one after the other: starting twice in a process must work, too, and saves imports."""
    warnings.simplefilter("ignore")  # Megatron's, about parts that are not installed
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name in LAYOUTS:
        run_layout(name, folder)
    for name in LOSSES:
        for layout in LAYOUTS:
            run_loss(name, layout, folder)
    for name, options in LOSSES.items():  # last: what stands in for Transformer Engine stays in the process
        run_context_parallel(name, options, folder)


if __name__ == "__main__":  # a checkpoint's writer starts a process that imports this module again
    main()
