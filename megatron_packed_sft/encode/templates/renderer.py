"""Chat templates rendered: a compiled template, and the forms in which it may expect a chat."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

from jinja2 import Template, meta, nodes

from megatron_packed_sft.encode.templates.environment import (
    BLOCK_BEGINS,
    BLOCK_ENDS,
    LimitedEnvironment,
    QuickNamespace,
    ShortcutGenerator,
    TemplateLimitError,
    compiling,
    interruptible,
    limited_parts,
    prepare_environment,
    use_shortcuts,
)
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.support.drop_reasons import DropReason
from megatron_packed_sft.support.wording import shortened


class RecordRefusedError(PackedSFTError):
    """A record cannot be encoded; `reason` is counted, and `detail` explains it."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Renderer:
    r"""A compiled chat template.

    Args:
        source: the Jinja text.
        name: its name in errors.
        variables: variables of every render, such as `bos_token`.
        date: the date that `strftime_now` formats, as YYYY-MM-DD.

    Example:
        >>> renderer = Renderer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
        >>> renderer.render([{"role": "user", "content": "Hi"}])
        'user: Hi\n'
    """

    def __init__(
        self,
        source: str,
        *,
        name: str = "chat template",
        variables: Mapping[str, Any] | None = None,
        date: str | None = None,
    ) -> None:
        self.tree, self._template, defaults = _compiled(source, name, date)
        self.name = name
        self.source = source
        self.date = date
        self.variables = {"documents": None, **(variables or {})}
        self._globals = frozenset(defaults)
        self._variables = {**defaults, **self.variables}
        blocks = _generation_blocks(self.tree)
        if any(_generation_blocks(block) for block in blocks):
            raise InvalidInputError(f"{name} has a generation block inside another; remove one of them")
        self.has_generation_marks = bool(blocks)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render a chat; RecordRefusedError if the template cannot."""
        variables = {
            **self._variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            BLOCK_BEGINS: "",
            BLOCK_ENDS: "",
        }
        with self.refusing():
            context = self._template.new_context(variables, shared=True)
            return "".join(limited_parts(self._template.root_render_func(context)))

    def asked_variables(self) -> list[str]:
        r"""Return the variables that the template reads from outside, besides messages and what is always set.

        Example:
            >>> Renderer("{{ bos_token }}{% if enable_thinking is defined %}<think>{% endif %}").asked_variables()
            ['bos_token', 'enable_thinking']
        """
        always = {"messages", "add_generation_prompt", BLOCK_BEGINS, BLOCK_ENDS, *self._globals}
        own = {name.name for name in self.tree.find_all(nodes.Name) if name.ctx != "load"}
        # A variable that the template sets may still come from outside, if the template tests whether it is defined.
        tested = {
            test.node.name
            for test in self.tree.find_all(nodes.Test)
            if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name)
        }
        undeclared = meta.find_undeclared_variables(self.tree)
        return sorted(((undeclared - own) | (undeclared & tested)) - always)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse the record whose render fails inside, or takes too long."""
        try:
            with interruptible():
                yield
        except InvalidInputError:
            raise
        except TemplateLimitError as error:
            detail = f"{self.name} {error}; shorten the record, or fix the template"
            raise RecordRefusedError(DropReason.TEMPLATE_ERROR, detail) from None
        except (RecursionError, MemoryError) as error:
            what = "recurses too deeply" if isinstance(error, RecursionError) else "needs more memory than there is"
            detail = f"{self.name} {what}; shorten the record, or fix the template"
            raise RecordRefusedError(DropReason.TEMPLATE_ERROR, detail) from None
        except Exception as error:
            # A template can raise any exception.
            reason = shortened(f"{type(error).__name__}: {error}")
            raise RecordRefusedError(DropReason.TEMPLATE_ERROR, f"{self.name}: {reason}") from None


@lru_cache(maxsize=16)
def _compiled(source: str, name: str, date: str | None) -> tuple[nodes.Template, Template, Mapping[str, Any]]:
    """Return a template's tree, the template and its globals; records with different variables share them."""
    environment = LimitedEnvironment()
    environment.code_generator_class = ShortcutGenerator
    prepare_environment(environment, name, date)
    environment.globals["namespace"] = QuickNamespace
    with compiling(name, source):
        tree = environment.parse(source)
        template = environment.from_string(source)
    use_shortcuts(template)
    # Jinja would rebuild its globals in every render, a fifth of the time for a short chat.
    defaults = dict(template.globals)
    template.globals = {}
    return tree, template, defaults


def _generation_blocks(inside: nodes.Node) -> list[nodes.Scope]:
    return [block for block in inside.find_all(nodes.Scope) if _is_begin(block.body[0])]


