"""Nothing is lost in silence: what a template leaves out is refused, dropped or counted, by kind."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.options import EncodeOptions
from megatron_packed_sft.encode.templates.load import ChatTemplate
from megatron_packed_sft.records.record import Conversation
from tests.encode import chat_templates
from tests.encode.byte_tokenizer import CHATML, ByteTokenizer
from tests.encode.test_mask_turns import assistant, call, encoder_for, pieces, result, user

TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


def kinds(template: str, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> list[str]:
    encoded = encoder_for(template, EncodeOptions(**options)).encode_records([Conversation(messages, tools)])
    return [lost.kind for lost in encoded.lost] + [str(dropped.reason) for dropped in encoded.dropped]


def test_a_call_that_the_template_does_not_know_is_refused_by_default() -> None:
    chat = [user("?"), assistant("", tool_calls=call("f", a="b")), result("r"), assistant("done")]
    assert kinds("CHATML", chat) == ["lost_text"]
    assert kinds("CHATML", [user("?"), assistant("Words.", tool_calls=call("f"))]) == ["lost_text"]
    assert kinds("CHATML", chat, on_lost="error") == ["lost_text"]
    assert kinds("CHATML", chat, on_lost="drop") == ["lost_text_dropped"]
    assert kinds("CHATML", chat, on_lost="warn") == ["tool_call"]
    assert kinds("chatml", chat) == []


def test_a_call_of_a_message_that_is_not_trained_is_only_counted() -> None:
    chat = [user("?"), assistant("", tool_calls=call("f", a="b")), result("r"), assistant("done")]
    assert kinds("CHATML", chat, last_turn_only=True) == ["tool_call"]


def test_reasoning_that_is_stripped_and_tools_that_are_ignored_are_counted() -> None:
    chat = [user("?"), assistant("a", reasoning_content="old"), user("?"), assistant("b", reasoning_content="new")]
    assert kinds("THINKING", chat) == ["reasoning"]
    assert kinds("CHATML", chat, tools=TOOLS) == ["tools", "reasoning", "reasoning"]
    assert kinds("CHATML", chat, tools=TOOLS, on_lost="drop") == ["lost_text_dropped"]


def test_a_message_that_is_skipped_is_counted_and_refused_if_it_was_to_be_trained() -> None:
    source = chat_templates.CHATML.replace("messages %}", "messages if m.content != 'skip' and m.role != 'system' %}")
    system = {"role": "system", "content": "s"}
    assert kinds(source, [system, user("?"), assistant("a")]) == ["message"]
    assert kinds(source, [user("?"), assistant("skip"), user("?"), assistant("a")]) == ["lost_text"]


def test_content_beside_a_call_that_is_left_out_is_counted() -> None:
    chat = [user("?"), assistant("Words.", tool_calls=call("f", a="b"))]
    assert kinds("BRACKETS", chat) == ["content"]


def test_a_record_that_loses_something_says_what_and_where() -> None:
    encoder = RecordEncoder(ByteTokenizer(CHATML), ChatTemplate("mine", chat_templates.CHATML))
    lost_call = Conversation([user("?"), assistant("", tool_calls=call("f"))])
    [dropped] = encoder.encode_records([lost_call]).dropped
    assert dropped.detail.startswith("mine omits a tool call of message 1; choose another template, or set encode.")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_given_under_the_name_that_the_template_reads(key: str) -> None:
    source = chat_templates.THINKING.replace("m.reasoning_content", f"m.{key}")
    encoder = RecordEncoder(ByteTokenizer(CHATML), ChatTemplate("t", source))
    for name in ("reasoning_content", "reasoning", "thinking"):
        chat = Conversation([user("?"), assistant("a", **{name: "Hm."})])
        assert pieces(encoder, chat) == ["<think>\nHm.\n</think>\n\na<|im_end|>"]


@pytest.mark.parametrize(
    "demand",
    [
        "{% if m.content is none or m.content is undefined %}{{ raise_exception('text') }}{% endif %}",
        "{% if m.tool_calls and m.content is not none %}{{ raise_exception('null') }}{% endif %}",
        "{% if m.tool_calls and m.tool_calls[0].function.arguments is mapping %}{{ raise_exception('') }}{% endif %}",
        "{% if m.tool_calls and m.tool_calls[0].id | length != 9 %}{{ raise_exception('nine') }}{% endif %}",
    ],
)
def test_a_record_is_tried_in_the_forms_that_templates_demand(demand: str) -> None:
    source = (
        f"{{% for m in messages %}}{demand}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content or '' }}}}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    function = {"name": "f", "arguments": {"a": 1}}
    called = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    answer = {"role": "tool", "tool_call_id": "call_1", "content": "r"}
    encoder = RecordEncoder(ByteTokenizer(CHATML), ChatTemplate("t", source))
    for _ in range(3):
        found = pieces(encoder, Conversation([user("?"), called, answer, assistant("done")]))
        assert found[0].startswith("f{")
        assert found[1] == "done<|im_end|>"


def test_chats_with_tools_use_the_template_named_tool_use() -> None:
    tokenizer = ByteTokenizer(
        CHATML, chat_template=chat_templates.CHATML, tool_template=chat_templates.THINKING.replace("system", "sys")
    )
    encoder = RecordEncoder(tokenizer)
    chat = [user("?"), assistant("", tool_calls=call("f", a="b"))]
    assert pieces(encoder, Conversation(chat, TOOLS))[0].startswith("<think>\n\n</think>\n\n\n<tool_call>")
    assert pieces(encoder, Conversation([user("?"), assistant("a")])) == ["a<|im_end|>"]
