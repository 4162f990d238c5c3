"""The command line, as a person types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_packed_sft import __version__, open_shard
from megatron_packed_sft.cli.main import VERBS, main
from tests.packed_bins import assert_same_bins, make_bins, write_shard
from tests.terminal import CONTROLS, in_pipe, modules_of, on_terminal, screen

ROOT = Path(__file__).parents[2]
ROWS = make_bins(5, 16, seed=3)


def test_validate_says_sound_and_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path / "shard", ROWS, 16)
    assert main(["validate", str(tmp_path / "shard")]) == 0
    out = capsys.readouterr().out
    assert "sound (full: 1 shard, 5 bins" in out
    assert f"{sum(len(row.input_ids) for row in ROWS):,} tokens" in out
    assert main(["validate", str(tmp_path / "shard"), "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_validate_names_what_is_wrong_and_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path / "shard", ROWS, 16)
    path = tmp_path / "shard" / "loss_mask.npy"
    data = bytearray(path.read_bytes())
    data[4096] = 7
    path.write_bytes(data)
    assert main(["validate", str(tmp_path / "shard")]) == 1
    out = capsys.readouterr().out
    assert "loss_mask.npy, bin 0: loss_mask is 7 at position 0, not 0 or 1" in out
    assert "2 findings" in out
    assert main(["validate", str(tmp_path / "shard"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["findings"][0] == {
        "file": str(path),
        "message": "loss_mask is 7 at position 0, not 0 or 1",
        "bin": 0,
        "field": "loss_mask",
    }
    assert main(["validate", str(tmp_path / "shard"), "--level", "structure"]) == 0
    assert main(["validate", str(tmp_path / "shard"), "--max-findings", "1"]) == 1
    assert "... and 1 more findings" in capsys.readouterr().out


def test_convert_goes_both_ways_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path / "shard", ROWS, 16)
    assert main(["convert", str(tmp_path / "shard"), str(tmp_path / "a.npy"), "--to", "legacy"]) == 0
    assert "1 file, 5 bins" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "a.npy"), str(tmp_path / "again"), "--pack-size", "8"]) == 0
    assert "note: pack size grew from 8 to" in capsys.readouterr().out
    assert_same_bins(open_shard(tmp_path / "again"), ROWS)
    assert main(["convert", str(tmp_path / "a.npy"), str(tmp_path / "b"), "--json", "--overwrite"]) == 0
    assert json.loads(capsys.readouterr().out)["num_bins"] == 5


def test_sample_data_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample-data", str(tmp_path / "chats"), "--rows", "20", "--json"]) == 0
    for file in json.loads(capsys.readouterr().out)["files"]:
        assert Path(file["path"]).stat().st_size == file["num_bytes"]


def test_errors_are_one_line_on_stderr_without_a_stack_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(tmp_path / "nothing")]) == 2
    assert main(["convert", str(tmp_path / "nothing.npy"), str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("packed-sft: error: ") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no command was given; see packed-sft --help"),
        (["valdate", "x"], "valdate is not a command; did you mean validate?"),
        (["xyz"], f"xyz is not a command; choose one of {', '.join(VERBS)}"),
        (["validate"], "PATH is missing; see packed-sft validate --help"),
        (["validate", "x", "--levl", "full"], "--levl is not an option; did you mean --level?"),
        (["validate", "x", "--zzz"], "--zzz is not an option; see packed-sft validate --help"),
        (["--zzz"], "--zzz is not an option; see packed-sft --help"),
        (
            ["validate", "x", "--level", "half"],
            "--level: 'half' is not one of 'structure', 'full'; see packed-sft validate --help",
        ),
        (
            ["sample-data", "x", "--rows", "many"],
            "--rows: 'many' is not a valid integer; see packed-sft sample-data --help",
        ),
        (["validate", "x", "y"], "got unexpected extra argument (y); see packed-sft validate --help"),
        (["validate", "--level"], "option '--level' requires an argument; see packed-sft validate --help"),
        (["export", "run"], "OUTPUT is missing; see packed-sft export --help"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_sentence_that_says_what_to_do(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", f"packed-sft: error: {sentence}\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["prepare", "--dryrun"], "packed-sft prepare: error: --dryrun is not an option; did you mean --dry-run?"),
        (["train", "--jsn"], "packed-sft train: error: --jsn is not an option; did you mean --json?"),
    ],
)
def test_the_applications_know_the_nearest_option_too(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"{sentence}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_examples_json_and_debug(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^examples:\n  packed-sft {verb}", out, re.MULTILINE)
    for option in ("--json", "--debug"):
        assert f"  {option} " in out
    assert "\x1b" not in out


def test_the_help_lists_every_verb_and_the_module_runs() -> None:
    shown = in_pipe("--help").out
    for verb in VERBS:
        assert f"  {verb} " in shown
    assert in_pipe("--version") == (0, f"packed-sft {__version__}\n", "")


def test_debug_shows_the_traceback_of_an_error(tmp_path: Path) -> None:
    for arguments in (["validate", tmp_path / "nothing", "--debug"], ["--debug", "validate", tmp_path / "nothing"]):
        shown = in_pipe(*arguments)
        assert shown.code == 2
        assert shown.err.startswith("Traceback (most recent call last):\n")
        assert shown.err.splitlines()[-1].startswith("packed-sft: error: ")


def test_a_bug_is_one_sentence_and_its_traceback_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("megatron_packed_sft.cli.env.environment", lambda: 1 // 0)
    assert main(["env"]) == 1
    [kept] = tmp_path.iterdir()
    assert capsys.readouterr().err == (
        "packed-sft: error: unexpected ZeroDivisionError: integer division or modulo by zero; please report it with "
        f"the traceback in {kept}\n"
    )
    assert "ZeroDivisionError" in kept.read_text()


def heed_interrupts() -> None:
    """Restore Ctrl-C, which jobs in the background of a shell ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_exits_with_130_and_says_that_nothing_was_published(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_packed_sft", "sample-data", str(tmp_path / "chats"), "--rows", "200000"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=heed_interrupts,
    ) as run:
        while not any(tmp_path.rglob("*")) and run.poll() is None:  # until it has begun
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate()
    assert (run.returncode, out, err) == (130, "", "packed-sft: interrupted; nothing was published\n")


