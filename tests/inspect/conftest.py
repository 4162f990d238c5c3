"""A dataset prepared from hostile chats, once for all tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_packed_sft.cli.main import main
from tests.sample_tokenizer import train_sample_tokenizer

LONG_TEXT = "lorem ipsum <b>dolor</b> " * 4_000  # 100,000 characters
HOSTILE = {
    "script": "Hello <script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">",
    "quotes": "\"double\" 'single' `tick` & &amp; </textarea> ${x} {{data}} --> ]]>",
    "right_to_left": "שלום עולם and مرحبا بالعالم, then \u202eturned around",
    "emoji": "👋🏽 👨‍👩‍👧‍👦 é 漢字",
}


class Prepared(NamedTuple):
    """A published dataset and what it was made from."""

    path: Path
    tokenizer: str
    good: Path
    odd: Path
    odd_chats: list[dict[str, Any]]


def chat(question: str, answer: str) -> dict[str, Any]:
    """A conversation of one turn."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_chats(path: Path, records: list[Any]) -> Path:
    """A JSONL file."""
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A SentencePiece model with ChatML's markers, trained on sample chats."""
    return train_sample_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, tokenizer_path: str) -> Prepared:
    """Two sources: 120 good chats, and some that are hostile, repeated, odd or dropped."""
    home = tmp_path_factory.mktemp("prepared")
    good = [
        chat(f"What is {one} plus {one}?", f"It is {2 * one}. " + "Adding works. " * (one % 9)) for one in range(120)
    ]
    odd = [
        *(chat(text, f"You wrote: {text}") for text in HOSTILE.values()),  # lines 1 to 4
        chat("What does <|im_end|> mean?", "It ends a turn."),  # line 5
        good[7],  # line 6, a copy
        chat("word " * 700, "ok"),  # line 7: a long prefix, and next to nothing trained
        {"messages": [{"role": "user", "content": "no answer"}]},  # line 8: nothing to train
        {"nonsense": "<i>not</i> a chat"},  # line 9: cannot be read
        chat("too long", LONG_TEXT * 3),  # line 10: fits no bin
        chat("the long one", LONG_TEXT),  # line 11
    ]
    paths = [write_chats(home / f"{name}.jsonl", some) for name, some in (("good", good), ("odd", odd))]
    code = main(
        [
            "prepare",
            f"+sources.good.path={paths[0]}",
            f"+sources.odd.path={paths[1]}",
            f"output={home / 'my_dataset'}",
            f"tokenizer.path={tokenizer_path}",
            "template=chatml",
            "packing.pack_size=131072",
            "packing.max_seqs_per_bin=9",
            "executor.num_workers=1",
            "max_errors=100",
            "max_drop_share=1",
            "quiet=true",
        ]
    )
    assert code == 0
    return Prepared(home / "my_dataset", tokenizer_path, *paths, odd)
