"""Running `packed-sft preview` in tests, and what prepare makes of the same records."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from megatron_packed_sft.cli.main import main
from megatron_packed_sft.tokens.store import open_token_store
from tests.prepare.conftest import chats, tokenizer_path  # fixtures for the tests that import them
from tests.prepare.preparing import Outcome, prepare

__all__ = ["chats", "packed_sft", "prepared_sequences", "preview_json", "shown_sequences", "tokenizer_path"]


def packed_sft(*arguments: object) -> Outcome:
    """Run the command line in this process, with its output in a pipe."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(one) for one in arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


def preview_json(*arguments: object) -> Any:
    """What `packed-sft preview ... --json` says."""
    done = packed_sft("preview", *arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def shown_sequences(previews: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    """Ids and weights of all sequences of some previews that prepare keeps."""
    return [
        ([token["id"] for token in one["tokens"]], [token["weight"] for token in one["tokens"]])
        for preview in previews
        for one in preview["sequences"]
        if one["stored"]
    ]


def prepared_sequences(output: Path, *arguments: str) -> list[tuple[list[int], list[float]]]:
    """Ids and weights that a real preparation stores, in the order of the records."""
    done = prepare(*arguments, f"output={output}", "executor.num_workers=1", "max_drop_share=1")
    assert done.code == 0, done.err
    store = open_token_store(output.with_name(f"{output.name}.work") / "tokens" / "train")
    found = (store.weighted(number) for number in range(len(store)))
    return [(ids.tolist(), np.round(weights, 6).tolist()) for ids, weights in found]
