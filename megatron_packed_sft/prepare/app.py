"""`packed-sft prepare`: the configuration read, the pipeline run, the summary printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_packed_sft.config.application import completions, run_application
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.config import PrepareConfig

if TYPE_CHECKING:
    from megatron_packed_sft.prepare.pipeline import Pipeline

DESCRIPTION = """
Turn chat files into packed, checksummed shards that training opens in a millisecond. Stages: scan, encode, plan,
publish. A run that was stopped resumes where it was; a run with another pack size does not tokenize again.
"""
EXAMPLES = """
  packed-sft prepare input=chats.jsonl output=my_dataset tokenizer.path=Qwen2.5-7B
  packed-sft prepare input='data/*.jsonl.gz' output=my_dataset tokenizer.path=sp.model template=chatml \\
      packing.pack_size=8192 split.validation_fraction=0.01
  packed-sft prepare --config-dir . --config-name my_prepare        # several sources, in a file of your own
  packed-sft prepare input=chats.jsonl output=my_dataset tokenizer.path=sp.model --dry-run
  packed-sft prepare input='chats/*.jsonl' output=my_dataset tokenizer.path=sp.model executor=array \\
      executor.index=$SLURM_ARRAY_TASK_ID executor.count=64       # one of 64 jobs; without executor.index: publish
  packed-sft prepare input=chats.jsonl 'output=packed_${packing.pack_size}' work_dir=work tokenizer.path=sp.model \\
      packing.pack_size=2048,4096 --multirun
"""
FLAGS = {
    "--dry-run": "dry_run=true",
    "--overwrite": "overwrite=true",
    "--force": "force=true",
    "--quiet": "quiet=true",
    "--json": "json=true",
}
# Called before the work begins, so that a page that cannot be written is refused then; the result writes it and
# returns its path.
PageMaker = Callable[["Pipeline"], Callable[[], str]]


def main(argv: Sequence[str] | None = None, *, make_page: PageMaker | None = None) -> int:
    """Run `packed-sft prepare` and return its exit code.

    Args:
        argv: overrides such as `input=chats.jsonl`; by default those of the command line.
        make_page: what `report=true` asks for; the command line has it, because pages are made above this room.
    """
    return run_application(
        partial(_run, make_page=make_page),
        name="prepare",
        schema=PrepareConfig,
        description=DESCRIPTION,
        examples=EXAMPLES,
        flags=FLAGS,
        argv=argv,
    )


def complete(words: Sequence[str], incomplete: str) -> list[str]:
    """Return what the shell may complete the beginning of a word to."""
    return completions(words, incomplete, name="prepare", schema=PrepareConfig, flags=FLAGS)


def _run(config: PrepareConfig, make_page: PageMaker | None) -> None:
    # --help and mistakes in the settings do not wait for these.
    from megatron_packed_sft.prepare.pipeline import Pipeline
    from megatron_packed_sft.prepare.report import summary
    from megatron_packed_sft.support.terminal import show, show_json

    write_page = None
    with closing(Pipeline(config)) as pipeline:
        if pipeline.is_share and not config.dry_run:
            share = pipeline.run_share()
            if config.json:
                show_json(share.to_json())
            elif not config.quiet:
                show(*share.lines())
            return
        if config.report and not config.dry_run:
            if make_page is None:
                raise InvalidInputError(
                    "report=true is for `packed-sft prepare`; here, call `packed-sft report` afterwards"
                )
            write_page = make_page(pipeline)
        report = pipeline.estimate() if config.dry_run else pipeline.run()
    if write_page is not None:
        report = replace(report, stages=[*report.stages, ("report", f"{write_page()} written")])
    if config.json:
        show_json(report.to_json())
    elif not config.quiet:
        show(*summary(report))
    if not config.quiet and (warning := report.warning()):
        print(f"packed-sft prepare: warning: {warning}", file=sys.stderr)
