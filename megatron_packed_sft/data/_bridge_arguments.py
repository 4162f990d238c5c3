"""Arguments of Megatron-Bridge's dataset classes that mean nothing once data is packed: refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_packed_sft.errors import InvalidInputError

_TOKENIZED = "the data is already tokenized"
_PACKED = "the data is already packed"
# Name -> (values that Bridge passes by default and that change nothing, why another one cannot be honoured).
_MEANINGLESS: dict[str, tuple[tuple[Any, ...], str]] = {
    "min_seq_length": ((1,), _PACKED),
    "add_bos": ((False,), _TOKENIZED),
    "add_eos": ((True,), _TOKENIZED),
    "add_sep": ((False,), _TOKENIZED),
    "sep_id": ((None,), _TOKENIZED),
    "label_key": (("answer", "output"), _TOKENIZED),
    "truncation_field": (("text", "input"), _TOKENIZED),
    "truncation_method": (("right",), _TOKENIZED),
    "prompt_template": ((None, "{input} {output}"), _TOKENIZED),
    "special_tokens": ((None,), _TOKENIZED),
    "chat": ((False, True), _TOKENIZED),
    "use_hf_tokenizer_chat_template": ((False, True), _TOKENIZED),
    "tool_schemas": ((None,), _TOKENIZED),
    "virtual_tokens": ((0,), _PACKED),
    "tokens_to_generate": ((0,), "packed data has no prompt to continue"),
    "is_test": ((False,), "packed data has no prompt to continue"),
    "output_original_text": ((False,), "packed data has no text"),
    "index_mapping_dir": ((None,), "the order is computed, not stored"),
    "global_sample_mapping": ((False,), "the order is computed, not stored"),
    "memmap_workers": ((None, 2), "shards need no index"),
    "hf_dataset": ((False,), _PACKED),
    "get_attention_mask_from_fusion": ((True,), "boundaries replace the mask; set return_cu_seqlen=False to get one"),
}


def refuse_meaningless(arguments: Mapping[str, Any]) -> None:
    """Raise for unknown arguments, and for those of Bridge that mean nothing here unless they have its default."""
    for name, value in arguments.items():
        if name not in _MEANINGLESS:
            raise InvalidInputError(f"{name} is not an argument of a packed dataset; check the spelling")
        defaults, reason = _MEANINGLESS[name]
        if not any(value is default or (type(value) is type(default) and value == default) for default in defaults):
            raise InvalidInputError(
                f"{name}={value!r} has no meaning for packed data: {reason}; leave it out, or prepare the data with it"
            )
