"""The checkpoints of a run: written whole or not at all, verified by size and checksum, old ones removed.

output/checkpoints/
  .step_000040.staging-.../    being written; readers ignore it, and the next run removes it if its writer died
  step_000020/                 Megatron-Core's torch_dist files and training_state.json; appears by one rename
  latest                       the newest checkpoint's name, for scripts; written last
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from megatron_packed_sft.errors import InvalidInputError, ShardFileError, UnsupportedFormatError
from megatron_packed_sft.megatron.checkpoint_writer import write_tensors
from megatron_packed_sft.megatron.weights.layout import ModelShape
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.atomic import Staging, os_errors, remove_leftovers, replace_file, write_file
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, new_hasher
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.train.config import TrainConfig

STATE: Final = "training_state.json"
LATEST: Final = "latest"
FORMAT: Final = "packed_sft_training_state"
VERSION: Final = 1
MAX_STATE_BYTES: Final = 64 << 20
_READ_BYTES: Final = 1 << 22
STEP_NAME: Final = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The content of a checkpoint besides its tensors.

    Args:
        step: optimizer steps done.
        data: the loader's state: consumed samples, fingerprint, seed.
        scheduler: the learning-rate scheduler's state.
        model: the model's shape, to recognise a different model before its tensors are read.
        pretrained: the weights that the run started from: path, checksum, family; empty for a run from scratch.
        peft: the adapters that were trained: rank, alpha, target modules; empty if all weights were.
        files: name -> bytes of the checkpoint's other files.
        checksums: name -> checksum of each of them.
    """

    step: int
    data: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    model: Mapping[str, Any]
    pretrained: Mapping[str, Any] = field(default_factory=dict)
    peft: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the state as JSON that carries its own checksum."""
        return json_document.render({"format": FORMAT, "version": VERSION, **asdict(self)})

    @classmethod
    def load(cls, checkpoint: Path) -> TrainingState:
        """Return the state of a checkpoint, after a check that its files are all there."""
        file = checkpoint / STATE
        if not file.is_file():
            raise InvalidInputError(
                f"{checkpoint} is not a checkpoint of this recipe: it has no {STATE}; set resume to a directory such "
                "as output/checkpoints/step_000100"
            )
        with os_errors("read", file), open(file, "rb") as opened:
            data = opened.read(MAX_STATE_BYTES)
        state = cls.parse(data, str(file))
        _refuse_missing(checkpoint, state.files)
        return state

    @classmethod
    def parse(cls, data: bytes, where: str) -> TrainingState:
        """Return the state that a training_state.json describes.

        Args:
            data: the whole file.
            where: its path or URL, for messages.
        """
        document = json_document.parse(data, where)
        fields = json_document.Fields(document, where)
        if fields.text("format") != FORMAT or fields.integer("version", 1, 1 << 30) != VERSION:
            raise UnsupportedFormatError(
                f"{where}: format {document['format']!r} version {document['version']!r} is not {FORMAT} {VERSION}; "
                "update megatron_packed_sft"
            )
        names = ("data", "scheduler", "model", "pretrained", "peft", "files", "checksums")
        state = cls(
            step=fields.integer("step", 0, 1 << 62), **{name: fields.optional_object(name) or {} for name in names}
        )
        for name, size in state.files.items():
            if name == STATE or type(size) is not int or size < 0:
                raise fields.error("files", f"has {name[:80]!r} with {str(size)[:20]}, which cannot be")
        if unknown := sorted(state.checksums.keys() - state.files.keys()):
            raise ShardFileError(f"{where} has a checksum of {unknown[0]}, which is not one of its files; restore it")
        return state


class CheckpointDirectory:
    """The checkpoints of a run.

    Args:
        path: output/checkpoints.
        keep: how many of the newest to keep; 0 keeps all.
    """

    def __init__(self, path: Path, *, keep: int = 0) -> None:
        self.path = path
        self._keep = keep
        self.held: set[str] = set()  # names of those that are being copied and must stay

    def newest(self) -> Path | None:
        """Return the newest checkpoint; every one with its final name is complete."""
        return max(self._all(), default=(0, None))[1]

    def remove_leftovers(self) -> list[str]:
        """Remove checkpoints that runs on this host were killed while writing, and return their names."""
        if not self.path.is_dir():
            return []
        with os_errors("clean", self.path):
            return remove_leftovers(self.path)

    def save(self, tensors: Mapping[str, Any], state: TrainingState) -> Path:
        """Write a checkpoint; a collective call.

        Args:
            tensors: the sharded state dict of model and optimizer.
            state: everything else; rank 0's is written.
        """
        target = self.path / f"step_{state.step:06d}"
        num_ranks = torch.distributed.get_world_size()
        is_first = torch.distributed.get_rank() == 0
        staging = Staging(target, overwrite=True) if is_first else None
        folder = [str(staging.path) if staging is not None else ""]
        torch.distributed.broadcast_object_list(folder, src=0)
        try:
            write_tensors(tensors, Path(folder[0]), target)
            torch.distributed.barrier()
            sizes = _file_sizes(Path(folder[0]))
            checksums = _gathered(make_durable(Path(folder[0]), list(sizes)[torch.distributed.get_rank() :: num_ranks]))
            if staging is not None:
                complete = replace(state, files=sizes, checksums=checksums)
                write_file(staging.path / STATE, complete.to_bytes())
                staging.publish()
                replace_file(self.path / LATEST, f"{target.name}\n".encode())
                self.remove_old()
        finally:
            if staging is not None:
                staging.discard()
        torch.distributed.barrier()
        return target

    def _all(self) -> list[tuple[int, Path]]:
        if not self.path.is_dir():
            return []
        with os_errors("list", self.path):
            found = [(STEP_NAME.fullmatch(entry.name), entry) for entry in self.path.iterdir()]
        return sorted((int(name.group(1)), entry) for name, entry in found if name and entry.is_dir())

    def remove_old(self) -> None:
        """Remove all but the newest."""
        if self._keep:
            for _, checkpoint in self._all()[: -self._keep]:
                if checkpoint.name not in self.held:
                    shutil.rmtree(checkpoint, ignore_errors=True)


def find_checkpoint(resume: str, directory: CheckpointDirectory) -> Path | None:
    """Return the checkpoint to resume from, or None to start from scratch.

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
        path = local_path(resume, "resume")
        if not path.is_dir():
            raise InvalidInputError(
                f"resume={resume} is not a directory; set it to auto, never, or a checkpoint such as "
                f"{directory.path / 'step_000100'}"
            )
        if newest is not None and newest.resolve() != path.resolve():
            raise InvalidInputError(
                f"resume={resume}, but {directory.path} already has checkpoints up to {newest.name}, and the next "
                "resume=auto would resume from there; choose another output, or remove the later checkpoints"
            )
        return path
    if newest is not None:
        raise InvalidInputError(
            f"resume=never, but {directory.path} already has checkpoints up to {newest.name}; choose another output, "
            "or resume=auto to resume from there"
        )
    return None


