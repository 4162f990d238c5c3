"""Chat templates rendered in Jinja's sandbox, set up as Hugging Face does; the text depends on no clock or machine."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from json import encoder as json_encoder
from typing import Any

import orjson
from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from megatron_packed_sft.encode.templates.limits import (
    LimitedEnvironment,
    TemplateLimitError,
    interruptible,
    limited_parts,
)
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.support.drop_reasons import DropReason
from megatron_packed_sft.support.wording import shortened

# Variables written where a generation block begins and ends: empty texts, which a traced render replaces by events.
BLOCK_BEGINS, BLOCK_ENDS = "generation_block_begins", "generation_block_ends"
_MOST_CHARACTERS = 200_000  # of a template; real ones have some thousands


class RecordRefusedError(PackedSFTError):
    """A record cannot be encoded; `reason` is counted, and `detail` explains it."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class _Generation(Extension):
    """The tag `{% generation %} ... {% endgeneration %}` around what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")], lineno=line) for name in (BLOCK_BEGINS, BLOCK_ENDS))
        return nodes.Scope([begin, *body, end], lineno=line)  # variables set inside are not visible outside


class _Dict:
    """The global `dict`, without access to the class."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


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


@contextlib.contextmanager
def compiling(name: str, source: str) -> Iterator[None]:
    """Refuse a template that cannot be compiled."""
    if len(source) > _MOST_CHARACTERS:
        raise InvalidInputError(
            f"{name} has {len(source):,} characters, but a chat template may have {_MOST_CHARACTERS:,}; choose another"
        )
    try:
        with interruptible():
            yield
    except TemplateLimitError as error:
        raise InvalidInputError(f"{name} {error}; fix the template or choose another") from None
    except TemplateSyntaxError as error:
        problem = shortened(error.message or "cannot be parsed")
        raise InvalidInputError(f"{name}, line {error.lineno}: {problem}; fix the template or choose another") from None
    except (RecursionError, MemoryError, SyntaxError):  # from Jinja's parser, or from Python's compiler
        raise InvalidInputError(f"{name} is nested too deeply to be compiled; simplify it or choose another") from None


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


def prepare_environment(environment: Environment, name: str, date: str | None) -> None:
    """Set a Jinja environment up as Hugging Face's chat templates expect it."""
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.add_extension(_Generation)
    environment.add_extension(loopcontrols)
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_clock(name, date), dict=_Dict())


def _generation_blocks(inside: nodes.Node) -> list[nodes.Scope]:
    return [block for block in inside.find_all(nodes.Scope) if _is_begin(block.body[0])]


def _is_begin(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.Output) and isinstance(node.nodes[0], nodes.Name) and node.nodes[0].name == BLOCK_BEGINS
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML and sorts keys; chat templates expect neither.
    return json_text(value, (ensure_ascii, indent, tuple(separators) if separators else None, sort_keys))


def _clock(name: str, date: str | None) -> Callable[[str], str]:
    if date is None:

        def refuse(_: str) -> str:
            raise InvalidInputError(
                f"{name} writes today's date, so ids would differ between runs; set template.date, such as 2026-01-31"
            )

        return refuse
    try:
        now = datetime.datetime.strptime(date, "%Y-%m-%d")
    except ValueError:
        raise InvalidInputError(f"template.date is {date!r}; write it as YYYY-MM-DD, such as '2026-01-31'") from None
    return now.strftime


# JSON as chat templates write it. The texts of tools, which repeat from record to record, are kept.

JsonSettings = tuple[bool, Any, Any, bool]  # ensure_ascii, indent, separators, sort_keys

_MAX_TEXTS = 4096
_encoders: dict[JsonSettings, tuple[Callable[[Any], str], dict[bytes, str]]] = {}


