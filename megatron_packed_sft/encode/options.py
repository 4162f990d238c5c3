"""How records become sequences: the groups `encode` and `template` of the configuration, declared once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from megatron_packed_sft.errors import InvalidInputError

_CHOICES = {
    "special_tokens_in_content": ("escape", "allow"),
    "special_tokens_in_text": ("escape", "allow"),
    "render": ("conversation", "turns", "auto"),
    "truncation": ("right", "left", "drop", "turns", "oldest_turns"),
    "on_lost": (None, "warn", "drop", "error"),
}
BY_TURNS = ("turns", "oldest_turns")  # truncations that remove whole turns

# Variables that real templates ask for and that differ from chat to chat.
RECORD_VARIABLES = ("enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "documents")
# Variables that the renderer sets.
RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})


@dataclass(kw_only=True)
class TrainOptions:
    """Which parts of a trained turn are trained. The end-of-turn token is trained if the part before it is.

    Args:
        answers: its text.
        reasoning: its reasoning, with the tags around it.
        tool_calls: its tool calls, with the tags and the JSON around them.
    """

    answers: bool = True
    reasoning: bool = True
    tool_calls: bool = True

    def __post_init__(self) -> None:
        """Refuse to train nothing."""
        if not (self.answers or self.reasoning or self.tool_calls):
            raise InvalidInputError("encode.train is false for everything; set one of its keys to true")


@dataclass(kw_only=True)
class EncodeOptions:
    """What is trained, and how long a sequence may be. docs/masks.md shows what the options do to one chat.

    Args:
        roles_to_train: roles whose messages are trained; `train` flags and weights in a record win over them.
        train: which parts of an assistant's turn are trained.
        last_turn_only: train only the last of these messages.
        train_on_eot: also train the end-of-turn token of a trained message.
        special_tokens_in_content: control tokens in messages; `escape` treats them as plain text, `allow` keeps them.
        special_tokens_in_text: the same for prompt, completion and text records, which may be rendered chats.
        add_bos: begin every sequence with the beginning-of-sequence token, unless it is there already.
        add_eos: end every sequence with the end-of-sequence token; null does so for text records only.
        render: conversation makes one sequence of each conversation; turns makes one of each trained turn, rendered up
            to that turn as at inference; auto does so only where rendering the whole conversation would change an
            earlier trained turn, for example because the template strips old reasoning.
        max_len: the longest sequence in tokens; longer ones are truncated and counted, null for no limit.
        truncation: the end to cut off, right or left; turns keeps the system prompt and the newest whole turns that
            fit, oldest_turns the oldest; drop drops the whole sequence instead.
        on_lost: what to do with a record if the template omits some of its text: warn counts it, drop drops the record,
            error refuses it, and null refuses it only if a trained turn loses a tool call or all of its text.

    Example:
        >>> EncodeOptions(render="turn")
        Traceback (most recent call last):
        megatron_packed_sft.errors.InvalidInputError: encode.render is 'turn'; use one of conversation, turns, auto
    """

    roles_to_train: list[str] = field(default_factory=lambda: ["assistant"])
    train: TrainOptions = field(default_factory=TrainOptions)
    last_turn_only: bool = False
    train_on_eot: bool = True
    special_tokens_in_content: str = "escape"
    special_tokens_in_text: str = "allow"
    add_bos: bool = False
    add_eos: bool | None = None
    render: str = "conversation"
    max_len: int | None = None
    truncation: str = "right"
    on_lost: str | None = None

    def __post_init__(self) -> None:
        """Refuse values with which no record can be encoded."""
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                choices = ", ".join(filter(None, allowed))
                raise InvalidInputError(f"encode.{name} is {getattr(self, name)!r}; use one of {choices}")
        _refuse_text("encode.roles_to_train", self.roles_to_train)
        if self.max_len is not None and self.max_len < 2:
            raise InvalidInputError(f"encode.max_len is {self.max_len}; use at least 2, or null for no limit")

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for manifests and fingerprints."""
        return dataclasses.asdict(self)


@dataclass
class TemplateOptions:
    """The chat template, and what is known about it.

    Args:
        name: chatml, llama3, mistral, plain, or a Jinja file; null takes the tokenizer's own template.
        date: today's date for templates that ask for it, such as 2026-01-31.
        header: the text after which the assistant writes; null finds it in the template.
        end_of_turn: end-of-turn tokens; null finds them in the template.
        variables: further variables of the template, such as {enable_thinking: false}.
        record_variables: the variables that a record may set in its chat_template_kwargs.
    """

    name: str | None = None
    date: str | None = None
    header: str | None = None
    end_of_turn: list[str] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    record_variables: list[str] = field(default_factory=lambda: list(RECORD_VARIABLES))

    def __post_init__(self) -> None:
        """Refuse values that make sense for no template."""
        _refuse_text("template.end_of_turn", self.end_of_turn)
        _refuse_text("template.record_variables", self.record_variables)
        if reserved := RESERVED_VARIABLES.intersection((*self.variables, *self.record_variables)):
            raise InvalidInputError(f"template variable {min(reserved)} is reserved; remove it")
        for key, is_empty in (("header", self.header == ""), ("end_of_turn", "" in (self.end_of_turn or ()))):
            if is_empty:
                raise InvalidInputError(f"template.{key} is empty; use null to find it in the template")

    def to_json(self) -> dict[str, Any]:
        """Return everything but the name as plain values, under the keys that manifests use."""
        values = dataclasses.asdict(self)
        del values["name"]
        return {"chat_template_kwargs": values.pop("variables"), **values}


def _refuse_text(key: str, value: Any) -> None:
    if isinstance(value, str):
        raise InvalidInputError(f"{key} is the text {value!r}; give a list, such as [{value}]")
