"""A chat template without a tokenizer: enough of one to render it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_packed_sft.encode.sequences import Sequences
from megatron_packed_sft.encode.templates.load import ChatTemplate
from megatron_packed_sft.encode.tokenizers.interface import MarkedText
from megatron_packed_sft.errors import InvalidInputError

_BOS, _EOS = "<|bos_token|>", "<|eos_token|>"
# How control tokens look in the templates of models: <|im_end|>, [INST], <end_of_turn>, <think>.
_LOOKS_LIKE_CONTROL = re.compile(
    r"<[|\N{FULLWIDTH VERTICAL LINE}][^<>{}'\s]{1,40}[|\N{FULLWIDTH VERTICAL LINE}]>"
    r"|\[/?[A-Z_]{3,}\]|</?[a-z_]+_of_turn>|</?(?:think|tool_call|tool_response|s|bos|eos)>"
)


class TemplateAlone:
    """What stands in for the tokenizer of a template: it renders, and cannot encode.

    What looks like a control token in the template is taken for one; `bos_token` and `eos_token` are shown by name.

    Example:
        >>> list(TemplateAlone(ChatTemplate("mine", "[INST]{{ messages[0].content }}[/INST]")).control_tokens)[:2]
        ['[INST]', '[/INST]']
    """

    bos_id = eos_id = pad_id = None
    vocab_size = 0
    fingerprint = ""

    def __init__(self, template: ChatTemplate) -> None:
        self.path = self.name = template.name
        self.chat_template: str | None = template.source
        self.tool_template = template.tool_source
        found = dict.fromkeys([*_LOOKS_LIKE_CONTROL.findall(template.source), _BOS, _EOS])
        self.control_tokens: Mapping[str, int] = {token: number for number, token in enumerate(found)}
        self.template_variables: Mapping[str, Any] = {"bos_token": _BOS, "eos_token": _EOS}
        self.stop_tokens: Sequence[str] = [_EOS]

    def encode_many(self, texts: Sequence[MarkedText]) -> Sequences:
        """Refuse: there are no ids."""
        raise InvalidInputError(f"{self.name} is a template alone; give a tokenizer to see ids")

    def decode(self, ids: Sequence[int]) -> str:
        """Refuse: there are no ids."""
        raise InvalidInputError(f"{self.name} is a template alone; give a tokenizer to see ids")