def json_text(value: Any, settings: JsonSettings) -> str:
    """Return the JSON text of a plain value, as `tojson` with these settings writes it.

    Tools repeat from record to record, so their texts are cached; orjson computes the key ten times as fast.

    Example:
        >>> json_text({"city": "Oslo", "days": [1, 2.5]}, (False, None, None, False))
        '{"city": "Oslo", "days": [1, 2.5]}'
    """
    known = _encoders.get(settings)
    if known is None:
        known = _encoders[settings] = (_encoder(settings), {})
    encode, texts = known
    if not (type(value) is list or (type(value) is dict and "function" in value)):
        return encode(value)
    try:
        key = orjson.dumps(value)
    except TypeError:  # numbers beyond 64 bits, or half a surrogate pair
        return encode(value)
    if b"null" in key:  # None, or a NaN, which orjson writes alike
        return encode(value)
    text = texts.get(key)
    if text is None:
        if len(texts) >= _MAX_TEXTS:
            texts.clear()
        text = texts[key] = encode(value)
    return text


def json_inside(text: str, ensure_ascii: bool) -> str:
    """Return a text as JSON writes it between quotes."""
    escape = json_encoder.encode_basestring_ascii if ensure_ascii else json_encoder.encode_basestring
    return escape(text)[1:-1]


def _encoder(settings: JsonSettings) -> Callable[[Any], str]:
    ensure_ascii, indent, separators, sort_keys = settings
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    make: Any = getattr(json_encoder, "c_make_encoder", None)
    if indent is not None or make is None:
        return encoder.encode
    # `encode` creates this for every value, which takes three times as long as encoding a small one.
    escape = json_encoder.encode_basestring_ascii if ensure_ascii else json_encoder.encode_basestring
    parts = make(
        None, encoder.default, escape, None, encoder.key_separator, encoder.item_separator, sort_keys, False, True
    )
    return lambda value: "".join(parts(value, 0))


# A code generator for Jinja with shorter code for what chat templates do most, which halves the time of a render.
#
# Jinja compiles `message.role` to a call of `environment.getattr`, which makes about twenty checks of types. A
# message is nearly always a dict, so the generated code checks that first:
#
#     ((_it['role'] if 'role' in _it else undefined(obj=_it, name='role'))
#      if type(_it := l_1_message) is dict else environment.getattr(_it, 'role'))
#
# The same goes for `loop.first`, attributes of namespaces, `content.split(...)` and `messages[0]`. A shortcut returns
# what Jinja would return, and everything else still goes through Jinja, so the text never differs.

_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset({"index0", "index", "first", "last", "length", "revindex", "revindex0"})
# Without `format`, through which a template could reach attributes of its arguments.
_STRING_METHODS = frozenset(
    {"endswith", "lower", "lstrip", "replace", "rstrip", "split", "startswith", "strip", "upper"}
)


class QuickNamespace(Namespace):
    """A `namespace` that keeps its values as Python keeps attributes."""

    __getattribute__ = object.__getattribute__

    def __init__(*arguments: Any, **named: Any) -> None:  # a value may be called `self`
        arguments[0].__dict__.update(dict(*arguments[1:], **named))

    def __setitem__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    def __repr__(self) -> str:
        return f"<Namespace {self.__dict__!r}>"


class QuickLoop(LoopContext):
    """A `loop` that a generator drives while it runs over a list."""

    def __iter__(self) -> Any:
        return self._over_list(self._iterable) if type(self._iterable) is list else self

    def _over_list(self, items: list[Any]) -> Iterator[tuple[Any, QuickLoop]]:
        self._length = len(items)
        for self.index0, item in enumerate(items):
            self._before, self._current = self._current, item
            yield item, self

    def _peek_next(self) -> Any:
        if type(self._iterable) is not list:
            return super()._peek_next()
        following = self._iterable[self.index0 + 1 : self.index0 + 2]
        return following[0] if following else self._after  # `missing`


