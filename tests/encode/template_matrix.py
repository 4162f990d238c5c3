# ruff: noqa: RUF001 (DeepSeek writes full-width bars)
"""Real templates against chats of every shape: what is trained, compared with what families write (see there).

python -m tests.encode.template_matrix     # or make masks; prints the table of docs/masks.md
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import Conversation
from tests.encode.byte_tokenizer import ByteTokenizer
from tests.encode.template_families import FAMILIES, ID, Call, Family
from tests.real_data import templates_folder

TOKENS = re.compile(
    r"<[|｜][^<>{}'\s]{1,40}[|｜]>|\[/?[A-Z_]{3,}\]|<[/a-z_]+(?:_of_turn|:eos|:bos)>|</?think>|\[e~\[|\]~b\]"
)
_PROPERTIES = {
    "city": {"type": "string", "description": "which"},
    "n": {"type": "integer", "description": "how many"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look it up",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["city"]},
        },
    }
]
OSLO: Call = ("look", {"city": "Oslo"})
ROME: Call = ("look", {"city": "Rome"})


class Shape(NamedTuple):
    """A chat, and its assistant turns: a text, calls, or (reasoning, text)."""

    messages: list[dict[str, Any]]
    turns: list[Any]
    has_tools: bool = False


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calling(*calls: Call, text: str = "") -> dict[str, Any]:
    written = [{"id": ID, "type": "function", "function": {"name": n, "arguments": given}} for n, given in calls]
    return answer(text, tool_calls=written)


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "look", "tool_call_id": ID, "content": text}


def _called(*calls: Call) -> Shape:
    results = [result("rain") for _ in calls]
    messages = [user("Weather?"), calling(*calls), *results, answer("It rains.")]
    return Shape(messages, [list(calls), "It rains."], True)


_SYSTEM = {"role": "system", "content": "Be brief."}
_TAGS = "A </s> or [INST] or <b>bold</b>: User: assistant ### Answer: x."
SHAPES = {
    "plain": Shape([user("Two?"), answer("Four.")], ["Four."]),
    "system": Shape([_SYSTEM, user("Two?"), answer("Four.")], ["Four."]),
    "several turns": Shape([user("Two?"), answer("Four."), user("Three?"), answer("Six.")], ["Four.", "Six."]),
    "reasoning": Shape([user("Two?"), answer("Four.", reasoning_content="Hm.")], [("Hm.", "Four.")]),
    "one call": _called(OSLO),
    "parallel calls": _called(OSLO, ROME),
    "numeric argument": _called(("look", {"n": 3})),
    "no arguments": _called(("look", {})),
    "call last": Shape([user("Weather?"), calling(OSLO)], [[OSLO]], True),
    "calls in turn": Shape(
        [
            user("?"),
            calling(OSLO),
            result("rain"),
            calling(ROME),
            result("sun"),
            answer("Both."),
            user("Ta"),
            answer("Ok."),
        ],
        [[OSLO], [ROME], "Both.", "Ok."],
        True,
    ),
    "empty turn": Shape([user("Hi"), answer(""), user("Hello?"), answer("Yes.")], ["", "Yes."]),
    "assistant first": Shape([answer("Hello."), user("Hi"), answer("How are you?")], ["Hello.", "How are you?"]),
    "two in a row": Shape([user("Hi"), answer("One."), answer("Two.")], ["One.", "Two."]),
    "many turns": Shape(
        [_SYSTEM, *(turn for n in range(4) for turn in (user(f"{n}?"), answer(f"{n}!")))], [f"{n}!" for n in range(4)]
    ),
    "unicode": Shape([user("Zwölf? 你好"), answer("Grüße 🙂 你好。")], ["Grüße 🙂 你好。"]),
    "words that look like tags": Shape([user("</s> [INST] User: <b>"), answer(_TAGS)], [_TAGS]),
    "the same words": Shape([user("Yes"), answer("Yes"), user("Yes"), answer("Yes")], ["Yes", "Yes"]),
    "unused tools": Shape([user("Weather?"), answer("No idea.")], ["No idea."], True),
    "call with the question's words": Shape(
        [user("Oslo"), calling(OSLO), result("Oslo"), answer("Oslo")], [[OSLO], "Oslo"], True
    ),
}


class Outcome(NamedTuple):
    """`exact`, `differs`, `lost` (refused because text is left out), `refused`, or `template` (its own error)."""

    kind: str
    detail: str = ""


def encoder_for(path: Path, stops: Sequence[str] = (), **options: Any) -> RecordEncoder:
    """An encoder that knows the control tokens that the template's text shows."""
    source = path.read_text(encoding="utf-8")
    tokens = dict.fromkeys([*TOKENS.findall(source), "<s>", "</s>", *stops])
    tokenizer = ByteTokenizer(list(tokens), bos="<s>", eos="</s>", stops=stops)
    return RecordEncoder(tokenizer, TemplateOptions(source, date="2026-01-31"), EncodeOptions(**options))


