"""Read torch_dist checkpoints without running anything that is stored in them.

    .metadata            a pickle: tensor -> sizes and chunks, chunk -> file, offset, length
    __0_0.distcp, ...    the chunks and other objects, each as torch.save writes it
    common.pt            what all ranks share, as torch.save writes it

torch and Megatron-Core do the reading, and both would run a hostile pickle. So `.metadata` is read first by an
unpickler that knows only the names on a list, and while a checkpoint is loaded every `torch.load` of this process
accepts plain data only.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, Self, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_packed_sft.errors import PackedSFTError, ShardFileError, UnsupportedFormatError
from megatron_packed_sft.megatron.weights.families import shape_family
from megatron_packed_sft.megatron.weights.layout import EMBEDDING, LAYERS, OUTPUT, ModelShape, Weight
from megatron_packed_sft.support.atomic import os_errors

METADATA: Final = ".metadata"
COMMON: Final = "common.pt"
_BACKEND: Final = "metadata.json"
_FORCE_PLAIN_DATA: Final = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_EXTRA_STATE: Final = "_extra_state"
_MODEL_PARTS: Final = ("decoder.", "embedding.", "output_layer.")
_MEGATRON: Final = "megatron.core.dist_checkpointing.strategies.torch"
# What torch.distributed.checkpoint and Megatron-Core write into .metadata, now and in earlier releases.
_METADATA_NAMES: Final = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    _MEGATRON: {"MCoreMetadata", "MCoreSavePlan"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}
# Subclasses that add a field; importing Megatron-Core for them would take ten seconds.
_STAND_INS: Final = {
    "MCoreMetadata": ("torch.distributed.checkpoint.metadata", "Metadata"),
    "MCoreSavePlan": ("torch.distributed.checkpoint.planner", "SavePlan"),
}
# What Transformer Engine pickles as the state of FP8: recipes and tensors.
_FP8_NAMES: Final = {
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


class TorchDistCheckpoint:
    """The tensors of a checkpoint, whatever parallel layout wrote it; read one at a time, without Megatron-Core.

    Its files stay open, so that it can be read even if a run removes it meanwhile.

    Args:
        path: the folder with .metadata.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        metadata = read_metadata(path)
        with _errors_in_one_sentence(str(path / METADATA)):
            entries = metadata.state_dict_metadata.items()
            self.tensors = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
            self._files = _OpenFiles(path, {place.relative_path for place in metadata.storage_data.values()})
        self._reader = FileSystemReader(path)
        self._reader.fs = self._files
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Return a tensor, or one entry of its first axis.

        Args:
            name: of the tensor.
            index: which layer, when all layers are stacked in one tensor.
        """
        with _errors_in_one_sentence(f"{self.path}: {name}"):
            stored = self.tensors[name]
            begin, sizes = [0] * len(stored.size), list(stored.size)
            if index is not None:
                begin[0], sizes[0] = index, 1
            region = ChunkStorageMetadata(offsets=torch.Size(begin), sizes=torch.Size(sizes))
            items = create_read_items_for_chunk_list(name, stored, [region])
            if sum(math.prod(item.lengths) for item in items) != math.prod(sizes):
                raise ShardFileError(f"{self.path} holds only a part of {name}; restore the checkpoint")
            result = torch.empty(sizes, dtype=stored.properties.dtype)
            self._reader.read_data(LoadPlan(items), _Destination(result))
        return result if index is None else result[0]


class _Destination(DefaultLoadPlanner):
    """Tells torch's reader where each chunk goes in one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        places = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._tensor[tuple(slice(start, start + length) for start, length in places)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass  # it is a view of the destination


