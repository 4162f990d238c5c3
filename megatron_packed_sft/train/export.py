"""`packed-sft export`: a run, a checkpoint or a Megatron checkpoint as a Hugging Face folder.

run ─▶ its newest checkpoint ─▶ weights, one at a time ─▶ *.safetensors
  └─▶ model_files ────────────▶ config.json, generation_config.json, tokenizer and chat template
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tqdm import tqdm

from megatron_packed_sft.disk.atomic import Staging
from megatron_packed_sft.errors import InvalidInputError, NoSpaceError, ShardFileError
from megatron_packed_sft.megatron.weights.checkpoint_weights import CheckpointWeights
from megatron_packed_sft.megatron.weights.export import total_bytes, write_weights
from megatron_packed_sft.megatron.weights.folder import CONFIG, read_config
from megatron_packed_sft.megatron.weights.shape import ModelShape
from megatron_packed_sft.megatron.weights.torch_dist import METADATA, TorchDistCheckpoint
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.train.checkpoint import STATE, CheckpointDirectory, TrainingState, refuse_damaged
from megatron_packed_sft.train.export_files import write_model_files
from megatron_packed_sft.train.pretrained import MODEL_FILES

DTYPES: Final = {
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16"), torch.float16),
    **dict.fromkeys(("fp32", "float32"), torch.float32),
    **dict.fromkeys(("fp64", "float64"), torch.float64),
}
DEFAULT_SHARD_SIZE: Final = "5GB"
TRACKER: Final = "latest_checkpointed_iteration.txt"  # of Megatron-LM and Megatron-Bridge
_CHECKPOINTS: Final = "checkpoints"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_ROOM: Final = 1 << 26  # for the small files


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was exported.

    Args:
        source: the checkpoint.
        target: the folder.
        family: of the model.
        dtype: of the weights.
        num_parameters, num_bytes, num_files: of the weights.
        notes: what the user should know.
    """

    source: str
    target: str
    family: str
    dtype: str
    num_parameters: int
    num_bytes: int
    num_files: int
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint to export.

    Args:
        checkpoint: its folder.
        state: what a run of ours recorded; None for a checkpoint of Megatron-LM or Megatron-Bridge.
        model_files: the folder with the small files of the model, if there is one.
    """

    checkpoint: Path
    state: TrainingState | None
    model_files: Path | None


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_size: str = DEFAULT_SHARD_SIZE,
    like: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> ExportReport:
    """Write a checkpoint as a Hugging Face folder, which appears when it is complete; no GPU is needed.

    Args:
        source: a run's directory (its newest checkpoint), a checkpoint, or a torch_dist checkpoint of Megatron.
        target: the folder to publish.
        dtype: bf16, fp16, fp32 or fp64; by default that of the weights the run started from, else as stored.
        max_shard_size: largest size of a weights file, such as 5GB.
        like: a Hugging Face folder of the same model, whose config.json and tokenizer are taken.
        tokenizer: a tokenizer's folder or file, instead of the one that the run kept.
        overwrite: replace the target if it exists.
        progress: show a progress bar.
    """
    found = find_source(source)
    shape, config, kept = _describe(found, like)
    wanted = _dtype(dtype, found.state)
    limit = parse_size(max_shard_size)
    with Staging(target, overwrite=overwrite) as staging, TorchDistCheckpoint(found.checkpoint) as checkpoint:
        if found.state is not None:
            refuse_damaged(found.checkpoint, found.state.checksums)
        weights = CheckpointWeights(checkpoint, shape)
        stored = weights.dtype if wanted is None else wanted
        needed = total_bytes(weights.weights(), stored)
        _refuse_full_disk(staging.path, needed)
        length = None if found.state is None else found.state.model.get("sequence_length")
        notes = write_model_files(
            staging.path, shape, config, kept=kept, tokenizer=tokenizer, dtype=stored, sequence_length=length
        )
        with tqdm(total=needed, unit="B", unit_scale=True, disable=not progress, desc="weights") as bar:
            written = write_weights(
                staging.path,
                weights.weights(),
                weights.read,
                dtype=stored,
                max_shard_bytes=limit,
                on_bytes=_advance(bar),
            )
        staging.publish()
    return ExportReport(
        source=str(found.checkpoint),
        target=str(staging.target),
        family=shape.family,
        dtype=str(stored).removeprefix("torch."),
        notes=notes,
        **written._asdict(),
    )


def find_source(path: str | os.PathLike[str]) -> Source:
    """Return the checkpoint that a path means: itself, or the newest one of a run or of a Megatron folder."""
    folder = local_path(path, "RUN_OR_CHECKPOINT")
    if (folder / STATE).is_file():
        return _own_checkpoint(folder)
    if (folder / _CHECKPOINTS).is_dir():
        newest = CheckpointDirectory(folder / _CHECKPOINTS).newest()
        if newest is None:
            raise InvalidInputError(f"{folder} has no checkpoint yet; wait until the run has saved one")
        return _own_checkpoint(newest)
    if (folder / TRACKER).is_file():
        return Source(checkpoint=_tracked(folder), state=None, model_files=None)
    if (folder / METADATA).is_file():
        return Source(checkpoint=folder, state=None, model_files=None)
    what = "does not exist" if not folder.exists() else "is neither a run, a checkpoint nor a torch_dist checkpoint"
    raise InvalidInputError(f"{folder} {what}; give a run's output directory, or a folder such as step_000100 in it")


def parse_size(text: str) -> int:
    """Return a size in bytes.

    Example:
        >>> parse_size("5GB"), parse_size("512MiB"), parse_size("1000")
        (5000000000, 536870912, 1000)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise InvalidInputError(f"--max-shard-size is {text!r}; write a size such as 5GB or 500MB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].upper()])


def _own_checkpoint(folder: Path) -> Source:
    kept = folder.parent.parent / MODEL_FILES
    return Source(checkpoint=folder, state=TrainingState.load(folder), model_files=kept if kept.is_dir() else None)


def _tracked(folder: Path) -> Path:
    """Return the checkpoint that Megatron's tracker file names."""
    name = (folder / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    if name != "release" and not name.isdecimal():
        raise ShardFileError(f"{folder / TRACKER} says {name[:20]!r}, not a number; give the checkpoint's own folder")
    checkpoint = folder / (name if name == "release" else f"iter_{int(name):07d}")
    if not (checkpoint / METADATA).is_file():
        raise ShardFileError(f"{checkpoint} is not a torch_dist checkpoint, and {TRACKER} names it; give another one")
    return checkpoint


def _describe(
    source: Source, like: str | os.PathLike[str] | None
) -> tuple[ModelShape, dict[str, Any] | None, Path | None]:
    """Return the model's shape, the config.json to start from, and the folder of the small files."""
    kept = local_path(like, "--like") if like is not None else source.model_files
    config, shape = None, None
    if kept is not None and (like is not None or (kept / CONFIG).is_file()):
        config, _, shape = read_config(kept, "--like")
    if source.state is None:
        if shape is None:
            raise InvalidInputError(
                f"{source.checkpoint} does not say which model it holds; add --like FOLDER, a Hugging Face folder of "
                "the same model"
            )
        return shape, config, kept
    own = ModelShape.from_saved(source.state.model)
    if shape is not None and shape != own:
        raise InvalidInputError(f"{kept} describes another model than {source.checkpoint} holds; use the right folder")
    return own, config, kept


def _dtype(asked: str | None, state: TrainingState | None) -> torch.dtype | None:
    if asked is None:
        recorded = {} if state is None else state.pretrained
        return DTYPES.get(recorded.get("dtype", ""))
    if asked not in DTYPES:
        raise InvalidInputError(f"--dtype is {asked!r}; choose from bf16, fp16, fp32, fp64")
    return DTYPES[asked]


def _refuse_full_disk(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed + _ROOM:
        raise NoSpaceError(
            f"{directory.parent} has {free:,} bytes free, and the model needs {needed + _ROOM:,}; free some space or "
            "choose another disk"
        )


def _advance(bar: Any) -> Callable[[int], None]:
    def advance(num_bytes: int) -> None:
        bar.update(num_bytes)

    return advance