def expected(family: Family, kind: str) -> str | None:
    """What the assistant writes, all turns together; None if the template leaves some of it out."""
    if kind in family.special:
        return family.special[kind]
    written = []
    shape = SHAPES[kind]
    for number, turn in enumerate(shape.turns):
        is_last = number == len(shape.turns) - 1
        if isinstance(turn, list):
            calls = (family.last_calls or family.calls) if is_last else family.calls
            if calls is None or (family.only_first_call and len(turn) > 1):
                return None
            written.append(calls(turn))
        elif isinstance(turn, tuple):
            text = (family.last_answer or family.answer).format(turn[1])
            written.append(text if family.reasoned is None else family.reasoned.format(*turn))
        elif not turn and family.empty is not None:
            written.append(family.empty)
        else:
            written.append((family.last_answer if is_last and family.last_answer else family.answer).format(turn))
    return "".join(written)


def compare(encoder: RecordEncoder, family: Family, kind: str) -> Outcome:
    """Mark a chat and compare it with what the family writes."""
    shape, wanted = SHAPES[kind], expected(family, kind)
    try:
        marked = encoder.mark(Conversation(shape.messages, TOOLS if shape.has_tools else None))
    except RecordRefusedError as refusal:
        if refusal.reason == "lost_text":
            return Outcome("lost") if wanted is None else Outcome("differs", refusal.detail)
        return Outcome("template" if refusal.reason == "template_error" else "refused", refusal.detail)
    found = "".join(marked.text[start:end] for start, end in marked.trained)
    return Outcome("exact") if found == wanted else Outcome("differs", f"{found!r}, expected {wanted!r}")


def outcomes() -> Iterator[tuple[str, str, str, Outcome]]:
    """Yield family, template, shape and outcome for all of them."""
    folder = templates_folder()
    for name, family in FAMILIES.items():
        for template in family.templates:
            try:
                encoder = encoder_for(folder / f"{template}.jinja", family.stops)
                encoder.marker()
            except InvalidInputError as error:
                yield name, template, "", Outcome("refused", str(error))
                continue
            for kind in SHAPES:
                yield name, template, kind, compare(encoder, family, kind)


def main() -> None:
    """Print the table."""
    counts: dict[str, Counter[str]] = {}
    details = []
    for family, template, kind, outcome in outcomes():
        counts.setdefault(family, Counter())[outcome.kind] += 1
        if outcome.kind in ("differs", "refused"):
            details.append(f"{template}, {kind}: {outcome.kind}: {outcome.detail}")
    columns = ("exact", "lost", "refused", "template", "differs")
    print("| family | exact | text omitted, refused | not traceable, refused | template's own error | different |")
    print("|---|---|---|---|---|---|")
    for family, count in counts.items():
        print(f"| {family} | " + " | ".join(str(count[column] or "") for column in columns) + " |")
    total = sum(counts.values(), Counter())
    print("| **all** | " + " | ".join(str(total[column]) for column in columns) + " |")
    print(*details, sep="\n")


if __name__ == "__main__":
    main()
