"""Random chats, full of what masks get wrong, through templates whose Python twins know every character's author."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.options import EncodeOptions
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.records.record import Conversation
from tests.encode.byte_tokenizer import ByteTokenizer
from tests.encode.template_twins import TWINS, Twin

# Turns without text in another order cannot be told apart: refused, not guessed.
MAY_REFUSE = ("BACKWARDS",)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
FRAGMENTS = (
    *("a", "Four.", "7", " ", "\n", "\u00a0", "\u2028", "é", "e\u0301", "日本", "👍🏽", '"', "\\", "{{", "%}", "None"),
    *("<|im_start|>", "<|im_end|>", "<|im_start|>assistant\n", "<|im_", "end|>", "<|IM_END|>", "<|endoftext|>", "|"),
    *("<|eot_id|>", "<|start_header_id|>", "[INST]", "[/INST]", "[/", "INST]", "</s>", "<", "/s>", "<s>", *TAGS),
    *("\x7f", "\x7f0\x7f", "\ufdd0", "\ufdef", "\0", "assistant", "user", "answer", "question", "probe", "User:"),
)
words = st.lists(st.sampled_from(FRAGMENTS), max_size=5).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=8
)


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    if draw(st.booleans()):
        chat.append({"role": "system", "content": draw(words)})
    for _ in range(draw(st.integers(1, 3))):
        chat.append({"role": "user", "content": draw(words)})
        answer = {"role": "assistant", "content": draw(words)}
        if draw(st.integers(0, 2)) == 0:
            answer["reasoning_content"] = draw(words)
        if draw(st.integers(0, 2)) == 0:
            arguments = {key: draw(words) for key in draw(st.sets(st.sampled_from(["a", "id", "type", "name"])))}
            function = {"name": draw(st.sampled_from(["f", "probe", "user"])), "arguments": arguments}
            answer["tool_calls"] = [{"id": "abcdefghi", "type": "function", "function": function}]
        chat.append(answer)
        if "tool_calls" in answer:
            chat.append({"role": "tool", "tool_call_id": "abcdefghi", "content": draw(words)})
            chat.append({"role": "assistant", "content": draw(words)})
    return chat


@cache
def encoder_of(name: str, with_end: bool) -> RecordEncoder:
    twin = TWINS[name]
    tokenizer = ByteTokenizer(twin.control_tokens, bos=twin.bos, eos=twin.eos)
    return RecordEncoder(tokenizer, twin.source, EncodeOptions(train_on_eot=with_end, on_lost="warn"))


def expected(
    twin: Twin, tokenizer: Tokenizer, chat: Sequence[dict[str, Any]], wanted: Sequence[bool], with_end: bool
) -> tuple[list[int], list[bool]]:
    """Ids and train mask by the twin: a control token is one only where no message said any of it, but for tags."""
    kinds = ("said", "written", "end") if with_end else ("said", "written")
    text, said, trained = "", [], []
    for piece in twin.pieces(chat):
        text += piece.text
        said += [piece.kind == "said"] * len(piece.text)
        trained += [wanted[piece.message] and piece.kind in kinds] * len(piece.text)
    ids, train, position = [], [], 0
    while position < len(text):
        found = [token for token in tokenizer.control_tokens if text.startswith(token, position)]
        token = max(found, key=len, default="")
        if token and (token in TAGS or not any(said[position : position + len(token)])):
            ids.append(tokenizer.control_tokens[token])
            train.append(trained[position])
            position += len(token)
        else:
            data = text[position].encode()
            ids += data
            train += [trained[position]] * len(data)
            position += 1
    return ids, train


@pytest.mark.parametrize("name", TWINS)
@settings(max_examples=150, deadline=None)
@given(chat=chats(), data=st.data())
def test_ids_and_mask_are_those_of_the_twin(name: str, chat: list[dict[str, Any]], data: st.DataObject) -> None:
    with_end = data.draw(st.booleans())
    encoder = encoder_of(name, with_end)
    flags = [
        data.draw(st.sampled_from([None, True, False])) if message["role"] == "assistant" else None for message in chat
    ]
    wanted = [
        message["role"] == "assistant" if flag is None else flag for message, flag in zip(chat, flags, strict=True)
    ]
    ids, train = expected(TWINS[name], encoder.tokenizer, chat, wanted, with_end)
    encoded = encoder.encode_records([Conversation(chat, train=flags)])
    reasons = [dropped.reason for dropped in encoded.dropped]
    if name in MAY_REFUSE and reasons == ["untraceable_template"]:
        return
    if not any(train[1:]):
        assert reasons == ["nothing_to_train"]
        return
    assert reasons == []
    assert encoded.sequences.input_ids.tolist() == ids
    assert encoded.sequences.train.tolist() == train
