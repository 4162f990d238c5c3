"""Chat templates twice: in Jinja, and in Python that says who wrote each character; the second judges the mask."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tests.encode import chat_templates
from tests.encode.byte_tokenizer import CHATML, LLAMA3, MISTRAL

Chat = Sequence[dict[str, Any]]


class Piece(NamedTuple):
    """Some text, the message it belongs to, and what it is.

    Kinds: `said` by the message, `written` by the template for the model to write, `end` of turn, `given` otherwise.
    """

    text: str
    message: int
    kind: str = "given"


class Twin(NamedTuple):
    """A template, its twin, and the control tokens it is tried with."""

    source: str
    pieces: Callable[[Chat], Iterator[Piece]]
    control_tokens: Sequence[str] = CHATML
    bos: str | None = None
    eos: str | None = None


def _chatml_turns(chat: Chat, change: Callable[[str], str] = str, gap: str = "\n") -> Iterator[Piece]:
    for number, message in enumerate(chat):
        yield Piece(f"<|im_start|>{message['role']}\n", number)
        yield Piece(change(message["content"]), number, "said")
        yield Piece("<|im_end|>", number, "end")
        yield Piece(gap, number)


def _calls(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield function["name"], json.dumps(function["arguments"], ensure_ascii=False)


def _thinking(chat: Chat) -> Iterator[Piece]:
    for number, message in enumerate(chat):
        content, reasoning = message["content"], message.get("reasoning_content", "")
        yield Piece(f"<|im_start|>{message['role']}\n", number)
        if message["role"] == "assistant":
            if "</think>" in content:
                reasoning = content.split("</think>")[0].split("<think>")[-1].strip("\n")
                content = content.split("</think>")[-1].lstrip("\n")
            if number == len(chat) - 1:
                yield from _alternately(number, "<think>\n", reasoning, "\n</think>\n\n")
        yield Piece(content, number, "said")
        for name, arguments in _calls(message):
            yield from _alternately(number, '\n<tool_call>\n{"name": "', name, '", "arguments": ', arguments)
            yield Piece("}\n</tool_call>", number, "written")
        yield Piece("<|im_end|>", number, "end")
        yield Piece("\n", number)


def _alternately(number: int, *texts: str) -> Iterator[Piece]:
    """Written by the template, said, written, said, ..."""
    return (Piece(text, number, ("written", "said")[place % 2]) for place, text in enumerate(texts))


XML_CALLS = (
    "{% macro call_of(function) %}<tool_call><function={{ function.name }}>"
    "{% for key, value in function.arguments.items() %}<parameter={{ key }}>{{ value }}</parameter>{% endfor %}"
    "</function></tool_call>{% endmacro %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call_of(call.function) }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _xml_calls(chat: Chat) -> Iterator[Piece]:
    for number, message in enumerate(chat):
        yield Piece(f"<|im_start|>{message['role']}\n", number)
        yield Piece(message["content"], number, "said")
        for call in message.get("tool_calls", ()):
            yield from _alternately(number, "<tool_call><function=", call["function"]["name"], ">")
            for key, value in call["function"]["arguments"].items():
                yield from _alternately(number, f"<parameter={key}>", str(value), "</parameter>")
            yield Piece("</function></tool_call>", number, "written")
        yield Piece("<|im_end|>", number, "end")
        yield Piece("\n", number)


# The system prompt touches the first question, and a mark could be taken for a part of either.
MERGING = (
    "{% set state = namespace(text='', system='') %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% set state.system = state.system ~ m.content %}{% else %}"
    "{% set state.text = state.text ~ '<|im_start|>' ~ m.role ~ '\n' ~ state.system ~ m.content ~ '<|im_end|>\n' %}"
    "{% set state.system = '' %}{% endif %}{% endfor %}{{ state.text }}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _merging(chat: Chat) -> Iterator[Piece]:
    system = []
    for number, message in enumerate(chat):
        if message["role"] == "system":
            system.append(Piece(message["content"], number, "said"))
            continue
        yield Piece(f"<|im_start|>{message['role']}\n", number)
        yield from system
        system.clear()
        yield Piece(message["content"], number, "said")
        yield Piece("<|im_end|>", number, "end")
        yield Piece("\n", number)


BACKWARDS = (
    "{% for m in messages | reverse %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _backwards(chat: Chat) -> Iterator[Piece]:
    for piece in _chatml_turns(chat[::-1]):
        yield piece._replace(message=len(chat) - 1 - piece.message)


TWICE = chat_templates.CHATML.replace("{{ m.content }}", "{{ m.content + '|' + m.content }}")


def _twice(chat: Chat) -> Iterator[Piece]:
    for piece in _chatml_turns(chat):
        yield piece
        if piece.kind == "said":
            yield Piece("|", piece.message, "written")
            yield piece


def _llama3(chat: Chat) -> Iterator[Piece]:
    yield Piece("<|begin_of_text|>", 0)
    for number, message in enumerate(chat):
        role = "ipython" if message["role"] == "tool" else message["role"]
        yield Piece(f"<|start_header_id|>{role}<|end_header_id|>\n\n", number)
        if reasoning := message.get("reasoning_content"):
            yield from _alternately(number, "<think>\n", reasoning.strip(), "\n</think>\n\n")
        yield Piece(message["content"].strip(), number, "said")
        for place, (name, arguments) in enumerate(_calls(message)):
            gap = "\n" if message["content"] or place else ""
            yield from _alternately(number, gap + '{"name": ', json.dumps(name, ensure_ascii=False), ', "parameters": ')
            yield from (Piece(arguments, number, "said"), Piece("}", number, "written"))
        yield Piece("<|eot_id|>", number, "end")


def _mistral(chat: Chat) -> Iterator[Piece]:
    yield Piece("<s>", 0)
    system: list[Piece] = []
    for number, message in enumerate(chat):
        content = Piece(message["content"], number, "said")
        if message["role"] == "system":
            system += (content, Piece("\n\n", number))
        elif message["role"] == "user":
            yield Piece("[INST]", number)
            yield from system
            system.clear()
            yield from (content, Piece("[/INST]", number))
        elif message["role"] == "tool":
            yield Piece('[TOOL_RESULTS]{"content": ', number)
            yield Piece(json.dumps(message["content"], ensure_ascii=False), number, "said")
            yield Piece(f', "call_id": "{message["tool_call_id"]}"}}[/TOOL_RESULTS]', number)
        else:
            if reasoning := message.get("reasoning_content"):
                yield from _alternately(number, "<think>\n", reasoning, "\n</think>\n\n")
            yield content
            calls = list(_calls(message))
            for place, (name, arguments) in enumerate(calls):
                before = ", " if place else "[TOOL_CALLS]["
                yield from _alternately(number, before + '{"name": ', json.dumps(name, ensure_ascii=False))
                yield from _alternately(number, ', "arguments": ', arguments)
                yield Piece(', "id": "abcdefghi"}' + "]" * (place == len(calls) - 1), number, "written")
            yield Piece("</s>", number, "end")


def _builtin_chatml(chat: Chat) -> Iterator[Piece]:
    for number, message in enumerate(chat):
        yield Piece(f"<|im_start|>{message['role']}\n", number)
        if reasoning := message.get("reasoning_content"):
            yield from _alternately(number, "<think>\n", reasoning, "\n</think>\n\n")
        yield Piece(message["content"], number, "said")
        for place, (name, arguments) in enumerate(_calls(message)):
            gap = "\n" if message["content"] or place else ""
            yield Piece(f'{gap}<tool_call>\n{{"name": ', number, "written")
            yield from (Piece(json.dumps(name, ensure_ascii=False), number, "said"),)
            yield from _alternately(number, ', "arguments": ', arguments, "}\n</tool_call>")
        yield Piece("<|im_end|>", number, "end")
        yield Piece("\n", number)


def _plain(chat: Chat) -> Iterator[Piece]:
    for number, message in enumerate(chat):
        yield Piece(f"{message['role'].capitalize()}:", number)
        if message["role"] != "assistant":
            yield from (Piece(" ", number), Piece(message["content"], number, "said"), Piece("\n", number))
            continue
        if reasoning := message.get("reasoning_content"):
            yield from _alternately(number, " <think>\n", reasoning, "\n</think>\n")
        yield from _alternately(number, " ", message["content"])
        for place, (name, arguments) in enumerate(_calls(message)):
            gap = "\n" if message["content"] or place else ""
            yield Piece(f'{gap}<tool_call>{{"name": ', number, "written")
            yield from (Piece(json.dumps(name, ensure_ascii=False), number, "said"),)
            yield from _alternately(number, ', "arguments": ', arguments, "}</tool_call>")
        yield from (Piece("</s>", number, "end"), Piece("\n", number))


TWINS = {
    "CHATML": Twin(chat_templates.CHATML, _chatml_turns),
    "BARE_MARKS": Twin(chat_templates.BARE_MARKS, _chatml_turns),
    "TRIMMING": Twin(chat_templates.TRIMMING, lambda chat: _chatml_turns(chat, str.strip, "")),
    "THINKING": Twin(chat_templates.THINKING, _thinking),
    "UPPER": Twin(
        chat_templates.CHATML.replace("m.content", "m.content | upper"), lambda chat: _chatml_turns(chat, str.upper)
    ),
    "TWICE": Twin(TWICE, _twice),
    "BACKWARDS": Twin(BACKWARDS, _backwards),
    "MERGING": Twin(MERGING, _merging),
    "XML_CALLS": Twin(XML_CALLS, _xml_calls),
    "chatml": Twin("chatml", _builtin_chatml),
    "llama3": Twin("llama3", _llama3, LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
    "mistral": Twin("mistral", _mistral, MISTRAL, "<s>", "</s>"),
    "plain": Twin("plain", _plain, MISTRAL, "<s>", "</s>"),
}
