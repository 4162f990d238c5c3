"""Texts to ids, with a tokenizer of transformers, of `tokenizers`, or ours; nothing is added to them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from megatron_packed_sft.encode.sequences import Sequences
from megatron_packed_sft.encode.tokenizers.interface import MarkedText
from megatron_packed_sft.errors import InvalidInputError

_WRAP = "wrap it in transformers' PreTrainedTokenizerFast(tokenizer_object=..., bos_token=..., eos_token=...)"


class SpecialIds(NamedTuple):
    """The ids that frame a document and fill a batch; None where the tokenizer has none."""

    bos: int | None
    eos: int | None
    pad: int | None


def special_ids(tokenizer: Any) -> SpecialIds:
    """Return the special ids of a tokenizer.

    A bare tokenizer of `tokenizers` names none; those that its post-processor puts around a text are taken.
    """
    if _is_bare(tokenizer):
        _check_bare(tokenizer)
        probe = _probe(tokenizer)
        plain, framed = (tokenizer.encode(probe, add_special_tokens=added).ids for added in (False, True))
        num_before = next((n for n in range(len(framed)) if framed[n : n + len(plain)] == plain), 0)
        before, after = framed[:num_before], framed[num_before + len(plain) :]
        return SpecialIds(before[0] if len(before) == 1 else None, after[0] if len(after) == 1 else None, None)
    names = ("bos_id", "eos_id", "pad_id") if _is_ours(tokenizer) else ("bos_token_id", "eos_token_id", "pad_token_id")
    return SpecialIds(*(getattr(tokenizer, name, None) for name in names))


def framing_ids(tokenizer: Any, *, add_bos: bool, add_eos: bool) -> tuple[int | None, int | None]:
    """Return the ids to put before and after each document, None where none is wanted; a missing one is an error."""
    found = special_ids(tokenizer)
    for name, wanted, value in (("bos", add_bos, found.bos), ("eos", add_eos, found.eos)):
        if wanted and value is None:
            remedy = _WRAP if _is_bare(tokenizer) else "give it one"
            raise InvalidInputError(
                f"the tokenizer ({type(tokenizer).__name__}) has no {name.upper()} token to add; set add_{name}=False, "
                f"or {remedy}"
            )
    return found.bos if add_bos else None, found.eos if add_eos else None


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> Sequences:
    """Tokenize texts in one go, without special tokens; `framing_ids` has refused truncation and padding."""
    if _is_ours(tokenizer):
        ours: Sequences = tokenizer.encode_many([MarkedText(text) for text in texts])
        return ours
    if _is_bare(tokenizer):
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    elif callable(tokenizer):
        # Long documents are cut here, so the tokenizer's warning about them would mislead.
        encoded = tokenizer([*texts, ""], add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids = encoded["input_ids"][:-1]  # a batch without texts would be an error
    else:
        raise InvalidInputError(
            f"tokenizer is {type(tokenizer).__name__}; pass one of transformers, of tokenizers or of load_tokenizer"
        )
    lengths = np.array([len(one) for one in ids], np.int64)
    flat = np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum()))
    return Sequences(flat, np.zeros(flat.size, np.uint8), lengths, np.arange(len(texts)))


def _is_ours(tokenizer: Any) -> bool:
    return hasattr(tokenizer, "encode_many")


def _is_bare(tokenizer: Any) -> bool:
    """Return whether it is a `tokenizers.Tokenizer`, which that import would tell at the price of loading it."""
    return hasattr(tokenizer, "encode_batch_fast") and hasattr(tokenizer, "token_to_id")


def _probe(tokenizer: Any) -> str:
    """Return a text with tokens of its own: a small vocabulary may not know the first one that comes to mind."""
    frame = set(tokenizer.encode("").ids)
    if set(tokenizer.encode("a", add_special_tokens=False).ids) - frame:
        return "a"
    return next((text for text, number in tokenizer.get_vocab().items() if number not in frame), "a")


def _check_bare(tokenizer: Any) -> None:
    for name in ("truncation", "padding"):
        if getattr(tokenizer, name, None) is not None:
            raise InvalidInputError(
                f"the tokenizer's own {name} would change documents in silence; call tokenizer.no_{name}() first"
            )
