"""Templates that loop or allocate without end are stopped by a limit, in one sentence, plain and traced."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_packed_sft.encode.masks.traced_renderer import TracedRenderer
from megatron_packed_sft.encode.templates import limits
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError, Renderer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.drop_reasons import DropReason

CHAT = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi"}]
CONTENT = "messages[0].content"
DOUBLING = "{%% set ns = namespace(x='ab') %%}{%% for _ in range(64) %%}%s{%% endfor %%}{{ ns.x | length }}"
ATTACKS = [
    # much out of little
    "{{ 'a'.center(3000000000) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a'.rjust(width=10**10) if false else 'a'.rjust(10**10) }}",
    "{{ '7'.zfill(10**10) }}",
    "{{ 'a\t'.expandtabs(10**9) }}",
    f"{{{{ {CONTENT}.center(10**10) }}}}",
    f"{{{{ {CONTENT}['center'](10**10) }}}}",
    f"{{{{ ({CONTENT} | attr('center'))(10**10) }}}}",
    f"{{{{ {CONTENT} | center(10**10) }}}}",
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    f"{{{{ {CONTENT} * 10**9 }}}}",
    "{{ ([0] * 10**10) | length }}",
    "{{ ((0,) * 10**10) | length }}",
    "{{ 2 ** (10**12) }}",
    "{% set ns = namespace(x=3) %}{% for _ in range(64) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x > 1 }}",
    "{{ '%1000000000s' % 'a' }}",
    "{{ '%.1000000000f' % 1.5 }}",
    "{{ '%*s' % (10**10, 'a') }}",
    f"{{{{ '%1000000000s' % {CONTENT} }}}}",
    "{{ '%1000000000s' | format('a') }}",
    "{{ '{:10000000000}'.format('a') }}",
    "{{ '{:{}}'.format('a', 10**10) }}",
    f"{{{{ '{{:10000000000}}'.format({CONTENT}) }}}}",
    "{{ '{a:10000000000}'.format_map({'a': 1}) }}",
    "{{ 'a' | indent(10**10, true) }}",
    f"{{{{ {CONTENT} | indent(10**10, true) }}}}",
    "{{ ('a' * 10000) | wordwrap(1, wrapstring='b' * 1000000) }}",
    "{{ ('a' * 10000) | replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 10000).replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 10000).replace('', 'b' * 1000000) }}",
    "{{ ('a' * 10000).translate({97: 'b' * 1000000}) }}",
    "{{ range(10000) | join('b' * 1000000) }}",
    "{{ ('b' * 1000000).join('a' * 10000) }}",
    "{{ range(100000) | map('center', 100000) | join }}",
    "{{ [1] | batch(10**10, 'x') | list | length }}",
    "{{ [1] | slice(10**10) | list | length }}",
    "{{ {'a': [1]} | tojson(indent=10**10) }}",
    "{{ {'a': [1]} | tojson(false, 10**10) }}",
    "{{ {'a': [1], 'b': 2} | tojson(separators=['b' * 10000000, ':']) }}",
    "{{ 1.5 | round(10**10, 'ceil') }}",
    "{{ lipsum(n=10**9) }}",
    "{{ (5).to_bytes(10**10, 'little') | length }}",
    # doubling
    DOUBLING % "{% set ns.x = ns.x ~ ns.x %}",
    DOUBLING % "{% set ns.x = ns.x + ns.x %}",
    DOUBLING % "{% set ns.x = [ns.x, ns.x] | join %}",
    DOUBLING % "{% set ns.x = [ns.x, ns.x] %}",
    DOUBLING % "{% set ns.x = {'a': ns.x, 'b': ns.x} %}",
    DOUBLING % "{% set ns.x = [1] + [ns.x] + [ns.x] %}",
    DOUBLING % "{% set ns.x = ns.x | replace('ab', 'abab') %}",
    DOUBLING % "{% set ns.x = '%s%s' % (ns.x, ns.x) %}",
    DOUBLING % "{% set ns.x = '{0}{0}'.format(ns.x) %}",
    DOUBLING % "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
    f"{{% set ns = namespace(x={CONTENT}) %}}{{% for _ in range(64) %}}{{% set ns.x = ns.x ~ ns.x %}}{{% endfor %}}",
    f"{{% set ns = namespace(x={CONTENT}) %}}{{% for _ in range(64) %}}{{% set ns.x = ns.x + ns.x %}}{{% endfor %}}",
    # loops and calls
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ loop.index }}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "{% for a in range(9) recursive %}{% if loop.depth < 30 %}{{ loop(range(9)) }}{% endif %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set n = namespace(d=0) %}{% block x %}{% set n.d = n.d + 1 %}{% if n.d < 60 %}{{ self.x() }}{{ self.x() }}{% endif %}"  # noqa: E501
    "{% set n.d = n.d - 1 %}{% endblock %}",
    "{% set x = 'a' * 1000000 %}{% for a in range(99999) %}{{ x }}{% endfor %}",
    "{% for a in ('a' * 50000000) %}{% endfor %}",
    "{% for a in ('a' * 50000000) | map('upper') %}{% endfor %}",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _smaller_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The limits are reached sooner, and a template that gets past them finds little memory."""
    for name in ("MOST_STEPS", "MOST_CHARACTERS", "MOST_IN_ALL"):
        monkeypatch.setattr(limits, name, getattr(limits, name) // 20)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("source", ATTACKS)
def test_a_template_that_loops_or_allocates_without_end_is_stopped_by_a_limit(source: str) -> None:
    renderer = Renderer(source, name="evil.jinja")
    for render in (renderer.render, TracedRenderer(renderer).render):
        with pytest.raises(RecordRefusedError) as refused:
            render(CHAT)
        assert refused.value.reason is DropReason.TEMPLATE_ERROR
        assert refused.value.detail.startswith("evil.jinja ")
        assert "memory" not in refused.value.detail  # it was stopped before
        assert refused.value.detail.endswith("fix the template")


def test_limits_hold_for_each_render_and_not_for_all_together() -> None:
    renderer = Renderer("{% for _ in range(99999) %}{% endfor %}{% set x = 'a' * 1000000 %}{{ x }}")
    for _ in range(20):
        assert len(renderer.render(CHAT)) == 1_000_000
        assert len(TracedRenderer(renderer).render(CHAT).text) == 1_000_000


OPERATIONS = [
    "{{ 'ab'.center(9) }}|{{ 'a-b'.replace('-', '+') }}|{{ '-'.join(['a', 'b']) }}|{{ 'a\tb'.expandtabs(4) }}",
    "{{ 'a' * 3 }}|{{ [1, 2] * 2 }}|{{ 2 ** 10 }}|{{ 7 % 4 }}|{{ '%s-%5d' % ('a', 3) }}|{{ '{:>5}|{b}'.format(1, b=2) }}",  # noqa: E501
    "{{ 'a' ~ 1 ~ none }}|{{ 1 + 2 }}|{{ 1.5 + 1 }}|{{ 'a' + 'b' }}|{{ [1] + [2] }}|{{ (1, 2) + (3,) }}",
    "{{ range(3) | join('-') }}|{{ [1, 2, 3] | batch(2, 0) | list }}|{{ [1, 2, 3] | slice(2) | map('list') | list }}",
    "{{ 'a\nb' | indent(2, true) }}|{{ 'a b c' | wordwrap(3) }}|{{ {'a': [1]} | tojson(indent=2) }}|{{ 2.567 | round(1) }}",  # noqa: E501
    "{{ [[1], [2]] | sum(start=[]) }}|{{ [1, 2] | sum }}|{{ [{'a': 1}, {'a': 4}] | sum('a') }}|{{ [1, 2] | sum(start=5) }}",  # noqa: E501
    "{% for k, v in {'a': 1, 'b': [2]}.items() %}{{ loop.index }}{{ loop.length }}{{ k }}{{ v }}{% endfor %}",
    "{% for x in [1, 2, 3] | map('string') %}{{ x }}{{ loop.last }}{% else %}none{% endfor %}{% for x in '' %}{% else %}-{% endfor %}",  # noqa: E501
    "{% for x in [1, 2, 3, 4] if x is even %}{{ x }}{{ loop.length }}{% endfor %}{% for x in nothing %}{% endfor %}",
    "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
    "{% macro f(a, b=2) %}<{{ a }}{{ b }}{{ caller() if caller }}>{% endmacro %}{{ f(1) }}{% call f(3) %}!{% endcall %}",  # noqa: E501
    "{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{{ x }}{% endfilter %}{{ 'a'.encode() | length }}",
]  # fmt: skip


@pytest.mark.parametrize("source", OPERATIONS)
def test_operations_with_limits_give_what_jinja_gives(source: str) -> None:
    expected = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    expected.filters["tojson"] = lambda value, indent=None: json.dumps(value, indent=indent)
    text = expected.from_string(source).render(messages=CHAT)
    renderer = Renderer(source)
    assert renderer.render(CHAT) == text
    assert TracedRenderer(renderer).render(CHAT).text == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 300 + "1" + "]" * 300 + " }}",
        "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
        "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
        "{{ " + "not " * 5000 + "1 }}",
        "{{ 1" + " + 1" * 20000 + " }}",
        "{{ messages" + "[0]" * 5000 + " }}",
    ],
)
def test_a_deeply_nested_template_is_one_sentence_or_works(source: str) -> None:
    try:
        Renderer(source, name="deep.jinja")
    except InvalidInputError as error:
        assert str(error) == "deep.jinja is nested too deeply to be compiled; simplify it or choose another"
