"""Whole commands against a real S3 server: prepare, train on two ranks, and processes that are killed on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_packed_sft import create_sft_dataset, open_dataset, validate, write_memmap_to_cloud
from megatron_packed_sft.cli.main import main
from megatron_packed_sft.remote.filesystem import list_objects
from megatron_packed_sft.remote.node_cache import node_cache
from megatron_packed_sft.remote.uploads import UNFINISHED, upload
from megatron_packed_sft.storage.dataset_directory import DatasetWriter
from megatron_packed_sft.train.metrics import read_metrics
from tests.prepare.preparing import chat, write_records
from tests.remote.object_store import FaultProxy
from tests.remote.test_dataset_urls import contents, files, stored, write_dataset
from tests.train.counting_chats import VOCAB_SIZE
from tests.train.counting_chats import write_dataset as write_chats
from tests.train.launch import run_in_turn

URL = "s3://bucket/sets/my_dataset"
ENCODING = ("template=chatml", "packing.pack_size=256", "executor.num_workers=1", "--quiet")


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    records = [chat(f"Say {number}.", f"It is {number}.") for number in range(60)]
    return write_records(tmp_path / "chats.jsonl", records)


def test_prepare_to_a_store_gives_the_bytes_of_a_local_run(
    store: FaultProxy, chats: Path, tokenizer_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    settings = (f"input={chats}", f"tokenizer.path={tokenizer_path}", *ENCODING)
    assert main(["prepare", f"output={tmp_path / 'local'}", *settings]) == 0
    assert main(["prepare", f"output={URL}", "work_dir=s3://bucket/work", *settings]) == 0
    assert stored(URL) == files(tmp_path / "local")
    assert validate(URL).ok
    assert any(name.startswith("tokens/train/part_000000") for name in list_objects("s3://bucket/work"))
    store.requests.clear()
    assert main(["prepare", f"output={URL}", "work_dir=s3://bucket/work", *settings]) == 0
    assert not [name for method, name in store.requests if method == "PUT"], "a second run has nothing to send"
    for name, data in stored(URL).items():
        assert b"not-to-be-told" not in data, name
    # Another machine, which has nothing but the work directory in the store.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other_home"))
    other = ("packing.pack_size=128", "output=s3://bucket/sets/other", "work_dir=s3://bucket/work")
    assert main(["prepare", *settings, *other]) == 0
    assert main(["prepare", f"output={URL}", *settings, "packing.pack_size=128"]) == 1, "made differently"
    assert main(["prepare", f"output={URL}", *settings, "packing.pack_size=128", "--overwrite"]) == 0
    assert stored(URL) == stored("s3://bucket/sets/other")


def in_shards(source: Path, target: Path) -> Path:
    """Write the bins of a dataset again, in six shards."""
    dataset = open_dataset(source)
    with DatasetWriter(target) as writer:
        for split, num_shards in {"train": 6, "validation": 1}.items():
            bins = [one for shard in dataset.open_shards(split) for one in shard]
            for number in range(num_shards):
                chosen = bins[number::num_shards]
                options = {"num_bins": len(chosen), "pack_size": dataset.figures[split].pack_size}
                with writer.shard_writer(split, number, vocab_size=VOCAB_SIZE, **options) as shard:
                    for index, one in enumerate(chosen):
                        shard.write_bin(index, *one)
                    shard.finalize()
        writer.finalize()
    return target


def test_two_ranks_train_from_a_store_as_from_a_local_disk(store: FaultProxy, tmp_path: Path) -> None:
    local = in_shards(write_chats(tmp_path / "one", 40), tmp_path / "data")
    upload(local, URL)
    num_bytes = sum(len(data) for name, data in files(local).items() if name.startswith("train"))
    store.requests.clear()

    def arguments(name: str, path: str | Path, *more: str) -> list[str]:
        return [
            f"data.path={path}",
            f"output={tmp_path / name}",
            "train.steps=4",
            "train.global_batch_size=4",
            f"model.vocab_size={VOCAB_SIZE}",
            *more,
        ]

    small = f"data.cache_size={num_bytes // 2}"
    run_in_turn(
        2,
        [
            arguments("local", local),
            arguments("cold", URL, f"data.cache_dir={tmp_path / 'node'}"),
            arguments("warm", URL, f"data.cache_dir={tmp_path / 'node'}"),
            arguments("small", URL, f"data.cache_dir={tmp_path / 'small_node'}", small),
        ],
    )
    losses = {name: [one["loss"] for one in read_metrics(tmp_path / name / "metrics.jsonl")] for name in
              ("local", "cold", "warm", "small")}  # fmt: skip
    assert len(losses["local"]) == 4
    assert losses["cold"] == losses["warm"] == losses["small"] == losses["local"]


UPLOAD = """
import sys, pathlib
from megatron_packed_sft.remote.uploads import upload
upload(pathlib.Path(sys.argv[1]), sys.argv[2])
"""
READ = """
import sys
from megatron_packed_sft import create_sft_dataset
for one in create_sft_dataset(sys.argv[1], 0): pass
"""


def kill_after(store: FaultProxy, method: str, num_requests: int, script: str, *arguments: str) -> None:
    """Run a script and kill it with SIGKILL after so many requests."""
    store.requests.clear()
    with subprocess.Popen([sys.executable, "-c", script, *arguments]) as process:
        while sum(count for (one, _), count in store.requests.items() if one == method) < num_requests:
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("num_requests", [2, 9, 20])
def test_an_upload_that_is_killed_is_finished_by_the_next(store: FaultProxy, tmp_path: Path, num_requests: int) -> None:
    local = write_dataset(tmp_path / "data")
    store.delay = 0.02
    kill_after(store, "PUT", num_requests, UPLOAD, str(local), URL)
    store.delay = 0.0
    assert "dataset.json" not in list_objects(URL)
    assert UNFINISHED in list_objects(URL)
    report = upload(local, URL)
    assert report.num_sent < len(files(local))
    assert stored(URL) == files(local)


@pytest.mark.parametrize("num_requests", [3, 8, 14])
def test_a_download_that_is_killed_is_done_again_by_the_next(
    store: FaultProxy, tmp_path: Path, num_requests: int
) -> None:
    local = write_dataset(tmp_path / "data")
    upload(local, URL)
    store.delay = 0.02
    kill_after(store, "GET", num_requests, READ, URL)
    store.delay = 0.0
    dataset = create_sft_dataset(URL, 0, cache_size="1MB")
    assert contents(dataset) == contents(create_sft_dataset(local, 0))
    for number, shard in enumerate(dataset.source.remote or ()):
        assert files(shard.path) == files(local / "train" / f"shard_{number:06d}")
    node_cache(size="1MB")._make_room(10**6, 10**6)
    assert not [one for one in (tmp_path / "cache" / "entries").iterdir() if one.name.startswith(".")]


def test_the_cache_commands_tell_fetch_and_clear(
    store: FaultProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(write_dataset(tmp_path / "data"), URL)
    assert main(["cache", "prefetch", URL, "--quiet"]) == 0
    assert main(["cache", "status"]) == 0
    shown = capsys.readouterr().out
    assert URL in shown
    dataset = create_sft_dataset(URL, 0)
    view = dataset.source.bin(0).input_ids
    assert main(["cache", "clear", URL]) == 0
    assert "3 shards removed" in capsys.readouterr().out
    assert view.sum() > 0
    assert main(["cache", "prefetch", URL, "--cache-size", "30kB"]) == 2
    assert "raise cache_size" in capsys.readouterr().err


def test_a_shard_goes_straight_to_a_file_system_of_the_callers(store: FaultProxy, tmp_path: Path) -> None:
    import fsspec

    def write(writer: object) -> None:
        writer.write_bin(0, [5, 6, 7], [1, 1, 0], [0])  # type: ignore[attr-defined]

    manifest = write_memmap_to_cloud(fsspec.filesystem("s3"), "bucket/shards/one", 1, 8, 1, write)
    assert manifest["num_bins"] == 1
    assert len(create_sft_dataset("s3://bucket/shards/one", 0)) == 1
    write_memmap_to_cloud(fsspec.filesystem("file"), str(tmp_path / "one"), 1, 8, 1, write)
    assert stored("s3://bucket/shards/one") == files(tmp_path / "one")


def test_without_the_extra_the_message_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "gs://bucket/data"]) == 1
    assert "pip install 'megatron-packed-sft[gs]'" in capsys.readouterr().err
