"""Whole commands against a real S3 server: prepare, train on two ranks, and processes that are killed on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_packed_sft import create_sft_dataset, open_dataset, validate
from megatron_packed_sft.cli.main import main
from megatron_packed_sft.data.options import OpenOptions
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect.info import describe
from megatron_packed_sft.remote.downloads import fetch_files
from megatron_packed_sft.remote.node_cache import node_cache
from megatron_packed_sft.remote.objects import list_objects, read_object, write_object
from megatron_packed_sft.remote.uploads import UNFINISHED, upload
from megatron_packed_sft.storage.dataset_directory import DatasetWriter
from megatron_packed_sft.storage.remote_shard import write_memmap_to_cloud
from megatron_packed_sft.train.checkpoint_copies import CopiedRun
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
    with open(chats, "a") as file:
        file.write('{"messages": []}\n')
    settings = (f"input={chats}", f"tokenizer.path={tokenizer_path}", "max_errors=100", *ENCODING)
    local = tmp_path / "my_dataset"
    noted = {"here": (f"rejects={tmp_path / 'rejects.jsonl'}",), "there": ("rejects=s3://bucket/rejects.jsonl",)}
    assert main(["prepare", f"output={local}", *settings, *noted["here"]]) == 0
    there = ("work_dir=s3://bucket/work", *noted["there"])
    assert main(["prepare", f"output={URL}", *settings, *there]) == 0
    assert stored(URL) == files(local)
    rejects = read_object("s3://bucket/rejects.jsonl", 1 << 20)
    assert rejects == (tmp_path / "rejects.jsonl").read_bytes() != b""
    assert b"not-to-be-told" not in rejects
    assert validate(URL).ok
    assert any(name.startswith("tokens/train/part_000000") for name in list_objects("s3://bucket/work"))
    store.requests.clear()
    assert main(["prepare", f"output={URL}", "work_dir=s3://bucket/work", *settings]) == 0
    sent = [name for method, name in store.requests if method == "PUT"]
    assert not sent, "a second run has nothing to send"
    damaged = f"{URL}/train/shard_000000/loss_mask.npy"
    write_object(damaged, bytes(len(read_object(damaged, 1 << 24))))
    store.requests.clear()
    assert main(["prepare", f"output={URL}", "work_dir=s3://bucket/work", *settings]) == 0
    sent = [name for method, name in store.requests if method == "PUT" and "/train/" in name]
    assert sent == ["sets/my_dataset/train/shard_000000/loss_mask.npy"], "what was damaged is sent again"
    assert validate(URL).ok
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


def test_two_ranks_train_from_a_store_as_from_a_local_disk_and_go_on_elsewhere_from_a_copy(
    store: FaultProxy, tmp_path: Path
) -> None:
    local = in_shards(write_chats(tmp_path / "one", 40), tmp_path / "data")
    other = "s3://bucket/sets/same_dataset"  # so that the server can tell the runs apart
    upload(local, URL)
    upload(local, other)
    num_bytes = sum(len(data) for name, data in files(local).items() if name.startswith("train"))
    store.requests.clear()

    def arguments(name: str, path: str | Path, *more: str) -> list[str]:
        return [
            f"data.path={path}",
            f"output={tmp_path / name}",
            "train.steps=4",
            "train.global_batch_size=4",
            f"model.vocab_size={VOCAB_SIZE}",
            "optimizer.decay_style=constant",
            *more,
        ]

    def losses(name: str) -> list[float]:
        return [one["loss"] for one in read_metrics(tmp_path / name / "metrics.jsonl")]

    # In shuffled order four bins of a step lie in four shards; the cache has room for three and a half of six.
    cache, size = f"data.cache_dir={tmp_path / 'node'}", num_bytes * 7 // 12
    small = (f"data.cache_dir={tmp_path / 'small_node'}", f"data.cache_size={size}")
    copied = ("checkpoint.copy_to=s3://bucket/copies", "checkpoint.every=2")
    printed = run_in_turn(
        2,
        [
            arguments("local", local, "train.steps=6"),
            arguments("cold", URL, cache, *copied),
            arguments("small", other, *small),
        ],
    )
    cold = {name: count for name, count in store.fetched().items() if name.startswith("sets/my_dataset/train/")}
    assert len(cold) == 6 * 7, "six arrays and a manifest of each shard"
    assert set(cold.values()) == {1}, "two ranks fetch every object once"
    again = {name: count for name, count in store.fetched().items() if name.startswith("sets/same_dataset/train/")}
    assert max(again.values()) > 1, "what had to go was fetched again"
    left = node_cache(tmp_path / "small_node", size)
    assert sum(entry.num_bytes for entry in left.entries()) <= size
    assert "a full shuffle visits" in printed
    assert printed.count("so shards will be fetched repeatedly; set data.shard_window=1 to visit few") == 1
    assert "copied step_000004 to s3://bucket/copies" in printed

    store.requests.clear()
    copies = (*copied, "train.steps=6")
    printed = run_in_turn(2, [arguments("warm", URL, cache), arguments("elsewhere", URL, cache, *copies)])
    assert not [name for name in store.fetched() if name.startswith("sets/my_dataset/train/")], "a warm cache"
    assert losses("cold") == losses("warm") == losses("small") == losses("local")[:4]
    assert len(losses("local")) == 6
    assert printed.count("fetched s3://bucket/copies/checkpoints/step_000004 (") == 1
    assert losses("elsewhere") == losses("local"), "with the metrics of the first four steps"
    fetched = {name: count for name, count in store.fetched().items() if name.endswith(".distcp")}
    assert set(fetched.values()) == {1}
    assert CopiedRun("s3://bucket/copies").names() == ["step_000006", "step_000004"]
    newest = "checkpoints/step_000006"
    assert stored(f"s3://bucket/copies/{newest}") == files(tmp_path / "elsewhere" / newest)
    assert describe(f"s3://bucket/copies/{newest}")["is_complete"]
    assert describe("s3://bucket/copies")["total"]["step"] == 6
    assert main(["export", "s3://bucket/copies", str(tmp_path / "model")]) == 0
    assert main(["export", str(tmp_path / "elsewhere"), str(tmp_path / "same_model")]) == 0
    assert files(tmp_path / "model") == files(tmp_path / "same_model")


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
    dataset = create_sft_dataset(URL, 0, opening=OpenOptions(cache_size="1MB"))
    assert contents(dataset) == contents(create_sft_dataset(local, 0))
    for number, shard in enumerate(dataset.source.remote or ()):
        assert files(shard.path) == files(local / "train" / f"shard_{number:06d}")
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
    store.requests.clear()
    assert main(["cache", "prefetch", URL, "--cache-size", "10kB"]) == 2
    assert "more than the whole cache of 10.0 kB; raise cache_size" in capsys.readouterr().err
    assert not [name for name in store.fetched() if name.endswith(".npy")], "refused before anything is fetched"
    assert main(["cache", "prefetch", str(tmp_path / "data")]) == 2
    assert "is a local path, which needs no cache" in capsys.readouterr().err


def test_a_shard_goes_straight_to_a_file_system_of_the_callers(store: FaultProxy, tmp_path: Path) -> None:
    import fsspec

    def write(writer: object) -> None:
        writer.write_bin(0, [5, 6, 7], [1, 1, 0], [0])  # type: ignore[attr-defined]

    manifest = write_memmap_to_cloud(fsspec.filesystem("s3"), "bucket/shards/one", 1, 8, 1, write)
    assert manifest["num_bins"] == 1
    assert len(create_sft_dataset("s3://bucket/shards/one", 0)) == 1
    write_memmap_to_cloud(fsspec.filesystem("file"), str(tmp_path / "one"), 1, 8, 1, write)
    assert stored("s3://bucket/shards/one") == files(tmp_path / "one")


def test_folder_markers_of_a_console_and_hostile_keys_do_no_harm(store: FaultProxy, tmp_path: Path) -> None:
    import boto3

    client = boto3.client("s3")
    for key in ("sets/my_dataset/", "sets/my_dataset/train/"):
        client.put_object(Bucket="bucket", Key=key, Body=b"")
    local = write_dataset(tmp_path / "data")
    upload(local, URL)
    assert validate(URL).ok
    assert len(create_sft_dataset(URL.replace("s3:", "S3:"), 0)) == 24
    assert stored(URL) == files(local)
    precious = tmp_path / "precious.json"
    precious.write_text("mine")
    client.put_object(Bucket="bucket", Key="work/../precious.json", Body=b"theirs")
    (tmp_path / "work").mkdir()
    with pytest.raises(InvalidInputError, match="would lead elsewhere"):
        fetch_files("s3://bucket/work", tmp_path / "work", list_objects("s3://bucket/work"))
    assert precious.read_text() == "mine"


def test_an_upload_to_a_versioned_bucket_replaces_and_a_rerun_sends_nothing(store: FaultProxy, tmp_path: Path) -> None:
    import boto3

    client, url = boto3.client("s3"), "s3://versioned/my_dataset"
    client.create_bucket(Bucket="versioned")
    client.put_bucket_versioning(Bucket="versioned", VersioningConfiguration={"Status": "Enabled"})
    upload(write_dataset(tmp_path / "one"), url)
    other = write_dataset(tmp_path / "other", seed=50, num_shards=2)
    assert upload(other, url, overwrite=True).num_removed == 14
    assert stored(url) == files(other)
    assert upload(other, url).num_sent == 0