class _OpenFiles(FileSystem):
    """The files of a checkpoint for torch's reader, opened once."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        with ExitStack() as opened, os_errors("read", folder):
            self._files = {folder / name: opened.enter_context(open(folder / name, "rb")) for name in names}
            self._closing = opened.pop_all()

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        yield self._files[Path(path)]

    def close(self) -> None:
        self._closing.close()


class CheckpointWeights:
    """The weights of a model in a checkpoint, found by name and checked against the model's shape.

    Megatron-Core stacks the layers of a model in one tensor (`decoder.layers.mlp.linear_fc2.weight`, sizes
    [layers, ...]), or numbers them (`decoder.layers.7.mlp.linear_fc2.weight`) when they may differ; both are read.

    Args:
        checkpoint: the checkpoint.
        shape: of the model that it should hold; a checkpoint of another model is refused.
    """

    def __init__(self, checkpoint: TorchDistCheckpoint, shape: ModelShape) -> None:
        self._checkpoint = checkpoint
        self.shape = shape
        self._prefix = self._find_prefix()
        known = set()
        for weight in self.weights():
            name, _ = self._place(weight)
            self._check(name, weight)
            known.add(name)
        if shape.tie_embeddings:
            known.add(f"{self._prefix}{OUTPUT}")
        self._refuse_unexpected(known)
        self.dtype: torch.dtype = checkpoint.tensors[f"{self._prefix}{EMBEDDING}"].properties.dtype

    def weights(self) -> Iterator[Weight]:
        """Yield the weights of the model, from input to output."""
        return shape_family(self.shape).weights(self.shape)

    def read(self, weight: Weight) -> torch.Tensor:
        """Return a whole weight, without the padding of the vocabulary."""
        return self._checkpoint.read(*self._place(weight)).narrow(weight.axis, 0, weight.length)

    def _find_prefix(self) -> str:
        """Return the prefix of the model's tensors: empty, or `model.` for some writers."""
        found = [name for name in self._checkpoint.tensors if name.endswith(EMBEDDING) and "optimizer" not in name]
        if len(found) != 1:
            raise UnsupportedFormatError(
                f"{self._checkpoint.path} has {len(found)} tensors that end in {EMBEDDING}; give the checkpoint of one "
                "GPT model"
            )
        return found[0].removesuffix(EMBEDDING)

    def _place(self, weight: Weight) -> tuple[str, int | None]:
        """Return the name of the tensor that holds a weight, and its index in a stack of layers."""
        if weight.layer is None:
            return f"{self._prefix}{weight.name}", None
        numbered = f"{self._prefix}{LAYERS}{weight.layer}.{weight.name}"
        if numbered in self._checkpoint.tensors:
            return numbered, None
        return f"{self._prefix}{LAYERS}{weight.name}", weight.layer

    def _check(self, name: str, weight: Weight) -> None:
        if name not in self._checkpoint.tensors:
            raise ShardFileError(
                f"{self._checkpoint.path} has no tensor {name}, which a {self.shape.family} model of this shape needs; "
                "give the checkpoint of that model"
            )
        found = tuple(self._checkpoint.tensors[name].size)
        wanted = weight.sizes
        if name != f"{self._prefix}{weight.name}" and len(found) > len(wanted):
            wanted = (self.shape.num_layers, *wanted)
        if weight.is_padded and found[0] > wanted[0]:
            wanted = (found[0], *wanted[1:])
        if found != wanted:
            raise ShardFileError(
                f"{self._checkpoint.path}: {name} has the sizes {list(found)}, but the model has {list(wanted)}; give "
                "the checkpoint of that model"
            )

    def _refuse_unexpected(self, known: set[str]) -> None:
        for name in self._checkpoint.tensors:
            inner = name.removeprefix(self._prefix)
            is_of_model = name.startswith(self._prefix) and inner.startswith(_MODEL_PARTS) and _EXTRA_STATE not in inner
            if is_of_model and name not in known:
                raise UnsupportedFormatError(
                    f"{self._checkpoint.path} has the tensor {name}, which a {self.shape.family} model does not have; "
                    "it cannot be exported as one"
                )


