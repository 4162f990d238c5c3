"""The YAML that lists the sources of caches, checked key by key; docs/caches.md shows one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_packed_sft.caches.text_encoder import SPECIAL_TOKENS
from megatron_packed_sft.config.schema import MISSING, WrongKeysError, build, plain, refuse_wrong_keys
from megatron_packed_sft.errors import InvalidInputError, StorageIOError
from megatron_packed_sft.support.paths import local_path, refuse_special_file

DEFAULT_SEED = 42
DEFAULT_SHARD_BYTES = 128 << 20
DEFAULT_SHUFFLE_BUFFER = 10_000
DEFAULT_VAL_FRAC = 0.10
PRETRAIN, SFT = "pretrain", "sft"


@dataclasses.dataclass(frozen=True)
class CacheSource:
    """One source of a cache.

    Args:
        kind: pretrain for texts, sft for chats.
        path: files: text files, or .jsonl, .json, .parquet and folders saved by `datasets`; a path, a glob or a list.
        dataset: the name of a Hugging Face dataset, or a local folder that `datasets` loads; instead of path.
        config: of the dataset.
        split: of the dataset.
        streaming: read the dataset while it is downloaded.
        val_path: files for val, for pretrain; path is for train then.
        val_split: the split of the dataset for val, for pretrain; split is for train then.
        field: the field or column of a record that holds the text, for pretrain.
        documents: what one document of a text file is: file, line or paragraph.
        schema: the shape of a chat; auto recognises it.
        mapping: dotted keys, for chats of any other shape.
        take: chosen, for preference data.
        message_trees: records are messages that name their parents, as in oasst1.
        max_train_tokens: the most tokens of train, for pretrain; null for all.
        max_val_tokens: the most tokens of val, for pretrain. Without val_frac, val_path and val_split, val is the first
            tokens of the stream.
        val_frac: the share of documents or examples that goes to val; null for that of all sources.
        shuffle_buffer: how many documents the shuffle holds; null for that of all sources, 0 for no shuffle.
        on_error: stop, or skip records that cannot be used, with a count.
        build: false for a source that is listed but not built.
    """

    kind: str = MISSING
    path: Any = None
    dataset: str | None = None
    config: str | None = None
    split: str = "train"
    streaming: bool = True
    val_path: Any = None
    val_split: str | None = None
    field: str = "text"
    documents: str = "file"
    schema: str = "auto"
    mapping: dict[str, Any] = dataclasses.field(default_factory=dict)
    take: str | None = None
    message_trees: bool = False
    max_train_tokens: int | None = None
    max_val_tokens: int | None = None
    val_frac: float | None = None
    shuffle_buffer: int | None = None
    on_error: str = "stop"
    build: bool = True

    def __post_init__(self) -> None:
        choices = {"kind": (PRETRAIN, SFT), "documents": ("file", "line", "paragraph"), "on_error": ("stop", "skip")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InvalidInputError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        if self.build and (self.path is None) == (self.dataset is None):
            raise InvalidInputError("path or dataset must be given, and not both")
        if self.kind == SFT:
            given = [
                name
                for name in ("val_path", "val_split", "max_train_tokens", "max_val_tokens")
                if getattr(self, name) is not None
            ]
            if given:
                raise InvalidInputError(f"{given[0]} is for kind: pretrain; examples are split by val_frac")
        elif self.message_trees:
            raise InvalidInputError("message_trees is for kind: sft; set it there")
        if self.val_split is not None and self.dataset is None:
            raise InvalidInputError("val_split goes with dataset; use val_path for files")
        if self.val_path is not None and self.path is None:
            raise InvalidInputError("val_path goes with path; use val_split for a dataset")

    @property
    def is_streamed(self) -> bool:
        """Whether the source is read while it is downloaded."""
        return self.dataset is not None and self.streaming

    @property
    def has_val(self) -> bool:
        """Whether val has files or a split of its own."""
        return self.val_path is not None or self.val_split is not None

    def paths(self, name: str) -> list[str]:
        """Return `path` or `val_path` as a list."""
        value = getattr(self, name)
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
            raise InvalidInputError(f"{name} is {value!r}; give a path, a glob or a list of them")
        return found


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """What `packed-sft cache build-all` builds.

    Args:
        tokenizer: a SentencePiece .model file, or a Hugging Face tokenizer folder.
        special_tokens: the texts of the tokens sys, usr, asst and eot.
        seed: of splits and shuffles.
        shard_bytes: the size of every pretrain shard but the last of a split.
        shuffle_buffer: how many documents the shuffle holds; 0 for no shuffle.
        val_frac: the share of documents or examples that goes to val.
        sources: what to build, by name.
    """

    tokenizer: str = MISSING
    special_tokens: dict[str, str] = dataclasses.field(default_factory=lambda: dict(SPECIAL_TOKENS))
    seed: int = DEFAULT_SEED
    shard_bytes: int = DEFAULT_SHARD_BYTES
    shuffle_buffer: int = DEFAULT_SHUFFLE_BUFFER
    val_frac: float = DEFAULT_VAL_FRAC
    sources: dict[str, CacheSource] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.sources:
            raise InvalidInputError("sources lists nothing; give at least one source")

    def resolved(self, source: CacheSource) -> CacheSource:
        """Return a source with what it leaves to the settings of all."""
        return dataclasses.replace(
            source,
            val_frac=self.val_frac if source.val_frac is None else source.val_frac,
            shuffle_buffer=self.shuffle_buffer if source.shuffle_buffer is None else source.shuffle_buffer,
        )


def read_config(
    path: str | os.PathLike[str], overrides: Mapping[str, Any] | Sequence[str | tuple[str, Any]] = ()
) -> CacheConfig:
    """Read a YAML of sources; a key that does not exist, or is there twice, is one sentence.

    Args:
        path: the YAML.
        overrides: by dotted key: a mapping or pairs, or text such as `sources.wikitext.max_val_tokens=1000`.

    Raises:
        InvalidInputError: the file or an override is wrong; all wrong keys are named.
    """
    local_path(path, "config")  # refuses a URL
    values = _load(Path(path))
    for key, value in _pairs(overrides):
        _set(values, key, value)
    try:
        refuse_wrong_keys(CacheConfig, values)
        return build(CacheConfig, values)
    except WrongKeysError as error:
        raise InvalidInputError(f"{os.fspath(path)}: {error}") from None


def source_json(source: CacheSource) -> dict[str, Any]:
    """Return what decides the content of a source, as plain values."""
    found: dict[str, Any] = plain(source)
    return {key: value for key, value in found.items() if key not in ("build", "path", "val_path")}


def _load(path: Path) -> dict[str, Any]:
    import yaml

    refuse_special_file(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StorageIOError(f"cannot read {path}: {reason}; give the YAML that lists the sources") from None
    try:
        _refuse_double_keys(yaml.compose(text, yaml.SafeLoader), path)
        values = yaml.safe_load(text)
    except InvalidInputError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # the last: numbers of thousands of digits
        raise InvalidInputError(f"{path} is not valid YAML ({' '.join(str(error).split())}); correct it") from None
    if not isinstance(values, dict):
        raise InvalidInputError(f"{path} is not a mapping; it needs the keys tokenizer and sources")
    return values


def _refuse_double_keys(node: Any, path: Path) -> None:
    """YAML's loaders take the last of equal keys in silence."""
    if node is None or node.id == "scalar":
        return
    if node.id == "mapping":
        names = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if names.count(key.value) > 1:
                raise InvalidInputError(
                    f"{path}, line {key.start_mark.line + 1}: {key.value} is there twice; remove one of them"
                )
    for inner in node.value:
        for one in inner if isinstance(inner, tuple) else (inner,):
            _refuse_double_keys(one, path)


def _pairs(overrides: Mapping[str, Any] | Sequence[str | tuple[str, Any]]) -> list[tuple[str, Any]]:
    import yaml

    found = []
    for text in overrides.items() if isinstance(overrides, Mapping) else overrides:
        if not isinstance(text, str):
            found.append(text)
            continue
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidInputError(f"{text!r} sets nothing; write KEY=VALUE, such as seed=7")
        try:
            found.append((key, yaml.safe_load(value)))
        except (yaml.YAMLError, RecursionError):
            raise InvalidInputError(f"the value of {key} is not YAML; put it in quotes") from None
    return found


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *groups, last = key.split(".")
    for group in groups:
        values = values.setdefault(group, {})
        if not isinstance(values, dict):
            raise InvalidInputError(f"{key} cannot be set: {group} is not a group of keys")
    values[last] = value
