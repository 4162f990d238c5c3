"""Preference data, of which only one side may be trained: refused, or its chosen side taken. Media are refused, too.

| shape | keys | `take: chosen` |
|---|---|---|
| pairs | `chosen` and `rejected`, texts or messages, with or without a prompt; `chosen_messages` | the chosen side |
| verdicts (KTO) | `label` or `kto_tag`, true or false, beside a chat | records with true; the others are dropped |
| rankings | `responses` with `scores`, `response_a` and `response_b`, `completions`, ... | refused: use a mapping |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_packed_sft.records.record import NotTakenError, Record, RecordError, kind_of
from megatron_packed_sft.records.schemas.fields import RECORD_KEYS, refuse_keys
from megatron_packed_sft.records.schemas.registry import SCHEMAS, recognise
from megatron_packed_sft.records.schemas.sharegpt import read_turns

_CHOSEN = ("chosen", "chosen_messages", "chosen_conversations", "chosen_response", "preferred_output")
_REJECTED = ("rejected", "rejected_messages", "rejected_conversations", "rejected_response", "non_preferred_output")
_EMPTY: tuple[Any, ...] = (None, "", [])  # empty cells of a table with several kinds of records
_PAIR = (*_CHOSEN, *_REJECTED)
_LABELS = ("label", "kto_tag")
_CANDIDATES = ("responses", "completions", "candidates", "answers")
_SCORES = ("scores", "ranks", "rewards")
_RANKED = (
    *_CANDIDATES,
    *(f"{noun}{end}" for noun in ("response", "answer", "completion", "conversation") for end in ("_a", "_b")),
    *(f"{noun}{end}" for noun in ("response", "answer", "completion") for end in ("_0", "_1", "_2", "1", "2")),
    *("human_ref_A", "human_ref_B"),
)
_GUARDED = frozenset({*_PAIR, *_LABELS, *_SCORES, *RECORD_KEYS})
_UNLABELLED = frozenset({"text", "tokenized"})  # where a label is a class and not a verdict on an answer
_PROMPTS = ("prompt", "question", "query", "instruction", "input")
_TAKE = "set sources.NAME.take=chosen to train on the chosen side alone (NAME is input for input=)"


class GuardedRecords:
    """An adapter of one schema, or of the recognised one, that refuses preference data and media.

    Args:
        schema: the name of a built-in schema; None recognises each record.

    Example:
        >>> GuardedRecords()({"messages": [{"role": "user", "content": "Hi"}], "label": "greeting"}).messages
        [{'role': 'user', 'content': 'Hi'}]
    """

    def __init__(self, schema: str | None = None) -> None:
        self._schema = schema

    def __call__(self, record: dict[str, Any]) -> Record:
        """Adapt one record, or raise `RecordError`."""
        is_guarded = not _GUARDED.isdisjoint(record)
        if is_guarded:
            _refuse_pairs(record)
            refuse_keys(record)
        name = self._schema
        if name is None:
            try:
                name = recognise(record)
            except RecordError:
                _refuse_rankings(record)
                raise
        if is_guarded and name not in _UNLABELLED:
            _refuse_label(record)
        return SCHEMAS[name].adapt(record)


class ChosenRecords:
    """An adapter that takes the chosen side of preference data.

    Example:
        >>> ChosenRecords()({"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"})
        TextRecord(parts=(('2 + 2 = ', False), ('4', True)))
    """

    def __call__(self, record: dict[str, Any]) -> Record:
        """Adapt the chosen side of one record; `NotTakenError` if it has none."""
        refuse_keys(record)
        rest = {key: value for key, value in record.items() if value is not None and key not in _PAIR}
        chosen = next(iter(_given(record, _CHOSEN)), None)
        if chosen is not None:
            taken = _with_chosen(rest, record, chosen)
        elif _given(record, _REJECTED):
            taken = rest  # ms-swift: the chosen answer has the usual key
        else:
            label = _label_of(record)
            if label is None:
                _refuse_rankings(record)
                raise RecordError("", "has no chosen side, but take is chosen; remove take, or the record")
            if not record[label]:
                raise NotTakenError(label, f"is {record[label]}, and only chosen records are taken")
            taken = {key: value for key, value in rest.items() if key != label}
        try:
            return SCHEMAS[recognise(taken)].adapt(taken)
        except RecordError as error:
            if chosen is None or not error.field.startswith("completion"):
                raise
            raise RecordError(error.field.replace("completion", chosen, 1), error.problem) from error


def _given(record: dict[str, Any], names: Sequence[str]) -> list[str]:
    return [name for name in names if record.get(name) not in _EMPTY]


def _refuse_pairs(record: dict[str, Any]) -> None:
    found = _given(record, _PAIR)
    if found:
        raise RecordError(
            "", f"is preference data (keys {', '.join(found)}), half of which must not be trained; {_TAKE}"
        )
    if _given(record, _SCORES) and any(type(record[name]) is list for name in _given(record, _CANDIDATES)):
        _refuse_rankings(record)


def _refuse_rankings(record: dict[str, Any]) -> None:
    found = _given(record, _RANKED)
    if found:
        asks = next(iter(_given(record, _PROMPTS)), "prompt")
        path = f"{found[0]}.0" if type(record[found[0]]) is list else found[0]
        raise RecordError(
            "",
            f"is preference data (several answers: {', '.join(found)}), and no key names the one to train; choose one, "
            f"such as mapping: {{instruction: {asks}, output: {path}}}",
        )


def _label_of(record: dict[str, Any]) -> str | None:
    """Return the key of a verdict on the whole record, if it has one: true or false, or 1 or 0."""
    for name in _LABELS:
        value = record.get(name)
        if type(value) is bool or (type(value) is int and value in (0, 1)):
            return name
    return None


def _refuse_label(record: dict[str, Any]) -> None:
    label = _label_of(record)
    if label is not None:
        raise RecordError(
            label,
            f"is {record[label]}: preference data (KTO), so a record may be an example of a bad answer; {_TAKE}",
        )


def _with_chosen(rest: dict[str, Any], record: dict[str, Any], chosen: str) -> dict[str, Any]:
    """Return a record of an ordinary schema whose answer is the chosen one."""
    answer = record[chosen]
    if type(rest.get("input")) is dict:  # OpenAI's form has a whole request there
        rest = {**{key: value for key, value in rest.items() if key != "input"}, **rest["input"]}
    lists = [name for name in ("prompt", "messages", "conversations") if type(rest.get(name)) is list]
    if type(answer) is str:
        if not lists:
            return _with_text(rest, answer, chosen)
        answer = {"role": "assistant", "content": answer}
    if type(answer) is dict:
        answer = [answer]
    if type(answer) is not list or not answer:
        raise RecordError(chosen, f"is {kind_of(record[chosen])}; give a string or a list of messages")
    answer = _as_messages(answer, chosen)
    prompt = _as_messages(rest[lists[0]], lists[0]) if lists else []
    if not prompt:
        prompt = _asked(rest, answer, chosen)
    if answer == prompt:  # UltraFeedback has the chosen messages twice
        prompt = []
    elif answer[: len(prompt)] == prompt:
        answer = answer[len(prompt) :]
    elif _begins(answer) and lists[:1] != ["prompt"]:  # a chat of its own, as a whole
        prompt = []
    if not prompt:
        num_shared = _num_shared(answer, record)
        prompt, answer = answer[:num_shared], answer[num_shared:]
    others = {key: value for key, value in rest.items() if key not in (*_PROMPTS, "messages", "conversations")}
    return {**others, "prompt": prompt, "completion": answer} if prompt else {**others, "messages": answer}


def _with_text(rest: dict[str, Any], answer: str, chosen: str) -> dict[str, Any]:
    asks = next((name for name in _PROMPTS if type(rest.get(name)) is str), None)
    if asks is None:
        raise RecordError(
            chosen,
            "is a text without a prompt, so the answer cannot be told apart; give messages, or a mapping such as "
            f"mapping: {{text: {chosen}}}, which trains all of it",
        )
    if asks == "prompt" and not any(rest.get(name) for name in ("system", "system_prompt", "tools")):
        return {**rest, "completion": answer}
    others = {key: value for key, value in rest.items() if key != asks}
    return {**others, "instruction": rest[asks], "output": answer}


def _as_messages(turns: list[Any], field: str) -> list[Any]:
    if not turns or type(turns[0]) is not dict or "from" not in turns[0]:
        return turns
    messages, train, *_ = read_turns(turns, field)
    if train is None:
        return messages
    return [{**message, "weight": weight} for message, weight in zip(messages, train, strict=True)]


def _asked(rest: dict[str, Any], answer: list[Any], chosen: str) -> list[Any]:
    """Return the prompt that is a text, unless the chosen messages begin with it."""
    asks = next((name for name in _PROMPTS if type(rest.get(name)) is str), None)
    if asks is None:
        return []
    if not _begins(answer):
        return [{"role": "user", "content": rest[asks]}]
    texts = [message.get("content") for message in answer if type(message) is dict and message.get("role") == "user"]
    if rest[asks] not in texts:
        raise RecordError(asks, f"is not in the messages of {chosen}, which begin with another; keep one of them")
    return []


def _begins(messages: list[Any]) -> bool:
    """Return whether messages begin with a user's, perhaps after a system prompt."""
    roles = [message.get("role") for message in messages if type(message) is dict]
    return next((role for role in roles if role not in ("system", "developer")), None) == "user"


def _num_shared(answer: list[Any], record: dict[str, Any]) -> int:
    """Return how many messages both sides begin with: the prompt; at least the last one is the answer's own."""
    rejected = next((name for name in _REJECTED if type(record.get(name)) is list), None)
    other = _as_messages(record[rejected], rejected) if rejected else []
    num_shared = 0
    while num_shared < min(len(answer) - 1, len(other)) and answer[num_shared] == other[num_shared]:
        num_shared += 1
    return num_shared
