"""Templates compiled with shortcuts write what Jinja's own code writes, and fail where it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_packed_sft.encode.templates.environment import BLOCK_BEGINS, BLOCK_ENDS, prepare_environment
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError, Renderer
from tests.encode.template_families import FAMILIES
from tests.encode.template_matrix import SHAPES, TOOLS
from tests.real_data import IS_WHOLE, templates_folder

DATE = "2026-01-31"
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": " Hi ", "items": 5, "none": None},
    {
        "role": "assistant",
        "content": "a,b,c",
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, None]}}}],
    },
]


def by_jinja(source: str) -> Callable[..., str]:
    environment = ImmutableSandboxedEnvironment()
    prepare_environment(environment, "chat template", DATE)
    template = environment.from_string(source)

    def render(messages: Any, tools: Any, *, add_generation_prompt: bool = False) -> str:
        blocks = {BLOCK_BEGINS: "", BLOCK_ENDS: ""}
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return template.render(documents=None, **given, **VARIABLES, **blocks)

    return render


def outcome(render: Callable[..., str], *arguments: Any, **named: Any) -> str:
    try:
        return render(*arguments, **named)
    except RecordRefusedError as refusal:
        return refusal.detail.removeprefix("chat template: ")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].role }}{{ messages[0].nothing }}{{ messages[0].nothing is defined }}{{ messages[0].none }}",
        "{{ messages[0].nothing.more }}",
        "{{ messages[5].role }}{{ messages[5] is defined }}{{ messages[-1].role }}{{ messages['x'] }}",
        "{{ messages[0]['role'] }}{{ messages[0]['nothing'] is defined }}{{ messages[0]['items'] }}",
        "{% if messages[0].nothing or not messages[0].none and messages[1].tool_calls %}yes{% endif %}",
        "{{ 'yes' if messages[0].nothing else 'no' }}{{ not messages[0].nothing }}",
        "{{ messages[0].nothing or 'other' }}{{ messages[0].nothing == false }}",
        "{% set d = {'a': nothing, 'b': 1} %}{{ d.a is defined }}{{ d.b is defined }}{{ d.a }}{{ d.items() | list }}",
        "{% set ns = namespace(a=1, self=2) %}{{ ns.a }}{{ ns.self }}{{ ns.b is defined }}{{ ns.b }}",
        "{% set ns = namespace({'a': 1}) %}{% set ns.a = ns.a + 1 %}{% set ns.b = 3 %}{{ ns.a }}{{ ns.b }}{{ ns }}",
        "{% set ns = namespace() %}{{ ns.__class__ }}{{ ns._Namespace__attrs }}",
        "{% set ns = 5 %}{{ ns.a }}{% set loop = messages %}{{ loop.index }}",
        "{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}"
        "{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}"
        "{{ loop.changed(m.role) }}{{ loop.depth }}{{ loop.nothing }}{% endfor %}",
        "{% for m in messages | map(attribute='role') %}{{ loop.last }}{{ loop.nextitem }}{{ m }}{% endfor %}",
        "{% for c in 'abc' %}{{ loop.index }}{{ loop.last }}{{ c }}{% else %}none{% endfor %}",
        "{% for k, v in messages[0].items() if v %}{{ loop.first }}{{ k }}{% endfor %}{% for x in [] %}{% endfor %}",
        "{% for m in messages %}{% for x in [1, 2] %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}",
        "{% for m in messages recursive %}{{ loop.depth }}{{ loop(m.more) if m.more }}{% endfor %}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
        "{{ messages[1].content.split(',')[0].upper().replace('A', 'x').strip() }}{{ 'x'.nothing }}",
        "{{ messages[1].content.split(',', 1) }}{{ messages[1].content.split(sep=',', maxsplit=1) }}",
        "{{ messages[0].content.strip().startswith(messages[0].content.strip()[:1].lower()) }}",
        "{{ messages.strip() }}",
        "{{ 'a' * 3 }}{{ 3 * 'a' }}{{ [1] * 2 }}{{ 3 * 4 }}{{ 1.5 * 2 }}{{ 2 ** 10 }}{{ 'a' * 'b' }}",
        "{{ messages[0].none.strip() }}",
        "{{ messages[0].nothing.strip() }}",
        "{{ messages[0].content.replace(1) }}",
        "{% macro f(m) %}{{ m.role }}{{ m.content.strip() }}{{ caller() if caller }}{% endmacro %}{{ f(messages[0]) }}"
        "{% call f(messages[1]) %}{{ messages[0].role }}{% endcall %}",
        "{{ messages[1].tool_calls[0].function.arguments | tojson }}{{ messages | tojson(indent=2) }}"
        "{{ {'b': 1.0, 'a': [true, none, 10000000000000000000000]} | tojson(sort_keys=true) }}{{ 'é' | tojson }}",
        "{{ [1e16, -0.0, 1] | tojson }}{{ [1.0, 1e16, true] | tojson }}{{ [1, 10000000000000000, 1] | tojson }}",
    ],
)
def test_whatever_a_template_asks_the_answer_is_jinjas(source: str) -> None:
    expected = outcome(by_jinja(source), MESSAGES, None)
    assert outcome(Renderer(source, variables=VARIABLES, date=DATE).render, MESSAGES, None) == expected


@pytest.mark.parametrize("name", [None] if IS_WHOLE else [family.templates[0] for family in FAMILIES.values()])
def test_real_templates_write_the_same(name: str | None) -> None:
    folder = templates_folder()
    for path in sorted(folder.glob("*.jinja")) if name is None else [folder / f"{name}.jinja"]:
        source = path.read_text(encoding="utf-8")
        jinja, ours = by_jinja(source), Renderer(source, variables=VARIABLES, date=DATE).render
        for shape in SHAPES.values():
            for end in range(1, len(shape.messages) + 1):
                for prompt in (False, True):
                    chat = (shape.messages[:end], TOOLS if shape.has_tools else None)
                    expected = outcome(jinja, *chat, add_generation_prompt=prompt)
                    assert outcome(ours, *chat, add_generation_prompt=prompt) == expected
