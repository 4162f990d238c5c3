"""Generated sample chats: seeded, natural enough to learn from, and in every common schema.

| file | schema |
|---|---|
| `chats.jsonl` | `messages`, one or several turns, with and without a system prompt |
| `reasoning.jsonl.gz` | `messages` with `reasoning_content` |
| `tools.jsonl` | `messages` with `tools`, `tool_calls` and results |
| `sharegpt.json` | one JSON array of `conversations`, some with function calls |
| `alpaca.jsonl` | `instruction`, `input`, `output` |
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import orjson

from megatron_packed_sft.errors import InvalidInputError, StorageIOError
from megatron_packed_sft.records.record import Conversation
from megatron_packed_sft.records.samples._arithmetic import ARITHMETIC
from megatron_packed_sft.records.samples._exchange import Exchange
from megatron_packed_sft.records.samples._explaining import EXPLAINING, lecture
from megatron_packed_sft.records.samples._planning import LONG_PLANS, PLANNING
from megatron_packed_sft.records.samples._tool_chats import tool_chat
from megatron_packed_sft.support.paths import local_path

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer clearly and show your steps.",
    "You are a patient tutor. Use simple words, and check your sums.",
    "You work at the help desk of a library. Be polite, be exact, and say so when you do not know.",
)
_SHORT = (*ARITHMETIC, *PLANNING, *EXPLAINING)
_LONG = (*LONG_PLANS, lecture)


def sample_conversations(num_records: int, seed: int = 0) -> Iterator[Conversation]:
    """Yield chats of all kinds, mixed; record k is the same for every larger `num_records`.

    Example:
        >>> [chat] = sample_conversations(1, seed=3)
        >>> [message["role"] for message in chat.messages][-1]
        'assistant'
    """
    for random in _randoms(num_records, seed, "mixed"):
        yield random.choices((_chat, _reasoned_chat, tool_chat), (70, 15, 15))[0](random)


def write_sample_data(directory: str | os.PathLike[str], *, num_records: int = 2000, seed: int = 0) -> list[Path]:
    """Write sample chats in five files; the same arguments give the same bytes.

    Args:
        directory: created if needed; files of the same names are replaced.
        num_records: total of all files.
        seed: another seed gives other chats.

    Example:
        >>> import tempfile
        >>> [path.name for path in write_sample_data(tempfile.mkdtemp(), num_records=20)]
        ['chats.jsonl', 'reasoning.jsonl.gz', 'tools.jsonl', 'sharegpt.json', 'alpaca.jsonl']
    """
    if num_records < 10:
        raise InvalidInputError(f"num_records is {num_records}; use at least 10, so that no file is empty")
    local_path(directory, "directory")  # refuses a URL
    folder = Path(directory)
    tenth = num_records // 10
    shapes: list[tuple[str, int, Callable[[Random], Conversation], Callable[[Conversation], dict[str, Any]]]] = [
        ("chats.jsonl", num_records - 5 * tenth, _chat, _as_messages),
        ("reasoning.jsonl.gz", tenth, _reasoned_chat, _as_messages),
        ("tools.jsonl", 2 * tenth, tool_chat, _as_messages),
        ("sharegpt.json", tenth, _chat_or_tool_chat, _as_sharegpt),
        ("alpaca.jsonl", tenth, _single_turn, _as_alpaca),
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, num_file_records, make, shape in shapes:
            records = (shape(make(random)) for random in _randoms(num_file_records, seed, name))
            (folder / name).write_bytes(_file_content(name, records))
    except OSError as error:
        raise StorageIOError(
            f"cannot write sample chats into {folder}: {error.strerror}; choose another directory"
        ) from error
    return [folder / name for name, *_ in shapes]


def _file_content(name: str, records: Iterable[dict[str, Any]]) -> bytes:
    if name.endswith(".json"):
        return orjson.dumps(list(records), option=orjson.OPT_INDENT_2)
    data = b"".join(orjson.dumps(record) + b"\n" for record in records)
    return gzip.compress(data, mtime=0) if name.endswith(".gz") else data


def _randoms(num_records: int, seed: int, kind: str) -> Iterator[Random]:
    """Yield one random generator per record, so that records do not depend on each other."""
    return (Random(f"{seed}/{kind}/{number}") for number in range(num_records))


def _exchange(random: Random) -> Exchange:
    return random.choice(_LONG if random.random() < 0.12 else _SHORT)(random)


def _messages(exchanges: list[Exchange], *, reasoned: bool = False) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.question})
        thought = {"reasoning_content": exchange.reasoning} if reasoned else {}
        messages.append({"role": "assistant", "content": exchange.answer, **thought})
    return messages


def _chat(random: Random, *, reasoned: bool = False) -> Conversation:
    num_turns = random.choices((1, 2, 3, 4, 6), (55, 20, 12, 8, 5))[0]
    messages = _messages([_exchange(random) for _ in range(num_turns)], reasoned=reasoned)
    if random.random() < 0.4:
        messages.insert(0, {"role": "system", "content": random.choice(_SYSTEM_PROMPTS)})
    return Conversation(messages)


def _reasoned_chat(random: Random) -> Conversation:
    return _chat(random, reasoned=True)


def _chat_or_tool_chat(random: Random) -> Conversation:
    return tool_chat(random) if random.random() < 0.3 else _chat(random)


def _single_turn(random: Random) -> Conversation:
    return Conversation(_messages([_exchange(random)]))


def _as_messages(chat: Conversation) -> dict[str, Any]:
    return {"messages": chat.messages, **({"tools": chat.tools} if chat.tools else {})}


def _as_sharegpt(chat: Conversation) -> dict[str, Any]:
    turns, record = [], {}
    for message in chat.messages:
        if "tool_calls" in message:
            calls = [call["function"] for call in message["tool_calls"]]
            turns.append({"from": "function_call", "value": json.dumps(calls[0] if len(calls) == 1 else calls)})
        elif message["role"] == "system":
            record["system"] = message["content"]
        else:
            speaker = {"user": "human", "assistant": "gpt", "tool": "observation"}[message["role"]]
            turns.append({"from": speaker, "value": message["content"]})
    tools = {"tools": json.dumps([tool["function"] for tool in chat.tools])} if chat.tools else {}
    return {"conversations": turns, **record, **tools}


def _as_alpaca(chat: Conversation) -> dict[str, Any]:
    question, answer = chat.messages[0]["content"], chat.messages[1]["content"]
    instruction, colon, rest = question.partition(": ")
    if colon and rest:
        return {"instruction": f"{instruction}:", "input": rest, "output": answer}
    return {"instruction": question, "input": "", "output": answer}
