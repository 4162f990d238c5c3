"""An installed package that cannot be written, a user that the machine does not know, and no home: everything works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_packed_sft import train_sentencepiece
from megatron_packed_sft.records.samples import sample_conversations, write_sample_data
from tests.other_users import as_user, needs_other_users

ROOT = Path(__file__).parents[2]
USER = 12345
SAID = "no directory can hold compiled kernels"
LOADER = """
import sys
from megatron_packed_sft import PackedLoader, create_sft_dataset
from megatron_packed_sft.cli.main import main

if main(["validate", sys.argv[1]]) == 0:
    print(next(iter(PackedLoader(create_sft_dataset(sys.argv[1]), micro_batch_size=2, shuffle=True)))["tokens"].shape)
"""

pytestmark = needs_other_users


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Read-only site-packages with the package in it, chats and a tokenizer, and two directories of the user's."""
    home = Path(tempfile.mkdtemp())  # the folders of tmp_path are closed to others
    home.chmod(0o755)
    site = home / "site-packages"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron_packed_sft", site / "megatron_packed_sft", ignore=ignore)
    shutil.copytree(ROOT / "conf", site / "megatron_packed_sft" / "conf")
    write_sample_data(home / "chats", num_records=60)
    texts = [str(message.get("content")) for chat in sample_conversations(60) for message in chat.messages]
    train_sentencepiece(texts, home / "sp.model", vocab_size=500)
    subprocess.run(["chmod", "-R", "a-w,a+rX", str(site)], check=True)
    for name in ("output", "temporary"):
        (home / name).mkdir()
        os.chown(home / name, USER, USER)
    yield home
    shutil.rmtree(home)


def run(home: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python as the user; nothing of this process's environment is left but what finds the interpreter."""
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{home}/site-packages", "OMP_NUM_THREADS": "1", **environment}
    command = [*as_user(USER), sys.executable, "-W", "error::RuntimeWarning", *arguments]
    done = subprocess.run(command, env=given, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def prepare(home: Path, name: str, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = ("template=chatml", "packing=greedy", "packing.pack_size=4096", f"tokenizer.path={home}/sp.model", *more)
    paths = (f"input={home}/chats/chats.jsonl", f"output={home}/output/{name}")
    return run(home, "-m", "megatron_packed_sft", "prepare", *paths, *settings, **environment)


def test_kernels_are_kept_in_a_private_directory_below_tmpdir(home: Path) -> None:
    places = {"HOME": "/nonexistent", "TMPDIR": str(home / "temporary")}
    prepared = prepare(home, "data", **places)
    assert "published" in prepared.stdout
    private = home / "temporary" / f"megatron_packed_sft-{USER}"
    [cache] = private.glob("megatron_packed_sft-kernels-*")
    num_kept = len(list(cache.rglob("*.nbc")))
    assert num_kept > 5
    loaded = run(home, "-c", LOADER, f"{home}/output/data", **places)
    assert "sound" in loaded.stdout
    assert "torch.Size([2, " in loaded.stdout
    assert len(list(cache.rglob("*.nbc"))) > num_kept
    assert {path.stat().st_mode & 0o777 for path in (private, cache)} == {0o700}
    assert "kernels" not in prepared.stderr + loaded.stderr


def test_without_any_place_kernels_are_compiled_and_that_is_said_once(home: Path) -> None:
    done = prepare(home, "again", "executor.num_workers=2", TMPDIR=str(home))  # and no HOME
    assert "published" in done.stdout
    assert done.stderr.count(SAID) == 1
    model = ("model=tiny", "train.steps=1", "train.global_batch_size=2")
    paths = (f"data.path={home}/output/again", f"output={home}/output/run")
    trained = run(home, "-m", "megatron_packed_sft", "train", *paths, *model, HOME="/", TMPDIR=str(home))
    assert "finished at step 1" in trained.stdout
    assert trained.stderr.count(SAID) == 1
    assert sorted(path.name for path in home.iterdir()) == ["chats", "output", "site-packages", "sp.model", "temporary"]
