"""`packed-sft export`: write a trained model as a Hugging Face folder."""

from __future__ import annotations

from dataclasses import asdict

import click

from megatron_packed_sft.cli._verb import argument, quiet_option, verb


@verb(
    examples="""
        packed-sft export runs/first my_model
        packed-sft export runs/first/checkpoints/step_000100 my_model --dtype bf16
        packed-sft export s3://bucket/run my_model
        packed-sft export runs/first my_model --tokenizer my_tokenizer --max-shard-size 2GB
        packed-sft export megatron_checkpoints my_model --like Qwen3-0.6B
        packed-sft export Qwen3-0.6B megatron_checkpoints --to megatron --dtype bf16
    """
)
@argument(
    "source",
    metavar="RUN_OR_CHECKPOINT",
    help="a run's output directory (its newest checkpoint is taken), one of its checkpoints, the URL of either, a "
    "torch_dist checkpoint of Megatron-LM or Megatron-Bridge, or a Hugging Face folder",
)
@argument("target", metavar="OUTPUT", help="the folder to publish")
@click.option(
    "--to",
    type=click.Choice(("huggingface", "megatron", "adapter")),
    default="huggingface",
    show_default=True,
    help="huggingface: the model with its adapters merged; megatron: a torch_dist checkpoint for Megatron-LM and "
    "Megatron-Bridge; adapter: the adapters alone, for the library peft",
)
@click.option(
    "--dtype",
    metavar="TYPE",
    help="bf16, fp16, fp32 or fp64 (default: as in the pretrained weights, else as trained)",
)
@click.option(
    "--max-shard-size",
    default="5GB",
    metavar="SIZE",
    show_default=True,
    help="largest weights file, such as 500MB",
)
@click.option(
    "--like",
    metavar="FOLDER",
    type=click.Path(),
    help="a Hugging Face folder of the same model, for config.json and the tokenizer; required for checkpoints of "
    "Megatron-LM and Megatron-Bridge",
)
@click.option(
    "--tokenizer", metavar="PATH", type=click.Path(), help="a tokenizer's folder or file (default: the run's)"
)
@click.option("--overwrite", is_flag=True, help="replace OUTPUT if it exists")
@quiet_option
def command(
    source: str,
    target: str,
    to: str,
    dtype: str | None,
    max_shard_size: str,
    like: str | None,
    tokenizer: str | None,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Write a checkpoint as a Hugging Face folder that transformers loads: safetensors weights, config.json, tokenizer
    and chat template. Works for every parallel layout, needs no GPU, holds one weight in memory at a time, and can run
    during training. The folder appears when it is complete.
    """
    from megatron_packed_sft.support.imports import require_torch
    from megatron_packed_sft.support.terminal import show_json
    from megatron_packed_sft.support.wording import byte_count, plural

    require_torch("exporting a model", "megatron")
    from megatron_packed_sft.train.export import export_model

    report = export_model(
        source,
        target,
        to=to,
        dtype=dtype,
        max_shard_size=max_shard_size,
        like=like,
        tokenizer=tokenizer,
        overwrite=overwrite,
        progress=not quiet,
    )
    if as_json:
        show_json(asdict(report))
    elif not quiet:
        print(
            f"{report.target}: {report.family}, {plural(report.num_parameters, 'parameter')}, {report.dtype}, "
            f"{byte_count(report.num_bytes)} in {plural(report.num_files, 'file')}, from {report.source}"
        )
        for note in report.notes:
            print(f"note: {note}")
    return 0
