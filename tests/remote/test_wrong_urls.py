"""Mistakes with URLs and stores that cannot be written to: one sentence, before any work."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from megatron_packed_sft.cli.main import main
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.remote import filesystem
from megatron_packed_sft.remote.filesystem import retried
from megatron_packed_sft.remote.objects import list_objects, object_info, try_writing
from tests.prepare.preparing import chat, write_records
from tests.remote.object_store import FaultProxy
from tests.remote.test_dataset_urls import write_dataset


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("s3:/bucket/data", "s3:/bucket/data has one slash after its scheme; write s3://bucket/data"),
        ("file:/data/set", "file:/data/set has one slash after its scheme; write file:///data/set"),
        ("s3:///data", "s3:///data names no bucket; write s3://BUCKET/NAME"),
        ("gs://", "gs:// names no bucket; write gs://BUCKET/NAME"),
        ("https://host/a?X-Amz-Signature=abc", "contains a query or a password.* download the file and"),
        ("s3://me:secret@bucket/data", "contains a query or a password.* give the plain URL, and set"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_with_the_remedy(url: str, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence) as caught:
        object_info(url)
    assert "abc" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_url_is_a_path_to_look_at_whatever_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", "https://host/a.jsonl?X-Amz-Signature=abc", "template=chatml"]) == 2
    assert "contains a query or a password" in capsys.readouterr().err


def test_unwritable_output_is_refused_before_any_work(
    store: FaultProxy, tmp_path: Path, tokenizer_path: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    chats = write_records(tmp_path / "chats.jsonl", [chat("Say 1.", "It is 1.")])
    data = write_dataset(tmp_path / "data", num_shards=1)
    prepare = ["prepare", f"input={chats}", f"tokenizer.path={tokenizer_path}", "template=chatml"]
    train = ["train", f"data.path={data}", f"output={tmp_path / 'run'}"]
    before = set(tmp_path.rglob("*"))

    def refused(*words: str) -> str:
        assert main(list(words)) in (1, 2)
        return capsys.readouterr().err

    assert "cannot write to s3://gone/x: its bucket does not exist; create it" in refused(
        *prepare, "output=s3://gone/x"
    )
    copies = "checkpoint.copy_to=s3://gone/run"
    assert "cannot write to s3://gone/run: its bucket does not exist; create it" in refused(*train, copies)
    assert "write s3://bucket/x" in refused(*prepare, "output=s3:/bucket/x")
    assert "write s3://bucket/x" in refused(*train, "checkpoint.copy_to=s3:/bucket/x")
    store.trouble["PUT /bucket/x"] = ["403", "403"]
    assert "cannot write to s3://bucket/x: AccessDenied; check your credentials" in refused(
        *prepare, "output=s3://bucket/x"
    )
    assert "cannot write to s3://bucket/x: AccessDenied; check your credentials" in refused(
        *train, "checkpoint.copy_to=s3://bucket/x"
    )
    assert set(tmp_path.rglob("*")) == before
    try_writing("s3://bucket/x")
    assert not list_objects("s3://bucket/x")


def test_a_store_that_does_not_answer_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(filesystem, "PATIENCE", 0.02)
    monkeypatch.setattr(filesystem, "_SECONDS_BETWEEN_WARNINGS", 0.0)
    caplog.set_level(logging.WARNING)
    end = time.monotonic() + 60

    def hear() -> None:
        while not caplog.records and time.monotonic() < end:
            time.sleep(0.01)

    retried("look at", "s3://me:secret@bucket/key", hear)
    assert "has not answered the request to look at s3://***@bucket/key for" in caplog.text
    assert not filesystem._waiting
