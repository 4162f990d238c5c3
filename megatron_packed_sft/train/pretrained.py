"""The model that a run trains, and the files beside its weights: config.json, tokenizer, chat template.

model.path ─▶ pretrained_shape ─▶ shape ─▶ load_pretrained (megatron/weights), when the model is built
                                 └─▶ output/model_files: what `packed-sft export` writes besides the weights
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import torch

from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.megatron.weights.families import shape_family
from megatron_packed_sft.megatron.weights.folder import CONFIG, HuggingFaceFolder, joint_checksum
from megatron_packed_sft.megatron.weights.layout import LoraSettings, ModelShape
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.atomic import Staging, fsync_directory, os_errors, replace_file, write_file
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.train.checkpoint import TrainingState
from megatron_packed_sft.train.config import ModelConfig, PeftConfig

RECORD: Final = "pretrained.json"
MODEL_FILES: Final = "model_files"
_TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
_TEMPLATES: Final = "additional_chat_templates"
_KEPT: Final = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_NOT_KEPT: Final = ("*.index.json",)


def pretrained_shape(model: ModelConfig, state: TrainingState | None) -> ModelShape | None:
    """Return the shape of the model of `model.path`, whose files are checked; None without that key.

    Args:
        model: the configuration.
        state: of the checkpoint to resume from, which wins over the folder: that may be gone by now.
    """
    if model.path is None:
        return None
    if state is not None:
        return ModelShape.from_saved(state.model)
    folder = HuggingFaceFolder.open(model.path)
    for name, value in _sizes(model).items():
        if value != getattr(folder.shape, name):
            raise InvalidInputError(
                f"model.{name} is {value}, but {folder.path} has {getattr(folder.shape, name)}; choose "
                "model=from_pretrained, and leave the key out"
            )
    return folder.shape


def model_shape(model: ModelConfig, vocab_size: int) -> ModelShape:
    """Return the shape of a model that is trained from scratch.

    Args:
        model: the configuration, without `path`.
        vocab_size: of the data.
    """
    return ModelShape.of_sizes(**{**_sizes(model), "vocab_size": vocab_size})


def _sizes(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of the shape; dropout and freezing are not among them."""
    names = {field.name for field in fields(ModelShape)}
    return {name: value for name, value in vars(model).items() if name in names and value is not None}


def recorded_peft(peft: PeftConfig) -> dict[str, Any]:
    """Return the adapter settings that a checkpoint records; empty if all weights are trained."""
    return {} if peft.method == "none" else asdict(peft)


def lora_settings(peft: Mapping[str, Any], seed: int = 0) -> LoraSettings | None:
    """Return the adapters that a configuration or a checkpoint asks for; None if all weights are trained.

    Args:
        peft: the keys of the group `peft`; empty if there are no adapters.
        seed: of their initial weights.
    """
    if peft.get("method", "none") == "none":
        return None
    return LoraSettings(
        rank=peft["rank"],
        alpha=peft["alpha"],
        dropout=peft["dropout"],
        target_modules=tuple(peft["target_modules"]),
        seed=seed,
    )


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model's folder also holds its tokenizer.

    Example:
        >>> has_tokenizer(Path("/no/such/folder"))
        False
    """
    return any((folder / name).is_file() for name in _TOKENIZER) or any(folder.glob("*.model"))


def record_of(folder: HuggingFaceFolder) -> dict[str, Any]:
    """Return the record of the weights that a run starts from; a collective call, in which ranks share the work.

    Args:
        folder: the opened folder.
    """
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    parts: list[Any] = [None] * num_ranks
    torch.distributed.all_gather_object(parts, folder.file_checksums(rank, num_ranks))
    checksums = {name: value for part in parts for name, value in part.items()}
    return {
        "path": str(folder.path),
        "family": folder.family.name,
        "dtype": str(folder.dtype).removeprefix("torch."),
        "checksum": joint_checksum(checksums),
        "files": checksums,
    }


def write_record(record: Mapping[str, Any], output: Path) -> None:
    """Write the record into the run's directory."""
    replace_file(output / RECORD, json_document.render(record))


