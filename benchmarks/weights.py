"""Peak memory of pretrained weights in and out: `python -m benchmarks.weights`.

A Llama of random weights is written as a Hugging Face folder in several files, loaded into Megatron-Core's model, and
exported again from a checkpoint, each in a process of its own. The bound is the model's own parameters and 1.3 times
the tensors of the largest file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import PeakOfOwnMemory, in_own_process, print_table, resident_megabytes, timed

SIZES = {"num_layers": 12, "hidden_size": 1024, "num_attention_heads": 16, "num_query_groups": 4}
SHARD_SIZE = 100_000_000
ALLOWANCE = 1.3


def _shape() -> object:
    from megatron_packed_sft.megatron.weights.layout import ModelShape

    return ModelShape.of_sizes(**SIZES, ffn_hidden_size=2816, vocab_size=32_000)


def write_folder(folder: str) -> dict[str, float]:
    """Write the model, weight by weight."""
    import torch

    from megatron_packed_sft.megatron.weights.families import LLAMA
    from megatron_packed_sft.megatron.weights.safetensors_writer import write_weights

    shape = _shape()
    Path(folder).mkdir()
    written = write_weights(
        Path(folder),
        LLAMA.weights(shape),
        lambda weight: torch.randn(weight.sizes) * 0.02,
        dtype=torch.float32,
        max_shard_bytes=SHARD_SIZE,
    )
    Path(folder, "config.json").write_text(json.dumps({**LLAMA.config(shape), "dtype": "float32"}))
    largest = max(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    return {"model": written.num_bytes / 1e6, "largest": largest / 1e6}


def load_folder(folder: str, checkpoint: str) -> dict[str, float]:
    """Load it into a model, and save that as a checkpoint for the export."""
    warnings.simplefilter("ignore")
    from megatron_packed_sft.megatron.backend import choose_backend, start_distributed, stop_distributed
    from megatron_packed_sft.megatron.model import build_gpt_model
    from megatron_packed_sft.megatron.weights.folder import HuggingFaceFolder, load_pretrained

    start_distributed(choose_backend())
    before = resident_megabytes()
    opened = HuggingFaceFolder.open(folder)
    model = build_gpt_model(backend=choose_backend(), max_sequence_length=128, **opened.shape.model_arguments())
    with PeakOfOwnMemory() as peak:
        seconds = timed(lambda: load_pretrained(model, opened))
    from megatron.core import dist_checkpointing

    Path(checkpoint).mkdir()
    dist_checkpointing.save({"model": model.sharded_state_dict()}, checkpoint)
    stop_distributed()
    return {"peak": (peak.megabytes - before) * 1.048576, "seconds": seconds}


def export_checkpoint(checkpoint: str, target: str, like: str) -> dict[str, float]:
    """Export the checkpoint."""
    from megatron_packed_sft.train.export import export_model

    before = resident_megabytes()
    with PeakOfOwnMemory() as peak:
        seconds = timed(lambda: export_model(checkpoint, target, like=like, max_shard_size=str(SHARD_SIZE)))
    return {"peak": (peak.megabytes - before) * 1.048576, "seconds": seconds}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    with tempfile.TemporaryDirectory() as home:
        folder, checkpoint, target = (f"{home}/{name}" for name in ("folder", "checkpoint", "exported"))
        written = in_own_process(write_folder, folder)
        cases = {
            "import into Megatron-Core": in_own_process(load_folder, folder, checkpoint),
            "export from a checkpoint": in_own_process(export_checkpoint, checkpoint, target, folder),
        }
    model, largest = written["model"], written["largest"]
    rows = []
    for name, case in cases.items():
        bound = model + ALLOWANCE * largest
        verdict = "below" if case["peak"] < bound else "ABOVE"
        beyond = case["peak"] - (model if name.startswith("import") else 0)
        rows.append([name, f"{case['peak']:,.0f} MB", f"{beyond:,.0f} MB", f"{bound:,.0f} MB: {verdict}"])
    title = f"Peak memory; model {model:,.0f} MB, largest file {largest:,.0f} MB"
    print_table(title, ["", "peak", "besides the model", "bound"], rows)


if __name__ == "__main__":
    main()
