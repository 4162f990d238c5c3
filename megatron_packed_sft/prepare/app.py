"""`packed-sft prepare`: the configuration taken apart, the pipeline run, the summary printed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_packed_sft.config.application import run_application
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.config import PrepareConfig, SourceConfig
from megatron_packed_sft.prepare.executor import create_executor
from megatron_packed_sft.prepare.pipeline import Preparation
from megatron_packed_sft.prepare.plan_stage import PackingOptions
from megatron_packed_sft.prepare.sources import Source
from megatron_packed_sft.prepare.splits import SplitRule
from megatron_packed_sft.prepare.summary import summary
from megatron_packed_sft.storage.writers import storage_name

DESCRIPTION = """
Turn chat files into packed, checksummed shards that training opens in a millisecond. Stages: scan, encode, plan,
publish. A run that was stopped goes on where it was; a run with another pack size tokenizes nothing again.
"""
EXAMPLES = """
  packed-sft prepare input=chats.jsonl output=my_dataset tokenizer.path=Qwen2.5-7B
  packed-sft prepare input='data/*.jsonl.gz' output=my_dataset tokenizer.path=sp.model template=chatml \\
      packing.pack_size=8192 split.validation_fraction=0.01
  packed-sft prepare --config-dir . --config-name my_prepare        # several sources, in a file of your own
  packed-sft prepare input=chats.jsonl output=my_dataset tokenizer.path=sp.model --dry-run
  packed-sft prepare input=chats.jsonl 'output=packed_${packing.pack_size}' work_dir=work tokenizer.path=sp.model \\
      packing.pack_size=2048,4096 --multirun
"""
FLAGS = {"--dry-run": "dry_run=true", "--force": "force=true", "--quiet": "quiet=true"}
LOOK_ALIKES = {
    **dict.fromkeys(
        ("packing_length", "pack_length", "pack_size", "packed_sequence_size", "seq_length", "max_seq_length"),
        "packing.pack_size",
    ),
    **dict.fromkeys(("max_length", "max_len"), "encode.max_len (or packing.pack_size for the length of the bins)"),
    **dict.fromkeys(("num_workers", "workers", "num_proc"), "executor.num_workers"),
    **dict.fromkeys(("path", "paths", "files", "data", "input_path"), "input"),
    **dict.fromkeys(("output_dir", "output_path", "save_dir"), "output"),
    **dict.fromkeys(("chat_template",), "template.name"),
    **dict.fromkeys(("tokenizer_path", "tokenizer_name"), "tokenizer.path"),
    **dict.fromkeys(("val_frac", "validation_fraction", "val_fraction", "eval_fraction"), "split.validation_fraction"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `packed-sft prepare` and return its exit code.

    Example:
        >>> main(["input=chats.jsonl", "output=my_dataset", "tokenizer.path=sp.model"])  # doctest: +SKIP
        0
    """
    return run_application(
        _run,
        name="prepare",
        schema=PrepareConfig,
        description=DESCRIPTION,
        examples=EXAMPLES,
        flags=FLAGS,
        look_alikes=LOOK_ALIKES,
        argv=argv,
    )


def _run(config: PrepareConfig) -> None:
    preparation = preparation_of(config)
    report = preparation.estimate() if config.dry_run else preparation.run()
    if not config.quiet:
        print(summary(report))


def preparation_of(config: PrepareConfig) -> Preparation:
    """Take a configuration apart."""
    if config.on_error not in ("raise", "skip"):
        raise InvalidInputError(f"on_error is {config.on_error!r}; choose raise or skip")
    if config.shard_megabytes < 1:
        raise InvalidInputError(f"shard_megabytes is {config.shard_megabytes}; it must be at least 1")
    if config.limit is not None and config.limit < 1:
        raise InvalidInputError(f"limit is {config.limit}; it must be at least 1")
    for key, path in (("output", config.output), ("tokenizer.path", config.tokenizer.path)):
        if not path:
            raise InvalidInputError(f"{key} is empty; give a path")
    output = Path(os.path.abspath(config.output))
    if not output.name:
        raise InvalidInputError(f"output is {config.output}; name a directory that prepare may make")
    return Preparation(
        output=output,
        work_dir=Path(os.path.abspath(config.work_dir)) if config.work_dir else output.with_name(f"{output.name}.work"),
        sources=_sources(config),
        tokenizer_path=config.tokenizer.path,
        tokenizer_kind=config.tokenizer.kind,
        tokenizer_fast=config.tokenizer.fast,
        template=config.template,
        options=config.encode,
        packing=PackingOptions(**vars(config.packing)),
        split_rule=SplitRule(**vars(config.split)),
        executor=create_executor(config.executor.kind, config.executor.num_workers),
        packed_storage=storage_name(config.packed_storage),
        shard_bytes=config.shard_megabytes << 20,
        deduplicate=config.deduplicate,
        skip_errors=config.on_error == "skip",
        max_errors=config.max_errors,
        limit=config.limit,
        force=config.force,
        quiet=config.quiet,
        log_interval=config.log_interval,
    )


def _sources(config: PrepareConfig) -> list[Source]:
    given: dict[str, SourceConfig] = dict(config.sources)
    if config.input is not None:
        if given:
            raise InvalidInputError("input and sources were both given; name all of the input in sources")
        given = {"input": SourceConfig(path=config.input)}
    return [
        Source(
            name=name,
            paths=_paths("input" if config.input is not None else f"sources.{name}.path", source.path),
            schema=source.schema,
            mapping=source.mapping,
            weight=source.weight,
            split=source.split,
        )
        for name, source in given.items()
    ]


def _paths(key: str, given: Any) -> tuple[str, ...]:
    paths = [given] if isinstance(given, str) else given
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) and path for path in paths):
        raise InvalidInputError(f"{key} is {given!r}; give a path, or a list of paths")
    return tuple(paths)
