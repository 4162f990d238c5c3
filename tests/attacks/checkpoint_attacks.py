"""Train a tiny model, plant payloads into copies of its checkpoint, and let every command read them.

torchrun --nproc-per-node 1 -m tests.attacks.checkpoint_attacks DATA HOME

Prints one JSON line per attack and command. All in one process, because megatron.core takes ten seconds to import. The
checksums of a copy are computed anew, as whoever plants something would.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron_packed_sft.cli.main import main
from megatron_packed_sft.train.checkpoint import STATE, TrainingState, make_durable

PAYLOAD = "payload_was_run"
WEIGHT = "embedding.word_embeddings.weight"


class Attack:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def read(checkpoint: Path) -> Any:
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def in_metadata(checkpoint: Path, attack: Attack) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(attack))


def deep_in_metadata(checkpoint: Path, attack: Attack) -> None:
    metadata = read(checkpoint)
    metadata.planner_data = {"plans": [attack]}
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata, protocol=2))


def in_common(checkpoint: Path, attack: Attack) -> None:
    common = torch.load(checkpoint / "common.pt", weights_only=False)
    torch.save({**common, "notes": [attack]}, checkpoint / "common.pt")


def in_tensor(checkpoint: Path, attack: Attack) -> None:
    """A chunk that is no tensor."""
    metadata = read(checkpoint)
    [(index, place)] = [(index, place) for index, place in metadata.storage_data.items() if index.fqn == WEIGHT]
    metadata.storage_data[index] = saved(checkpoint, place, attack)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def as_object(checkpoint: Path, attack: Attack) -> None:
    """A tensor that .metadata calls an object: torch.distributed.checkpoint then loads it without any limits."""
    metadata = read(checkpoint)
    [(index, place)] = [(index, place) for index, place in metadata.storage_data.items() if index.fqn == WEIGHT]
    del metadata.storage_data[index]
    metadata.storage_data[MetadataIndex(WEIGHT)] = saved(checkpoint, place, attack)
    metadata.state_dict_metadata[WEIGHT] = BytesStorageMetadata()
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def saved(checkpoint: Path, place: Any, attack: Attack) -> Any:
    """Append the payload to a file, as long as the tensor was, and return its place."""
    file = checkpoint / place.relative_path
    payload = io.BytesIO()
    torch.save([attack, b"." * place.length], payload)
    at = file.stat().st_size
    file.write_bytes(file.read_bytes() + payload.getvalue())
    return type(place)(place.relative_path, at, len(payload.getvalue()))


ATTACKS: dict[str, Callable[[Path, Attack], None]] = {
    one.__name__: one for one in (in_metadata, deep_in_metadata, in_common, in_tensor, as_object)
}


def settings(data: str, output: Path, num_steps: int) -> list[str]:
    return [
        f"data.path={data}", f"output={output}", f"train.steps={num_steps}", "train.global_batch_size=4",
        "validation.every=1000", "model.num_layers=1", "logger.names=[]",
    ]  # fmt: skip


def call(attack: str, *arguments: str) -> None:
    from megatron_packed_sft.megatron.backend import stop_distributed

    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(list(arguments))
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 1
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    if torch.distributed.is_initialized():
        stop_distributed()
    line = {"attack": attack, "verb": arguments[0], "code": code, "stderr": printed.getvalue()}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    data, home = sys.argv[1], Path(sys.argv[2])
    call("none", "train", *settings(data, home / "run", 1))
    genuine = home / "run" / "checkpoints" / "step_000001"
    for name, plant in ATTACKS.items():
        checkpoint = home / name / "step_000001"
        shutil.copytree(genuine, checkpoint)
        state = TrainingState.load(checkpoint)
        plant(checkpoint, Attack(home / f"{PAYLOAD}_{name}"))
        names = sorted(state.files)
        sizes = {one: (checkpoint / one).stat().st_size for one in names}
        forged = replace(state, files=sizes, checksums=make_durable(checkpoint, names))
        (checkpoint / STATE).write_bytes(forged.to_bytes())
        call(name, "info", str(checkpoint))
        call(name, "export", str(checkpoint), str(home / f"exported_{name}"))
        call(name, "train", *settings(data, home / f"resumed_{name}", 2), f"resume={checkpoint}")
    call("none", "train", *settings(data, home / "run", 2))
