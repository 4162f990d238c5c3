"""What a template omits from a chat: strings of the record that do not appear in the rendered text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron_packed_sft.encode.masks.authored_text import MESSAGES_NAME, TOOLS, Recorder
from megatron_packed_sft.encode.masks.traced_renderer import Span, TracedText
from megatron_packed_sft.encode.templates.renderer import REASONING_KEYS

TOOL_CALL, REASONING, CONTENT, MESSAGE, ALL_TOOLS = "tool_call", "reasoning", "content", "message", "tools"
_SENTENCES = {
    TOOL_CALL: "omits a tool call of message {message}",
    REASONING: "omits the reasoning of message {message}",
    CONTENT: "omits the content of message {message}",
    MESSAGE: "omits message {message}",
    ALL_TOOLS: "omits the tools",
}

Path = tuple[str | int, ...]


class Loss(NamedTuple):
    """Text that the template omits.

    Args:
        kind: `tool_call`, `reasoning`, `content`, `message` or `tools`.
        message: its number, -1 for tools.
        is_grave: whether a trained turn loses a call, or all of its text.
    """

    kind: str
    message: int
    is_grave: bool

    def sentence(self, template: str) -> str:
        """Return a sentence about the loss."""
        return f"{template} {_SENTENCES[self.kind].format(message=self.message)}"


def find_losses(
    messages: Sequence[dict[str, Any]],
    tools: Any,
    chat: TracedText,
    turns: dict[int, Sequence[Span]],
    recorder: Recorder | None = None,
    numbers: Collection[int] | None = None,
) -> list[Loss]:
    """Return what the render of a chat omits.

    Args:
        messages: of the chat, in the form that was rendered.
        tools: of the chat.
        chat: its render.
        turns: the spans of each trained message in its turn; what is written elsewhere is not trained.
        recorder: gets a guard for every omitted string, which may be empty here and not in another record.
        numbers: look at these messages only; `TOOLS` for the tools.
    """
    shown: dict[int, set[Path]] = {}
    for span in chat.spans:
        shown.setdefault(span.author.message, set()).add(span.author.path)
    numbers = range(TOOLS, len(messages)) if numbers is None else numbers
    losses = [Loss(ALL_TOOLS, TOOLS, False)] if tools and TOOLS not in shown and TOOLS in numbers else []
    for number, message in enumerate(messages):
        if number not in numbers:
            continue
        is_trained = number in turns
        paths = {span.author.path for span in turns[number]} if is_trained else shown.get(number, set())
        losses += _losses_of(number, message, paths, is_trained, recorder)
    return losses


def says_something(message: dict[str, Any]) -> bool:
    """Return whether a message has text that can be omitted."""
    return any(text is None or text.strip() for _, _, text in _strings_of(message))


def _losses_of(
    number: int, message: dict[str, Any], paths: set[Path], is_trained: bool, recorder: Recorder | None
) -> list[Loss]:
    kinds = []
    is_shown = False
    for path, kind, text in _strings_of(message):
        if _is_in(path, paths):
            is_shown = True
        elif text is None or text.strip():
            kinds.append(kind)
        if recorder is not None and text is not None and not _is_in(path, paths):
            source = f"{MESSAGES_NAME}[{number}]" + "".join(f"[{step!a}]" for step in path)
            recorder.guard(f"bool({source}.strip())", bool(text.strip()))
    if recorder is not None and "tool_calls" in message and not is_shown:
        recorder.guard(f"len({MESSAGES_NAME}[{number}]['tool_calls'] or ())", len(message["tool_calls"] or ()))
    if kinds and not is_shown:
        return [Loss(TOOL_CALL if TOOL_CALL in kinds else MESSAGE, number, is_trained)]
    return [Loss(kind, number, is_trained and kind == TOOL_CALL) for kind in dict.fromkeys(kinds)]


def _strings_of(message: dict[str, Any]) -> Iterator[tuple[Path, str, str | None]]:
    """Yield path, kind and text of the values of a message; the text is None for values that are not strings."""
    content = message.get("content")
    if isinstance(content, str):
        yield ("content",), CONTENT, content
    elif isinstance(content, list):
        for place, part in enumerate(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield ("content", place, "text"), CONTENT, part["text"]
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            yield (key,), REASONING, message[key]
    for place, call in enumerate(message.get("tool_calls") or ()):
        if isinstance(call, dict):
            yield from _strings_of_call(("tool_calls", place), call)


def _strings_of_call(path: Path, call: dict[str, Any]) -> Iterator[tuple[Path, str, str | None]]:
    function = call.get("function")
    if isinstance(function, dict):
        path, call = (*path, "function"), function
    if isinstance(call.get("name"), str):
        yield (*path, "name"), TOOL_CALL, call["name"]
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        yield (*path, "arguments"), TOOL_CALL, arguments
    elif isinstance(arguments, dict):
        for key in arguments:
            yield (*path, "arguments", key), TOOL_CALL, None


def _is_in(path: Path, paths: Iterable[Path]) -> bool:
    """Return whether a value is written: itself, a part of it, or a value that contains it."""
    return any(other[: len(path)] == path or path[: len(other)] == other for other in paths)
