"""What data was made with, and what may be trained on together: one tokenizer, one chat template.

    a list or blend     code: tokenizer ab12, template 77aa  ┐
                        chat: tokenizer ab12, template 77aa  ├─ agree ─▶ one dataset
                        bare .npy: records nothing           ┘  its ids are looked up in the others' vocabulary

The same ids mean other texts to another tokenizer, and nothing downstream would notice: losses only get worse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_packed_sft.data.options import Tolerance
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.bins import PackedBin

logger = logging.getLogger(__name__)


_NUM_BINS_READ = 16  # enough to meet an end of turn, whose id is among the largest, and quick on a cold disk


class MadeWith(NamedTuple):
    """What one part of the data was made with, as far as it is recorded."""

    where: str  # for messages
    tokenizer: Mapping[str, Any] | None
    template: str | None  # the fingerprint of the chat template
    vocab_size: Callable[[], int | None]  # all ids are below it; a model's may be larger than the tokenizer's
    num_bins: int
    bin_at: Callable[[int], PackedBin]
    pad_seq_to_mult: int | None = None  # what its sequences are padded to a multiple of

    @property
    def tokenizer_identity(self) -> str | None:
        """What tells the tokenizer from others: its fingerprint, or at least its name."""
        recorded = self.tokenizer or {}
        return recorded.get("fingerprint") or recorded.get("name") or None

    def id_beyond(self, vocab_size: int) -> int | None:
        """Return an id that a vocabulary of this size does not have, if one is found in bins from all over the part."""
        recorded = self.vocab_size()
        if recorded is not None and recorded <= vocab_size:
            return None
        chosen = np.unique(np.linspace(0, self.num_bins - 1, min(_NUM_BINS_READ, self.num_bins)).astype(np.int64))
        largest = max(int(self.bin_at(number).input_ids.max()) for number in chosen.tolist())
        return largest if largest >= vocab_size else None


def refuse_mixed(parts: Sequence[MadeWith], tolerance: Tolerance) -> None:
    """Refuse parts that were made with different tokenizers or templates, and announce those that record nothing.

    Example:
        >>> code = MadeWith("code", {"name": "gpt2", "fingerprint": "ab12"}, None, lambda: 50_257, 0, None)
        >>> chat = MadeWith("chat", {"name": "qwen3", "fingerprint": "cd34"}, None, lambda: 151_669, 0, None)
        >>> refuse_mixed([code, chat], Tolerance())
        Traceback (most recent call last):
        megatron_packed_sft.errors.InvalidInputError: chat was made with another tokenizer, 'qwen3' (cd34), than code, \
'gpt2' (ab12), so the same ids mean other texts; prepare both with one tokenizer, or set allow_tokenizer_mismatch=True \
if you know that they agree
    """
    if not tolerance.tokenizer:
        recorded = [part for part in parts if part.tokenizer_identity]
        for part in recorded:
            if part.tokenizer_identity != recorded[0].tokenizer_identity:
                raise InvalidInputError(
                    f"{part.where} was made with another tokenizer, {_shown(part)}, than {recorded[0].where}, "
                    f"{_shown(recorded[0])}, so the same ids mean other texts; prepare both with one tokenizer, or set "
                    f"{tolerance.switch('tokenizer')} if you know that they agree"
                )
        bare = [part for part in parts if not part.tokenizer_identity]
        _check_bare(bare, recorded, tolerance)
    if not tolerance.template:
        rendered = [part for part in parts if part.template]
        for part in rendered:
            if part.template != rendered[0].template:
                raise InvalidInputError(
                    f"{part.where} was made with another chat template ({part.template}) than {rendered[0].where} "
                    f"({rendered[0].template}); prepare both with one template, or set {tolerance.switch('template')} "
                    "if the model is to learn both"
                )


def _check_bare(bare: Sequence[MadeWith], recorded: Sequence[MadeWith], tolerance: Tolerance) -> None:
    """Check parts that record no tokenizer by their ids against the others' vocabulary, and warn of what is unknown."""
    if not bare or len(bare) + len(recorded) < 2:
        return
    names = bare[0].where if len(bare) == 1 else f"{bare[0].where} and {len(bare) - 1} more"
    if not recorded:
        logger.warning(
            "%s record no tokenizer, so it cannot be checked that one tokenizer made all of them; make sure of it, "
            "since the same ids would mean other texts",
            names,
        )
        return
    known = recorded[0]
    vocab_size = known.vocab_size()
    for part in bare:
        if vocab_size is not None and (found := part.id_beyond(vocab_size)) is not None:
            raise InvalidInputError(
                f"{part.where} records no tokenizer and has the id {found}, but {known.where} was made with "
                f"{_shown(known)}, whose vocabulary ends at {vocab_size - 1}; prepare both with one tokenizer, or set "
                f"{tolerance.switch('tokenizer')} if you know that they agree"
            )
    logger.warning(
        "%s record%s no tokenizer; %s; make sure that it was that of %s, %s",
        names,
        "s" if len(bare) == 1 else "",
        "the ids could not be checked either" if vocab_size is None else f"the ids found are below its {vocab_size}",
        known.where,
        _shown(known),
    )


def refuse_other_tokenizer(
    tokenizer: Any, parts: Sequence[MadeWith], tolerance: Tolerance, *, name: str = "this one"
) -> None:
    """Refuse a tokenizer whose fingerprint differs from the data's, or else one that does not know all of its ids.

    Args:
        tokenizer: of any library; an integer (an EOS id) or None cannot be compared.
        parts: the data.
        tolerance: accepts any tokenizer if it says so.
        name: of the tokenizer, for messages.
    """
    if tolerance.tokenizer or tokenizer is None or isinstance(tokenizer, int):
        return
    own = getattr(tokenizer, "fingerprint", None)
    for part in parts:
        made_with = (part.tokenizer or {}).get("fingerprint")
        if isinstance(own, str) and isinstance(made_with, str):
            if own != made_with:
                raise InvalidInputError(
                    f"{part.where} was made with tokenizer {_shown(part)}, not with {name} ({own}); use that "
                    f"tokenizer, or set {tolerance.switch('tokenizer')} if you know that they agree"
                )
            continue
        vocab_size = num_ids_of(tokenizer)
        found = None if vocab_size is None else part.id_beyond(vocab_size)
        if vocab_size is not None and found is not None and not _has_id(tokenizer, found):
            raise InvalidInputError(
                f"{part.where} has the id {found}, but the vocabulary of this tokenizer ({type(tokenizer).__name__}) "
                f"ends at {vocab_size - 1}; use the tokenizer that made the data, or set "
                f"{tolerance.switch('tokenizer')} if you know that they agree"
            )


def _has_id(tokenizer: Any, wanted: int) -> bool:
    """Return whether an id beyond the number of ids is one after all: they may have gaps."""
    return hasattr(tokenizer, "get_vocab") and wanted <= max(tokenizer.get_vocab().values(), default=0)


def _shown(part: MadeWith) -> str:
    recorded = part.tokenizer or {}
    return f"{recorded.get('name')!r} ({recorded.get('fingerprint')})"


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
