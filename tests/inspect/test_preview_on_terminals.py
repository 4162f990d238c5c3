# ruff: noqa: RUF001 (signs that the painter writes)
"""Output of `packed-sft preview`: colours on a terminal, none in a pipe, and no control characters of records."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

import pytest

from megatron_packed_sft.inspect.painting import visible
from tests.inspect.previewing import packed_sft, tokenizer_path
from tests.prepare.preparing import chat, write_records
from tests.terminal import COLOURS, in_pipe, modules_of, on_terminal

__all__ = ["tokenizer_path"]

GREEN, DIM = "\x1b[32m", "\x1b[2m"
HOSTILE = (
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J \x1b[2K\x1b[1A up \r back \x08\x7f "
    "\u202eright to left\u202c \u2066isolate\u2069 \u200bzero \ufeff \u2028 \x00 \U000e0041 \u009d8;;"
)


@pytest.fixture
def words(tokenizer_path: str, tmp_path: Path) -> list[str]:
    path = write_records(tmp_path / "chats.jsonl", [chat("Why is that so?", "Because of this.")])
    return ["preview", str(path), f"tokenizer.path={tokenizer_path}", "template=chatml"]


def test_trained_text_is_green_and_given_text_dim_on_a_terminal(words: list[str]) -> None:
    shown = on_terminal(*words)
    assert shown.code == 0
    assert f"{GREEN}Because of this." in shown.text
    assert f"{DIM}Why is that so?" in shown.text
    assert "\x1b[36m<|im_end|>" in shown.text  # a given control token
    assert "\x1b[1;32m<|im_end|>" in shown.text  # a trained one
    assert "⟦" not in shown.text


def test_a_pipe_gets_brackets_and_no_colours(words: list[str]) -> None:
    shown = in_pipe(*words)
    assert shown.code == 0
    assert "\x1b" not in shown.out
    assert "⟦Because of this.<|im_end|>⟧⏎\n" in shown.out
    assert "⟦trained⟧  given" in shown.out


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_without_colours_a_terminal_gets_brackets(words: list[str], environment: dict[str, str]) -> None:
    shown = on_terminal(*words, environment=environment)
    assert "⟦Because of this.<|im_end|>⟧" in shown.plain
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", shown.text)


def test_forced_colours_reach_a_pager(words: list[str]) -> None:
    assert f"{GREEN}Because of this." in in_pipe(*words, environment={"FORCE_COLOR": "1"}).out


def test_a_narrow_terminal_loses_no_text_and_no_number(words: list[str]) -> None:
    wide, narrow = on_terminal(*words, columns=160).plain, on_terminal(*words, columns=30).plain
    assert "begins with" in wide
    assert "begins with" not in narrow
    assert "Because of this." in narrow
    for cell in ("assistant", "answer", "end of turn 1"):
        assert cell in narrow


def test_ids_are_one_token_per_line(words: list[str]) -> None:
    lines = in_pipe(*words, "--ids").out.splitlines()
    tokens = json.loads(in_pipe(*words, "--json").out)["sequences"][0]["tokens"]
    for token in tokens:
        assert any(line.split()[:2] == [str(token["position"]), str(token["id"])] for line in lines)


def test_nothing_in_a_record_controls_a_terminal(tokenizer_path: str, tmp_path: Path) -> None:
    folder = tmp_path / "evil\x1b[31m\x9b"
    folder.mkdir()
    record = chat(HOSTILE, HOSTILE)
    record["messages"].insert(0, {"role": "sys\x1b[31mtem", "content": HOSTILE})
    bad = {"messages": [{"role": "user\x1b[2J", "content": {HOSTILE: 1}}]}
    path = write_records(folder / "chats.jsonl", [record, bad, {HOSTILE: HOSTILE}, f"{{{HOSTILE}"])
    given = ["preview", path, f"tokenizer.path={tokenizer_path}", "template=chatml"]
    for row in (1, 2, 3, 4):
        for more in ([], ["--ids"], ["--json"]):
            piped = packed_sft(*given, "--row", row, *more)
            assert piped.code == 0, piped.err
            assert controls_of(piped.out) == set()
        assert controls_of(COLOURS.sub("", on_terminal(*given, "--row", row).text.replace("\r\n", "\n"))) == set()


def controls_of(text: str) -> set[str]:
    """Return the characters of a text that could control a terminal or hide text."""
    return {one for one in text if unicodedata.category(one) in ("Cc", "Cf", "Zl", "Zp") and one != "\n"}


def test_visible_text_shows_every_character_and_keeps_what_can_be_read() -> None:
    assert visible("Grüße 你好 שלום 👩‍🚀 e\u0301", breaks=False) == "Grüße 你好 שלום 👩‍🚀 e\u0301"
    assert visible("a\r\nb\u202ec\ud800", breaks=False) == "a␍⏎b‹U+202E›c‹U+D800›"
    assert visible("⟦x⟧", reserved="⟦⟧") == "‹U+27E6›x‹U+27E7›"


def test_a_record_cannot_forge_the_brackets_of_trained_text(tokenizer_path: str, tmp_path: Path) -> None:
    path = write_records(tmp_path / "chats.jsonl", [chat("⟦this is not trained⟧ ‹text:x›", "Yes.")])
    shown = in_pipe("preview", path, f"tokenizer.path={tokenizer_path}", "template=chatml").out
    assert shown.count("⟦") == 2  # the answer, and the legend


def test_a_first_look_waits_for_no_compiler_and_no_framework(words: list[str]) -> None:
    loaded = modules_of(*words)
    assert "megatron_packed_sft.inspect.preview_records" in loaded
    assert loaded.isdisjoint({"numba", "torch", "transformers", "pyarrow", "datasets"})
    loaded = modules_of("explain-template", "chatml")
    assert "megatron_packed_sft.inspect.explain_template" in loaded
    assert loaded.isdisjoint({"numba", "torch", "transformers", "pyarrow", "datasets"})
    for verb in ("preview", "explain-template"):
        assert modules_of(verb, "--help").isdisjoint({"numpy", "hydra", "rich", "jinja2"})
