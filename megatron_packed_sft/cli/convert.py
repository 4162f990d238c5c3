"""`packed-sft convert`: convert packed data from one storage to another."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

import click

from megatron_packed_sft.cli._verb import argument, quiet_option, verb
from megatron_packed_sft.storage.registry import DEFAULT_STORAGE, storage_names

if TYPE_CHECKING:
    from megatron_packed_sft.storage.convert import ConversionReport


@verb(
    examples="""
        packed-sft convert training_4096.npy shards/shard_000000
        packed-sft convert 'packed/*.npy' my_dataset --pack-size 4096
        packed-sft convert my_dataset legacy_files --to legacy
        packed-sft convert my_dataset/train/shard_000000 training.idx.parquet --to parquet
        packed-sft convert texts/train/shard_000000 texts_text_document --to megatron_indexed
    """
)
@argument(
    "sources",
    metavar="SOURCE...",
    nargs=-1,
    required=True,
    help=".npy or Parquet files, shards, datasets, directories or globs",
)
@argument("target", help="the shard, file or directory to publish")
@click.option(
    "--to",
    metavar="STORAGE",
    default=DEFAULT_STORAGE,
    show_default=True,
    help=f"one of {', '.join(storage_names())}",
    shell_complete=lambda ctx, parameter, start: [name for name in storage_names() if name.startswith(start)],
)
@click.option("--pack-size", type=int, metavar="N", help="width of the shards (default: the longest bin)")
@click.option(
    "--overlong",
    type=click.Choice(("grow", "error")),
    default="grow",
    show_default=True,
    help="what to do with bins longer than --pack-size: widen the shards, or stop with an error",
)
@click.option("--vocab-size", type=int, metavar="N", help="ids must be below it (default: largest id + 1)")
@click.option("--pad-id", type=int, metavar="ID", help="the padding id (default: the source's, or 0)")
@click.option(
    "--split",
    default="train",
    metavar="NAME",
    show_default=True,
    help="split for the shards of several files",
)
@click.option(
    "--drop-masks",
    is_flag=True,
    help="with --to megatron_indexed: allow untrained tokens; readers of the result will train on them",
)
@click.option("--overwrite", is_flag=True, help="replace TARGET if it exists")
@quiet_option
def command(
    sources: tuple[str, ...],
    target: str,
    to: str,
    pack_size: int | None,
    overlong: Literal["grow", "error"],
    vocab_size: int | None,
    pad_id: int | None,
    split: str,
    drop_masks: bool,
    overwrite: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Convert packed data from one storage to another. Bins keep their tokens, masks and sequences. One file becomes
    one shard; several become a dataset directory, published as a whole or not at all.
    """
    from megatron_packed_sft.storage.convert import convert
    from megatron_packed_sft.support.terminal import show_json

    report = convert(
        list(sources),
        target,
        to=to,
        pack_size=pack_size,
        overlong=overlong,
        vocab_size=vocab_size,
        pad_id=pad_id,
        split=split,
        drop_masks=drop_masks,
        overwrite=overwrite,
        progress=not quiet,
    )
    if as_json:
        show_json(asdict(report))
    elif not quiet:
        _show(report)
    return 0


def _show(report: ConversionReport) -> None:
    from megatron_packed_sft.support.wording import plural

    print(
        f"{report.target}: {plural(report.num_files, 'file')}, {plural(report.num_bins, 'bin')}, "
        f"{plural(report.num_tokens, 'token')}, pack size {report.pack_size:,}, {report.packed_storage}"
    )
    if report.asked_pack_size is not None and report.pack_size > report.asked_pack_size:
        print(f"note: pack size grew from {report.asked_pack_size:,} to {report.pack_size:,} to fit the longest bin")
    if report.num_cleared_masks:
        print(
            f"note: cleared {report.num_cleared_masks:,} loss-mask values at the last token of a sequence, which "
            "predicts nothing"
        )
    if report.num_dropped_masks:
        print(
            f"note: {report.packed_storage} stores no loss masks, so readers will train on "
            f"{report.num_dropped_masks:,} predictions that were untrained in the source"
        )
