"""Copies of checkpoints against a real S3 server: sent, found, fetched; with trouble, and after a kill."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_packed_sft.errors import InvalidInputError, ManifestError, ShardFileError, StorageIOError
from megatron_packed_sft.remote.objects import list_objects, object_info, read_object, remove_object, write_object
from megatron_packed_sft.remote.uploads import UNFINISHED, is_tag_of_parts
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.train.checkpoint import STATE, CheckpointDirectory, TrainingState, find_checkpoint
from megatron_packed_sft.train.checkpoint_copies import CopiedRun, CopySender, bring_newest, fetch_copy
from tests.remote.object_store import FaultProxy
from tests.remote.test_dataset_urls import files, stored
from tests.remote.test_remote_runs import kill_after
from tests.train.sound_states import MODEL, SCHEDULER

URL = "s3://bucket/run"
NUM_FILES = 5


def write_checkpoint(directory: CheckpointDirectory, step: int, num_files: int = NUM_FILES) -> Path:
    """A checkpoint as `CheckpointDirectory.save` publishes one, with bytes instead of tensors."""
    path = directory.path / f"step_{step:06d}"
    path.mkdir(parents=True)
    parts = {f"__{number}_0.distcp": f"{step} {number} ".encode() * 3000 for number in range(num_files)}
    for name, data in parts.items():
        (path / name).write_bytes(data)
    state = TrainingState(
        step=step,
        data={},
        scheduler=SCHEDULER,
        model=MODEL,
        files={name: len(data) for name, data in parts.items()},
        checksums={name: checksum(data) for name, data in parts.items()},
    )
    (path / STATE).write_bytes(state.to_bytes())
    (directory.path.parent / "metrics.jsonl").write_text(f'{{"event": "step", "step": {step}}}\n')
    return path


@pytest.fixture(autouse=True)
def two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_packed_sft.remote.filesystem.NUM_ATTEMPTS", 2)


@pytest.fixture
def run(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "run" / "checkpoints", keep=2)


@pytest.fixture
def elsewhere(tmp_path: Path) -> CheckpointDirectory:
    """The run's directory on a new machine."""
    return CheckpointDirectory(tmp_path / "elsewhere" / "checkpoints", keep=2)


def send(run: CheckpointDirectory, *steps: int, place: str = URL, keep: int = 0) -> tuple[str | None, list[str]]:
    """Copy checkpoints, one after the other; return what is missing in the end, and what was said."""
    said: list[str] = []
    missing = None
    for step in steps:
        sender = CopySender(CopiedRun(place), run, keep=keep, say=said.append)
        path = run.path / f"step_{step:06d}"
        sender.add(path if path.exists() else write_checkpoint(run, step))
        missing = sender.finish()
    return missing, said


def test_a_copy_has_the_bytes_of_its_checkpoint_and_its_state_last(store: FaultProxy, run: CheckpointDirectory) -> None:
    missing, said = send(run, 20)
    assert missing is None
    assert said[-1].startswith("copied step_000020 to s3://bucket/run (")
    assert stored(f"{URL}/checkpoints/step_000020") == files(run.path / "step_000020")
    puts = [name.rpartition("/")[2] for method, name in store.requests if method == "PUT"]
    assert puts[-2:] == [STATE, "latest"]
    assert read_object(f"{URL}/checkpoints/latest", 100) == b"step_000020\n"
    assert read_object(f"{URL}/metrics.jsonl", 100) == (run.path.parent / "metrics.jsonl").read_bytes()
    store.requests.clear()
    assert send(run, 20)[0] is None
    assert not [name for method, name in store.requests if method == "PUT"]


def test_old_copies_are_removed_but_strangers_never(store: FaultProxy, run: CheckpointDirectory) -> None:
    send(run, 20)
    write_object(f"{URL}/checkpoints/step_000020/notes.txt", b"mine")
    send(run, 40, 60, keep=2)
    assert CopiedRun(URL).names() == ["step_000060", "step_000040"]
    left = {name for name in list_objects(f"{URL}/checkpoints") if not name.startswith(("step_000040", "step_000060"))}
    assert left == {"latest", "step_000020/notes.txt"}


def test_trouble_is_announced_once_and_what_is_there_in_part_is_no_copy(
    store: FaultProxy, run: CheckpointDirectory, elsewhere: CheckpointDirectory
) -> None:
    send(run, 20)
    store.trouble["PUT /bucket/run/checkpoints/step_000040/__3_0"] = ["drop"] * 1000
    said: list[str] = []
    sender = CopySender(CopiedRun(URL), run, keep=2, say=said.append)
    sender.add(write_checkpoint(run, 40))
    while not said:
        time.sleep(0.05)
    store.trouble["PUT /bucket/run/checkpoints/step_000060/__3_0"] = ["drop"] * 1000
    sender.add(write_checkpoint(run, 60))
    missing = sender.finish()
    assert [line for line in said if line.startswith("warning")] == said[:1], "only the first failure is told"
    assert said[0].startswith("warning: step_000040 is not copied to s3://bucket/run: cannot write s3://bucket/run/")
    assert "training goes on" in said[0]
    assert missing is not None
    assert missing.startswith("step_000060 is not in s3://bucket/run: cannot write")
    assert "not-to-be-told" not in missing + "".join(said)
    newest = CopiedRun(URL).newest()
    assert newest is not None
    assert newest.step == 20
    store.trouble.clear()
    store.requests.clear()
    assert send(run, 60, keep=2)[0] is None
    sent = [name.rpartition("/")[2] for method, name in store.requests if method == "PUT" and "step_000060" in name]
    assert sorted(sent) == sorted(["__3_0.distcp", STATE, UNFINISHED]), "only what was missing"
    assert CopiedRun(URL).names() == ["step_000060", "step_000020"]


