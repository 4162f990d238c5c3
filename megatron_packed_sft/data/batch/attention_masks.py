"""Masks for trainers without varlen attention: which positions of a bin may see which.

    cu_seqlens  0 3 5 8      doc_ids  0 0 0 1 1 2 2 2      a position sees itself and the earlier ones of its own
                                                           sequence; padding is a sequence of its own

`doc_ids` come with the batch (`CollateOptions(return_doc_ids=True)`) or from its boundaries. They take 4 bytes a
position; the dense mask takes a byte for each pair, so use flex attention with `document_mask_mod` for long bins.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_packed_sft.errors import InvalidInputError

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
            "say where its sequences lie; pass cu_seqlens_q_padded if the batch has it, and the length of its tokens"
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
