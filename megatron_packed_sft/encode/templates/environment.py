"""The Jinja environment of chat templates: set up as Hugging Face does, in a sandbox, with limits, and fast.

The text that a template writes depends on no clock and no machine.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from json import encoder as json_encoder
from types import FrameType
from typing import Any

import orjson
from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.wording import shortened

# Variables written where a generation block begins and ends: empty texts, which a traced render replaces by events.
BLOCK_BEGINS, BLOCK_ENDS = "generation_block_begins", "generation_block_ends"
_MOST_CHARACTERS = 200_000  # of a template; real ones have some thousands


def prepare_environment(environment: Environment, name: str, date: str | None) -> None:
    """Set a Jinja environment up as Hugging Face's chat templates expect it."""
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.add_extension(_Generation)
    environment.add_extension(loopcontrols)
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_clock(name, date), dict=_Dict())


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


# Limits of a template: computing time for each record, and characters of output.
#
# Jinja's sandbox keeps a template from the machine, but not from its time and memory. So a timer runs while records are
# encoded, and interrupts a template that computes for more than `MAX_SECONDS`. It counts the process's computing time
# (`ITIMER_VIRTUAL`), not wall-clock time, so a busy machine refuses no record that a quiet one would encode.
#
# The timer works in Python's main thread and on platforms with `signal.setitimer`. In other threads and on Windows,
# there is no limit. It interrupts Python code and long computations with whole numbers, but not a single call of C code
# that fills memory, such as `'x'.center(10**10)`.

MAX_SECONDS = 10  # computing time for all renders of a record
MAX_CHARACTERS = 64_000_000  # that a template may write for a chat, or repeat with `*`
_MAX_PARTS = 10_000_000  # pieces of text that a template may write for a chat
_MAX_CODE = 8_000_000  # characters of the Python code that a template is compiled to
_TICK = 1.0  # seconds


class TemplateLimitError(BaseException):
    """A template exceeds a limit; the message says how, in words that follow the template's name.

    Not an `Exception`: Jinja swallows those while it evaluates constants.
    """


class _Timer:
    """The state of this process's timer."""

    is_running = False
    seconds_left = 0
    is_interruptible = False  # a template is being rendered or compiled


_timer = _Timer()


@contextlib.contextmanager
def time_limited() -> Iterator[None]:
    """Run the timer: it gives all templates inside `MAX_SECONDS` together, counted anew by every `restart_timer`.

    Starting it takes a few microseconds, so put it around many records. Inside another one, this does nothing. The
    handler and the timer that were set before are restored.
    """
    if _timer.is_running or not hasattr(signal, "setitimer") or not _is_main_thread():
        yield
        return
    handler = signal.signal(signal.SIGVTALRM, _tick)
    before = signal.setitimer(signal.ITIMER_VIRTUAL, _TICK, _TICK)
    _timer.is_running = True
    restart_timer()
    try:
        yield
    finally:
        _timer.is_running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, *before)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if handler is None else handler)


def restart_timer() -> None:
    """Give the next record its full time."""
    _timer.seconds_left = MAX_SECONDS


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the timer interrupt the code inside with a TemplateLimitError; it interrupts nothing else."""
    with time_limited():
        if _timer.is_running and _is_main_thread():
            if _timer.seconds_left <= 0:
                raise _too_slow()
            _timer.is_interruptible = True
        try:
            yield
        finally:
            _timer.is_interruptible = False


def _tick(number: int, frame: FrameType | None) -> None:
    _timer.seconds_left -= 1
    if _timer.seconds_left <= 0 and _timer.is_interruptible:
        _timer.is_interruptible = False
        raise _too_slow()


def _too_slow() -> TemplateLimitError:
    return TemplateLimitError(f"took longer than {MAX_SECONDS} seconds")


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def limited_parts(parts: Iterable[str]) -> list[str]:
    """Return the texts that a template writes, to be joined; raise TemplateLimitError if they are too long."""
    found = list(islice(parts, _MAX_PARTS + 1))
    if len(found) > _MAX_PARTS or sum(map(str.__len__, found)) > MAX_CHARACTERS:
        raise TemplateLimitError(f"writes more than {MAX_CHARACTERS:,} characters")
    return found


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a limit on how often `*` repeats a text or a list."""

    # What is intercepted is not evaluated when a template is compiled, either.
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or a power."""
        many, times = (right, left) if isinstance(left, int) else (left, right)
        kind: Any = next((kind for kind in (str, bytes, list, tuple) if isinstance(many, kind)), None)
        if kind is not None and isinstance(times, int) and kind.__len__(many) * int(times) > MAX_CHARACTERS:
            raise TemplateLimitError(f"repeats a text or a list to a length of more than {MAX_CHARACTERS:,}")
        return super().call_binop(context, operator, left, right)

    def _compile(self, source: str, filename: str) -> Any:
        """Compile the Python code of a template, unless Jinja has evaluated constants in it that would take minutes."""
        if len(source) > _MAX_CODE:
            raise TemplateLimitError("has constants that are too long")
        return super()._compile(source, filename)


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