def _is_begin(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.Output) and isinstance(node.nodes[0], nodes.Name) and node.nodes[0].name == BLOCK_BEGINS
    )


# The same chat in the different forms that templates expect.

Message = dict[str, Any]

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_OTHER_KEYS = {key: frozenset(REASONING_KEYS) - {key} for key in REASONING_KEYS}
_ID_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ID_LENGTH = 9  # as Mistral's templates require


def reasoning_key(tree: nodes.Template) -> str | None:
    """Return the name under which a template reads a message's reasoning; None if it reads none.

    Example:
        >>> from jinja2 import Environment
        >>> reasoning_key(Environment().parse("{{ messages[0].thinking }}"))
        'thinking'
    """
    read = {node.attr for node in tree.find_all(nodes.Getattr)}
    read |= {node.arg.value for node in tree.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const)}
    for call in tree.find_all(nodes.Call):  # message.get('reasoning')
        if isinstance(call.node, nodes.Getattr) and call.node.attr == "get":
            read |= {argument.value for argument in call.args[:1] if isinstance(argument, nodes.Const)}
    return next((key for key in REASONING_KEYS if key in read), None)


def with_reasoning_under(key: str | None, messages: Sequence[Message]) -> Sequence[Message]:
    """Return a chat with its reasoning under the key that a template reads."""
    if key is None or all(map(_OTHER_KEYS[key].isdisjoint, messages)):
        return messages
    return [_rename_reasoning(key, message) for message in messages]


def _rename_reasoning(key: str, message: Message) -> Message:
    other = next((name for name in REASONING_KEYS if isinstance(message.get(name), str)), None)
    if other is None or isinstance(message.get(key), str):
        return message
    return {key if name == other else name: value for name, value in message.items() if name == other or name != key}


def with_content_in_parts(messages: Sequence[Message]) -> list[Message]:
    """Return a chat whose contents are lists of parts, as templates of models that also see images read them.

    Example:
        >>> with_content_in_parts([{"role": "user", "content": "Hi"}])
        [{'role': 'user', 'content': [{'type': 'text', 'text': 'Hi'}]}]
    """
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def forms_of(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield a chat as it is, and then in other forms, until the template renders one of them.

    The forms differ in how missing content is written (no key, null, an empty text), in the arguments of a call (an
    object or JSON text) and in its id (nine letters or digits).
    """
    yield list(messages)
    seen = [list(messages)]
    if not any("tool_calls" in message or message.get("content") is None for message in messages):
        return
    contents: tuple[Callable[[Message], Message], ...] = (_same, _null_content, _empty_content)
    for change_ids, change_call, change_content in product((False, True), (_same, _other_arguments), contents):
        form = [change_content(_with_calls(message, change_call)) for message in messages]
        if change_ids:
            form = _with_short_ids(form)
        if form not in seen:
            seen.append(form)
            yield form


def _same(value: Any) -> Any:
    return value


def _null_content(message: Message) -> Message:
    if message.get("content") or (message.get("content") == "" and "tool_calls" not in message):
        return message
    return {"role": message.get("role"), **message, "content": None}


def _empty_content(message: Message) -> Message:
    return message if message.get("content") is not None else {"role": message.get("role"), **message, "content": ""}


def _with_calls(message: Message, change: Callable[[Any], Any]) -> Message:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}


def _other_arguments(call: Any) -> Any:
    """Return a call with its arguments as JSON text instead of an object, or the other way round."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call
    else:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Give every call an id of nine letters or digits, the same for the call and its result."""
    numbers: dict[str, str] = {}

    def short(identifier: Any) -> str:
        text = str(identifier)
        if len(text) == _ID_LENGTH and text.isalnum():
            return text
        if text not in numbers:
            numbers[text] = _number_as_id(len(numbers))
        return numbers[text]

    result, position = [], 0
    waiting: list[str] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = []
            for call in message["tool_calls"]:
                identifier = short(call.get("id", f"call {position}")) if isinstance(call, dict) else ""
                position += 1
                waiting.append(identifier)
                calls.append({**call, "id": identifier} if isinstance(call, dict) else call)
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool":
            known = message.get("tool_call_id")
            identifier = short(known) if known is not None else waiting[0] if waiting else short("call")
            if identifier in waiting:
                waiting.remove(identifier)
            message = {**message, "tool_call_id": identifier}
        result.append(message)
    return result


def _number_as_id(number: int) -> str:
    digits = ""
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_ID_CHARACTERS))
        digits = _ID_CHARACTERS[digit] + digits
    return digits
