"""Compiled code over addresses: arrays of any number of files in one call, and XXH3 of bytes in place.

A kernel that takes arrays must be called once for each file. One that takes addresses is called once, but nothing
checks them: the caller must compare an address with the size of the mapped memory, and keep that memory alive.

Imported lazily (numba costs 0.2 s).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from megatron_packed_sft.support.compiled import kernel

_INTEGER = ir.IntType(64)


def _pointer(typing_context: Any, address: Any) -> Any:
    """Return an address as what `numba.carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def _hash_bytes(typing_context: Any, function: Any, address: Any, size: Any) -> Any:
    """Call the C function `uint64 function(bytes, size)` by its address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_INTEGER, [_INTEGER, _INTEGER])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.uint64(types.int64, types.int64, types.int64), generate


def _load(width: int, kind: Any) -> Any:
    """Return code that reads an unsigned number of `width` bits at an address. Arrays would take longer to compile."""

    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = builder.inttoptr(arguments[0], ir.IntType(width).as_pointer())
            value = builder.load(place, align=1)
            return builder.zext(value, _INTEGER) if width < 64 else value

        return kind(types.int64), generate

    return intrinsic(load)


def _store_byte(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        builder.store(builder.trunc(arguments[1], ir.IntType(8)), place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _prefetch(typing_context: Any, address: Any) -> Any:
    """Have the processor fetch the cache line at an address, without waiting for it; no address is wrong."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        flag, place = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [place, flag, flag, flag])
        # Its full name depends on the release of LLVM, so llvmlite chooses it.
        function = builder.module.declare_intrinsic("llvm.prefetch", [place], kind)
        # To be read, into all levels of the cache, as data.
        builder.call(function, [builder.inttoptr(arguments[0], place), flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


# For type checkers these are functions of Python; they are code that is generated where a kernel calls them.
carray: Any = numba.carray  # type: ignore[attr-defined]
pointer: Any = intrinsic(_pointer)
hash_bytes: Any = intrinsic(_hash_bytes)
load_byte: Any = _load(8, types.int64)
load_two_bytes: Any = _load(16, types.int64)
load_four_bytes: Any = _load(32, types.int64)
load_eight_bytes: Any = _load(64, types.uint64)
store_byte: Any = intrinsic(_store_byte)
prefetch: Any = intrinsic(_prefetch)


@kernel
def hash_spans(
    function: int, addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], out: npt.NDArray[np.uint64]
) -> None:
    """Fill `out` with the checksum of each span of bytes."""
    for index in range(addresses.size):
        out[index] = hash_bytes(function, addresses[index], sizes[index])
