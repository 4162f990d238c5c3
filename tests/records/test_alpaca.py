"""Questions and answers in columns: which columns are read, and which records are refused rather than guessed."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_packed_sft.records.record import Conversation, RecordError
from megatron_packed_sft.records.schemas.registry import adapter, recognise

ASKING = {"role": "user", "content": "What is 2 + 2?"}
ANSWERING = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("asks", "answers"),
    [
        ("question", "answer"), ("query", "response"), ("input", "output"), ("instruction", "response"),
        ("prompt", "response"), ("question", "response"), ("problem", "solution"),
    ],
)  # fmt: skip
def test_one_column_that_asks_and_one_that_answers_are_a_chat(asks: str, answers: str) -> None:
    record = {"id": 7, asks: ASKING["content"], answers: "4", "source": "school"}
    assert recognise(record) == "question_answer"
    assert adapter()(record) == Conversation([ASKING, ANSWERING])


def test_system_history_and_weight_stand_beside_the_question() -> None:
    history = [["Hi", "Hello."]]
    before = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    record = {"query": ASKING["content"], "response": "4", "system": "Be brief.", "history": history, "weight": 0.5}
    assert adapter()(record) == Conversation([SYSTEM, *before, ASKING, ANSWERING], weight=0.5)
    orca = {"id": "niv.1", "system_prompt": "Be brief.", "question": ASKING["content"], "response": "4"}
    assert adapter()(orca) == Conversation([SYSTEM, ASKING, ANSWERING])


def test_dolly_s_context_belongs_to_its_instruction() -> None:
    record = {"instruction": "Who wrote it?", "context": "A novel by Hamsun.", "response": "Hamsun.", "category": "qa"}
    found = adapter()(record)
    assert isinstance(found, Conversation)
    assert found.messages[0]["content"] == "Who wrote it?\n\nA novel by Hamsun."
    alone = adapter()({**record, "context": ""})
    assert isinstance(alone, Conversation)
    assert alone.messages[0]["content"] == "Who wrote it?"
    as_alpaca = adapter(mapping={"instruction": "instruction", "input": "context", "output": "response"})(record)
    assert as_alpaca == found


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_in_a_column_belongs_to_the_answer(key: str) -> None:
    thoughtful = {**ANSWERING, "reasoning_content": "2 and 2."}
    for columns in ({"question": ASKING["content"], "answer": "4"}, {"instruction": ASKING["content"], "output": "4"}):
        assert adapter()({**columns, key: "2 and 2."}) == Conversation([ASKING, thoughtful])
    mapping = {"instruction": "q", "output": "a", "reasoning_content": "why"}
    assert adapter(mapping=mapping)({"q": ASKING["content"], "a": "4", "why": "2 and 2."}) == Conversation(
        [ASKING, thoughtful]
    )


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"problem": "2 + 2?", "solution": "2 and 2 is 4.", "answer": "4"},
            "the record has answer and solution; name the column of the answer, such as "
            "mapping: {instruction: problem, output: answer}",
        ),
        (
            {"question": "2 + 2?", "prompt": "Add 2 and 2.", "answer": "4"},
            "the record has question and prompt; name the column of the question, such as "
            "mapping: {instruction: question, output: answer}",
        ),
        (
            {"question": "Who?", "context": "A novel.", "answer": "Hamsun."},
            "context would be lost; name the columns to read, such as "
            "mapping: {instruction: question, input: context, output: answer}, or leave it out of the mapping",
        ),
        ({"question": "Who?", "rationale": "It says so.", "answer": "Hamsun."}, "rationale would be lost"),
        ({"question": "Who?", "answer": ["Hamsun."]}, "answer is a list; give a string"),
        ({"question": [ASKING], "answer": "4"}, "question is a list; give a string"),
        ({"query": "Who?", "response": "He.", "history": [["Hi"]]}, "history[0] is not a pair of strings"),
        (
            {"text": "A novel.", "question": "Who?", "answer": "Hamsun."},
            "the record fits the schemas question_answer and text; set sources.NAME.schema to the right one",
        ),
        (
            {"prompt": "2 + 2 = ", "completion": "4", "instruction": "Add.", "output": "4"},
            "the record fits the schemas prompt_completion and alpaca; set sources.NAME.schema",
        ),
    ],
)
def test_what_would_be_guessed_or_lost_is_refused_with_the_line_to_write(record: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError) as caught:
        adapter()(record)
    assert str(caught.value).startswith(message)


def test_surer_columns_win_over_questions_and_answers() -> None:
    assert recognise({"prompt": "2 + 2 = ", "completion": "4", "answer": "4"}) == "prompt_completion"
    assert recognise({"instruction": "Add.", "input": "2, 2", "output": "4", "answer": "4"}) == "alpaca"
    assert recognise({"messages": [ASKING], "question": "2 + 2?", "answer": "4"}) == "messages"
    with pytest.raises(RecordError, match=r"^question is missing; name the column of the question"):
        adapter("question_answer")({"answer": "4"})
