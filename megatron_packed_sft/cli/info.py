"""`packed-sft info`: what a path is and what is recorded of it."""

from __future__ import annotations

from megatron_packed_sft.cli._verb import argument, verb


@verb(
    examples="""
        packed-sft info my_dataset
        packed-sft info my_dataset.work/plans/train.npz
        packed-sft info training_4096.npy --json
        packed-sft info runs/first
    """
)
@argument(
    "path",
    help="a dataset directory, a shard, packed file or token stream, a token store, a plan, a checkpoint or a run; "
    "or a URL",
)
def command(path: str, as_json: bool) -> int:
    """Say what a path is: splits, bins, tokens, how much is trained, how full the bins are, what it was made from and
    with, and how to train on it. Manifests are read, not the data, so it takes no time at any size.
    """
    from megatron_packed_sft.inspect.info import describe
    from megatron_packed_sft.support.terminal import show, show_json

    facts = describe(path)
    if as_json:
        show_json(facts)
        return 0
    from megatron_packed_sft.inspect.info import view

    show(*view(facts))
    return 0
