"""The words after `packed-sft preview` and `explain-template`: a path, and settings of `packed-sft prepare`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_packed_sft.config.application import read_settings
from megatron_packed_sft.config.schema import WrongKeysError
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.config import PrepareConfig
from megatron_packed_sft.support.paths import is_url

_UNUSED = "output=unused"  # prepare requires it; nothing is written here
_NO_TOKENIZER = (
    "no tokenizer was given; add tokenizer.path=PATH, the tokenizer's folder (with tokenizer.json) or .model file"
)


@dataclass(frozen=True)
class PreviewRequest:
    """The options of `packed-sft preview`, by name."""

    words: Sequence[str] = ()
    row: int | None = None
    bin_number: int | None = None
    sample: int | None = None
    sequence: int | None = None
    count: int | None = None
    seed: int | None = None
    split: str | None = None
    tokenizer: str | None = None
    plan: str | None = None
    work_dir: str | None = None
    seq_length: int | None = None
    pack_sequences: bool | None = None
    eos_id: int | None = None
    ids: bool = False
    config_name: str | None = None
    config_dir: str | None = None
    as_json: bool = False


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the path among the words, if there is one, and the settings.

    Example:
        >>> split_words(["template=chatml", "s3://bucket/lang=en/chats.jsonl"])
        ('s3://bucket/lang=en/chats.jsonl', ['template=chatml'])
    """
    paths = [word for word in words if "=" not in word or is_url(word) or os.path.exists(word)]
    if len(paths) > 1:
        raise InvalidInputError(f"{paths[0]} and {paths[1]} are two paths; give one path, and settings as KEY=VALUE")
    return (paths[0] if paths else None), [word for word in words if word not in paths]


def prepare_settings(settings: Sequence[str], *, tokenizer: str | None = None) -> PrepareConfig:
    """Return the configuration of `packed-sft prepare` with some settings.

    Args:
        settings: KEY=VALUE, --config-name and --config-dir.
        tokenizer: replaces tokenizer.path.
    """
    words = [_UNUSED, *settings, *([] if tokenizer is None else [f"tokenizer.path={tokenizer}"])]
    try:
        return read_settings(words, name="prepare", schema=PrepareConfig)
    except WrongKeysError as error:
        if any(problem.startswith("tokenizer.path has no value") for problem in error.problems):
            raise InvalidInputError(_NO_TOKENIZER) from error
        raise


def is_template(path: str) -> bool:
    """Return whether a path is a template and not a tokenizer: a Jinja file or a built-in name."""
    from megatron_packed_sft.encode.templates.load import builtin_template_names

    return Path(path).suffix in (".jinja", ".jinja2", ".j2") or (
        path in builtin_template_names() and not os.path.exists(path)
    )
