"""Templates that compute or write without end are refused in one sentence, plain and traced, and harm nothing else."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.masks.traced_renderer import TracedRenderer
from megatron_packed_sft.encode.options import EncodeOptions
from megatron_packed_sft.encode.templates import environment
from megatron_packed_sft.encode.templates.load import ChatTemplate, load_template
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError, Renderer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import Conversation
from megatron_packed_sft.support.drop_reasons import DropReason
from tests.encode.byte_tokenizer import ByteTokenizer
from tests.encode.template_matrix import answer, user

CHAT = [user("Hello there"), answer("Hi")]
SLOW, LONG, REPEATED, OWN = (
    "took longer than 2 seconds",
    "writes more than 6",
    "repeats a text or a list to a length",
    "",
)
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ATTACKS = [
    (LOOP, SLOW),
    ("{% for a in range(9) recursive %}{{ loop(range(9)) if loop.depth < 30 }}{% endfor %}", SLOW),
    ("{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}", SLOW),
    ("{% set n = namespace(x=1) %}{% for _ in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}", SLOW),
    ("{% set n = namespace(x=3) %}{% for _ in range(64) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x > 1 }}", SLOW),
    ("{% set x = 'a' * 1000000 %}{% for a in range(99999) %}{{ 'b' in x }}{% endfor %}", SLOW),
    ("{% for a in range(99999) %}{{ messages[0].content * 100 }}{% endfor %}", LONG),
    ("{% for a in range(99) %}{{ messages[0].content * 100000 }}{% endfor %}", LONG),
    ("{{ 'x' * 10**9 }}", REPEATED),
    ("{{ 10**9 * messages[0].content }}", REPEATED),
    ("{{ ([0] * 10**10) | length }}", REPEATED),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses too deeply"),
    ("{{ range(10**9) | list | length }}", "MAX_RANGE"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _reached_soon(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(environment, "MAX_SECONDS", 2)
    monkeypatch.setattr(environment, "MAX_CHARACTERS", 6_000_000)
    problem = request.getfixturevalue("problem") if "problem" in request.fixturenames else None
    expects_time = "source" not in request.fixturenames or problem == SLOW
    monkeypatch.setattr(environment, "_TICK", 0.05 if expects_time else 5)


@pytest.mark.parametrize(("source", "problem"), ATTACKS)
def test_a_template_that_loops_or_allocates_without_end_is_stopped_by_a_limit(source: str, problem: str) -> None:
    renderer = Renderer(source, name="evil.jinja")
    for render in (renderer.render, TracedRenderer(renderer).render):
        with pytest.raises(RecordRefusedError) as refused:
            render(CHAT)
        assert refused.value.reason is DropReason.TEMPLATE_ERROR
        assert refused.value.detail.startswith("evil.jinja")
        assert problem in refused.value.detail
        assert "\n" not in refused.value.detail


def encoder_for(source: str, **options: Any) -> RecordEncoder:
    tokenizer = ByteTokenizer(("<end>", "<bot>"), eos="<end>")
    return RecordEncoder(tokenizer, ChatTemplate("evil.jinja", source), EncodeOptions(**options))


MINE = "{% for m in messages %}<bot>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"


def test_a_record_that_takes_too_long_is_dropped_and_the_next_one_has_all_of_its_time() -> None:
    encoder = encoder_for("{% if messages[0].content == 'slow' %}" + LOOP + "{% endif %}" + MINE)
    records = [Conversation([user(text), answer("Hi")]) for text in ("slow", "Hello", "slow", "Bye")]
    encoded = encoder.encode_records(records)
    assert encoded.sequences.record.tolist() == [1, 3]
    assert [(one.record, one.reason) for one in encoded.dropped] == [(0, "template_error"), (2, "template_error")]
    assert encoded.dropped[0].detail == (
        "evil.jinja took longer than 2 seconds; shorten the record, or fix the template"
    )


def test_a_template_that_never_ends_is_refused_when_it_is_probed() -> None:
    with pytest.raises(InvalidInputError, match=r"evil\.jinja took longer than 2 seconds"):
        encoder_for(LOOP + MINE).marker()


def test_the_timer_leaves_handlers_and_timers_as_they_were() -> None:
    calls = []
    before = signal.signal(signal.SIGVTALRM, lambda number, frame: calls.append(number))
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000, 5)
    try:
        with environment.time_limited(), environment.time_limited():
            with pytest.raises(RecordRefusedError, match="took longer"):
                Renderer(LOOP).render(CHAT)
            environment.restart_timer()
            assert Renderer(MINE).render(CHAT)
        left, interval = signal.getitimer(signal.ITIMER_VIRTUAL)
        assert 900 < left < 1001  # the kernel rounds up
        assert interval == 5
        signal.raise_signal(signal.SIGVTALRM)
        assert calls == [signal.SIGVTALRM]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_time_that_our_own_code_takes_interrupts_nothing() -> None:
    renderer = Renderer("")
    with environment.time_limited():
        environment._timer.seconds_left = 1
        environment._tick(signal.SIGVTALRM, None)
        environment._tick(signal.SIGVTALRM, None)  # nothing is being rendered
        with pytest.raises(RecordRefusedError, match="took longer"):
            renderer.render(CHAT)


def test_other_threads_render_without_a_time_limit() -> None:
    texts = []
    thread = threading.Thread(target=lambda: texts.append(Renderer(MINE).render(CHAT)))
    with environment.time_limited():
        environment._timer.seconds_left = 0
        thread.start()
        thread.join()
    assert texts == ["<bot>Hello there<end><bot>Hi<end>"]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ 'x ' | center(9000000) | wordwrap(1) | title }}", SLOW),
        ("{{ 'x' | center(9000000) }}", "has constants that are too long"),
        ("x" * 200_001, "has 200,001 characters, but a chat template may have 200,000"),
    ],
)
def test_a_template_that_compiles_without_end_is_refused(source: str, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"evil\.jinja {problem}; .*choose another"):
        Renderer(source, name="evil.jinja")


def test_a_huge_file_is_no_template(tmp_path: Path) -> None:
    with (tmp_path / "big.jinja").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InvalidInputError, match="so it is not a chat template"):
        load_template(str(tmp_path / "big.jinja"))


@pytest.mark.parametrize("source", ["{{ raise_exception('a\n' * 100000) }}", "{{ messages[0]['a' * 100000].x }}"])
def test_errors_of_a_template_are_short(source: str) -> None:
    renderer = Renderer(source, name="evil.jinja")
    for render in (renderer.render, TracedRenderer(renderer).render):
        with pytest.raises(RecordRefusedError) as refused:
            render(CHAT)
        assert len(refused.value.detail) < 600
        assert "\n" not in refused.value.detail


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
        "{{ 1" + " + 1" * 20000 + " }}",
    ],
)
def test_a_deeply_nested_template_is_one_sentence_or_works(source: str) -> None:
    try:
        Renderer(source, name="deep.jinja")
    except InvalidInputError as error:
        assert str(error) == "deep.jinja is nested too deeply to be compiled; simplify it or choose another"
