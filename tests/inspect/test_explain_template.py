"""`packed-sft explain-template`: what templates with known behaviour write and lose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_packed_sft.encode.templates.load import ChatTemplate, load_template
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect.explain_template import TemplateExplanation
from megatron_packed_sft.inspect.explain_template_view import TemplateAlone, template_json
from tests.encode import chat_templates
from tests.inspect.previewing import packed_sft, tokenizer_path
from tests.real_data import IS_WHOLE, templates_folder, tokenizer_folder
from tests.terminal import COLOURS, in_pipe, on_terminal

__all__ = ["tokenizer_path"]


def explained(source: str) -> TemplateExplanation:
    template = ChatTemplate("mine", source)
    return TemplateExplanation(TemplateAlone(template), template)


def around(found: TemplateExplanation) -> dict[str, tuple[str, ...]]:
    return {one.kind: one[1:5] for one in found.around}


def outcomes(found: TemplateExplanation) -> dict[str, tuple[str, str]]:
    return {one.probe: (one.outcome, one.sentence) for one in found.findings}


def test_what_a_plain_template_writes_around_each_turn() -> None:
    found = around(explained(chat_templates.CHATML))
    assert found["system"] == ("<|im_start|>system\n", "", "", "<|im_end|>\n")
    assert found["user"] == ("<|im_start|>user\n", "", "", "<|im_end|>\n")
    assert found["assistant"] == ("<|im_start|>assistant\n", "", "<|im_end|>", "\n")
    assert found["generation prompt"][0] == "<|im_start|>assistant\n"
    assert "reasoning" not in found


def test_a_template_without_tools_and_reasoning_says_what_it_loses() -> None:
    found = outcomes(explained(chat_templates.CHATML))
    assert found["reasoning"] == ("lost", "the reasoning is left out")
    assert found["tools"] == ("lost", "the tools are left out")
    assert found["a tool call"] == ("lost", "a call is left out")
    assert found["a system prompt"] == ("kept", "")
    assert found["two questions in a row"][0] == "kept"


def test_old_reasoning_that_is_dropped_and_turns_that_change_are_found() -> None:
    explanation = explained(chat_templates.THINKING)
    found = outcomes(explanation)
    assert found["reasoning"] == ("kept", "")
    assert found["reasoning in an earlier turn"] == ("lost", "the reasoning is left out")
    assert found["<think> in an earlier answer"][0] == "changed"
    outcome, sentence = found["several turns"]
    assert outcome == "changed"
    assert "encode.render=auto" in sentence
    assert around(explanation)["reasoning"] == ("", "<think>\n", "\n</think>\n\n", "")
    [call] = [one.example for one in explanation.around if one.kind == "tool call"]
    assert call == '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def test_a_system_prompt_inside_the_question_and_refusals_are_found() -> None:
    found = outcomes(explained(chat_templates.BRACKETS))
    assert found["a system prompt"] == ("changed", "is written inside the first question")
    refusing = chat_templates.CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('No \x1b[31mtools!') }}{% endif %}",
    )
    assert outcomes(explained(refusing))["a tool's result"] == ("refused", "No \x1b[31mtools!")


def test_stripped_blanks_own_words_and_dates_are_found() -> None:
    trims = outcomes(explained(chat_templates.TRIMMING))
    assert trims["blanks around an answer"] == ("changed", "loses blanks on both sides")
    wordy = "<|im_start|>system\nYou are kind.<|im_end|>\n" + chat_templates.CHATML
    sentence = outcomes(explained(wordy))["a chat without a system prompt"][1]
    assert sentence.startswith("begins with the template's own words: <|im_start|>system\nYou are kind.")
    dated = "{{ strftime_now('%Y') }}\n" + chat_templates.CHATML
    assert "template.date" in outcomes(explained(dated))["a chat"][1]


def test_what_the_prompt_opens_is_given_and_not_trained() -> None:
    explanation = explained(chat_templates.PROMPT_OPENS_THINKING)
    assert around(explanation)["generation prompt"][0] == "<|im_start|>assistant\n<think>\n"
    example = explanation.example
    assert example is not None
    text = example.rendered.marked.text
    assert all(not text[start:end].startswith("<|im_start|>") for start, end in example.rendered.marked.trained)


def test_variables_are_those_that_come_from_outside() -> None:
    assert explained(chat_templates.THINKING).variables == ["enable_thinking"]
    assert explained(chat_templates.BRACKETS).variables == ["bos_token", "eos_token", "tools"]


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "plain"])
def test_built_in_templates_are_explained_by_name(name: str) -> None:
    document = json.loads(packed_sft("explain-template", name, "--json").out)
    assert document["template"]["name"] == name
    assert {"user", "assistant", "generation prompt"} <= {one["kind"] for one in document["around"]}
    assert document["example"]["trained"]
    shown = packed_sft("explain-template", name)
    assert shown.code == 0
    assert "no tokenizer was given" in shown.out


def test_a_tokenizer_and_a_template_go_together_either_way(tokenizer_path: str) -> None:
    one = packed_sft("explain-template", tokenizer_path, "template=chatml")
    two = packed_sft("explain-template", "chatml", "--tokenizer", tokenizer_path)
    assert one.code == 0
    assert one.out == two.out
    assert "chatml, tokenizer sp.model" in one.out


def test_colours_on_a_terminal_and_brackets_in_a_pipe() -> None:
    shown, piped = on_terminal("explain-template", "chatml"), in_pipe("explain-template", "chatml")
    assert "\x1b[32mANSWER" in shown.text
    assert "⟦ANSWER<|im_end|>⟧⏎" in piped.out
    assert "\x1b" not in piped.out


def test_a_hostile_template_reaches_no_terminal_raw(tmp_path: Path) -> None:
    path = tmp_path / "evil.jinja"
    path.write_text(chat_templates.CHATML.replace("<|im_end|>", "<|im_end|>\x1b]0;owned\x07\u202e"))
    for shown in (in_pipe("explain-template", path).out, on_terminal("explain-template", path).text):
        left = COLOURS.sub("", shown)
        assert not {"\x1b", "\x07", "\u202e"} & set(left)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "name a tokenizer, a Jinja file or a built-in template"),
        (["nothing"], "nothing does not exist"),
        (["TOKENIZER"], "has no chat template; set template.name"),
        (["TOKENIZER", "--tokenizer", "other"], "are two tokenizers"),
        (["bad.jinja"], "fix the template or choose another"),
        (["silent.jinja"], "omits the assistant's answer"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    words: list[str], problem: str, tokenizer_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jinja").write_text("{% for %}")
    (tmp_path / "silent.jinja").write_text("{{ messages[0].content }}")
    done = packed_sft("explain-template", *(tokenizer_path if one == "TOKENIZER" else one for one in words))
    assert (done.code, done.out) == (2, "")
    assert problem in done.err
    assert done.err.count("\n") == 1


def test_a_real_tokenizer_is_explained_with_its_own_template() -> None:
    document = json.loads(packed_sft("explain-template", tokenizer_folder("qwen3"), "--json").out)
    kinds = {one["kind"]: one for one in document["around"]}
    assert kinds["last answer"]["trained_before"] == "<think>\n\n</think>\n\n"
    assert kinds["tool result"]["before"] == "<|im_start|>user\n<tool_response>\n"
    assert document["variables"] == ["enable_thinking", "tools"]


def test_real_templates_are_explained_or_refused_in_a_sentence() -> None:
    names = sorted(templates_folder().glob("*.jinja"))
    explained_ones: dict[str, Any] = {}
    for path in names if IS_WHOLE else names[::9]:
        template = load_template(str(path))
        try:
            explained_ones[path.stem] = template_json(TemplateExplanation(TemplateAlone(template), template))
        except InvalidInputError as error:
            assert path.stem == "fireworks-ai-llama-3-firefunction-v2", error  # wants a variable `functions`
    for name, one in explained_ones.items():
        assert "assistant" in {kind["kind"] for kind in one["around"]} or one["example"], name
        assert len(one["findings"]) >= 20