def load_checkpoint(tensors: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return a sharded state dict with the values of a checkpoint, loaded by Megatron-Core; a collective call.

    Args:
        tensors: the sharded state dict; its tensors are overwritten.
        checkpoint: the folder.
    """
    from megatron.core import dist_checkpointing

    read_metadata(checkpoint)
    with _errors_in_one_sentence(str(checkpoint)), plain_data_only(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Megatron-Core's use of torch
        loaded: dict[str, Any] = dist_checkpointing.load(tensors, str(checkpoint))
    for name, state in loaded.get("model", {}).items():
        if name.endswith(_EXTRA_STATE):
            refuse_harmful_state(state, f"{checkpoint}: {name}")
    return loaded


@contextmanager
def plain_data_only() -> Iterator[None]:
    """Make every `torch.load` of this process accept plain data only, even where its caller asks for more."""
    before = os.environ.get(_FORCE_PLAIN_DATA)
    os.environ[_FORCE_PLAIN_DATA] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCE_PLAIN_DATA]
        else:
            os.environ[_FORCE_PLAIN_DATA] = before


def refuse_unreadable(checkpoint: Path) -> None:
    """Refuse a checkpoint whose `.metadata` or `common.pt` is damaged or would run something; quick."""
    read_metadata(checkpoint)
    with _errors_in_one_sentence(str(checkpoint / COMMON)):
        torch.load(checkpoint / COMMON, map_location="cpu", weights_only=True)


def read_metadata(checkpoint: Path) -> Metadata:
    """Return what the `.metadata` of a checkpoint says, or refuse it: nothing in it is run.

    Args:
        checkpoint: the folder.
    """
    _refuse_other_backend(checkpoint)
    file = checkpoint / METADATA
    if not file.is_file():
        raise ShardFileError(f"{file} is missing; give the folder of a torch_dist checkpoint")
    with _errors_in_one_sentence(str(file)):
        metadata: Metadata = _unpickle(file.read_bytes(), _METADATA_NAMES, Metadata)
        files = sorted({place.relative_path for place in metadata.storage_data.values()})
    for name in files:
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise ShardFileError(f"{file} names {ascii(name)[:200]}, outside the checkpoint; restore the checkpoint")
        if not _is_file(checkpoint / name):
            raise ShardFileError(f"{checkpoint / ascii(name)[1:-1]} is missing; restore the checkpoint")
    return metadata


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or with a zero byte
        return False


def refuse_harmful_state(state: Any, where: str) -> None:
    """Refuse an extra state that would run something when Transformer Engine unpickles it.

    Args:
        state: a tensor of bytes, empty without FP8; or None.
        where: the object, for messages.
    """
    if isinstance(state, torch.Tensor) and state.numel():
        with _errors_in_one_sentence(where), plain_data_only():
            _unpickle(state.cpu().numpy().tobytes(), _FP8_NAMES)


def _unpickle(data: bytes, names: Mapping[str, set[str]], kind: type = object) -> Any:
    """Return what a pickle describes, which may import the names on a list and torch's dtypes, and nothing else.

    Python's own implementation goes first: unlike the one in C it reserves no memory for numbers in a damaged file, and
    it can refuse to change classes. The one in C follows, because Megatron-Core will use that, too: if a file is made
    to mean something else to it, it is refused here.
    """
    found = _CarefulUnpickler(data, names).load()
    if not isinstance(found, kind):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
    return _FastUnpickler(data, names).load()


def _find_allowed(names: Mapping[str, set[str]], module: str, name: str) -> tuple[str, str]:
    """Return the module and the name to import, or refuse them."""
    is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
    if not is_dtype and name not in names.get(module, ()):
        raise pickle.UnpicklingError(f"it names {module}.{name}")
    return _STAND_INS.get(name, (module, name))


class _FastUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, names: Mapping[str, set[str]]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(*_find_allowed(self._names, module, name))


class _CarefulUnpickler(pickle._Unpickler):
    def __init__(self, data: bytes, names: Mapping[str, set[str]]) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(*_find_allowed(self._names, module, name))

    def _set_state(self) -> None:
        stack: list[Any] = vars(self)["stack"]
        if isinstance(stack[-2], type | types.FunctionType):
            raise pickle.UnpicklingError("it changes a class or a function")
        pickle._Unpickler.dispatch[pickle.BUILD[0]](cast(Any, self))

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _set_state}


@contextmanager
def _errors_in_one_sentence(where: str) -> Iterator[None]:
    """Say in one sentence what torch or an unpickler found wrong; damage can make them raise anything."""
    try:
        with os_errors("read", where):
            yield
    except PackedSFTError:
        raise
    except CheckpointException as error:  # of all ranks
        raise _unreadable(where, next(iter(error.failures.values()))[0]) from error
    except Exception as error:
        raise _unreadable(where, error) from error


def _unreadable(where: str, error: BaseException) -> ShardFileError:
    text = str(error)
    named = re.search(r"it names (\S+)|GLOBAL (\S+)", text)  # torch mentions it in a long explanation
    if named is None or not isinstance(error, pickle.UnpicklingError):
        reason = text.partition("\n")[0][:200] or type(error).__name__
        return ShardFileError(f"{where} cannot be read ({reason}); restore the checkpoint")
    name = ascii((named[1] or named[2]).rstrip(","))[1:-1][:200]
    return ShardFileError(
        f"{where} cannot be read: it names {name}, which no checkpoint needs; it was damaged, or made to run "
        "something, so restore the checkpoint from a source you trust"
    )


def _refuse_other_backend(checkpoint: Path) -> None:
    """Refuse a checkpoint in another format than torch_dist."""
    file = checkpoint / _BACKEND
    if not file.is_file():
        return
    try:
        described = json.loads(file.read_bytes())
        backends = described["sharded_backend"], described.get("common_backend", "torch")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise ShardFileError(f"{file} cannot be read; restore the checkpoint") from None
    if backends != ("torch_dist", "torch"):
        raise UnsupportedFormatError(
            f"{file}: the checkpoint was written by {backends[0]!r}, and only torch_dist can be read; save it again "
            "with --ckpt-format torch_dist"
        )
