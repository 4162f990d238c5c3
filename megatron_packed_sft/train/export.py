"""`packed-sft export`: a trained model out of a checkpoint, for transformers or for Megatron.

run ─▶ its newest checkpoint ─▶ weights, one at a time ─▶ *.safetensors, or a torch_dist checkpoint
  └─▶ model_files ────────────▶ config.json, generation_config.json, tokenizer and chat template
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from megatron_packed_sft.errors import InvalidInputError, NoSpaceError, ShardFileError
from megatron_packed_sft.megatron.checkpoint_writer import (
    RELEASE,
    TRACKER,
    common_state,
    sharded_weights,
    write_descriptions,
    write_tensors,
)
from megatron_packed_sft.megatron.lora import AdaptedWeights, write_adapter
from megatron_packed_sft.megatron.weights.folder import CONFIG, FolderWeights, HuggingFaceFolder, read_config
from megatron_packed_sft.megatron.weights.layout import ModelShape
from megatron_packed_sft.megatron.weights.safetensors_writer import WrittenWeights, total_bytes, write_weights
from megatron_packed_sft.megatron.weights.torch_dist import METADATA, CheckpointWeights, TorchDistCheckpoint
from megatron_packed_sft.remote.node_cache import parse_size
from megatron_packed_sft.support.atomic import Staging, fsync_directory, os_errors
from megatron_packed_sft.support.paths import is_url, local_path
from megatron_packed_sft.support.progress import Progress
from megatron_packed_sft.train.checkpoint import STATE, CheckpointDirectory, TrainingState, make_durable, refuse_damaged
from megatron_packed_sft.train.checkpoint_copies import CHECKPOINTS, fetched_run
from megatron_packed_sft.train.pretrained import MODEL_FILES, lora_settings, write_model_files

DTYPES: Final = {
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16"), torch.float16),
    **dict.fromkeys(("fp32", "float32"), torch.float32),
    **dict.fromkeys(("fp64", "float64"), torch.float64),
}
FORMATS: Final = ("huggingface", "megatron", "adapter")
Weights = CheckpointWeights | AdaptedWeights | FolderWeights
DEFAULT_SHARD_SIZE: Final = "5GB"
_ROOM: Final = 1 << 26  # for the small files


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """The result of an export.

    Args:
        source: the checkpoint.
        target: the folder.
        family: of the model.
        dtype: of the weights.
        num_parameters, num_bytes, num_files: of the weights.
        notes: lines for the user.
    """

    source: str
    target: str
    family: str
    dtype: str
    num_parameters: int
    num_bytes: int
    num_files: int
    notes: list[str]


def export_model(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str = "huggingface",
    dtype: str | None = None,
    max_shard_size: str = DEFAULT_SHARD_SIZE,
    like: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> ExportReport:
    """Write a model as a Hugging Face folder or a Megatron checkpoint, which appears when it is complete.

    Args:
        source: a run (its newest checkpoint), a checkpoint, the URL of a copy of either, a torch_dist checkpoint of
            Megatron, or a Hugging Face folder.
        target: the folder to publish.
        to: huggingface, with adapters merged in; megatron for the torch_dist checkpoint that Megatron-LM and
            Megatron-Bridge start from; adapter for the adapters alone, as `peft` loads them.
        dtype: bf16, fp16, fp32 or fp64; by default that of the weights the run started from, else as stored.
        max_shard_size: largest size of a safetensors file, such as 5GB.
        like: a Hugging Face folder of the same model, whose config.json and tokenizer are taken.
        tokenizer: a tokenizer's folder or file, instead of the one that the run kept.
        overwrite: replace the target if it exists.
        progress: show a progress bar.
    """
    if to not in FORMATS:
        raise InvalidInputError(f"--to is {to!r}; choose from {', '.join(FORMATS)}")
    local_path(target, "OUTPUT")  # refuses a URL, before a download
    options = _Options(to, dtype, parse_size(max_shard_size, "--max-shard-size"), tokenizer, overwrite, progress)
    _dtype(dtype)
    with open_source(source, like) as found:
        return _export(found, target, options)


class _Options(NamedTuple):
    """The settings of `export_model`, with the size as a number."""

    to: str
    dtype: str | None
    max_shard_bytes: int
    tokenizer: str | os.PathLike[str] | None
    overwrite: bool
    progress: bool


def _export(found: Source, target: str | os.PathLike[str], options: _Options) -> ExportReport:
    recorded = {} if found.state is None else found.state.pretrained
    wanted = _dtype(recorded.get("dtype") if options.dtype is None else options.dtype)
    with Staging(target, overwrite=options.overwrite) as staging, found.open() as weights:
        stored = weights.dtype if wanted is None else wanted
        needed = total_bytes(weights.weights(), stored)
        _refuse_full_disk(staging.path, needed)
        notes: list[str] = []
        with Progress("weights", needed, "B", quiet=not options.progress) as bar:
            if options.to == "megatron":
                written = _write_megatron(staging.path, staging.target, weights, stored, bar.update)
            elif options.to == "adapter":
                written = _write_adapter(staging.path, found, weights, stored, bar.update)
            else:
                notes = _write_small_files(staging.path, found, options.tokenizer, stored)
                written = write_weights(
                    staging.path,
                    weights.weights(),
                    weights.read,
                    dtype=stored,
                    max_shard_bytes=options.max_shard_bytes,
                    on_bytes=bar.update,
                )
        if options.dtype is None and stored.itemsize < weights.dtype.itemsize:
            trained, kept = (str(one).removeprefix("torch.") for one in (weights.dtype, stored))
            notes = [
                *notes,
                f"trained in {trained}, rounded to {kept} like the weights that the run started from; a short run may "
                "lose much of what it learned; add --dtype fp32 to keep it",
            ]
        staging.publish()
    return ExportReport(
        source=found.name or str(found.path),
        target=str(staging.target),
        family=found.shape.family,
        dtype=str(stored).removeprefix("torch."),
        notes=notes,
        **written._asdict(),
    )


def _write_small_files(
    directory: Path, source: Source, tokenizer: str | os.PathLike[str] | None, dtype: torch.dtype
) -> list[str]:
    return write_model_files(
        directory,
        source.shape,
        source.config,
        kept=source.model_files,
        tokenizer=tokenizer,
        dtype=dtype,
        sequence_length=None if source.state is None else source.state.model.get("sequence_length"),
    )


def _write_adapter(
    directory: Path, source: Source, weights: Weights, dtype: torch.dtype, on_bytes: Callable[[int], object]
) -> WrittenWeights:
    if not isinstance(weights, AdaptedWeights):
        raise InvalidInputError(
            f"{source.path} has no adapters, because all weights were trained; leave out --to adapter"
        )
    base_model = None if source.state is None else source.state.pretrained.get("path")
    return write_adapter(directory, weights, dtype=dtype, base_model=base_model, on_bytes=on_bytes)


def _write_megatron(
    directory: Path,
    target: Path,
    weights: Weights,
    dtype: torch.dtype,
    on_bytes: Callable[[int], object],
) -> WrittenWeights:
    """Write a torch_dist checkpoint with Megatron-Core, which needs all weights in memory."""
    from megatron_packed_sft.megatron.backend import choose_backend, start_distributed, stop_distributed

    release = directory / RELEASE
    release.mkdir()
    num_layers = weights.shape.num_layers
    start_distributed(choose_backend())
    try:
        tensors = sharded_weights(
            weights.weights(), weights.read, num_layers=num_layers, dtype=dtype, on_bytes=on_bytes
        )
        write_tensors({"model": tensors, **common_state(weights.shape)}, release, target)
    finally:
        stop_distributed()
    names = [path.name for path in release.iterdir()]
    make_durable(release, names)
    write_descriptions(directory, release, weights.shape)
    fsync_directory(release)
    num_bytes = total_bytes(weights.weights(), dtype)
    return WrittenWeights(num_bytes // dtype.itemsize, num_bytes, sum(name.endswith(".distcp") for name in names))


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise InvalidInputError(f"--dtype is {name!r}; choose from bf16, fp16, fp32, fp64")
    return None if name is None else DTYPES[name]


def _refuse_full_disk(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed + _ROOM:
        raise NoSpaceError(
            f"{directory.parent} has {free:,} bytes free, and the model needs {needed + _ROOM:,}; free some space or "
            "choose another disk"
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model to export.

    Args:
        path: of the checkpoint or folder.
        shape: of the model.
        config: the config.json that it came with; None for a model trained from scratch.
        model_files: the folder with the small files of the model, if there is one.
        state: the state of a checkpoint of this recipe; None for other checkpoints.
        folder: the weights, if they are in a Hugging Face folder.
        name: the URL that it was fetched from.
    """

    path: Path
    shape: ModelShape
    config: dict[str, Any] | None
    model_files: Path | None
    state: TrainingState | None = None
    folder: HuggingFaceFolder | None = None
    name: str | None = None

    @contextmanager
    def open(self) -> Iterator[CheckpointWeights | AdaptedWeights | FolderWeights]:
        """Open the weights; the checksums of our own checkpoints are compared first."""
        if self.folder is not None:
            yield FolderWeights(self.folder)
            return
        with TorchDistCheckpoint(self.path) as checkpoint:
            if self.state is not None:
                refuse_damaged(self.path, self.state.checksums)
            weights = CheckpointWeights(checkpoint, self.shape)
            settings = None if self.state is None else lora_settings(self.state.peft)
            yield weights if settings is None else AdaptedWeights(weights, checkpoint, settings)


