"""What was learnt of other chats never changes a mask: compiled shapes and recipes against rendering, chat by chat."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.masks.marker import ChatMarker
from megatron_packed_sft.encode.masks.rendering_marker import MarkedChat
from megatron_packed_sft.encode.options import EncodeOptions
from megatron_packed_sft.encode.templates.load import ChatTemplate
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer
from megatron_packed_sft.records.record import Conversation
from tests.encode import chat_templates
from tests.encode.byte_tokenizer import CHATML, MISTRAL, ByteTokenizer
from tests.encode.template_matrix import encoder_for
from tests.encode.template_twins import TWINS
from tests.encode.test_mask_turns import assistant, call, result, user
from tests.real_data import DATA, IS_WHOLE, chat_files, real_chats, templates_folder, tokenizer_folder

FRAGMENTS = (
    *("", " ", "\n", "x", "Four.", "<think>", "</think>", "<think>\nhm\n</think>\n\n", "<|im_end|>", "<|im_start|>"),
    *(
        "assistant",
        "<tool_response>",
        "</tool_response>",
        "{",
        '"',
        "\\",
        "é",
        "[INST]",
        "[/INST]",
        "</s>",
        "<",
        "|im_end|>",
    ),
)
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look it up", "parameters": {}}}]


def outcome(mark: Callable[[Conversation], MarkedChat], conversation: Conversation) -> Any:
    try:
        marked, losses = mark(conversation)
    except RecordRefusedError as refusal:
        return refusal.reason
    return marked.text, list(marked.trained), list(marked.literal), list(losses)


def mutated(value: Any, source: random.Random) -> Any:
    """The same chat with other strings, at times."""
    if isinstance(value, str):
        choice = source.random()
        if choice < 0.5:
            return value
        pieces = [source.choice(FRAGMENTS) for _ in range(source.randrange(3))]
        return "".join(pieces) if choice < 0.8 else value + "".join(pieces)
    if isinstance(value, dict):
        kept = ("role", "type", "id", "tool_call_id")
        return {key: inner if key in kept else mutated(inner, source) for key, inner in value.items()}
    if isinstance(value, list):
        return [mutated(inner, source) for inner in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return source.choice([value, 0, 1, 7, 3.5, None, True])


def some_chats() -> list[Conversation]:
    called = [user("Weather?"), assistant("", tool_calls=call("look", city="Oslo", n=3)), result("rain")]
    return [
        Conversation([user("2+2?"), assistant("4")]),
        Conversation(
            [{"role": "system", "content": "Be brief."}, user("2+2?"), assistant("4"), user("?"), assistant("6")]
        ),
        Conversation(
            [user("2+2?"), assistant("4", reasoning_content="Hm."), user("?"), assistant("6", reasoning_content="")]
        ),
        Conversation([*called, assistant("It rains.")], TOOLS),
        Conversation(
            [
                *called,
                assistant("See.", tool_calls=[*call("look"), *call("f", a="b")]),
                result("a"),
                result("b"),
                assistant("Ok."),
            ],
            TOOLS,
        ),
        Conversation([assistant("Hello."), user("Hi"), assistant("Yes")], train=[None, None, True]),
    ]


TEMPLATES = {
    **{
        name: (twin.source, ByteTokenizer(twin.control_tokens, bos=twin.bos, eos=twin.eos))
        for name, twin in TWINS.items()
    },
    "BRACKETS": (chat_templates.BRACKETS, ByteTokenizer(MISTRAL, bos="<s>", eos="</s>")),
    "CHANNELS": (chat_templates.CHANNELS, ByteTokenizer(chat_templates.CHANNEL_TOKENS)),
    "GENEROUS_MARKS": (chat_templates.GENEROUS_MARKS, ByteTokenizer(CHATML)),
    "PROMPT_OPENS_THINKING": (chat_templates.PROMPT_OPENS_THINKING, ByteTokenizer(CHATML)),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_with_other_strings_are_marked_as_by_rendering(name: str) -> None:
    source, tokenizer = TEMPLATES[name]
    encoder = RecordEncoder(tokenizer, source, EncodeOptions(on_lost="warn"))
    marker = encoder.marker()
    random_source = random.Random(name)
    for _ in range(60 if IS_WHOLE else 12):
        for chat in some_chats():
            messages = mutated(copy.deepcopy(list(chat.messages)), random_source)
            tools = mutated(copy.deepcopy(chat.tools), random_source)
            conversation = Conversation(messages, tools, chat.train)
            assert outcome(marker.mark, conversation) == outcome(marker.mark_by_rendering, conversation)


REAL_TEMPLATES = (
    "meta-llama-Llama-3.1-8B-Instruct",  # the first question is in the head
    "mistralai-Mistral-Nemo-Instruct-2407",  # tools and the system prompt before the last question, odd ids
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",  # tools word by word
    "GLM-4.6",  # arguments one by one, the end of a turn in front of the next
    "deepseek-ai-DeepSeek-V3.1",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",  # ids compared between messages
    "Qwen3-Coder",
    "openai-gpt-oss-120b",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REAL_TEMPLATES)
def test_chats_with_other_strings_are_marked_as_by_rendering_with_real_templates(name: str) -> None:
    marker = encoder_for(templates_folder() / f"{name}.jinja", on_lost="warn").marker()
    random_source = random.Random(name)
    for _ in range(60 if IS_WHOLE else 8):
        for chat in some_chats():
            tools = mutated(copy.deepcopy(chat.tools), random_source)
            turns = [mutated(copy.deepcopy(message), random_source) for message in chat.messages]
            if random_source.random() < 0.3:  # chats of a new shape, made of what is known
                turns += mutated(copy.deepcopy(turns[-2:]), random_source)
            conversation = Conversation(turns, tools, chat.train if len(turns) == len(chat.messages) else None)
            assert outcome(marker.mark, conversation) == outcome(marker.mark_by_rendering, conversation)


def test_a_shape_that_repeats_is_rendered_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = RecordEncoder(ByteTokenizer(CHATML), ChatTemplate("chatml", chat_templates.CHATML))
    marker = encoder.marker()
    for number in range(20):
        marker.mark(Conversation([user(f"{number}?"), assistant("4")]))
    monkeypatch.setattr(marker, "_renderer", None)
    monkeypatch.setattr(marker, "_traced", None)
    marked, _ = marker.mark(Conversation([user("Another?"), assistant("answer")]))
    assert [marked.text[start:end] for start, end in marked.trained] == ["answer<|im_end|>"]


def test_chats_of_known_messages_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    marker: ChatMarker = RecordEncoder(ByteTokenizer(CHATML), ChatTemplate("chatml", chat_templates.CHATML)).marker()
    turn = [user("?"), assistant("4")]
    marker.mark(Conversation(turn * 3))
    monkeypatch.setattr(marker, "_traced", None)
    marked, _ = marker.mark(Conversation(turn * 5))
    assert [marked.text[start:end] for start, end in marked.trained] == ["4<|im_end|>"] * 5


def test_texts_that_look_like_the_names_of_programs_change_nothing() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content == 'messages[0]' or 'v0' in m.content %}!"
        "{% endif %}"
        "{{ {'tools': 'T', 'message': 'M'}.get(m.content, m.content) }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    encoder = RecordEncoder(ByteTokenizer(CHATML), ChatTemplate("names", source), EncodeOptions())
    texts = ("v0", "messages[0]", "message", "tools", "v1['content']", "'v0", '"tools\\')
    for _ in range(20):
        for question in texts:
            for reply in texts:
                chat = Conversation([user(question), assistant(reply), user("?"), assistant(question)])
                assert outcome(encoder.marker().mark, chat) == outcome(encoder.marker().mark_by_rendering, chat)


# All real chats and six real templates with `make test-real`, which takes some minutes; otherwise a sample.
REAL_TEMPLATES = {
    "Llama 3.1": "meta-llama-Llama-3.1-8B-Instruct",
    "Mistral Nemo": "mistralai-Mistral-Nemo-Instruct-2407",
    "Hermes": "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "Command-R7B": "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "DeepSeek V3.1": "deepseek-ai-DeepSeek-V3.1",
}
# Every so many chats: a twentieth is enough to learn from.
STEP = 1 if IS_WHOLE else 20
NUM_CHATS = None if IS_WHOLE else 40  # of a file


def real_encoder(name: str) -> RecordEncoder:
    if name == "Qwen3":
        return RecordEncoder(load_tokenizer(tokenizer_folder("qwen3")), None, EncodeOptions(on_lost="warn"))
    return encoder_for(templates_folder() / f"{REAL_TEMPLATES[name]}.jinja", on_lost="warn")


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no chats in {DATA}")
@pytest.mark.parametrize("name", ["Qwen3", *REAL_TEMPLATES])
def test_real_chats_are_marked_as_by_rendering(name: str) -> None:
    marker = real_encoder(name).marker()
    num_marked = 0
    for path in chat_files():
        for number, chat in enumerate(islice(real_chats(path), 0, None, STEP)):
            if number == NUM_CHATS:
                break
            expected = outcome(marker.mark_by_rendering, chat)
            assert outcome(marker.mark, chat) == expected, (path.name, number)
            num_marked += isinstance(expected, tuple)
    assert num_marked > (3000 if IS_WHOLE else 40)
