"""`packed-sft validate`: is packed data whole and sound?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import click

from megatron_packed_sft.cli._stream_options import stream_options
from megatron_packed_sft.cli._verb import argument, quiet_option, verb

if TYPE_CHECKING:
    from megatron_packed_sft.storage.validate import ValidationReport


@verb(
    examples="""
        packed-sft validate my_dataset
        packed-sft validate my_dataset/train/shard_000000 --level structure
        packed-sft validate my_dataset --level full --json > report.json
        packed-sft validate tokens --tokenizer my_model --seq-length 4096
    """
)
@argument(
    "path", help="a shard or packed file, a dataset directory, a directory of shards, a token store, stream or cache"
)
@click.option(
    "--level",
    type=click.Choice(("structure", "full")),
    default="full",
    show_default=True,
    help="structure: manifests, sizes and headers; full: also every byte and every bin",
)
@click.option("--max-findings", type=int, default=100, metavar="N", show_default=True, help="print at most N findings")
@click.option(
    "--tokenizer", type=click.Path(), metavar="PATH", help="token streams: gives the EOS id and the vocabulary"
)
@click.option("--eos-id", type=int, metavar="ID", help="token streams: the token that ends a document")
@click.option("--vocab-size", type=int, metavar="N", help="token streams: all ids must be below it")
@click.option("--dtype", metavar="NAME", help="token streams: of .bin files, such as uint16")
@click.option("--seq-length", type=int, metavar="N", help="token streams: predictions of a window  [default: 2048]")
@click.option("--file-pattern", metavar="GLOB", help="token streams: which files, such as '*.npy'")
@quiet_option
def command(
    path: str,
    level: Literal["structure", "full"],
    max_findings: int,
    tokenizer: str | None,
    eos_id: int | None,
    vocab_size: int | None,
    dtype: str | None,
    seq_length: int | None,
    file_pattern: str | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Check packed data of any storage. Exit code 0: sound, 1: not sound, 2: not packed data at all."""
    from rich.text import Text

    from megatron_packed_sft.caches.validate import is_sft_cache, validate_sft_cache
    from megatron_packed_sft.storage.validate import validate
    from megatron_packed_sft.support.terminal import show, show_json
    from megatron_packed_sft.support.wording import plural
    from megatron_packed_sft.tokens.validate import is_token_store, validate_token_store

    stream = stream_options(
        tokenizer=tokenizer,
        eos_id=eos_id,
        vocab_size=vocab_size,
        dtype=dtype,
        seq_length=seq_length,
        file_pattern=file_pattern,
    )
    check: Callable[..., ValidationReport] = functools.partial(validate, stream=stream)
    if stream is None and is_token_store(path):
        check = validate_token_store
    elif stream is None and is_sft_cache(path):
        check = validate_sft_cache
    report = check(path, level=level, max_findings=max_findings, progress=not quiet)
    if as_json:
        show_json(report.to_json())
        return 0 if report.ok else 1
    for finding in report.findings:
        print(finding)
    if hidden := report.num_findings - len(report.findings):
        print(f"... and {hidden:,} more findings")
    if not quiet:
        for note in report.notes:
            print(f"note: {note}")
        verdict = ("sound", "green") if report.ok else (plural(report.num_findings, "finding"), "bold red")
        counts = f"{plural(report.num_shards, 'shard')}, {plural(report.num_bins, 'bin')}, {report.num_bytes:,} bytes"
        if report.level == "full":
            counts += f", {plural(report.num_tokens, 'token')}, {report.num_loss_tokens:,} trained"
        show(Text.assemble(f"{report.path}: ", verdict, f" ({report.level}: {counts})"))
    return 0 if report.ok else 1
