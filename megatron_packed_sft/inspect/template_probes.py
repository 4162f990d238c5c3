"""Small chats that show what a template does: each asks one question, and examples show all of it at once."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_packed_sft.encode.masks.authored_text import TOOLS
from megatron_packed_sft.encode.masks.lost_text import Loss
from megatron_packed_sft.records.record import Conversation

_ID = "abcdefghi"  # nine characters, which Mistral's templates insist on
_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name."}},
            "required": ["city"],
        },
    },
}


def user(text: str) -> dict[str, Any]:
    """Return a question."""
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str | None = None) -> dict[str, Any]:
    """Return an answer."""
    message = {"role": "assistant", "content": text}
    return message if reasoning is None else {**message, "reasoning_content": reasoning}


def calling(*cities: str, text: str = "", reasoning: str | None = None) -> dict[str, Any]:
    """Return a message with one call for each city."""
    calls = [
        {"id": _ID, "type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
        for city in cities or ("Oslo",)
    ]
    return {**answer(text, reasoning), "tool_calls": calls}


def result(text: str) -> dict[str, Any]:
    """Return what a tool gave back."""
    return {"role": "tool", "tool_call_id": _ID, "name": "get_weather", "content": text}


def chat(*messages: dict[str, Any], tools: bool = False) -> Conversation:
    """Return a conversation."""
    return Conversation(list(messages), [_WEATHER] if tools else None)


class Probe(NamedTuple):
    """A chat that asks a template one question.

    Args:
        name: what the chat has.
        conversation: the chat.
        message: the message that it is about.
        changed: what to say if the template shows its content differently.
        inside: what to say if it stands inside another turn.
        by_turns: whether each turn must look as it did when it was the last one.
        about_start: whether the template begins with words of its own.
    """

    name: str
    conversation: Conversation
    message: int = 1
    changed: str = "is not written as it is"
    inside: str = ""
    by_turns: bool = False
    about_start: bool = False

    def counts(self, loss: Loss) -> bool:
        """Whether a loss answers the question."""
        return loss.message == self.message


_SYSTEM = {"role": "system", "content": "zqsystem"}
_ONE, _TWO, _THREE, _FOUR = user("zqone"), answer("zqtwo"), user("zqthree"), answer("zqfour")
_CALLED = (_ONE, calling(), result("zqresult"), _TWO)
PROBES = (
    Probe("a system prompt", chat(_SYSTEM, _ONE, _TWO), 0, inside="is written inside the first question"),
    Probe("a developer message", chat({**_SYSTEM, "role": "developer"}, _ONE, _TWO), 0),
    Probe("a system prompt in the middle", chat(_ONE, _TWO, _SYSTEM, _THREE, _FOUR), 2,
          inside="is written inside another turn"),
    Probe("a chat without a system prompt", chat(_ONE, _TWO, _THREE, _FOUR), 0, about_start=True),
    Probe("several turns", chat(_ONE, _TWO, _THREE, _FOUR), by_turns=True,
          changed="earlier answers look different once a later question comes; encode.render=auto trains each as it "
          "was written"),
    Probe("two questions in a row", chat(_ONE, _THREE, _TWO), 1, inside="is written inside the first one"),
    Probe("two answers in a row", chat(_ONE, _TWO, _FOUR), 2),
    Probe("an answer first", chat(_TWO, _ONE, _FOUR), 0),
    Probe("an empty answer", chat(_ONE, answer(""), _THREE, _FOUR)),
    Probe("blanks around a question", chat(user("  zqone \n"), _TWO), 0, "loses blanks {}"),
    Probe("blanks around an answer", chat(_ONE, answer("  zqtwo \n"), _THREE, _FOUR), 1, "loses blanks {}"),
    Probe("reasoning", chat(_ONE, answer("zqtwo", "zqreason"))),
    Probe("reasoning in an earlier turn", chat(_ONE, answer("zqtwo", "zqreason"), _THREE, answer("zqfour", "zqwhy"))),
    Probe("<think> in an earlier answer", chat(_ONE, answer("<think>\nzqreason\n</think>\n\nzqtwo"), _THREE, _FOUR),
          changed="the reasoning between its tags is left out, or written differently"),
    Probe("tools", chat(_ONE, _TWO, tools=True), TOOLS),
    Probe("a tool call", chat(*_CALLED, tools=True)),
    Probe("a tool call that ends the chat", chat(_ONE, calling(), tools=True)),
    Probe("words beside a call", chat(_ONE, calling(text="zqwords"), result("zqresult"), _TWO, tools=True)),
    Probe("reasoning beside a call", chat(_ONE, calling(reasoning="zqreason"), result("zqresult"), _TWO, tools=True)),
    Probe("two calls at once",
          chat(_ONE, calling("Oslo", "Rome"), result("zqrain"), result("zqsun"), _TWO, tools=True)),
    Probe("a tool's result", chat(*_CALLED, tools=True), 2),
)  # fmt: skip

_BRIEF = {"role": "system", "content": "You are a helpful assistant. Be brief."}
_QUESTION, _SUM = user("Do I need an umbrella in Oslo?"), user("Thanks! And 2 + 2?")
# From what shows most to what every template takes.
EXAMPLES = {
    "system prompt, reasoning, a tool call, its result, two answers": chat(
        _BRIEF,
        _QUESTION,
        calling(reasoning="I should look at the weather."),
        result('{"weather": "rain"}'),
        answer("Yes, it rains.", "Rain means umbrella."),
        tools=True,
    ),
    "system prompt, a tool call, its result, two answers": chat(
        _BRIEF,
        _QUESTION,
        calling(),
        result('{"weather": "rain"}'),
        answer("Yes, it rains."),
        _SUM,
        answer("4."),
        tools=True,
    ),
    "a tool call, its result, an answer": chat(
        _QUESTION, calling(), result('{"weather": "rain"}'), answer("Yes, it rains."), tools=True
    ),
    "system prompt, reasoning, an answer": chat(_BRIEF, user("2 + 2?"), answer("4.", "Two and two is four.")),
    "system prompt, two answers": chat(_BRIEF, user("2 + 2?"), answer("4."), user("And 3 + 3?"), answer("6.")),
    "two answers": chat(user("2 + 2?"), answer("4."), user("And 3 + 3?"), answer("6.")),
    "an answer": chat(user("2 + 2?"), answer("4.")),
}
