"""`packed-sft export`: a trained model as a Hugging Face folder."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from megatron_packed_sft.cli._common import add_quiet, wants_progress


def add_parser(commands: Any) -> None:
    """Add the verb to the command line."""
    parser = commands.add_parser(
        "export",
        help="a trained model as a Hugging Face folder",
        description="Write a checkpoint as a Hugging Face folder that transformers loads: weights as safetensors, "
        "config.json, tokenizer and chat template. Works for every parallel layout, without a GPU, one weight at a "
        "time, and while the run goes on. The folder appears when it is complete.",
        epilog="examples:\n  packed-sft export runs/first my_model\n"
        "  packed-sft export runs/first/checkpoints/step_000100 my_model --dtype bf16\n"
        "  packed-sft export runs/first my_model --tokenizer my_tokenizer --max-shard-size 2GB\n"
        "  packed-sft export megatron_checkpoints my_model --like Qwen3-0.6B\n"
        "  packed-sft export Qwen3-0.6B megatron_checkpoints --to megatron --dtype bf16",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source",
        metavar="RUN_OR_CHECKPOINT",
        help="a run's output directory (its newest checkpoint), a checkpoint in it, a torch_dist checkpoint of "
        "Megatron-LM or Megatron-Bridge, or a Hugging Face folder",
    )
    parser.add_argument("target", metavar="OUTPUT", help="the folder to publish")
    parser.add_argument(
        "--to",
        choices=("huggingface", "megatron", "adapter"),
        default="huggingface",
        help="huggingface, with adapters merged in; megatron: a torch_dist checkpoint that Megatron-LM and "
        "Megatron-Bridge start from; adapter: the adapters alone, for the library peft (default: huggingface)",
    )
    parser.add_argument(
        "--dtype",
        metavar="TYPE",
        help="bf16, fp16, fp32 or fp64 (default: that of the weights the run started from, else as trained)",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest weights file, such as 500MB (default: 5GB)"
    )
    parser.add_argument(
        "--like",
        metavar="FOLDER",
        help="a Hugging Face folder of the same model, whose config.json and tokenizer are taken; needed for "
        "checkpoints of others",
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="a tokenizer's folder or file, instead of the run's")
    parser.add_argument("--overwrite", action="store_true", help="replace OUTPUT if it exists")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_quiet(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from megatron_packed_sft.support.wording import byte_count, counted
    from megatron_packed_sft.train.export import export_model

    report = export_model(
        arguments.source,
        arguments.target,
        to=arguments.to,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        like=arguments.like,
        tokenizer=arguments.tokenizer,
        overwrite=arguments.overwrite,
        progress=wants_progress(arguments),
    )
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
    elif not arguments.quiet:
        print(
            f"{report.target}: {report.family}, {counted(report.num_parameters, 'parameter')}, {report.dtype}, "
            f"{byte_count(report.num_bytes)} in {counted(report.num_files, 'file')}, from {report.source}"
        )
        for note in report.notes:
            print(f"note: {note}")
    return 0
