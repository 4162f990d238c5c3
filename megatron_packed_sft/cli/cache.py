"""`packed-sft cache`: token caches made from a YAML, and the node's cache of shards that were fetched from URLs."""

from __future__ import annotations

from typing import Any

import click

from megatron_packed_sft.cli._node_cache import clear, prefetch, status
from megatron_packed_sft.cli._verb import WIDTH, Helpful, debug_option, json_option, quiet_option, verb
from megatron_packed_sft.errors import InvalidInputError


@verb(
    examples="""
        packed-sft cache build-all --config sources.yaml --cache-dir cache --seed 42
        packed-sft cache build-all --config sources.yaml --only wikitext --only roam
        packed-sft cache build-all --config sources.yaml --set sources.fineweb_edu.max_train_tokens=1_000_000
    """
)
@click.option("--config", metavar="YAML", type=click.Path(), required=True, help="lists the sources (docs/caches.md)")
@click.option(
    "--cache-dir",
    metavar="FOLDER",
    type=click.Path(),
    default="cache",
    show_default=True,
    help="gets tokenizer/, pretrain/NAME/ and sft/NAME/",
)
@click.option(
    "--tokenizer", metavar="PATH", type=click.Path(), help="a SentencePiece .model file or a tokenizer folder"
)
@click.option("--seed", type=int, metavar="N", help="of splits and shuffles (42)")
@click.option("--shard-bytes", type=int, metavar="N", help="the size of every pretrain shard but the last (134217728)")
@click.option("--shuffle-buffer", type=int, metavar="N", help="documents that the shuffle holds, 0 for none (10000)")
@click.option("--val-frac", type=float, metavar="SHARE", help="of documents or examples that go to val (0.1)")
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="any key of the YAML, by its dotted name")
@click.option("--only", metavar="NAME", multiple=True, help="build this source and no other; may be repeated")
@click.option("--overwrite", is_flag=True, help="replace caches that were made from other things")
@quiet_option
@click.pass_context
def build_all(
    context: click.Context,
    /,
    config: str,
    cache_dir: str,
    settings: tuple[str, ...],
    only: tuple[str, ...],
    overwrite: bool,
    quiet: bool,
    as_json: bool,
    **constants: Any,
) -> int:
    """Tokenize every source of a YAML once, into flat files of ids that training samples from. Options win over the
    YAML. A source that cannot be read is recorded as not built and the others are built; the exit code is then 1. A
    cache that is complete and made from the same things is kept.
    """
    from megatron_packed_sft.caches.build_sources import build_all as build_caches
    from megatron_packed_sft.caches.config import read_config
    from megatron_packed_sft.support.progress import Progress
    from megatron_packed_sft.support.terminal import show, show_json, table

    given = [(name, value) for name, value in constants.items() if value is not None]
    loaded = read_config(config, [*given, *settings])
    with Progress("tokenize", total=None, unit="token", quiet=quiet) as progress:

        def on_tokens(source: str, count: int) -> None:
            progress.update(count, source=source)

        results = build_caches(loaded, cache_dir, only=only, overwrite=overwrite, on_tokens=on_tokens)
    if as_json or (context.parent is not None and context.parent.params.get("as_json")):
        show_json({"cache_dir": cache_dir, "sources": [result._asdict() for result in results]})
    else:
        if not quiet:
            rows = [[one.name, one.kind, one.status, *(one.totals.values() or ("", ""))] for one in results]
            show(table(["source", "kind", "status", "train", "val"], rows, left=3))
        for one in results:
            if one.failed:
                print(f"{one.name} was not built: {one.reason}")
    return 1 if any(result.failed for result in results) else 0


class _CacheVerbs(Helpful, click.Group):
    """What can be done with caches."""

    examples = f"""
        {build_all.examples.strip().splitlines()[0]}
        packed-sft cache status
        packed-sft cache prefetch s3://bucket/my_dataset
        packed-sft cache clear s3://bucket/my_dataset
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        Helpful.format_options(self, ctx, formatter)


def _no_command(context: click.Context, as_json: bool) -> None:
    if context.invoked_subcommand is None:
        raise InvalidInputError(
            f"no command was given; write packed-sft cache {' or '.join(_COMMANDS)}, or see packed-sft cache --help"
        )


_COMMANDS: dict[str, click.Command] = {"build-all": build_all, "status": status, "prefetch": prefetch, "clear": clear}
command = _CacheVerbs(
    "cache",
    callback=click.pass_context(_no_command),
    invoke_without_command=True,
    help="Token caches: texts and chats tokenized once, into flat files of ids. And the node's cache: shards that were "
    "fetched from object stores.",
    context_settings={"max_content_width": WIDTH},
    params=[json_option(), debug_option()],
    commands=_COMMANDS,
)
status.short_help = "what the node's cache of shards holds"
prefetch.short_help = "fetch a dataset into the node's cache"
clear.short_help = "remove shards from the node's cache"
build_all.short_help = "build the caches of all sources of a YAML"
