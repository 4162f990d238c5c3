"""`python -m megatron_packed_sft.caches build-all`: the caches of all sources of a YAML."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_packed_sft.support.exits import run_command

_NAME = "python -m megatron_packed_sft.caches"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the caches and return the exit code: 1 if a source could not be built, 2 if a setting is wrong."""
    parser = argparse.ArgumentParser(prog=_NAME, description="Token caches: docs/caches.md.")
    command = parser.add_subparsers(dest="command", required=True).add_parser(
        "build-all",
        help="build the caches of all sources of a YAML",
        description="Tokenize every source of a YAML into flat files of ids. A source that cannot be read is recorded "
        "as not built, the others are built, and the exit code is 1. A cache made from the same things is kept.",
    )
    command.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="keys of the YAML, such as val_frac=0.05")
    command.add_argument("--config", metavar="YAML", default="recipes/caches.yaml", help="lists the sources")
    command.add_argument("--cache-dir", metavar="FOLDER", default="cache", help="gets tokenizer/, pretrain/, sft/")
    command.add_argument("--seed", metavar="N", help="of splits and shuffles (42)")
    command.add_argument("--only", metavar="NAME", action="append", default=[], help="build this source alone")
    command.add_argument("--overwrite", action="store_true", help="replace caches that were made from other things")
    command.add_argument("--quiet", action="store_true", help="no progress bar and no summary")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    asked = parser.parse_args(arguments)
    return run_command(lambda: _build_all(asked), name=_NAME, debug=asked.debug)


def _build_all(asked: argparse.Namespace) -> int:
    from megatron_packed_sft.caches.build_all import build_all, read_config
    from megatron_packed_sft.support.progress import Progress
    from megatron_packed_sft.support.terminal import show, table

    seed = [] if asked.seed is None else [f"seed={asked.seed}"]
    config = read_config(asked.config, [*asked.settings, *seed])
    with Progress("tokenize", total=None, unit="token", quiet=asked.quiet) as progress:
        results = build_all(
            config,
            asked.cache_dir,
            only=asked.only,
            overwrite=asked.overwrite,
            on_tokens=lambda source, count: progress.update(count, source=source),
        )
    if not asked.quiet:
        rows = [[one.name, one.kind, one.status, *(one.totals.values() or ("", ""))] for one in results]
        show(table(["source", "kind", "status", "train", "val"], rows, left=3))
    failed = [one for one in results if one.status == "not built"]
    for one in failed:
        print(f"{one.name} was not built: {one.reason}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
