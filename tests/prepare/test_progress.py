"""Progress: bars on terminals, lines in logs, silence on request."""

from __future__ import annotations

import io

import pytest

from megatron_packed_sft.prepare.progress import Progress


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