def recorded_model(shape: ModelShape, config: TrainConfig) -> dict[str, Any]:
    """Return the settings that must not change between runs: the model's shape, and the groups of its parameters."""
    groups = {"optimizer.no_weight_decay": sorted(config.optimizer.no_weight_decay)}
    return {**asdict(shape), "freeze": list(config.model.freeze), **groups}


def refuse_other_model(checkpoint: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of a model with a different shape, naming the keys.

    Example:
        >>> saved = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 96,
        ...          "vocab_size": 256}
        >>> refuse_other_model(Path("step_000020"), saved, {**saved, "num_layers": 4})
        Traceback (most recent call last):
        megatron_packed_sft.errors.InvalidInputError: step_000020 holds a different model: model.num_layers was 2 and \
is 4 now; restore the old values, or choose another output
    """
    before = {**saved, **asdict(ModelShape.from_saved(saved))}
    differing = [
        f"{name if '.' in name else f'model.{name}'} was {before.get(name)} and is {value} now"
        for name, value in current.items()
        if before.get(name) != value
    ]
    if differing:
        raise InvalidInputError(
            f"{checkpoint} holds a different model: {', '.join(differing)}; restore the old values, or choose another "
            "output"
        )


def refuse_other_adapters(checkpoint: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with other adapters, or with adapters where all weights are trained, naming the keys.

    Example:
        >>> refuse_other_adapters(Path("step_000020"), {"rank": 8}, {"rank": 16})
        Traceback (most recent call last):
        megatron_packed_sft.errors.InvalidInputError: step_000020 holds other adapters: peft.rank was 8 and is 16 now; \
restore the old values, or choose another output
    """
    methods = [adapters.get("method", "none") for adapters in (saved, current)]
    names = [name for name in current if name not in ("method", "dropout")] if methods[0] == methods[1] else []
    differing = [f"peft.method was {methods[0]} and is {methods[1]} now"] if methods[0] != methods[1] else []
    differing += [
        f"peft.{name} was {saved.get(name)} and is {current[name]} now"
        for name in names
        if saved.get(name) != current[name]
    ]
    if differing:
        raise InvalidInputError(
            f"{checkpoint} holds other adapters: {', '.join(differing)}; restore the old values, or choose another "
            "output"
        )


def _gathered(own: dict[str, str]) -> dict[str, str]:
    """Return the entries of all ranks; a collective call."""
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, own)
    return {name: value for part in parts for name, value in sorted(part.items())}


def refuse_damaged(checkpoint: Path, checksums: Mapping[str, str], *, rank: int = 0, num_ranks: int = 1) -> None:
    """Refuse a checkpoint with a changed byte; each rank reads its share of the files."""
    for name in sorted(checksums)[rank::num_ranks]:
        if _checksum(checkpoint / name) != checksums[name]:
            raise ShardFileError(f"{checkpoint / name} is damaged: its checksum differs; {_remedy(checkpoint)}")


def _refuse_missing(checkpoint: Path, sizes: Mapping[str, int]) -> None:
    found = _file_sizes(checkpoint)
    for name, size in sizes.items():
        if found.get(name) != size:
            state = f"has {found[name]} bytes instead of {size}" if name in found else "is missing"
            raise ShardFileError(f"{checkpoint / name} {state}; {_remedy(checkpoint)}")


def _remedy(checkpoint: Path) -> str:
    return f"restore it, or remove {checkpoint.name} to resume from the checkpoint before it"


def _file_sizes(directory: Path) -> dict[str, int]:
    """Return name -> bytes of all files below a directory, sorted."""
    with os_errors("list", directory):
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def make_durable(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Flush these files to disk and return name -> checksum."""
    checksums = {}
    for name in names:
        with os_errors("write", directory / name), open(directory / name, "rb") as file:
            os.fsync(file.fileno())
        checksums[name] = _checksum(directory / name)
    return checksums


def _checksum(path: Path) -> str:
    hasher = new_hasher(DEFAULT_ALGORITHM)
    with os_errors("read", path), open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            hasher.update(block)
    return hasher.hexdigest()
