"""`packed-sft sample-data`: synthetic chats for trying things out."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_packed_sft.cli._common import add_quiet


def add_parser(commands: Any) -> None:
    """Add the verb to the command line."""
    parser = commands.add_parser(
        "sample-data",
        help="write synthetic chats in several file formats, for trying things out",
        description="Write synthetic but natural chats: single and multi turn, system prompts, tools, many lengths. "
        "The same seed gives the same bytes.",
        epilog="example:\n  packed-sft sample-data chats --rows 5000 --seed 7",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", help="where to write the files; created if missing")
    parser.add_argument(
        "--rows", type=int, default=2000, metavar="N", help="records in all files together (default: 2000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the chats (default: 0)")
    add_quiet(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from megatron_packed_sft.records.samples.sample_chats import write_sample_data

    files = write_sample_data(arguments.directory, num_records=arguments.rows, seed=arguments.seed)
    if not arguments.quiet:
        for file in files:
            print(f"{file}: {file.stat().st_size:,} bytes")
    return 0
