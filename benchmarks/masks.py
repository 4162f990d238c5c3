"""What marking a chat costs, as a ratio to one plain Jinja render of it, on real chats.

python -m benchmarks.masks [records per file]
"""

from __future__ import annotations

import contextlib
import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.masks.marker import ChatMarker
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.encode.tokenizers.load import load_tokenizer
from megatron_packed_sft.records.record import Conversation
from tests.real_data import DATA, tokenizer_folder

_NUM_BY_RENDERING = 20
_ROUNDS = 3


def _chats(path: Path, num_records: int) -> list[Conversation]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        records: Iterator[dict[str, Any]] = map(json.loads, islice(file, num_records))
        return [Conversation(record["messages"], record.get("tools")) for record in records]


def _seconds(function: Callable[[Conversation], Any], chats: Sequence[Conversation]) -> float:
    """CPU seconds per chat: other processes of a busy machine do not count."""
    start = time.process_time()
    for chat in chats:
        with contextlib.suppress(RecordRefusedError):
            function(chat)
    return (time.process_time() - start) / len(chats)


def _measure(marker: ChatMarker, chats: Sequence[Conversation]) -> tuple[float, float, float, float]:
    """Seconds of one plain render, of the first pass, of later passes (the best), and of marking by rendering alone."""
    first = _seconds(marker.mark, chats)
    later = min(_seconds(marker.mark, chats) for _ in range(_ROUNDS))
    render = min(_seconds(marker.render, chats) for _ in range(_ROUNDS))
    return render, first, later, _seconds(marker.mark_by_rendering, chats[:_NUM_BY_RENDERING])


def main(arguments: Sequence[str]) -> None:
    """Print a line per file."""
    num_records = int(arguments[0]) if arguments else 1000
    tokenizer = load_tokenizer(tokenizer_folder("qwen3"))
    print("| chats | plain render | first pass | known | by rendering alone |")
    print("|---|---|---|---|---|")
    for path in sorted(DATA.glob("*.messages.jsonl*")):
        chats = _chats(path, num_records)
        render, *others = _measure(RecordEncoder(tokenizer).marker(), chats)
        ratios = " | ".join(f"{other / render:.2f} x" for other in others)
        print(f"| {path.name.split('.')[0]} ({len(chats)}) | {render * 1e6:.0f} us | {ratios} |")


if __name__ == "__main__":
    main(sys.argv[1:])
