"""Helpers for models: masks of a batch's sequences, a check that a model keeps them apart, and the weighted loss.

    cu_seqlens  0 3 5 8      doc_ids  0 0 0 1 1 2 2 2      a position sees itself and the earlier ones of its own
                                                           sequence; padding is a sequence of its own

`doc_ids` come with the batch (`CollateOptions(return_doc_ids=True)`) or from its boundaries. They take 4 bytes a
position; the dense mask takes a byte for each pair, so use flex attention with `document_mask_mod` for long bins.

Models of transformers find the sequences of an `hf` batch in the position ids, which start over with each sequence,
unless they have a cache. Most architectures do; some ignore positions (OPT, BLOOM, Falcon), make their mask without
them (gpt-oss in transformers 5.22), or carry a state through the whole batch (Mamba and its hybrids). None of these
raises an error, so `require_separate_sequences` compares logits of the same sequences, packed and one by one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn.functional import cross_entropy

from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def doc_ids_from_boundaries(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """Return which sequence each position belongs to: int32 [B, length], or [length] for one-dimensional boundaries.

    Args:
        cu_seqlens: [B, K] or [K]: 0 and the ends of the sequences, rising to `length`; entries of -1 are ignored.
        length: positions per bin. Of data that is padded for context parallelism, `cu_seqlens_q_padded` reaches it.

    Example:
        >>> doc_ids_from_boundaries(torch.tensor([0, 3, 5, 8, 8]), 8).tolist()
        [0, 0, 0, 1, 1, 2, 2, 2]
    """
    # Ends of -1 would count as passed at every position.
    ends = torch.where(cu_seqlens < 0, length, cu_seqlens)[..., 1:].contiguous()
    if bool((ends[..., -1] != length).any()):
        raise InvalidInputError(
            f"the boundaries end at {int(ends[..., -1].min())}, not at the bin's {length} positions, so they do not "
            "cover its sequences; pass cu_seqlens_q_padded if the batch has it, and the length of its tokens"
        )
    positions = torch.arange(length, dtype=ends.dtype, device=ends.device)
    positions = positions.expand(*ends.shape[:-1], length).contiguous()
    return torch.searchsorted(ends, positions, right=True, out_int32=True)


def document_mask_mod(doc_ids: torch.Tensor) -> MaskMod:
    """Return a `mask_mod` for flex attention's `create_block_mask`: causal inside each sequence, nothing across.

    Args:
        doc_ids: [B, L], on the device where the attention runs.
    """

    def mask_mod(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (doc_ids[batch, query] == doc_ids[batch, key])

    return mask_mod


def visible_mask(doc_ids: torch.Tensor) -> torch.Tensor:
    """Return the dense mask, bool [B, 1, L, L]: True where a query may see a key, as torch's SDPA takes it.

    Megatron's own attention takes the opposite, `~visible_mask(doc_ids)`.

    Example:
        >>> visible_mask(torch.tensor([[0, 0, 1]]))[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    length = doc_ids.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=doc_ids.device).tril_()
    same = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
    return same.logical_and_(causal)


# The first release that finds sequences in the position ids with every attention, not only with FlashAttention.
OLDEST: Final = (4, 53, 1)
# Far above rounding (1e-6 in float32, 0.5% in bfloat16), far below the effect of another sequence.
_LIMITS: Final = {torch.float64: 1e-4, torch.float32: 1e-4}
_LIMIT_OF_HALF_PRECISION: Final = 0.05
_LENGTHS: Final = ((7, 1, 12), (5, 9))  # of the sequences of two bins


