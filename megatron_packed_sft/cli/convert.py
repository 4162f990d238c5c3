"""`packed-sft convert`: packed data from one storage to another."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from megatron_packed_sft.cli._common import add_quiet, wants_progress
from megatron_packed_sft.storage.registry import DEFAULT_STORAGE, storage_names


def add_parser(commands: Any) -> None:
    """Add the verb to the command line."""
    parser = commands.add_parser(
        "convert",
        help=f"packed data from one storage to another: {', '.join(storage_names())}",
        description="Convert packed data from one storage to another. Bins stay equal, token by token. One file "
        "becomes one shard; several become a dataset directory, published together or not at all.",
        epilog="examples:\n  packed-sft convert training_4096.npy shards/shard_000000\n"
        "  packed-sft convert 'packed/*.npy' my_dataset --pack-size 4096\n"
        "  packed-sft convert my_dataset legacy_files --to legacy\n"
        "  packed-sft convert my_dataset/train/shard_000000 training.idx.parquet --to parquet\n"
        "  packed-sft convert texts/train/shard_000000 texts_text_document --to megatron_indexed",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help=".npy or Parquet files, shards, datasets, directories, globs"
    )
    parser.add_argument("target", metavar="TARGET", help="the shard, file or directory to publish")
    parser.add_argument(
        "--to",
        metavar="STORAGE",
        default=DEFAULT_STORAGE,
        help=f"one of {', '.join(storage_names())} (default: {DEFAULT_STORAGE})",
    )
    parser.add_argument("--pack-size", type=int, metavar="N", help="width of the shards (default: the longest bin)")
    parser.add_argument(
        "--overlong",
        choices=("grow", "error"),
        default="grow",
        help="bins longer than --pack-size widen the shards, or are an error (default: grow)",
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="ids must be below it (default: largest id + 1)")
    parser.add_argument("--pad-id", type=int, metavar="ID", help="fills the bins up (default: the source's, or 0)")
    parser.add_argument("--split", default="train", help="split for the shards of several files (default: train)")
    parser.add_argument(
        "--drop-masks",
        action="store_true",
        help="with --to megatron_indexed: accept tokens that are not trained; whoever reads the result trains on them",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it exists")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_quiet(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from megatron_packed_sft.storage.convert import convert
    from megatron_packed_sft.support.wording import counted

    report = convert(
        arguments.sources,
        arguments.target,
        to=arguments.to,
        pack_size=arguments.pack_size,
        overlong=arguments.overlong,
        vocab_size=arguments.vocab_size,
        pad_id=arguments.pad_id,
        split=arguments.split,
        drop_masks=arguments.drop_masks,
        overwrite=arguments.overwrite,
        progress=wants_progress(arguments),
    )
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
    elif not arguments.quiet:
        print(
            f"{report.target}: {counted(report.num_files, 'file')}, {counted(report.num_bins, 'bin')}, "
            f"{counted(report.num_tokens, 'token')}, pack size {report.pack_size:,}, {report.packed_storage}"
        )
        if report.asked_pack_size is not None and report.pack_size > report.asked_pack_size:
            print(
                f"note: pack size grew from {report.asked_pack_size:,} to {report.pack_size:,} to fit the longest bin"
            )
        if report.num_cleared_masks:
            print(
                f"note: cleared {report.num_cleared_masks:,} loss-mask values at the last token of a sequence; "
                "they predict nothing and no collate reads them"
            )
        if report.num_dropped_masks:
            print(
                f"note: {report.num_dropped_masks:,} predictions that were not trained will be, by whoever reads this: "
                f"{report.packed_storage} keeps no loss masks"
            )
    return 0
