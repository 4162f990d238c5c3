# ruff: noqa: RUF001 (DeepSeek writes full-width bars)
"""Templates that no part of the code was written for, judged by what transformers renders of parts of a chat.

python -m tests.encode.held_out     # also in make masks; prints how many pairs of template and chat agree

Every string of a chat is replaced by a word of its own, so that plain renders show who wrote what. A turn starts where
the chat stops following the render of what comes before it with a generation prompt; it ends with what the render up to
it writes after its last word, at the first stop token. Where that says nothing, the pair is only counted.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
from megatron_packed_sft.encode.templates.renderer import RecordRefusedError
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import Conversation
from tests.encode.byte_tokenizer import ByteTokenizer
from tests.encode.template_matrix import SHAPES, TOKENS, TOOLS, Outcome
from tests.real_data import held_out_templates

Render = Callable[..., str]
_WORD = re.compile(r"Zq\d+x")
_STOPS = (
    *("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<｜end▁of▁sentence｜>"),
    *("<|END_OF_TURN_TOKEN|>", "<|return|>", "<seed:eos>", "[e~[", "<|assistant_end|>", "<end_of_utterance>"),
    *("<|end_of_text|>", "<|end|>", "<|eom|>", "<|endoftext|>"),
)  # fmt: skip


class Word(NamedTuple):
    """A word in a render, and the message that says it."""

    start: int
    end: int
    message: int


def with_words(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return a chat with a word of its own in place of every string, and who says each word."""
    said: dict[str, int] = {}

    def word(value: Any, message: int) -> Any:
        if isinstance(value, dict):
            return {key: word(inner, message) for key, inner in value.items()}
        if not isinstance(value, str) or not value:
            return value
        said[f"Zq{len(said)}x"] = message
        return f"Zq{len(said) - 1}x"

    result = []
    for number, message in enumerate(messages):
        changed = {**message, "content": word(message["content"], number)}
        if "reasoning_content" in message:
            changed["reasoning_content"] = word(message["reasoning_content"], number)
        if "tool_calls" in message:
            changed["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": word(call["function"]["arguments"], number)}}
                for call in message["tool_calls"]
            ]
        result.append(changed)
    return result, said


