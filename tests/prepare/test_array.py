"""executor=array: many calls share the slices of one work directory, and the result is the one of a single run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_packed_sft.prepare.array import InputListing, Share
from megatron_packed_sft.prepare.sources import Source
from megatron_packed_sft.prepare.work_directory import WorkDirectory
from tests.packed_bins import files_of
from tests.prepare.preparing import chat, prepare, write_records

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "megatron_packed_sft", "prepare"]
NUM_FILES = 7


@pytest.fixture
def settings(tokenizer_path: str, tmp_path: Path) -> list[str]:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in range(NUM_FILES):
        write_records(folder / f"{name}.jsonl", [chat(f"{name} {row % 40}?", "Yes. " * row) for row in range(1, 60)])
    return [
        f"input={folder}/*.jsonl", f"tokenizer.path={tokenizer_path}", "template=chatml", "packing.pack_size=256",
        "executor.num_workers=1", "split.validation_fraction=0.2", "max_drop_share=1",
    ]  # fmt: skip


def call(index: int | None, count: int) -> list[str]:
    return ["executor=array", f"executor.index={'null' if index is None else index}", f"executor.count={count}"]


@pytest.mark.parametrize(("count", "more"), [(3, []), (2, ["deduplicate=true"]), (9, [])])
def test_calls_in_any_order_and_a_last_one_give_the_bytes_of_a_local_run(
    settings: list[str], tmp_path: Path, count: int, more: list[str]
) -> None:
    output = f"output={tmp_path}/data"
    num_slices = []
    for index in reversed(range(count)):
        done = prepare(*settings, *more, output, *call(index, count), "--json")
        assert done.code == 0, done.err
        report = json.loads(done.out)
        assert report["num_reused"] == 0
        num_slices.append(report["num_slices"])
    assert sum(num_slices) == NUM_FILES, "a slice belongs to exactly one call"
    assert max(num_slices) - min(num_slices) <= 1
    assert not (tmp_path / "data").exists()
    last = prepare(*settings, *more, output, "executor=array")
    assert last.code == 0, last.err
    assert f"{NUM_FILES} slices: {NUM_FILES} reused, 0 encoded" in last.out
    assert prepare(*settings, *more, f"output={tmp_path}/local").code == 0
    assert files_of(tmp_path / "data") == files_of(tmp_path / "local")


def test_the_last_call_says_how_much_is_missing_and_what_to_run_again(settings: list[str], tmp_path: Path) -> None:
    arguments = [*settings, f"output={tmp_path}/data"]
    early = prepare(*arguments, "executor=array")
    assert early.code != 0
    assert "no call with executor.index has worked in" in early.err
    done = prepare(*arguments, *call(1, 5))
    assert "share 1 of 5: 1 slice: 0 reused, 1 encoded" in done.out
    assert "without executor.index to plan and publish" in done.out
    failed = prepare(*arguments, *call(None, 5))
    assert failed.code != 0
    assert f"5 of 7 files have not been read yet, such as {tmp_path}/rows/" in failed.err
    assert "; run executor.index=0,2-4 of executor.count=5 again" in failed.err
    assert failed.err.count("\n") == 1
    assert not (tmp_path / "data").exists()
    local = prepare(*arguments)
    assert "7 slices: 1 reused, 6 encoded" in local.out, "a local run encodes the rest itself"


def test_a_damaged_share_is_named_by_the_last_call(settings: list[str], tmp_path: Path) -> None:
    arguments = [*settings, f"output={tmp_path}/data"]
    for index in range(4):
        assert prepare(*arguments, *call(index, 4)).code == 0
    damaged = next((tmp_path / "data.work/tokens/train/part_6000000").glob("*ids*"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    failed = prepare(*arguments, *call(None, 4))
    found = re.search(r"1 of 7 slices are not encoded; run executor.index=(\d) of executor.count=4 again", failed.err)
    assert found is not None, failed.err
    assert not (tmp_path / "data").exists()
    again = prepare(*arguments, *call(int(found[1]), 4))
    assert "slices: 1 reused, 1 encoded" in again.out
    assert prepare(*arguments, *call(None, 4)).code == 0
    assert prepare(*settings, f"output={tmp_path}/local").code == 0
    assert files_of(tmp_path / "data") == files_of(tmp_path / "local")


_opened: list[str] = []
sys.addaudithook(lambda event, arguments: _opened.append(str(arguments[0])) if event == "open" else None)


def test_every_call_reads_its_own_files_and_the_last_one_none(settings: list[str], tmp_path: Path) -> None:
    arguments = [*settings, f"output={tmp_path}/data"]
    read: list[set[str]] = []
    for more in (call(0, 3), call(1, 3), call(2, 3), call(None, 3)):
        _opened.clear()
        done = prepare(*arguments, *more)
        assert done.code == 0, done.err
        read.append({name for name in _opened if name.startswith(f"{tmp_path}/rows/")})
    # A file on the border of two shares is read for both; the first call tries the first records of four files.
    assert sum(map(len, read)) <= NUM_FILES + 2 + 2
    assert len(set.union(*read)) == NUM_FILES
    assert not read[-1]


def test_input_that_changed_after_a_call_read_it_is_refused(settings: list[str], tmp_path: Path) -> None:
    arguments = [*settings, f"output={tmp_path}/data"]
    for index in range(3):
        assert prepare(*arguments, *call(index, 3)).code == 0
    file = tmp_path / "rows/4.jsonl"
    file.write_text(file.read_text().replace("Yes.", "Nay."))
    failed = prepare(*arguments, "executor=array")
    found = re.search(r"4.jsonl changed after a call had read it; run executor.index=([0-9,-]+) of", failed.err)
    assert found is not None, failed.err
    for index in map(int, re.split("[,-]", found[1])):
        assert prepare(*arguments, *call(index, 3)).code == 0
    assert prepare(*arguments, "executor=array").code == 0
    assert prepare(*settings, f"output={tmp_path}/local").code == 0
    assert files_of(tmp_path / "data") == files_of(tmp_path / "local")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (call(3, 3), "executor.index is 3; with executor.count=3 it must be from 0 to 2"),
        (call(-1, 3), "executor.index is -1; with executor.count=3 it must be from 0 to 2"),
        (call(0, 0), "executor.count is 0; it must be at least 1"),
        (["executor=array", "executor.index=0"], "executor.count is missing"),
        (["executor.index=0"], "executor.index is for executor=array"),
        ([*call(0, 4)], "executor.count is 4, but earlier calls in"),
        ([*call(None, 4)], "executor.count is 4, but earlier calls in"),
        ([*call(0, 3), "limit=5"], "use executor=local for such a trial"),
    ],
)
def test_calls_that_do_not_belong_together_are_one_sentence(
    settings: list[str], tmp_path: Path, more: list[str], problem: str
) -> None:
    assert prepare(*settings, f"output={tmp_path}/data", *call(1, 3)).code == 0
    failed = prepare(*settings, f"output={tmp_path}/data", *more)
    assert failed.code != 0
    assert problem in failed.err
    assert failed.err.count("\n") == 1


@pytest.mark.parametrize("more", [["output=s3://bucket/data"], ["output=data", "work_dir=s3://bucket/work"]])
def test_a_work_directory_at_a_url_is_refused(settings: list[str], more: list[str]) -> None:
    failed = prepare(*settings, *more, *call(0, 3))
    assert failed.code == 2
    assert "executor=array needs a work directory on a disk that all calls share, and s3://bucket/" in failed.err


def test_other_settings_begin_a_new_array_unless_calls_of_the_old_one_run(settings: list[str], tmp_path: Path) -> None:
    arguments = [*settings, f"output={tmp_path}/data"]
    assert prepare(*arguments, *call(0, 3)).code == 0
    with WorkDirectory(tmp_path / "data.work", shared=True):
        refused = prepare(*arguments, *call(0, 2), "encode.max_len=50")
        assert "calls with another input or other settings are working in" in refused.err
        assert prepare(*arguments, *call(1, 3)).code == 0, "the old array goes on"
        publishing = prepare(*arguments, *call(None, 3))
        assert "another preparation is working in" in publishing.err
    assert prepare(*arguments, *call(0, 2), "encode.max_len=50").code == 0
    old = prepare(*arguments, "executor=array")
    assert "with this input and these settings; run those first" in old.err


def test_one_index_runs_once_at_a_time(settings: list[str], tmp_path: Path) -> None:
    arguments = [*settings, f"output={tmp_path}/data"]
    assert prepare(*arguments, *call(0, 2)).code == 0
    with WorkDirectory(tmp_path / "data.work", shared=True) as work:
        assert work.hold_lock("calls/0_of_2")
        refused = prepare(*arguments, *call(0, 2))
        assert "another call with executor.index=0 is working in" in refused.err
        assert prepare(*arguments, *call(1, 2)).code == 0
    assert prepare(*arguments, *call(0, 2)).code == 0


def test_calls_at_once_one_of_them_killed_and_run_again_give_the_bytes_of_a_local_run(
    tokenizer_path: str, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for number in range(8):
        rows = [chat(f"{number} {row}? " + "Why? " * 50, "Because. " * 50) for row in range(1000)]
        write_records(folder / f"{number}.jsonl", rows)
    settings = [
        f"input={folder}/*.jsonl", f"tokenizer.path={tokenizer_path}", "template=chatml", "packing.pack_size=1024",
        "executor.num_workers=2", "shard_megabytes=1",
    ]  # fmt: skip
    arguments = [*COMMAND, *settings, f"output={tmp_path}/data"]
    runs = [
        subprocess.Popen([*arguments, *call(index, 2)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for index in range(2)
    ]
    share = Share(InputListing.of([Source("input", (f"{folder}/*.jsonl",))]), count=2, index=1)
    numbers = [int(Path(file.path).stem) for file in share.listing.sources[0].files if share.owners_of(file) == [1]]
    receipts = [tmp_path / f"data.work/tokens/receipts/slice_{1_000_000 * number:06d}.json" for number in numbers]
    while not any(one.exists() for one in receipts) and runs[1].poll() is None:
        time.sleep(0.002)
    runs[1].send_signal(signal.SIGKILL)
    _, error = runs[0].communicate(timeout=300)
    assert runs[0].returncode == 0, error
    assert runs[1].wait() == -signal.SIGKILL
    assert runs[1].stderr is not None
    runs[1].stderr.close()
    missing = prepare(*settings, f"output={tmp_path}/data", *call(None, 2))
    assert "; run executor.index=1 of executor.count=2 again" in missing.err
    again = prepare(*settings, f"output={tmp_path}/data", *call(1, 2))
    assert again.code == 0, again.err
    assert ": 0 reused" not in again.out
    last = prepare(*settings, f"output={tmp_path}/data", *call(None, 2))
    assert last.code == 0, last.err
    assert prepare(*settings, f"output={tmp_path}/undisturbed").code == 0
    assert files_of(tmp_path / "data") == files_of(tmp_path / "undisturbed")
