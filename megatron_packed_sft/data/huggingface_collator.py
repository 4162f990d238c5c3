"""`DataCollatorForCausalLM`: blocks in, a batch for models of transformers out.

    block      input_ids  1 5 2 1 6 7 2     document_starts  0 3
    batch      labels     . 5 2 . 6 7 2     position_ids     0 1 2 0 1 2 3     doc_ids  0 0 0 1 1 1 1

Labels are not shifted, because models of transformers shift them. The first token of a document has no label, because
only the document before could predict it. The kernel of all other batches makes the arrays (contract `hf`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from megatron_packed_sft.data.batch.collate import collate
from megatron_packed_sft.data.batch.collate_kernel import IGNORED_LABEL
from megatron_packed_sft.data.batch.contracts import Batch, CollateOptions
from megatron_packed_sft.data.batch.located_bins import locate_in_samples
from megatron_packed_sft.data.batch.model_helpers import document_mask_mod, visible_mask
from megatron_packed_sft.data.huggingface_blocks import special_ids
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.options import check_count
from megatron_packed_sft.storage.bins import as_int_array

_logger = logging.getLogger(__name__)
_PADDINGS: dict[Any, str] = {
    "longest": "longest",
    True: "longest",
    "max_length": "max_length",
    "do_not_pad": "do_not_pad",
    False: "do_not_pad",
}
_MASKS = (None, "4d", "flex")

Ids = TypeVar("Ids", torch.Tensor, npt.NDArray[Any])


class DataCollatorForCausalLM:
    """Make batches [B, L] of the blocks that `block_tokenize_fn` made, for `model(**batch)` and for Trainer.

    Documents are found by the column `document_starts`, which is exact. A Trainer removes it unless it is told
    `remove_unused_columns=False`; then they are found by the tokenizer's BOS and EOS, and a warning says so once.

    Args:
        tokenizer: the one that made the blocks; its padding id, or else its EOS id, fills up the batch.
        packed_sequences: keep the documents of a block apart; False makes one document of each block, with a
            two-dimensional attention mask instead of position ids, and refuses blocks that hold several.
        padding: longest (or True), max_length, or do_not_pad (or False), which wants blocks of one length.
        max_length: the most tokens that a block may have.
        pad_to_multiple_of: round the padded length up.
        attention_mask: None leaves the mask to transformers, which finds the documents in the position ids, for every
            attention and with sliding windows. `4d` adds a mask to be added to the scores, for sdpa and eager; `flex`
            adds a BlockMask for flex attention. Both are taken as they are, so a sliding window is ignored.
        mask_dtype: of the `4d` mask: float32, or float64 for a model of that type, whose attention in torch misreads
            float32. torch.bool takes a quarter of the room, for sdpa only: eager attention would add it to the scores.
        return_doc_ids: also return which document each position belongs to.
        device: where `flex` makes its mask: that of the model.

    Example:
        >>> from types import SimpleNamespace
        >>> tokenizer = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=0)
        >>> collator = DataCollatorForCausalLM(tokenizer, pad_to_multiple_of=4)
        >>> batch = collator([{"input_ids": [1, 5, 2, 1, 6, 2], "document_starts": [0, 3]}])
        >>> batch["labels"].tolist(), batch["position_ids"].tolist()
        ([[-100, 5, 2, -100, 6, 2, -100, -100]], [[0, 1, 2, 0, 1, 2, 0, 1]])
    """

    def __init__(
        self,
        tokenizer: Any,
        packed_sequences: bool = True,
        padding: str | bool = "longest",
        max_length: int | None = None,
        *,
        pad_to_multiple_of: int | None = None,
        attention_mask: str | None = None,
        mask_dtype: torch.dtype = torch.float32,
        return_doc_ids: bool = True,
        device: str | torch.device = "cpu",
    ) -> None:
        if padding not in _PADDINGS:
            raise InvalidInputError(f"padding is {padding!r}; choose from longest, max_length, do_not_pad")
        if attention_mask not in _MASKS:
            raise InvalidInputError(f"attention_mask is {attention_mask!r}; choose from None, '4d', 'flex'")
        for name, value in (("max_length", max_length), ("pad_to_multiple_of", pad_to_multiple_of)):
            if value is not None:
                check_count(name, value)
        self.padding = _PADDINGS[padding]
        if self.padding == "max_length" and max_length is None:
            raise InvalidInputError("padding='max_length' needs to know the length; pass max_length")
        if max_length is not None and pad_to_multiple_of is not None and max_length % pad_to_multiple_of:
            raise InvalidInputError(
                f"max_length {max_length} is not a multiple of pad_to_multiple_of {pad_to_multiple_of}"
            )
        if not (mask_dtype == torch.bool or mask_dtype.is_floating_point):
            raise InvalidInputError(f"mask_dtype is {mask_dtype}; choose a floating-point type or torch.bool")
        if attention_mask is not None and not packed_sequences:
            raise InvalidInputError(f"attention_mask={attention_mask!r} needs packed_sequences=True")
        self.bos_id, self.eos_id, pad_id = special_ids(tokenizer)
        self.pad_id = self.eos_id if pad_id is None else pad_id
        if self.pad_id is None:
            raise InvalidInputError(
                f"the tokenizer ({type(tokenizer).__name__}) has no padding and no EOS token to fill up a batch with; "
                "set tokenizer.pad_token"
            )
        self.packed_sequences, self.max_length = packed_sequences, max_length
        self.pad_to_multiple_of, self.attention_mask = pad_to_multiple_of, attention_mask
        self.mask_dtype, self.return_doc_ids, self.device = mask_dtype, return_doc_ids, device
        self._has_warned = False

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Batch:
        """Make a batch of blocks: mappings with `input_ids`, and `document_starts`, `overlaps` or `labels`."""
        samples = [self._sample(feature, f"block {number} of the batch") for number, feature in enumerate(features)]
        if not samples:
            raise InvalidInputError("a batch of no blocks was asked for; check the dataset and its sampler")
        lengths = [len(sample["input_ids"]) for sample in samples]
        batch = collate([locate_in_samples(samples)], len(samples), self._options(lengths))
        if not self.packed_sequences:
            return {
                "input_ids": batch["input_ids"],
                "attention_mask": (torch.arange(batch["input_ids"].shape[1]) < torch.tensor(lengths)[:, None]).long(),
                "labels": batch["labels"],
            }
        if self.attention_mask is not None:
            batch["attention_mask"] = self._mask(batch["doc_ids"])
        if not self.return_doc_ids:
            del batch["doc_ids"]
        return batch

    def _options(self, lengths: list[int]) -> CollateOptions:
        longest = max(lengths)
        if self.max_length is not None and longest > self.max_length:
            raise InvalidInputError(
                f"block {lengths.index(longest)} of the batch has {longest} tokens, more than max_length "
                f"{self.max_length}; make the blocks with that max_length, or raise it here"
            )
        if self.padding == "do_not_pad" and min(lengths) < longest:
            raise InvalidInputError(
                f"the blocks of a batch have {min(lengths)} to {longest} tokens, which padding={self.padding!r} cannot "
                "put together; set padding='longest', or a batch size of 1"
            )
        multiple = 1 if self.pad_to_multiple_of is None or self.padding == "do_not_pad" else self.pad_to_multiple_of
        assert self.pad_id is not None
        return CollateOptions(
            contract="hf",
            eos_id=self.pad_id,
            max_seq_length=self.max_length or -(-longest // multiple) * multiple,
            pad_to_max_length=self.padding == "max_length",
            pad_seq_length_to_mult=multiple,
            pad_each_bin=True,
            return_doc_ids=True,
        )

    def _sample(self, feature: Mapping[str, Any], name: str) -> dict[str, Any]:
        if "input_ids" not in feature:
            raise InvalidInputError(f"{name} has no input_ids, but {', '.join(feature) or 'nothing'}")
        ids = as_int_array(feature["input_ids"], f"input_ids of {name}")
        if ids.size == 0:
            raise InvalidInputError(f"{name} has no tokens; filter empty blocks out first")
        starts = self._document_starts(feature, ids, name)
        mask = np.ones(ids.size, np.uint8)  # 1 where the prediction of the next token counts
        if (labels := feature.get("labels")) is not None:
            mask[:-1] = _trained(as_int_array(labels, f"labels of {name}"), ids, name)[1:]
        if (overlaps := feature.get("overlaps")) is not None:
            given = as_int_array(overlaps, f"overlaps of {name}")
            if given.size != starts.size:
                raise InvalidInputError(f"{name} has {given.size} overlaps for {starts.size} document_starts")
            for start, overlap in zip(starts.tolist(), given.tolist(), strict=True):
                mask[start : start + max(overlap - 1, 0)] = 0
        return {"input_ids": ids, "seq_boundaries": [*starts.tolist(), ids.size], "loss_mask": mask}

    def _document_starts(self, feature: Mapping[str, Any], ids: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
        given = feature.get("document_starts")
        if not self.packed_sequences:
            if given is not None and len(given) > 1:
                raise InvalidInputError(
                    f"{name} holds {len(given)} documents, which packed_sequences=False would let see each other; set "
                    "packed_sequences=True"
                )
            return np.zeros(1, np.int64)
        if given is not None:
            return as_int_array(given, f"document_starts of {name}")
        if self.bos_id is None and self.eos_id is None:
            raise InvalidInputError(
                f"{name} has no document_starts, and the tokenizer has no BOS and no EOS to find documents by; keep "
                "that column (Trainer needs remove_unused_columns=False)"
            )
        if not self._has_warned:
            self._has_warned = True
            one_token = ", which are one token, taken for EOS" if self.bos_id == self.eos_id else ""
            _logger.warning(
                "blocks have no document_starts, so documents are found by BOS and EOS%s; keep that column to be exact "
                "(Trainer needs remove_unused_columns=False)",
                one_token,
            )
        return find_document_starts(ids, self.bos_id, self.eos_id)

    def _mask(self, doc_ids: torch.Tensor) -> Any:
        if self.attention_mask == "4d":
            visible = visible_mask(doc_ids)
            if self.mask_dtype == torch.bool:
                return visible
            lowest = torch.finfo(self.mask_dtype).min
            return torch.zeros(visible.shape, dtype=self.mask_dtype).masked_fill_(~visible, lowest)
        if torch.utils.data.get_worker_info() is not None:
            raise InvalidInputError(
                "a BlockMask cannot leave a worker of a DataLoader; set num_workers=0, or attention_mask=None, from "
                "which transformers makes the same mask"
            )
        from torch.nn.attention.flex_attention import create_block_mask

        num_blocks, length = doc_ids.shape
        mask_mod = document_mask_mod(doc_ids.to(self.device))
        return create_block_mask(mask_mod, num_blocks, None, length, length, device=str(self.device))


def _trained(labels: npt.NDArray[Any], ids: npt.NDArray[Any], name: str) -> npt.NDArray[np.bool_]:
    """Return which tokens have a label of their own; a label that is another id is refused."""
    if labels.shape != ids.shape:
        raise InvalidInputError(f"{name} has {labels.size} labels for {ids.size} input_ids; give one for each")
    is_trained: npt.NDArray[np.bool_] = labels != IGNORED_LABEL
    if (labels[is_trained] != ids[is_trained]).any():
        raise InvalidInputError(
            f"the labels of {name} are other ids than its input_ids; labels are the ids themselves, or {IGNORED_LABEL} "
            "(models shift them)"
        )
    return is_trained


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
