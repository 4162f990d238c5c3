from __future__ import annotations

import shlex
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_packed_sft import PackedLoader, convert, create_sft_dataset, validate
from megatron_packed_sft.data.options import OpenOptions
from megatron_packed_sft.errors import InvalidInputError, ShardFileError, StorageIOError, TargetExistsError
from megatron_packed_sft.inspect.info import describe
from megatron_packed_sft.inspect.preview_bins import is_packed
from megatron_packed_sft.remote.node_cache import node_cache
from megatron_packed_sft.remote.objects import list_objects, object_info, read_object, write_object
from megatron_packed_sft.remote.uploads import UNFINISHED, upload
from megatron_packed_sft.storage.dataset_directory import DatasetWriter, open_dataset
from tests.packed_bins import make_bins
from tests.remote.object_store import FaultProxy

URL = "s3://bucket/sets/my_dataset"
NUM_SHARDS = 4


def write_dataset(
    path: Path,
    *,
    storage: str = "memmap_v1",
    seed: int = 0,
    num_shards: int = NUM_SHARDS,
    vocab_size: int = 70_000,
) -> Path:
    with DatasetWriter(path, storage=storage) as dataset:
        for number in range(num_shards):
            bins = make_bins(6, 32, seed=seed + number)
            with dataset.shard_writer("train", number, num_bins=6, pack_size=32, vocab_size=vocab_size) as writer:
                for index, one in enumerate(bins):
                    writer.write_bin(index, *one)
                writer.finalize()
        dataset.finalize(card="A card.")
    return path


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "my_dataset")


@pytest.fixture
def published(store: FaultProxy, local: Path) -> FaultProxy:
    upload(local, URL)
    store.requests.clear()
    return store


def contents(dataset: object) -> list[bytes]:
    return [np.concatenate([one["input_ids"], one["loss_mask"]]).tobytes() for one in dataset]  # type: ignore[attr-defined]


def stored(url: str) -> dict[str, bytes]:
    return {name: read_object(f"{url}/{name}", 1 << 24) for name in list_objects(url)}


def files(path: Path) -> dict[str, bytes]:
    return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()}


@pytest.mark.parametrize("storage", ["memmap_v1", "legacy", "parquet"])
def test_a_dataset_in_a_store_has_the_same_bins_and_fingerprint(
    store: FaultProxy, tmp_path: Path, storage: str
) -> None:
    local = write_dataset(tmp_path / "one", storage=storage)
    upload(local, URL)
    here, there = create_sft_dataset(local, 0), create_sft_dataset(URL, 0)
    assert there.fingerprint == here.fingerprint
    assert contents(there) == contents(here)
    assert "s3://bucket/sets/my_dataset" in repr(there)


def test_dataset_json_is_written_last_and_manifests_after_their_arrays(store: FaultProxy, local: Path) -> None:
    upload(local, URL)
    puts = [name for (method, name) in store.requests if method == "PUT"]
    order = [name.removeprefix("sets/my_dataset/") for name in puts]
    assert order[0] == UNFINISHED
    assert order[-1] == "dataset.json"
    manifests = [index for index, name in enumerate(order) if name.endswith("manifest.json")]
    assert max(index for index, name in enumerate(order) if name.endswith(".npy")) < min(manifests)
    assert stored(URL) == files(local)


def test_a_second_upload_sends_nothing_and_a_third_only_what_was_damaged(published: FaultProxy, local: Path) -> None:
    assert upload(local, URL).num_sent == 0
    assert not [name for method, name in published.requests if method == "PUT"]
    write_object(f"{URL}/train/shard_000001/loss_mask.npy", b"damaged")
    report = upload(local, URL)
    assert (report.num_sent, stored(URL)) == (2, files(local))  # and dataset.json, which was away meanwhile


def test_other_data_is_replaced_only_when_asked_and_strangers_never(
    published: FaultProxy, tmp_path: Path, local: Path
) -> None:
    other = write_dataset(tmp_path / "other", seed=50, num_shards=2)
    write_object(f"{URL}/notes.txt", b"mine")
    with pytest.raises(TargetExistsError, match="exists already"):
        upload(other, URL)
    report = upload(other, URL, overwrite=True)
    assert report.num_removed == 14  # two shards fewer
    assert stored(URL) == {**files(other), "notes.txt": b"mine"}
    write_object("s3://bucket/strange/notes.txt", b"mine")
    with pytest.raises(TargetExistsError, match=r"holds other objects \(notes.txt\)"):
        upload(other, "s3://bucket/strange")


