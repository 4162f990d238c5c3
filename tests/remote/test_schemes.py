"""The same story with every kind of store: prepare, check, read, rerun, replace, be killed, miss an object."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_packed_sft import create_sft_dataset, open_dataset, validate
from megatron_packed_sft.cli.main import main
from megatron_packed_sft.errors import ShardFileError, StorageIOError, TargetExistsError
from megatron_packed_sft.inspect.info import describe
from megatron_packed_sft.remote.node_cache import node_cache
from megatron_packed_sft.remote.objects import (
    download_file,
    list_objects,
    object_info,
    read_object,
    remove_object,
    write_object,
)
from megatron_packed_sft.remote.uploads import UNFINISHED, upload
from tests.prepare.preparing import chat, write_records
from tests.remote.emulators import AZURE_KEY, MSC_HOME, MSC_SECRET, azure, azure_settings, google, multi_storage
from tests.remote.hub_server import REPOSITORY, TOKEN, HubServer
from tests.remote.object_store import FaultProxy
from tests.remote.test_dataset_urls import contents, files, stored, write_dataset
from tests.remote.test_remote_runs import ENCODING, UPLOAD, kill_after


class Place(NamedTuple):
    """A place to write to: a URL, and the proxy before its server, if it has one."""

    url: str
    proxy: FaultProxy | None = None
    upload_method: str = "PUT"


_SERVERS = {"gs": ("gs://bucket", google, "POST"), "az": ("az://bucket", azure, "PUT"),
            "msc": ("msc://lake", multi_storage, "PUT")}  # fmt: skip


@pytest.fixture(scope="module", params=["memory", "file", *_SERVERS])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    home = tmp_path_factory.mktemp(request.param)
    if request.param not in _SERVERS:
        yield Place({"memory": "memory://bucket", "file": f"file://{home}/bucket"}[request.param])
        return
    url, start, method = _SERVERS[request.param]
    with start(home) as (proxy, environment), pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it would look for Google's own servers
        for name, value in environment.items():
            patch.setenv(name, value)
        if request.param == "msc":
            import fsspec

            patch.setenv("PYTHONPATH", f"{os.getcwd()}:{MSC_HOME}")
            patch.syspath_prepend(MSC_HOME)
            name = "multistorageclient.contrib.async_fs.MultiStorageAsyncFileSystem"
            fsspec.register_implementation("msc", name, clobber=True)
        yield Place(url, proxy, method)


@pytest.fixture
def place(running: Place, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A corner of a store for one test, and a cache of its own."""
    monkeypatch.setenv("PACKED_SFT_CACHE_DIR", str(tmp_path / "cache"))
    if running.proxy is not None:
        running.proxy.reset()
    return running._replace(url=f"{running.url}/{request.function.__name__}")


