"""Run by torchrun in two processes: each model of a folder, shared by tensor and by pipeline; logits in the folder.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.megatron.weights_two_ranks FOLDER
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from megatron_packed_sft.megatron.backend import choose_backend, start_distributed, stop_distributed
from tests.megatron.pretrained_models import CASES, NUM_POSITIONS, SIZES, VOCAB_SIZE, build_from, tokens
from tests.megatron.tiny_gpt import save

FOR_MEGATRON = ("qwen2", "llama31")  # tied and untied
LAYOUTS = {"tensor": {"tensor_parallel": 2}, "pipeline": {"pipeline_parallel": 2}}


def logits_of(model: torch.nn.Module, layout: str) -> torch.Tensor:
    """All logits, on the last rank."""
    ids = tokens()
    positions = torch.arange(NUM_POSITIONS)[None].expand(len(ids), -1)
    if layout == "tensor":
        own = model(ids, positions, None)
        parts = [torch.empty_like(own) for _ in range(2)]
        torch.distributed.all_gather(parts, own)
        return torch.cat(parts, -1)[..., :VOCAB_SIZE]
    if torch.distributed.get_rank() == 0:
        hidden = model(ids, positions, None)
        torch.distributed.send(hidden.contiguous(), 1)
        return hidden
    received = torch.empty(NUM_POSITIONS, len(ids), SIZES["hidden_size"], dtype=torch.float64)
    torch.distributed.recv(received, 0)
    model.set_input_tensor([received])  # type: ignore[operator]
    result: torch.Tensor = model(ids, positions, None)[..., :VOCAB_SIZE]
    return result


def loaded_name(case: str, layout: str) -> str:
    """Where a rank says how loading went."""
    return f"{case}_{layout}_{torch.distributed.get_rank()}_loaded.pt"


def compare_loaded(model: Any, checkpoint: Path) -> str:
    """Load a checkpoint for Megatron into a model whose weights are spoiled, and compare them with those before."""
    from megatron.core import dist_checkpointing

    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint))
    model.load_state_dict(loaded["model"])
    after = dict(model.named_parameters())
    for name in {"embedding.word_embeddings.weight", "output_layer.weight"} & before.keys():
        is_padding = before[name].eq(0).all(1)  # nothing is loaded there
        before[name][is_padding] = after[name].detach()[is_padding]
    different = [name for name, value in before.items() if not torch.equal(value, after[name])]
    return ", ".join(different) or "equal"


def main() -> None:
    """All models in all layouts; a checkpoint of each, too."""
    warnings.simplefilter("ignore")  # Megatron's, about parts that are not installed
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for layout, sizes in LAYOUTS.items():
        start_distributed(choose_backend(), timeout_minutes=2, **sizes)
        for case in CASES:
            model = build_from(folder / case)
            with torch.no_grad():
                logits = logits_of(model, layout)
            if torch.distributed.get_rank() == 1:
                torch.save(logits, folder / f"{case}_{layout}.pt")
            if case in FOR_MEGATRON:
                outcome = compare_loaded(model, folder / f"{case}_megatron" / "release")
                torch.save(outcome, folder / loaded_name(case, layout))
            checkpoint = folder / f"{case}_{layout}_checkpoint"
            checkpoint.mkdir(exist_ok=True)
            save(model, checkpoint)
        stop_distributed()


if __name__ == "__main__":  # a checkpoint's writer starts a process that imports this module again
    main()
