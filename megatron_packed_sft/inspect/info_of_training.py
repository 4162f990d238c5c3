"""Facts about checkpoints and runs, from the JSON files of training; neither torch nor Megatron is imported.

RUN/metrics.jsonl                              one record per line; only its beginning and its end are read
    checkpoints/step_000100/training_state.json
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.atomic import os_errors

Facts = dict[str, Any]

# The files that train/ writes. It must not be imported here, so a test compares the names.
TRAINING_STATE = "training_state.json"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
PRETRAINED = "pretrained.json"
_STEP_NAME = re.compile(r"step_(\d{6,})")
_TEXTS = ("event", "name", "loss_kind")  # the rest of a record is numbers
_MAX_DOCUMENT_BYTES = 64 << 20
_END_BYTES = 1 << 20  # of metrics.jsonl: about 2,500 records, enough for one of every validation dataset


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint of `packed-sft train`."""
    return (path / TRAINING_STATE).is_file()


def is_run(path: Path) -> bool:
    """Return whether a path is the output directory of `packed-sft train`."""
    return (path / METRICS).is_file() or any(True for _ in _checkpoints(path))


def is_foreign_checkpoint(path: Path) -> bool:
    """Return whether a path is a torch_dist checkpoint that Megatron-LM or Megatron-Bridge wrote."""
    return (path / "metadata.json").is_file() and (path / "common.pt").is_file()


def checkpoint_facts(path: Path) -> Facts:
    """Return what a checkpoint records, and whether all of its files have their size."""
    file = path / TRAINING_STATE
    state = _document(file)
    fields = json_document.Fields(state, str(file))
    data, files = (fields.optional_object(name) or {} for name in ("data", "files"))
    sizes = json_document.Fields(files, f"{file}, files")
    files = {name: sizes.integer(name, 0, 1 << 62) for name in files}
    wrong = [name for name, size in files.items() if _size(path / name) != size]
    counts = json_document.Fields(data, f"{file}, data")
    consumed, num_samples = (counts.optional_integer(name, 0, 1 << 62) for name in ("consumed_samples", "num_samples"))
    epoch = (consumed or 0) / num_samples if num_samples else None
    return {
        "total": {
            "step": state.get("step"),
            "consumed_samples": consumed,
            "epoch": epoch,
            "seed": data.get("seed"),
            "num_files": len(files),
        },
        "num_bytes": sum(files.values()),
        "model": state.get("model", {}),
        "adapters": state.get("peft") or None,
        "pretrained": _without_files(state.get("pretrained") or {}) or None,
        "data_fingerprint": data.get("fingerprint"),
        "tokenizer": {"fingerprint": data["tokenizer"]} if data.get("tokenizer") else None,
        "chat_template": {"fingerprint": data["chat_template"]} if data.get("chat_template") else None,
        "is_complete": not wrong,
        "notes": [f"{name} is missing or has another size; the checkpoint cannot be loaded" for name in wrong],
        "how_to_use": ["Export it:", f"  packed-sft export {path} my_model", "Resume from it:", f"  resume={path}"],
    }


def foreign_checkpoint_facts(path: Path) -> Facts:
    """Return the back end and the size of a checkpoint of Megatron-LM or Megatron-Bridge."""
    recorded = _document(path / "metadata.json")
    files = [one for one in path.rglob("*") if one.is_file()]
    return {
        "total": {"num_files": len(files)},
        "num_bytes": sum(one.stat().st_size for one in files),
        "format": recorded.get("sharded_backend"),
        "how_to_use": ["As a Hugging Face folder:", f"  packed-sft export {path} my_model --like FOLDER"],
    }


def run_facts(path: Path) -> Facts:
    """Return the state of a run: its last losses, its speed, its checkpoints."""
    records = list(_first_and_last_records(path / METRICS))
    steps = [one for one in records if one.get("event") == "step"]
    validations = {str(one.get("name")): one for one in records if one.get("event") == "validation"}  # the last of each
    checkpoints = [_short(step, one) for step, one in sorted(_checkpoints(path))]
    first, last = (steps[0], steps[-1]) if steps else ({}, {})
    pretrained = path / PRETRAINED
    return {
        "total": {
            "step": last.get("step"),
            "first_loss": first.get("loss"),
            "loss": last.get("loss"),
            "loss_kind": last.get("loss_kind"),
            "learning_rate": last.get("learning_rate"),
            "epoch": last.get("epoch"),
            "consumed_samples": last.get("consumed_samples"),
            "tokens_per_second": last.get("tokens_per_second"),
            "padding_share": last.get("padding_share"),
            "data_share": last.get("data_share"),
        },
        "validation": {
            name: {key: one.get(key) for key in ("step", "loss", "perplexity")} for name, one in validations.items()
        },
        "checkpoints": checkpoints,
        "num_bytes": sum(one["num_bytes"] for one in checkpoints),
        "pretrained": _without_files(_document(pretrained)) if pretrained.is_file() else None,
        "settings": str(path / "config.yaml") if (path / "config.yaml").is_file() else None,
        "how_to_use": ["Export it:", f"  packed-sft export {path} my_model"] if checkpoints else [],
    }


def _checkpoints(path: Path) -> Iterator[tuple[int, Path]]:
    try:
        entries = list(os.scandir(path / CHECKPOINTS))
    except OSError:
        return
    for entry in entries:
        if (name := _STEP_NAME.fullmatch(entry.name)) and is_checkpoint(Path(entry.path)):
            yield int(name[1]), Path(entry.path)


def _short(step: int, path: Path) -> Facts:
    return {"name": path.name, "step": step, "num_bytes": checkpoint_facts(path)["num_bytes"]}


def _first_and_last_records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records at the beginning and the end of a metrics file of any length."""
    if not file.is_file():
        return
    with os_errors("read", file), open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        parts = [stream.read(min(size, _END_BYTES))]
        if size > 2 * _END_BYTES:
            stream.seek(size - _END_BYTES)
            stream.readline()  # the rest of a line
        parts.append(stream.read())
    for line in b"".join(parts).splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # half a line, where the parts meet or a run was killed
            continue
        if isinstance(record, dict):
            yield {
                name: value
                for name, value in record.items()
                if value is None or isinstance(value, str if name in _TEXTS else int | float)
            }


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _without_files(record: Facts) -> Facts:
    return {name: value for name, value in record.items() if name not in ("files", json_document.SELF_CHECKSUM)}


def _document(file: Path) -> dict[str, Any]:
    with os_errors("read", file), open(file, "rb") as opened:
        return json_document.parse(opened.read(_MAX_DOCUMENT_BYTES), str(file))
