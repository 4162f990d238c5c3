"""Every verb with a URL wherever it takes a path: it works, or says in one sentence what to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from megatron_packed_sft.cli.main import VERBS, command_line, main
from tests.prepare.preparing import chat, write_records
from tests.remote.object_store import FaultProxy
from tests.remote.test_dataset_urls import write_dataset

GONE = "s3://bucket/gone"
SECRET = "s3://me:hush-hush@bucket/gone"

# verb -> its words with URL in place of each path that it takes; what is there is nothing.
CALLS = {
    "sample-data": ["URL", "{here}/chats --tokenizer URL/sp.model"],
    "preview": [
        "URL",
        "URL.jsonl tokenizer.path={tokenizer}",
        "URL/*.jsonl tokenizer.path={tokenizer}",
        "URL.parquet tokenizer.path={tokenizer}",
        "URL.npy",
        "{chats} tokenizer.path=URL",
        "{chats} tokenizer.path={tokenizer} template.name=URL",
        "{data} --tokenizer URL",
        "{data} --work-dir URL",
        "{data} --plan URL",
        "{chats} --config-dir URL --config-name mine",
    ],
    "explain-template": ["URL", "URL.jinja", "chatml --tokenizer URL", "{tokenizer} template.name=URL"],
    "prepare": [
        "input=URL output={here}/out tokenizer.path={tokenizer} template=chatml",
        "input={chats} output={here}/out tokenizer.path=URL template=chatml",
        "input={chats} output=URL tokenizer.path={tokenizer} template.name=URL",
        "--config-dir URL --config-name mine",
    ],
    "train": [
        "data.path=URL output={here}/run",
        "data.path={data} output=URL",
        "data.path={data} output={here}/run resume=URL",
        "data.path={data} output={here}/run model.path=URL",
        "data.path={data} output={here}/run data.tokenizer=URL",
        "data.path=URL output={here}/run data.cache_dir=URL",
        "data.path={data} output={here}/run validation.paths.held_out=URL",
    ],
    "info": ["URL", "URL.npz"],
    "report": ["URL", "{data} --tokenizer URL", "{data} --work-dir URL", "URL -o URL.html"],
    "validate": ["URL", "URL.npy", "{data} --tokenizer URL", "URL --seq-length 5"],
    "compare": ["URL {data}", "{data} URL", "{data} {other} --tokenizer URL"],
    "convert": ["URL {here}/out", "URL/*.npy {here}/out", "URL.npy URL/out", "{here}/nothing URL"],
    "cache": [
        "prefetch URL",
        "prefetch URL --cache-dir URL",
        "status --cache-dir URL",
        "clear --cache-dir URL",
    ],
    "export": ["URL {here}/model", "{here}/run URL", "{here}/run {here}/model --like URL --tokenizer URL"],
    "env": [],
}
# What needs no store to answer.
LOCAL_ONLY = (
    r"is a URL, but only local paths work here|is not a directory|needs a token store|"
    r"is neither a run|does not exist and matches nothing"
)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, tokenizer_path: str) -> dict[str, str]:
    here = tmp_path_factory.mktemp("places")
    return {
        "here": str(here),
        "chats": str(write_records(here / "chats.jsonl", [chat("Say 1.", "It is 1.")])),
        "data": str(write_dataset(here / "data", num_shards=1)),
        "other": str(write_dataset(here / "other", num_shards=1, seed=9)),
        "tokenizer": tokenizer_path,
    }


def calls(verb: str, url: str, places: dict[str, str]) -> Iterator[list[str]]:
    for call in CALLS[verb]:
        yield [verb, *call.replace("URL", url).format(**places).split()]


def is_one_sentence(text: str) -> bool:
    lines = text.strip().splitlines()
    return len(lines) == 1 and "Traceback" not in text and "error: unexpected " not in text


def paths_of(command: click.Command) -> set[str]:
    """The arguments and options of a command that take a path."""
    if isinstance(command, click.Group):
        names = command.list_commands(click.Context(command))
        found = [command.get_command(click.Context(command), name) for name in names]
        return set().union(*(paths_of(one) for one in found if one is not None))
    return {
        one.opts[-1] for one in command.params if isinstance(one, click.Option) and isinstance(one.type, click.Path)
    }


def test_every_verb_and_every_option_that_takes_a_path_is_called_with_a_url() -> None:
    assert list(CALLS) == list(VERBS)
    for verb in VERBS:
        command = command_line.get_command(click.Context(command_line), verb)
        assert command is not None
        for option in paths_of(command):
            words = " ".join(CALLS[verb]).replace("-o URL", "--output URL")
            assert re.search(rf"{option} URL", words), f"{verb} {option}"


def test_a_url_with_nothing_there_is_one_sentence(
    store: FaultProxy, places: dict[str, str], capsys: pytest.CaptureFixture[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    for words in (words for verb in VERBS for words in calls(verb, GONE, places)):
        assert main(words) in (1, 2), words
        shown = capsys.readouterr()
        assert is_one_sentence(shown.err), (words, shown)
    assert {one.name for one in set(tmp_path.iterdir()) - before} <= {"cache"}, "a directory named after a scheme"


def test_credentials_in_a_url_are_never_told(
    store: FaultProxy, places: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for verb in VERBS:
        for words in calls(verb, SECRET, places):
            if verb != "train" or "output=" in words[-1]:  # one of its calls is enough: the others wait for torch
                main(words)
                shown = capsys.readouterr()
                assert "hush-hush" not in shown.out + shown.err, words
    for path in Path(places["here"]).rglob("*"):
        if path.is_file():
            assert b"hush-hush" not in path.read_bytes(), path


WITHOUT_S3FS = """
import contextlib, io, json, sys
sys.modules["s3fs"] = None
from megatron_packed_sft.cli.main import main
for words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = main(words)
    print(json.dumps([words, code, said.getvalue()]))
"""


def test_without_the_extra_every_verb_names_it(places: dict[str, str], tmp_path: Path) -> None:
    every = [words for verb in VERBS for words in calls(verb, GONE, places) if verb != "train"]
    every.append(next(calls("train", GONE, places)))  # the others need no store, or ask it in the same place
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_S3FS], input=json.dumps(every), capture_output=True, text=True, cwd=tmp_path
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(every), done.stderr
    for words, code, said in answers:
        assert code in (1, 2), (words, said)
        if not re.search(LOCAL_ONLY, said):
            assert "pip install 'megatron-packed-sft[s3]'" in said, (words, said)
