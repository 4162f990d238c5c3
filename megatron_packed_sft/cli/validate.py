"""`packed-sft validate`: check that packed data is complete and sound."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import click

from megatron_packed_sft.cli._verb import argument, quiet_option, verb

if TYPE_CHECKING:
    from megatron_packed_sft.storage.token_stream.options import StreamOptions
    from megatron_packed_sft.storage.validate import ValidationReport


@verb(
    examples="""
        packed-sft validate my_dataset
        packed-sft validate my_dataset/train/shard_000000 --level structure
        packed-sft validate my_dataset --level full --json > report.json
        packed-sft validate tokens --tokenizer my_model --seq-length 4096
    """
)
@argument("path", help="a dataset directory, a shard or packed file, a directory of shards, a token store or stream")
@click.option(
    "--level",
    type=click.Choice(("structure", "full")),
    default="full",
    show_default=True,
    help="structure: manifests, sizes and headers; full: every byte and every bin, too",
)
@click.option("--max-findings", type=int, default=100, metavar="N", show_default=True, help="print at most N findings")
@click.option(
    "--tokenizer",
    type=click.Path(),
    metavar="PATH",
    help="token streams: gives the EOS id and the vocabulary size",
)
@click.option("--eos-id", type=int, metavar="ID", help="token streams: the id that ends a document")
@click.option("--vocab-size", type=int, metavar="N", help="token streams: ids must be below it")
@click.option("--dtype", metavar="NAME", help="token streams: the dtype of .bin files, such as uint16")
@click.option("--seq-length", type=int, metavar="N", help="token streams: predictions per window (default: 2048)")
@click.option("--file-pattern", metavar="GLOB", help="token streams: the files to read, such as '*.npy'")
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
    """Check packed data of any storage. Exit code 0: sound, 1: not sound, 2: not packed data."""
    from rich.text import Text

    from megatron_packed_sft.storage.validate import validate
    from megatron_packed_sft.support.terminal import show, show_json
    from megatron_packed_sft.support.wording import plural
    from megatron_packed_sft.tokens.validate import is_token_store, validate_token_store

    stream = _stream_options(
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


def _stream_options(
    *,
    tokenizer: str | None,
    eos_id: int | None,
    vocab_size: int | None,
    dtype: str | None,
    seq_length: int | None,
    file_pattern: str | None,
) -> StreamOptions | None:
    """Return how to read a token stream, or None if no flag about token streams was given."""
    if all(value is None for value in (tokenizer, eos_id, vocab_size, dtype, seq_length, file_pattern)):
        return None
    from megatron_packed_sft.storage.token_stream.options import DEFAULT_SEQ_LENGTH, StreamOptions

    tokenizer_eos_id = None
    if tokenizer is not None:
        from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer

        loaded = load_tokenizer(tokenizer)
        tokenizer_eos_id = loaded.eos_id
        vocab_size = loaded.vocab_size if vocab_size is None else vocab_size
    return StreamOptions(
        seq_length=DEFAULT_SEQ_LENGTH if seq_length is None else seq_length,
        eos_id=eos_id,
        tokenizer_eos_id=tokenizer_eos_id,
        file_pattern=file_pattern,
        dtype=dtype,
        vocab_size=vocab_size,
        spelling="flag",
    )
