"""Do models of transformers keep the sequences of an `hf` batch apart? Most do; those that do not never say so.

A model without a cache finds the sequences in the position ids, which start over with each. That is done by what most
architectures share, and some do without: positions that are not looked at (OPT, BLOOM, Falcon), a mask made without
them (gpt-oss in transformers 5.22), or a state that runs through the batch (Mamba and hybrids with it). A batch cannot
know its model, so `require_separate_sequences` tries: the same sequences packed and one by one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError

# The first release that finds sequences in the position ids for every attention, and not only for FlashAttention.
OLDEST: Final = (4, 53, 1)
# Far above rounding (1e-6 in float32, half a per cent in bfloat16), far below what a foreign sequence does.
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

    Two short forward passes tell: the logits of a few sequences in one batch must be those of each sequence alone.

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
    """Switch dropout off, and leave every module as it was."""
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
