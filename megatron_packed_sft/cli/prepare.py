"""`packed-sft prepare`: turn chat files into packed shards. prepare/app.py has its keys, options and --help."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_packed_sft.cli._verb import ApplicationVerb


def _run(words: Sequence[str]) -> int:
    from megatron_packed_sft.prepare.app import main

    return main(words)


def _complete(words: Sequence[str], incomplete: str) -> list[str]:
    from megatron_packed_sft.prepare.app import complete

    return complete(words, incomplete)


command = ApplicationVerb("prepare", run=_run, complete=_complete)
