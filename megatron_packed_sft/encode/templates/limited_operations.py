"""Operators, methods, filters and functions of templates that can make much out of little: each asks first."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, Template
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_packed_sft.encode.templates.limits import (
    SMALL,
    LimitedGenerator,
    TemplateLimitError,
    counted,
    inside_of,
    joined_markup,
    joined_values,
    made,
    size,
    take_characters,
    take_steps,
)

_MOST_BITS = 10_000  # of a whole number
_WIDEST = 64  # characters of an indentation or a separator in JSON
_DIGITS = re.compile(r"\d+")
_COMPUTED_WIDTH = re.compile(r":[^}]*\{")
# Encodings that take as long as a text is long; `punycode` and `idna` take the square of it.
_ENCODINGS = frozenset({"ascii", "iso8859-1", "utf-8", "utf-16", "utf-16-le", "utf-16-be", "utf-32"})


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose operators and methods of texts have limits."""

    code_generator_class = LimitedGenerator
    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a product, a power or a remainder, which is also how texts are formatted."""
        check_operator(operator, left, right)
        found = super().call_binop(context, operator, left, right)
        return made(found) if operator == "*" and isinstance(found, list | tuple) else found

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a method of a text with its limits; None if it needs none."""
        found = super().wrap_str_format(value)
        owner = getattr(value, "__self__", None)
        if found is None and not isinstance(owner, str | bytes | int) and owner is not int:
            return None
        method = limited_method(value if found is None else found, owner)
        return method if method is not value else None


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be too large."""
    if operator == "%":
        if isinstance(left, str | bytes):
            _check_percent(left, *(right if isinstance(right, tuple) else (right,)))
    elif isinstance(left, int) and isinstance(right, int):
        bits, more = int(left).bit_length(), int(right).bit_length()
        _check_bits(bits * max(0, int(right)) if operator == "**" else bits + more)
    elif operator == "*":
        many, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(times, int) and isinstance(many, str | bytes | list | tuple):
            take_characters(int(times) * size(many))


def limited_method(method: Any, owner: Any) -> Any:
    """Return a method that asks before it makes a long text; methods that cannot are returned as they are."""
    methods = (
        _NUMBER_METHODS
        if isinstance(owner, int) or owner is int
        else _METHODS
        if isinstance(owner, str | bytes)
        else {}
    )
    check = methods.get(getattr(method, "__name__", ""))
    if check is None:
        return method
    found = _limited(method, functools.partial(check, owner), joins=method.__name__ == "join")
    found.__self__ = owner  # type: ignore[attr-defined]
    return found


def _check_bits(number: int) -> None:
    if number > _MOST_BITS:
        raise TemplateLimitError(f"computes a number of more than {_MOST_BITS:,} bits; fix the template")


def _check_coding(text: Any, encoding: Any = "utf-8", *_: Any, **__: Any) -> None:
    name = codecs.lookup(_text(encoding)).name
    if name not in _ENCODINGS:
        raise TemplateLimitError(f"uses the encoding {name}, and not one of Unicode; fix the template")
    take_characters(4 * size(text))


def _limited(function: Callable[..., Any], check: Callable[..., Any], *, joins: bool = False) -> Callable[..., Any]:
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def limited(*arguments: Any, **named: Any) -> Any:
        passed, given = arguments[:num_passed], arguments[num_passed:]
        if joins and given and not isinstance(given[0], str | list | tuple | dict):
            given = (list(counted(given[0])), *given[1:])
        check(*given, **named)
        return function(*passed, *given, **named)

    return limited


def _check_width(text: Any, width: Any = 0, *_: Any, **named: Any) -> None:
    take_characters(_whole(named.get("width", width)))


def _check_tabs(text: Any, tabsize: Any = 8) -> None:
    take_characters(size(text) + _count(text, "\t") * _whole(tabsize))


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    text, old, new = _text(text), _text(old), _text(new)
    if str.__len__(new) * (str.__len__(text) + 1) >= SMALL:
        take_characters(size(text) + _count(text, old) * size(new))


def _check_join(separator: Any, values: Any = (), *_: Any, **__: Any) -> None:
    if isinstance(values, list | tuple | dict | str):
        take_characters(size(values) + (size(separator) + 1) * len(list(values)))


def _check_join_filter(values: Any, d: Any = "", *_: Any, **__: Any) -> None:
    _check_join(d, values)


def _check_translate(text: Any, table: Any = None) -> None:
    take_characters(size(text) * max(map(size, inside_of(table)), default=1) if isinstance(table, dict) else size(text))


def check_format(text: Any, *values: Any, **named: Any) -> None:
    """Refuse a text of which `format` would make too much."""
    if _COMPUTED_WIDTH.search(str.__str__(text)):
        raise TemplateLimitError("formats a value by a width that is computed; fix the template")
    _check_pattern(text, "{", [*values, *named.values()], takes_widths=False)


def _check_percent(text: Any, *values: Any, **named: Any) -> None:
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    _check_pattern(text, "%", [*values, *named.values()], takes_widths=_count(text, "*") > 0)


def _check_pattern(text: Any, mark: str, values: list[Any], *, takes_widths: bool) -> None:
    plain = str.__str__(text)
    widths = [*map(_whole, _DIGITS.findall(plain)), *(_whole(one) for one in values if takes_widths)]
    longest = max(map(size, values), default=0)
    take_characters(sum(widths) + str.__len__(plain) + longest * _count(plain, mark))


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    prefix = size(width) if isinstance(width, str) else _whole(width)
    take_characters(size(text) + prefix * (_count(_text(text), "\n") + 1))


def _check_wordwrap(
    text: Any, width: Any = 79, break_long_words: Any = True, wrapstring: Any = None, *_: Any, **__: Any
) -> None:
    take_steps(size(text))  # one of the slow ones
    take_characters(
        size(text) + (size(text) // max(1, _whole(width)) + _count(text, "\n") + 1) * size(wrapstring or "")
    )


def _check_int(value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str):
        _check_bits(4 * str.__len__(value))


def _check_parts(values: Any, number: Any = 0, *_: Any, **named: Any) -> None:
    _check_values(values)
    most = _whole(named.get("slices", named.get("linecount", number)))
    take_steps(most)


def _check_round(value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if max(_whole(precision), _whole(-precision if isinstance(precision, int) else 0)) > _WIDEST:
        raise TemplateLimitError(f"rounds to more than {_WIDEST} digits; fix the template")


def _json(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep `tojson` from wide indentations."""

    def limited(
        value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
    ) -> Any:
        if indent is not None or separators:
            for one in (indent, *(separators if isinstance(separators, list | tuple) else ())):
                if one is not None and (size(one) if isinstance(one, str) else _whole(one)) > _WIDEST:
                    raise TemplateLimitError(
                        f"indents or separates JSON by more than {_WIDEST} characters; fix the template"
                    )
        return made(function(value, ensure_ascii, indent, separators, sort_keys))

    return limited


