"""Rendering with authored texts: one render gives the text, the author of every character, and loop events."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import Template, filters, nodes, pass_eval_context, tests
from jinja2.runtime import Context, LoopContext
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from megatron_packed_sft.encode.masks.authored_text import (
    Author,
    AuthoredText,
    Event,
    build_text,
    concatenate,
    constant,
    event,
    first_author,
    is_constant,
    marked_as_safe,
    percent_format,
    plain_text,
)
from megatron_packed_sft.encode.masks.authored_values import (
    AuthoredChat,
    AuthoredDict,
    AuthoredList,
    AuthoredMessage,
    has_authors,
    length_of,
    to_json,
    without_authors,
)
from megatron_packed_sft.encode.templates.environment import (
    BLOCK_BEGINS,
    BLOCK_ENDS,
    LimitedEnvironment,
    compiling,
    limited_parts,
    prepare_environment,
)
from megatron_packed_sft.encode.templates.renderer import Renderer

_DICT_METHODS = frozenset({"items", "keys", "values", "get", "copy"})
_LIST_METHODS = frozenset({"index", "count", "copy"})
_DICT_ATTRIBUTES = frozenset(dir(dict))
_TEXT_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format_map", "encode", "translate"}
# Filters that only call methods of their values, so that authored texts keep their authors.
_TRANSPARENT = frozenset(
    {
        *("trim", "string", "replace", "upper", "lower", "default", "d", "first", "last", "list", "map", "select"),
        *("reject", "selectattr", "rejectattr", "items", "dictsort", "groupby", "unique", "sort", "reverse", "batch"),
        *("slice", "attr", "abs", "round", "min", "max", "sum", "capitalize"),
    }
)


class Span(NamedTuple):
    """Characters that one author wrote."""

    start: int
    end: int
    author: Author


class Mark(NamedTuple):
    """An event and where it happened."""

    position: int
    event: Event


class TracedText:
    """A render: its text, what messages and tools wrote in it, and events between characters."""

    def __init__(self, whole: AuthoredText) -> None:
        self.whole = whole
        self.text = plain_text(whole)
        self.spans: list[Span] = []
        self.marks: list[Mark] = []
        position = 0
        for length, author in whole.authors:
            if isinstance(author, Event):
                self.marks.append(Mark(position, author))
            elif author is not None and length:
                last = self.spans[-1] if self.spans else None
                if last is not None and last.end == position and last.author == author:
                    self.spans[-1] = Span(last.start, position + length, author)
                else:
                    self.spans.append(Span(position, position + length, author))
            position += length


class TracedRenderer:
    """The template of a `Renderer`, instrumented.

    Args:
        renderer: the plain renderer, whose text a traced render must equal.

    Example:
        >>> renderer = TracedRenderer(Renderer("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"))
        >>> traced = renderer.render([{"role": "user", "content": " Hi "}])
        >>> traced.text, [(span.start, span.end, span.author.path) for span in traced.spans]
        ('[Hi]', [(1, 3, ('content',))])
    """

    def __init__(self, renderer: Renderer) -> None:
        self._template, defaults = _compiled(renderer.source, renderer.name, renderer.date)
        self.name = renderer.name
        self._renderer = renderer
        self._variables = {**defaults, **renderer.variables}

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        chat: AuthoredChat | None = None,
        *,
        add_generation_prompt: bool = False,
        is_probe: bool = False,
    ) -> TracedText:
        """Render a chat; raise RecordRefusedError, as the plain renderer does, if the template cannot.

        Args:
            messages: the first messages of the chat.
            chat: what renders of the same chat share: its tools and its recorder.
            add_generation_prompt: the variable of that name.
            is_probe: whether some messages are not the record's.
        """
        chat = chat or AuthoredChat()
        variables = {
            **self._variables,
            "messages": chat.messages(messages, is_probe=is_probe),
            "tools": chat.tools,
            "add_generation_prompt": add_generation_prompt,
            BLOCK_BEGINS: event("begin"),
            BLOCK_ENDS: event("end"),
        }
        context = self._template.new_context(variables, shared=True)
        with self._renderer.refusing():
            return TracedText(_all_joined(self._template.root_render_func(context)))


@lru_cache(maxsize=16)
def _compiled(source: str, name: str, date: str | None) -> tuple[Template, dict[str, Any]]:
    """Return an instrumented template and its globals."""
    environment = _Environment(optimized=False)
    prepare_environment(environment, name, date)
    environment.concat = _concatenated  # type: ignore[method-assign]
    for filter_name, function in list(environment.filters.items()):
        if filter_name not in _TRANSPARENT:
            environment.filters[filter_name] = _opaque(filter_name, function)
    environment.filters.update(_FILTERS)
    environment.tests.update(_tests())
    with compiling(name, source):  # instrumentation nests it more deeply
        tree = _Instrument().visit(environment.parse(source))
        code = environment.compile(tree)
        template = environment.template_class.from_code(environment, code, environment.make_globals(None))
    return template, environment.globals


class _Environment(LimitedEnvironment):
    def call(__self, __context: Context, __obj: Any, *arguments: Any, **named: Any) -> Any:  # noqa: N805
        owner = getattr(__obj, "__self__", None)
        if type(owner) is str and (has_authors(arguments) or has_authors(named)):
            # "constant".join(texts) would lose their authors
            __obj = getattr(constant(owner), __obj.__name__)
        elif owner is datetime.datetime:
            arguments = without_authors(arguments)
        return super().call(__context, __obj, *arguments, **named)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, AuthoredDict):
            obj.touch()
            if attribute not in _DICT_ATTRIBUTES:
                found = dict.get(obj, attribute, self)
                return self.undefined(obj=obj.raw, name=attribute) if found is self else found
            return getattr(obj, attribute) if attribute in _DICT_METHODS else super().getattr(obj.raw, attribute)
        if isinstance(obj, AuthoredText):
            if attribute in _TEXT_METHODS:
                return getattr(obj, attribute)
            return super().getattr(plain_text(obj), attribute)
        if isinstance(obj, AuthoredList):
            return getattr(obj, attribute) if attribute in _LIST_METHODS else super().getattr(obj.raw, attribute)
        if (type(obj) is LoopContext or type(obj) is Namespace) and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)  # what Jinja returns after many more checks
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        found = super().getattr(obj, attribute)
        if type(obj) is str and attribute == "format":
            return _formatting(obj, found)  # the sandbox hides the owner of the method
        return found

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, AuthoredText) and isinstance(argument, str):
            return self.getattr(obj, plain_text(argument))
        if isinstance(obj, AuthoredDict) and isinstance(argument, str) and not dict.__contains__(obj, argument):
            return self.getattr(obj, plain_text(argument))
        return super().getitem(obj, argument)


class _Instrument(NodeTransformer):
    """Turns operations that a `str` subclass cannot intercept into filters, and marks iterations."""

    def __init__(self) -> None:
        self._num_loops = 0

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802 (Jinja's name)
        self.generic_visit(node)
        if len(node.ops) == 1 and node.ops[0].op in ("in", "notin"):
            found = _filter(node.expr, "_in", node.lineno, node.ops[0].expr)
            return found if node.ops[0].op == "in" else nodes.Not(found, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 (Jinja's name)
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_concat", node.lineno)

    def visit_Mod(self, node: nodes.Mod) -> nodes.Node:  # noqa: N802 (Jinja's name)
        self.generic_visit(node)
        return _filter(node.left, "_mod", node.lineno, node.right)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802 (Jinja's name)
        self.generic_visit(node)
        # Where a text marked as safe is written at once, `safe` changes nothing.
        node.nodes = [
            child.node if isinstance(child, nodes.Filter) and child.name == "safe" and child.node is not None else child
            for child in node.nodes
        ]
        return node

    def visit_For(self, node: nodes.For) -> Any:  # noqa: N802 (Jinja's name)
        self.generic_visit(node)
        if not isinstance(node.target, nodes.Name):
            return node
        self._num_loops += 1
        loop = nodes.Const(self._num_loops, lineno=node.lineno)
        names = (
            _filter(nodes.Name(node.target.name, "load"), mark, node.lineno, loop) for mark in ("_enter", "_leave")
        )
        enter, leave = (nodes.Output([name], lineno=node.lineno) for name in names)
        node.body = [enter, *node.body, leave]
        # `continue` skips the mark at the end of an iteration.
        after = nodes.Output([_filter(loop, "_after", node.lineno)], lineno=node.lineno)
        return [node, after]


def _concatenated(texts: Iterable[Any]) -> AuthoredText:
    return concatenate(_as_texts(texts))


def _all_joined(texts: Iterable[Any]) -> AuthoredText:
    """Join the texts that the whole template writes."""
    return concatenate(["", *limited_parts(_as_texts(texts))])


def _as_texts(values: Iterable[Any]) -> Iterator[str]:
    return (value if isinstance(value, str) else str(value) for value in values)


def _filter(value: nodes.Expr, name: str, line: int, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(arguments), [], None, None, lineno=line)


def _mark(kind: str) -> Callable[[Any, int], str]:
    return lambda value, loop: event(kind, value.number, loop) if isinstance(value, AuthoredMessage) else ""


def _contains(value: Any, container: Any) -> bool:
    if isinstance(value, AuthoredText) and type(container) is str:
        container = constant(container)
    return value in container


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, str) and has_authors(right):
        return percent_format(left, right if isinstance(right, tuple) else (right,))
    return left % right


def _join(eval_ctx: nodes.EvalContext, value: Any, d: str = "", attribute: Any = None) -> Any:
    if attribute is not None:
        value = map(filters.make_attrgetter(eval_ctx.environment, attribute), value)
    return constant(d).join([item if isinstance(item, str) else str(item) for item in value])


def _number(function: Callable[..., Any]) -> Callable[..., Any]:
    def numeric(value: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(value, AuthoredText):
            hash(value)  # guards the value
            value = plain_text(value)
        return function(value, *arguments, **named)

    return numeric


def _indent(value: Any, width: Any = 4, first: bool = False, blank: bool = False) -> Any:
    text = constant(value)
    prefix = width if isinstance(width, str) else " " * int(width)
    fragments: list[Any] = [prefix] if first else []
    for number, line in enumerate((text + "\n").splitlines()):
        if number:
            fragments.append("\n")
            if blank or line:
                fragments.append(prefix)
        fragments.append(line)
    return concatenate(fragments or [""])


def _format(value: Any, *arguments: Any, **named: Any) -> Any:
    if named:
        return _opaque("format", filters.do_format)(value, *arguments, **named)
    return percent_format(value, arguments)


def _title(value: Any) -> Any:
    text = constant(value)
    expected = filters.do_title(plain_text(text))
    if is_constant(text) or not first_author(text.authors):
        return build_text(expected, [(len(expected), first_author(text.authors))], [(expected, None)], None)
    hash(text)
    return build_text(expected, [(len(expected), first_author(text.authors))], [(expected, None)], None)


def _formatting(pattern: str, sandboxed: Callable[..., str]) -> Callable[..., str]:
    def formatted(*values: Any, **named: Any) -> str:
        if not has_authors(values) and not has_authors(named):
            return sandboxed(*values, **named)
        try:
            return constant(pattern).format(*values, **named)
        except TypeError:  # fields with attributes or specifications
            return str(_opaque("format", sandboxed)(*values, **named))

    return formatted


def _give_up(value: Any, obstacle: str) -> None:
    if isinstance(value, AuthoredText | AuthoredDict | AuthoredList):
        if value.recorder is not None:
            value.recorder.give_up(obstacle)
    elif isinstance(value, list | tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            _give_up(inner, obstacle)


def _opaque(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter that may lose authors: all of its text then belongs to the first author."""

    def filtered(*arguments: Any, **named: Any) -> Any:
        if not has_authors(arguments) and not has_authors(named):
            return function(*arguments, **named)
        _give_up(arguments, f"filter {name}")
        _give_up(named, f"filter {name}")
        result = function(*map(without_authors, arguments), **{key: without_authors(named[key]) for key in named})
        if not isinstance(result, str):
            return result
        texts = (argument for argument in arguments if isinstance(argument, AuthoredText))
        author = next((first_author(text.authors) for text in texts), None)
        return build_text(result, [(len(result), author)], [(result, None)], None)

    if hasattr(function, "jinja_pass_arg"):
        filtered.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return filtered


_FILTERS: dict[str, Callable[..., Any]] = {
    "tojson": to_json,
    "join": pass_eval_context(_join),
    "safe": marked_as_safe,
    "length": length_of,
    "count": length_of,
    "int": _number(filters.do_int),
    "float": _number(filters.do_float),
    "indent": _indent,
    "format": _format,
    "title": _title,
    "_in": _contains,
    "_mod": _modulo,
    "_concat": _concatenated,
    "_enter": _mark("enter"),
    "_leave": _mark("leave"),
    "_after": lambda loop: event("after", loop=loop),
}


def _tests() -> dict[str, Callable[..., Any]]:
    def is_sequence(value: Any) -> bool:
        return isinstance(value, str | AuthoredDict | AuthoredList) or tests.test_sequence(value)

    def is_iterable(value: Any) -> bool:
        return isinstance(value, str | AuthoredDict | AuthoredList) or tests.test_iterable(value)

    return {
        "sequence": is_sequence,
        "iterable": is_iterable,
        "in": _contains,
        "lower": _number(tests.test_lower),
        "upper": _number(tests.test_upper),
    }