def test_prepare_reads_and_writes_there_and_a_rerun_sends_nothing(
    place: Place, tokenizer_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    chats = write_records(tmp_path / "chats.jsonl", [chat(f"Say {n}.", f"It is {n}.") for n in range(40)])
    write_object(f"{place.url}/raw/chats.jsonl", chats.read_bytes())
    settings = (f"tokenizer.path={tokenizer_path}", *ENCODING)
    assert main(["prepare", f"input={chats}", f"output={tmp_path / 'local'}", *settings]) == 0
    output = f"{place.url}/sets/my_dataset"
    there = ("prepare", f"input={place.url}/raw/*.jsonl", f"output={output}", *settings)
    assert main(list(there)) == 0
    assert stored(output) == files(tmp_path / "local")
    assert validate(output, level="structure").ok
    assert validate(output).ok
    assert describe(output)["total"] == describe(tmp_path / "local")["total"]
    here = create_sft_dataset(tmp_path / "local", 0)
    assert contents(create_sft_dataset(output, 0)) == contents(here)
    if place.proxy is not None:
        place.proxy.requests.clear()
    assert main(list(there)) == 0
    if place.proxy is not None:
        assert not [name for method, name in place.proxy.requests if method == place.upload_method]
        place.proxy.is_down = True
        monkeypatch.setattr("megatron_packed_sft.remote.node_cache._SECONDS_FOR_AN_ANSWER", 0.5)
        assert contents(create_sft_dataset(output, 0)) == contents(here), "a warm cache needs no network"
        place.proxy.is_down = False
    assert main([*there, "packing.pack_size=128"]) == 1, "made differently"
    assert main([*there, "packing.pack_size=128", "--overwrite"]) == 0
    monkeypatch.undo()
    assert open_dataset(output, node_cache(tmp_path / "other_cache")).figures["train"].pack_size == 128


def test_objects_of_any_name_and_size_come_back(place: Place, tmp_path: Path) -> None:
    for name in ("with space/ü%20+#&=x", "empty", "a.b/c~d"):
        data = b"" if name == "empty" else name.encode()
        write_object(f"{place.url}/{name}", data)
        assert read_object(f"{place.url}/{name}", 100) == data
        info = object_info(f"{place.url}/{name}")
        assert info is not None
        assert (info.size, info == object_info(f"{place.url}/{name}")) == (len(data), True)
    write_object(f"{place.url}_beside/b", b"a prefix is no directory")
    assert sorted(list_objects(place.url)) == ["a.b/c~d", "empty", "with space/ü%20+#&=x"]
    assert list_objects(f"{place.url}/") == list_objects(place.url)
    with pytest.raises(ShardFileError, match="is longer than the 2 bytes"):
        download_file(f"{place.url}/a.b/c~d", tmp_path / "longer", 2)
    for _ in range(2):
        remove_object(f"{place.url}/empty")
    assert object_info(f"{place.url}/empty") is None
    with pytest.raises(StorageIOError, match="empty: it does not exist; check the URL"):
        read_object(f"{place.url}/empty", 100)


def test_data_is_sent_once_replaced_when_asked_and_missed_by_name(place: Place, tmp_path: Path) -> None:
    local, other = write_dataset(tmp_path / "one"), write_dataset(tmp_path / "other", seed=50, num_shards=2)
    assert upload(local, place.url).num_sent == len(files(local))
    assert upload(local, place.url).num_sent == 0
    with pytest.raises(TargetExistsError, match="exists already"):
        upload(other, place.url)
    assert upload(other, place.url, overwrite=True).num_removed == 14
    assert stored(place.url) == files(other)
    name = "train/shard_000001/input_ids.npy"
    remove_object(f"{place.url}/{name}")
    with pytest.raises(ShardFileError, match=f"{place.url}/{name} is missing"):
        create_sft_dataset(place.url, 0)[6]


@pytest.mark.parametrize("running", list(_SERVERS), indirect=True)
def test_an_upload_that_is_killed_there_is_finished_by_the_next(place: Place, tmp_path: Path) -> None:
    assert place.proxy is not None
    local = write_dataset(tmp_path / "data")
    place.proxy.delay = 0.02
    kill_after(place.proxy, place.upload_method, 9, UPLOAD, str(local), place.url)
    place.proxy.delay = 0.0
    left = list_objects(place.url)
    assert "dataset.json" not in left
    assert UNFINISHED in left
    assert upload(local, place.url).num_sent < len(files(local))
    assert stored(place.url) == files(local)


_LOOK = """
import sys
from megatron_packed_sft.cli.main import main
sys.exit(main(["info", sys.argv[1]]))
"""


@pytest.mark.parametrize("running", list(_SERVERS), indirect=True)
def test_wrong_credentials_are_one_sentence_without_them(place: Place) -> None:
    scheme = place.url.partition(":")[0]
    wrong = {"AZURE_STORAGE_CONNECTION_STRING": "", "MSC_LAKE_SECRET": MSC_SECRET}
    assert place.proxy is not None
    if scheme == "az":
        key = "WRONG" + AZURE_KEY[5:]
        wrong["AZURE_STORAGE_CONNECTION_STRING"] = azure_settings(place.proxy.port, key)
    else:  # these emulators let everybody in, so the proxy says what the real ones would
        key = MSC_SECRET
        place.proxy.trouble[""] = ["403"] * 1000
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, place.url], env={**os.environ, **wrong}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "check your credentials and your permission" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert key not in done.stderr


