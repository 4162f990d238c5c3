"""executor=ray on a real cluster: the bytes of a local run, also when workers and nodes are killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.executor import RayExecutor
from megatron_packed_sft.remote.objects import list_objects
from tests.packed_bins import files_of
from tests.prepare.preparing import chat, prepare, write_records
from tests.remote.object_store import BUCKET, FaultProxy, free_port, moto_server
from tests.remote.test_dataset_urls import stored

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "megatron_packed_sft", "prepare"]
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
START = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]


class Cluster:
    """A head node, and nodes that join it, with processes that are all ours."""

    def __init__(self, folder: Path, store: FaultProxy) -> None:
        self.store = store
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.folder = folder  # short: Ray's sockets are in it, and their paths have at most 107 characters
        self.environment = {**os.environ, **ENVIRONMENT, "HOME": str(folder), "TMPDIR": str(folder)}
        self.environment.pop("PACKED_SFT_CACHE_DIR", None)
        head = ["--head", f"--port={port}", "--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
        self.head = self.start(*head, f"--temp-dir={folder}/head")

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a node with two CPUs, and wait until it belongs to the cluster."""
        num_started = self._num_started()
        more = ["--node-ip-address=127.0.0.1", "--num-cpus=2", f"--object-store-memory={80 << 20}"]
        with (self.folder / "log").open("ab") as log:
            node = subprocess.Popen(
                [*START, *arguments, *more],
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while self._num_started() == num_started:
            assert node.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.1)
        return node

    def _num_started(self) -> int:
        log = self.folder / "log"
        return log.read_text().count("Ray runtime started") if log.exists() else 0

    @contextmanager
    def run(self, arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
        """Prepare with this cluster."""
        with subprocess.Popen(
            [*COMMAND, *arguments, "executor=ray", f"executor.address={self.address}"],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as run:
            try:
                yield run
            finally:
                run.kill()


def end(node: subprocess.Popen[bytes]) -> None:
    """Kill a node with all its workers, whatever session they are in."""
    for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    node.wait()


def stopped_in(task: str, node: subprocess.Popen[bytes], run: subprocess.Popen[str]) -> psutil.Process:
    """Return a worker of a node that was stopped (SIGSTOP) while it did such a task."""
    title = f"ray::{task}"
    while run.poll() is None:
        for process in psutil.Process(node.pid).children(recursive=True):
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith(title):
                    process.suspend()
                    if process.cmdline()[0].startswith(title):
                        return process
                    process.resume()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.002)
    pytest.fail(f"the run ended before any {task}: {run.communicate()}")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    """A real S3 server, in the environment of every process that is started here."""
    s3fs, _ = pytest.importorskip("s3fs"), pytest.importorskip("moto")
    folder = tmp_path_factory.mktemp("moto")
    with moto_server(folder / "log") as port, pytest.MonkeyPatch.context() as patch:
        proxy = FaultProxy(port)
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "not-to-be-told")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir(BUCKET)
        yield proxy
        proxy.close()


