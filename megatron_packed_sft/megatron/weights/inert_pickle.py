"""Read a pickle without running anything: what it would call becomes a record of the call.

A pickle is a program that imports names and calls them. Here a name must be on the caller's list, and even then it is
not imported: an instance is an `Inert` that keeps the arguments and the state. Only the instructions that Python's own
pickler writes for plain data are known, so that memory and time stay proportional to the size of the data.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar, Final, cast

from megatron_packed_sft.errors import PackedSFTError, ShardFileError

_PLAIN: Final = (
    b"\x80\x95."  # protocol, frame, end
    b"N\x88\x89KMJ\x8a\x8bG"  # None, booleans, integers, floats
    b"\x8cX\x8dCB\x8e"  # texts and bytes
    b"]ae}su()\x85\x86\x87t"  # lists, dicts, marks, tuples
    b"\x94qrhj"  # the memo
    b"c\x93R\x81b"  # names, calls, instances, states
    b"0"  # the pickler drops what it has memorized meanwhile
    b"Q"  # ids of what is outside
)
_DICT: Final = "collections.OrderedDict"


class Inert:
    """What a pickle wanted to make: of which class, from which arguments, with which state."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None

    def field(self, name: str) -> Any:
        """Return an attribute of the instance; KeyError if it has none of that name."""
        if not isinstance(self.state, dict):
            raise KeyError(name)
        return self.state[name]


class Name:
    """A name that a pickle imports."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def load_inert(
    data: bytes,
    is_allowed: Callable[[str, str], bool],
    on_call: Callable[[Inert], Any] | None = None,
    on_id: Callable[[Any], Any] | None = None,
) -> Any:
    """Return what a pickle describes: plain values, `Name` and `Inert`.

    Args:
        data: the pickle.
        is_allowed: whether it may import a name of a module. Nothing is imported in any case.
        on_call: shown every call, also those whose result is thrown away; returns what to take for the result.
        on_id: returns what the id of something outside the pickle stands for; without it there must be none.

    Example:
        >>> load_inert(pickle.dumps({"a": [1, None]}), lambda module, name: False)
        {'a': [1, None]}
        >>> load_inert(pickle.dumps(print), lambda module, name: False)
        Traceback (most recent call last):
        _pickle.UnpicklingError: it names builtins.print
    """
    try:
        return _Reader(data, is_allowed, on_call, on_id).load()
    except (pickle.UnpicklingError, PackedSFTError):
        raise
    except KeyError as error:
        raise pickle.UnpicklingError(
            f"it uses the pickle instruction {error}, or an object that is not there"
        ) from None
    except Exception as error:  # damage can make an unpickler raise anything
        raise pickle.UnpicklingError(_first_line(error)) from None


def refusal(where: str, reason: str) -> ShardFileError:
    """Return the error for a file that names something, or that is damaged.

    Args:
        where: the file.
        reason: what `load_inert` says.
    """
    if not reason.startswith("it names "):
        return ShardFileError(f"{where} cannot be read ({reason}); restore the checkpoint")
    return ShardFileError(
        f"{where} cannot be read: {reason}, which no checkpoint needs; it was damaged, or made to run something, so "
        "restore the checkpoint from a source you trust"
    )


class _Reader(pickle._Unpickler):
    """Python's own unpickler, in Python, without the instructions that import, call, or allocate by a number."""

    def __init__(
        self,
        data: bytes,
        is_allowed: Callable[[str, str], bool],
        on_call: Callable[[Inert], Any] | None,
        on_id: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._is_allowed = is_allowed
        self._on_call = on_call
        self._on_id = on_id

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if not self._is_allowed(module, name):
            raise pickle.UnpicklingError(f"it names {full if full.isprintable() else ascii(full)}"[:300])
        return Name(full)

    def _call(self) -> None:
        arguments, name = self._stack().pop(), self._stack().pop()
        if type(name) is not Name or type(arguments) is not tuple:
            raise pickle.UnpicklingError("it calls something that is not a name")
        call: Any = {} if name.name == _DICT and not arguments else Inert(name.name, arguments)
        if self._on_call is not None and type(call) is Inert:
            call = self._on_call(call)
        self._stack().append(call)

    def persistent_load(self, pid: Any) -> Any:
        if self._on_id is None:
            raise pickle.UnpicklingError("it refers to something outside")
        return self._on_id(pid)

    def _build(self) -> None:
        state, made = self._stack().pop(), self._stack()[-1]
        if type(made) is not Inert:
            raise pickle.UnpicklingError("it changes something that is not an instance")
        made.state = state

    def _set_item(self) -> None:
        value, key = self._stack().pop(), self._stack().pop()
        self._set(self._stack()[-1], [key, value])

    def _set_items(self) -> None:
        items = cast(Any, self).pop_mark()
        self._set(self._stack()[-1], items)

    def _set(self, target: Any, items: list[Any]) -> None:
        keys = items[0::2]
        # The hash of a tuple of tuples that repeat each other takes exponential time.
        if type(target) is not dict or not all(type(key) in (str, int, Inert) for key in keys):
            raise pickle.UnpicklingError("it has a dict with keys that are neither texts, numbers nor instances")
        target.update(zip(keys, items[1::2], strict=True))

    def _stack(self) -> list[Any]:
        return cast(Any, self).stack  # type: ignore[no-any-return]

    dispatch: ClassVar[dict[int, Any]] = {
        **{one: pickle._Unpickler.dispatch[one] for one in _PLAIN},
        ord("R"): _call,
        0x81: _call,
        ord("b"): _build,
        ord("s"): _set_item,
        ord("u"): _set_items,
    }


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300] or type(error).__name__
