"""A work directory in an object store: calls of an array on nodes that share nothing else, killed runs, leases."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from megatron_packed_sft.remote.lease import Lease

from megatron_packed_sft.remote import lease as leases
from megatron_packed_sft.remote.objects import list_objects, read_object, write_object
from tests.packed_bins import files_of
from tests.prepare.preparing import Outcome, chat, prepare, write_records
from tests.remote.object_store import FaultProxy
from tests.remote.test_dataset_urls import stored

WORK = "s3://bucket/work"
URL = "s3://bucket/sets/data"
NUM_FILES = 4
COMMAND = [sys.executable, "-m", "megatron_packed_sft.prepare"]


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


def call(index: int | None, count: int) -> list[str]:
    return ["executor=array", *([] if index is None else [f"executor.index={index}", f"executor.count={count}"])]


def local_run(settings: list[str], tmp_path: Path, *more: str) -> dict[str, bytes]:
    done = prepare(*settings, f"output={tmp_path}/local", *more)
    assert done.code == 0, done.err
    return files_of(tmp_path / "local")


def test_calls_on_nodes_that_share_only_a_store_give_the_bytes_of_a_local_run(
    store: FaultProxy, nodes: Nodes, settings: list[str], tmp_path: Path
) -> None:
    local = local_run(settings, tmp_path)
    arguments = [*settings, f"output={URL}"]  # the work directory is beside it
    for index in (2, 0, 1):
        done = nodes.prepare(f"node_{index}", *arguments, *call(index, 3))
        assert done.code == 0, done.err
    assert not store.fetched().keys() & {name for name in store.fetched() if "/ids.npy" in name}, "no call reads tokens"
    assert not list((tmp_path / "node_0" / "home").rglob("ids.npy")), "sent and moved to the cache"
    store.requests.clear()
    last = nodes.prepare("node_3", *arguments, "executor=array")
    assert last.code == 0, last.err
    assert f"{NUM_FILES} slices: {NUM_FILES} reused, 0 encoded" in last.out
    assert stored(URL) == local
    fetched = store.fetched()
    tokens = {name: count for name, count in fetched.items() if name.endswith(("ids.npy", "train.npy"))}
    assert set(tokens.values()) == {1}, "publishing fetches every part once"
    store.requests.clear()
    again = nodes.prepare("node_4", *arguments, f"work_dir={URL}.work", "packing.pack_size=256", "output=s3://bucket/b")
    assert f"{NUM_FILES} slices: {NUM_FILES} reused, 0 encoded" in again.out, again.err


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
    local = local_run(settings, tmp_path)
    arguments = [*settings, f"output={URL}", f"work_dir={WORK}"]
    assert nodes.prepare("a", *arguments, *call(0, 1)).code == 0
    data = bytearray(read_object(f"{WORK}/{name}", 1 << 20))
    data[-1] ^= 1
    write_object(f"{WORK}/{name}", bytes(data))
    failed = nodes.prepare("b", *arguments, "executor=array")
    assert "1 of 4 slices are not encoded; run executor.index=0 of executor.count=1 again" in failed.err
    done = nodes.prepare("c", *arguments)
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


def test_calls_killed_in_the_middle_of_every_stage_are_run_again_and_change_no_byte(
    store: FaultProxy, nodes: Nodes, settings: list[str], tmp_path: Path
) -> None:
    local = local_run(settings, tmp_path)
    arguments = [*settings, f"output={URL}", f"work_dir={WORK}"]
    first, last = [*arguments, *call(0, 2)], [*arguments, "executor=array"]
    killed(store, "PUT /bucket/work/tokens/receipts/slice_", first, tmp_path / "a")
    receipts = [name for name in list_objects(WORK) if name.startswith("tokens/receipts/") and name.endswith(".json")]
    assert not receipts, "a slice is there when its receipt is, which goes last"
    again = nodes.prepare("b", *first)
    assert "share 0 of 2: 2 slices: 0 reused, 2 encoded" in again.out, again.err
    assert nodes.prepare("c", *arguments, *call(1, 2)).code == 0
    killed(store, "PUT /bucket/work/plans/train.npz", last, tmp_path / "d")
    killed(store, "PUT /bucket/sets/data/train/shard_000000/manifest.json", last, tmp_path / "e")
    assert "dataset.json" not in list_objects(URL), "half a dataset cannot be opened"
    done = nodes.prepare("f", *last)
    assert done.code == 0, done.err
    assert "train: reused" in done.out
    assert stored(URL) == local


def test_a_second_preparation_is_refused_with_the_name_of_the_first(nodes: Nodes, settings: list[str]) -> None:
    arguments = [*settings, f"output={URL}", f"work_dir={WORK}"]
    lease, _ = Lease.taken(f"{WORK}/lock.json")
    assert lease is not None
    for more in ([], call(0, 2), call(None, 2)):
        refused = nodes.prepare("a", *arguments, *more)
        assert f"is working in {WORK}: process {os.getpid()} on {socket.gethostname()}, since 20" in refused.err
        assert refused.err.count("\n") == 1
    lease.release()
    other, _ = Lease.taken(f"{WORK}/calls/1_of_2.json")
    assert other is not None
    assert nodes.prepare("a", *arguments, *call(0, 2)).code == 0, "calls work side by side"
    assert "another call with executor.index=1 is working in" in nodes.prepare("a", *arguments, *call(1, 2)).err
    assert f"is working in {WORK}: process {os.getpid()}" in nodes.prepare("a", *arguments, "executor=array").err
    other.release()
    assert not [name for name in list_objects(WORK) if name.startswith(("lock", "calls/", "array.lock"))]


def test_the_lease_of_a_dead_owner_does_not_last(store: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{WORK}/lock.json"
    script = f"import os; from megatron_packed_sft.remote.lease import Lease; Lease.taken({url!r}); os._exit(9)"
    subprocess.run([sys.executable, "-c", script], check=False)
    lease, _ = Lease.taken(url)
    assert lease is not None, "a process of this machine that is gone"
    document = json.loads(read_object(url, 1000))
    stranger = {**document, "machine": "another", "host": "far-away", "identity": "else"}
    write_object(url, json.dumps({**stranger, "renewed": time.time() - leases.EXPIRES_AFTER - 1}).encode())
    lease.release()  # not ours any more, so it stays
    again, _ = Lease.taken(url)
    assert again is not None, "nobody heard of it for two minutes"
    write_object(url, json.dumps({**stranger, "renewed": time.time()}).encode())
    refused, owner = Lease.taken(url)
    assert refused is None
    assert str(owner).startswith(f"process {os.getpid()} on far-away, since 20")


def test_of_two_who_find_the_lease_of_a_dead_owner_one_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://leases/lock.json"
    dead = leases.Owner("far-away", "another", 1, since=0.0, renewed=0.0, identity="dead")
    write_object(url, json.dumps(dead._asdict()).encode())
    first, second = threading.get_ident(), []
    second_has_it, first_is_done = threading.Event(), threading.Event()
    owner_of, looks = leases.owner_of, []

    def slow_look(url: str) -> Any:
        if threading.get_ident() != first or looks:
            return owner_of(url)
        looks.append(url)  # the first process reads the dead owner's name, and the second is faster from here on
        thread.start()
        assert second_has_it.wait(60)
        return dead

    def wait_for_others() -> None:
        if threading.get_ident() != first:
            second_has_it.set()
            assert first_is_done.wait(60)

    thread = threading.Thread(target=lambda: second.append(Lease.taken(url)))
    monkeypatch.setattr(leases, "owner_of", slow_look)
    monkeypatch.setattr(leases, "_wait_for_others", wait_for_others)
    mine, _ = Lease.taken(url)
    first_is_done.set()
    thread.join(60)
    [(other, owner)] = second
    assert mine is not None
    assert other is None, "both would work in one directory"
    assert owner == owner_of(url)
    mine.release()


def test_an_owner_renews_its_lease_and_notices_that_it_lost_it(
    store: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEWED_EVERY", 0.05)
    url = f"{WORK}/lock.json"
    lease, _ = Lease.taken(url)
    assert lease is not None
    first = leases.owner_of(url)
    while (now := leases.owner_of(url)) is None or first is None or now.renewed == first.renewed:
        time.sleep(0.02)
    lease.refuse_lost()
    write_object(url, json.dumps({**now._asdict(), "identity": "else", "host": "far-away"}).encode())
    while lease.lost_to is None:
        time.sleep(0.02)
        write_object(url, json.dumps({**now._asdict(), "identity": "else", "host": "far-away"}).encode())
    with pytest.raises(Exception, match=r"was taken over by process .* on far-away"):
        lease.refuse_lost()
