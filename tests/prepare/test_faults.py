"""reliability.md rows 3, 4 and 9: killed at any step, a full disk, two preparations of one output."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_packed_sft import validate
from tests.faults.injection import Injector
from tests.packed_bins import files_of
from tests.prepare.preparing import chat, prepare, write_records

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "megatron_packed_sft", "prepare"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("a", "b"):
        write_records(folder / f"{name}.jsonl", [chat(f"{name} {number}?", "Yes.") for number in range(12)])
    return folder


def test_killed_at_any_step_a_rerun_goes_on_and_gives_the_same_bytes(
    rows: Path, tokenizer_path: str, tmp_path: Path
) -> None:
    driver = subprocess.run(
        [sys.executable, "-m", "tests.faults.prepare_kill_driver", str(rows), tokenizer_path, str(tmp_path), "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert driver.returncode == 0, driver.stderr
    seen = json.loads(driver.stdout)
    assert seen["problems"] == []
    assert all(seen["stages"].values()), seen["stages"]
    assert seen["reused"] > 10


@pytest.mark.parametrize("stage", ["encode", "shards"])
def test_killed_with_its_workers_running_a_rerun_gives_the_same_bytes(
    stage: str, tokenizer_path: str, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for number in range(6):
        rows = [chat(f"{number} {row}? " + "Why? " * 50, "Because. " * 50) for row in range(1500)]
        write_records(folder / f"{number}.jsonl", rows)
    arguments = [
        f"input={folder}/*.jsonl", f"tokenizer.path={tokenizer_path}", "template=chatml", "packing.pack_size=1024",
        "executor.num_workers=2", "shard_megabytes=1",
    ]  # fmt: skip
    sign = {"encode": "data.work/tokens/receipts/slice_000000.json", "shards": ".data.staging-*/train/shard_000000"}
    with subprocess.Popen(
        [*COMMAND, *arguments, f"output={tmp_path}/data"], cwd=ROOT, stdout=subprocess.DEVNULL
    ) as run:
        while not list(tmp_path.glob(sign[stage])) and run.poll() is None:
            time.sleep(0.002)
        run.send_signal(signal.SIGKILL)
    assert not (tmp_path / "data").exists()
    again = prepare(*arguments, f"output={tmp_path}/data")
    assert again.code == 0, again.err
    assert ": 0 reused" not in again.out
    assert prepare(*arguments, f"output={tmp_path}/undisturbed").code == 0
    assert files_of(tmp_path / "data") == files_of(tmp_path / "undisturbed")


def test_a_full_disk_is_one_sentence_and_publishes_nothing(rows: Path, tokenizer_path: str, tmp_path: Path) -> None:
    def arguments(output: Path) -> list[str]:
        return [
            f"input={rows}/*.jsonl", f"output={output}", f"tokenizer.path={tokenizer_path}", "template=chatml",
            "packing.pack_size=64", "executor.num_workers=1",
        ]  # fmt: skip

    with Injector() as counter:
        assert prepare(*arguments(tmp_path / "whole" / "data")).code == 0
    for step in range(0, len(counter.calls), 4):
        output = tmp_path / f"step_{step}" / "data"
        with Injector(step, error=errno.ENOSPC):
            failed = prepare(*arguments(output))
        if failed.code == 0:  # a harmless step, such as removing a temporary file
            continue
        assert failed.code == 1, failed.err
        assert failed.err.count("\n") == 1, failed.err
        assert str(output.parent) in failed.err
        assert not output.exists() or validate(output).ok
        assert prepare(*arguments(output)).code == 0
        assert files_of(output) == files_of(tmp_path / "whole" / "data")


def small_disk(command: list[str], folder: Path, size: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a real file system of this size at a folder, that only it sees."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    script = (
        f"{shlex.join(mount)} || exit 77; {shlex.join(command)}; code=$?; ls -A {shlex.quote(str(folder))}; exit $code"
    )
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    return done


@pytest.mark.parametrize("full", ["output", "work_dir"])
def test_a_disk_that_really_is_full_is_one_sentence_with_the_bytes_needed(
    full: str, tokenizer_path: str, tmp_path: Path
) -> None:
    path = write_records(tmp_path / "rows.jsonl", [chat(f"{row}? " * 20, "Because. " * 50) for row in range(3000)])
    disk = tmp_path / "disk"
    disk.mkdir()
    places = {"output": tmp_path / "data", "work_dir": tmp_path / "work", full: disk / "data"}
    arguments = [
        f"input={path}", f"tokenizer.path={tokenizer_path}", "template=chatml", "packing.pack_size=1024",
        *(f"{name}={place}" for name, place in places.items()),
    ]  # fmt: skip
    failed = small_disk([*COMMAND, *arguments], disk, "256k")
    assert failed.returncode == 1, failed.stderr
    assert failed.stderr.count("\n") == 1
    assert f"{disk}/" in failed.stderr
    assert "No space left on device; it needs " in failed.stderr
    assert failed.stdout.split() == ([] if full == "output" else ["data"]), "a leftover fills the disk"
    assert not (tmp_path / "data").exists()
    done = prepare(*arguments)
    assert done.code == 0, done.err
    assert validate(places["output"]).ok


@pytest.mark.parametrize("work_dirs", [["work", "work"], ["one", "two"]])
def test_two_preparations_of_one_output_do_not_mix(
    rows: Path, tokenizer_path: str, tmp_path: Path, work_dirs: list[str]
) -> None:
    arguments = [
        f"input={rows}/*.jsonl", f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", "template=chatml",
        "packing.pack_size=64", "executor.num_workers=1",
    ]  # fmt: skip
    runs = [
        subprocess.Popen(
            [*COMMAND, *arguments, f"work_dir={tmp_path / work_dir}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for work_dir in work_dirs
    ]
    refused = "another preparation is working in" if len(set(work_dirs)) == 1 else "has published"
    codes = []
    for run in runs:
        _, err = run.communicate(timeout=120)
        codes.append(run.returncode)
        if run.returncode:
            assert refused in err
            assert err.count("\n") == 1
    assert 0 in codes
    assert validate(tmp_path / "data").ok
    assert not [name for name in os.listdir(tmp_path) if "staging" in name]
