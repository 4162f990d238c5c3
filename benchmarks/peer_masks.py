"""What the peers train of one tool chat, printed by running them: transformers' mask, TRL's templates, prefix lengths.

python -m benchmarks.peer_masks [qwen2_5 | qwen3]        TRL is used if it is installed
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer
from megatron_packed_sft.records.record import Conversation
from tests.real_data import tokenizer_folder

_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Four."},
]


def ours(folder: str) -> list[str]:
    """What is trained here."""
    marked = RecordEncoder(load_tokenizer(folder)).mark(Conversation(CHAT))
    return [marked.text[start:end] for start, end in marked.trained]


def by_mask(tokenizer: Any, template: str | None) -> list[str]:
    """What transformers' assistant mask covers, with a template or the tokenizer's own."""
    found = tokenizer.apply_chat_template(
        CHAT, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
    return [
        tokenizer.decode([token for token, _ in run]) for is_on, run in groupby(pairs, lambda pair: pair[1]) if is_on
    ]


def by_prefix(tokenizer: Any) -> Iterator[str]:
    """What prefix methods train: they take a turn to be the part of a render that the render of its prefix lacks."""
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    for number, message in enumerate(CHAT):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(CHAT[:number], tokenize=False, add_generation_prompt=True)
            after = tokenizer.apply_chat_template(CHAT[: number + 1], tokenize=False)
            yield whole[len(before) : len(after)]


def main(arguments: Sequence[str]) -> None:
    """Print a table."""
    from transformers import AutoTokenizer

    folder = str(tokenizer_folder(arguments[0] if arguments else "qwen2_5"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found: dict[str, Sequence[str]] = {"here": ours(folder), "prefix lengths": list(by_prefix(tokenizer))}
    found["transformers' mask, own template"] = by_mask(tokenizer, None)
    try:
        from trl.chat_template_utils import get_training_chat_template  # type: ignore[import-not-found, unused-ignore]

        found["TRL's template"] = by_mask(tokenizer, get_training_chat_template(tokenizer))
    except ImportError:
        found["TRL's template"] = ["(TRL is not installed)"]
    except ValueError as error:
        found["TRL's template"] = [f"(refused: {error})"]
    for name, texts in found.items():
        print(f"{name}:", *(map(repr, texts) if texts else ["nothing"]), sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
