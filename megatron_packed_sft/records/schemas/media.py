"""Images, audio and video: what they are called in records, and the refusal, since only text is trained here."""

from __future__ import annotations

from typing import Any

from megatron_packed_sft.records.record import RecordError

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
    """Refuse a record, or a message, that carries media beside its text; empty lists and texts carry none.

    Example:
        >>> refuse_keys({"messages": [], "images": ["cat.png"]})
        Traceback (most recent call last):
        ...
        megatron_packed_sft.records.record.RecordError: images holds an image, which its text speaks of; only text is \
supported, so remove the record, or map the text alone
    """
    for name, medium in RECORD_KEYS.items():
        if name in value and value[name] not in (None, "", [], {}, False):
            raise RecordError(
                f"{prefix}{name}",
                f"holds {medium}, which its text speaks of; only text is supported, so remove the record, or map the "
                "text alone",
            )
