"""Real templates, all shapes of chats: what is trained is what the model of the family writes, or it is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megatron_packed_sft.encode.templates.renderer import RecordRefusedError, Renderer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import Conversation
from tests.encode import held_out
from tests.encode.template_families import FAMILIES
from tests.encode.template_matrix import SHAPES, TOOLS, compare, encoder_for
from tests.real_data import IS_WHOLE, templates_folder

# Nobody asks, and DeepSeek's templates write no header before such a turn: nothing says where it starts.
REFUSED = {("deepseek-ai-DeepSeek-V3.1", "assistant first"), ("deepseek-ai-DeepSeek-V3.2", "assistant first")}
# What follows a chat is written after every chat, or stands for the next turn: not the assistant's.
WRITES_AFTER_THE_CHAT = ("CohereForAI", "microsoft-Phi-3.5")
# The end of a turn is only written when another turn follows.
ENDS_WITH_THE_NEXT = ("Apriel-1.6", "tencent-Hy3")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_what_is_trained_is_what_the_model_of_the_family_writes(name: str) -> None:
    family = FAMILIES[name]
    for template in family.templates:
        encoder = encoder_for(templates_folder() / f"{template}.jinja", family.stops)
        for kind in SHAPES:
            outcome = compare(encoder, family, kind)
            allowed = {"exact", "lost", "template"} | ({"refused"} if (template, kind) in REFUSED else set())
            assert outcome.kind in allowed, (template, kind, outcome.detail)


@pytest.mark.skipif(not IS_WHOLE, reason="make test-real renders all templates")
@pytest.mark.filterwarnings("ignore")
def test_no_turn_of_a_template_held_out_is_wrong_and_hardly_any_is_refused() -> None:
    pytest.importorskip("transformers")
    found = list(held_out.outcomes())
    counts = Counter(outcome.kind for _, _, outcome in found)
    assert [pair for pair in found if pair[2].kind == "different"] == []
    assert counts["exact"] > 1000
    assert counts["refused"] <= 0.01 * (counts["exact"] + counts["unsaid"] + counts["refused"])


def templates() -> list[Path]:
    """All of them, or none where they would take too long."""
    return sorted(templates_folder().glob("*.jinja")) if IS_WHOLE else []


@pytest.mark.skipif(not IS_WHOLE, reason="make test-real renders all templates")
def test_where_a_template_keeps_prefixes_turns_are_what_follows_the_prompt() -> None:
    num_compared = 0
    for path in templates():
        try:
            encoder = encoder_for(path, on_lost="warn")
            encoder.marker()
        except InvalidInputError:
            continue  # it renders no plain chat
        variables = {"bos_token": "<s>", "eos_token": "</s>"}
        plain = Renderer(path.read_text(encoding="utf-8"), variables=variables, date="2026-01-31")
        for kind, shape in SHAPES.items():
            if kind in ("assistant first", "two in a row", "reasoning"):
                continue
            tools = TOOLS if shape.has_tools else None
            try:
                marked = encoder.mark(Conversation(shape.messages, tools))
            except RecordRefusedError:
                continue
            starts, ends = {start for start, _ in marked.trained}, {end for _, end in marked.trained}
            for number, message in enumerate(shape.messages):
                if message["role"] != "assistant":
                    continue
                try:
                    prompt = plain.render(shape.messages[:number], tools, add_generation_prompt=True)
                    prefix = plain.render(shape.messages[: number + 1], tools).rstrip()
                except RecordRefusedError:
                    continue
                keeps = marked.text.startswith(prompt) and marked.text.startswith(prefix)
                if keeps and len(prompt) < len(prefix):
                    assert len(prompt) in starts, (path.name, kind, number)
                    is_last = number == len(shape.messages) - 1
                    if not path.name.startswith(
                        (*WRITES_AFTER_THE_CHAT, *ENDS_WITH_THE_NEXT) if is_last else ENDS_WITH_THE_NEXT
                    ):
                        assert len(prefix) in ends, (path.name, kind, number)
                    num_compared += 1
    assert num_compared > 500