@pytest.fixture(scope="module")
def cluster(store: FaultProxy) -> Iterator[Cluster]:
    pytest.importorskip("ray")
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    started = Cluster(folder, store)
    yield started
    end(started.head)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, tokenizer_path: str) -> list[str]:
    folder = tmp_path_factory.mktemp("rows")
    for number in range(6):
        rows = [chat(f"{number} {row}? " + "Why? " * 50, "Because. " * 50) for row in range(1500)]
        write_records(folder / f"{number}.jsonl", rows)
    return [
        f"input={folder}/*.jsonl", f"tokenizer.path={tokenizer_path}", "template=chatml", "packing.pack_size=1024",
        "shard_megabytes=1", "split.validation_fraction=0.2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def local(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    home = tmp_path_factory.mktemp("local")
    for name, more in (("plain", []), ("deduplicated", ["deduplicate=true"])):
        assert prepare(*settings, f"output={home}/{name}", *more).code == 0
    assert len(list((home / "plain" / "train").iterdir())) > 3
    return files_of(home)


def part_of(files: dict[str, bytes], name: str) -> dict[str, bytes]:
    return {path.removeprefix(f"{name}/"): data for path, data in files.items() if path.startswith(f"{name}/")}


@pytest.mark.parametrize("task", ["encode_slice_and_send", "_write_shard"])
def test_a_worker_killed_in_the_middle_of_a_stage_changes_no_byte_of_what_is_in_a_store(
    cluster: Cluster, settings: list[str], local: dict[str, bytes], task: str
) -> None:
    cluster.store.requests.clear()
    url = f"s3://{BUCKET}/{task}"
    with cluster.run([*settings, f"output={url}"]) as run:
        worker = stopped_in(task, cluster.head, run)
        assert "dataset.json" not in list_objects(url)
        worker.kill()
        out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    assert "slices: 0 reused, " in out
    assert stored(url) == part_of(local, "plain")
    assert any(name.startswith("tokens/receipts/") for name in list_objects(f"{url}.work"))


def test_a_driver_killed_while_it_plans_is_run_again_and_fetches_no_tokens(
    cluster: Cluster, settings: list[str], local: dict[str, bytes]
) -> None:
    store, url = cluster.store, f"s3://{BUCKET}/plan"
    store.trouble, store.num_troubles = {f"PUT /{BUCKET}/plan.work/plans/": ["slow"]}, 0
    store.requests.clear()
    with cluster.run([*settings, f"output={url}"]) as run:
        while not store.num_troubles:
            assert run.poll() is None, run.communicate()
            time.sleep(0.002)
        run.send_signal(signal.SIGKILL)
    assert not [name for name in store.fetched() if name.endswith("ids.npy")], "lengths are enough for a plan"
    with cluster.run([*settings, f"output={url}"]) as run:
        out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    assert ", 0 encoded" in out
    assert stored(url) == part_of(local, "plain")


@pytest.mark.parametrize("task", ["hash_slice", "_write_shard"])
def test_a_worker_killed_in_the_middle_of_a_stage_changes_no_byte(
    cluster: Cluster, settings: list[str], local: dict[str, bytes], tmp_path: Path, task: str
) -> None:
    deduplicated = task == "hash_slice"
    more = ["deduplicate=true"] if deduplicated else []
    with cluster.run([*settings, *more, f"output={tmp_path}/data"]) as run:
        worker = stopped_in(task, cluster.head, run)
        assert not (tmp_path / "data").exists()
        worker.kill()
        out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    assert out.startswith("scan "), "what Ray says is not on stdout"
    assert "slices: 0 reused, " in out
    assert files_of(tmp_path / "data") == part_of(local, "deduplicated" if deduplicated else "plain")
    assert sorted(os.listdir(tmp_path)) == ["data", "data.work"]


def test_a_node_killed_in_the_middle_of_encode_changes_no_byte(
    cluster: Cluster, settings: list[str], local: dict[str, bytes], tmp_path: Path
) -> None:
    node = cluster.start(f"--address={cluster.address}")
    try:
        with cluster.run([*settings, f"output={tmp_path}/data", "executor.num_workers=4"]) as run:
            stopped_in("encode_slice", node, run)
            end(node)
            _, err = run.communicate(timeout=100)
    finally:
        if node.poll() is None:
            end(node)
    assert run.returncode == 0, err
    assert files_of(tmp_path / "data") == part_of(local, "plain")


BOUNDED = """
import sys
from megatron_packed_sft.prepare.executor import RayExecutor

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) // 1024

taken = done = most = 0

def tasks():
    global taken, most
    for _ in range(300):
        taken += 1
        most = max(most, taken - done)
        yield bytes(1 << 20)

executor = RayExecutor(sys.argv[1], num_workers=3)
executor.fitting(0)
before = resident()
for size in executor.run(len, tasks(), int):
    assert size == 1 << 20
    done += 1
grown = resident() - before
executor.close()  # which gives stdout back
print(done, most, grown)
"""


def test_few_tasks_are_under_way_and_the_memory_of_the_driver_does_not_grow_with_them(cluster: Cluster) -> None:
    script = [sys.executable, "-c", BOUNDED, cluster.address]
    out = subprocess.run(
        script, env=cluster.environment, capture_output=True, text=True, timeout=100, check=True
    ).stdout
    num_done, most_under_way, megabytes = map(int, out.split()[-3:])
    assert num_done == 300
    assert most_under_way <= 2 * 3
    assert megabytes < 100, "300 MB went through"


def test_a_bad_record_is_the_same_sentence_as_without_a_cluster(
    cluster: Cluster, tokenizer_path: str, tmp_path: Path
) -> None:
    rows = write_records(tmp_path / "rows.jsonl", [chat("One?", "Yes."), {"messages": 3}])
    arguments = [f"input={rows}", f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", "template=chatml"]
    with cluster.run(arguments) as run:
        _, err = run.communicate(timeout=100)
    alone = prepare(*arguments)
    assert (run.returncode, err) == (alone.code, alone.err)


def test_without_an_address_a_cluster_is_started_and_ended(
    settings: list[str], local: dict[str, bytes], tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    done = subprocess.run(
        [*COMMAND, *settings, f"output={tmp_path}/data", "executor=ray", "executor.num_workers=2"],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Ray") == 0
    assert files_of(tmp_path / "data") == part_of(local, "plain")


def test_counts_and_packages_that_cannot_work_are_one_sentence(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInputError, match=r"executor.num_cpus is 0; it must be more than 0"):
        RayExecutor(num_cpus=0)
    monkeypatch.setitem(sys.modules, "ray", None)
    failed = prepare(*settings, f"output={tmp_path}/data", "executor=ray")
    assert failed.code != 0
    assert "executor=ray needs the package ray; install it with pip install 'megatron-packed-sft[ray]'" in failed.err


def test_a_cluster_that_is_not_there_is_one_sentence(settings: list[str], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    address = f"127.0.0.1:{free_port()}"
    done = subprocess.run(
        [*COMMAND, *settings, f"output={tmp_path}/data", "executor=ray", f"executor.address={address}"],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith(
        f"packed-sft prepare: error: there is no Ray cluster at executor.address={address} ("
    )
