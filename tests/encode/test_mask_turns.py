"""What is trained, decoded: the assistant's text and its end of turn, and nothing else, whatever the template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.templates.load import ChatTemplate
from megatron_packed_sft.records.record import Conversation
from tests.encode import chat_templates
from tests.encode.byte_tokenizer import CHATML, LLAMA3, MISTRAL, ByteTokenizer
from tests.encode.template_twins import TWINS

CHATML_LIKE = ["CHATML", "TRIMMING", "THINKING", "PROMPT_OPENS_THINKING", "BARE_MARKS"]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str, **arguments: Any) -> list[dict[str, Any]]:
    return [{"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}]


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "abcdefghi", "content": content}


def encoder_for(template: str, options: EncodeOptions | None = None, **of_template: Any) -> RecordEncoder:
    source = TWINS[template].source if template == "XML_CALLS" else getattr(chat_templates, template, template)
    tokenizer = {
        "BRACKETS": ByteTokenizer(MISTRAL, bos="<s>", eos="</s>"),
        "mistral": ByteTokenizer(MISTRAL, bos="<s>", eos="</s>"),
        "llama3": ByteTokenizer(LLAMA3, bos="<|begin_of_text|>", eos="<|eot_id|>"),
        "plain": ByteTokenizer(MISTRAL, bos="<s>", eos="</s>"),
        "CHANNELS": ByteTokenizer(chat_templates.CHANNEL_TOKENS),
    }.get(template, ByteTokenizer(CHATML, eos="<|im_end|>"))
    if of_template:
        return RecordEncoder(tokenizer, TemplateOptions(source, **of_template), options)
    return RecordEncoder(tokenizer, source if source == template else ChatTemplate(template, source), options)


def pieces(encoder: RecordEncoder, record: Conversation) -> list[str]:
    """The stretches of trained tokens, each decoded."""
    encoded = encoder.encode_records([record])
    assert encoded.dropped == []
    edges = np.flatnonzero(np.diff(encoded.sequences.train, prepend=0, append=0)).reshape(-1, 2)
    return [encoder.tokenizer.decode(encoded.sequences.input_ids[start:end].tolist()) for start, end in edges]


def trained(
    template: str,
    messages: Sequence[dict[str, Any]],
    *,
    tools: Any = None,
    flags: Any = None,
    **options: Any,
) -> list[str]:
    of_template = {name: options.pop(name) for name in ("header", "end_of_turn", "variables") if name in options}
    encoder = encoder_for(template, EncodeOptions(**options), **of_template)
    return pieces(encoder, Conversation(messages, tools, flags))


@pytest.mark.parametrize(
    ("template", "end"),
    [
        *((name, "<|im_end|>") for name in [*CHATML_LIKE, "chatml"] if name != "THINKING"),
        ("llama3", "<|eot_id|>"),
        ("mistral", "</s>"),
        ("BRACKETS", "</s>"),
    ],
)
def test_answers_and_their_ends_are_trained_and_nothing_else(template: str, end: str) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        user("2+2?"),
        assistant("4"),
        user("3+3?"),
        assistant("6, or VI"),
    ]
    assert trained(template, chat) == [f"4{end}", f"6, or VI{end}"]


def test_the_plain_template_trains_the_blank_that_joins_the_first_word() -> None:
    assert trained("plain", [user("2+2?"), assistant("4")]) == [" 4</s>"]


def test_a_template_that_is_not_prefix_preserving_trains_what_the_last_render_shows() -> None:
    chat = [
        user("2+2?"),
        assistant("4", reasoning_content="old"),
        user("3+3?"),
        assistant("6", reasoning_content="new"),
    ]
    assert trained("THINKING", chat) == ["4<|im_end|>", "<think>\nnew\n</think>\n\n6<|im_end|>"]


def test_reasoning_that_a_template_cuts_out_of_the_content_is_followed() -> None:
    chat = [user("2+2?"), assistant("<think>\nold\n</think>\n\n4"), user("?"), assistant("<think>\nnew\n</think>\n\n6")]
    assert trained("THINKING", chat) == ["4<|im_end|>", "<think>\nnew\n</think>\n\n6<|im_end|>"]


def test_an_empty_think_block_in_the_generation_prompt_is_given_not_trained() -> None:
    chat = [user("2+2?"), assistant("4"), user("3+3?"), assistant("6")]
    assert trained("THINKING", chat, variables={"enable_thinking": False}) == ["4<|im_end|>", "6<|im_end|>"]


def test_a_generation_prompt_that_opens_thinking_leaves_the_header_untrained() -> None:
    assert trained("PROMPT_OPENS_THINKING", [user("2+2?"), assistant("4")]) == ["4<|im_end|>"]


@pytest.mark.parametrize("template", [*CHATML_LIKE, "chatml"])
def test_an_assistant_that_speaks_first_is_trained_and_the_system_prompt_is_not(template: str) -> None:
    chat = [{"role": "system", "content": "Greet."}, assistant("Hello."), user("Hi"), assistant("How are you?")]
    found = trained(template, chat)
    assert [text.removeprefix("<think>\n\n</think>\n\n") for text in found] == [
        "Hello.<|im_end|>",
        "How are you?<|im_end|>",
    ]
    assert trained(template, chat[1:2])[0].endswith("Hello.<|im_end|>")


@pytest.mark.parametrize("template", [*CHATML_LIKE, "chatml"])
def test_an_empty_assistant_turn_trains_its_end_only(template: str) -> None:
    chat = [user("Hi"), assistant(""), user("Hello?"), assistant(""), user("?"), assistant("Yes.")]
    expected = ["<|im_end|>", "<|im_end|>", "Yes.<|im_end|>"]
    assert [text.removeprefix("<think>\n\n</think>\n\n") for text in trained(template, chat)] == expected


def test_an_empty_turn_without_generation_prompt_trains_its_end_only() -> None:
    assert trained("BRACKETS", [user("Hi"), assistant(""), user("?"), assistant("Yes.")]) == ["</s>", "Yes.</s>"]


def test_two_assistant_messages_in_a_record_are_two_turns() -> None:
    chat = [user("Hi"), assistant("One."), assistant(""), assistant("Two.")]
    assert trained("CHATML", chat) == ["One.<|im_end|>", "<|im_end|>", "Two.<|im_end|>"]
    assert trained("CHATML", chat, flags=[None, False, None, False]) == ["<|im_end|>"]
    assert trained("BRACKETS", [user("Hi"), assistant("One."), assistant("Two.")]) == ["One.</s>Two.</s>"]


@pytest.mark.parametrize("template", ["CHATML", "BARE_MARKS", "chatml", "PROMPT_OPENS_THINKING"])
def test_newlines_and_blanks_around_an_answer_are_part_of_it(template: str) -> None:
    assert trained(template, [user("Hi\n"), assistant("\n\n  Hello. \n")]) == ["\n\n  Hello. \n<|im_end|>"]


def test_a_template_that_trims_trains_the_trimmed_answer() -> None:
    assert trained("TRIMMING", [user(" Hi\n"), assistant("\n\n  Hello. \n")]) == ["Hello.<|im_end|>"]


@pytest.mark.parametrize("template", [*CHATML_LIKE, "chatml"])
@pytest.mark.parametrize(
    "words",
    [
        "<|im_start|>assistant\nmine",
        "question",
        "answer",
        "<|im_end|>",
        "[[Main page]] and [[Help]]",
        "a<|im_end|>\n<|im_start|>assistant\nb<|im_end|>",
        "\x7f0\x7f and \ufdd0",
        "assistant",
    ],
)
def test_words_that_look_like_headers_ends_or_marks_are_only_words(template: str, words: str) -> None:
    chat = [user(words), assistant(words), user(words), assistant(words)]
    found = [text.removeprefix("<think>\n\n</think>\n\n") for text in trained(template, chat)]
    assert found == [f"{words}<|im_end|>"] * 2


@pytest.mark.parametrize("template", [*CHATML_LIKE, "chatml"])
def test_control_tokens_in_words_stay_text_and_those_of_the_template_stay_control(template: str) -> None:
    encoder = encoder_for(template)
    chat = [user("a<|im_end|>b"), assistant("say <|im_start|>")]
    encoded = encoder.encode_records([Conversation(chat)])
    control = {text: encoder.tokenizer.control_tokens[text] for text in ("<|im_start|>", "<|im_end|>")}
    assert [(encoded.sequences.input_ids == token).sum() for token in control.values()] == [2, 2]
    allowed = encoder_for(template, EncodeOptions(special_tokens_in_content="allow")).encode_records(
        [Conversation(chat)]
    )
    assert [(allowed.sequences.input_ids == token).sum() for token in control.values()] == [3, 3]


def test_control_tokens_in_tools_stay_text() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "ends with <|im_end|>", "parameters": {}}}]
    encoder = encoder_for("chatml")
    encoded = encoder.encode_records([Conversation([user("Hi"), assistant("Yo")], tools)])
    assert (encoded.sequences.input_ids == encoder.tokenizer.control_tokens["<|im_end|>"]).sum() == 3
    assert pieces(encoder, Conversation([user("Hi"), assistant("Yo")], tools)) == ["Yo<|im_end|>"]


@pytest.mark.parametrize("template", ["THINKING", "chatml", "XML_CALLS"])
def test_control_tokens_in_names_of_functions_and_arguments_stay_text(template: str) -> None:
    encoder = encoder_for(template)
    chat = [user("Hi"), assistant("", tool_calls=call("f<|im_end|>", **{"<|im_end|>": 1}))]
    encoded = encoder.encode_records([Conversation(chat)])
    assert not encoded.dropped
    assert (encoded.sequences.input_ids == encoder.tokenizer.control_tokens["<|im_end|>"]).sum() == 2


def test_a_control_token_in_a_role_refuses_the_record() -> None:
    chat = [user("Hi"), {"role": "<|im_end|>", "content": "a"}, assistant("b")]
    [dropped] = encoder_for("CHATML").encode_records([Conversation(chat)]).dropped
    assert dropped.reason == "unescapable"


def test_markup_tags_in_an_answer_are_the_tokens_people_mean() -> None:
    encoder = encoder_for("CHATML")
    encoded = encoder.encode_records([Conversation([user("Hi"), assistant("<think>\nhm\n</think>\n\nYo")])])
    assert encoder.tokenizer.control_tokens["<think>"] in encoded.sequences.input_ids


def test_tool_calls_are_trained_whole_and_results_are_not() -> None:
    chat = [
        user("Weather?"),
        assistant("", tool_calls=call("look", city="Oslo")),
        result("rain"),
        assistant("It rains."),
    ]
    written = '<tool_call>\n{"name": "look", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    assert trained("chatml", chat) == [written, "It rains.<|im_end|>"]
    assert trained("THINKING", chat) == [f"\n{written}", "<think>\n\n</think>\n\nIt rains.<|im_end|>"]
    with_words = [chat[0], {**chat[1], "content": "Let me see."}, *chat[2:]]
    assert trained("chatml", with_words)[0] == f"Let me see.\n{written}"
    assert trained("llama3", chat)[0] == '{"name": "look", "parameters": {"city": "Oslo"}}<|eot_id|>'
    assert trained("mistral", chat) == [
        '[TOOL_CALLS][{"name": "look", "arguments": {"city": "Oslo"}, "id": "abcdefghi"}]</s>',
        "It rains.</s>",
    ]


def test_a_tool_call_after_a_tool_result_is_trained_whole_without_a_generation_prompt() -> None:
    chat = [user("Weather?"), assistant("", tool_calls=call("look", city="Oslo")), result("rain")]
    chat += [assistant("", tool_calls=call("look", city="Rome")), result("sun"), assistant("Rome.")]
    found = trained("BRACKETS", chat)
    assert [text[:14] for text in found] == ["[TOOL_CALLS][{", "[TOOL_CALLS][{", "Rome.</s>"]
    assert all(text.endswith("]</s>") for text in found[:2])


def test_tools_and_a_question_asked_twice_are_traced_though_the_template_compares_messages() -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        user("Yes."),
        assistant("Sure?"),
        user("Yes."),
        assistant("Ok."),
    ]
    assert trained("BRACKETS", chat, tools=[{"name": "f"}]) == ["Sure?</s>", "Ok.</s>"]
    assert trained("BRACKETS", chat, tools=[{"name": "f"}], last_turn_only=True) == ["Ok.</s>"]


def test_channels_of_one_message_are_one_turn_and_the_tools_header_is_not() -> None:
    chat = [user("Hi"), assistant("", reasoning_content="hm", tool_calls=call("look", city="Oslo")), result("rain")]
    chat += [assistant("Rain."), user("Thanks"), assistant("Welcome.")]
    assert trained("CHANNELS", chat) == [
        "<|channel|>analysis<|message|>hm<|end|>"
        '<|start|>assistant to=functions.look<|message|>{"city": "Oslo"}<|call|>',
        "<|channel|>final<|message|>Rain.<|end|>",
        "<|channel|>final<|message|>Welcome.<|return|>",
    ]


def test_generous_generation_marks_lose_what_the_prompt_gives_and_the_newline_after_the_end() -> None:
    assert trained("GENEROUS_MARKS", [user("Hi"), assistant("Yo\n")]) == ["Yo\n<|im_end|>"]


def test_the_seeds_masking_test_holds() -> None:
    names = {role: f"<|ngpt_{role}_84a5023f67d74cf29cc4001becde983c|>" for role in ("sys", "usr", "asst", "eot")}
    source = (
        "{% set names = {'system': '%s', 'user': '%s', 'assistant': '%s'} %}"
        "{% for m in messages %}{{ names[m.role] + m.content + '%s' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ names.assistant }}{% endif %}"
    )
    for name in names.values():
        source = source.replace("'%s'", f"'{name}'", 1)
    encoder = RecordEncoder(ByteTokenizer(tuple(names.values())), ChatTemplate("seed", source))
    chat = [{"role": "system", "content": "S"}, user("U"), assistant("AB")]
    encoded = encoder.encode_records([Conversation(chat)])
    control = encoder.tokenizer.control_tokens
    assert encoded.sequences.input_ids[encoded.sequences.train == 1].tolist() == [
        ord("A"),
        ord("B"),
        control[names["eot"]],
    ]
    assert encoded.sequences.input_ids[encoded.sequences.train == 0].tolist() == [
        *(control[names["sys"]], ord("S"), control[names["eot"]]),
        *(control[names["usr"]], ord("U"), control[names["eot"]], control[names["asst"]]),
    ]


def test_a_tool_call_right_after_another_turn_is_trained_whole_without_a_header() -> None:
    chat = [user("Weather?"), assistant("One moment."), assistant("", tool_calls=call("look", city="Oslo"))]
    [both] = trained("BRACKETS", chat)
    assert both.startswith('One moment.</s>[TOOL_CALLS][{"id": "abcdefghi"')
    [called] = trained("BRACKETS", chat, last_turn_only=True)
    assert both == f"One moment.</s>{called}"


def test_tags_that_hold_turns_apart_are_escaped_and_other_tags_are_not() -> None:
    source = chat_templates.CHATML.replace("<|im_start|>", "<turn>").replace("<|im_end|>", "</turn>")
    encoder = RecordEncoder(ByteTokenizer(("<turn>", "</turn>", "<h1>")), ChatTemplate("tags", source))
    encoded = encoder.encode_records([Conversation([user("</turn> <h1>"), assistant("<turn> <h1>")])])
    assert [(encoded.sequences.input_ids == token).sum() for token in (256, 257, 258)] == [2, 2, 2]
