"""JSON as chat templates write it; the texts of tools, which repeat from record to record, are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import orjson

JsonSettings = tuple[bool, Any, Any, bool]  # ensure_ascii, indent, separators, sort_keys

_MAX_TEXTS = 4096
_encoders: dict[JsonSettings, tuple[Callable[[Any], str], dict[bytes, str]]] = {}


def json_text(value: Any, settings: JsonSettings) -> str:
    """Return the JSON text of a plain value, as `tojson` with these settings writes it.

    Tools repeat from record to record: their texts are kept, and found by a serialization that is ten times as fast.
    """
    known = _encoders.get(settings)
    if known is None:
        ensure_ascii, indent, separators, sort_keys = settings
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        known = _encoders[settings] = (encoder.encode, {})
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
    escape = json.encoder.encode_basestring_ascii if ensure_ascii else json.encoder.encode_basestring
    return escape(text)[1:-1]
