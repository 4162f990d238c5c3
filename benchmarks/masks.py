"""What marking a chat costs, as a ratio to one plain Jinja render of it, on real chats.

python -m benchmarks.masks [records per file] [template file of llama.cpp's collection ...]
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.templates.environment import BLOCK_BEGINS, BLOCK_ENDS, prepare_environment
from megatron_packed_sft.encode.templates.renderer import Renderer
from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer
from megatron_packed_sft.records.record import Conversation
from tests.encode.template_matrix import encoder_for
from tests.real_data import chat_files, real_chats, templates_folder, tokenizer_folder

_NUM_UNKNOWN = 12
_ROUNDS = 3


def _plain_jinja(encoder: RecordEncoder) -> Callable[[Conversation], str]:
    """A render as transformers does it: Jinja's own environment, nothing kept from one chat to the next."""
    renderer: Renderer = encoder.marker()._renderer
    environment = ImmutableSandboxedEnvironment()
    prepare_environment(environment, renderer.name, renderer.date)
    template = environment.from_string(renderer.source)
    variables = {**renderer.variables, BLOCK_BEGINS: "", BLOCK_ENDS: ""}
    return lambda chat: template.render(messages=chat.messages, tools=chat.tools, **variables)


def _seconds(calls: Iterable[tuple[Callable[[Conversation], Any], Conversation]], num_chats: int) -> float:
    """CPU seconds per chat: other processes of a busy machine do not count."""
    start = time.process_time()
    for function, chat in calls:
        with contextlib.suppress(Exception):  # refused
            function(chat)
    return (time.process_time() - start) / num_chats


def _measure(new_encoder: Callable[[], RecordEncoder], chats: Sequence[Conversation]) -> tuple[float, ...]:
    """Return seconds: Jinja's render, ours, the first pass, later passes (the best), chats of unknown shape."""
    encoder = new_encoder()
    marker, plain = encoder.marker(), _plain_jinja(encoder)
    first = _seconds(((marker.mark, chat) for chat in chats), len(chats))
    later, jinja, own = (
        min(_seconds(((function, chat) for chat in chats), len(chats)) for _ in range(_ROUNDS))
        for function in (marker.mark, plain, marker.render)
    )
    some = chats[:: max(1, len(chats) // _NUM_UNKNOWN)]
    markers = [new_encoder().marker() for _ in some]
    unknown = _seconds(((marker.mark, chat) for marker, chat in zip(markers, some, strict=True)), len(some))
    unknown /= _seconds(((plain, chat) for chat in some), len(some)) / jinja  # as if they were of average length
    return jinja, own, first, later, unknown


def main(arguments: Sequence[str]) -> None:
    """Print a line per file."""
    num_records = int(arguments[0]) if arguments else 1000
    tokenizer = load_tokenizer(tokenizer_folder("qwen3"))
    encoders: dict[str, Callable[[], RecordEncoder]] = {"Qwen3": lambda: RecordEncoder(tokenizer)}
    for name in arguments[1:]:
        path: Path = templates_folder() / f"{name.removesuffix('.jinja')}.jinja"
        encoders[path.stem] = lambda path=path: encoder_for(path, on_lost="warn")  # type: ignore[misc]
    for name, new_encoder in encoders.items():
        print(f"\n| {name} | Jinja's render | ours | first pass | known | nothing known |")
        print("|---|---|---|---|---|---|")
        for path in chat_files():
            chats = list(islice(real_chats(path), num_records))
            jinja, *others = _measure(new_encoder, chats)
            ratios = " | ".join(f"{other / jinja:.2f} x" for other in others)
            print(f"| {path.name.split('.')[0]} ({len(chats)}) | {jinja * 1e6:.0f} us | {ratios} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
