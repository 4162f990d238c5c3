"""`packed-sft validate`: is packed data whole and sound?"""

from __future__ import annotations

from typing import Literal

import click

from megatron_packed_sft.cli._verb import argument, quiet_option, verb


@verb(
    examples="""
        packed-sft validate my_dataset
        packed-sft validate my_dataset/train/shard_000000 --level structure
        packed-sft validate my_dataset --level full --json > report.json
    """
)
@argument("path", help="a shard or packed file, a dataset directory, a directory of shards, or a token store")
@click.option(
    "--level",
    type=click.Choice(("structure", "full")),
    default="full",
    show_default=True,
    help="structure: manifests, sizes and headers; full: also every byte and every bin",
)
@click.option("--max-findings", type=int, default=100, metavar="N", show_default=True, help="print at most N findings")
@quiet_option
def command(path: str, level: Literal["structure", "full"], max_findings: int, quiet: bool, as_json: bool) -> int:
    """Check packed data of any storage. Exit code 0: sound, 1: not sound, 2: not packed data at all."""
    from rich.text import Text

    from megatron_packed_sft.storage.validate import validate
    from megatron_packed_sft.support.terminal import show, show_json
    from megatron_packed_sft.support.wording import counted
    from megatron_packed_sft.tokens.validate import is_token_store, validate_token_store

    report = (validate_token_store if is_token_store(path) else validate)(
        path, level=level, max_findings=max_findings, progress=not quiet
    )
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
        verdict = ("sound", "green") if report.ok else (counted(report.num_findings, "finding"), "bold red")
        counts = f"{counted(report.num_shards, 'shard')}, {counted(report.num_bins, 'bin')}, {report.num_bytes:,} bytes"
        if report.level == "full":
            counts += f", {counted(report.num_tokens, 'token')}, {report.num_loss_tokens:,} trained"
        show(Text.assemble(f"{report.path}: ", verdict, f" ({report.level}: {counts})"))
    return 0 if report.ok else 1
