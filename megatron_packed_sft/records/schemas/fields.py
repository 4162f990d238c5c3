"""Fields that records of every schema may have: lists, objects and texts; weights; and media, which are refused.

A weight is the `train`, `weight` or `loss_weight` of a message or a part, or the weight of a whole record: 0 is not
trained, 1 is trained, 0.5 half as much, 2 twice as much; without a weight the roles decide.
"""

from __future__ import annotations

from typing import Any

import orjson

from megatron_packed_sft.records import json_files
from megatron_packed_sft.records.record import RecordError, kind_of

Weights = list[float | None] | None
WEIGHT_KEYS = ("train", "weight", "loss_weight")
_NUMBERS = ("weight", "loss_weight")
_LEAST, _MOST = 1e-6, 1e6  # products of two still fit a float32

_IMAGE, _AUDIO, _VIDEO, _FILE = "an image", "audio", "a video", "a file"
PART_TYPES = {
    **dict.fromkeys(("image", "image_url", "input_image", "img", "inlineData", "inline_data"), _IMAGE),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), _AUDIO),
    **dict.fromkeys(("video", "video_url", "input_video"), _VIDEO),
    **dict.fromkeys(("file", "input_file", "document", "fileData", "file_data"), _FILE),
}
RECORD_KEYS = {
    **dict.fromkeys(("image", "images", "pixel_values"), _IMAGE),
    **dict.fromkeys(("audio", "audios"), _AUDIO),
    **dict.fromkeys(("video", "videos"), _VIDEO),
}


def list_of(value: Any, field: str) -> list[Any]:
    """Return a non-empty list from a value that is one, or the JSON text of one.

    Example:
        >>> list_of('[{"role": "user", "content": "Hi"}]', "messages")
        [{'role': 'user', 'content': 'Hi'}]
    """
    if type(value) is str:
        value = parse_json(value, field)
    if type(value) is not list:
        raise RecordError(field, "is missing; give a list" if value is None else f"is {kind_of(value)}; give a list")
    if not value:
        raise RecordError(field, "is empty; give at least one element, or remove the record")
    return value


def object_of(value: Any, field: str, remedy: str) -> dict[str, Any]:
    """Return a value that is an object.

    Example:
        >>> object_of("Hi", "messages[1]", "give an object with role and content")
        Traceback (most recent call last):
        ...
        megatron_packed_sft.records.record.RecordError: messages[1] is a string; give an object with role and content
    """
    if type(value) is not dict:
        raise RecordError(field, f"is {kind_of(value)}; {remedy}")
    return value


def string_of(value: Any, field: str) -> str:
    """Return a value that is a string.

    Example:
        >>> string_of("Hi", "text")
        'Hi'
    """
    if type(value) is not str:
        raise RecordError(field, f"is {'missing' if value is None else kind_of(value)}; give a string")
    return value


def parse_json(text: str, field: str) -> Any:
    """Return the value of a field that holds JSON as text.

    Example:
        >>> parse_json('{"a": 1}', "arguments")
        {'a': 1}
    """
    try:
        return json_files.parse(text.encode(), field)
    except orjson.JSONDecodeError as error:
        raise RecordError(
            field, f"is not valid JSON ({error.msg} at character {error.pos + 1}); fix the text"
        ) from error


def without_nulls(value: Any) -> Any:
    """Return a value without keys that are null, at every depth; nulls in lists stay. Without nulls it is not copied.

    Example:
        >>> without_nulls({"a": None, "b": [{"c": None}, None]})
        {'b': [{}, None]}
    """
    try:
        if b":null" not in orjson.dumps(value):  # much faster than walking through it
            return value
    except TypeError:
        pass  # Parquet columns may hold what JSON cannot
    return _without_nulls_anywhere(value)


def _without_nulls_anywhere(value: Any) -> Any:
    if type(value) is dict:
        return {key: _without_nulls_anywhere(inner) for key, inner in value.items() if inner is not None}
    if type(value) is list:
        return [_without_nulls_anywhere(inner) for inner in value]
    return value


# ---- weights


def train_weight(message: dict[str, Any], place: str) -> float | None:
    """Return the weight of a message or of a part of one, or None if it gives none.

    Example:
        >>> train_weight({"role": "assistant", "content": "Hello.", "loss_weight": 0.5}, "messages[1]")
        0.5
        >>> train_weight({"role": "assistant", "content": "Hello.", "train": False}, "messages[1]")
        False
    """
    train, weight = message.get("train"), _number(message, f"{place}.")
    if train is None:
        return weight
    if type(train) is not bool:
        raise RecordError(f"{place}.train", f"is {train!r:.40}; give true or false")
    if train and weight == 0:
        raise RecordError(f"{place}.train", "is true, but the weight is 0; keep one of them")
    return train if weight is None or not train else weight


def record_weight(record: dict[str, Any]) -> float:
    """Return the weight of a whole record, 1 if it gives none.

    Example:
        >>> record_weight({"text": "Once upon a time.", "weight": 0.25})
        0.25
    """
    weight = _number(record, "")
    return 1.0 if weight is None else weight


def _number(value: dict[str, Any], prefix: str) -> float | None:
    found = None
    for name in _NUMBERS:
        if (number := value.get(name)) is None:
            continue
        if not _is_weight(number):
            raise RecordError(
                f"{prefix}{name}",
                f"is {number!r:.40}; give 0 to leave it untrained, or a number from {_LEAST:g} to {_MOST:g}",
            )
        if found is not None and found != number:
            raise RecordError(f"{prefix}{name}", f"is {number}, but weight is {found:g}; keep one of them")
        found = float(number)
    return found


def _is_weight(number: Any) -> bool:
    return isinstance(number, int | float) and (number == 0 or _LEAST <= number <= _MOST)


# ---- media: only text is trained here


def refuse_part(kind: Any, field: str) -> None:
    """Refuse a part of a content whose type names a medium.

    Example:
        >>> refuse_part("image_url", "content[1]")
        Traceback (most recent call last):
        ...
        megatron_packed_sft.records.record.RecordError: content[1] is a part of type 'image_url', an image; \
only text is supported, so remove the record
    """
    if type(kind) is str and kind in PART_TYPES:
        raise RecordError(
            field, f"is a part of type {kind!r}, {PART_TYPES[kind]}; only text is supported, so remove the record"
        )


def refuse_keys(value: dict[str, Any], prefix: str = "") -> None:
    """Refuse a record, or a message, with media beside its text; empty lists and texts are ignored.

    Example:
        >>> refuse_keys({"messages": [], "images": ["cat.png"]})
        Traceback (most recent call last):
        ...
        megatron_packed_sft.records.record.RecordError: images holds an image; only text is \
supported, so remove the record, or map the text alone
    """
    for name, medium in RECORD_KEYS.items():
        if name in value and value[name] not in (None, "", [], {}, False):
            raise RecordError(
                f"{prefix}{name}",
                f"holds {medium}; only text is supported, so remove the record, or map the text alone",
            )
