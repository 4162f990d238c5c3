"""What `packed-sft export` reads: a run's newest checkpoint, a checkpoint of Megatron, or a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_packed_sft.errors import InvalidInputError, ShardFileError
from megatron_packed_sft.megatron.weights.adapters import AdaptedWeights
from megatron_packed_sft.megatron.weights.checkpoint_weights import CheckpointWeights
from megatron_packed_sft.megatron.weights.folder import CONFIG, FolderWeights, HuggingFaceFolder, read_config
from megatron_packed_sft.megatron.weights.shape import ModelShape
from megatron_packed_sft.megatron.weights.torch_dist import METADATA, TorchDistCheckpoint
from megatron_packed_sft.megatron.weights.torch_dist_writer import RELEASE, TRACKER
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.paths import is_url, local_path
from megatron_packed_sft.train.checkpoint import STATE, CheckpointDirectory, TrainingState, refuse_damaged
from megatron_packed_sft.train.checkpoint_copies import CHECKPOINTS, fetched_run
from megatron_packed_sft.train.pretrained import MODEL_FILES, lora_settings


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model to export.

    Args:
        path: of the checkpoint or folder.
        shape: of the model.
        config: the config.json that it came with; None for a model trained from scratch.
        model_files: the folder with the small files of the model, if there is one.
        state: what a run of ours recorded; None for what others made.
        folder: the weights, if they are in a Hugging Face folder.
        name: what to call it, if not by its path.
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
        """Open the weights, after a check of every byte that a checkpoint of ours has."""
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
    """Yield the model that a path or the URL of a copy means; the copy is fetched into TMPDIR for so long."""
    if not is_url(path):
        yield find_source(path, like)
        return
    with fetched_run(os.fspath(path)) as (checkpoint, copy):
        yield replace(find_source(checkpoint, like), name=copy.shown)


def find_source(path: str | os.PathLike[str], like: str | os.PathLike[str] | None = None) -> Source:
    """Return the model that a path means.

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
    """Return a checkpoint of a run of ours."""
    state = TrainingState.load(checkpoint)
    kept: Path | None = checkpoint.parent.parent / MODEL_FILES
    if like is not None or not (kept and kept.is_dir()):
        kept = like
    shape = ModelShape.from_saved(state.model)
    config = None
    if kept is not None and (like is not None or (kept / CONFIG).is_file()):
        config, _, described = read_config(kept, "--like")
        if described != shape:
            raise InvalidInputError(f"{kept} describes another model than {checkpoint} holds; use the right folder")
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
