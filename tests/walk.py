"""The walk of CONTRIBUTING.md, run: chats are prepared and trained on under a trace, as `packed-sft` does it.

`python -m tests.walk FOLDER` prints, as JSON, every function of the package that was called, in the order of its first
call. Kernels are compiled, so no trace sees them; those that were compiled or loaded are listed behind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import megatron_packed_sft
from tests.call_trace import Trace
from tests.encode.tiny_tokenizers import byte_level_tokenizer, save_folder

PACKAGE = Path(megatron_packed_sft.__file__).parent


def run(folder: Path) -> list[str]:
    """Prepare chats with a Hugging Face tokenizer, and train two steps on them."""
    from megatron_packed_sft.prepare.app import main as prepare
    from megatron_packed_sft.train.app import main as train

    (folder / "chats.jsonl").write_text("".join(f"{json.dumps({'messages': chat})}\n" for chat in chats()))
    save_folder(byte_level_tokenizer(added=["<|im_start|>", "<|im_end|>"]), folder / "tokenizer", {})
    words = [f"input={folder}/chats.jsonl", f"tokenizer.path={folder}/tokenizer", "template=chatml"]
    with Trace(PACKAGE) as trace:
        assert prepare([*words, f"output={folder}/data", "packing.pack_size=512", "executor.num_workers=1"]) == 0
        assert train([f"data.path={folder}/data", f"output={folder}/run", "train.steps=2", "logger=none"]) == 0
    return [*trace.calls, *called_kernels()]


def chats() -> Iterator[list[dict[str, str]]]:
    """Chats of few shapes, so that all ways of marking them are taken: traced, learnt, compiled."""
    for number in range(60):
        question = {"role": "user", "content": f"How much is {number} and {number}?"}
        answer = {"role": "assistant", "content": f"It is {2 * number}."}
        yield [question, answer] * (1 + number % 3)


def called_kernels() -> list[str]:
    """Name the kernels that have code by now, which is made or loaded when they are first called."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith("megatron_packed_sft.")}
    return [
        f"{module.__name__.partition('.')[2].replace('.', '/')}.py::{name}"
        for module in modules.values()
        for name, value in vars(module).items()
        if getattr(value, "nopython_signatures", None) and value.py_func.__module__ == module.__name__
    ]


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
