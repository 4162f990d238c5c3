"""`packed-sft prepare`: read the configuration, run the pipeline, print the summary."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing

from megatron_packed_sft.config.application import completions, run_application
from megatron_packed_sft.prepare.config import PrepareConfig

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
    "--quiet": "quiet=true",
    "--json": "json=true",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `packed-sft prepare` and return its exit code.

    Args:
        argv: overrides such as `input=chats.jsonl`; by default those of the command line.
    """
    return run_application(
        _run,
        name="prepare",
        schema=PrepareConfig,
        description=DESCRIPTION,
        examples=EXAMPLES,
        flags=FLAGS,
        argv=argv,
    )


def complete(words: Sequence[str], incomplete: str) -> list[str]:
    """Return the completions of the beginning of a word."""
    return completions(words, incomplete, name="prepare", schema=PrepareConfig, flags=FLAGS)


def _run(config: PrepareConfig) -> None:
    # --help and mistakes in the settings do not wait for these.
    from megatron_packed_sft.prepare.pipeline import Pipeline
    from megatron_packed_sft.prepare.report import summary
    from megatron_packed_sft.support.terminal import show, show_json

    with closing(Pipeline(config)) as pipeline:
        if pipeline.is_share and not config.dry_run:
            share = pipeline.run_share()
            if config.json:
                show_json(share.to_json())
            elif not config.quiet:
                show(*share.lines())
            return
        report = pipeline.estimate() if config.dry_run else pipeline.run()
    if config.json:
        show_json(report.to_json())
    elif not config.quiet:
        show(*summary(report))
    if not config.quiet and (warning := report.warning()):
        print(f"packed-sft prepare: warning: {warning}", file=sys.stderr)
