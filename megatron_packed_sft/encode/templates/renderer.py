"""Sandboxed Jinja, set up as Hugging Face's chat templates expect; the result depends on no clock or machine."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Environment, Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from megatron_packed_sft.encode.templates.json_text import json_text
from megatron_packed_sft.encode.templates.limits import (
    LimitedEnvironment,
    TemplateLimitError,
    interruptible,
    limited_parts,
)
from megatron_packed_sft.encode.templates.shortcuts import QuickNamespace, ShortcutGenerator, use_shortcuts
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.support.drop_reasons import DropReason
from megatron_packed_sft.support.wording import shortened

# Variables that stand where a generation block begins and ends: empty texts, but traced renders see events there.
BLOCK_BEGINS, BLOCK_ENDS = "generation_block_begins", "generation_block_ends"
_MOST_CHARACTERS = 200_000  # of a template; those that are in use have some thousands


class RecordRefusedError(PackedSFTError):
    """A record cannot be encoded: `reason` is counted, `detail` explains it."""

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


class _Environment(LimitedEnvironment):
    code_generator_class = ShortcutGenerator


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
        r"""Return the variables that the template wants from outside, besides the messages and what is always there.

        Example:
            >>> Renderer("{{ bos_token }}{% if enable_thinking is defined %}<think>{% endif %}").asked_variables()
            ['bos_token', 'enable_thinking']
        """
        always = {"messages", "add_generation_prompt", BLOCK_BEGINS, BLOCK_ENDS, *self._globals}
        own = {name.name for name in self.tree.find_all(nodes.Name) if name.ctx != "load"}
        # What a template sets itself may still come from outside, if it asks whether it is there.
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
            # A template can raise anything; whatever it was, this record cannot be rendered.
            reason = shortened(f"{type(error).__name__}: {error}")
            raise RecordRefusedError(DropReason.TEMPLATE_ERROR, f"{self.name}: {reason}") from None


@contextlib.contextmanager
def compiling(name: str, source: str) -> Iterator[None]:
    """Refuse a template that cannot be compiled."""
    if len(source) > _MOST_CHARACTERS:
        raise InvalidInputError(
            f"{name} has {len(source):,} characters, and a chat template at most {_MOST_CHARACTERS:,}; choose another"
        )
    try:
        with interruptible():
            yield
    except TemplateLimitError as error:
        raise InvalidInputError(f"{name} {error}; fix the template or choose another") from None
    except TemplateSyntaxError as error:
        problem = shortened(error.message or "cannot be parsed")
        raise InvalidInputError(f"{name}, line {error.lineno}: {problem}; fix the template or choose another") from None
    except (RecursionError, MemoryError, SyntaxError):  # of Jinja's parser, or of Python's with what Jinja wrote
        raise InvalidInputError(f"{name} is nested too deeply to be compiled; simplify it or choose another") from None


@lru_cache(maxsize=16)
def _compiled(source: str, name: str, date: str | None) -> tuple[nodes.Template, Template, Mapping[str, Any]]:
    """Return a template's tree, the template and its globals; records with variables of their own share it."""
    environment = _Environment()
    prepare_environment(environment, name, date)
    environment.globals["namespace"] = QuickNamespace
    with compiling(name, source):
        tree = environment.parse(source)
        template = environment.from_string(source)
    use_shortcuts(template)
    # Jinja would rebuild its globals for every render, which takes a fifth of a short chat's time.
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
