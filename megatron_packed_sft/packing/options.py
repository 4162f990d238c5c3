"""The options of `pack`, checked one by one and together."""

from __future__ import annotations

import numpy as np

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.bin_order import Steps

# Tables with one entry per possible length are made; beyond this they would cost more than the data.
LARGEST_PACK_SIZE = 1 << 22


def check_choices(**choices: tuple[str, tuple[str, ...]]) -> None:
    """Refuse a value that is not among the known ones: name=(given, known).

    Example:
        >>> check_choices(measure=("tokens", ("tokens", "inputs")))
    """
    for name, (given, known) in choices.items():
        if given not in known:
            raise InvalidInputError(f"{name} {given!r} is unknown; choose from {', '.join(known)}")


def check_counts(*, least: int = 1, optional: bool = False, **counts: int | None) -> None:
    """Refuse what is no whole number from `least` on (or None, if that is allowed).

    Example:
        >>> check_counts(pack_size=4096)
    """
    for name, given in counts.items():
        if given is None and optional:
            continue
        if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < least:
            raise InvalidInputError(f"{name} must be a whole number from {least} on, not {given!r}")


def check_combinations(
    *,
    limit: int,
    pack_size: int,
    stride: int,
    min_len: int,
    max_len: int | None,
    seed: int,
    steps: Steps | None,
    order_window: int | None,
    whole_batches: bool,
    has_trained_tokens: bool,
) -> None:
    """Refuse options that contradict each other; `limit` is the longest length that fits into a bin."""
    if pack_size > LARGEST_PACK_SIZE:
        raise InvalidInputError(f"pack_size is at most {LARGEST_PACK_SIZE:,}, not {pack_size:,}")
    if seed >= 2**64:
        raise InvalidInputError(f"seed is at most 2**64 - 1, not {seed}")
    if stride >= limit:
        raise InvalidInputError(f"stride {stride} must be below the {limit} tokens of a piece, or splitting never ends")
    if min_len > limit or (max_len is not None and max_len < min_len):
        raise InvalidInputError(
            f"min_len {min_len} leaves nothing to pack: at most {max_len or limit} tokens are allowed"
        )
    balance = "none" if steps is None else steps.balance
    if order_window is not None and balance != "none":
        raise InvalidInputError(
            f"order_window keeps the data's order and steps.balance={balance!r} shuffles it; choose one"
        )
    if whole_batches and steps is None:
        raise InvalidInputError("whole_batches needs to know the batch: pass steps={'global_batch': ...}")
    if balance == "trained_tokens" and not has_trained_tokens:
        raise InvalidInputError("steps.balance='trained_tokens' needs trained_tokens: pass the count for each sequence")
