"""`packed-sft prepare`: chat files to packed shards. Its keys, options and --help are the application's own."""

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
