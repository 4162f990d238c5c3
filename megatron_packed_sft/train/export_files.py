"""What an exported model has besides its weights: config.json, generation_config.json, tokenizer, chat template."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from megatron_packed_sft.encode.tokenizers.load import load_tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.megatron.weights.families import shape_family
from megatron_packed_sft.megatron.weights.folder import CONFIG
from megatron_packed_sft.megatron.weights.shape import ModelShape
from megatron_packed_sft.support.atomic import fsync_directory, os_errors, write_file
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.train.pretrained import has_tokenizer, small_files

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
        directory: where to.
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
    return ["no tokenizer is known, so none was written; add --tokenizer FOLDER to include one"]


def _copied(kept: Path | None, tokenizer: str | os.PathLike[str] | None) -> dict[str, Path]:
    """Return name -> file of what is copied as it is."""
    files = {} if kept is None else dict(small_files(kept))
    if tokenizer is not None:
        source = local_path(tokenizer, "--tokenizer")
        if not source.exists():
            raise InvalidInputError(f"--tokenizer {source} does not exist; give a tokenizer's folder or file")
        own = dict(small_files(source))
        files = {**own, **{name: file for name, file in files.items() if name == GENERATION}}
    files.pop(CONFIG, None)  # it is written anew
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
