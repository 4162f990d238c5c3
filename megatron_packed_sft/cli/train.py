"""`packed-sft train`: train on packed data. train/app.py has its keys, options and --help."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_packed_sft.cli._verb import ApplicationVerb


def _run(words: Sequence[str]) -> int:
    from megatron_packed_sft.train.app import main

    return main(words)


def _complete(words: Sequence[str], incomplete: str) -> list[str]:
    from megatron_packed_sft.train.app import complete

    return complete(words, incomplete)


command = ApplicationVerb("train", run=_run, complete=_complete)