def _check_lipsum(n: Any = 5, html: Any = True, min: Any = 20, max: Any = 100) -> None:
    take_characters(_whole(n) * _whole(max) * 16)


def _over_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count what a filter is about to look at."""
    place = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def counting(*arguments: Any, **named: Any) -> Any:
        if len(arguments) > place:
            _check_values(arguments[place])
        return function(*arguments, **named)

    return counting


def _check_values(values: Any) -> None:
    if not hasattr(type(values), "__next__"):  # whoever made it was counted
        counted(values)


def _looking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Look at what a function made."""

    @functools.wraps(function)
    def looking(*arguments: Any, **named: Any) -> Any:
        return made(function(*arguments, **named))

    return looking


def _sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep `sum` to numbers: sums of lists copy all of them each time."""

    @functools.wraps(function)
    def limited(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
        if isinstance(start, list | tuple):
            values = list(counted(iterable))
            take_characters(sum(map(size, values)) * (len(values) + 1))
            return function(environment, values, attribute, start)
        return function(environment, counted(iterable), attribute, start)

    return limited


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _count(text: Any, part: Any) -> int:
    if isinstance(text, bytes):
        return text.count(part if isinstance(part, bytes) else part.encode())
    return str.count(str.__str__(text), str.__str__(part)) if isinstance(text, str) else 0


def _whole(value: Any) -> int:
    """Return a number as an int, whatever it came as; 0 for what is none."""
    try:
        return max(0, int(value))
    except (TypeError, ValueError, OverflowError):
        return 0


_METHODS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _check_width),
    "expandtabs": _check_tabs,
    "replace": _check_replace,
    "join": _check_join,
    "translate": _check_translate,
    "encode": _check_coding,
    "decode": _check_coding,
    "hex": lambda text, *_, **__: take_characters(3 * size(text)),
    "format": check_format,
    "format_map": lambda text, values=None: check_format(
        text, *(inside_of(values) if isinstance(values, dict) else ())
    ),
}
_NUMBER_METHODS: dict[str, Callable[..., None]] = {
    "to_bytes": lambda _, length=1, *__, **___: take_characters(_whole(length)),
    "from_bytes": lambda _, given=b"", *__, **___: _check_bits(8 * size(given)),
}
_FILTERS: dict[str, Callable[..., None]] = {
    "center": _check_width,
    "replace": _check_replace,
    "join": _check_join_filter,
    "format": _check_percent,
    "_mod": lambda left, right=None: check_operator("%", left, right),
    "indent": _check_indent,
    "wordwrap": _check_wordwrap,
    "batch": _check_parts,
    "slice": _check_parts,
    "round": _check_round,
    "int": _check_int,
    "urlencode": lambda text, *_, **__: take_characters(12 * size(text)),
    **dict.fromkeys(("title", "pprint"), lambda text, *_, **__: take_steps(size(text))),  # slow ones
}
# Filters that look at every value.
_OVER_VALUES = (
    *("list", "sort", "unique", "groupby", "map", "reverse", "min", "max", "dictsort"),
    *("select", "reject", "selectattr", "rejectattr", "items", "random"),
)
# Filters whose texts may be longer than what they get, or that make lists.
_LOOKED_AT = (
    *("escape", "e", "forceescape", "pprint", "string", "urlencode", "urlize", "xmlattr"),
    *("list", "sort", "dictsort"),
)


def limit(environment: Environment) -> None:
    """Give the filters and functions of an environment their limits; the last step of setting it up."""
    for name, check in _FILTERS.items():
        if name in environment.filters:
            environment.filters[name] = _limited(environment.filters[name], check, joins=name == "join")
    environment.filters["sum"] = _sum(environment.filters["sum"])
    environment.filters["tojson"] = _json(environment.filters["tojson"])
    for name in _OVER_VALUES:
        environment.filters[name] = _over_values(environment.filters[name])
    for name in _LOOKED_AT:
        environment.filters[name] = _looking(environment.filters[name])
    functions: dict[str, Any] = dict(environment.globals)
    environment.globals["range"] = lambda *given: _counted_range(functions["range"](*given))
    environment.globals["lipsum"] = _limited(functions["lipsum"], _check_lipsum)


def _counted_range(numbers: range) -> range:
    take_steps(len(numbers))
    return numbers


def replaced(text: str, *arguments: Any) -> str:
    """Replace a part of a text; quickly if the result must be short."""
    new = arguments[1] if len(arguments) > 1 else ""
    if type(new) is not str or len(new) * (len(text) + 1) >= SMALL:
        _check_replace(text, *arguments[:2])
    return text.replace(*arguments)


def use_limits(template: Template) -> None:
    """Give a compiled template the names that its limits need."""
    template.root_render_func.__globals__.update(
        made=made,
        counted=counted,
        replaced=replaced,
        str_join=joined_values,
        markup_join=joined_markup,
        NUMBERS=frozenset({int, float}),
    )