class Judge:
    """What the turns of a chat are, by plain renders of its parts."""

    def __init__(self, render: Render, messages: Sequence[dict[str, Any]], said: dict[str, int], stops: Sequence[str]):
        self._render = render
        self._messages = messages
        self._said = said
        self._stops = stops
        self.text = render(messages)
        self._words = self._words_of(self.text)

    def turn(self, i: int) -> tuple[int | None, int | None]:
        """Return where message i starts and ends, each None if that cannot be said."""
        own = [word for word in self._words if word.message == i]
        if not own or any(own[0].end < word.start < own[-1].start and word.message != i for word in self._words):
            return None, None
        before = [word.end for word in self._words if word.end <= own[0].start]
        after = [word.start for word in self._words if word.start >= own[-1].end]
        try:
            prompt, bare = (self._tail(self._messages[:i], add_generation_prompt=asked) for asked in (True, False))
            prefix = self._tail(self._messages[: i + 1])
        except Exception:  # whatever a template raises
            return None, None
        anchor = before[-1] if before else 0
        start = None
        if self.text.startswith(prompt, anchor) and (
            prompt != bare or not self.text[anchor + len(prompt) : own[0].start].strip()
        ):
            start = anchor + len(prompt)
        return start, self._end(own[-1].end, after[0] if after else len(self.text), prefix.rstrip(), bare)

    def _end(self, last: int, limit: int, tail: str, bare: str) -> int | None:
        following = self.text[last:limit]
        cuts = [tail.index(stop) + len(stop) for stop in self._stops if stop in tail]
        if cuts:
            tail = tail[: min(cuts)]
        elif bare.strip() and tail.endswith(bare.strip()):
            return None  # something that follows every chat
        if not following.startswith(tail):
            return None
        rest = following[len(tail) :]
        stop = next((stop for stop in self._stops if not cuts and rest.lstrip().startswith(stop)), "")
        return last + len(tail) + (len(rest) - len(rest.lstrip()) + len(stop) if stop else 0)

    def _tail(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """What a render ends with, after the last word."""
        text = self._render(messages, **options)
        words = self._words_of(text)
        return text[words[-1].end if words else 0 :]

    def _words_of(self, text: str) -> list[Word]:
        return [Word(*match.span(), self._said[match[0]]) for match in _WORD.finditer(text) if match[0] in self._said]


def compare(encoder: RecordEncoder, render: Render, stops: Sequence[str], kind: str) -> Outcome:
    """Mark a chat and compare its turns with what the judge says."""
    messages, said = with_words(SHAPES[kind].messages)
    tools = TOOLS if SHAPES[kind].has_tools else None

    def rendered(part: Sequence[dict[str, Any]], **options: Any) -> str:
        return render(list(part), tools, **options)

    try:
        judge = Judge(rendered, messages, said, stops)
    except Exception as error:
        return Outcome("template", str(error))
    try:
        marked = encoder.mark(Conversation(messages, tools))
    except RecordRefusedError as refusal:
        return Outcome("lost" if refusal.reason == "lost_text" else "refused", refusal.detail)
    if marked.text != judge.text:
        return Outcome("unsaid", "another form of the chat")
    turns = [judge.turn(number) for number, message in enumerate(messages) if message["role"] == "assistant"]
    starts, ends = {start for start, _ in turns}, {end for _, end in turns}
    is_trained = [False] * (len(marked.text) + 1)
    for start, end in marked.trained:
        is_trained[start:end] = [True] * (end - start)
    for start, end in turns:  # turns may touch
        if start is not None and not (
            is_trained[start] and (start == 0 or not is_trained[start - 1] or {start, None} & ends)
        ):
            return Outcome("different", f"does not start before {marked.text[start : start + 40]!r}")
        if end is not None and not (is_trained[end - 1] and (not is_trained[end] or {end, None} & starts)):
            return Outcome("different", f"does not end after {marked.text[max(0, end - 40) : end]!r}")
    return Outcome("unsaid" if None in starts | ends else "exact")


def outcomes() -> Iterator[tuple[str, str, Outcome]]:
    """Yield template, shape and outcome for all of them."""
    from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

    for name, source in held_out_templates().items():
        if re.search(r"{%-?\s*generation\s*-?%}", source):
            continue  # it says itself what a turn is
        found = [stop for stop in _STOPS if stop in source] or ["</s>"]
        # Models that end a turn with the next one's header stop at it.
        stops = ["<|endoftext|>", "<|user|>", "<|observation|>"] if "<|observation|>" in source else found
        tokenizer = ByteTokenizer(
            list(dict.fromkeys([*TOKENS.findall(source), "<s>", *stops])), bos="<s>", eos=stops[0], stops=stops
        )
        encoder = RecordEncoder(tokenizer, TemplateOptions(source, date="2026-01-31"), EncodeOptions())
        try:
            encoder.marker()
            template = _compile_jinja_template(source)
        except InvalidInputError as error:
            yield name, "", Outcome("unusable", str(error))
            continue
        template.globals["strftime_now"] = datetime.datetime(2026, 1, 31).strftime

        def render(
            messages: Sequence[dict[str, Any]],
            tools: Any,
            *,
            add_generation_prompt: bool = False,
            source: str = source,
            eos: str = stops[0],
        ) -> str:
            texts, _ = render_jinja_template(
                [list(messages)],
                tools=tools,
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                bos_token="<s>",
                eos_token=eos,
            )
            return str(texts[0])

        for kind in SHAPES:
            yield name, kind, compare(encoder, render, stops, kind)


def main() -> None:
    """Print what was counted, and everything that is different or refused."""
    counts: Counter[str] = Counter()
    for name, kind, outcome in outcomes():
        counts[outcome.kind] += 1
        if outcome.kind in ("different", "refused", "unusable"):
            print(f"{name}, {kind}: {outcome.kind}: {outcome.detail[:160]}")
    print(", ".join(f"{number} {kind}" for kind, number in counts.most_common()))


if __name__ == "__main__":
    main()
