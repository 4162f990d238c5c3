"""How rows become sequences: which messages are trained, what is added, what is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_packed_sft.errors import InvalidInputError

_CHOICES = {
    "special_tokens_in_content": ("escape", "allow"),
    "special_tokens_in_text": ("escape", "allow"),
    "truncation": ("right", "left", "drop"),
    "on_empty": ("drop", "error"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeOptions:
    """Options of `RecordEncoder`; docs/masks.md shows what they do to one chat.

    Args:
        roles_to_train: roles whose messages are trained; a row's own `train` flags go before them.
        last_turn_only: of the messages to train, the last one only.
        train_on_eot: the end-of-turn token of a trained turn is trained too.
        special_tokens_in_content: what becomes of `<|im_end|>` and the like in what messages say: `escape` makes them
            ordinary text, `allow` lets the tokenizer take them for control tokens.
        special_tokens_in_text: the same for text rows, which are often rendered chats.
        add_bos: begin every sequence with the tokenizer's beginning of sequence, unless it stands there already.
        add_eos: end every sequence with the end of sequence; None: text rows only, as templates end chats themselves.
        max_len: the longest sequence, in tokens.
        truncation: of longer ones: cut the `right` or the `left`, or `drop` them.
        on_empty: a row with nothing to train on is dropped and counted, or an error.
        chat_template_kwargs: further variables of the template, such as `enable_thinking`.
        date: what the template takes for today, `YYYY-MM-DD`.
        header: the text after which an assistant begins to write; None: found in the template.
        end_of_turn: end-of-turn tokens; None: found in the template.

    Example:
        >>> EncodeOptions(max_len=4096).to_json()["roles_to_train"]
        ['assistant']
    """

    roles_to_train: Sequence[str] = ("assistant",)
    last_turn_only: bool = False
    train_on_eot: bool = True
    special_tokens_in_content: str = "escape"
    special_tokens_in_text: str = "allow"
    add_bos: bool = False
    add_eos: bool | None = None
    max_len: int | None = None
    truncation: str = "right"
    on_empty: str = "drop"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None
    header: str | None = None
    end_of_turn: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Refuse what no row could be encoded with."""
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InvalidInputError(f"{name} is {getattr(self, name)!r}; use one of {', '.join(allowed)}")
        for name in ("roles_to_train", "end_of_turn"):
            if isinstance(getattr(self, name), str):
                raise InvalidInputError(f"{name} is the text {getattr(self, name)!r}; give a list")
        if self.max_len is not None and self.max_len < 2:
            raise InvalidInputError(f"max_len is {self.max_len}; a token is predicted from another, so at least 2")
        if self.header == "" or "" in (self.end_of_turn or ()):
            raise InvalidInputError("header and end_of_turn must not be empty; leave them out to use the template's")

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for manifests and fingerprints."""
        values = dataclasses.asdict(self)
        values["roles_to_train"] = list(self.roles_to_train)
        values["end_of_turn"] = None if self.end_of_turn is None else list(self.end_of_turn)
        values["chat_template_kwargs"] = dict(self.chat_template_kwargs)
        return values