@contextmanager
def open_source(path: str | os.PathLike[str], like: str | os.PathLike[str] | None = None) -> Iterator[Source]:
    """Yield the model at a path, or at the URL of a copy, which is fetched into TMPDIR for the duration."""
    if not is_url(path):
        yield find_source(path, like)
        return
    with fetched_run(os.fspath(path)) as (checkpoint, copy):
        yield replace(find_source(checkpoint, like), name=copy.shown)


def find_source(path: str | os.PathLike[str], like: str | os.PathLike[str] | None = None) -> Source:
    """Return the model at a path.

    Args:
        path: a run (its newest checkpoint), a checkpoint, a torch_dist checkpoint of Megatron, or a Hugging Face
            folder.
        like: a Hugging Face folder of the same model.
    """
    folder = local_path(path, "RUN_OR_CHECKPOINT")
    described = None if like is None else local_path(like, "--like")
    if (folder / STATE).is_file():
        return _own(folder, described)
    if (folder / CHECKPOINTS).is_dir():
        newest = CheckpointDirectory(folder / CHECKPOINTS).newest()
        if newest is None:
            raise InvalidInputError(f"{folder} has no checkpoint yet; wait until the run has saved one")
        return _own(newest, described)
    if (folder / TRACKER).is_file():
        return _foreign(_tracked(folder), described)
    if (folder / METADATA).is_file():
        return _foreign(folder, described)
    if (folder / CONFIG).is_file():
        opened = HuggingFaceFolder.open(folder, "RUN_OR_CHECKPOINT")
        config = dict(opened.config)
        return Source(path=folder, shape=opened.shape, config=config, model_files=folder, folder=opened)
    what = "does not exist" if not folder.exists() else "is neither a run, a checkpoint nor a Hugging Face folder"
    raise InvalidInputError(f"{folder} {what}; give a run's output directory, or a folder such as step_000100 in it")


