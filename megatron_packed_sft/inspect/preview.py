"""`packed-sft preview`: preview records or packed data on a terminal, in a pipe or as JSON."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect.settings import PreviewRequest, prepare_settings, split_words
from megatron_packed_sft.support.terminal import show, show_json, shows_colours

if TYPE_CHECKING:
    from rich.console import RenderableType

    from megatron_packed_sft.inspect.chosen_records import ChosenRecord
    from megatron_packed_sft.inspect.preview_bins import BinPreview, PackedPreviewer
    from megatron_packed_sft.prepare.config import PrepareConfig

_DEFAULT_SEED = 1234  # the default of datasets and of the training recipe
_OF_RECORDS = ("row", "config_name", "config_dir")
_OF_PACKED = ("bin_number", "sample", "sequence", "split", "plan", "work_dir", "seq_length", "pack_sequences", "eos_id")


def preview(request: PreviewRequest) -> int:
    """Print the requested previews, and return the exit code."""
    path, settings = split_words(request.words)
    options = {"--config-name": request.config_name, "--config-dir": request.config_dir}
    settings += [f"{option}={value}" for option, value in options.items() if value is not None]
    if path is None and not settings:
        raise InvalidInputError("name a file of chats or packed data; see packed-sft preview --help")
    if path is not None:
        from megatron_packed_sft.inspect.preview_bins import is_packed, refuse_unusable

        refuse_unusable(path)
        if is_packed(path):
            return _preview_packed(path, settings, request)
    return _preview_records(path, settings, request)


def _preview_records(path: str | None, settings: Sequence[str], request: PreviewRequest) -> int:
    _refuse_options(request, _OF_PACKED, "packed data", f"{path or 'the input'} is not packed")
    config = prepare_settings(settings, tokenizer=request.tokenizer)
    chosen, note = _chosen_records(path, config, request)
    from megatron_packed_sft.inspect.painting import Painter
    from megatron_packed_sft.inspect.preview_record_view import record_json, record_view
    from megatron_packed_sft.inspect.preview_records import RecordPreviewer

    previewer = RecordPreviewer(config)
    with _each_warning_once():
        previews = [previewer.preview(one) for one in chosen]
    if request.as_json:
        return _print_json([record_json(one, previewer) for one in previews], request)
    painter = Painter(previewer.tokenizer.control_tokens, in_colour=shows_colours())
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 16
    return _print((record_view(one, previewer, painter, width=width, ids=request.ids) for one in previews), note)


def _chosen_records(path: str | None, config: PrepareConfig, request: PreviewRequest) -> tuple[list[ChosenRecord], str]:
    from megatron_packed_sft.inspect.chosen_records import draw_records, files_of, first_record, record_numbered
    from megatron_packed_sft.prepare.config import INPUT, configured_sources

    has_sources = bool(set(config.sources) - {INPUT})
    if path is not None and not has_sources:
        config = replace(config, input=path)
    files = files_of(configured_sources(config), path if has_sources else None)
    if request.row is not None and request.count is not None:
        raise InvalidInputError("--row and --random exclude each other; leave one out")
    if request.count is not None:
        drawn = draw_records(files, request.count, request.seed)
        return drawn.records, drawn.note
    if request.seed is not None:
        raise InvalidInputError("--seed needs --random; leave it out, or add --random")
    return [first_record(files) if request.row is None else record_numbered(files, request.row)], ""


def _preview_packed(path: str, settings: Sequence[str], request: PreviewRequest) -> int:
    _refuse_options(request, _OF_RECORDS, "chats", f"{path} is packed data")
    tokenizer = request.tokenizer
    for setting in settings:
        key, _, value = setting.partition("=")
        if key != "tokenizer.path":
            raise InvalidInputError(
                f"{setting} is a setting for chats, but {path} is packed data; leave it out (only tokenizer.path, the "
                "tokenizer that made the data, is accepted)"
            )
        tokenizer = tokenizer or value
    from megatron_packed_sft.inspect.painting import Painter
    from megatron_packed_sft.inspect.preview_bins import PackedPreviewer, bin_json, bin_view

    previewer = PackedPreviewer(path, request, tokenizer)
    previews = _requested_bins(previewer, request)
    if request.as_json:
        return _print_json([bin_json(one, previewer) for one in previews], request)
    found = previewer.found.tokenizer
    tokens = [] if found is None else found.control_tokens
    return _print(
        bin_view(one, previewer, Painter(tokens, in_colour=shows_colours(), pad_id=one.pad_id), ids=request.ids)
        for one in previews
    )


def _requested_bins(previewer: PackedPreviewer, request: PreviewRequest) -> Iterator[BinPreview]:
    """Yield the bins or sequences to show; they are read one at a time."""
    options = {
        "--bin": request.bin_number,
        "--sample": request.sample,
        "--sequence": request.sequence,
        "--random": request.count,
    }
    given = [option for option, value in options.items() if value is not None]
    if len(given) > 1:
        raise InvalidInputError(f"{given[0]} and {given[1]} exclude each other; leave one out")
    if request.seed is not None and given not in (["--random"], ["--sample"]):
        raise InvalidInputError("--seed needs --random or --sample; leave it out, or add one of them")
    if request.count is not None:
        yield from (previewer.entry(number) for number in previewer.draw(request.count, request.seed))
    elif request.sample is not None:
        yield previewer.sample(request.sample, _DEFAULT_SEED if request.seed is None else request.seed)
    elif request.sequence is not None:
        yield previewer.sequence(request.sequence)
    elif request.bin_number is not None:
        yield previewer.bin(request.bin_number)
    else:
        yield previewer.entry(0)


@contextlib.contextmanager
def _each_warning_once() -> Iterator[None]:
    """Log every warning about the template once, although a preview renders with several encoders."""
    logged: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        sentence = record.getMessage()
        return not (sentence in logged or logged.add(sentence))  # type: ignore[func-returns-value]

    from megatron_packed_sft.encode.masks.rendering_marker import RenderingMarker

    logger = logging.getLogger(RenderingMarker.__module__)
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def _refuse_options(request: PreviewRequest, names: Sequence[str], kind: str, reason: str) -> None:
    """Raise an error if an option was given that is for the other kind of input."""
    for name in names:
        if getattr(request, name) is not None:
            option = "--bin" if name == "bin_number" else f"--{name.replace('_', '-')}"
            raise InvalidInputError(f"{option} is for {kind}, but {reason}; leave it out")


def _print(views: Iterable[Iterable[RenderableType]], note: str = "") -> int:
    from rich.text import Text

    for number, view in enumerate(views):
        show(*([Text("")] if number else []), *view)
    if note:
        show(Text(note, style="dim"))
    return 0


def _print_json(documents: list[dict[str, Any]], request: PreviewRequest) -> int:
    """Print one document, or a list of them if several were requested."""
    show_json(documents if request.count is not None else documents[0])
    return 0
