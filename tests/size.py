"""How large the house is: `python -m tests.size` prints the figures of CONTRIBUTING.md's table for this checkout.

Counted where a command can count: modules and lines, public names, configuration keys, parameters, and how many files
and rooms one record passes on its way through `packed-sft prepare`.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import subprocess
import tempfile
import tokenize
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron_packed_sft
from megatron_packed_sft.data.datasets import PackedDataset
from megatron_packed_sft.prepare.config import PrepareConfig
from megatron_packed_sft.train.config import TrainConfig
from tests.call_trace import Trace

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_packed_sft"
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def sources(folder: Path) -> list[Path]:
    """The Python files of a folder that git knows or would take."""
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", f"{folder}/*.py")
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in (ROOT / name for name in names) if path.exists()]


def num_lines(paths: list[Path]) -> int:
    """Lines of any kind."""
    return sum(path.read_text().count("\n") for path in paths)


def num_code_lines(paths: list[Path]) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    return sum(len(code_lines(path.read_text())) for path in paths)


def code_lines(text: str) -> set[int]:
    """The numbers of the lines that hold code; a string that is a whole statement is a docstring."""
    found: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            statement.append(token)
        elif token.type == tokenize.NEWLINE:
            if [part.type for part in statement] != [tokenize.STRING]:
                found |= {line for part in statement for line in range(part.start[0], part.end[0] + 1)}
            statement = []
    return found


def num_keys(schema: Any) -> int:
    """Keys that a user can set: the leaves of a configuration, with one entry of every mapping of dataclasses."""
    hints = typing.get_type_hints(schema)
    inner = [dataclasses_in(hints[field.name]) for field in dataclasses.fields(schema)]
    return sum(sum(map(num_keys, found)) if found else 1 for found in inner)


def dataclasses_in(hint: Any) -> list[Any]:
    """The dataclasses that a type names: itself, or those in its arguments."""
    if dataclasses.is_dataclass(hint):
        return [hint]
    return [found for argument in typing.get_args(hint) for found in dataclasses_in(argument)]


def num_parameters(function: Callable[..., Any]) -> int:
    """Parameters that have a name."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    return sum(kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) for kind in kinds)


def prepared_record() -> Trace:
    """Trace `packed-sft prepare` of one record, in this process; what is imported and set up first is not traced."""
    from megatron_packed_sft.encode.tokenizers.sentencepiece import train_sentencepiece
    from megatron_packed_sft.prepare.app import main

    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        messages = [{"role": "user", "content": "Who wrote Emma?"}, {"role": "assistant", "content": "Jane."}]
        (home / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
        tokenizer = train_sentencepiece(["Who wrote Emma? Jane Austen did."] * 9, home / "sp.model", vocab_size=300)
        words = [
            f"input={home}/chats.jsonl",
            f"tokenizer.path={tokenizer}",
            "template=chatml",
            "executor.num_workers=1",
        ]
        assert main([*words, f"output={home}/warm", "quiet=true"]) == 0
        with Trace(PACKAGE) as trace:
            assert main([*words, f"output={home}/traced", "quiet=true"]) == 0
    return trace


def rows() -> Iterator[tuple[str, str]]:
    """Yield what the table counts, and the figures of this checkout."""
    package, tests = sources(PACKAGE), sources(ROOT / "tests")
    yield "modules of the package", f"{len(package):,}"
    yield "lines of the package", f"{num_lines(package):,} ({num_code_lines(package):,} of code)"
    yield "lines of the tests", f"{num_lines(tests):,}"
    yield "names in the package root", f"{len(set(megatron_packed_sft.__all__) - {'__version__'})}"
    prepare, train = num_keys(PrepareConfig), num_keys(TrainConfig)
    yield "configuration keys of prepare and train", f"{prepare + train} ({prepare} + {train})"
    functions = (megatron_packed_sft.create_sft_dataset, PackedDataset, megatron_packed_sft.pack)
    names = " / ".join(function.__name__ for function in functions)
    yield f"parameters of {names}", " / ".join(str(num_parameters(function)) for function in functions)
    trace = prepared_record()
    yield "files that one record passes in prepare", f"{len(trace.files)}"
    helpers = sum(count for (_, room), count in trace.room_changes.items() if room == "support")
    yield "changes of room on its way", f"{trace.room_changes.total()} ({helpers} of them calls of helpers in support/)"


def main() -> None:
    """Print the table."""
    found = list(rows())
    width = max(len(name) for name, _ in found)
    for name, figures in found:
        print(f"{name:<{width}}  {figures}")


if __name__ == "__main__":
    main()
