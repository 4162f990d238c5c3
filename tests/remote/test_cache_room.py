"""The cache of a node after a loss of power, with other processes in the way, and for orders that are too wide."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import PackedLoader, create_sft_dataset
from megatron_packed_sft.data.options import OpenOptions
from megatron_packed_sft.remote import node_cache as node_caches
from megatron_packed_sft.remote.node_cache import node_cache
from megatron_packed_sft.remote.uploads import upload
from tests.remote.object_store import FaultProxy
from tests.remote.test_dataset_urls import NUM_SHARDS, URL, contents, files, write_dataset


@pytest.fixture
def published(store: FaultProxy, tmp_path: Path) -> FaultProxy:
    upload(write_dataset(tmp_path / "my_dataset"), URL)
    store.requests.clear()
    return store


def test_a_shard_that_a_loss_of_power_cut_is_fetched_again(published: FaultProxy, tmp_path: Path) -> None:
    expected = contents(create_sft_dataset(URL, 0))
    file = sorted((tmp_path / "cache").glob("entries/*/shard_*/input_ids.npy"))[0]
    os.truncate(file, 100)
    node_caches._CACHES.clear()  # as in another process
    published.requests.clear()
    assert contents(create_sft_dataset(URL, 0)) == expected
    assert [name for name in published.fetched() if name.endswith("input_ids.npy")] == [
        f"sets/my_dataset/train/{file.parent.name}/input_ids.npy"
    ]
    node_caches._CACHES.clear()
    published.requests.clear()
    assert contents(create_sft_dataset(URL, 0)) == expected
    assert not published.fetched()


def test_a_document_that_a_loss_of_power_cut_is_read_again(published: FaultProxy, tmp_path: Path) -> None:
    create_sft_dataset(URL, 0)
    [file] = [one for one in (tmp_path / "cache" / "documents").iterdir() if one.suffix != ".tag"]
    file.write_bytes(b"")
    published.requests.clear()
    assert len(create_sft_dataset(URL, 0)) == 6 * NUM_SHARDS
    assert published.fetched()["sets/my_dataset/dataset.json"] == 1


def test_a_shuffle_that_is_too_wide_for_the_cache_is_announced_once_with_the_remedy(
    published: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    total = sum(len(data) for name, data in files(tmp_path / "my_dataset").items() if name.startswith("train"))
    caplog.set_level(logging.WARNING)
    PackedLoader(create_sft_dataset(URL, 0, opening=OpenOptions(cache_size=2 * total)), shuffle=True)
    PackedLoader(create_sft_dataset(URL, 0, opening=OpenOptions(cache_size=total // 2 + 1)), shuffle=False)
    PackedLoader(create_sft_dataset(URL, 0), shuffle=True)
    assert not caplog.records
    small = create_sft_dataset(URL, 0, opening=OpenOptions(cache_size=total * 5 // 8))
    PackedLoader(small, shuffle=True)
    PackedLoader(small, shuffle=True)
    [record] = caplog.records
    message = record.getMessage()
    assert "a full shuffle visits" in message
    assert f"(about 2 shards of {NUM_SHARDS})" in message
    assert "set shard_window=1 to visit few shards at a time, or raise cache_size to" in message
    caplog.clear()
    create_sft_dataset(URL, 0, opening=OpenOptions(cache_size=total * 5 // 8 - 1, shard_window=1))
    assert not caplog.records
    create_sft_dataset(URL, 0, opening=OpenOptions(cache_size=total * 5 // 8 - 2, shard_window=2))
    assert "shard_window=2 visits" in caplog.text


def test_a_shuffle_that_fits_is_not_announced_where_ids_are_narrow(
    store: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = write_dataset(tmp_path / "narrow", vocab_size=1000)
    upload(local, f"{URL}_narrow")
    total = sum(len(data) for name, data in files(local).items() if name.startswith("train"))
    caplog.set_level(logging.WARNING)
    PackedLoader(create_sft_dataset(f"{URL}_narrow", 0, opening=OpenOptions(cache_size=total + 100)), shuffle=True)
    assert not caplog.records
    PackedLoader(create_sft_dataset(f"{URL}_narrow", 0, opening=OpenOptions(cache_size=total - 1000)), shuffle=True)
    assert f"(about 3 shards of {NUM_SHARDS})" in caplog.text


def test_what_finds_no_room_is_asked_for_once(
    published: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_packed_sft.remote.fetch_ahead.NUM_SHARDS_AT_ONCE", 0)  # the test is the thread
    total = sum(len(data) for name, data in files(tmp_path / "my_dataset").items() if name.startswith("train"))
    dataset = create_sft_dataset(URL, 0, opening=OpenOptions(cache_size=total // 2))
    views = [dataset.source.bin(index).input_ids for index in (0, 6)]  # of two shards, which is all that has room
    dataset.source.advise(np.arange(len(dataset)))
    cache = node_cache(size=total // 2)
    for _ in range(5):
        assert cache.ahead.step()
    names = [f"sets/my_dataset/train/shard_{number:06d}/manifest.json" for number in (2, 3)]
    assert [published.fetched()[name] for name in names] == [1, 0], "nor is there room for those behind the first"
    assert sum(view.sum() for view in views) > 0


MAP_ALL = """
import sys
from megatron_packed_sft import OpenOptions, create_sft_dataset
dataset = create_sft_dataset(sys.argv[1], 0, opening=OpenOptions(cache_size=int(sys.argv[2])))
for index in (0, 6): dataset[index]
print("mapped", flush=True)
sys.stdin.readline()
"""


def test_a_process_that_is_short_of_room_gets_it_from_the_others(
    published: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = files(tmp_path / "my_dataset")
    size = 2 * sum(len(data) for name, data in local.items() if "shard_000000" in name) + 100
    command = [sys.executable, "-c", MAP_ALL, URL, str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "mapped\n"
        dataset = create_sft_dataset(URL, 0, opening=OpenOptions(cache_size=size))
        for index in (12, 18):  # the other two shards
            dataset[index]
        assert sum(entry.num_bytes for entry in node_cache(size=size).entries()) <= size
        other.communicate("\n", timeout=60)
    assert "over its size" not in caplog.text
