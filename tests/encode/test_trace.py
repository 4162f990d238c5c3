"""The trace: every character's author, or a refusal; never a guess."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_packed_sft.encode.masks.probe import probe_template
from megatron_packed_sft.encode.masks.trace import ECHO, Span, Trace, Tracer
from megatron_packed_sft.encode.masks.turns import TurnMarks, find_turns
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError, Renderer
from megatron_packed_sft.errors import InvalidInputError
from tests.encode import chat_templates
from tests.encode.byte_tokenizer import CHATML, MISTRAL
from tests.encode.test_mask_turns import assistant, call, result, user

LOOP = "{%% for m in messages %%}[%s]{%% endfor %%}"


def said(source: str, messages: list[dict[str, Any]], tools: Any = None) -> list[tuple[int, str]]:
    trace = Tracer(Renderer(source)).trace(messages, tools)
    assert trace.text == Renderer(source).render(messages, tools)
    return [(span.message, trace.text[span.start : span.end]) for span in trace.spans]


def test_every_string_of_a_message_is_traced_wherever_it_stands() -> None:
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "a"}],
        "tool_calls": call("f", x={"y": ["b", 1]}),
    }
    assert said(LOOP % "{{ m | tojson }}", [user("q"), message]) == [(0, "q"), (1, "a"), (1, "f"), (1, "b")]


def test_a_string_written_again_is_an_echo() -> None:
    assert said("{{ messages[0].content }}" * 2, [user("q")]) == [(0, "q"), (ECHO, "q")]


def test_messages_in_another_order_keep_their_numbers() -> None:
    assert said("{% for m in messages[::-1] %}{{ m.content }}{% endfor %}", [user("a"), user("b")]) == [
        (1, "b"),
        (0, "a"),
    ]


def test_equal_messages_are_told_apart_by_their_order_if_a_template_compares_them() -> None:
    source = "{% for m in messages %}{{ m.content }}{{ '!' if m == messages[-1] }}{% endfor %}"
    assert said(source, [user("a"), user("b"), user("a")]) == [(0, "a"), (1, "b"), (2, "a")]


def test_speakers_names_are_marked_too_but_nobodys_turn_is_found_by_them() -> None:
    source = "{% for m in messages %}{{ m.name + m.content }}{{ '!' if m == messages[-1] }}{% endfor %}"
    message = {"role": "tool", "name": "f", "content": "a"}
    assert said(source, [message, message]) == [(ECHO, "f"), (0, "a"), (ECHO, "f"), (1, "a")]


def test_names_that_a_template_looks_up_are_left_alone() -> None:
    source = LOOP % "{{ m.content }}{{ 'known' if m.name in ['f'] else m.name }}"
    assert said(
        source, [{"role": "tool", "name": "f", "content": "a"}, {"role": "tool", "name": "g", "content": "b"}]
    ) == [
        (0, "a"),
        (1, "b"),
    ]


def test_calls_that_a_template_measures_are_left_alone() -> None:
    source = LOOP % "{{ m.content }}{{ m.tool_calls | tojson | length }}"
    assert said(source, [assistant("a", tool_calls=call("f", x="y"))]) == [(0, "a")]


@pytest.mark.parametrize(
    "expression",
    [
        "m.content[:3]",
        "m.content | upper | replace('B', 'x') | length",
        "m.content.split()[1:] | join",
        "m.content | list | length",
        "m.content | reverse | join",
        "m.content | urlencode",
    ],
)
def test_a_template_that_changes_words_beyond_recognition_is_refused(expression: str) -> None:
    with pytest.raises(RecordRefusedError, match="cannot be followed") as caught:
        said(LOOP % f"{{{{ {expression} }}}}", [user("some words")])
    assert caught.value.reason == "untraceable_template"


def test_what_a_template_looks_for_is_found_with_marks_around_it() -> None:
    source = LOOP % "{{ m.content.split('::')[-1] if '::' in m.content else 'none' }}{{ m.content.startswith('<a>') }}"
    assert said(source, [user("x::y z"), user("plain"), user("<a>::b")]) == [(0, "y z"), (2, "b")]


def test_a_record_that_holds_every_character_for_marks_is_refused() -> None:
    text = "\x7f" + "".join(map(chr, range(0xFDD0, 0xFDF0)))
    with pytest.raises(RecordRefusedError, match="clean its text"):
        said("{{ messages[0].content }}", [user(text)])
    assert said("{{ messages[0].content }}", [user(text[:-1])]) == [(0, text[:-1])]


def test_a_message_mixed_with_another_is_refused_only_if_it_is_trained() -> None:
    trace = Trace("abc", [Span(0, 1, 0), Span(1, 2, 1), Span(2, 3, 0)])
    roles, marks = ["assistant", "user"], TurnMarks((), ())
    with pytest.raises(RecordRefusedError, match="message 0 is mixed with that of others"):
        find_turns(trace, roles, [True, False], marks)
    assert find_turns(trace, roles, [False, True], marks) == [(1, 2)]


def test_silent_turns_that_cannot_be_told_apart_are_refused_if_it_matters() -> None:
    trace = Trace("Q<A><E>R", [Span(0, 1, 0), Span(7, 8, 3)])
    roles, marks = ["user", "assistant", "assistant", "user"], TurnMarks(("<A>",), ("<E>",))
    assert find_turns(trace, roles, [False, True, True, False], marks) == [(4, 7)]
    assert find_turns(trace, roles, [False, True, True, False], marks, with_end=False) == []
    with pytest.raises(RecordRefusedError, match=r"messages \[1, 2\] are assistant turns without text"):
        find_turns(trace, roles, [False, True, False, False], marks)


def test_a_header_inside_what_a_message_says_is_no_header() -> None:
    text = "[u]x[a]y[e][a]z[e]"
    trace = Trace(text, [Span(3, 8, 0), Span(14, 15, 1)])
    assert find_turns(trace, ["user", "assistant"], [False, True], TurnMarks(("[a]",), ("[e]",))) == [(14, 18)]


def test_a_turn_without_header_and_end_is_its_words_and_their_own_whitespace() -> None:
    trace = Trace("q  a \nq", [Span(0, 1, 0), Span(3, 4, 1, "  ", " "), Span(6, 7, 2)])
    assert find_turns(trace, ["user", "assistant", "user"], [False, True, False], TurnMarks((), ())) == [(1, 5)]


@pytest.mark.parametrize(
    ("source", "tokens", "headers", "ends"),
    [
        (chat_templates.CHATML, CHATML, ("<|im_start|>assistant\n",), ("<|im_end|>",)),
        (chat_templates.CHATML, (), ("<|im_start|>assistant\n",), ("<|im_end|>",)),
        (chat_templates.THINKING, CHATML, ("<|im_start|>assistant\n",), ("<|im_end|>",)),
        (chat_templates.PROMPT_OPENS_THINKING, CHATML, ("<|im_start|>assistant\n",), ("<|im_end|>",)),
        (chat_templates.BRACKETS, MISTRAL, ("[/INST]", "[/TOOL_RESULTS]"), ("</s>",)),
        (
            chat_templates.CHANNELS,
            chat_templates.CHANNEL_TOKENS,
            ("<|start|>assistant",),
            ("<|call|>", "<|end|>", "<|return|>"),
        ),
        # Only the chat's end has an end token; before it the next question's header follows at once.
        (
            "{% for m in messages %}{{ '[INST]' if m.role == 'user' else '[/INST]' }}{{ m.content }}{% endfor %}</s>",
            MISTRAL,
            ("[/INST]",),
            ("</s>",),
        ),
    ],
)
def test_headers_and_ends_are_found_by_rendering(
    source: str, tokens: tuple[str, ...], headers: tuple[str, ...], ends: tuple[str, ...]
) -> None:
    tracer = Tracer(Renderer(source, variables={"bos_token": "<s>", "eos_token": "</s>"}))
    assert probe_template(tracer, tokens).marks == TurnMarks(headers, ends)


def test_a_template_for_one_question_only_is_probed_with_one() -> None:
    source = (
        "{% if messages | length > 2 %}{{ raise_exception('one question only') }}{% endif %}" + chat_templates.CHATML
    )
    assert probe_template(Tracer(Renderer(source)), CHATML).marks.ends == ("<|im_end|>",)


def test_a_template_that_renders_no_chat_at_all_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"cannot render a chat of a user and an assistant.*never"):
        probe_template(Tracer(Renderer("{{ raise_exception('never') }}")), CHATML)


def test_results_of_tools_do_not_belong_to_the_call() -> None:
    chat = [user("?"), assistant("", tool_calls=call("f", a="b")), result("r"), assistant("done")]
    assert [message for message, _ in said(chat_templates.THINKING, chat)] == [0, 1, 1, 2, 3]