def keep_model_files(model: Path | None, tokenizer: Path | None, output: Path) -> None:
    """Copy the small files of a model and its tokenizer into the run's directory, for `packed-sft export`.

    Args:
        model: the folder of `model.path`.
        tokenizer: that of `data.tokenizer`, or its file; used for files that the model's folder lacks.
        output: the run's directory.
    """
    found: dict[str, Path] = {}
    for source in (one for one in (model, tokenizer) if one is not None):
        for name, file in small_files(source):
            if source == model or name != CONFIG:  # a tokenizer's folder may be that of another model
                found.setdefault(name, file)
    if not found and not (output / MODEL_FILES).exists():
        return
    with Staging(output / MODEL_FILES, overwrite=True) as staging:
        for name, file in found.items():
            with os_errors("copy", file):
                (staging.path / name).parent.mkdir(exist_ok=True)
                write_file(staging.path / name, file.read_bytes())
                fsync_directory((staging.path / name).parent)
        staging.publish()


def small_files(source: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files of a model's or tokenizer's folder that are not weights."""
    if source.is_file():
        yield ("tokenizer.model" if source.suffix == ".model" else source.name), source
        return
    for pattern in _KEPT:
        for file in sorted(source.glob(pattern)):
            if not any(file.match(other) for other in _NOT_KEPT):
                yield file.name, file
    for file in sorted((source / _TEMPLATES).glob("*.jinja")):
        yield f"{_TEMPLATES}/{file.name}", file


GENERATION: Final = "generation_config.json"
_DEFAULT_LENGTH: Final = 4096  # of a model whose run did not record its sequences' length


def write_model_files(
    directory: Path,
    shape: ModelShape,
    config: Mapping[str, Any] | None,
    *,
    kept: Path | None,
    tokenizer: str | os.PathLike[str] | None,
    dtype: torch.dtype,
    sequence_length: int | None,
) -> list[str]:
    """Write everything but the weights; return notes for the user.

    Args:
        directory: of the exported model.
        shape: of the model.
        config: the config.json that the model came with; None for a model trained from scratch.
        kept: the folder with the small files that the model came with.
        tokenizer: a tokenizer's folder or file, instead of the one in there.
        dtype: of the weights.
        sequence_length: of the run.
    """
    for name, file in _copied(kept, tokenizer).items():
        with os_errors("copy", file):
            (directory / name).parent.mkdir(exist_ok=True)
            write_file(directory / name, file.read_bytes())
            fsync_directory((directory / name).parent)
    ids: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if config is None:
        stops = ids["eos_token_id"]
        if has_tokenizer(directory):
            ids, stops = _token_ids(directory)
        length = sequence_length or _DEFAULT_LENGTH
        config = {**shape_family(shape).config(shape), "max_position_embeddings": length, **ids}
        ids["eos_token_id"] = stops
    name = str(dtype).removeprefix("torch.")
    spellings = {key: name for key in ("dtype", "torch_dtype") if key == "dtype" or key in config}
    _write_json(directory / CONFIG, {**config, **spellings})
    if not (directory / GENERATION).exists():
        _write_json(directory / GENERATION, {key: ids[key] or config.get(key) for key in ids})
    if has_tokenizer(directory):
        return []
    return ["the run kept no tokenizer, so none was written; add --tokenizer FOLDER to include one"]


def _copied(kept: Path | None, tokenizer: str | os.PathLike[str] | None) -> dict[str, Path]:
    """Return name -> file of the files that are copied unchanged."""
    files = {} if kept is None else dict(small_files(kept))
    if tokenizer is not None:
        source = local_path(tokenizer, "--tokenizer")
        if not source.exists():
            raise InvalidInputError(f"--tokenizer {source} does not exist; give a tokenizer's folder or file")
        own = dict(small_files(source))
        files = {**own, **{name: file for name, file in files.items() if name == GENERATION}}
    files.pop(CONFIG, None)  # written separately
    return files


def _token_ids(directory: Path) -> tuple[dict[str, Any], Any]:
    """Return the ids of the tokenizer's special tokens, and at which ids generation stops."""
    tokenizer = load_tokenizer(directory)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    named = (tokenizer.control_tokens.get(text) for text in tokenizer.stop_tokens)
    stops = [one for one in dict.fromkeys([tokenizer.eos_id, *named]) if one is not None]
    return ids, stops if len(stops) > 1 else tokenizer.eos_id


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    write_file(file, (json.dumps(content, indent=2) + "\n").encode())
