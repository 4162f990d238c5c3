"""`packed-sft validate`: is packed data whole and sound?"""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any

from megatron_packed_sft.cli._common import add_quiet, wants_progress
from megatron_packed_sft.cli._stream_options import stream_options


def add_parser(commands: Any) -> None:
    """Add the verb to the command line."""
    parser = commands.add_parser(
        "validate",
        help="check a shard or a dataset: checksums, structure, every bin",
        description="Check packed data of any storage. Exit code 0: sound, 1: not sound, 2: not packed data at all.",
        epilog=(
            "examples:\n  packed-sft validate my_dataset --level full --json > report.json\n"
            "  packed-sft validate tokens --tokenizer my_model --seq-length 4096"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "path",
        help="a shard or packed file, a dataset directory, a directory of shards, a token store or a token stream",
    )
    parser.add_argument(
        "--level",
        choices=("structure", "full"),
        default="full",
        help="structure: manifests, sizes and headers; full: also every byte and every bin (default: full)",
    )
    parser.add_argument(
        "--max-findings", type=int, default=100, metavar="N", help="print at most N findings (default: 100)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    stream = parser.add_argument_group("token streams", "directories of flat .npy or .bin files of tokens")
    stream.add_argument("--tokenizer", metavar="PATH", help="gives the EOS id and the vocabulary")
    stream.add_argument("--eos-id", type=int, metavar="ID", help="the token that ends a document")
    stream.add_argument("--vocab-size", type=int, metavar="N", help="all ids must be below it")
    stream.add_argument("--dtype", help="of .bin files, such as uint16")
    stream.add_argument("--seq-length", type=int, metavar="N", help="predictions of a window (default: 2048)")
    stream.add_argument("--file-pattern", metavar="GLOB", help="which files, such as '*.npy'")
    add_quiet(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from megatron_packed_sft.storage.validate import validate
    from megatron_packed_sft.support.wording import counted
    from megatron_packed_sft.tokens.validate import is_token_store, validate_token_store

    names = ("tokenizer", "eos_id", "vocab_size", "dtype", "seq_length", "file_pattern")
    stream = stream_options(**{name: getattr(arguments, name) for name in names})
    is_store = stream is None and is_token_store(arguments.path)
    report = (validate_token_store if is_store else functools.partial(validate, stream=stream))(
        arguments.path,
        level=arguments.level,
        max_findings=arguments.max_findings,
        progress=wants_progress(arguments),
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
