"""What a trained turn is made of, and which parts of it are trained: kinds, weights, parts of a content."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.masks.trained_kinds import TurnKind
from megatron_packed_sft.encode.options import EncodeOptions, TrainOptions
from megatron_packed_sft.encode.templates.load import ChatTemplate
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import Conversation, TextRecord, TokenizedRecord
from megatron_packed_sft.support.drop_reasons import DropReason
from tests.encode import chat_templates
from tests.encode.byte_tokenizer import CHATML, ByteTokenizer
from tests.encode.test_mask_turns import assistant, call, encoder_for, pieces, result, user
from tests.real_data import templates_folder

REASONED = [user("2+2?"), assistant("Four.", reasoning_content="Hm.")]
INLINE = [user("2+2?"), assistant("<think>\nHm.\n</think>\n\nFour.")]
CALLING = [
    user("2+2?"),
    assistant("Let me.", reasoning_content="Hm.", tool_calls=call("add", a=1, b="x")),
    result("4"),
    assistant("Four."),
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]


def kinds(encoder: RecordEncoder, record: Conversation) -> list[tuple[str, str]]:
    """The trained text by kind."""
    marked = encoder.mark(record)
    return [(TurnKind(kind).name, marked.text[start:end]) for start, end, _, kind in marked.segments]


def auditing(template: str, control_tokens: tuple[str, ...] = CHATML, eos: str = "<|im_end|>") -> RecordEncoder:
    source = getattr(chat_templates, template, None)
    if source is None:
        source = (templates_folder() / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer = ByteTokenizer(control_tokens, eos=eos)
    return RecordEncoder(tokenizer, ChatTemplate(template, source), EncodeOptions(on_lost="warn"), with_kinds=True)


def test_reasoning_answer_and_end_of_turn_are_told_apart() -> None:
    expected = [("REASONING", "<think>\nHm.\n</think>\n\n"), ("ANSWER", "Four."), ("END_OF_TURN", "<|im_end|>")]
    assert kinds(auditing("THINKING"), Conversation(REASONED)) == expected


@pytest.mark.parametrize("template", ["CHATML", "THINKING"])
def test_reasoning_that_a_message_writes_into_its_content_is_reasoning(template: str) -> None:
    assert kinds(auditing(template), Conversation(INLINE))[0] == ("REASONING", "<think>\nHm.\n</think>\n\n")


def test_tags_in_the_middle_of_an_answer_are_its_own() -> None:
    chat = Conversation([user("?"), assistant("HTML has no <think> and </think>.")])
    assert kinds(auditing("CHATML"), chat)[0] == ("ANSWER", "HTML has no <think> and </think>.")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "Qwen-Qwen3-0.6B",
            "R<think>\nHm.\n</think>\n\n|ALet me.|T\n<tool_call>\n{}\n</tool_call>|E<|im_end|>|"
            "R<think>\n\n</think>\n\n|AFour.|E<|im_end|>",
        ),
        (
            "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
            "R<|START_THINKING|>Hm.<|END_THINKING|>|T<|START_ACTION|>[\n    {}\n]<|END_ACTION|>|E<|END_OF_TURN_TOKEN|>|"
            "A<|START_RESPONSE|>Four.<|END_RESPONSE|>|E<|END_OF_TURN_TOKEN|>",
        ),
        ("GLM-4.7-Flash", "RHm.</think>|ALet me.|T<tool_call>{}</tool_call>|R</think>|AFour."),
        ("google-gemma-2-2b-it", None),
    ],
)
def test_kinds_of_real_templates(template: str, expected: str | None) -> None:
    encoder = auditing(template, ("<|END_OF_TURN_TOKEN|>", *CHATML), eos="<|END_OF_TURN_TOKEN|>")
    if expected is None:  # knows neither reasoning nor calls
        assert kinds(encoder, Conversation(REASONED)) == [("ANSWER", "Four."), ("END_OF_TURN", "<end_of_turn>")]
        return
    found = "|".join(kind[0] + text for kind, text in kinds(encoder, Conversation(CALLING, TOOLS)))
    before, after = expected.split("{}")
    assert found.startswith(before)
    assert found.endswith(after)
    assert "add" in found[len(before) : len(found) - len(after)]


def test_reasoning_can_be_left_untrained() -> None:
    encoder = encoder_for("THINKING", EncodeOptions(train=TrainOptions(reasoning=False)))
    assert pieces(encoder, Conversation(REASONED)) == ["Four.<|im_end|>"]
    assert pieces(encoder, Conversation(INLINE)) == ["Four.<|im_end|>"]


def test_tool_calls_can_be_left_untrained_and_their_end_of_turn_with_them() -> None:
    encoder = encoder_for("THINKING", EncodeOptions(train=TrainOptions(tool_calls=False), on_lost="warn"))
    found = pieces(encoder, Conversation(CALLING, TOOLS))
    assert found == ["Let me.", "<think>\n\n</think>\n\nFour.<|im_end|>"]


def test_only_tool_calls_can_be_trained() -> None:
    options = EncodeOptions(train=TrainOptions(answers=False, reasoning=False), on_lost="warn")
    [found] = pieces(encoder_for("THINKING", options), Conversation(CALLING, TOOLS))
    assert found.startswith("\n<tool_call>")
    assert found.endswith("</tool_call><|im_end|>")


def test_a_record_without_what_is_trained_is_dropped() -> None:
    encoder = encoder_for("THINKING", EncodeOptions(train=TrainOptions(answers=False, reasoning=False)))
    encoded = encoder.encode_records([Conversation([user("?"), assistant("Four.")])])
    assert [drop.reason for drop in encoded.dropped] == [DropReason.NOTHING_TO_TRAIN]


def test_training_nothing_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"encode\.train is false for everything"):
        TrainOptions(answers=False, reasoning=False, tool_calls=False)


def weighted(encoder: RecordEncoder, record: Any) -> list[tuple[str, float]]:
    """The trained text by weight."""
    sequences = encoder.encode_records([record]).sequences
    assert sequences.weights is not None
    assert np.array_equal(sequences.weights > 0, sequences.train == 1)
    edges = [0, *(np.flatnonzero(np.diff(sequences.weights)) + 1).tolist(), len(sequences.weights)]
    return [
        (encoder.tokenizer.decode(sequences.input_ids[start:end].tolist()), float(sequences.weights[start]))
        for start, end in pairwise(edges)
        if sequences.weights[start]
    ]


@pytest.mark.parametrize("template", ["CHATML", "THINKING", "BARE_MARKS"])
def test_a_message_has_its_weight_and_multiplies_the_records(template: str) -> None:
    chat = [user("a"), assistant("b"), user("c"), assistant("d"), user("e"), assistant("f")]
    flags = [None, 0.5, None, 0, None, None]
    found = weighted(encoder_for(template), Conversation(chat, None, flags, weight=2.0))
    assert [(text.split("</think>")[-1].strip(), weight) for text, weight in found] == [
        ("b<|im_end|>", 1.0),
        ("f<|im_end|>", 2.0),
    ]


def test_weights_of_one_cost_no_array() -> None:
    chat = Conversation([user("a"), assistant("b")], None, [None, 1.0])
    assert encoder_for("CHATML").encode_records([chat]).sequences.weights is None


def test_a_record_of_weight_zero_has_nothing_to_train() -> None:
    encoder = encoder_for("CHATML")
    for _ in range(4):  # also when its shape is known
        sound = encoder.encode_records([Conversation([user("a"), assistant("b")])])
        encoded = encoder.encode_records([Conversation([user("a"), assistant("b")], weight=0)])
        assert not sound.dropped
        assert [drop.reason for drop in encoded.dropped] == [DropReason.NOTHING_TO_TRAIN]


@pytest.mark.parametrize("template", ["CHATML", "TRIMMING", "THINKING", "BARE_MARKS"])
def test_parts_of_a_content_can_be_left_untrained(template: str) -> None:
    chat = [user("a"), assistant("given. own.")]
    parts = {1: [(len("given."), 0.0), (len(" own."), None)]}
    found = pieces(encoder_for(template), Conversation(chat, parts=parts))
    assert [text.split("</think>\n\n")[-1] for text in found][-1] == " own.<|im_end|>"
    assert "given" not in "".join(found)


def test_parts_keep_their_weights_in_templates_that_take_contents_in_parts() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = Conversation([user("a"), assistant("given. own.")], parts={1: [(6, 0.0), (5, None)]})
    assert pieces(encoder_for(source), chat) == [" own.<|im_end|>"]


def test_a_part_that_a_template_trims_keeps_its_weight() -> None:
    chat = [user("a"), assistant("  one two  ")]
    parts = {1: [(len("  one"), 0.5), (len(" two  "), 2.0)]}
    assert weighted(encoder_for("TRIMMING"), Conversation(chat, parts=parts)) == [
        ("one", 0.5),
        (" two<|im_end|>", 2.0),
    ]


def test_a_trained_part_of_a_question_is_all_that_is_trained_of_it() -> None:
    chat = [user("a secret b"), assistant("c")]
    parts = {0: [(2, None), (6, 1.0), (2, None)]}
    assert pieces(encoder_for("CHATML"), Conversation(chat, parts=parts)) == ["secret", "c<|im_end|>"]


def test_text_and_tokenized_records_have_weights() -> None:
    encoder = encoder_for("CHATML", EncodeOptions(add_eos=False))
    assert weighted(encoder, TextRecord((("a", 0), ("b", 0.5), ("c", 1)))) == [("b", 0.5), ("c", 1.0)]
    assert weighted(encoder, TokenizedRecord([97, 98, 99], [0, 0.25, 1])) == [("b", 0.25), ("c", 1.0)]


def test_weighted_and_plain_records_share_a_batch() -> None:
    encoder = encoder_for("CHATML")
    plain, heavy = Conversation([user("a"), assistant("b")]), Conversation([user("a"), assistant("b")], weight=3.0)
    sequences = encoder.encode_records([plain, heavy, TokenizedRecord([5, 6], [0, 1])]).sequences
    assert sequences.weights is not None
    assert sorted(set(sequences.weights.tolist())) == [0.0, 1.0, 3.0]
    assert sequences.record.tolist() == [0, 1, 2]
