"""Traits of real templates that were found on those held out; each template here is made up to show one of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.options import EncodeOptions
from megatron_packed_sft.encode.templates.load import ChatTemplate
from megatron_packed_sft.records.record import Conversation
from tests.encode.byte_tokenizer import ByteTokenizer
from tests.encode.template_families import Family
from tests.encode.template_matrix import OSLO, SHAPES, TOOLS, Outcome, answer, calling, compare, result, user

SYSTEM = {"role": "system", "content": "Be brief."}
# Blanks before whatever follows a tool's result, which no prompt shows.
BLANK_AFTER_RESULT = (
    "{% for m in messages %}{% if m.role == 'tool' %}<tool>{{ m.content }}</tool>{% elif m.role == 'user' %}"
    "<user>{{ m.content }}<bot>{% else %}{% if loop.index0 and messages[loop.index0 - 1].role == 'tool' %}{{ '\n' }}"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</call>{% endfor %}<end>{% endif %}{% endfor %}"
)
# Something after every chat, which is no prompt, and a prompt only after questions.
CODA = (
    "{% for m in messages %}<role>{{ m.role }}</role>{{ m.content }}<end>\n{% if loop.last and m.role == 'user' and "
    "add_generation_prompt %}<role>assistant</role>{% endif %}{% endfor %}~~~\n"
)
# What closes a message stands before the next one.
CLOSED_BY_THE_NEXT = (
    "{% for m in messages %}{% if not loop.first %}<end>\n{% endif %}<role>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<end>\n<role>assistant\n{% endif %}"
)
# What closes a message stands before the next one, and after the loop if no prompt follows, as AI21's Jamba writes it.
CLOSED_AFTER_THE_LOOP = (
    "{% for m in messages %}{% if not loop.first %}<|eom|>{% endif %}<|bom|><|{{ m.role }}|> {{ m.content }}"
    "{% if m.tool_calls %}<calls>{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}</calls>{% endif %}{% endfor %}<|eom|>{% if add_generation_prompt %}<|bom|><|assistant|>{% endif %}"
)
JAMBA = Family(
    (),
    " {}<|eom|>",
    lambda found: " <calls>" + "".join(name + json.dumps(given) for name, given in found) + "</calls><|eom|>",
)
# Answers in a row are one turn.
MERGED = (
    "{% for m in messages %}{% set goes_on = not loop.first and messages[loop.index0 - 1].role == 'assistant' %}"
    "{% set ends = loop.last or m.role != 'assistant' or messages[loop.index].role != 'assistant' %}"
    "{% if not (m.role == 'assistant' and goes_on) %}<role>{{ m.role }}\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}{{ c.function.name }}</call>{% endfor %}"
    "{% if ends %}<end>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<role>assistant\n{% endif %}"
)
# No prompt at all: only the end of a chat is different from its middle.
HEADER_OF_ITS_OWN = (
    "{% for m in messages %}{% if m.role == 'user' %} <user> {{ m.content }} {% if loop.last %} <bot> {% endif %}"
    "{% else %} <bot> {{ m.content }} {% if not loop.last %} <end> {% endif %}{% endif %}{% endfor %}"
)
# Content only as a list of parts.
PARTS = (
    "{% for m in messages %}<role>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}<end>\n{% endfor %}{% if add_generation_prompt %}<role>assistant\n{% endif %}"
)
# Reasoning, calls, answer and end, each in a generation block; one more behind the chat.
MANY_MARKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<role>assistant\n"
    "{% if m.reasoning_content %}{% generation %}<think>{{ m.reasoning_content }}</think>{% endgeneration %}{% endif %}"
    "{% if m.content %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% for c in m.tool_calls or [] %}"
    "{% generation %}<call>{{ c.function.arguments | tojson }}{{ c.function.name }}</call>{% endgeneration %}"
    "{% endfor %}"
    "{% generation %}<end>\n{% endgeneration %}{% else %}<role>{{ m.role }}\n{{ m.content }}<end>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<role>assistant\n{% else %}{% generation %}<eos>{% endgeneration %}"
    "{% endif %}"
)
# Marks around answers only: calls are left out.
MARKED_ANSWERS = (
    "{% for m in messages %}<role>{{ m.role }}\n{% if m.role == 'assistant' %}{% if m.content %}{% generation %}"
    "{{ m.content }} {% endgeneration %}{% endif %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<role>assistant\n{% endif %}"
)
# Every parameter of a tool is read.
READS_PARAMETERS = (
    "{% for t in tools %}<tool>{% for name, p in t.function.parameters.properties.items() %}{{ name }}: {{ p.type }}"
    "{% endfor %}</tool>{% endfor %}{% for m in messages %}<role>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<role>assistant\n{% endif %}"
)
# A call without a header, right behind the question.
NO_HEADER_BEFORE_CALLS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.content %}<bot>{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}{{ c.function.name }}</call>"
    "{% endfor %}<end>{% else %}<user>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def encoder_for(source: str, **options: Any) -> RecordEncoder:
    tokenizer = ByteTokenizer(("<end>", "<role>", "<bot>", "<user>", "<call>", "</call>", "<eos>"), eos="<end>")
    return RecordEncoder(tokenizer, ChatTemplate("held out", source), EncodeOptions(**options))


def trained(source: str, messages: Sequence[dict[str, Any]], *, tools: Any = None, **options: Any) -> list[str]:
    marked = encoder_for(source, **options).mark(Conversation(messages, tools))
    return [marked.text[start:end] for start, end in marked.trained]


def test_a_blank_that_no_prompt_shows_is_trained_before_a_call_as_before_an_answer() -> None:
    chat = [user("?"), calling(OSLO), result("rain"), answer("Ok."), user("!"), answer("Bye.")]
    assert trained(BLANK_AFTER_RESULT, chat)[1:] == ["\nOk.<end>", "Bye.<end>"]
    again = [user("?"), calling(OSLO), result("rain"), calling(OSLO), result("rain"), answer("Ok.")]
    call = '<call>look{"city": "Oslo"}</call><end>'
    assert trained(BLANK_AFTER_RESULT, again) == [call, f"\n{call}", "\nOk.<end>"]


def test_what_follows_every_chat_is_not_taken_for_a_prompt() -> None:
    assert trained(CODA, [SYSTEM, answer("Hello."), user("Hi"), answer("Yes.")]) == ["Hello.<end>", "Yes.<end>"]


def test_an_answer_that_nobody_asked_for_needs_no_end_of_a_question() -> None:
    chat = [answer("Hello."), user("Hi"), answer("Yes.")]
    assert trained(CLOSED_BY_THE_NEXT, chat) == ["Hello.<end>", "Yes."]


@pytest.mark.parametrize("kind", [kind for kind in SHAPES if kind != "reasoning"])
def test_the_last_turn_keeps_its_end_if_the_template_closes_it_after_its_loop(kind: str) -> None:
    tokenizer = ByteTokenizer(("<|bom|>", "<|eom|>", "<|user|>", "<|assistant|>", "</s>"), eos="</s>")
    encoder = RecordEncoder(tokenizer, ChatTemplate("Jamba", CLOSED_AFTER_THE_LOOP), EncodeOptions())
    assert compare(encoder, JAMBA, kind) == Outcome("exact")
    shape = SHAPES[kind]
    chat = Conversation(shape.messages, TOOLS if shape.has_tools else None)
    for _ in range(20):  # in time from recipes and from a compiled shape
        assert encoder.mark(chat).trained == encoder.marker().mark_by_rendering(chat).marked.trained


def test_answers_that_a_template_writes_as_one_turn_are_one() -> None:
    assert trained(MERGED, [user("Hi"), answer("One."), answer("Two.")]) == ["One.Two.<end>"]
    assert trained(MERGED, [user("Hi"), answer("Wait."), calling(OSLO)]) == [
        'Wait.<call>{"city": "Oslo"}look</call><end>'
    ]


def test_a_header_that_no_prompt_shows_is_not_trained_even_if_the_chat_ends_differently() -> None:
    assert trained(HEADER_OF_ITS_OWN, [user("Hi"), answer("One."), answer("Two.")]) == ["One.  <end>", "Two."]


def test_content_goes_in_parts_into_a_template_that_reads_only_parts() -> None:
    chat = [SYSTEM, user("Hi"), answer("One."), user("?"), answer("")]
    assert trained(PARTS, chat) == ["One.<end>", "<end>"]
    text = encoder_for(PARTS).mark(Conversation(chat)).text
    assert text.startswith("<role>system\nBe brief.<end>\n<role>user\nHi<end>\n<role>assistant\nOne.<end>\n")


def test_all_generation_blocks_of_a_turn_are_trained_up_to_its_stop_token() -> None:
    chat = [user("?"), answer("", tool_calls=calling(OSLO)["tool_calls"], reasoning_content="Hm."), result("rain")]
    chat += [answer("Rain."), user("Ta"), answer("")]
    found = trained(MANY_MARKS, chat)
    assert found == ['<think>Hm.</think><call>{"city": "Oslo"}look</call><end>', "Rain.<end>", "<end>"]  # and no <eos>
    assert trained(MANY_MARKS, chat[:4], train_on_eot=False) == [
        '<think>Hm.</think><call>{"city": "Oslo"}look</call>',
        "Rain.",
    ]
    assert trained(MANY_MARKS, chat, last_turn_only=True) == ["<end>"]


def test_a_generation_block_without_an_end_of_turn_ends_with_its_last_word() -> None:
    assert trained(MARKED_ANSWERS, [user("Hi"), answer("One."), user("?"), answer("Two.")]) == ["One.", "Two."]


def test_a_call_that_no_generation_block_shows_is_lost() -> None:
    chat = [user("?"), calling(OSLO), result("rain"), answer("Rain.")]
    [dropped] = encoder_for(MARKED_ANSWERS).encode_records([Conversation(chat, TOOLS)]).dropped
    assert dropped.reason == "lost_text"


def test_a_template_that_reads_every_parameter_can_be_probed() -> None:
    assert trained(READS_PARAMETERS, [user("Hi"), answer("One.")], tools=TOOLS) == ["One.<end>"]


def test_a_call_without_a_header_is_refused_and_one_with_words_is_not() -> None:
    [dropped] = encoder_for(NO_HEADER_BEFORE_CALLS).encode_records([Conversation([user("?"), calling(OSLO)])]).dropped
    assert dropped.reason == "untraceable_template"
    chat = [user("?"), calling(OSLO, text="Wait.")]
    assert trained(NO_HEADER_BEFORE_CALLS, chat) == ['Wait.<call>{"city": "Oslo"}look</call><end>']


def test_what_closes_a_call_is_trained_also_where_ends_of_turns_are_not() -> None:
    chat = [user("?"), calling(OSLO)]
    call = '<call>{"city": "Oslo"}look</call>'
    source = MERGED.replace("{% if ends %}<end>\n{% endif %}", "{% if not m.tool_calls %}<end>\n{% endif %}")
    assert trained(source, chat) == trained(source, chat, train_on_eot=False) == [call]
    assert "</call>" not in encoder_for(source).marker().ends


@pytest.mark.parametrize("on_lost", [None, "drop", "error"])
def test_a_message_that_is_left_out_is_lost_even_if_nothing_shows_its_place(on_lost: str | None) -> None:
    source = "{% for m in messages %}{{ m.content }} {% endfor %}"
    chat = [user("?"), calling(OSLO), result("rain"), answer("Rain.")]
    [dropped] = encoder_for(source, on_lost=on_lost).encode_records([Conversation(chat, TOOLS)]).dropped
    assert dropped.reason == ("lost_text_dropped" if on_lost == "drop" else "lost_text")


@pytest.mark.parametrize("source", [CODA, MERGED, PARTS])
def test_other_roles_are_trained_by_their_words_and_their_end(source: str) -> None:
    chat = [SYSTEM, user("Hi"), answer("One.")]
    found = trained(source, chat, roles_to_train=("system", "user"))
    assert found == ["Be brief.<end>", "Hi<end>"]