def test_a_checkpoint_that_is_being_copied_outlives_newer_ones_and_waiting_ones_give_way(
    store: FaultProxy, run: CheckpointDirectory
) -> None:
    store.trouble["PUT /bucket/run/checkpoints/step_000020"] = ["slow"] * 3
    said: list[str] = []
    sender = CopySender(CopiedRun(URL), run, keep=0, say=said.append)
    sender.add(write_checkpoint(run, 20))
    while not store.num_troubles:
        time.sleep(0.01)
    for step in (40, 60, 80):
        sender.add(write_checkpoint(run, step))
        run.remove_old()
    assert (run.path / "step_000020").exists()
    assert sender.finish() is None
    assert CopiedRun(URL).names() == ["step_000080", "step_000020"]
    assert sender.summary() == {"copy_to": URL, "copied": "step_000080", "num_copies_skipped": 2}
    assert sorted(path.name for path in run.path.iterdir()) == ["step_000060", "step_000080"]


def test_sigterm_ends_the_waiting_and_says_what_is_missing(store: FaultProxy, run: CheckpointDirectory) -> None:
    store.trouble["PUT /bucket/run/checkpoints/step_000020"] = ["slow"] * 8
    said: list[str] = []
    sender = CopySender(CopiedRun(URL), run, keep=0, say=said.append)
    sender.add(write_checkpoint(run, 20, num_files=8))
    while not store.num_troubles:
        time.sleep(0.01)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    missing = sender.finish()
    assert said[0].startswith("copying step_000020 to s3://bucket/run; ")
    assert "the same command sends what is missing" in said[0]
    assert missing is not None
    assert missing.startswith("step_000020 is not in s3://bucket/run: SIGTERM ended the upload")
    assert CopiedRun(URL).newest() is None
    sender._thread.join()
    store.reset()
    assert send(run, 20)[0] is None


def test_the_newest_of_both_places_is_resumed_from(
    store: FaultProxy, run: CheckpointDirectory, elsewhere: CheckpointDirectory
) -> None:
    copies = CopiedRun(URL)
    assert bring_newest("auto", elsewhere, copies) == ("auto", [])
    send(run, 20, 40)
    resume, [note] = bring_newest("auto", elsewhere, copies)
    assert note.startswith("fetched s3://bucket/run/checkpoints/step_000040 (5 files, ")
    found = find_checkpoint(str(resume), elsewhere)
    assert found == elsewhere.path / "step_000040"
    assert files(found) == files(run.path / "step_000040")
    assert (elsewhere.path.parent / "metrics.jsonl").exists()
    assert TrainingState.load(found).step == 40
    assert bring_newest("auto", elsewhere, copies) == ("auto", []), "it is there now"
    write_checkpoint(elsewhere, 60)
    assert bring_newest("auto", elsewhere, copies) == ("auto", [])
    assert find_checkpoint("auto", elsewhere) == elsewhere.path / "step_000060"
    store.is_down = True
    _, [note] = bring_newest("auto", elsewhere, copies)
    assert note.startswith("warning: the copies cannot be listed, so the newest local checkpoint is used: ")


def test_a_store_that_is_away_is_no_reason_to_start_from_scratch(
    store: FaultProxy, elsewhere: CheckpointDirectory
) -> None:
    store.is_down = True
    with pytest.raises(StorageIOError, match="cannot list s3://bucket/run/checkpoints"):
        bring_newest("auto", elsewhere, CopiedRun(URL))


def test_a_url_to_resume_from_is_a_checkpoint_or_a_copied_run(
    store: FaultProxy, run: CheckpointDirectory, elsewhere: CheckpointDirectory, tmp_path: Path
) -> None:
    send(run, 20, 40)
    path, _ = bring_newest(f"{URL}/checkpoints/step_000020", elsewhere, None)
    assert path == elsewhere.path / "step_000020"
    assert bring_newest(f"{URL}/checkpoints/step_000020", elsewhere, None) == (path, [])
    with pytest.raises(InvalidInputError, match="already has checkpoints up to step_000020; choose another output"):
        bring_newest(URL, elsewhere, None)
    third = CheckpointDirectory(tmp_path / "third" / "checkpoints")
    assert bring_newest(URL, third, None)[0] == third.path / "step_000040"
    with pytest.raises(InvalidInputError, match=r"resume=s3://bucket/nothing is not a copy of a checkpoint"):
        bring_newest("s3://bucket/nothing", third, None)
    for resume in ("never", f"{URL}/checkpoints/step_000020", str(run.path / "step_000020")):
        with pytest.raises(InvalidInputError, match="already has copies up to step_000040"):
            bring_newest(resume, CheckpointDirectory(tmp_path / "fourth"), CopiedRun(URL))


