"""`packed-sft`: the command line. Exit codes: 0 all well, 1 something is wrong with the data, 2 wrong usage."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from megatron_packed_sft._version import __version__
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError

_EPILOG = """examples:
  packed-sft sample-data chats
  packed-sft prepare input='chats/*' output=my_dataset tokenizer.path=sp.model template=chatml
  packed-sft train data.path=my_dataset train.steps=100
  packed-sft validate my_dataset
  packed-sft validate my_dataset/train/shard_000000 --level structure --json
  packed-sft convert training_4096.npy shards/shard_000000
  packed-sft convert 'packed/*.npy' my_dataset --pack-size 4096 --overlong error
  packed-sft convert my_dataset legacy_files --to legacy
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Example:
        >>> main(["validate", "my_dataset"])  # doctest: +SKIP
        0
    """
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given and given[0] in _APPLICATIONS:
            return _APPLICATIONS[given[0]](given[1:])
        arguments = _parser().parse_args(given)
        code: int = arguments.run(arguments)
    except PackedSFTError as error:
        print(f"packed-sft: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidInputError) else 1
    except BrokenPipeError:  # the reader of a pipe, such as head, had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's own flush would complain
        return 1
    except KeyboardInterrupt:
        print("packed-sft: interrupted; nothing was published", file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="packed-sft",
        description="Packed SFT data for Megatron-style training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"packed-sft {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    # These two are Hydra applications with a --help of their own; they never reach this parser.
    commands.add_parser("prepare", help="chat files to packed, checksummed shards (packed-sft prepare --help)")
    commands.add_parser("train", help="train on packed data with Megatron-Core (packed-sft train --help)")

    sample = commands.add_parser(
        "sample-data",
        help="write synthetic chats in several file formats, to try things out with",
        description="Write synthetic but natural chats: single and multi turn, system prompts, tools, many lengths. "
        "The same seed gives the same bytes.",
        epilog="example:\n  packed-sft sample-data chats --rows 5000 --seed 7",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sample.add_argument("directory", help="where the files go; made if it is not there")
    sample.add_argument("--rows", type=int, default=2000, metavar="N", help="rows in all files (default: 2000)")
    sample.add_argument("--seed", type=int, default=0, help="default: 0")
    _add_quiet(sample)
    sample.set_defaults(run=_sample_data)

    validate = commands.add_parser(
        "validate",
        help="check a shard or a dataset: checksums, structure, every row",
        description="Check a shard, a dataset directory or a directory of shards. Exit code 0: sound, 1: not.",
        epilog="example:\n  packed-sft validate my_dataset --level full --json > report.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    validate.add_argument("path", help="a shard, a dataset directory, a directory of shards, or a token store")
    validate.add_argument(
        "--level",
        choices=("structure", "full"),
        default="full",
        help="structure: manifests, sizes and headers; full: also every byte and every row (default: full)",
    )
    validate.add_argument("--max-findings", type=int, default=100, metavar="N", help="print that many (default: 100)")
    validate.add_argument("--json", action="store_true", help="print the report as JSON")
    _add_quiet(validate)
    validate.set_defaults(run=_validate)

    convert = commands.add_parser(
        "convert",
        help="legacy .npy or Parquet to memmap_v1, and memmap_v1 to legacy .npy",
        description="Convert packed data between storages. Rows stay equal, token by token. One file becomes one "
        "shard; several become a dataset directory, published together or not at all.",
        epilog="examples:\n  packed-sft convert training_4096.npy shards/shard_000000\n"
        "  packed-sft convert 'packed/*.npy' my_dataset --pack-size 4096\n"
        "  packed-sft convert my_dataset legacy_files --to legacy",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    convert.add_argument(
        "sources", nargs="+", metavar="SOURCE", help=".npy or Parquet files, shards, datasets, directories, globs"
    )
    convert.add_argument("target", metavar="TARGET", help="the shard, file or directory to publish")
    convert.add_argument(
        "--to", choices=("memmap_v1", "legacy", "legacy_npy_pickle"), default="memmap_v1", help="default: memmap_v1"
    )
    convert.add_argument("--pack-size", type=int, metavar="N", help="width of the shards (default: the longest row)")
    convert.add_argument(
        "--overlong",
        choices=("grow", "error"),
        default="grow",
        help="rows longer than --pack-size widen the shards, or are an error (default: grow)",
    )
    convert.add_argument("--vocab-size", type=int, metavar="N", help="ids must be below it (default: largest id + 1)")
    convert.add_argument("--pad-id", type=int, default=0, metavar="ID", help="fills the rows (default: 0)")
    convert.add_argument("--split", default="train", help="split for the shards of several files (default: train)")
    convert.add_argument("--overwrite", action="store_true", help="replace TARGET if it exists")
    convert.add_argument("--json", action="store_true", help="print the report as JSON")
    _add_quiet(convert)
    convert.set_defaults(run=_convert)
    return parser


def _add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no summary")


def _wants_progress(arguments: argparse.Namespace) -> bool:
    return not arguments.quiet and not arguments.json and sys.stderr.isatty()


def _validate(arguments: argparse.Namespace) -> int:
    from megatron_packed_sft.storage.validate import validate
    from megatron_packed_sft.support.wording import counted
    from megatron_packed_sft.tokens.validate import is_token_store, validate_token_store

    report = (validate_token_store if is_token_store(arguments.path) else validate)(
        arguments.path,
        level=arguments.level,
        max_findings=arguments.max_findings,
        progress=_wants_progress(arguments),
    )
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2))
        return 0 if report.ok else 1
    for finding in report.findings:
        print(finding)
    hidden = report.num_findings - len(report.findings)
    if hidden:
        print(f"... and {hidden:,} more findings")
    if not arguments.quiet:
        for note in report.notes:
            print(f"note: {note}")
        verdict = "sound" if report.ok else counted(report.num_findings, "finding")
        counts = f"{counted(report.num_shards, 'shard')}, {counted(report.num_bins, 'bin')}, {report.num_bytes:,} bytes"
        if report.level == "full":
            counts += f", {counted(report.num_tokens, 'token')}, {report.num_loss_tokens:,} trained"
        print(f"{report.path}: {verdict} ({report.level}: {counts})")
    return 0 if report.ok else 1


def _prepare(argv: Sequence[str]) -> int:
    from megatron_packed_sft.prepare.app import main as prepare

    return prepare(argv)


def _train(argv: Sequence[str]) -> int:
    from megatron_packed_sft.train.app import main as train

    return train(argv)


_APPLICATIONS = {"prepare": _prepare, "train": _train}


def _sample_data(arguments: argparse.Namespace) -> int:
    from megatron_packed_sft.records.samples.sample_chats import write_sample_data

    files = write_sample_data(arguments.directory, num_rows=arguments.rows, seed=arguments.seed)
    if not arguments.quiet:
        for file in files:
            print(f"{file}: {file.stat().st_size:,} bytes")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
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
        overwrite=arguments.overwrite,
        progress=_wants_progress(arguments),
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
                f"note: pack size grew from {report.asked_pack_size:,} to {report.pack_size:,} to fit the longest row"
            )
        if report.num_cleared_masks:
            print(
                f"note: cleared {report.num_cleared_masks:,} loss-mask values at the last token of a sequence; "
                "they predict nothing and no collate reads them"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
