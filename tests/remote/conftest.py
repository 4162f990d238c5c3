from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remote.object_store import BUCKET, FaultProxy, moto_server
from tests.sample_tokenizer import train_sample_tokenizer


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A SentencePiece model with ChatML's markers, trained on sample chats."""
    return train_sample_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with moto_server(tmp_path_factory.mktemp("moto") / "log") as port:
        proxy = FaultProxy(port)
        yield proxy
        proxy.close()


@pytest.fixture
def store(server: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """The server, empty, in the environment of this process and of those that it starts; and a cache of its own."""
    import fsspec
    import s3fs

    server.reset()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody-we-know")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-told")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # so that our own attempts are what is tested
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no_config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no_credentials"))
    monkeypatch.setenv("PACKED_SFT_CACHE_DIR", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        s3fs.S3FileSystem.clear_instance_cache()
        system = fsspec.filesystem("s3")
        if system.exists(BUCKET):
            system.rm(BUCKET, recursive=True)
        system.mkdir(BUCKET)
        system.invalidate_cache()
    server.requests.clear()
    yield server
    server.reset()
