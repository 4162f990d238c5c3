"""Checkpoints of a run: whole or not there at all, the newest found by looking, old ones removed.

output/checkpoints/
  .step_000040.staging-.../    being written: ignored by everybody, removed by the next writer of that step
  step_000020/                 Megatron-Core's torch_dist files, and training_state.json; appears by one rename
  latest                       the newest one's name, for scripts; written last
"""

from __future__ import annotations

import os
import queue
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_packed_sft.disk import json_document
from megatron_packed_sft.disk.atomic import Staging, os_errors, replace_file, write_file
from megatron_packed_sft.errors import InvalidInputError, StorageIOError, UnsupportedFormatError
from megatron_packed_sft.train.checkpoint_files import file_sizes, make_durable, refuse_missing
from megatron_packed_sft.train.config import ModelConfig

STATE: Final = "training_state.json"
LATEST: Final = "latest"
FORMAT: Final = "packed_sft_training_state"
VERSION: Final = 1
_FULL_DISK_BYTES: Final = 1 << 20
_STEP_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything of a run that is not a tensor.

    Args:
        step: optimizer steps done.
        data: the loader's state: consumed samples, fingerprint, seed.
        scheduler: the learning-rate scheduler's state.
        model: the model's shape, to tell another one before its tensors are read.
        files: name -> bytes of the checkpoint's other files, to tell when one is missing or cut.
        checksums: name -> checksum of each, to tell when one was damaged.
    """

    step: int
    data: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    model: Mapping[str, Any]
    files: Mapping[str, int] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """As JSON that carries its own checksum."""
        return json_document.render({"format": FORMAT, "version": VERSION, **asdict(self)})

    @classmethod
    def load(cls, checkpoint: Path) -> TrainingState:
        """Read the state of a checkpoint, and see that its files are all there.

        Example:
            >>> TrainingState.load(Path("runs/sft/checkpoints/step_000020")).step  # doctest: +SKIP
            20
        """
        file = checkpoint / STATE
        if not file.is_file():
            raise InvalidInputError(
                f"{checkpoint} is not a checkpoint of this recipe: it has no {STATE}; give resume a directory like "
                "output/checkpoints/step_000100"
            )
        with os_errors("read", file):
            data = file.read_bytes()
        document = json_document.parse(data, str(file))
        fields = json_document.Fields(document, str(file))
        if fields.text("format") != FORMAT or fields.integer("version", 1, 1 << 30) != VERSION:
            raise UnsupportedFormatError(
                f"{file}: format {document['format']!r} version {document['version']!r} is not {FORMAT} {VERSION}; "
                "update megatron_packed_sft"
            )
        names = ("data", "scheduler", "model", "files", "checksums")
        mappings = {name: fields.optional_object(name) or {} for name in names}
        refuse_missing(checkpoint, mappings["files"])
        return cls(step=fields.integer("step", 0, 1 << 62), **mappings)


class CheckpointDirectory:
    """The checkpoints of a run.

    Args:
        path: output/checkpoints.
        keep: how many to keep, the newest ones; 0 keeps all.

    Example:
        >>> CheckpointDirectory(Path("runs/sft/checkpoints")).newest()  # doctest: +SKIP
        PosixPath('runs/sft/checkpoints/step_000020')
    """

    def __init__(self, path: Path, *, keep: int = 0) -> None:
        self.path = path
        self._keep = keep

    def newest(self) -> Path | None:
        """The newest whole checkpoint; a checkpoint that has its final name is whole."""
        return max(self._all(), default=(0, None))[1]

    def save(self, tensors: Mapping[str, Any], state: TrainingState) -> Path:
        """Write a checkpoint; a collective call.

        Args:
            tensors: the sharded state dict of model and optimizer.
            state: the rest; rank 0's is written.
        """
        from megatron.core import dist_checkpointing

        _gather_results_in_process()
        target = self.path / f"step_{state.step:06d}"
        num_ranks = torch.distributed.get_world_size()
        is_first = torch.distributed.get_rank() == 0
        staging = Staging(target, overwrite=True) if is_first else None
        folder = [str(staging.path) if staging is not None else ""]
        torch.distributed.broadcast_object_list(folder, src=0)
        try:
            with _write_errors(target):
                dist_checkpointing.save(tensors, folder[0])
            torch.distributed.barrier()
            sizes = file_sizes(Path(folder[0]))
            checksums = _gathered(make_durable(Path(folder[0]), list(sizes)[torch.distributed.get_rank() :: num_ranks]))
            if staging is not None:
                whole = replace(state, files=sizes, checksums=checksums)
                write_file(staging.path / STATE, whole.to_bytes())
                staging.publish()
                replace_file(self.path / LATEST, f"{target.name}\n".encode())
                self._remove_old()
        finally:
            if staging is not None:
                staging.discard()
        torch.distributed.barrier()
        return target

    def _all(self) -> list[tuple[int, Path]]:
        if not self.path.is_dir():
            return []
        with os_errors("list", self.path):
            found = [(_STEP_NAME.fullmatch(entry.name), entry) for entry in self.path.iterdir()]
        return sorted((int(name.group(1)), entry) for name, entry in found if name and entry.is_dir())

    def _remove_old(self) -> None:
        if self._keep:
            for _, checkpoint in self._all()[: -self._keep]:
                shutil.rmtree(checkpoint, ignore_errors=True)


def find_checkpoint(resume: str, directory: CheckpointDirectory) -> Path | None:
    """The checkpoint that `resume` means, or None to begin anew.

    Args:
        resume: `auto`, `never`, or the path of a checkpoint.
        directory: the run's own checkpoints.

    Example:
        >>> find_checkpoint("auto", CheckpointDirectory(Path("/no/run/checkpoints"))) is None
        True
    """
    newest = directory.newest()
    if resume == "auto":
        return newest
    if resume != "never":
        path = Path(os.path.abspath(resume))
        if not path.is_dir():
            raise InvalidInputError(
                f"resume={resume} is not a directory; give auto, never, or a checkpoint such as "
                f"{directory.path / 'step_000100'}"
            )
        if newest is not None and newest.resolve() != path.resolve():
            raise InvalidInputError(
                f"resume={resume}, but {directory.path} already has checkpoints up to {newest.name}, and the next "
                "resume=auto would go on from there; choose another output, or remove the later ones"
            )
        return path
    if newest is not None:
        raise InvalidInputError(
            f"resume=never, but {directory.path} already has checkpoints up to {newest.name}; choose another output, "
            "or resume=auto to go on from there"
        )
    return None


def model_shape(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """What must be the same for a checkpoint's tensors to fit.

    Example:
        >>> model_shape(ModelConfig(num_layers=2), 32000)["vocab_size"]
        32000
    """
    return {**asdict(model), "vocab_size": vocab_size}


def refuse_other_model(checkpoint: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of a model with another shape, naming the keys.

    Example:
        >>> refuse_other_model(Path("step_000020"), {"num_layers": 2}, {"num_layers": 4})
        Traceback (most recent call last):
        megatron_packed_sft.errors.InvalidInputError: step_000020 is of another model: model.num_layers was 2 and is \
4 now; resume with what it was, or choose another output
    """
    differing = [
        f"model.{name} was {saved.get(name)} and is {value} now"
        for name, value in current.items()
        if saved.get(name) != value
    ]
    if differing:
        raise InvalidInputError(
            f"{checkpoint} is of another model: {', '.join(differing)}; resume with what it was, or choose another "
            "output"
        )


def _gather_results_in_process() -> None:
    """Keep Megatron-Core from starting a helper process that gathers what was written.

    It needs one only to save in the background. torchrun passes SIGTERM on to all processes of a rank, so the helper
    would be gone just when the run wants to save because of that signal.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


@contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    """One sentence for what goes wrong while Megatron-Core writes; its own says little, and nothing of a full disk."""
    try:
        with os_errors("write", target):
            yield
    except CheckpointException as error:  # of all ranks, with the reasons on the first
        reasons = "; ".join(str(reason) for reason, _ in error.failures.values()) or "rank 0 knows why"
        # torch's writer fills a disk to the last page, and then says "unexpected pos".
        if shutil.disk_usage(target.parent).free < _FULL_DISK_BYTES:
            reasons = "its disk is full"
        raise StorageIOError(
            f"cannot write {target}: {reasons}; make room or choose another output, then run the same command again"
        ) from None


def _gathered(own: dict[str, str]) -> dict[str, str]:
    """The entries of all ranks; a collective call."""
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, own)
    return {name: value for part in parts for name, value in sorted(part.items())}
