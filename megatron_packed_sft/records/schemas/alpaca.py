"""One question and one answer in columns: Alpaca's `instruction` and `output`, and pairs such as `query`/`response`."""

from __future__ import annotations

from typing import Any

from megatron_packed_sft.records.record import Conversation, RecordError, kind_of
from megatron_packed_sft.records.schemas.fields import string_of
from megatron_packed_sft.records.schemas.messages import REASONING_KEYS, ReadMessages, conversation_of
from megatron_packed_sft.records.schemas.registry import COLUMNS, PAIRS, Schema, has_keys

_QUESTIONS = ("question", "query", "prompt", "instruction", "input", "problem")
_ANSWERS = ("answer", "response", "output", "solution")
# The sources of an answer: without them, the model would learn to guess. Only a mapping can tell where they go.
_LOST = ("context", "rationale", "cot", "chain_of_thought", "thought", "explanation")


def adapt_alpaca(record: dict[str, Any]) -> Conversation:
    r"""Adapt a record with `instruction` and `output`, and perhaps `input`, `system` and `history` (earlier turns).

    Example:
        >>> adapt_alpaca({"instruction": "Add.", "input": "1, 2", "output": "3"}).messages[0]
        {'role': 'user', 'content': 'Add.\n\n1, 2'}
    """
    return _adapt(record, "instruction", "input", "output")


def adapt_question_answer(record: dict[str, Any]) -> Conversation:
    """Adapt a record with one column that asks and one that answers.

    Example:
        >>> adapt_question_answer({"query": "What is 1 + 2?", "response": "3"}).messages[1]
        {'role': 'assistant', 'content': '3'}
    """
    asks, answers = _given(record, _QUESTIONS), _given(record, _ANSWERS)
    more = "input"
    if asks == ["instruction", "input"]:
        asks = ["instruction"]
    elif asks == ["instruction"]:
        more = "context"  # as Dolly calls it
    for noun, found in (("question", asks), ("answer", answers)):
        if len(found) != 1:
            said = f"has {' and '.join(found)}" if found else "is missing"
            remedy = f"mapping: {{instruction: {(asks or ['question'])[0]}, output: {(answers or ['answer'])[0]}}}"
            raise RecordError("" if found else noun, f"{said}; name the column of the {noun}, such as {remedy}")
    lost = [name for name in _LOST if record.get(name) and name != more]
    if lost:
        line = f"mapping: {{instruction: {asks[0]}, input: {lost[0]}, output: {answers[0]}}}"
        raise RecordError(
            lost[0], f"would be lost; name the columns to read, such as {line}, or leave it out of the mapping"
        )
    return _adapt(record, asks[0], None if asks[0] == "input" else more, answers[0])


def _adapt(record: dict[str, Any], ask: str, more: str | None, answer: str) -> Conversation:
    messages = _history(record.get("history") or [])
    question = string_of(record.get(ask), ask)
    addition = string_of(record[more], more) if more and record.get(more) is not None else ""
    messages.append({"role": "user", "content": f"{question}\n\n{addition}" if addition else question})
    messages.append({"role": "assistant", "content": string_of(record.get(answer), answer)})
    for key in REASONING_KEYS:
        if type(reasoning := record.get(key)) is str and reasoning:
            messages[-1]["reasoning_content"] = reasoning
            break
    return conversation_of(ReadMessages(messages), record)


def _history(history: Any) -> list[dict[str, Any]]:
    if type(history) is not list:
        raise RecordError("history", f"is {kind_of(history)}; give a list of [question, answer]")
    messages = []
    for index, pair in enumerate(history):
        if type(pair) is not list or len(pair) != 2 or not all(type(text) is str for text in pair):
            raise RecordError(f"history[{index}]", "is not a pair of strings; give [question, answer]")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return messages


def _given(record: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    return [name for name in names if record.get(name) is not None]


def _asks_and_answers(record: dict[str, Any]) -> bool:
    return bool(_given(record, _QUESTIONS) and _given(record, _ANSWERS))


ALPACA = Schema(has_keys("instruction", "output"), adapt_alpaca, PAIRS)
QUESTION_ANSWER = Schema(_asks_and_answers, adapt_question_answer, COLUMNS)
