"""Without PyTorch, data is prepared, packed, checked, looked at and converted; datasets say what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_packed_sft import train_sentencepiece
from tests.encode.tiny_tokenizers import byte_level_tokenizer, save_folder
from tests.prepare.preparing import chat, write_records

# Python as it is where torch is not installed: nothing finds it, transformers does not either.
WITHOUT_TORCH = """
import importlib.machinery, sys

find = importlib.machinery.PathFinder.find_spec

def find_anything_but_torch(name, path=None, target=None):
    return None if name.partition(".")[0] == "torch" else find(name, path, target)

importlib.machinery.PathFinder.find_spec = find_anything_but_torch
"""
CALL = f"{WITHOUT_TORCH}\nfrom megatron_packed_sft.cli.main import main\n"
COMMANDS = f"""{CALL}

for line in sys.stdin.read().splitlines():
    print("$", line, flush=True)
    code = main(line.split())
    if code:
        sys.exit(f"exit code {{code}}")
assert "torch" not in sys.modules
"""


def run(script: str, lines: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], input=lines, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some chats, and tokenizers of both kinds."""
    path = tmp_path_factory.mktemp("without_torch")
    write_records(path / "chats.jsonl", [chat(f"two and {number}?", "the quick brown fox") for number in range(12)])
    train_sentencepiece(["two and two? the quick brown fox"] * 20, path / "sp.model", vocab_size=320)
    save_folder(byte_level_tokenizer(), path / "hf")
    return path


@pytest.mark.parametrize("tokenizer", ["sp.model", "hf"])
def test_data_is_prepared_and_looked_at_without_torch(home: Path, tokenizer: str) -> None:
    out = home / f"out_{tokenizer}"
    lines = f"""\
preview {home}/chats.jsonl tokenizer.path={home}/{tokenizer} template=chatml
prepare input={home}/chats.jsonl output={out} tokenizer.path={home}/{tokenizer} template=chatml \
packing.pack_size=128 split.validation_fraction=0 executor.num_workers=1
validate {out}
info {out}
info {out}.work/plans/train.npz
validate {out}.work/tokens/train
preview {out}
report {out} -o {out}.html
convert {out} {out}_legacy --to legacy
compare {out} {out}_legacy
convert {out}_legacy {out}_again
"""
    done = run(COMMANDS, lines)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr}"
    assert Path(f"{out}.html").stat().st_size > 10_000
    for call in ("create_sft_dataset({out!r}, 2)", "PackedLoader(range(3), micro_batch_size=1, collate_fn=list)"):
        name = call.partition("(")[0]
        done = run(f"{WITHOUT_TORCH}\nfrom megatron_packed_sft import {name}\n{call.format(out=str(out))}")
        assert done.stderr.splitlines()[-1].partition("Error: ")[2] == (
            f"{name} needs PyTorch, which is not installed; install it with pip install 'megatron-packed-sft[torch]'"
        )


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("from megatron_packed_sft import DataCollatorForCausalLM", "DataCollatorForCausalLM needs PyTorch"),
        ("main(['export', 'a', 'b'])", "exporting a model needs PyTorch"),
        (
            "main(['train', 'data.path=x', 'train.steps=1'])",
            "packed-sft train: error: training needs PyTorch, which is not installed; install it with pip install "
            "'megatron-packed-sft[megatron]'",
        ),
    ],
)
def test_what_needs_torch_says_what_to_install(script: str, sentence: str) -> None:
    assert sentence in run(f"{CALL}{script}").stderr.splitlines()[-1]


def test_plans_are_made_saved_and_read_without_torch(tmp_path: Path) -> None:
    done = run(
        f"{WITHOUT_TORCH}\nfrom megatron_packed_sft import PackPlan, pack\n"
        f"pack([3, 1, 2, 2], pack_size=4).save({str(tmp_path / 'plan.npz')!r})\n"
        f"print(PackPlan.load({str(tmp_path / 'plan.npz')!r}).num_bins)"
    )
    assert done.stdout == "2\n", done.stderr
