"""What an explanation of a template shows, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.encode.tokenizers.interface import MarkedText, control_pattern
from megatron_packed_sft.inspect.explain_template import Around, ExampleText, Finding, TemplateExplanation
from megatron_packed_sft.inspect.painting import LABEL, NOTE, Painter, Stretch
from megatron_packed_sft.inspect.template_alone import TemplateAlone
from megatron_packed_sft.inspect.visible_text import quoted

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_SAID = {
    "start": "(the chat begins)",
    "end": "(the chat is over)",
    "reasoning": "REASONING",
    "generation prompt": "(the assistant writes)",
}
_WORDS = {"system": "SYSTEM PROMPT", "user": "QUESTION", "tool result": "RESULT"}
_LONGEST = 400


def template_view(found: TemplateExplanation, painter: Painter) -> Iterator[RenderableType]:
    """Yield what to show of a template.

    Args:
        found: what is known of it.
        painter: for its text.
    """
    from rich.text import Text

    is_alone = isinstance(found.tokenizer, TemplateAlone)
    name = found.template.name if is_alone else f"{found.template.name}, tokenizer {found.tokenizer.name}"
    yield Text(quoted(name, longest=200), style="bold")
    yield Text(_facts(found))
    if is_alone:
        words = "no tokenizer was given: what looks like a control token is taken for one; --tokenizer shows it exactly"
        yield Text(words, style="dim")
    yield Text("")
    yield Text("what it writes around each kind of text", style=LABEL)
    for one in found.around:
        yield Text(f"{one.kind}", style="bold")
        yield _indented(painter.stretches(_around_stretches(one, found)))
    example = found.example
    if example is not None:
        yield Text("")
        yield Text(f"an example: {example.title}", style=LABEL)
        yield painter.stretches(example_stretches(example.made_of.marked, found.tokenizer.control_tokens))
    yield painter.legend()
    yield from _findings_view(found.findings)


def template_json(found: TemplateExplanation) -> dict[str, Any]:
    """Return an explanation as plain values."""
    example: ExampleText | None = found.example
    return {
        "template": {"name": found.template.name, "fingerprint": found.template.fingerprint},
        "tokenizer": None if isinstance(found.tokenizer, TemplateAlone) else found.tokenizer.name,
        "variables": found.variables,
        "ends_of_turn": list(found.ends),
        "around": [one._asdict() for one in found.around],
        "findings": [one._asdict() for one in found.findings],
        "example": None
        if example is None
        else {
            "title": example.title,
            "messages": list(example.conversation.messages),
            "text": example.made_of.marked.text,
            "trained": [list(both) for both in example.made_of.marked.trained],
        },
    }


def example_stretches(marked: MarkedText, control_tokens: Any) -> Iterator[Stretch]:
    """Yield a marked text in stretches, cut at its control tokens and where training begins and ends."""
    trained = [False] * len(marked.text)
    for start, end in marked.trained:
        trained[start:end] = [True] * (end - start)
    pattern = control_pattern(token for token in control_tokens if token.strip())
    for number, part in enumerate(_with_places(pattern.split(marked.text))):
        text, at = part
        for is_trained, run in groupby(range(at, at + len(text)), key=trained.__getitem__):
            places = list(run)
            yield Stretch(marked.text[places[0] : places[-1] + 1], float(is_trained), is_control=number % 2 == 1)


def _with_places(parts: Sequence[str]) -> Iterator[tuple[str, int]]:
    position = 0
    for part in parts:
        yield part, position
        position += len(part)


def _around_stretches(one: Around, found: TemplateExplanation) -> Iterator[Stretch]:
    if one.example:
        is_trained = one.kind == "tool call"
        text = one.example if len(one.example) <= _LONGEST else _shortened(one.example)
        marked = MarkedText(text, [(0, len(text))] if is_trained else [])
        yield from example_stretches(marked, found.tokenizer.control_tokens)
        return
    is_assistant = one.kind in ("assistant", "last answer", "reasoning")
    said = _SAID.get(one.kind) or _WORDS.get(one.kind, "ANSWER")
    parts = [(one.before, False), (one.trained_before, True), (said, is_assistant), (one.trained_after, True)]
    parts.append((one.after, False))
    if one.kind == "end":
        parts.reverse()
    text, ranges = "", []
    for part, is_trained in parts:
        if is_trained and part:
            ranges.append((len(text), len(text) + len(part)))
        text += part if len(part) <= _LONGEST else _shortened(part)
    yield from example_stretches(MarkedText(text, ranges), found.tokenizer.control_tokens)


def _shortened(text: str) -> str:
    half = _LONGEST // 2
    return f"{text[:half]} … {text[-half:]}"


def _findings_view(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    from rich.text import Text

    kept = [one.probe for one in findings if one.outcome == "kept"]
    yield Text("")
    yield Text("what becomes of chats with ...", style=LABEL)
    for (outcome, sentence), probes in _by_sentence(findings).items():
        said = quoted(sentence, longest=240)
        yield Text.assemble(f"  {', '.join(probes)}: ", (f"{outcome}", NOTE), f", {said}")
    if kept:
        yield Text.assemble("  ", ("kept as they are: ", "green"), ", ".join(kept))


def _by_sentence(findings: Sequence[Finding]) -> dict[tuple[str, str], list[str]]:
    """Return what happens, and to which chats."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in findings:
        if one.outcome != "kept":
            found.setdefault((one.outcome, one.sentence), []).append(one.probe)
    return found


def _facts(found: TemplateExplanation) -> str:
    ends = " or ".join(quoted(end) for end in found.ends) or "nothing"
    variables = quoted(", ".join(found.variables) or "none", longest=400)
    return f"a turn ends with {ends}; variables: {variables}"


def _indented(text: Text) -> Text:
    from rich.text import Text

    shown = Text()
    for number, line in enumerate(text.split("\n", allow_blank=True)):
        shown.append("\n" if number else "")
        shown.append("  ")
        shown.append_text(line)
    return shown
