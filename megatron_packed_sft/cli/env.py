"""`packed-sft env`: versions, machine and plugins, for a bug report."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_packed_sft._version import __version__
from megatron_packed_sft.cli._verb import verb
from megatron_packed_sft.plugins import Registry

_PACKAGES = (
    "torch",
    "megatron-core",
    "megatron-bridge",
    "transformer-engine",
    "transformers",
    "tokenizers",
    "gigatoken",
    "sentencepiece",
    "numpy",
    "numba",
    "hydra-core",
    "omegaconf",
    "safetensors",
    "pyarrow",
    "datasets",
    "orjson",
    "jinja2",
    "click",
    "rich",
    "fsspec",
)
_DRIVER = Path("/proc/driver/nvidia")


@verb(examples="packed-sft env\npacked-sft env --json > env.json")
def command(as_json: bool) -> int:
    """Print what a bug report should contain: versions, the machine, and every storage, strategy, schema and model
    family with the package that provides it. Exit code 1 if a plugin cannot be loaded.
    """
    from megatron_packed_sft.support.terminal import show_json

    report = environment()
    if as_json:
        show_json(report)
    else:
        _show(report)
    return 1 if any(one["error"] for found in report["registered"].values() for one in found) else 0


def _show(report: dict[str, Any]) -> None:
    """Print sections of names and values."""
    from rich.text import Text

    from megatron_packed_sft.support.terminal import show, table

    for section in ("versions", "machine"):
        rows = [(f"  {name}", value or "not installed") for name, value in report[section].items()]
        show(Text(f"{section}:", "bold"), table(["", ""], rows, left=2))
    for group, found in report["registered"].items():
        rows = [(f"  {one['name']}", one["origin"] + (f": {one['error']}" if one["error"] else "")) for one in found]
        show(Text(f"{group}:", "bold"), table(["", ""], rows, left=2))


def environment() -> dict[str, Any]:
    """Return versions, machine and registered names. Only plugins are imported."""
    from megatron_packed_sft.support.compiled import cache_directory

    return {
        "versions": {
            "megatron-packed-sft": __version__,
            "python": platform.python_version(),
            **{package: _version(package) for package in _PACKAGES},
        },
        "machine": {
            "platform": platform.platform(),
            "python executable": sys.executable,
            "package": str(Path(__file__).parents[1]),
            "cpus": f"{len(os.sched_getaffinity(0))} usable",
            "cuda of torch": _torch_cuda(),
            "nvidia driver": _driver(),
            "gpus": ", ".join(_gpus()) or "none found",
            "tokenizer path": _tokenizer_path(),
            "kernel cache": cache_directory() or "no writable directory, so every process compiles the kernels",
        },
        "registered": _registered(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _tokenizer_path() -> str:
    """Return what encodes with a Hugging Face tokenizer."""
    if _version("tokenizers") is None:
        return "none: tokenizers is not installed, so only SentencePiece models work"
    if _version("gigatoken") is None:
        return "tokenizers (gigatoken is many times faster, but not installed)"
    return "gigatoken where it gives the same ids, else tokenizers"


def _torch_cuda() -> str:
    """Return the CUDA version that torch was built with, from its version file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"^cuda\b[^=]*= *(?:None|['\"]([^'\"]*)['\"])", text, re.MULTILINE)
    return "unknown" if found is None else found[1] or "none: a build without CUDA"


def _driver() -> str:
    try:
        return (_DRIVER / "version").read_text().splitlines()[0].removeprefix("NVRM version:").strip()
    except (OSError, IndexError):
        return "none found"


def _gpus() -> list[str]:
    names = []
    for path in sorted(_DRIVER.glob("gpus/*/information")):
        found = re.search(r"^Model: *(.*)$", path.read_text(), re.MULTILINE)
        names.append(found[1] if found else path.parent.name)
    return names


def _registered() -> dict[str, list[dict[str, str | None]]]:
    """Return the names of each group and where they come from; plugins are imported to name those that fail."""
    from megatron_packed_sft.megatron.weights.families import FAMILIES
    from megatron_packed_sft.packing.strategies.registry import STRATEGIES
    from megatron_packed_sft.records.schemas.registry import SCHEMAS
    from megatron_packed_sft.storage.registry import STORAGES

    found: dict[str, list[dict[str, str | None]]] = {}
    registries: tuple[Registry[Any], ...] = (STORAGES, STRATEGIES, SCHEMAS, FAMILIES)
    for registry in registries:
        broken = registry.broken()
        found[registry.group] = [
            {"name": name, "origin": registry.origin(name), "error": broken.get(name)} for name in registry.names()
        ]
    return found
