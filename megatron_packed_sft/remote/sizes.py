"""Sizes as people write them."""

from __future__ import annotations

import re

from megatron_packed_sft.errors import InvalidInputError

_FACTORS = {"": 1, "B": 1, **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}}
_FACTORS |= {f"{p}iB".upper(): 1024**n for n, p in enumerate("KMGT", 1)}


def parse_size(text: str | int, name: str) -> int:
    """Return the bytes of a size such as 200GB or 64MiB.

    Example:
        >>> parse_size("200GB", "cache_size"), parse_size("1.5MiB", "cache_size"), parse_size(10, "cache_size")
        (200000000000, 1572864, 10)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(text).upper())
    suffix = found[2] if found else ""
    suffix = suffix if suffix in _FACTORS else f"{suffix}B"  # 200G
    if found is None or suffix not in _FACTORS:
        raise InvalidInputError(f"{name} is {text!r}; give a size such as 200GB or 64MiB")
    size = int(float(found[1]) * _FACTORS[suffix])
    if size < 1:
        raise InvalidInputError(f"{name} is {text!r}; it must be at least one byte")
    return size
