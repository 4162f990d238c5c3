"""Records of any other shape, through the user's mapping: our name -> dotted path in the record."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import Record, RecordError
from megatron_packed_sft.records.schemas.alpaca import adapt_alpaca
from megatron_packed_sft.records.schemas.fields import list_of
from megatron_packed_sft.records.schemas.messages import ROLES, adapt_messages
from megatron_packed_sft.records.schemas.texts import adapt_prompt_completion, adapt_text, adapt_tokenized


class _Target(NamedTuple):
    """A schema that records can be mapped to: required and optional names, and whether it has messages."""

    required: frozenset[str]
    optional: frozenset[str]
    adapt: Callable[..., Record]
    has_messages: bool = False


_RECORD_WEIGHT = "record_weight"  # `weight` is the path of a message's own
_BESIDE = frozenset({"tools", "system", "chat_template_kwargs"})
_TARGETS = (
    _Target(frozenset({"messages"}), _BESIDE, adapt_messages, True),
    _Target(frozenset({"prompt", "completion"}), _BESIDE, adapt_prompt_completion, True),
    _Target(frozenset({"instruction", "output"}), _BESIDE | {"input", "history", "reasoning_content"}, adapt_alpaca),
    _Target(frozenset({"text"}), frozenset(), adapt_text),
    _Target(frozenset({"input_ids"}), frozenset({"loss_mask", "labels"}), adapt_tokenized),
)
_MESSAGE_LISTS = ("messages", "prompt", "completion")
_MESSAGE_KEYS = (
    *("role", "content", "reasoning_content", "reasoning", "thinking", "tool_calls", "function_call", "tool_call_id"),
    *("name", "refusal", "weight", "loss_weight", "train"),
)
_ROLES = "roles"
_FIELD = re.compile(r"(\w+)(\[\d+\])?(?:\.(\w+))?(.*)", re.DOTALL)


class MappedRecords:
    """An adapter that follows a mapping. Callable and picklable.

    Args:
        mapping: one of `messages`; `prompt` and `completion`; `instruction` and `output`; `text`; `input_ids`, with
            what belongs to it (`tools`, `system`, `chat_template_kwargs`, `input`, `history`, `loss_mask`, `labels`,
            `record_weight`), each to a dotted path, such as `data.chat.turns` or `answers.0.text`. `role`, `content`,
            `weight` and the other keys of a message are paths in each message; those not named keep their own names.
            `roles` translates: `{"bot": "assistant"}`.

    Example:
        >>> adapt = MappedRecords({"messages": "chat", "role": "who", "content": "says", "roles": {"me": "user"}})
        >>> adapt({"chat": [{"who": "me", "says": "Hi"}]}).messages
        [{'role': 'user', 'content': 'Hi'}]
    """

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self._target = _target_of(mapping)
        self._roles = _roles_of(mapping)
        for name, path in mapping.items():
            if name != _ROLES and (not isinstance(path, str) or not path):
                raise InvalidInputError(f"mapping.{name} is {path!r}; give a dotted path, such as 'data.chat'")
        in_messages = (*_MESSAGE_KEYS, _ROLES) if self._target.has_messages else (_ROLES,)
        self._paths = {
            "weight" if name == _RECORD_WEIGHT else name: path
            for name, path in mapping.items()
            if name not in in_messages
        }
        self._message_paths = {name: mapping.get(name, name) for name in _MESSAGE_KEYS}
        self._split = {path: path.split(".") for path in (*self._paths.values(), *self._message_paths.values())}

    def __call__(self, record: dict[str, Any]) -> Record:
        """Adapt one record; errors name the fields as the file has them."""
        try:
            return self._adapt(record)
        except RecordError as error:
            raise RecordError(self._name_in_file(error.field), error.problem) from error

    def _adapt(self, record: dict[str, Any]) -> Record:
        mapped = {name: self._follow(record, path) for name, path in self._paths.items()}
        if not self._target.has_messages:
            return self._target.adapt(mapped)
        for name in _MESSAGE_LISTS:
            if (name == "messages" and name in mapped) or type(mapped.get(name)) is list:
                mapped[name] = [self._message(message) for message in list_of(mapped[name], name)]
        return self._target.adapt(mapped, roles=ROLES | set(self._roles.values()))

    def _message(self, message: Any) -> Any:
        if type(message) is not dict:
            return message  # the adapter reports it
        found = {name: self._follow(message, path) for name, path in self._message_paths.items()}
        if type(found["role"]) is str:
            found["role"] = self._roles.get(found["role"], found["role"])
        return {name: value for name, value in found.items() if value is not None}

    def _follow(self, value: Any, path: str) -> Any:
        for part in self._split[path]:
            if type(value) is dict:
                value = value.get(part)
            elif type(value) is list and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            else:
                return None
        return value

    def _name_in_file(self, field: str) -> str:
        match = _FIELD.fullmatch(field)
        if match is None:
            return field
        head, index, key, rest = match.groups()
        key = f".{self._message_paths.get(key, key) if index else key}" if key else ""
        return f"{self._paths.get(head, head)}{index or ''}{key}{rest}"


def _target_of(mapping: Mapping[str, Any]) -> _Target:
    known = {_ROLES, *_MESSAGE_KEYS}.union(*(target.required | target.optional for target in _TARGETS))
    known.add(_RECORD_WEIGHT)
    unknown = sorted(set(mapping) - known)
    if unknown:
        raise InvalidInputError(
            f"mapping has unknown keys: {', '.join(unknown)}; use keys of {', '.join(sorted(known))}"
        )
    for target in _TARGETS:
        if target.required <= set(mapping):
            allowed = target.required | target.optional | {_RECORD_WEIGHT}
            if target.has_messages:
                allowed |= {_ROLES, *_MESSAGE_KEYS}
            foreign = sorted(set(mapping) - allowed)
            if foreign:
                wanted = " and ".join(sorted(target.required))
                raise InvalidInputError(
                    f"mapping has keys that do not go with {wanted}: {', '.join(foreign)}; remove them"
                )
            return target
    choices = "; ".join(" and ".join(sorted(target.required)) for target in _TARGETS)
    raise InvalidInputError(f"mapping does not say where the text is; set one of: {choices}")


def _roles_of(mapping: Mapping[str, Any]) -> dict[str, str]:
    roles = mapping.get(_ROLES) or {}
    if not isinstance(roles, Mapping) or not all(isinstance(text, str) for pair in roles.items() for text in pair):
        raise InvalidInputError(f"mapping.{_ROLES} is {roles!r}; map names to roles, such as {{'bot': 'assistant'}}")
    return dict(roles)
