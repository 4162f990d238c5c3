"""`packed-sft cache`: the node's cache of shards that were fetched from URLs."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import click

from megatron_packed_sft.cli._verb import WIDTH, Helpful, argument, debug_option, json_option, quiet_option, verb
from megatron_packed_sft.errors import InvalidInputError

if TYPE_CHECKING:
    from megatron_packed_sft.remote.cache_eviction import Entry

_directory = click.option("--cache-dir", type=click.Path(), metavar="FOLDER", help="the cache (default: the user's)")


@verb(examples="packed-sft cache status\npacked-sft cache status --cache-dir /scratch/packed-sft --json")
@_directory
def status(cache_dir: str | None, as_json: bool) -> int:
    """Show which datasets the node's cache holds shards of, how large they are, and what is in use now."""
    from megatron_packed_sft.remote.node_cache import node_cache
    from megatron_packed_sft.support.terminal import show, show_json, table
    from megatron_packed_sft.support.wording import byte_count

    cache = node_cache(cache_dir)
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in cache.entries():
        groups[entry.group].append(entry)
    rows: list[dict[str, Any]] = [
        {
            "dataset": url,
            "num_shards": len(entries),
            "num_bytes": sum(entry.num_bytes for entry in entries),
            "num_in_use": sum(entry.in_use for entry in entries),
            "used": max(entry.used for entry in entries),
        }
        for url, entries in sorted(groups.items())
    ]
    total = sum(row["num_bytes"] for row in rows)
    if as_json:
        show_json({"cache_dir": str(cache.directory), "num_bytes": total, "size": cache.size, "datasets": rows})
        return 0
    if rows:
        cells = [
            [
                row["dataset"],
                row["num_shards"],
                byte_count(row["num_bytes"]),
                row["num_in_use"],
                time.strftime("%Y-%m-%d %H:%M", time.localtime(row["used"])),
            ]
            for row in rows
        ]
        show(table(["dataset", "shards", "bytes", "in use", "last use"], cells, left=1))
    print(f"{cache.directory}: {byte_count(total)} of {byte_count(cache.size)}")
    return 0


@verb(examples="packed-sft cache clear\npacked-sft cache clear s3://bucket/my_dataset")
@argument("url", required=False, type=str, help="the dataset whose shards are removed (default: all)")
@_directory
@quiet_option
def clear(url: str | None, cache_dir: str | None, quiet: bool, as_json: bool) -> int:
    """Remove shards from the node's cache; those that are in use stay."""
    from megatron_packed_sft.remote.node_cache import node_cache
    from megatron_packed_sft.support.paths import redacted
    from megatron_packed_sft.support.terminal import show_json
    from megatron_packed_sft.support.wording import byte_count, plural

    cache = node_cache(cache_dir)
    wanted = None if url is None else redacted(url.rstrip("/"))
    entries = [entry for entry in cache.entries() if wanted is None or entry.group.rstrip("/") == wanted]
    gone = [entry for entry in entries if cache.evict(entry.key)]
    cache.remove_leftovers()
    num_bytes, num_kept = sum(entry.num_bytes for entry in gone), len(entries) - len(gone)
    if as_json:
        show_json({"num_removed": len(gone), "num_bytes": num_bytes, "num_in_use": num_kept})
    elif not quiet:
        kept = f"; {plural(num_kept, 'shard')} in use stayed" if num_kept else ""
        print(f"{cache.directory}: {plural(len(gone), 'shard')} removed, {byte_count(num_bytes)}{kept}")
    return 0


@verb(examples="packed-sft cache prefetch s3://bucket/my_dataset --split train --cache-size 200GB")
@argument("url", type=str, help="a dataset in an object store")
@click.option("--split", multiple=True, metavar="NAME", help="fetch this split and no other; may be repeated")
@_directory
@click.option("--cache-size", metavar="SIZE", help="how large the cache may become, such as 200GB")
@quiet_option
def prefetch(
    url: str, split: tuple[str, ...], cache_dir: str | None, cache_size: str | None, quiet: bool, as_json: bool
) -> int:
    """Fetch the shards of a dataset before a run needs them. More than the cache holds is refused."""
    from megatron_packed_sft.remote.node_cache import node_cache
    from megatron_packed_sft.storage.remote_shard import fetch_dataset
    from megatron_packed_sft.support.paths import is_url
    from megatron_packed_sft.support.progress import Progress
    from megatron_packed_sft.support.terminal import show_json
    from megatron_packed_sft.support.wording import byte_count, plural

    if not is_url(url):
        raise InvalidInputError(f"{url} is a local path, which needs no cache; give the URL of a dataset")
    cache = node_cache(cache_dir, cache_size)
    with Progress("fetch", None, "B", quiet=quiet) as bar:
        num_shards, num_bytes = fetch_dataset(url, cache, split, on_total=bar.expect, on_bytes=bar.update)
    if as_json:
        show_json({"num_shards": num_shards, "num_bytes": num_bytes, "cache_dir": str(cache.directory)})
    elif not quiet:
        print(f"{cache.directory}: {plural(num_shards, 'shard')} ({byte_count(num_bytes)}) are in the cache")
    return 0


class _CacheVerbs(Helpful, click.Group):
    """What can be done with the node's cache."""

    examples = """
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


_COMMANDS: dict[str, click.Command] = {"status": status, "prefetch": prefetch, "clear": clear}
command = _CacheVerbs(
    "cache",
    callback=click.pass_context(_no_command),
    invoke_without_command=True,
    help="The node's cache: shards of datasets in object stores, fetched once for all processes of a machine.",
    context_settings={"max_content_width": WIDTH},
    params=[json_option(), debug_option()],
    commands=_COMMANDS,
)
status.short_help = "what the cache holds"
prefetch.short_help = "fetch a dataset into the cache"
clear.short_help = "remove shards from the cache"
