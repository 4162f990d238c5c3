"""Records without a list of messages: Alpaca, prompt and completion, plain text, and token ids."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron_packed_sft.records.record import Conversation, RecordError, TextRecord, TokenizedRecord, kind_of
from megatron_packed_sft.records.schemas.messages import ROLES, read_messages, with_system_and_tools
from megatron_packed_sft.records.schemas.registry import Schema, has_keys

IGNORED_LABEL = -100  # what PyTorch's cross entropy ignores, and so what `labels` columns hold
_LARGEST_ID = 2**31 - 1


def adapt_alpaca(record: dict[str, Any]) -> Conversation:
    r"""Adapt a record with `instruction` and `output`, and perhaps `input`, `system` and `history` (earlier turns).

    Example:
        >>> adapt_alpaca({"instruction": "Add.", "input": "1, 2", "output": "3"}).messages[0]
        {'role': 'user', 'content': 'Add.\n\n1, 2'}
    """
    question, more, answer = _text(record, "instruction"), _text(record, "input"), _text(record, "output")
    history = record.get("history") or []
    if type(history) is not list:
        raise RecordError("history", f"is {kind_of(history)}; give a list of [question, answer]")
    messages = []
    for index, pair in enumerate(history):
        if type(pair) is not list or len(pair) != 2 or not all(type(text) is str for text in pair):
            raise RecordError(f"history[{index}]", "is not a pair of strings; give [question, answer]")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    messages.append({"role": "user", "content": f"{question}\n\n{more}" if more else question})
    messages.append({"role": "assistant", "content": answer})
    return with_system_and_tools(messages, None, record)


def adapt_prompt_completion(record: dict[str, Any], *, roles: Collection[str] = ROLES) -> Conversation | TextRecord:
    """Adapt a record with `prompt` and `completion`, both texts or both messages; only the completion is trained.

    Example:
        >>> adapt_prompt_completion({"prompt": "2 + 2 = ", "completion": "4"})
        TextRecord(parts=(('2 + 2 = ', False), ('4', True)))
    """
    prompt, completion = record.get("prompt"), record.get("completion")
    if type(prompt) is list and type(completion) is list:
        before, _ = read_messages(prompt, "prompt", roles)
        after, train = read_messages(completion, "completion", roles)
        flags = [*[False] * len(before), *(train or [None] * len(after))]
        return with_system_and_tools(before + after, flags, record)
    if type(prompt) is not str or type(completion) is not str:
        kinds = f"is {kind_of(prompt)}, and completion is {kind_of(completion)}"
        raise RecordError("prompt", f"{kinds}; give two strings or two lists of messages")
    for name in ("system", "tools"):
        if record.get(name):
            raise RecordError(
                name, "goes with messages, but prompt is a string; give prompt and completion as messages"
            )
    return TextRecord(((prompt, False), (completion, True)))


def adapt_text(record: dict[str, Any]) -> TextRecord:
    """Adapt a record with `text`, all of it trained.

    Example:
        >>> adapt_text({"text": "Once upon a time."}).parts
        (('Once upon a time.', True),)
    """
    text = record.get("text")
    if type(text) is not str:
        raise RecordError("text", f"is {kind_of(text)}; give a string")
    return TextRecord(((text, True),))


def adapt_tokenized(record: dict[str, Any]) -> TokenizedRecord:
    """Adapt a record with `input_ids`, and `loss_mask` (1 for a trained token) or `labels` (-100 for all others).

    Mask and labels are not shifted: each belongs to the token at its own position, as in Hugging Face.

    Example:
        >>> adapt_tokenized({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]})
        TokenizedRecord(input_ids=[5, 6, 7], train=[0, 1, 1])
    """
    import numpy as np

    ids = _integers(record, "input_ids")
    if len(ids) == 0 or ids.min() < 0 or ids.max() > _LARGEST_ID:
        problem = "is empty" if len(ids) == 0 else f"has ids from {ids.min()} to {ids.max()}"
        raise RecordError("input_ids", f"{problem}; give at least one id, each in 0..{_LARGEST_ID}")
    name = "labels" if record.get("loss_mask") is None else "loss_mask"
    if record.get(name) is None:
        raise RecordError("loss_mask", "is missing, and so is labels; give one of them, as long as input_ids")
    given = _integers(record, name)
    if len(given) != len(ids):
        raise RecordError(name, f"has {len(given)} values, but there are {len(ids)} input_ids; give one for each")
    if name == "labels":
        train = given != IGNORED_LABEL
        wrong = np.flatnonzero(train & (given != ids))
        remedy = f"give the same id or {IGNORED_LABEL}; labels are not shifted"
    else:
        train = given == 1
        wrong = np.flatnonzero((given != 0) & ~train)
        remedy = "give 0 or 1"
    if len(wrong):
        at = int(wrong[0])
        raise RecordError(f"{name}[{at}]", f"is {given[at]}, at the input id {ids[at]}; {remedy}")
    return TokenizedRecord(ids.tolist(), train.astype(np.uint8).tolist())


def _text(record: dict[str, Any], name: str) -> str:
    text = record.get(name)
    if text is None and name == "input":
        return ""
    if type(text) is not str:
        raise RecordError(name, f"is {'missing' if text is None else kind_of(text)}; give a string")
    return text


def _integers(record: dict[str, Any], name: str) -> Any:
    import numpy as np

    value = record.get(name)
    if type(value) is not list:
        raise RecordError(name, f"is {kind_of(value)}; give a list of integers")
    try:
        array = np.asarray(value if value else np.zeros(0, np.int64))
    except (ValueError, OverflowError):
        array = np.zeros((0, 0))
    if array.ndim != 1 or array.dtype.kind not in "ib":
        raise RecordError(name, "holds something other than 64-bit integers; give a list of integers")
    return array.astype(np.int64)


ALPACA = Schema(has_keys("instruction", "output"), adapt_alpaca)
PROMPT_COMPLETION = Schema(has_keys("prompt", "completion"), adapt_prompt_completion)
TEXT = Schema(has_keys("text"), adapt_text)
TOKENIZED = Schema(has_keys("input_ids"), adapt_tokenized)
