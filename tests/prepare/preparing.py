"""Running `packed-sft prepare` in tests, and looking at what it left."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from megatron_packed_sft.prepare.app import main


class Outcome(NamedTuple):
    """Exit code and what was printed."""

    code: int
    out: str
    err: str


def prepare(*arguments: str) -> Outcome:
    """Run it in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return Outcome(code, out.getvalue(), err.getvalue())


def write_records(path: Path, rows: list[Any]) -> Path:
    """A JSONL file; strings are written as they are."""
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def chat(question: str, answer: str) -> dict[str, Any]:
    """A conversation of one turn."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