def test_what_is_fetched_is_checked_and_bounded(
    store: FaultProxy, run: CheckpointDirectory, elsewhere: CheckpointDirectory
) -> None:
    send(run, 20)
    copy = CopiedRun(URL).newest()
    assert copy is not None
    name = f"{copy.url}/__1_0.distcp"
    good = read_object(name, 1 << 20)
    for bad, problem in {good[:-1] + b"!": "does not have the checksum", good + b"more": "is longer than"}.items():
        write_object(name, bad)
        with pytest.raises(ShardFileError, match=f"{name} {problem}"):
            fetch_copy(copy, elsewhere)
        assert elsewhere.newest() is None
    remove_object(name)
    with pytest.raises(ShardFileError, match=f"{name} is missing"):
        fetch_copy(copy, elsewhere)
    for hostile in ({"../evil": 3}, {"/etc/evil": 3}, {STATE: 3}, {"a": -1}, {"a": "3"}):
        state = json.loads(copy.state)
        data = json_document.render({**state, "files": hostile, "checksums": {}})
        write_object(f"{copy.url}/{STATE}", data)
        with pytest.raises((InvalidInputError, ManifestError)):
            bring_newest(copy.url, elsewhere, None)
    assert not [path for path in elsewhere.path.parent.rglob("*") if "evil" in path.name]


SEND = """
import sys, pathlib
from megatron_packed_sft.train.checkpoint import CheckpointDirectory
from megatron_packed_sft.train.checkpoint_copies import CopiedRun, CopySender
directory = CheckpointDirectory(pathlib.Path(sys.argv[2]))
sender = CopySender(CopiedRun(sys.argv[1]), directory, keep=0, say=print)
sender.add(directory.newest())
sender.finish()
"""


def test_the_ranks_of_a_node_fetch_every_object_once(
    store: FaultProxy, run: CheckpointDirectory, elsewhere: CheckpointDirectory
) -> None:
    send(run, 20)
    store.requests.clear()
    with ThreadPoolExecutor(4) as ranks:  # with locks of their own, as processes have; test_remote_runs has processes
        answers = list(ranks.map(lambda _: bring_newest("auto", elsewhere, CopiedRun(URL)), range(4)))
    assert sum(len(notes) for _, notes in answers) == 1
    fetched = {name: count for name, count in store.fetched().items() if name.endswith(".distcp")}
    assert list(fetched.values()) == [1] * NUM_FILES
    assert files(elsewhere.path / "step_000020") == files(run.path / "step_000020")


def test_a_run_that_is_killed_while_it_copies_sends_the_rest_next_time(
    store: FaultProxy, run: CheckpointDirectory
) -> None:
    write_checkpoint(run, 20, num_files=12)
    store.delay = 0.05
    kill_after(store, "PUT", 7, SEND, URL, str(run.path))
    store.delay = 0.0
    assert CopiedRun(URL).newest() is None
    num_there = len(list_objects(f"{URL}/checkpoints/step_000020"))
    store.requests.clear()
    assert send(run, 20)[0] is None
    sent = [name for method, name in store.requests if method == "PUT" and name.endswith(".distcp")]
    assert len(sent) <= 12 - num_there + 4, "four are under way at a time"
    assert stored(f"{URL}/checkpoints/step_000020") == files(run.path / "step_000020")


def test_a_directory_takes_copies_too_and_one_that_was_cut_is_passed_over(
    run: CheckpointDirectory, elsewhere: CheckpointDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "backup"
    assert send(run, 20, 40, 60, place=str(place), keep=2)[0] is None
    assert sorted(path.name for path in (place / "checkpoints").iterdir()) == ["latest", "step_000040", "step_000060"]
    assert files(place / "checkpoints" / "step_000060") == files(run.path / "step_000060")
    state = place / "checkpoints" / "step_000060" / STATE
    state.write_bytes(state.read_bytes()[:100])
    _, [note] = bring_newest("auto", elsewhere, CopiedRun(str(place)))
    assert note.startswith(f"fetched {place}/checkpoints/step_000040")
    assert "taking an older copy" in caplog.text


def test_the_tag_of_an_upload_in_parts_proves_its_content(store: FaultProxy, tmp_path: Path) -> None:
    import fsspec

    path = tmp_path / "large"
    path.write_bytes(os.urandom(11 << 20))
    fsspec.filesystem("s3").put_file(str(path), "bucket/large", chunksize=5 << 20)
    info = object_info("s3://bucket/large")
    assert info is not None
    assert info.tag.endswith("-3")
    assert is_tag_of_parts(path, info.tag)
    with open(path, "r+b") as file:
        file.seek(6 << 20)
        file.write(b"changed")
    assert not is_tag_of_parts(path, info.tag)