@functools.cache
def refuse_old_transformers() -> None:
    """Refuse to make batches if the installed transformers would let their sequences see each other."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:  # the batches are for something else
        return
    if is_too_old(version):
        raise MissingDependencyError(
            f"transformers {version} lets the sequences of an `hf` batch see each other; install "
            f"{'.'.join(map(str, OLDEST))} or later, or choose another contract"
        )


def is_too_old(version: str) -> bool:
    """Return whether a release of transformers is older than the first that keeps packed sequences apart.

    Example:
        >>> [is_too_old(version) for version in ("4.46.0", "4.53.0", "4.53.1", "5.0.0rc1", "5.22.2")]
        [True, True, False, False, False]
    """
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3]) < OLDEST


def require_separate_sequences(model: torch.nn.Module) -> None:
    """Refuse a model that lets the packed sequences of an `hf` batch see each other; call it before training.

    Compares the logits of a few short sequences in one batch with those of each sequence alone.

    Args:
        model: a causal language model of transformers, bare or wrapped, on the device where it is trained.
    """
    from megatron_packed_sft.data.batch.collate import collate  # it imports this module
    from megatron_packed_sft.data.batch.contracts import CollateOptions
    from megatron_packed_sft.data.batch.located_bins import locate_in_samples

    numbers = itertools.count(1)
    vocab_size = _vocab_size(model)
    samples = []
    for lengths in _LENGTHS:
        ids = [7919 * next(numbers) % vocab_size for _ in range(sum(lengths))]
        boundaries = [0, *itertools.accumulate(lengths)]
        samples.append({"input_ids": ids, "seq_boundaries": boundaries, "loss_mask": [0] * len(ids)})
    options = CollateOptions(contract="hf", eos_id=0, max_seq_length=64, pad_seq_length_to_mult=8)
    batch = collate([locate_in_samples(samples)], len(samples), options)
    difference, limit = _difference(model, batch)
    if not difference <= limit:  # NaN is refused, too
        config = getattr(model, "config", None)
        attention = getattr(config, "_attn_implementation", None) or "its own"
        raise InvalidInputError(
            f"{type(model).__name__} with {attention} attention lets packed sequences see each other: its logits are "
            f"{difference:.1%} off those of each sequence alone; load it with another attn_implementation "
            "(flash_attention_2 is given the boundaries), or train another model on packed data"
        )


def _difference(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[float, float]:
    """Return how far the logits of a batch are from those of its sequences one by one, and how far they may be."""
    device = next(model.parameters()).device
    on_device = {key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()}
    del on_device["labels"]
    with _evaluating(model), torch.no_grad():
        packed = model(**on_device).logits
        alone = torch.cat(
            [
                model(input_ids=on_device["input_ids"][:, start:end], use_cache=False).logits
                for start, end in itertools.pairwise(batch["cu_seq_lens_q"].tolist())
            ],
            dim=1,
        )
    limit = _LIMITS.get(packed.dtype, _LIMIT_OF_HALF_PRECISION)
    return float((packed - alone).float().norm() / alone.float().norm()), limit


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Switch dropout off, and restore the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _vocab_size(model: torch.nn.Module) -> int:
    # Token embeddings come before those of positions.
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            return module.num_embeddings
    raise InvalidInputError(f"{type(model).__name__} has no token embeddings; pass a language model of transformers")


def weighted_loss(
    logits: torch.Tensor, batch: Mapping[str, Any], denominator: float | torch.Tensor | None = None
) -> torch.Tensor:
    """Return the loss of an `hf` batch with weights: the sum of weight x loss, divided by the denominator.

    For `loss="per_token"` that is the weighted mean over trained tokens, for `per_conversation` the mean over
    conversations of each one's own.

    Args:
        logits: [1, L, vocabulary], of a causal language model for the batch's input_ids.
        batch: of contract `hf`, with `weighted_labels`, `loss_mask` and `loss_denominator`.
        denominator: divide by this instead of the batch's own: for a step of several batches, or on several ranks, the
            sum of `loss_denominator` over all of them.

    Example:
        >>> batch = {"weighted_labels": torch.tensor([[-100, 1, 0]]), "loss_mask": torch.tensor([[0.0, 0.5, 1.5]]),
        ...          "loss_denominator": torch.tensor([2.0], dtype=torch.float64)}
        >>> round(weighted_loss(torch.zeros(1, 3, 2), batch).item(), 4)  # log(2), whatever the weights
        0.6931
    """
    if "weighted_labels" not in batch:
        raise InvalidInputError(
            "the batch has no weighted_labels, so it has no weights; take the loss that the model returns"
        )
    # Position t - 1 predicts the token at t. Only what counts is cast to float32, not all logits.
    weights = batch["loss_mask"][:, 1:]
    counts = weights > 0
    predictions = logits[:, :-1][counts]
    wide = torch.promote_types(predictions.dtype, torch.float32)
    losses = cross_entropy(predictions.to(wide), batch["weighted_labels"][:, 1:][counts], reduction="none")
    total = torch.sum(losses * weights[counts])
    own = batch["loss_denominator"].sum() if denominator is None else torch.as_tensor(denominator)
    return total / torch.where(own > 0, own, 1).to(total)  # without a trained token the loss is 0
