"""Progress: bars on terminals, lines in logs, silence on request."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from megatron_packed_sft.prepare.progress import Progress
from tests.prepare.preparing import chat, write_records


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
    monkeypatch.setattr("megatron_packed_sft.prepare.progress.time.monotonic", lambda: now)
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
    shown = on_a_terminal("prepare", *settings, "packing.pack_size=256", "executor.num_workers=1")
    for stage in ("scan", "encode", "publish"):
        assert f"\r{stage}: " in shown
    after_the_bars = shown.rpartition("\r" + " " * 20)[2].partition("\r")[2]
    assert after_the_bars.startswith("scan     1 file")
    assert "\r" not in after_the_bars.replace("\r\n", "\n")
    assert [line for line in screen(shown) if "%|" in line] == []
    assert screen(shown) == after_the_bars.splitlines()


def on_a_terminal(*arguments: str) -> str:
    """Run the command line on a real terminal of 100 columns; return all that it wrote."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    command = [sys.executable, "-m", "megatron_packed_sft", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=end, stderr=end)
    os.close(end)
    written = b""
    try:
        while block := os.read(terminal, 1 << 16):
            written += block
    except OSError:
        pass  # Linux says EIO when the other end is closed
    os.close(terminal)
    assert process.wait() == 0, written.decode()
    return written.decode()


def screen(written: str) -> list[str]:
    """Return the lines a reader sees: a carriage return goes back to the start of the line, and text overwrites."""
    lines = []
    for line in written.removesuffix("\r\n").split("\r\n"):
        seen = ""
        for text in line.split("\r"):
            seen = text + seen[len(text) :]
        lines.append(seen.rstrip())
    return lines
