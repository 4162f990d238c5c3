"""Templates that loop or allocate without end are stopped by a limit, in one sentence, plain and traced."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_packed_sft.encode.masks.traced_renderer import TracedRenderer
from megatron_packed_sft.encode.templates import limits
from megatron_packed_sft.encode.templates.load import load_template
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError, Renderer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.drop_reasons import DropReason

CHAT = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi"}]
CONTENT = "messages[0].content"
DOUBLING = "{%% set ns = namespace(x='ab') %%}{%% for _ in range(64) %%}%s{%% endfor %%}{{ ns.x | length }}"
LOOKING = "{%% set x = %s %%}{%% for _ in range(99999) %%}{{ %s }}{%% endfor %%}"
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
    "{{ '{:999{a}}'.format('a', a='999999') }}",
    "{{ '{:{a[x]}}'.format('a', a={'x': '>9999999999'}) }}",
    "{{ ('%999s' * 100000) % (('a',) * 100000) }}",
    "{{ ('f' * 60000) | int(0, 16) // 3 }}",
    "{{ (5).from_bytes(('a' * 60000).encode(), 'big') // 3 }}",
    "{{ ('é' * 60000).encode('punycode') | length }}",
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
    "{{ 15 | round(-(10**9)) }}",
    "{{ ('é' * 1000000) | urlencode | length }}",
    "{{ ('a ' * 300000) | title | length }}",
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
    DOUBLING % "{% set ns.x = ns.x.encode('utf-32').decode('latin-1') %}",
    DOUBLING % "{% set ns.x = ns.x.encode().hex() %}",
    DOUBLING % "{% set ns.x = '%' ~ ns.x | urlencode | urlencode | replace('25', '%%%') %}",
    DOUBLING % "{% set ns.x = (ns.x ~ '&') | string | forceescape | string | replace('amp', '&&&') %}",
    DOUBLING % "{% set ns.x = ([ns.x ~ '\\\\'] | string) %}",
    DOUBLING % "{% set ns.x = (ns.x ~ '\\\\') | tojson %}",
    DOUBLING % "{% set ns.x = dict(a=ns.x, b=ns.x) %}",
    DOUBLING % "{% set ns.x = dict.fromkeys(['a', 'b'], ns.x) %}",
    "".join(f"{{% set n{place} = namespace() %}}" for place in range(41))
    + "".join(f"{{% set n{place}.x = [n{place + 1}, n{place + 1}] %}}" for place in range(40))
    + "{{ n0 }}",
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
    # few operations, each of which looks at much
    LOOKING % ("'a' * 1000000", "'b' in x"),
    LOOKING % ("'a' * 1000000", "x.lower() == x"),
    LOOKING % ("range(50000) | list", "-1 in x"),
    LOOKING % ("range(50000) | list", "x | sort | length"),
    LOOKING % ("range(2000) | list", "x | map('string') | list"),
    LOOKING % ("range(2000) | list", "x | select('odd') | first"),
    LOOKING % ("range(2000) | list", "x | reverse | first"),
    "{% set n = namespace(x='') %}{% for a in range(90000) %}{% if not a %}{% set n.x = 'a' * 1000000 %}{% endif %}"
    "{{ 'b' in n.x }}{% endfor %}",
    "{% for a in range(99999) %}" + "{{ 1 if a else 2 }}" * 3000 + "{% endfor %}",
    "{{ ('a' * 600000) | wordwrap(9) }}",
    "{{ ('a' * 600000) | sort | length }}",
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


@pytest.mark.parametrize("is_traced", [False, True])
def test_long_texts_of_a_record_leave_fewer_steps(is_traced: bool) -> None:
    renderer = Renderer("{% for _ in range(30000) %}{{ 'b' in messages[0].content }}{% endfor %}")
    render = TracedRenderer(renderer).render if is_traced else renderer.render
    assert render(CHAT)
    with pytest.raises(RecordRefusedError, match="too often with 1,000,000 characters to look at; shorten the record"):
        render([{"role": "user", "content": "a" * 1_000_000}])


def test_what_the_whole_template_writes_costs_no_steps() -> None:
    chat = [{"role": "user", "content": "x" * 1000}] * 2000
    renderer = Renderer("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}")
    assert len(renderer.render(chat)) == len(TracedRenderer(renderer).render(chat).text) == 2_008_000


def test_errors_of_a_template_are_short() -> None:
    for source in ("{{ raise_exception('a\n' * 100000) }}", "{{ messages[0]['a' * 100000].x }}"):
        renderer = Renderer(source, name="evil.jinja")
        for render in (renderer.render, TracedRenderer(renderer).render):
            with pytest.raises(RecordRefusedError) as refused:
                render(CHAT)
            assert len(refused.value.detail) < 600
            assert "\n" not in refused.value.detail


def test_a_huge_template_is_refused_before_it_is_compiled(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"big\.jinja has 200,001 characters, and a chat template at most 200"):
        Renderer("x" * 200_001, name="big.jinja")
    with (tmp_path / "big.jinja").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InvalidInputError, match="so it is no chat template"):
        load_template(str(tmp_path / "big.jinja"))


def test_limits_hold_for_each_render_and_not_for_all_together() -> None:
    renderer = Renderer("{% for _ in range(3000) %}{% endfor %}{% set x = 'a' * 1000000 %}{{ x }}")
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
