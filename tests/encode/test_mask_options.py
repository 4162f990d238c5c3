"""Which messages are trained: roles, flags, the last turn, the end of turn; and records that have nothing left."""

from __future__ import annotations

import pytest

from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import Conversation
from tests.encode.test_mask_turns import assistant, call, encoder_for, result, trained, user

CHAT = [user("2+2?"), assistant("4"), user("3+3?"), assistant("6")]
TEMPLATES = ["CHATML", "chatml", "BARE_MARKS", "GENEROUS_MARKS"]


def words(template: str, **options: object) -> list[str]:
    return [text.lstrip("\n") for text in trained(template, CHAT, **options)]


@pytest.mark.parametrize("template", TEMPLATES)
def test_last_turn_only_trains_the_last_of_the_messages_to_train(template: str) -> None:
    assert words(template, last_turn_only=True) == ["6<|im_end|>"]
    assert words(template, last_turn_only=True, flags=[None, None, None, False]) == ["4<|im_end|>"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_records_flags_go_before_its_roles(template: str) -> None:
    assert words(template, flags=[None, False, None, True]) == ["6<|im_end|>"]
    assert words(template, flags=[True, False, None, None]) == ["2+2?<|im_end|>", "6<|im_end|>"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_other_roles_train_their_words_and_the_end_of_turn(template: str) -> None:
    assert words(template, roles_to_train=["user"]) == ["2+2?<|im_end|>", "3+3?<|im_end|>"]
    assert words(template, roles_to_train=["user"], train_on_eot=False) == ["2+2?", "3+3?"]


def test_tool_results_can_be_trained_too() -> None:
    chat = [user("?"), assistant("", tool_calls=call("f", a="b")), result("r"), assistant("done")]
    assert trained("chatml", chat, roles_to_train=["tool"]) == ["r<|im_end|>"]
    assert trained("THINKING", chat, roles_to_train=["tool"]) == ["r<|im_end|>"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_end_of_turn_can_be_left_out(template: str) -> None:
    assert words(template, train_on_eot=False) == ["4", "6"]


def test_an_answer_that_ends_with_the_text_of_an_end_of_turn_keeps_it() -> None:
    for template in TEMPLATES:
        for choice in ("escape", "allow"):
            chat = [user("Hi"), assistant("I write <|im_end|>")]
            found = trained(template, chat, train_on_eot=False, special_tokens_in_content=choice)
            assert [text.lstrip("\n") for text in found] == ["I write <|im_end|>"], template


def test_header_and_end_of_turn_can_be_named() -> None:
    source = "{% for m in messages %}{{ m.role + ': ' + m.content + ' ###\n' }}{% endfor %}"
    chat = [user("Hi"), assistant("Yo")]
    assert trained(source, chat) == ["Yo ###"]
    assert trained(source, chat, end_of_turn=[" ##"]) == ["Yo ##"]
    assert trained(source, chat, header="assistant:") == [" Yo ###"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_record_with_nothing_to_train_is_counted(template: str) -> None:
    record = Conversation(CHAT, train=[False] * 4)
    [dropped] = encoder_for(template).encode_records([record]).dropped
    assert (dropped.record, dropped.reason) == (0, "nothing_to_train")


def test_a_template_that_leaves_the_answers_out_trains_nothing_and_says_so() -> None:
    source = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(InvalidInputError, match="omits the assistant's answer"):
        encoder_for(source).encode_records([Conversation(CHAT)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncation": "middle"}, r"encode\.truncation is 'middle'; use one of right, left, drop"),
        ({"special_tokens_in_content": "keep"}, "use one of escape, allow"),
        ({"roles_to_train": "assistant"}, "give a list"),
        ({"max_len": 1}, "at least 2"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        EncodeOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"end_of_turn": "</s>"}, r"template\.end_of_turn is the text '</s>'; give a list"),
        ({"end_of_turn": [""]}, r"template\.end_of_turn is empty; use null"),
        ({"header": ""}, r"template\.header is empty; use null"),
    ],
)
def test_template_options_that_fit_no_template_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        TemplateOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("template", ["CHATML", "chatml", "BARE_MARKS"])
def test_flags_find_empty_turns(template: str) -> None:
    chat = [user("Hi"), assistant(""), user("?"), assistant("Yes.")]
    assert trained(template, chat, flags=[None, None, None, False]) == ["<|im_end|>"]
    assert trained(template, chat, flags=[None, False, None, None]) == ["Yes.<|im_end|>"]