def test_a_partial_upload_is_not_readable(published: FaultProxy, tmp_path: Path) -> None:
    other = write_dataset(tmp_path / "other", seed=50)
    published.trouble["PUT /bucket/sets/my_dataset/train/shard_000003"] = ["drop"] * 1000
    with pytest.raises(StorageIOError, match="cannot write s3://bucket/sets/my_dataset/train/shard_000003"):
        upload(other, URL, overwrite=True)
    unfinished = r"my_dataset is incomplete: an upload to it is running or was killed; wait for it, or run the command"
    looks = (lambda url: create_sft_dataset(url, 0), open_dataset, describe, validate, is_packed)
    for look in looks:
        with pytest.raises(StorageIOError, match=unfinished):
            look(URL)
    published.trouble.clear()
    assert upload(other, URL).num_sent < len(files(other))
    assert stored(URL) == files(other)


def test_a_warm_cache_needs_no_network(published: FaultProxy, local: Path) -> None:
    expected = contents(create_sft_dataset(local, 0))
    assert contents(create_sft_dataset(URL, 0)) == expected
    published.requests.clear()
    assert contents(create_sft_dataset(URL, 0)) == expected
    assert not published.fetched()
    published.is_down = True
    assert contents(create_sft_dataset(URL, 0)) == expected


def test_a_republished_dataset_is_not_mixed_with_the_cached_one(
    published: FaultProxy, local: Path, tmp_path: Path
) -> None:
    before = create_sft_dataset(URL, 0)
    first = contents(before)
    other = write_dataset(tmp_path / "other", seed=50)
    upload(other, URL, overwrite=True)
    assert contents(create_sft_dataset(URL, 0)) == contents(create_sft_dataset(other, 0)) != first
    assert contents(before) == first


