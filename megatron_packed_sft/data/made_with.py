"""What data was made with, and what may be trained on together: one tokenizer, one chat template.

    a list or blend     code: tokenizer ab12, template 77aa  ┐
                        chat: tokenizer ab12, template 77aa  ├─ agree ─▶ one dataset
                        bare .npy: records nothing           ┘  its ids must lie in the others' vocabulary

Ids of another tokenizer are other words, and nothing downstream would notice: losses only get worse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_packed_sft.errors import InvalidInputError

logger = logging.getLogger(__name__)


class MadeWith(NamedTuple):
    """What one part of the data was made with, as far as anybody recorded."""

    where: str  # for messages
    tokenizer: Mapping[str, Any] | None
    template: str | None  # the fingerprint of the chat template
    vocab_bound: Callable[[], int | None]  # all ids are below it; None where nobody can tell without reading all

    @property
    def tokenizer_identity(self) -> str | None:
        """What tells the tokenizer from others: its fingerprint, or at least its name."""
        recorded = self.tokenizer or {}
        return recorded.get("fingerprint") or recorded.get("name") or None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Which differences are accepted.

    Args:
        tokenizer: other tokenizers.
        template: other chat templates.
        spelling: how the caller's users set one of these, for messages.
    """

    tokenizer: bool = False
    template: bool = False
    spelling: str = "{}=True"

    def switch(self, name: str) -> str:
        """Return what to write to accept such a difference.

        Example:
            >>> Tolerance(spelling="data.{}=true").switch("tokenizer")
            'data.allow_tokenizer_mismatch=true'
        """
        return self.spelling.format(f"allow_{name}_mismatch")


def refuse_mixed(parts: Sequence[MadeWith], tolerance: Tolerance) -> None:
    """Refuse parts that were made with different tokenizers or templates, and announce those that record nothing.

    Example:
        >>> code = MadeWith("code", {"name": "gpt2", "fingerprint": "ab12"}, None, lambda: 50_257)
        >>> chat = MadeWith("chat", {"name": "qwen3", "fingerprint": "cd34"}, None, lambda: 151_669)
        >>> refuse_mixed([code, chat], Tolerance())
        Traceback (most recent call last):
        megatron_packed_sft.errors.InvalidInputError: chat was made with another tokenizer, 'qwen3' (cd34), than code, \
'gpt2' (ab12), so the same ids are other texts; prepare both with one tokenizer, or set allow_tokenizer_mismatch=True \
if you know that they agree
    """
    if not tolerance.tokenizer:
        recorded = [part for part in parts if part.tokenizer_identity]
        for part in recorded:
            if part.tokenizer_identity != recorded[0].tokenizer_identity:
                raise InvalidInputError(
                    f"{part.where} was made with another tokenizer, {_shown(part)}, than {recorded[0].where}, "
                    f"{_shown(recorded[0])}, so the same ids are other texts; prepare both with one tokenizer, or set "
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
    """Compare the ids of parts that record no tokenizer with the vocabulary of the others, and say what is unknown."""
    if not bare or len(bare) + len(recorded) < 2:
        return
    names = bare[0].where if len(bare) == 1 else f"{bare[0].where} and {len(bare) - 1} more"
    if not recorded:
        logger.warning(
            "%s record no tokenizer, so nobody can tell whether one made all of them; make sure of it, since the same "
            "ids would be other texts",
            names,
        )
        return
    known = recorded[0]
    vocab_size = known.vocab_bound()
    are_checked = vocab_size is not None
    for part in bare:
        bound = part.vocab_bound()
        if vocab_size is not None and bound is not None and bound > vocab_size:
            raise InvalidInputError(
                f"{part.where} records no tokenizer and has ids up to {bound - 1}, but {known.where} was made with "
                f"{_shown(known)}, which has {vocab_size}; prepare both with one tokenizer, or set "
                f"{tolerance.switch('tokenizer')} if you know that they agree"
            )
        are_checked &= bound is not None
    logger.warning(
        "%s record%s no tokenizer; %s; make sure that it was that of %s, %s",
        names,
        "s" if len(bare) == 1 else "",
        f"the ids do lie in a vocabulary of {vocab_size}" if are_checked else "the ids could not be checked either",
        known.where,
        _shown(known),
    )


def refuse_other_tokenizer(tokenizer: Any, parts: Sequence[MadeWith], tolerance: Tolerance) -> None:
    """Refuse a tokenizer whose fingerprint differs from the data's, or else one that does not know all of its ids.

    Args:
        tokenizer: of any library; an integer (an EOS id) or None cannot be compared.
        parts: the data.
        tolerance: accepts any tokenizer if it says so.
    """
    if tolerance.tokenizer or tokenizer is None or isinstance(tokenizer, int):
        return
    own = getattr(tokenizer, "fingerprint", None)
    for part in parts:
        made_with = (part.tokenizer or {}).get("fingerprint")
        if isinstance(own, str) and isinstance(made_with, str):
            if own != made_with:
                raise InvalidInputError(
                    f"{part.where} was made with tokenizer {_shown(part)}, not with this one ({own}); use that "
                    f"tokenizer, or set {tolerance.switch('tokenizer')} if you know that they agree"
                )
            continue
        bound = part.vocab_bound() if _vocab_size(tokenizer) is not None else None
        if bound is not None and (vocab_size := _vocab_size(tokenizer, bound)) is not None and bound > vocab_size:
            raise InvalidInputError(
                f"{part.where} has a vocabulary of {bound}, but this tokenizer ({type(tokenizer).__name__}) only "
                f"{vocab_size} ids; use the tokenizer that made the data, or set {tolerance.switch('tokenizer')} if "
                "you know that they agree"
            )


def _vocab_size(tokenizer: Any, wanted: int = 0) -> int | None:
    """Return one more than the largest id of a tokenizer of any library, as far as it says; exact from `wanted` on."""
    sizes = [getattr(tokenizer, name, None) for name in ("vocab_size", "padded_vocab_size")]
    if hasattr(tokenizer, "__len__"):  # of Hugging Face; unlike vocab_size, it counts the added tokens
        sizes.append(len(tokenizer))
    known = max((size for size in sizes if type(size) is int), default=None)
    if known is not None and known < wanted and hasattr(tokenizer, "get_vocab"):
        return max(known, 1 + max(tokenizer.get_vocab().values(), default=0))  # ids may have gaps
    return known


def _shown(part: MadeWith) -> str:
    recorded = part.tokenizer or {}
    return f"{recorded.get('name')!r} ({recorded.get('fingerprint')})"
