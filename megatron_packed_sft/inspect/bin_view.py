"""What a preview of packed data shows, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.inspect.bin_preview import BinPreview, PackedPreviewer
from megatron_packed_sft.inspect.painting import LABEL, Painter
from megatron_packed_sft.inspect.record_view import tokens_json, tokens_table
from megatron_packed_sft.inspect.visible_text import visible
from megatron_packed_sft.support.paths import redacted
from megatron_packed_sft.support.wording import plural

if TYPE_CHECKING:
    from rich.console import RenderableType


def bin_view(
    preview: BinPreview, previewer: PackedPreviewer, painter: Painter, *, ids: bool = False
) -> Iterator[RenderableType]:
    """Yield what to show of a bin or a sequence.

    Args:
        preview: the bin.
        previewer: what opened it.
        painter: for its text.
        ids: show every token on a line of its own, with its id.
    """
    from rich.text import Text

    yield Text.assemble((f"{visible(preview.where, breaks=False)}, {preview.what}", "bold"), f"  {_summary(preview)}")
    tokenizer = previewer.found.tokenizer
    found = f"tokenizer {tokenizer.name}" if tokenizer else previewer.found.note
    yield Text(visible(found, breaks=False), style="dim")
    for note in preview.notes:
        yield Text(note, style="dim")
    start = 0
    for number, tokens in enumerate(preview.sequences):
        trained = sum(token.is_trained for token in tokens)
        words = f"sequence {number}: tokens {start}-{start + len(tokens) - 1}, {trained:,} trained"
        origin = preview.origins[number] if number < len(preview.origins) else None
        yield Text("")
        if not previewer.is_store:
            yield Text.assemble((words, LABEL), f", from {visible(origin, breaks=False)}" if origin else "")
        yield tokens_table(tokens, painter) if ids else painter.text(tokens)
        start += len(tokens)
    if not ids:
        yield Text("")
        yield painter.legend()


def bin_json(preview: BinPreview, previewer: PackedPreviewer) -> dict[str, Any]:
    """Return a preview as plain values."""
    tokenizer = previewer.found.tokenizer
    return {
        "path": str(previewer.path) if previewer.url is None else redacted(previewer.url),
        "where": preview.where,
        "sequence" if previewer.is_store else "bin": preview.number,
        "of": previewer.num_entries,
        "num_tokens": preview.num_tokens,
        "num_trained": preview.num_trained,
        "pack_size": preview.pack_size,
        "tokenizer": None if tokenizer is None else {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        "notes": [*preview.notes, *([previewer.found.note] if previewer.found.note else [])],
        "sequences": [
            {
                "origin": preview.origins[number] if number < len(preview.origins) else None,
                "tokens": tokens_json(tokens),
            }
            for number, tokens in enumerate(preview.sequences)
        ],
    }


def _summary(preview: BinPreview) -> str:
    share = preview.num_trained / max(1, preview.num_tokens)
    words = f"{plural(preview.num_tokens, 'token')}, {preview.num_trained:,} trained ({share:.1%})"
    if preview.pack_size is not None:
        full = preview.num_tokens / preview.pack_size
        words += f", {plural(len(preview.sequences), 'sequence')}, {full:.1%} of {preview.pack_size:,} full"
    return words
