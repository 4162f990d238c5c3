"""The built-in templates render what is known by their names, and templates are found by name, path and text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_packed_sft.encode.templates.load import ChatTemplate, builtin_template_names, load_template
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError, Renderer
from megatron_packed_sft.errors import InvalidInputError
from tests.encode.byte_tokenizer import ByteTokenizer
from tests.encode.test_mask_turns import assistant, call, result, user

CHAT = [{"role": "system", "content": "Be brief."}, user("2+2?"), assistant("4"), user("3+3?"), assistant("6")]
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def render(name: str, messages: list[dict[str, Any]], tools: Any = None, *, prompt: bool = False) -> str:
    renderer = Renderer(load_template(name).source, variables={"bos_token": "<s>", "eos_token": "</s>"})
    return renderer.render(messages, tools, add_generation_prompt=prompt)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
            "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n6<|im_end|>\n",
        ),
        (
            "llama3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n4<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\n3+3?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n6<|eot_id|>",
        ),
        ("mistral", "<s>[INST]Be brief.\n\n2+2?[/INST]4</s>[INST]3+3?[/INST]6</s>"),
        ("plain", "System: Be brief.\nUser: 2+2?\nAssistant: 4</s>\nUser: 3+3?\nAssistant: 6</s>\n"),
    ],
)
def test_built_in_templates_render_the_well_known_form(name: str, expected: str) -> None:
    assert render(name, CHAT) == expected


@pytest.mark.parametrize("name", builtin_template_names())
def test_built_in_templates_keep_prefixes_and_their_prompt_is_what_answers_follow(name: str) -> None:
    whole = render(name, CHAT)
    assert whole.startswith(render(name, CHAT[:3]))
    assert whole.startswith(render(name, CHAT[:4], prompt=True))


@pytest.mark.parametrize("name", builtin_template_names())
def test_built_in_templates_show_tools_calls_results_and_reasoning(name: str) -> None:
    chat = [
        user("Weather?"),
        assistant("Hm.", reasoning_content="Look it up.", tool_calls=[*call("look", city="Ōsaka"), *call("look", n=1)]),
        result("rain"),
        {"role": "assistant", "content": [{"type": "text", "text": "It "}, {"type": "text", "text": "rains."}]},
    ]
    text = render(name, chat, TOOLS)
    for part in (
        '"name": "look"',
        '{"city": "Ōsaka"}',
        '{"n": 1}',
        "Look it up.",
        "Hm.",
        "rain",
        "It rains.",
        "Weather?",
    ):
        assert part in text
    as_text = [chat[0], assistant("", tool_calls=[{"function": {"name": "look", "arguments": '{"city":"Rome"}'}}])]
    assert '{"city":"Rome"}' in render(name, as_text, TOOLS)


@pytest.mark.parametrize("name", builtin_template_names())
def test_built_in_templates_refuse_pictures(name: str) -> None:
    with pytest.raises(RecordRefusedError, match="only text is supported, not image"):
        render(name, [{"role": "user", "content": [{"type": "image"}]}])


def test_mistral_refuses_a_system_prompt_that_it_would_lose() -> None:
    with pytest.raises(RecordRefusedError, match="a system prompt needs a user message after it"):
        render("mistral", [CHAT[0], assistant("Hi")])


def test_a_template_is_found_in_a_jinja_file_a_json_file_and_as_text(tmp_path: Path) -> None:
    source = "{{ messages[0].content }}"
    (tmp_path / "mine.jinja").write_text(source)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    loaded = [load_template(str(tmp_path / name)) for name in ("mine.jinja", "tokenizer_config.json")]
    assert [template.name for template in loaded] == ["mine.jinja", "tokenizer_config.json"]
    assert {template.fingerprint for template in [*loaded, load_template(source), ChatTemplate("x", source)]} == {
        loaded[0].fingerprint
    }
    assert load_template(None, ByteTokenizer(chat_template=source)).source == source
    assert loaded[0].fingerprint != load_template("chatml").fingerprint


def test_what_is_no_template_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    for name, message in [
        ("alpaca", "alpaca is not a file; use a Jinja file, or one of chatml, llama3, mistral, plain"),
        (str(tmp_path / "empty.json"), "has no text under the key chat_template"),
        (str(tmp_path / "latin.jinja"), "is not UTF-8 text"),
    ]:
        with pytest.raises(InvalidInputError, match=message):
            load_template(name)
    with pytest.raises(InvalidInputError, match="no tokenizer was given"):
        load_template(None)
