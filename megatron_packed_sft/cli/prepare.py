"""`packed-sft prepare`: turn chat files into packed shards. prepare/app.py has its keys, options and --help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_packed_sft.cli._verb import ApplicationVerb

if TYPE_CHECKING:
    from megatron_packed_sft.prepare.pipeline import Pipeline


def _run(words: Sequence[str]) -> int:
    from megatron_packed_sft.prepare.app import main

    return main(words, make_page=_page)


def _page(pipeline: Pipeline) -> Callable[[], str]:
    """Return what writes the report of the published dataset; refuse now if it cannot be written."""
    from megatron_packed_sft.inspect.report.write import page_beside, refuse_other_file, write_report

    places = pipeline.places
    target = page_beside(places.target)
    refuse_other_file(target)
    return lambda: write_report(places.target, target, work_dir=places.work_dir).path


def _complete(words: Sequence[str], incomplete: str) -> list[str]:
    from megatron_packed_sft.prepare.app import complete

    return complete(words, incomplete)


command = ApplicationVerb("prepare", run=_run, complete=_complete)