def test_a_cache_smaller_than_the_data_stays_within_its_size(published: FaultProxy, local: Path) -> None:
    one_shard = sum(len(data) for name, data in files(local).items() if "shard_000000" in name)
    cache = node_cache(size=2 * one_shard + 100)
    dataset = create_sft_dataset(URL, 0, opening=OpenOptions(cache_size=2 * one_shard + 100))
    for _ in range(2):
        assert contents(dataset) == contents(create_sft_dataset(local, 0))
        assert sum(entry.num_bytes for entry in cache.entries()) <= 2 * one_shard + 100
    with pytest.raises(InvalidInputError, match=r"more than the whole cache of .* set cache_size to at least"):
        create_sft_dataset(URL, 0, opening=OpenOptions(cache_size=one_shard // 2))[0]


def test_a_mapped_shard_is_never_evicted(published: FaultProxy) -> None:
    dataset = create_sft_dataset(URL, 0)
    view = dataset.source.bin(0).input_ids
    cache = node_cache()
    [entry] = cache.entries()
    assert entry.in_use
    assert not cache.evict(entry.key)
    del dataset
    assert not cache.evict(entry.key), "an array over the map still lives"
    del view
    assert cache.evict(entry.key)


@pytest.mark.parametrize("kind", ["500", "503", "cut", "drop", "slow"])
def test_trouble_of_the_server_is_waited_out(published: FaultProxy, local: Path, kind: str) -> None:
    published.trouble["GET /bucket/sets/my_dataset/train/shard_000002/input_ids.npy"] = [kind, kind]
    published.trouble["GET /bucket/sets/my_dataset/dataset.json"] = [kind]
    assert contents(create_sft_dataset(URL, 0)) == contents(create_sft_dataset(local, 0))
    assert published.num_troubles >= 2


def test_a_server_that_stays_away_is_one_sentence_without_credentials(published: FaultProxy) -> None:
    published.trouble["/bucket/sets/my_dataset/train"] = ["500"] * 1000
    with pytest.raises(StorageIOError) as caught:
        create_sft_dataset(URL, 0)[0]
    message = str(caught.value)
    assert message.startswith("cannot read s3://bucket/sets/my_dataset/train/shard_000000/manifest.json: ")
    assert "(5 attempts); check the network and the store, then run again" in message
    assert "not-to-be-told" not in message
    assert "somebody-we-know" not in message
    assert caught.value.__cause__ is None


def test_a_damaged_a_missing_and_a_longer_object_are_one_sentence_each(published: FaultProxy) -> None:
    name = "train/shard_000001/input_ids.npy"
    good = read_object(f"{URL}/{name}", 1 << 20)
    dataset = create_sft_dataset(URL, 0)
    write_object(f"{URL}/{name}", good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ShardFileError, match=f"{URL}/{name} does not have the checksum in its manifest"):
        dataset[6]
    write_object(f"{URL}/{name}", good + b"more")
    with pytest.raises(ShardFileError, match=f"{URL}/{name} is longer than the .* bytes in its manifest"):
        dataset[6]
    write_object(f"{URL}/{name}", good[:100])
    with pytest.raises(ShardFileError, match=f"{URL}/{name} is shorter than"):
        dataset[6]
    from megatron_packed_sft.remote.objects import remove_object

    remove_object(f"{URL}/{name}")
    with pytest.raises(ShardFileError, match=f"{URL}/{name} is missing"):
        dataset[6]
    assert not [entry for entry in node_cache().entries() if "shard_000001" in entry.url]
    write_object(f"{URL}/{name}", good)
    dataset[6]


def test_a_copy_that_is_damaged_in_the_cache_is_an_error_when_its_bin_is_read(published: FaultProxy) -> None:
    dataset = create_sft_dataset(URL, 0)
    dataset[6]
    [path] = dataset.source.shard(1).path.glob("input_ids.npy")  # type: ignore[attr-defined]
    path.chmod(0o644)
    ids = np.load(path, mmap_mode="r+")
    ids[3, 0] ^= 1
    ids.flush()
    with pytest.raises(ShardFileError, match=r"input_ids.npy is damaged at bin 3.*run `packed-sft cache clear`"):
        dataset.fetch_batch([6, 9])
    dataset.fetch_batch([6, 8])


def test_validate_by_url_reads_headers_or_every_byte(published: FaultProxy, local: Path) -> None:
    assert validate(URL, level="structure").ok
    report = validate(URL)
    here = validate(local)
    assert report.ok
    assert (report.num_tokens, report.num_bytes) == (here.num_tokens, here.num_bytes)
    name = "train/shard_000001/input_ids.npy"
    data = read_object(f"{URL}/{name}", 1 << 20)
    write_object(f"{URL}/{name}", data[:-1] + bytes([data[-1] ^ 1]))
    write_object(f"{URL}/train/notes.txt", b"")
    [stranger] = validate(URL, level="structure").findings
    assert str(stranger) == f"{URL}/train/notes.txt: is not part of the dataset; move it away"
    found = [str(one) for one in validate(URL).findings]
    assert any(f"{URL}/{name}" in one for one in found), found
    with pytest.raises(InvalidInputError, match="does not exist"):
        validate("s3://bucket/nothing")


def test_convert_reads_and_writes_urls(published: FaultProxy, local: Path) -> None:
    convert(URL, "s3://bucket/legacy", to="legacy")
    assert contents(create_sft_dataset("s3://bucket/legacy", 0)) == contents(create_sft_dataset(local, 0))
    with pytest.raises(TargetExistsError):
        convert(URL, "s3://bucket/legacy", to="legacy")
    convert(f"{URL}/train/shard_000001", "s3://bucket/single.npy", to="legacy")
    single = create_sft_dataset("s3://bucket/single.npy", 0)
    assert contents(single) == contents(create_sft_dataset(local / "train" / "shard_000001", 0))
    assert contents(create_sft_dataset(f"{URL}/train/shard_000001", 0)) == contents(single)


def test_shards_are_fetched_ahead_in_the_order_of_their_use(published: FaultProxy, local: Path) -> None:
    dataset = create_sft_dataset(URL, 0)
    dataset.advise([18, 0])
    cache = node_cache()
    done = threading.Event()
    for _ in range(200):
        if len(list(cache.entries())) == 2:
            break
        done.wait(0.05)
    assert {entry.url.rpartition("/")[2] for entry in cache.entries()} == {"shard_000000", "shard_000003"}
    loader = PackedLoader(dataset, micro_batch_size=2, shuffle=True, seed=1)
    plain = PackedLoader(create_sft_dataset(local, 0), micro_batch_size=2, shuffle=True, seed=1)
    for there, here in zip(loader, plain, strict=True):
        assert np.array_equal(there["tokens"].numpy(), here["tokens"].numpy())
    assert set(published.fetched().values()) == {1}


READ_ALL = """
import sys
from megatron_packed_sft import create_sft_dataset
sys.stdin.readline()
print(sum(int(one["input_ids"].sum()) for one in create_sft_dataset(sys.argv[1], 0)))
"""


def test_eight_processes_on_a_cold_cache_fetch_every_object_once(published: FaultProxy, local: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", READ_ALL, URL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = {process.communicate(timeout=120)[0] for process in processes}
    expected = sum(int(one["input_ids"].sum()) for one in create_sft_dataset(local, 0))
    assert answers == {f"{expected}\n"}
    fetched = published.fetched()
    assert set(fetched.values()) == {1}
    assert len(fetched) == len(files(local)) - 1  # all but the card


def test_info_by_url_says_what_it_says_of_local_data(published: FaultProxy, local: Path) -> None:
    there, here = describe(URL), describe(local)
    assert there["path"] == URL
    assert there["kind"] == here["kind"]
    assert there["total"] == here["total"]
    assert "packed-sft-upload" not in str(there)
    odd = "s3://bucket/my sets/ü [1]"
    upload(local, odd)
    lines = describe(odd)["how_to_use"]
    assert shlex.split(lines[1])[-1] == f"data.path='{odd}'", "as a shell and Hydra take it"
    assert yaml.safe_load(textwrap.dedent("\n".join(lines[3:6])))["data"] == {"path": odd}


def test_object_info_says_what_the_store_says(published: FaultProxy, local: Path) -> None:
    info = object_info(f"{URL}/dataset.json")
    assert info is not None
    assert info.size == (local / "dataset.json").stat().st_size
    assert info.md5 is not None
    assert object_info(f"{URL}/nothing") is None
