"""What a packed dataset needs from a tokenizer of any library."""

from __future__ import annotations

from typing import Any

from megatron_packed_sft.errors import InvalidInputError


def eos_id_of(tokenizer: Any) -> int:
    """Return the EOS id of a Megatron (`eos_id`, `eod`) or Hugging Face (`eos_token_id`) tokenizer; an int is one."""
    if isinstance(tokenizer, int) and not isinstance(tokenizer, bool):
        return tokenizer
    for name in ("eos_id", "eod", "eod_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        value = value() if callable(value) else value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    raise InvalidInputError(
        f"the tokenizer ({type(tokenizer).__name__}) has no eos_id, eod or eos_token_id; "
        "pass a tokenizer that has one, or the id itself as an integer"
    )
