"""JSON as chat templates write it; the texts of tools, which repeat from record to record, are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from json import encoder as json_encoder
from typing import Any

import orjson

JsonSettings = tuple[bool, Any, Any, bool]  # ensure_ascii, indent, separators, sort_keys

_MAX_TEXTS = 4096
_encoders: dict[JsonSettings, tuple[Callable[[Any], str], dict[bytes, str]]] = {}


def json_text(value: Any, settings: JsonSettings) -> str:
    """Return the JSON text of a plain value, as `tojson` with these settings writes it.

    Tools repeat from record to record: their texts are kept, and found by a serialization that is ten times as fast.

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
    if b"null" in key:  # None, or a number that is none
        return encode(value)
    text = texts.get(key)
    if text is None:
        if len(texts) >= _MAX_TEXTS:
            texts.clear()
        text = texts[key] = encode(value)
    return text


def json_inside(text: str, ensure_ascii: bool) -> str:
    """Return a text as it stands between the quotes of JSON."""
    escape = json_encoder.encode_basestring_ascii if ensure_ascii else json_encoder.encode_basestring
    return escape(text)[1:-1]


def _encoder(settings: JsonSettings) -> Callable[[Any], str]:
    ensure_ascii, indent, separators, sort_keys = settings
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    make: Any = getattr(json_encoder, "c_make_encoder", None)
    if indent is not None or make is None:
        return encoder.encode
    # `encode` makes this anew for every value, which takes three times as long as small values do.
    escape = json_encoder.encode_basestring_ascii if ensure_ascii else json_encoder.encode_basestring
    parts = make(
        None, encoder.default, escape, None, encoder.key_separator, encoder.item_separator, sort_keys, False, True
    )
    return lambda value: "".join(parts(value, 0))
