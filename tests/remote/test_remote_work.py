"""A work directory in an object store: runs on nodes that share nothing else, damaged objects, killed runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_packed_sft.prepare.work_directory import WorkDirectory, home_of
from megatron_packed_sft.remote.objects import list_objects, read_object, write_object
from tests.packed_bins import files_of
from tests.prepare.preparing import Outcome, chat, prepare, write_records
from tests.remote.object_store import FaultProxy
from tests.remote.test_dataset_urls import stored

WORK = "s3://bucket/work"
URL = "s3://bucket/sets/data"
NUM_FILES = 4
COMMAND = [sys.executable, "-m", "megatron_packed_sft", "prepare"]


@pytest.fixture
def settings(tokenizer_path: str, tmp_path: Path) -> list[str]:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in range(NUM_FILES):
        rows = [chat(f"{name} {row % 40}?", "Yes. " * (1 + row % 70)) for row in range(120)]
        write_records(folder / f"{name}.jsonl", rows)
    return [
        f"input={folder}/*.jsonl", f"tokenizer.path={tokenizer_path}", "template=chatml", "packing.pack_size=128",
        "executor.num_workers=1", "split.validation_fraction=0.2", "max_drop_share=1",
    ]  # fmt: skip


class Nodes:
    """Machines that share nothing but the store: each has a home and a cache of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch

    def prepare(self, node: str, *arguments: str) -> Outcome:
        self._monkeypatch.setenv("XDG_CACHE_HOME", str(self._folder / node / "home"))
        self._monkeypatch.setenv("PACKED_SFT_CACHE_DIR", str(self._folder / node / "cache"))
        return prepare(*arguments)


@pytest.fixture
def nodes(store: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


def local_run(settings: list[str], tmp_path: Path, *more: str) -> dict[str, bytes]:
    done = prepare(*settings, f"output={tmp_path}/local", *more)
    assert done.code == 0, done.err
    return files_of(tmp_path / "local")


def test_a_run_on_another_node_fetches_parts_once_and_gives_the_bytes_of_a_local_run(
    store: FaultProxy, nodes: Nodes, settings: list[str], tmp_path: Path
) -> None:
    local = local_run(settings, tmp_path)
    arguments = [*settings, f"work_dir={WORK}"]
    done = nodes.prepare("a", *arguments, f"output={URL}")
    assert done.code == 0, done.err
    assert stored(URL) == local
    assert not [name for name in store.fetched() if "/ids.npy" in name], "parts are moved to the cache of their node"
    assert not list((tmp_path / "a" / "home").rglob("ids.npy"))
    store.requests.clear()
    again = nodes.prepare("b", *arguments, "output=s3://bucket/other", "packing.pack_size=256")
    assert f"{NUM_FILES} slices: {NUM_FILES} reused, 0 encoded" in again.out, again.err
    tokens = {name: count for name, count in store.fetched().items() if name.endswith(("ids.npy", "train.npy"))}
    assert set(tokens.values()) == {1}, "publishing fetches every part once"


@pytest.mark.parametrize(
    "more",
    [
        ["packing.overflow=split", "sources.input.weight=2"],
        ["packing.balance=trained_tokens", "packing.global_batch=4", "storage=parquet"],
    ],
)
def test_plans_that_must_see_tokens_and_small_caches_change_no_byte(
    nodes: Nodes, settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    local = local_run(settings, tmp_path, *more)
    monkeypatch.setenv("PACKED_SFT_CACHE_SIZE", "100KB")  # of four parts of 40 or 80 KB
    done = nodes.prepare("node", *settings, *more, f"output={URL}", f"work_dir={WORK}", f"rejects={tmp_path}/lost")
    assert done.code == 0, done.err
    assert stored(URL) == local


def test_a_slice_whose_object_was_damaged_is_encoded_again(nodes: Nodes, settings: list[str], tmp_path: Path) -> None:
    name = "tokens/train/part_000000/ids.npy"
    local = local_run(settings, tmp_path, "packing.pack_size=256")
    assert nodes.prepare("a", *settings, f"output={URL}", f"work_dir={WORK}").code == 0
    data = bytearray(read_object(f"{WORK}/{name}", 1 << 20))
    data[-1] ^= 1
    write_object(f"{WORK}/{name}", bytes(data))
    write_object(f"{WORK}/encode.json", b"{}")  # as a run leaves it that was killed before the end of the stage
    done = nodes.prepare("b", *settings, f"output={URL}", f"work_dir={WORK}", "packing.pack_size=256", "--overwrite")
    assert "4 slices: 3 reused, 1 encoded" in done.out, done.err
    assert stored(URL) == local


def killed(store: FaultProxy, place: str, arguments: list[str], home: Path) -> None:
    """Run a call, and kill it while the store takes its time with one of its requests."""
    store.trouble = {place: ["slow"]}
    environment = {**os.environ, "XDG_CACHE_HOME": str(home), "PACKED_SFT_CACHE_DIR": str(home / "cache")}
    with subprocess.Popen([*COMMAND, *arguments], env=environment, stderr=subprocess.PIPE, text=True) as run:
        while not store.num_troubles:
            assert run.poll() is None, run.communicate()
            time.sleep(0.002)
        run.send_signal(signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL
    store.num_troubles = 0


def test_runs_killed_in_the_middle_of_every_stage_are_run_again_and_change_no_byte(
    store: FaultProxy, nodes: Nodes, settings: list[str], tmp_path: Path
) -> None:
    local = local_run(settings, tmp_path)
    arguments = [*settings, f"output={URL}", f"work_dir={WORK}"]
    killed(store, "PUT /bucket/work/tokens/receipts/slice_", arguments, tmp_path / "a")
    receipts = [name for name in list_objects(WORK) if name.startswith("tokens/receipts/") and name.endswith(".json")]
    assert not receipts, "a slice is there when its receipt is, which goes last"
    killed(store, "PUT /bucket/work/plans/train.npz", arguments, tmp_path / "b")
    killed(store, "PUT /bucket/sets/data/train/shard_000000/manifest.json", arguments, tmp_path / "c")
    assert "dataset.json" not in list_objects(URL), "half a dataset cannot be opened"
    done = nodes.prepare("d", *arguments)
    assert done.code == 0, done.err
    assert f"{NUM_FILES} slices: {NUM_FILES} reused, 0 encoded" in done.out
    assert "train: reused" in done.out
    assert stored(URL) == local


def test_a_second_preparation_of_this_machine_is_refused(nodes: Nodes, settings: list[str]) -> None:
    arguments = [*settings, f"output={URL}", f"work_dir={WORK}"]
    assert nodes.prepare("a", *arguments).code == 0
    with WorkDirectory(home_of(WORK)):
        refused = nodes.prepare("a", *arguments)
    assert "another preparation is working in" in refused.err
    assert refused.err.count("\n") == 1