class ShortcutGenerator(CodeGenerator):
    """Writes code with the shortcuts above."""

    _namespaces: frozenset[str] = frozenset()
    _conditions: frozenset[int] = frozenset()

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802 (Jinja's name)
        """Write a template."""
        self._namespaces = frozenset(_namespaces(node))
        self._conditions = frozenset(map(id, _conditions(node)))
        super().visit_Template(node, frame)

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802 (Jinja's name)
        """Write an attribute."""
        name, owner = node.attr, node.node.name if isinstance(node.node, nodes.Name) else None
        if name in _DICT_ATTRIBUTES or name.startswith("_"):
            super().visit_Getattr(node, frame)
        elif owner == "loop" and name in _LOOP_ATTRIBUTES:
            self._choose(f"_it.{name}", node.node, "is LoopContext", f"getattr(_it, {name!r})", frame)
        elif owner in self._namespaces:
            is_there = f"is QuickNamespace and {name!r} in _it.__dict__"
            self._choose(f"_it.{name}", node.node, is_there, f"getattr(_it, {name!r})", frame)
        else:
            missing = "False" if id(node) in self._conditions else f"undefined(obj=_it, name={name!r})"
            item = f"(_it[{name!r}] if {name!r} in _it else {missing})"
            self._choose(item, node.node, "is dict", f"getattr(_it, {name!r})", frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802 (Jinja's name)
        """Write an item."""
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
        if type(key) is str:
            self._choose(f"_it[{key!r}]", node.node, f"is dict and {key!r} in _it", f"getitem(_it, {key!r})", frame)
        elif type(key) is int and key >= 0:
            self._choose(f"_it[{key}]", node.node, f"is list and len(_it) > {key}", f"getitem(_it, {key})", frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802
        """Write a call; methods of plain strings need no check by the sandbox."""
        function = node.node
        is_plain = not (node.kwargs or node.dyn_args or node.dyn_kwargs or forward_caller)
        if not (isinstance(function, nodes.Getattr) and function.attr in _STRING_METHODS and is_plain):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.write(f"(_it.{function.attr}(")
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(") if type(_it := ")
        self.visit(function.node, frame)
        self.write(") is str else ")
        self.write(f"environment.call(context, environment.getattr(_it, {function.attr!r})")
        flags = {"_loop_vars": frame.loop_frame, "_block_vars": frame.block_frame}
        self.signature(node, frame, {name: name for name, is_set in flags.items() if is_set})
        self.write("))")

    def visit_Test(self, node: nodes.Test, frame: Frame) -> None:  # noqa: N802 (Jinja's name)
        """Write a test; `message.key is defined` asks the dict."""
        value = node.node
        if node.name != "defined" or not isinstance(value, nodes.Getattr) or value.attr in _DICT_ATTRIBUTES:
            super().visit_Test(node, frame)
            return
        test, name = self.tests["defined"], repr(value.attr)
        self.write(f"(({name} in _it and {test}(_it[{name}])) if type(_it := ")
        self.visit(value.node, frame)
        self.write(f") is dict else {test}(environment.getattr(_it, {name})))")

    def _choose(self, shortcut: str, value: nodes.Expr, kind: str, call: str, frame: Frame) -> None:
        """Write a shortcut that a value's kind allows, and the call of the environment for all others."""
        self.write(f"({shortcut} if type(_it := ")
        self.visit(value, frame)
        self.write(f") {kind} else environment.{call})")


def use_shortcuts(template: Template) -> None:
    """Add the names that the shortcuts use to a compiled template."""
    template.root_render_func.__globals__.update(LoopContext=QuickLoop, QuickNamespace=QuickNamespace)


def _conditions(tree: nodes.Template) -> Iterator[nodes.Node]:
    """Yield expressions whose truth is all that the template needs."""
    waiting: list[nodes.Node | None] = [node.test for node in tree.find_all(nodes.If)]
    waiting += [node.test for node in tree.find_all(nodes.CondExpr)]
    waiting += [node.node for node in tree.find_all(nodes.Not)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, nodes.And | nodes.Or):
            waiting += [node.left, node.right]
        elif node is not None:
            yield node


def _namespaces(tree: nodes.Template) -> Iterator[str]:
    """Yield the variables that a template makes with `namespace(...)`."""
    for assign in tree.find_all(nodes.Assign):
        function = assign.node.node if isinstance(assign.node, nodes.Call) else None
        if isinstance(function, nodes.Name) and function.name == "namespace" and isinstance(assign.target, nodes.Name):
            yield assign.target.name
