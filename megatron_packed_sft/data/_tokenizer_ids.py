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


def num_ids_of(tokenizer: Any) -> int | None:
    """Return how many ids a tokenizer of any library has, as far as it says; None or an int, an EOS id, does not."""
    if tokenizer is None or isinstance(tokenizer, int):
        return None
    sizes = [getattr(tokenizer, name, None) for name in ("vocab_size", "padded_vocab_size")]
    if hasattr(tokenizer, "__len__"):  # of Hugging Face; unlike vocab_size, it counts the added tokens
        sizes.append(len(tokenizer))
    return max((size for size in sizes if type(size) is int), default=None)


def id_limit_of(tokenizer: Any) -> int | None:
    """Return what all ids of a tokenizer are below: more than their number where they have gaps."""
    num_ids = num_ids_of(tokenizer)
    if num_ids is None or not hasattr(tokenizer, "get_vocab"):
        return num_ids
    return max(num_ids, 1 + max(tokenizer.get_vocab().values(), default=-1))