# ---- output: colours on a terminal, plain text in a pipe


def test_a_terminal_gets_colours_and_a_pipe_none(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", ROWS, 16)
    seen = on_terminal("validate", tmp_path / "shard")
    assert seen.code == 0
    assert "\x1b[32msound\x1b[0m" in seen.text
    piped = in_pipe("validate", tmp_path / "shard")
    assert "\x1b" not in piped.out + piped.err
    assert screen(seen.text) == piped.out.splitlines()
    assert "\x1b[1;31mpacked-sft: error: \x1b[0m" in on_terminal("validate", tmp_path / "nothing").text


def test_no_color_is_respected_and_so_are_dumb_terminals(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", ROWS, 16)
    without = on_terminal("validate", tmp_path / "shard", environment={"NO_COLOR": "1"})
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", without.text)
    dumb = on_terminal("validate", tmp_path / "shard", environment={"TERM": "dumb"})
    assert "\x1b" not in dumb.text.removesuffix("\x1b[0m")  # colorama's, which numba imports, at exit


def test_a_terminal_that_is_not_utf_8_gets_escapes_instead_of_an_error(tmp_path: Path) -> None:
    path = tmp_path / "東京"
    write_shard(path, ROWS, 16)
    latin = {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    for shown in (
        in_pipe("validate", path, environment=latin).out,
        on_terminal("validate", path, environment=latin).text,
    ):
        assert r"\u6771\u4eac: " in shown


def test_progress_and_json_do_not_mix(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", ROWS, 16)
    command = f"{sys.executable} -m megatron_packed_sft validate {tmp_path / 'shard'} --json > {tmp_path / 'out'}"
    seen = on_terminal_with_shell(command)
    assert json.loads((tmp_path / "out").read_text())["ok"] is True
    assert "validate" in CONTROLS.sub("", seen)  # the bar, on stderr


def on_terminal_with_shell(command: str) -> str:
    return on_terminal(program=["sh", "-c", command]).text


# ---- start-up: imports are counted, because seconds depend on the machine

HEAVY = {
    "torch",
    "megatron",
    "numba",
    "llvmlite",
    "hydra",
    "omegaconf",
    "transformers",
    "tokenizers",
    "pyarrow",
    "numpy",
}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["nonsense"], *([verb, "--help"] for verb in VERBS)])
def test_help_imports_little(arguments: list[str]) -> None:
    loaded = modules_of(*arguments)
    packages = {name.partition(".")[0] for name in loaded}
    assert "megatron_packed_sft.cli.main" in loaded
    needed = {
        "prepare": {"hydra", "omegaconf", "numpy"},
        "train": {"hydra", "omegaconf", "numpy"},
        "convert": {"numpy"},
    }
    assert not packages & (HEAVY | {"rich", "tqdm"}) - needed.get(arguments[0], set())
    assert len(loaded) < (900 if arguments[0] in ("prepare", "train") else 420)


def test_a_verb_imports_no_other_verb_and_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    loaded = modules_of("env")
    assert not {name.partition(".")[0] for name in loaded} & (HEAVY - {"numpy"})
    assert not {f"megatron_packed_sft.cli.{name}" for name in ("validate", "convert", "export", "prepare")} & loaded
    loaded = modules_of("sample-data", tmp_path / "chats", "--rows", "10")
    assert not {name.partition(".")[0] for name in loaded} & {"torch", "numba", "hydra", "rich"}


# ---- completion: the protocol that the shells speak


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("va", ["validate"]),
        ("validate --le", ["--level"]),
        ("validate --level st", ["structure"]),
        ("convert --to par", ["parquet"]),
        ("prepare packing.pack_s", ["packing.pack_size="]),
        ("prepare --dry", ["--dry-run"]),
        ("prepare packing=opt", ["packing=optimal"]),
        ("train output=x model=tin", ["model=tiny"]),
        ("train resum", ["resume="]),
        ("preview chats.jsonl encode.max_l", ["encode.max_len="]),
    ],
)
def test_shells_complete_verbs_options_values_and_keys(
    shell: str,
    words: str,
    completions: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    last = words.split()[-1] if shell == "fish" else str(len(words.split()))
    monkeypatch.setenv("_PACKED_SFT_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", f"packed-sft {words}")
    monkeypatch.setenv("COMP_CWORD", last)
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = lines[1::3] if shell == "zsh" else [line.partition(",")[2].partition("\t")[0] for line in lines]
    assert found == completions


BASH = """
eval "$(_PACKED_SFT_COMPLETE=bash_source packed-sft)"
complete -p packed-sft
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_packed_sft_completion packed-sft 2> /dev/null
printf '%s\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        ("packed-sft val", ["validate"]),
        ("packed-sft validate --level ''", ["structure", "full"]),
        ("packed-sft prepare packing = opt", ["optimal"]),  # bash cuts words at =
        ("packed-sft prepare deduplicate =", ["true", "false"]),
        ("packed-sft prepare tokenizer.p", ["tokenizer.path="]),
    ],
)
def test_a_real_bash_completes(words: str, answers: list[str], tmp_path: Path) -> None:
    program = tmp_path / "packed-sft"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m megatron_packed_sft "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = BASH.format(words=words)
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, env=environment)
    first, *found = done.stdout.splitlines()
    assert first.startswith("complete -o nosort -F _packed_sft_completion packed-sft"), done.stderr
    assert found == answers, done.stderr
