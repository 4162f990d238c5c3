"""One sequence per trained turn, rendered as at inference; conversations cut at turns; variables of a record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_packed_sft.encode.encoder import EncodedRecords, RecordEncoder
from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import Conversation, TextRecord
from megatron_packed_sft.support.drop_reasons import DropReason
from tests.encode import chat_templates
from tests.encode.byte_tokenizer import CHATML, ByteTokenizer
from tests.encode.test_mask_turns import assistant, call, encoder_for, result, user

THOUGHTFUL = [
    user("a?"),
    assistant("A.", reasoning_content="first"),
    user("b?"),
    assistant("B.", reasoning_content="second"),
]


def texts(encoder: RecordEncoder, encoded: EncodedRecords) -> list[tuple[str, str]]:
    """Each sequence, and what is trained of it."""
    sequences = encoded.sequences
    found = []
    for start, end in zip(sequences.ends - sequences.lengths, sequences.ends, strict=True):
        ids, train = sequences.input_ids[start:end], sequences.train[start:end]
        found.append((encoder.tokenizer.decode(ids.tolist()), encoder.tokenizer.decode(ids[train == 1].tolist())))
    return found


def turns(template: str, record: Conversation, **options: Any) -> list[tuple[str, str]]:
    encoder = encoder_for(template, EncodeOptions(**options))
    encoded = encoder.encode_records([record])
    assert encoded.dropped == []
    assert encoded.num_added_sequences == len(encoded.sequences.lengths) - 1
    return texts(encoder, encoded)


def test_a_whole_conversation_loses_earlier_reasoning_and_says_so() -> None:
    encoder = encoder_for("THINKING")
    encoded = encoder.encode_records([Conversation(THOUGHTFUL)])
    [(text, trained)] = texts(encoder, encoded)
    assert "first" not in text
    assert trained == "A.<|im_end|><think>\nsecond\n</think>\n\nB.<|im_end|>"
    assert [(loss.record, loss.kind) for loss in encoded.lost] == [(0, "reasoning")]


@pytest.mark.parametrize("render", ["turns", "auto"])
def test_each_turn_is_rendered_as_at_inference(render: str) -> None:
    first, second = turns("THINKING", Conversation(THOUGHTFUL), render=render)
    assert first[0].endswith("a?<|im_end|>\n<|im_start|>assistant\n<think>\nfirst\n</think>\n\nA.<|im_end|>\n")
    assert first[1] == "<think>\nfirst\n</think>\n\nA.<|im_end|>"
    assert "first" not in second[0]  # stripped, as the model will see it
    assert "A.<|im_end|>" in second[0]
    assert second[1] == "<think>\nsecond\n</think>\n\nB.<|im_end|>"


def test_turns_are_not_lost_text() -> None:
    encoder = encoder_for("THINKING", EncodeOptions(render="turns", on_lost="error"))
    encoded = encoder.encode_records([Conversation(THOUGHTFUL)])
    assert not encoded.dropped
    assert not encoded.lost


@pytest.mark.parametrize("template", ["CHATML", "chatml", "llama3", "mistral"])
def test_auto_keeps_a_conversation_whole_where_turns_stay_as_they_were(template: str) -> None:
    chat = Conversation([user("a?"), assistant("A."), user("b?"), assistant("B.")])
    whole = turns(template, chat)
    assert turns(template, chat, render="auto") == whole
    assert len(turns(template, chat, render="turns")) == 2


def test_auto_looks_at_trained_turns_only() -> None:
    chat = Conversation(THOUGHTFUL, train=[None, 0, None, None])
    assert len(turns("THINKING", chat, render="auto")) == 1
    assert len(turns("THINKING", Conversation(THOUGHTFUL), render="auto", last_turn_only=True)) == 1


def test_every_turn_keeps_its_weight() -> None:
    encoder = encoder_for("THINKING", EncodeOptions(render="turns"))
    sequences = encoder.encode_records([Conversation(THOUGHTFUL, train=[None, 0.5, None, 2])]).sequences
    assert sequences.weights is not None
    ends = sequences.ends
    parts = [sequences.weights[start:end] for start, end in zip(ends - sequences.lengths, ends, strict=True)]
    assert [sorted(set(part.tolist())) for part in parts] == [[0.0, 0.5], [0.0, 2.0]]


def test_sequences_of_records_stay_in_order() -> None:
    encoder = encoder_for("THINKING", EncodeOptions(render="turns"))
    encoded = encoder.encode_records([Conversation(THOUGHTFUL), TextRecord((("x", 1),)), Conversation(THOUGHTFUL)])
    assert encoded.sequences.record.tolist() == [0, 0, 1, 2, 2]
    assert encoded.num_added_sequences == 2


LONG = [
    {"role": "system", "content": "S"},
    *[message for n in range(6) for message in (user(f"question {n}"), assistant(f"answer {n}"))],
]


@pytest.mark.parametrize(("truncation", "first", "last"), [("turns", 4, 5), ("oldest_turns", 0, 1)])
def test_long_conversations_lose_whole_turns(truncation: str, first: int, last: int) -> None:
    encoder = encoder_for("CHATML", EncodeOptions(max_len=95, truncation=truncation))
    encoded = encoder.encode_records([Conversation(LONG)])
    [(text, trained)] = texts(encoder, encoded)
    assert text.startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nquestion")
    assert trained == "".join(f"answer {n}<|im_end|>" for n in range(first, last + 1))
    assert encoded.sequences.lengths[0] <= 95
    assert (encoded.num_cut_sequences, encoded.num_cut_turns) == (1, 4)
    whole = encoder_for("CHATML").encode_records([Conversation(LONG)]).sequences
    assert encoded.num_cut_tokens == whole.lengths[0] - encoded.sequences.lengths[0]


def test_a_call_is_not_torn_from_its_result() -> None:
    chat = [user("x" * 300), assistant("y"), user("?"), assistant("", tool_calls=call("f", a="b")), result("r" * 40)]
    chat.append(assistant("done"))
    encoder = encoder_for("chatml", EncodeOptions(max_len=320, truncation="turns"))
    [(text, trained)] = texts(encoder, encoder.encode_records([Conversation(chat)]))
    assert "xxx" not in text
    assert "rrr" in text
    assert trained.endswith("done<|im_end|>")


def test_a_conversation_of_which_no_turn_fits_is_too_long() -> None:
    encoder = encoder_for("CHATML", EncodeOptions(max_len=20, truncation="turns"))
    encoded = encoder.encode_records([Conversation(LONG)])
    assert [drop.reason for drop in encoded.dropped] == [DropReason.TOO_LONG]
    assert encoded.num_cut_turns == 0


def test_cuts_at_turns_leave_other_sequences_alone() -> None:
    encoder = encoder_for("CHATML", EncodeOptions(max_len=95, truncation="turns"))
    short = Conversation(LONG[:3])
    encoded = encoder.encode_records([short, Conversation(LONG), short])
    assert encoded.sequences.record.tolist() == [0, 1, 2]
    alone = encoder.encode_records([short]).sequences
    assert np.array_equal(encoded.sequences.input_ids[: alone.lengths[0]], alone.input_ids)


def test_records_set_template_variables() -> None:
    source = getattr(chat_templates, "THINKING")  # noqa: B009
    options = TemplateOptions(source)
    encoder = RecordEncoder(ByteTokenizer(CHATML, eos="<|im_end|>"), options)
    chat = [user("a?"), assistant("A.")]
    found = []
    for variables in (None, {"enable_thinking": False}, None, {"enable_thinking": True}):
        found.append(texts(encoder, encoder.encode_records([Conversation(chat, variables=variables)]))[0])
    assert found[0] == found[2] == found[3]
    assert found[0][1] == "<think>\n\n</think>\n\nA.<|im_end|>"
    assert found[1][1] == "A.<|im_end|>"  # the prompt forces the empty block


def test_a_variable_that_records_may_not_set_is_refused() -> None:
    chat = Conversation([user("a?"), assistant("A.")], variables={"date_string": "today"})
    encoded = encoder_for("CHATML").encode_records([chat])
    assert [drop.reason for drop in encoded.dropped] == [DropReason.BAD_RECORD]
    assert "add it to template.record_variables" in encoded.dropped[0].detail
    allowed = RecordEncoder(
        ByteTokenizer(CHATML, eos="<|im_end|>"),
        TemplateOptions(chat_templates.CHATML + "{{ date_string }}", record_variables=["date_string"]),
    )
    [(text, _)] = texts(allowed, allowed.encode_records([chat]))
    assert text.endswith("today")


def test_what_every_render_sets_is_reserved() -> None:
    with pytest.raises(InvalidInputError, match="messages is reserved"):
        TemplateOptions(variables={"messages": []})
