"""What a template writes for each message: found by its loop, or by its ends of turn where it has none to show."""

from __future__ import annotations

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.masks.rendering_marker import ChatOutline
from megatron_packed_sft.records.record import Conversation
from tests.encode.byte_tokenizer import MISTRAL, ByteTokenizer
from tests.encode.chat_templates import BRACKETS, CHATML, THINKING, TRIMMING

CHAT = Conversation(
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Four.", "reasoning_content": "Hm."},
        {"role": "user", "content": "Three?"},
        {"role": "assistant", "content": "Six."},
    ]
)
# Puts the whole chat together in its loop and writes it afterwards, so that no iteration shows a text.
COLLECTED = (
    "{% set all = namespace(text='') %}{% for m in messages %}"
    "{% set all.text = all.text + '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' %}{% endfor %}"
    "{{ all.text }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def outline(template: str, tokenizer: ByteTokenizer | None = None, chat: Conversation = CHAT) -> ChatOutline:
    return RecordEncoder(tokenizer or ByteTokenizer(), template).marker(chat).outline(chat)


def texts(found: ChatOutline) -> list[str]:
    return [found.chat.text[turn.start : turn.end] for turn in found.turns]


def test_turns_cover_the_chat_in_order() -> None:
    for template in (CHATML, TRIMMING, THINKING, COLLECTED):
        found = outline(template)
        assert "".join(texts(found)) == found.chat.text
        assert [turn.role for turn in found.turns] == [message["role"] for message in CHAT.messages]
        assert not any(turn.is_inside for turn in found.turns)


def test_what_stands_before_and_behind_the_words_of_a_message() -> None:
    for template in (CHATML, COLLECTED):
        found = outline(template)
        for turn in found.turns:
            assert turn.before(found.chat.text) == f"<|im_start|>{turn.role}\n"
            assert turn.after(found.chat.text) == "<|im_end|>\n"


def test_a_system_prompt_inside_a_question_is_inside_that_turn() -> None:
    found = outline(BRACKETS, ByteTokenizer(MISTRAL, bos="<s>", eos="</s>"))
    assert [turn.is_inside for turn in found.turns] == [True, False, False, False, False]
    assert "Be brief." in texts(found)[3]


def test_a_message_that_is_not_written_is_empty() -> None:
    silent = "{% for m in messages if m.role != 'system' %}" + CHATML.removeprefix("{% for m in messages %}")
    found = outline(silent)
    assert texts(found)[0] == ""
    assert "".join(texts(found)) == found.chat.text


def test_the_generation_prompt_is_what_is_added_when_it_is_asked_for() -> None:
    asked = Conversation(CHAT.messages[:2])
    assert RecordEncoder(ByteTokenizer(), CHATML).marker().generation_prompt(asked) == "<|im_start|>assistant\n"
    brackets = RecordEncoder(ByteTokenizer(MISTRAL, bos="<s>", eos="</s>"), BRACKETS)
    assert brackets.marker().generation_prompt(asked) == ""
