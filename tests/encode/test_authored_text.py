"""Strings that remember their author: the text of plain Jinja, every character's author, whatever the template does."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_packed_sft.encode.masks.authored_values import AuthoredChat
from megatron_packed_sft.encode.masks.traced_renderer import TracedRenderer
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError, Renderer
from tests.encode.test_mask_turns import assistant, call, user

LOOP = "{%% for m in messages %%}[%s]{%% endfor %%}"


def said(source: str, messages: list[dict[str, Any]], tools: Any = None) -> list[tuple[int, str]]:
    """What each author wrote, pieces of one message joined; the text must be that of a plain render."""
    plain = Renderer(source)
    traced = TracedRenderer(plain).render(messages, AuthoredChat(tools))
    assert traced.text == plain.render(messages, tools)
    found: list[tuple[int, str]] = []
    end = -1
    for span in traced.spans:
        text = traced.text[span.start : span.end]
        if found and end == span.start and found[-1][0] == span.author.message:
            found[-1] = (found[-1][0], found[-1][1] + text)
        else:
            found.append((span.author.message, text))
        end = span.end
    return found


@pytest.mark.parametrize(
    ("joined", "expected"),
    [
        ("'<a>' + m.content + (m.name | safe) + '<b>'", "1 &lt; 2 &amp; &#39;x&#39;<i>"),
        ("m.content ~ (m.name | safe) ~ '<b>'", "1 < 2 & 'x'<i>"),
    ],
)
def test_texts_marked_as_safe_keep_their_authors_and_escape_what_is_added(joined: str, expected: str) -> None:
    chat = [{"role": "assistant", "content": "1 < 2 & 'x'", "name": "<i>"}]
    assert said(LOOP % f"{{{{ {joined} }}}}", chat) == [(0, expected)]


def test_a_call_whose_arguments_are_marked_as_safe_is_the_messages() -> None:
    source = LOOP % (
        "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}{% set a = f.arguments | tojson | safe %}"
        "{{ '[CALL]' + f.name + '[ARGS]' + a }}{% endif %}"
    )
    found = said(source, [assistant("", tool_calls=call("add", a=1))])
    assert "".join(text for _, text in found) == 'add{"a": 1}'


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("m.content", "  Some words. "),
        ("m.content | trim", "Some words."),
        ("m.content.strip() + '!'", "Some words."),
        ("m.content | upper", "  SOME WORDS. "),
        ("m.content[2:6]", "Some"),
        ("m.content.split('wor')[1]", "ds. "),
        ("m.content | replace('Some', 'Few')", "  Few words. "),
        ("'<' ~ m.content ~ '>'", "  Some words. "),
        ("'%s.' % m.content", "  Some words. "),
        ("'{}.'.format(m.content)", "  Some words. "),
        ("m.content | list | join", "  Some words. "),
        ("m.content | urlencode", "%20%20Some%20words.%20"),
        ("m.content | indent(2)", "  Some words. "),
        ("m.content.splitlines() | join('|')", "  Some words. "),
        ("(m.content | tojson)[1:-1]", "  Some words. "),
    ],
)
def test_a_text_keeps_its_author_through_what_templates_do(expression: str, expected: str) -> None:
    assert said(LOOP % f"{{{{ {expression} }}}}", [user("  Some words. ")]) == [(0, expected)]


def test_macros_set_blocks_and_joins_keep_authors_apart() -> None:
    source = (
        "{% macro shown(m) %}<{{ m.content }}>{% endmacro %}{% set block %}{{ shown(messages[0]) }}{% endset %}"
        "{{ block | trim }}{{ [messages[0].content, messages[1].content] | join('-') }}"
    )
    assert said(source, [user("a"), user("b")]) == [(0, "a"), (0, "a"), (1, "b")]


def test_json_of_a_message_is_its_own_down_to_the_brackets_and_keys_have_authors() -> None:
    message = assistant("a", tool_calls=call("f", x={"y": ["b", 1]}))
    [(author, text)] = said(LOOP % "{{ m.tool_calls | tojson }}", [message])
    assert (author, text[0], text[-1]) == (0, "[", "]")
    keys = "{% for k, v in m.tool_calls[0].function.arguments.items() %}{{ k }}{% endfor %}"
    assert said(LOOP % keys, [message]) == [(0, "x")]
    assert said("{{ tools | tojson }}", [user("q")], [{"name": "f", "n": 1}]) == [(-1, '[{"name": "f", "n": 1}]')]


def test_questions_are_answered_as_for_plain_strings() -> None:
    source = LOOP % (
        "{{ m.content == 'a' }}{{ m.content in ['a'] }}{{ 'a' in m.content }}{{ m.content in 'abc' }}"
        "{{ m.content | length > 0 }}{{ m.content.startswith('a') }}{{ {'a': 1}[m.content] }}{{ m.content is string }}"
        "{{ m.tool_calls is defined }}{{ m.nothing }}{{ m.content | int(7) }}{{ m.content < 'b' }}"
    )
    assert said(source, [user("a")]) == []


def test_a_traced_template_does_not_get_out_of_the_sandbox_or_at_the_authors() -> None:
    for expression in ("m.content.authors", "m.content['parts']", "m.raw", "m.content.__class__", "messages.append(1)"):
        source = LOOP % f"{{{{ {expression} }}}}"
        try:
            assert TracedRenderer(Renderer(source)).render([user("a")]).text == "[]"
        except RecordRefusedError as refusal:
            assert refusal.reason == "template_error"
