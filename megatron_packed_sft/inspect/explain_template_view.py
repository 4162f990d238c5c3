"""`packed-sft explain-template`: show the explanation of a template, for people and as JSON."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.encode.sequences import MarkedText, Sequences
from megatron_packed_sft.encode.templates.load import ChatTemplate
from megatron_packed_sft.encode.tokenizers.interface import control_pattern
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect.explain_template import Around, ExampleText, Finding, TemplateExplanation
from megatron_packed_sft.inspect.painting import LABEL, NOTE, Painter, Stretch, quoted
from megatron_packed_sft.inspect.settings import is_template, prepare_settings, split_words
from megatron_packed_sft.support.terminal import show, show_json, shows_colours


def explain_template(words: Sequence[str], *, tokenizer: str | None = None, as_json: bool = False) -> int:
    """Print the explanation of a template, and return the exit code.

    Args:
        words: a tokenizer, a template file or the name of a built-in template, and settings KEY=VALUE.
        tokenizer: the path of the tokenizer to render a named template with.
        as_json: print JSON.
    """
    from megatron_packed_sft.encode.templates.load import load_template
    from megatron_packed_sft.encode.tokenizers.interface import Tokenizer, load_tokenizer
    from megatron_packed_sft.inspect.explain_template import TemplateExplanation
    from megatron_packed_sft.inspect.explain_template_view import TemplateAlone, template_json, template_view
    from megatron_packed_sft.inspect.painting import Painter

    path, settings = split_words(words)
    named = path if path is not None and is_template(path) else None
    if path is None and tokenizer is None:
        raise InvalidInputError("name a tokenizer, a Jinja file or a built-in template such as chatml")
    if named is None and path is not None:
        if tokenizer is not None:
            raise InvalidInputError(f"{path} and --tokenizer {tokenizer} are two tokenizers; leave one out")
        tokenizer = path
    config = prepare_settings(settings, tokenizer=tokenizer or "none")
    given = config.tokenizer
    made = None if tokenizer is None else load_tokenizer(given.path, fast=False)
    template = load_template(named or config.template.name, made)
    whose: Tokenizer = made if made is not None else TemplateAlone(template)
    logging.getLogger("megatron_packed_sft.encode").setLevel(logging.ERROR)  # warnings repeat the findings
    found = TemplateExplanation(whose, template, config.template)
    if as_json:
        show_json(template_json(found))
    else:
        show(*template_view(found, Painter(whose.control_tokens, in_colour=shows_colours())))
    return 0


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
    """Yield what to print about a template.

    Args:
        found: its explanation.
        painter: for its text.
    """
    from rich.text import Text

    is_alone = isinstance(found.tokenizer, TemplateAlone)
    name = found.template.name if is_alone else f"{found.template.name}, tokenizer {found.tokenizer.name}"
    yield Text(quoted(name, longest=200), style="bold")
    yield Text(_facts(found))
    if is_alone:
        words = "no tokenizer was given, so control tokens are guessed by their looks; add --tokenizer PATH to be exact"
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
        yield painter.stretches(example_stretches(example.rendered.marked, found.tokenizer.control_tokens))
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
            "text": example.rendered.marked.text,
            "trained": [list(both) for both in example.rendered.marked.trained],
        },
    }


def example_stretches(marked: MarkedText, control_tokens: Any) -> Iterator[Stretch]:
    """Yield a marked text in stretches, split at its control tokens and where training begins or ends."""
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
    yield Text("how it handles chats with ...", style=LABEL)
    for (outcome, sentence), probes in _by_sentence(findings).items():
        said = quoted(sentence, longest=240)
        yield Text.assemble(f"  {', '.join(probes)}: ", (f"{outcome}", NOTE), f", {said}")
    if kept:
        yield Text.assemble("  ", ("kept unchanged: ", "green"), ", ".join(kept))


def _by_sentence(findings: Sequence[Finding]) -> dict[tuple[str, str], list[str]]:
    """Return the chats of each (outcome, sentence)."""
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


_BOS, _EOS = "<|bos_token|>", "<|eos_token|>"
# How control tokens look in the templates of models: <|im_end|>, [INST], <end_of_turn>, <think>.
_LOOKS_LIKE_CONTROL = re.compile(
    r"<[|\N{FULLWIDTH VERTICAL LINE}][^<>{}'\s]{1,40}[|\N{FULLWIDTH VERTICAL LINE}]>"
    r"|\[/?[A-Z_]{3,}\]|</?[a-z_]+_of_turn>|</?(?:think|tool_call|tool_response|s|bos|eos)>"
)


class TemplateAlone:
    """Stands in for the tokenizer of a template that is rendered without one; it cannot encode.

    It guesses control tokens by how they look in the template, and shows `bos_token` and `eos_token` by name.

    Example:
        >>> list(TemplateAlone(ChatTemplate("mine", "[INST]{{ messages[0].content }}[/INST]")).control_tokens)[:2]
        ['[INST]', '[/INST]']
    """

    bos_id = eos_id = pad_id = None
    vocab_size = 0
    fingerprint = ""

    def __init__(self, template: ChatTemplate) -> None:
        self.path = self.name = template.name
        self.chat_template: str | None = template.source
        self.tool_template = template.tool_source
        found = dict.fromkeys([*_LOOKS_LIKE_CONTROL.findall(template.source), _BOS, _EOS])
        self.control_tokens: Mapping[str, int] = {token: number for number, token in enumerate(found)}
        self.template_variables: Mapping[str, Any] = {"bos_token": _BOS, "eos_token": _EOS}
        self.stop_tokens: Sequence[str] = [_EOS]

    def encode_many(self, texts: Sequence[MarkedText]) -> Sequences:
        """Raise an error, because there are no ids."""
        raise InvalidInputError(f"{self.name} is a template without a tokenizer; give a tokenizer to see ids")

    def decode(self, ids: Sequence[int]) -> str:
        """Raise an error, because there are no ids."""
        raise InvalidInputError(f"{self.name} is a template without a tokenizer; give a tokenizer to see ids")
