"""Progress: bars on terminals, lines in logs, silence on request."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from megatron_packed_sft.support.progress import Progress
from tests.prepare.preparing import chat, write_records
from tests.terminal import in_pipe, on_terminal, screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_rate_and_notes() -> None:
    terminal = Terminal()
    with Progress("encode", 1000, "B", stream=terminal) as progress:
        for _ in range(10):
            progress.update(100, rows=3)
        progress.expect(2000)
    shown = terminal.getvalue()
    assert "encode" in shown
    assert "rows=" in shown
    assert "B/s" in shown


def test_a_log_gets_one_line_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("megatron_packed_sft.support.progress.time.monotonic", lambda: now)
    log = io.StringIO()
    with Progress("encode", 1000, "B", stream=log, interval=30) as progress:
        for _ in range(10):
            now += 10.0
            progress.update(100, tokens=7)
    lines = log.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == "encode: 300 of 1,000 B (30 %), 10 B/s, 70 s left, tokens=21"


def test_quiet_is_quiet() -> None:
    for stream in (Terminal(), io.StringIO()):
        with Progress("encode", 10, "B", stream=stream, interval=0, quiet=True) as progress:
            progress.update(10)
        assert stream.getvalue() == ""


def test_on_a_terminal_the_summary_stands_alone_below_finished_bars(tokenizer_path: str, tmp_path: Path) -> None:
    chats = write_records(tmp_path / "few.jsonl", [chat(f"Say {number}.", f"It is {number}.") for number in range(40)])
    settings = (f"input={chats}", f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", "template=chatml")
    shown = on_terminal("prepare", *settings, "packing.pack_size=256", "executor.num_workers=1", columns=100)
    assert shown.code == 0, shown.text
    for stage in ("scan", "encode", "publish"):
        assert re.search(rf"{stage} +[━╸╺]+ ", shown.plain), stage
    seen = screen(shown.text)
    assert seen[0].startswith("scan     1 file")
    assert not any("━" in line for line in seen)
    again = in_pipe("prepare", *settings, "packing.pack_size=256", "executor.num_workers=1")
    assert "\x1b" not in again.out + again.err
    assert seen[seen.index("") :] == again.out.splitlines()[seen.index("") :]  # above it, the second run reuses stages


def test_a_bar_begins_again_for_the_next_stage() -> None:
    terminal = Terminal()
    with Progress("compare", 10, "bin", stream=terminal, done=2) as progress:
        progress.update(5, sequences=3)
        progress.begin("match")
        [seen] = screen(terminal.getvalue())
        assert seen.startswith("match")
        assert "0 of 10 bin" in seen
        assert "sequences" not in seen


def test_two_bars_are_drawn_below_each_other_and_lines_above_them() -> None:
    terminal = Terminal()
    with Progress("train", 4, "step", stream=terminal, done=1) as steps:
        steps.update(1, loss="2.5")
        with Progress("validating", None, "bin", stream=terminal) as bins:
            bins.update(3)
            seen = screen(terminal.getvalue())
            assert [line.split()[0] for line in seen] == ["train", "validating"]
            assert "2 of 4 step" in seen[0]
            assert "loss 2.5" in seen[0]
    assert screen(terminal.getvalue()) == []
