"""Load a torch_dist checkpoint into a sharded state dict, without handing its pickles to whoever would run them.

Megatron-Core's own strategies unpickle `.metadata` as it is, and every object that the metadata declares, even where a
tensor is wanted. These do the same work with `TorchDistCheckpoint`, which `packed-sft export` uses, too. The rest
(common state, factories, checks that each shard is loaded once) stays Megatron-Core's.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from megatron_packed_sft.errors import PackedSFTError, ShardFileError
from megatron_packed_sft.megatron.weights.inert_pickle import Inert, load_inert, refusal
from megatron_packed_sft.megatron.weights.torch_dist import TorchDistCheckpoint, read_common

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

_EXTRA_STATE: Final = "_extra_state"
# Transformer Engine pickles the state of FP8 by itself: recipes, and tensors as torch pickles them outside torch.save.
_STORAGE: Final = "torch.storage._load_from_bytes"
_STATE_NAMES: Final = {
    "torch.storage": {"_load_from_bytes"},
    "torch._utils": {"_rebuild_tensor_v2"},
    "collections": {"OrderedDict"},
    "transformer_engine.common.recipe": {
        "DelayedScaling",
        "Float8BlockScaling",
        "Float8CurrentScaling",
        "Format",
        "MMParams",
        "MXFP8BlockScaling",
        "NVFP4BlockScaling",
        "QParams",
        "_FormatHelper",
        "_OverrideLinearPrecision",
    },
}


def load_checkpoint(tensors: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return the state dict with the values of a checkpoint; a collective call.

    Args:
        tensors: the sharded state dict; its tensors are overwritten.
        checkpoint: the folder.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import mapping

    try:
        loaded: dict[str, Any] = dist_checkpointing.load(
            tensors, str(checkpoint), sharded_strategy=_LoadSharded(), common_strategy=_LoadCommon()
        )
    except PackedSFTError:
        raise
    except (
        mapping.CheckpointingException,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        IndexError,
        RecursionError,
    ) as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise ShardFileError(f"{checkpoint} does not fit this run ({reason}); restore the checkpoint") from error
    return loaded


class _LoadSharded:
    """Reads the tensors and objects of this rank, as a strategy of Megatron-Core."""

    can_handle_sharded_objects = True

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        with TorchDistCheckpoint(Path(checkpoint_dir)) as checkpoint:
            return dict_list_map_inplace(
                lambda entry: (_load_tensor if isinstance(entry, ShardedTensor) else _load_object)(entry, checkpoint),
                sharded_state_dict,
            )

    def check_backend_compatibility(self, loaded_backend: object) -> None:
        pass  # TorchDistCheckpoint refuses others

    def check_version_compatibility(self, loaded_version: object) -> None:
        pass


class _LoadCommon:
    """Reads common.pt, as a strategy of Megatron-Core."""

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        return read_common(Path(checkpoint_dir))

    def check_backend_compatibility(self, loaded_backend: object) -> None:
        pass

    def check_version_compatibility(self, loaded_version: object) -> None:
        pass


def _load_tensor(entry: ShardedTensor, checkpoint: TorchDistCheckpoint) -> torch.Tensor:
    """Overwrite a tensor with its part of the stored one."""
    stored = checkpoint.tensors.get(entry.key)
    if stored is None:
        raise ShardFileError(f"{checkpoint.path} does not hold the tensor {entry.key}; restore the checkpoint")
    may_differ = entry.allow_shape_mismatch and len(stored.sizes) == len(entry.global_shape)
    if stored.sizes != tuple(entry.global_shape) and not may_differ:
        raise ShardFileError(
            f"{checkpoint.path}: {entry.key} has the sizes {list(stored.sizes)} instead of "
            f"{list(entry.global_shape)}; restore the checkpoint"
        )
    if entry.data is None:
        entry.init_data("cpu", init_fn=torch.zeros)
    target: torch.Tensor = entry.data.detach()
    begin, wanted = list(entry.global_offset), [*[1] * entry.prepend_axis_num, *entry.local_shape]
    # Of a tensor with other sizes, such as a vocabulary with other padding, what both have; the rest is zero.
    common = [max(0, min(size, end - at)) for at, size, end in zip(begin, wanted, stored.sizes, strict=True)]
    if common != wanted:
        target.zero_()
    if 0 not in common:
        new_axes = (None,) * entry.prepend_axis_num
        part = target[(*new_axes, *(slice(size) for size in common[entry.prepend_axis_num :]))]
        part.copy_(checkpoint.read_region(entry.key, begin, common))
    return target


def _load_object(entry: ShardedObject, checkpoint: TorchDistCheckpoint) -> Any:
    stored = checkpoint.read_object(entry.unique_key)
    if not isinstance(stored, list) or len(stored) != 1:
        raise ShardFileError(f"{checkpoint.path}: {entry.unique_key} is not what was saved; restore the checkpoint")
    if _EXTRA_STATE in entry.unique_key:
        refuse_harmful_state(stored[0], f"{checkpoint.path}: {entry.unique_key}")
    return stored[0]


def refuse_harmful_state(state: Any, where: str) -> None:
    """Refuse an extra state of Transformer Engine that would run something when it unpickles that.

    Args:
        state: a tensor of bytes, empty without FP8; or nothing.
        where: the object, for messages.
    """
    if not isinstance(state, torch.Tensor) or not state.numel():
        return

    def refuse_harmful_storage(call: Inert) -> Inert:
        if call.name == _STORAGE:
            data = call.arguments[0] if call.arguments and type(call.arguments[0]) is bytes else b""
            _refuse_harmful_storage(data)
        return call

    try:
        load_inert(state.cpu().numpy().tobytes(), _is_state, refuse_harmful_storage)
    except pickle.UnpicklingError as error:
        raise refusal(where, str(error)) from None


def _refuse_harmful_storage(data: bytes) -> None:
    """Refuse the bytes of a storage that torch would run: it unpickles them in a form from before archives."""
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # damage can make torch raise anything
        named = re.search(r"GLOBAL (\S+)", str(error))  # torch says it in many sentences
        raise pickle.UnpicklingError(
            f"it names {ascii(named[1])[1:-1]}"[:300] if named else "a storage is damaged"
        ) from None


def _is_state(module: str, name: str) -> bool:
    is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
    return is_dtype or name in _STATE_NAMES.get(module, ())
