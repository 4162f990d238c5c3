"""`packed-sft compare`: two pieces of packed data, bin by bin."""

from __future__ import annotations

import click

from megatron_packed_sft.cli._verb import argument, quiet_option, verb


@verb(
    examples="""
        packed-sft compare my_dataset other_dataset
        packed-sft compare training_4096.npy my_dataset/train/shard_000000
        packed-sft compare my_dataset repacked --max-differences 3 --json
    """
)
@argument("path_a", metavar="A", help="a dataset directory, a shard or a packed file of any storage, or its URL")
@argument("path_b", metavar="B", help="what to compare it with")
@click.option("--split", metavar="NAME", help="compare only this split (default: all)")
@click.option(
    "--max-differences",
    type=int,
    default=10,
    metavar="N",
    show_default=True,
    help="describe the first N differing bins and N sequences of each kind (all are counted)",
)
@click.option(
    "--tokenizer",
    metavar="PATH",
    type=click.Path(),
    help="decodes the differences (default: found where the data was prepared)",
)
@quiet_option
def command(
    path_a: str,
    path_b: str,
    split: str | None,
    max_differences: int,
    tokenizer: str | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Compare packed data bin by bin, in any two storages. Exit code 0: equal. Exit code 1: different; the first
    differences are printed with their context, and how many sequences are in another bin, have another loss mask, or
    exist on one side only.
    """
    from megatron_packed_sft.inspect.compare import compare, view
    from megatron_packed_sft.support.terminal import show, show_json

    facts = compare(
        path_a, path_b, split=split, max_differences=max_differences, tokenizer=tokenizer, progress=not quiet
    )
    if as_json:
        show_json(facts)
    elif not quiet:
        show(*view(facts))
    return 0 if facts["equal"] else 1
