"""The Jinja environment: what templates may use, what they may not, and how their own errors come out."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_packed_sft.encode.templates.renderer import RecordRefusedError, Renderer
from megatron_packed_sft.errors import InvalidInputError


def render(source: str, messages: Any = (), **variables: Any) -> str:
    return Renderer(source, variables=variables).render(list(messages))


def test_whitespace_around_blocks_is_trimmed_as_chat_templates_expect() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc\n") == "a\nb\nc"


def test_json_keeps_letters_order_and_signs_as_they_are() -> None:
    assert render("{{ value | tojson }}", value={"b": "é<&>'", "a": [1, None]}) == '{"b": "é<&>\'", "a": [1, null]}'
    assert (
        render("{{ value | tojson(indent=2, sort_keys=true) }}", value={"b": 1, "a": 2}) == '{\n  "a": 2,\n  "b": 1\n}'
    )
    assert render("{{ value | tojson(ensure_ascii=true, separators=(',', ':')) }}", value={"é": 1}) == '{"\\u00e9":1}'


def test_loops_can_be_left_and_dicts_built() -> None:
    assert render("{% for n in range(9) %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}") == "01"
    assert render("{{ dict(a=1).a }}{{ dict.fromkeys(['x'], 2).x }}") == "12"


def test_keys_of_messages_are_found_as_attributes_and_methods_stay_methods() -> None:
    message = {"role": "user", "items": 5}
    assert render("{{ messages[0].role }}{{ messages[0].nothing }}", [message]) == "user"
    assert render("{% for key, value in messages[0].items() %}{{ key }}{% endfor %}", [message]) == "roleitems"
    assert render("{{ messages[0].nothing is defined }}", [message]) == "False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__ }}",
        "{{ messages[0].__class__.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ range(100000000) | list }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_does_not_get_out_of_the_sandbox(source: str) -> None:
    messages = [{"role": "user"}]
    try:
        assert render(source, messages) == ""
    except RecordRefusedError as refusal:
        assert refusal.reason == "template_error"
    assert messages == [{"role": "user"}]


def test_a_templates_own_words_are_in_the_refusal() -> None:
    with pytest.raises(RecordRefusedError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.reason == "template_error"


def test_what_fails_inside_a_template_refuses_the_record() -> None:
    for source in ("{{ 1 / 0 }}", "{{ nothing.more }}", "{{ 'a' + 1 }}", "{{ messages[0] + 'a' }}"):
        with pytest.raises(RecordRefusedError):
            render(source)


def test_a_syntax_error_names_the_line() -> None:
    with pytest.raises(InvalidInputError, match=r"mine, line 2: .*; fix the template"):
        Renderer("{{ a }}\n{% endif %}", name="mine")


def test_a_date_must_be_one() -> None:
    with pytest.raises(InvalidInputError, match="write it as YYYY-MM-DD"):
        Renderer("", date="31.1.2026")


def test_generation_blocks_are_known_and_leave_no_text() -> None:
    renderer = Renderer("a{% generation %}b{{ messages[0] }}{% endgeneration %}c{% generation %}{% endgeneration %}")
    assert renderer.has_generation_marks
    assert renderer.render([{"x": 1}]) == "ab{'x': 1}c"


def test_a_generation_block_sees_its_loop_and_keeps_what_it_sets_to_itself_as_in_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = (
        "{% set x = 1 %}{% set seen = namespace(n=0) %}{% for message in messages %}{% generation %}"
        "{% set x = 2 %}{% set seen.n = seen.n + 1 %}{{ loop.index }}{{ message.content }}{{ x }}"
        "{% endgeneration %}{{ x }}{% if loop.last %}.{% endif %}{% endfor %}{{ x }}{{ seen.n }}"
    )
    messages = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    [expected], _ = utils.render_jinja_template([messages], chat_template=source)
    assert Renderer(source).render(messages) == expected == "1a212b21.12"


def test_a_generation_block_inside_another_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="generation block inside another"):
        Renderer("{% generation %}{% generation %}b{% endgeneration %}{% endgeneration %}")
