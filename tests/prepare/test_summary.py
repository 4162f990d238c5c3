"""What `packed-sft prepare` says at the end: true figures, and lines that run as they are pasted."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from megatron_packed_sft.cli.main import main
from tests.prepare.preparing import chat, prepare, write_records
from tests.terminal import in_pipe, on_terminal, screen

TEMPLATE = "template=chatml"
SMALL = ("packing.pack_size=1024", "executor.num_workers=1")


@pytest.fixture
def few(tmp_path: Path) -> Path:
    return write_records(tmp_path / "few.jsonl", [chat(f"Say {number}.", f"It is {number}.") for number in range(40)])


def test_the_summary_tells_how_to_use_the_data(few: Path, tokenizer_path: str, tmp_path: Path) -> None:
    output = tmp_path / "data"
    shown = prepare(f"input={few}", f"output={output}", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL).out
    assert f"packed_storage=memmap_v1 data.path={output}" in shown
    card = (output / "README.md").read_text()
    assert "few.jsonl" in card
    assert "packing.pack_size: 1024" in card
    assert "packing.max_len: null" in card
    assert 'encode.roles_to_train: ["assistant"]' in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize("storage", ["memmap_v1", "legacy"])
@pytest.mark.parametrize("folder", ["plain", "it's [odd] 東京"])
def test_the_lines_to_paste_run_as_they_stand(
    few: Path,
    tokenizer_path: str,
    tmp_path: Path,
    storage: str,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = tmp_path / folder
    home.mkdir()
    model = Path(shutil.copy(tokenizer_path, home))
    monkeypatch.chdir(home)
    done = prepare(
        f"input={few}", "output=data", f"tokenizer.path={model.name}", TEMPLATE, *SMALL, f"storage={storage}"
    )
    assert done.code == 0, done.err
    for_shell, for_recipe, for_python = (
        textwrap.dedent(done.out.partition(f"{title}:\n")[2].partition(f"\n{following}:")[0])
        for title, following in (("Train on it", "In a recipe"), ("In a recipe", "In Python"), ("In Python", "end"))
    )
    names: dict[str, Any] = {}
    exec(for_python, names)
    assert sum(len(names["dataset"][index]["seq_boundaries"]) - 1 for index in range(len(names["dataset"]))) == 40

    launcher, _, arguments = for_shell.partition(" -m megatron_packed_sft train ")
    assert launcher == "torchrun --nproc-per-node 2"
    assert main(["train", *shlex.split(arguments), "--cfg", "job"]) == 0
    shown, pasted = OmegaConf.create(capsys.readouterr().out), OmegaConf.create(for_recipe)
    assert (shown.packed_storage, shown.data.path) == (pasted.packed_storage, pasted.data.path)
    assert Path(pasted.data.path).exists()


@pytest.mark.parametrize("storage", ["memmap_v1", "legacy"])
def test_bytes_on_disk_are_told_beforehand(few: Path, tokenizer_path: str, tmp_path: Path, storage: str) -> None:
    write_records(few, [chat(f"Say {number}. " * 9, f"It is {number}. " * 9) for number in range(900)])
    arguments = (f"input={few}", f"output={tmp_path / 'data'}", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL)
    dry, real = (prepare(*arguments, f"storage={storage}", *more) for more in (["--dry-run"], []))
    [told] = {
        line.rsplit("  ")[-1] for shown in (dry.out, real.out) for line in shown.splitlines() if "train  " in line
    }
    stored = sum(path.stat().st_size for path in (tmp_path / "data").rglob("*.npy"))
    assert float(told.split()[0]) * {"kB": 1e3, "MB": 1e6}[told.split()[1]] == pytest.approx(stored, rel=0.15)


def test_quiet_prints_nothing(few: Path, tokenizer_path: str, tmp_path: Path) -> None:
    arguments = (f"input={few}", f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL)
    assert prepare(*arguments, "--quiet") == (0, "", "")


def test_json_prints_the_same_figures_and_nothing_else_on_stdout(
    few: Path, tokenizer_path: str, tmp_path: Path
) -> None:
    write_records(few, [chat("Say it.", "It is so."), chat("Long. " * 2000, "It is long.")])
    arguments = (f"input={few}", f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL)
    done = prepare(*arguments, "max_drop_share=1", "audit=true", "--json")
    assert done.code == 0
    report = json.loads(done.out)
    assert (report["num_records"], report["num_packed"], report["dropped"]) == (2, 1, {"longer_than_pack": 1})
    assert report["splits"]["train"]["num_bins"] == 1
    assert report["splits"]["train"]["packed"]["num_sequences"] == 1
    assert report["audits"]["input"]["num_records"] == 2
    assert report["warning"] in done.err


def test_the_summary_is_coloured_on_a_terminal_and_plain_in_a_pipe(
    few: Path, tokenizer_path: str, tmp_path: Path
) -> None:
    arguments = (f"input={few}", f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", TEMPLATE, *SMALL)
    seen, piped = on_terminal("prepare", *arguments, columns=60), in_pipe("prepare", *arguments)
    assert "\x1b[1msplit" in seen.text
    assert re.search(r"\x1b\[32m *[0-9.]+ %", seen.text)  # the trained share
    assert "\x1b" not in piped.out + piped.err
    header = next(line for line in piped.out.splitlines() if line.startswith("split "))
    assert header in screen(seen.text)  # whole, although the terminal is narrower
    card = (tmp_path / "data" / "README.md").read_text()
    assert header in card
    assert "\x1b" not in card