def _own(checkpoint: Path, like: Path | None) -> Source:
    """Return a checkpoint of this recipe."""
    state = TrainingState.load(checkpoint)
    kept: Path | None = checkpoint.parent.parent / MODEL_FILES
    if like is not None or not (kept and kept.is_dir()):
        kept = like
    shape = ModelShape.from_saved(state.model)
    config = None
    if kept is not None and (like is not None or (kept / CONFIG).is_file()):
        config, _, described = read_config(kept, "--like")
        if described != shape:
            raise InvalidInputError(f"{kept} is not the model of {checkpoint}; give the folder of that model")
    return Source(path=checkpoint, shape=shape, config=config, model_files=kept, state=state)


def _foreign(checkpoint: Path, like: Path | None) -> Source:
    """Return a checkpoint of Megatron-LM or Megatron-Bridge."""
    if like is None:
        raise InvalidInputError(
            f"{checkpoint} does not say which model it holds; add --like FOLDER, a Hugging Face folder of the same "
            "model"
        )
    config, _, shape = read_config(like, "--like")
    return Source(path=checkpoint, shape=shape, config=config, model_files=like)


def _tracked(folder: Path) -> Path:
    """Return the checkpoint that Megatron's tracker file names."""
    with os_errors("read", folder / TRACKER):
        name = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    if name != RELEASE and not name.isdecimal():
        raise ShardFileError(f"{folder / TRACKER} says {name[:20]!r}, not a number; give the checkpoint's own folder")
    checkpoint = folder / (name if name == RELEASE else f"iter_{int(name):07d}")
    if not (checkpoint / METADATA).is_file():
        raise ShardFileError(f"{checkpoint} is not a torch_dist checkpoint, and {TRACKER} names it; give another one")
    return checkpoint
