"""`packed-sft prepare`: chat files to packed shards. Its keys, options and --help are the application's own."""

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
    """Refuse now what is in the way of the page, and return what writes it once the dataset is published."""
    from megatron_packed_sft.inspect.report.write import page_beside, refuse_other_file, write_report

    places = pipeline.places
    target = page_beside(places.target)
    refuse_other_file(target)
    return lambda: write_report(places.target, target, work_dir=places.work_dir).path


def _complete(words: Sequence[str], incomplete: str) -> list[str]:
    from megatron_packed_sft.prepare.app import complete

    return complete(words, incomplete)


command = ApplicationVerb("prepare", run=_run, complete=_complete)
