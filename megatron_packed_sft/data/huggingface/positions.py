"""Where the documents of packed ids begin, found by their special tokens, and the position ids that follow."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from megatron_packed_sft.errors import InvalidInputError

Ids = TypeVar("Ids", torch.Tensor, npt.NDArray[Any])


def get_pos_ids_for_packed_sequence(input_ids: Ids, eos_id: int) -> Ids:
    """Return position ids that start over after each EOS token, for every sequence of a batch at once.

    Args:
        input_ids: [batch, length] or [length], a tensor on any device or an array.
        eos_id: the token that ends a document; it belongs to the document that it ends.

    Returns:
        int64, of the same kind, shape and device.

    Example:
        >>> get_pos_ids_for_packed_sequence(torch.tensor([[5, 6, 2, 7, 2, 8]]), eos_id=2).tolist()
        [[0, 1, 2, 0, 1, 0]]
    """
    if not isinstance(input_ids, torch.Tensor | np.ndarray) or input_ids.ndim not in (1, 2):
        shape = getattr(input_ids, "shape", "no shape")
        raise InvalidInputError(
            f"input_ids must be a tensor or array [batch, length] or [length], not {type(input_ids).__name__} ({shape})"
        )
    if isinstance(eos_id, bool) or not isinstance(eos_id, int | np.integer):
        raise InvalidInputError(f"eos_id must be a token id, not {eos_id!r}")
    if isinstance(input_ids, torch.Tensor):
        positions = torch.arange(input_ids.shape[-1], device=input_ids.device).expand(input_ids.shape)
        starts = torch.zeros_like(positions)
        starts[..., 1:] = torch.where(input_ids[..., :-1] == eos_id, positions[..., 1:], 0)
        return positions - (torch.cummax(starts, -1).values if starts.numel() else starts)
    places = np.broadcast_to(np.arange(input_ids.shape[-1]), input_ids.shape)
    begins = np.zeros(input_ids.shape, np.int64)
    begins[..., 1:] = np.where(input_ids[..., :-1] == eos_id, places[..., 1:], 0)
    return places - np.maximum.accumulate(begins, -1)


def find_document_starts(ids: npt.NDArray[Any], bos_id: int | None, eos_id: int | None) -> npt.NDArray[np.int64]:
    """Return where documents begin: at the first id, at each BOS, and after each EOS.

    Where BOS and EOS are one token, it ends a document.

    Example:
        >>> find_document_starts(np.array([1, 5, 2, 1, 6, 7, 2]), bos_id=1, eos_id=2).tolist()
        [0, 3]
    """
    is_start = np.zeros(ids.size, np.bool_)
    is_start[:1] = True
    if eos_id is not None:
        is_start[1:] |= ids[:-1] == eos_id
    if bos_id is not None and bos_id != eos_id:
        is_start |= ids == bos_id
    return np.flatnonzero(is_start)
