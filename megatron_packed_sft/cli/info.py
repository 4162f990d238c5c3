"""`packed-sft info`: describe a path by what is recorded there."""

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
    """Describe a path: splits, bins, tokens, trained share, how full the bins are, sources, tokenizer and settings, and
    how to train on it. Only manifests and headers are read, so it is fast at any size.
    """
    from megatron_packed_sft.inspect.info import describe, view
    from megatron_packed_sft.support.terminal import show, show_json

    facts = describe(path)
    if as_json:
        show_json(facts)
    else:
        show(*view(facts))
    return 0
