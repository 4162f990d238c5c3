"""Generated sample chats: seeded, with answers that follow from their questions, in every common schema.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import orjson

from megatron_packed_sft.errors import InvalidInputError, StorageIOError
from megatron_packed_sft.records.record import Conversation
from megatron_packed_sft.support.paths import local_path

_SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer clearly and show your steps.", "You are a patient tutor.")
_NAMES, _GOODS, _WORDS, _CITIES = (
    text.split()
    for text in (
        "Ada Ben Carla Dario Elif Farid Greta Hugo Ines Jonas Kemal Lena Mila Nora Omar Petra Rosa Samir Tara",
        "apple notebook candle postcard lemon pencil ticket mug lamp basket ribbon kettle jacket ladder stamp",
        "river garden window copper lantern violin pepper meadow anchor cloud desert engine feather island",
        "Lisbon Oslo Vienna Krakow Dublin Athens Toronto Nairobi Lima Hanoi Perth Seville Tallinn",
    )
)
_SKIES, _DAYS = ("sunny", "cloudy", "rainy", "windy"), ("today", "tomorrow", "on Friday", "on Sunday")
_FACTS = {
    "a thermometer": "shows how warm something is: a liquid takes up more room when warm and climbs in a tube",
    "a tide": "is the slow rise and fall of the sea: the moon pulls on the water, and the sun does so too, but less",
    "a compass": "has a magnetic needle that turns towards the north, and needs no battery",
    "a rainbow": "appears when sunlight meets falling drops, which bend red light least and violet light most",
    "a lever": "is a stiff bar that turns about a fixed point, so that a small force far out moves a heavy weight",
    "an echo": "is a sound that comes back from a wall; through air, sound travels about 340 metres in a second",
    "a vaccine": "shows the body a harmless part of a germ, so that it answers faster when it meets the real one",
    "a catalogue": "tells which books a library has and on which shelf they stand, by author, title and subject",
}
_STEPS = (
    "wash the vegetables", "sort the letters", "water the plants", "sweep the floor", "call the dentist",
    "buy bread and milk", "repair the bicycle", "read one chapter", "write to grandmother", "pack the suitcase",
    "charge the battery", "return the books", "check the tyres", "feed the cat", "open the windows",
)  # fmt: skip


_OPENINGS = ("", "", "Hi! ", "Please help me. ", "Quick question. ", "Why? Because I have to know. ", "Yes or no? ")


class _Exchange(NamedTuple):
    opening: str
    question: str
    answer: str
    reasoning: str


def sample_conversations(num_records: int, seed: int = 0) -> Iterator[Conversation]:
    """Yield chats of all kinds, mixed; record k is the same for every larger `num_records`.

    Example:
        >>> [chat] = sample_conversations(1, seed=3)
        >>> [message["role"] for message in chat.messages][-1]
        'assistant'
    """
    for random in _randoms(num_records, seed, "mixed"):
        yield random.choices((_chat, _reasoned_chat, _tool_chat), (70, 15, 15))[0](random)


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
        ("tools.jsonl", 2 * tenth, _tool_chat, _as_messages),
        ("sharegpt.json", tenth, lambda random: (_tool_chat if random.random() < 0.3 else _chat)(random), _as_sharegpt),
        ("alpaca.jsonl", tenth, lambda random: Conversation(_messages([_exchange(random)])), _as_alpaca),
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, count, make, shape in shapes:
            records = [shape(make(random)) for random in _randoms(count, seed, name)]
            data = b"".join(orjson.dumps(record) + b"\n" for record in records)
            if name.endswith(".json"):
                data = orjson.dumps(records, option=orjson.OPT_INDENT_2)
            (folder / name).write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    except OSError as error:
        raise StorageIOError(f"cannot write sample chats into {folder}: {error.strerror}; choose another") from error
    return [folder / name for name, *_ in shapes]


def _randoms(num_records: int, seed: int, kind: str) -> Iterator[Random]:
    """Yield one random generator per record, so that records do not depend on each other."""
    return (Random(f"{seed}/{kind}/{number}") for number in range(num_records))


# ---- questions and answers


def _exchange(random: Random) -> _Exchange:
    make = random.choices((_sum, _sharing, _ordering, _explaining, _planning), (4, 3, 2, 3, 3))[0]
    return _Exchange(random.choice(_OPENINGS), *make(random))


def _sum(random: Random) -> tuple[str, str, str]:
    number, price, goods = random.randint(2, 60), random.randint(2, 90), random.choice(_GOODS)
    question = f"{random.choice(_NAMES)} buys {number} {goods}s at {price} cents each. How much is that?"
    reasoning = f"Multiply the number by the price: {number} * {price} = {number * price}."
    return question, f"The {goods}s cost {number} x {price} = {number * price} cents.", reasoning


def _sharing(random: Random) -> tuple[str, str, str]:
    number, people, goods = random.randint(20, 400), random.randint(2, 12), random.choice(_GOODS)
    each, left = divmod(number, people)
    question = f"If {number} {goods}s are shared equally among {people} people, how many does each one get?"
    answer = f"Each person gets {each} of them, because {people} x {each} = {people * each}, and {left} are left over."
    return question, answer, f"{number} divided by {people} is {each}, remainder {left}."


def _ordering(random: Random) -> tuple[str, str, str]:
    words = random.sample(_WORDS, random.randint(4, 9))
    how, result = random.choice((("in alphabetical order", sorted(words)), ("in reverse order", words[::-1])))
    return f"Write these words {how}: {', '.join(words)}.", ", ".join(result), f"{result[0]} comes first."


def _explaining(random: Random) -> tuple[str, str, str]:
    """Return a comparison of things, of two or of many."""
    things = random.sample(sorted(_FACTS), random.choice((2, 3, 3, 4, 8)))
    question = f"{random.choice(_NAMES)} asks: what do I have to know about {' and '.join(things)}?"
    answer = "\n\n".join(f"{thing.capitalize()} {_FACTS[thing]}." for thing in things)
    return question, answer, f"There are {len(things)} things to explain, beginning with {things[0]}."


def _planning(random: Random) -> tuple[str, str, str]:
    """Return a timetable: usually of some hours, sometimes of many days."""
    name, num_days = random.choice(_NAMES), random.choices((1, 3, 9), (6, 3, 1))[0]
    lines, minutes = [], 0
    for day in range(num_days):
        lines.append(f"Day {day + 1}")
        minutes = random.randrange(7 * 60, 10 * 60, 15)
        for step in random.sample(_STEPS, random.randint(5, 8)):
            lines.append(f"{minutes // 60:02d}:{minutes % 60:02d} {step}.")
            minutes += random.randrange(15, 60, 15)
    question = f"Please make a plan for {name}, for {num_days} day{'s' if num_days > 1 else ''}."
    return question, "\n".join(lines), f"The last day ends at {minutes // 60:02d}:{minutes % 60:02d}."


def _messages(exchanges: list[_Exchange], *, reasoned: bool = False) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for opening, question, answer, reasoning in exchanges:
        thought = {"reasoning_content": reasoning} if reasoned else {}
        messages += [
            {"role": "user", "content": opening + question},
            {"role": "assistant", "content": answer, **thought},
        ]
    return messages


def _chat(random: Random, *, reasoned: bool = False) -> Conversation:
    num_turns = random.choices((1, 2, 3, 4, 6), (55, 20, 12, 8, 5))[0]
    messages = _messages([_exchange(random) for _ in range(num_turns)], reasoned=reasoned)
    if random.random() < 0.4:
        messages.insert(0, {"role": "system", "content": random.choice(_SYSTEM_PROMPTS)})
    return Conversation(messages)


def _reasoned_chat(random: Random) -> Conversation:
    return _chat(random, reasoned=True)


# ---- tools


def _tool(name: str, description: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_TOOLS = [
    _tool("get_weather", "Weather forecast for a city and a day.", "city", "day"),
    _tool("calculate", "The value of an arithmetic expression.", "expression"),
]


def _tool_chat(random: Random) -> Conversation:
    """Return a chat of one to four questions, each answered with one or two calls."""
    messages: list[dict[str, Any]] = []
    if random.random() < 0.5:
        messages.append({"role": "system", "content": "You help with the weather and with sums."})
    num_calls = 0
    for _ in range(random.choice((1, 1, 2, 3, 4))):
        scene = _weather if random.random() < 0.6 else _calculation
        question, calls, answer = scene(random)
        made, results = [], []
        for name, arguments, result in calls:
            num_calls += 1
            function = {"name": name, "arguments": arguments}
            made.append({"id": f"call_{num_calls}", "type": "function", "function": function})
            content = json.dumps(result)
            results.append({"role": "tool", "tool_call_id": f"call_{num_calls}", "name": name, "content": content})
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": "", "tool_calls": made}]
        messages += [*results, {"role": "assistant", "content": answer}]
    return Conversation(messages, _TOOLS)


_Scene = tuple[str, list[tuple[str, dict[str, str], dict[str, Any]]], str]


def _weather(random: Random) -> _Scene:
    day, cities = random.choice(_DAYS), random.sample(_CITIES, random.choice((1, 2)))
    found = [{"sky": random.choice(_SKIES), "temperature": random.randint(-8, 36)} for _ in cities]
    calls = [
        ("get_weather", {"city": city, "day": day}, forecast) for city, forecast in zip(cities, found, strict=True)
    ]
    told = [f"in {one['city']} it will be {sky['sky']}, with {sky['temperature']} degrees" for _, one, sky in calls]
    return (
        f"What will the weather be like {day} in {' and in '.join(cities)}?",
        calls,
        f"{'; '.join(told)}.".capitalize(),
    )


def _calculation(random: Random) -> _Scene:
    first, second, third = random.randint(100, 9999), random.randint(2, 99), random.randint(1, 999)
    expression, result = f"{first} * {second} + {third}", first * second + third
    question = f"How much is {first} times {second}, plus {third}?"
    return question, [("calculate", {"expression": expression}, {"result": result})], f"{expression} = {result}"


# ---- schemas


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
