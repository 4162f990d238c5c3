from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import PackedLoader, create_sft_dataset
from megatron_packed_sft.data.options import OpenOptions
from megatron_packed_sft.data.order.sample_order import ShardOrder
from megatron_packed_sft.errors import InvalidInputError, ManifestError, StateMismatchError, StorageIOError
from megatron_packed_sft.remote.filesystem import child, is_final, retried
from megatron_packed_sft.remote.node_cache import parse_size
from megatron_packed_sft.remote.objects import read_object, write_object
from megatron_packed_sft.remote.uploads import upload
from megatron_packed_sft.support.paths import redacted
from tests.remote.test_dataset_urls import write_dataset


def test_a_window_of_shards_holds_every_sample_once_and_few_shards_at_a_time() -> None:
    order = ShardOrder((5, 7, 3, 9, 4, 8), window=2, seed=3)
    shard_of = np.repeat(np.arange(6), order.shard_sizes)
    for epoch in range(3):
        samples = order.at(np.arange(36) + 36 * epoch)
        assert sorted(samples.tolist()) == list(range(36))
        changes = np.flatnonzero(np.diff([len(set(shard_of[samples[: n + 1]])) for n in range(36)]))
        assert len(set(shard_of[samples[: changes[1]]])) == 2, "a third shard comes when two are read"
    assert not np.array_equal(order.at(np.arange(36)), order.at(np.arange(36, 72)))
    assert order.at([40, 3, 71]).tolist() == [int(order.at([n])[0]) for n in (40, 3, 71)]


def test_a_state_of_another_window_is_refused(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "data")
    sets = [create_sft_dataset(path, 0, opening=OpenOptions(shard_window=window)) for window in (1, 2)]
    assert sets[0].fingerprint != sets[1].fingerprint
    with pytest.raises(StateMismatchError):
        PackedLoader(sets[0]).load_state_dict(PackedLoader(sets[1]).state_dict())


def test_errors_of_a_store_hold_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-told")

    def fail() -> None:
        raise PermissionError("denied for https://me:password@host/key?X-Amz-Signature=abc with not-to-be-told")

    with pytest.raises(StorageIOError) as caught:
        retried("read", "s3://me:password@bucket/key?token=abc", fail)
    message = str(caught.value)
    assert message.startswith("cannot read s3://***@bucket/key?***: denied for https://***@host/key?*** with ***")
    assert not any(secret in message for secret in ("password", "abc", "not-to-be-told"))
    assert redacted("s3://bucket/key") == "s3://bucket/key"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=me;AccountKey=also-not-to-be-told==;x=y")
    assert redacted("denied: also-not-to-be-told==") == "denied: ***"


def test_an_answer_that_was_cut_is_asked_for_again() -> None:
    aiohttp = pytest.importorskip("aiohttp")
    error = aiohttp.ClientPayloadError("Response payload is not completed")
    error.__cause__ = aiohttp.http_exceptions.ContentLengthError("not enough data")
    assert error.__cause__.code == 400
    assert not is_final(error)


@pytest.mark.parametrize("name", ["..", "a/../b", "/etc/passwd", "", "a//b", "a\\b", "a\0b"])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="would lead elsewhere"):
        child("s3://bucket/data", name)


def test_a_dataset_json_whose_shard_is_a_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_packed_sft.support import json_document

    monkeypatch.setenv("PACKED_SFT_CACHE_DIR", str(tmp_path / "cache"))
    url = "memory://hostile/data"
    upload(write_dataset(tmp_path / "data"), url)
    document = json_document.parse(read_object(f"{url}/dataset.json", 1 << 20), "dataset.json")
    document["splits"]["train"]["shards"][0]["name"] = "../../secret"
    write_object(f"{url}/dataset.json", json_document.render(document))
    with pytest.raises(ManifestError, match="is malformed"):
        create_sft_dataset(url, 0)


@pytest.mark.parametrize("text", ["", "many", "-3GB", "0", "3 cats"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="cache_size is"):
        parse_size(text, "cache_size")


def test_local_data_does_not_import_fsspec(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "data")
    script = """
import sys
from megatron_packed_sft import create_sft_dataset, validate
create_sft_dataset(sys.argv[1], 0)[0]
validate(sys.argv[1], level="structure")
print([name for name in sys.modules if "fsspec" in name])
"""
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