_WITHOUT = """
import sys
for name in ("s3fs", "gcsfs", "adlfs", "huggingface_hub", "multistorageclient"):
    sys.modules[name] = None
from megatron_packed_sft.cli.main import main
for scheme in ("s3", "gs", "az", "hf", "msc"):
    assert main(["validate", f"{scheme}://bucket/data"]) == 1
"""


def test_without_its_package_a_scheme_names_the_extra() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 5
    for scheme, line in zip(("s3", "gs", "az", "hf", "msc"), lines, strict=True):
        assert f"{scheme}:// URLs need a package that is not installed" in line
        assert line.endswith(f"pip install 'megatron-packed-sft[{scheme}]'")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A loopback server with a few routes of a hub, and in it chats and a dataset."""
    home = tmp_path / "served"
    write_dataset(home / "my_dataset")
    (home / "data").mkdir()
    write_records(home / "data" / "chats.jsonl", [chat(f"Say {n}.", f"It is {n}.") for n in range(40)])
    server = HubServer(home)
    yield server
    server.shutdown()
    server.server_close()


_FROM_HUB = """
import sys
from megatron_packed_sft import create_sft_dataset, validate
from megatron_packed_sft.cli.main import main
base, output, tokenizer, plain = sys.argv[1:5]
settings = [f"tokenizer.path={tokenizer}", *sys.argv[5:]]
assert main(["prepare", f"input={base}/data/*.jsonl", f"output={output}/hub", *settings]) == 0
assert main(["prepare", f"input={plain}/data/chats.jsonl", f"output={output}/plain", *settings]) == 0
print(len(list(create_sft_dataset(f"{base}/my_dataset", 0))), len(list(create_sft_dataset(f"{plain}/my_dataset", 0))))
assert validate(f"{base}/my_dataset").ok and main(["info", f"{base}/my_dataset"]) == 0
assert main(["prepare", f"input={base}/data/none.jsonl", f"output={output}/none", *settings]) != 0
assert main(["prepare", f"input={base}/data/*.jsonl", f"output={base}/out", *settings]) != 0
assert main(["convert", f"{base}/my_dataset", f"{plain}/out", "--to", "legacy"]) != 0
assert main(["validate", f"{plain}/my_dataset"]) != 0
"""


def test_a_hub_and_plain_http_are_read_and_never_written(
    hub: HubServer, tokenizer_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "home")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    base, plain = f"hf://datasets/{REPOSITORY}", f"{hub.url}/plain"
    command = [sys.executable, "-c", _FROM_HUB, base, str(tmp_path), tokenizer_path, plain, *ENCODING]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_TOKEN": TOKEN})
    assert done.returncode == 0, done.stderr
    assert "24 24" in done.stdout
    assert f"output is {base}/out, but hf:// is read-only" in done.stderr
    assert f"output is {plain}/out, but http:// is read-only" in done.stderr
    assert f"{base}/data/none.jsonl does not exist" in done.stderr
    assert "plain HTTP has no listings" in done.stderr
    local = tmp_path / "served" / "data" / "chats.jsonl"
    settings = (f"tokenizer.path={tokenizer_path}", *ENCODING)
    assert main(["prepare", f"input={local}", f"output={tmp_path / 'local'}", *settings]) == 0
    for name in ("hub", "plain"):
        made = {key: data for key, data in files(tmp_path / name).items() if key.startswith("train")}
        assert made == {key: data for key, data in files(tmp_path / "local").items() if key.startswith("train")}
    wrong = subprocess.run(
        [sys.executable, "-c", _LOOK, f"{base}/my_dataset"],
        env={**os.environ, "HF_TOKEN": "hf_a_wrong_token"}, capture_output=True, text=True,
    )  # fmt: skip
    assert wrong.returncode == 1
    assert "401 Unauthorized" in wrong.stderr
    assert "check your credentials" in wrong.stderr
    assert "hf_a_wrong_token" not in wrong.stderr
