"""`build_all`: every source of a YAML to a cache; a source that cannot be read does not stop the others.

    cache/tokenizer/spm.model, meta.json
    cache/pretrain/NAME/..., cache/sft/NAME/...

A source that cannot be read leaves a meta.json with `"built": false` and the reason. A cache that was made from the
same things is kept; one that was made from others is replaced only with `overwrite`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_packed_sft.caches.builders import ROLE_TOKENS, Message, build_pretrain_cache, build_sft_cache
from megatron_packed_sft.caches.cache_folder import common_meta, file_records, publish, published_meta, staged
from megatron_packed_sft.caches.text_encoder import ALGORITHM, SPECIAL_TOKENS, TextEncoder, tokenizer_files
from megatron_packed_sft.config.application import read_yaml
from megatron_packed_sft.config.schema import MISSING, plain
from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer
from megatron_packed_sft.errors import (
    InvalidInputError,
    NoSpaceError,
    PackedSFTError,
    StorageIOError,
    TargetExistsError,
)
from megatron_packed_sft.records.files import expand_path, find_files, read_blocks, size_and_checksum
from megatron_packed_sft.records.record import Conversation, Location, RecordError, kind_of, too_deep
from megatron_packed_sft.records.schemas.registry import adapter
from megatron_packed_sft.records.slices import read_slice, scan_slices
from megatron_packed_sft.support.atomic import os_errors, write_file
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.imports import load
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.paths import local_path

Status = Literal["built", "kept", "not built", "left out"]
_SPLITS = ("train", "val")
_RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_TREE_ROLES = {"prompter": "user", "user": "user", "assistant": "assistant", "system": "system"}
# Files that a Hugging Face tokenizer folder may have beside its tokenizer.json; never the weights of a model.
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


@dataclass(frozen=True)
class CacheSource:
    """One source of a cache.

    Args:
        kind: pretrain for texts, sft for chats.
        path: text files (one document each), or .jsonl, .json, .parquet; a path, a glob or a list.
        dataset: the name of a Hugging Face dataset, or a local folder that `datasets` loads; instead of path.
        config: of the dataset.
        split: of the dataset.
        val_split: the split of the dataset for val, for pretrain; split is for train then.
        field: the field or column of a record that holds the text, for pretrain.
        schema: the shape of a chat; auto recognises it.
        mapping: dotted keys, for chats of any other shape.
        message_trees: records are messages that name their parents, as in oasst1.
        max_train_tokens: the most tokens of train, for pretrain; null for all.
        max_val_tokens: the most tokens of val, for pretrain: the first of the stream. null: val_frac decides.
        val_frac: the share of documents or examples that goes to val; null for that of all sources.
        shuffle_buffer: the number of documents that the shuffle holds; null for that of all sources, 0 for no shuffle.
        build: false for a source that is listed but not built.
    """

    kind: str = MISSING
    path: Any = None
    dataset: str | None = None
    config: str | None = None
    split: str = "train"
    val_split: str | None = None
    field: str = "text"
    schema: str = "auto"
    mapping: dict[str, Any] = dataclass_field(default_factory=dict)
    message_trees: bool = False
    max_train_tokens: int | None = None
    max_val_tokens: int | None = None
    val_frac: float | None = None
    shuffle_buffer: int | None = None
    build: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("pretrain", "sft"):
            raise InvalidInputError(f"kind is {self.kind!r}; choose pretrain or sft")
        if self.build and (self.path is None) == (self.dataset is None):
            raise InvalidInputError("path or dataset must be given, and not both")
        if self.kind == "sft" and (self.val_split, self.max_train_tokens, self.max_val_tokens) != (None, None, None):
            raise InvalidInputError("val_split and max_*_tokens are for kind: pretrain; examples are split by val_frac")
        if self.kind == "pretrain" and self.message_trees:
            raise InvalidInputError("message_trees is for kind: sft")
        if self.val_split is not None and self.dataset is None:
            raise InvalidInputError("val_split goes with dataset; use val_frac for files")

    @property
    def paths(self) -> list[str]:
        """`path` as a list."""
        found = [self.path] if isinstance(self.path, str) else self.path
        if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
            raise InvalidInputError(f"path is {self.path!r}; give a path, a glob or a list of them")
        return found


@dataclass(frozen=True)
class CacheConfig:
    """The YAML that `build_all` reads.

    Args:
        tokenizer: a SentencePiece .model file, or a Hugging Face tokenizer folder.
        special_tokens: the texts of the tokens sys, usr, asst and eot.
        seed: of splits and shuffles.
        shard_bytes: the size of every pretrain shard but the last of a split.
        shuffle_buffer: the number of documents that the shuffle holds; 0 for no shuffle.
        val_frac: the share of documents or examples that goes to val.
        sources: what to build, by name.
    """

    tokenizer: str = MISSING
    special_tokens: dict[str, str] = dataclass_field(default_factory=lambda: dict(SPECIAL_TOKENS))
    seed: int = 42
    shard_bytes: int = 128 << 20
    shuffle_buffer: int = 10_000
    val_frac: float = 0.10
    sources: dict[str, CacheSource] = dataclass_field(default_factory=dict)


class SourceResult(NamedTuple):
    """What became of a source."""

    name: str
    kind: str
    status: Status
    totals: dict[str, int]
    reason: str | None = None


def read_config(path: str | os.PathLike[str], settings: Sequence[str] = ()) -> CacheConfig:
    """Read a YAML of sources.

    Args:
        path: the YAML.
        settings: keys that replace those of the YAML, such as `sources.wikitext.max_val_tokens=1000`.

    Raises:
        InvalidInputError: the file or a setting is wrong; all wrong keys are named.
    """
    location = local_path(path, "config")
    config = read_yaml(location, settings, schema=CacheConfig)
    if not config.sources:
        raise InvalidInputError(f"{location}: sources is empty; give at least one source")
    return config


def build_all(
    config: CacheConfig,
    cache_dir: str | os.PathLike[str],
    *,
    only: Collection[str] = (),
    overwrite: bool = False,
    on_tokens: Callable[[str, int], None] | None = None,
) -> list[SourceResult]:
    """Build the caches of all sources, one after the other.

    Args:
        config: of `read_config`.
        cache_dir: gets `tokenizer/`, `pretrain/NAME/` and `sft/NAME/`.
        only: the names of the sources to build; all if there are none.
        overwrite: replace caches that were made from other things.
        on_tokens: called with a source's name and the number of tokens after each batch.

    Returns:
        One result per source, in the order of the YAML; a source that cannot be read is not an exception.

    Raises:
        InvalidInputError: the tokenizer cannot be used, or `only` names an unknown source.
        NoSpaceError: the disk is full.
    """
    unknown = sorted(set(only) - set(config.sources))
    if unknown:
        raise InvalidInputError(f"there is no source {unknown[0]!r}; the sources are {', '.join(config.sources)}")
    home = local_path(cache_dir, "cache_dir")
    tokenizer = load_tokenizer(config.tokenizer)
    encoder = TextEncoder(tokenizer, config.special_tokens)
    _copy_tokenizer(Path(tokenizer.path), home / "tokenizer", encoder, overwrite=overwrite)
    results = []
    for name, source in config.sources.items():
        if only and name not in only:
            continue
        folder = home / source.kind / name
        count = None if on_tokens is None else lambda num, name=name: on_tokens(name, num)
        status: Status = "left out"
        reason: str | None = "build is false"
        try:
            if source.build:
                status, reason = _build(config, source, folder, tokenizer, encoder, overwrite, count), None
        except NoSpaceError:
            raise
        except PackedSFTError as error:
            status, reason = "not built", str(error)
        if reason is not None:
            _note_not_built(config, source, folder, encoder, reason)
        totals: dict[str, int] = {} if reason is not None else (published_meta(folder) or {}).get("totals", {})
        results.append(SourceResult(name, source.kind, status, totals, reason))
    return results


def _build(
    config: CacheConfig,
    source: CacheSource,
    folder: Path,
    tokenizer: Any,
    encoder: TextEncoder,
    overwrite: bool,
    on_tokens: Callable[[int], None] | None,
) -> Status:
    val_frac = config.val_frac if source.val_frac is None else source.val_frac
    shuffle_buffer = config.shuffle_buffer if source.shuffle_buffer is None else source.shuffle_buffer
    made_from = {
        "tokenizer_sha256": encoder.sha256(),
        "special_token_ids": encoder.special_ids,
        "seed": config.seed,
        "shard_bytes": config.shard_bytes,
        **{key: value for key, value in plain(source).items() if key not in ("build", "path")},
        "val_frac": val_frac,
        "shuffle_buffer": shuffle_buffer,
        "files": None if source.dataset else _fingerprint(source.paths),
    }
    before = published_meta(folder) or {}
    if before.get("built") and not overwrite:
        was = before.get("made_from", {})
        if was == made_from:
            return "kept"
        changed = ", ".join(key for key in made_from if was.get(key) != made_from[key])
        raise TargetExistsError(f"{folder} was built with another {changed}; add --overwrite to replace it")
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "special_tokens": config.special_tokens,
        "seed": config.seed,
        "overwrite": overwrite,
        "on_tokens": on_tokens,
        "meta": {**_named(source, folder), "made_from": made_from},
    }
    if source.kind == "sft":
        build_sft_cache(_examples(source), folder, val_frac=val_frac, **options)
        return "built"
    # A dataset is shuffled by `datasets`, with the same seed and buffer.
    build_pretrain_cache(
        _texts(source, source.split, config.seed, shuffle_buffer),
        folder,
        max_train_tokens=source.max_train_tokens,
        max_val_tokens=source.max_val_tokens,
        shard_bytes=config.shard_bytes,
        shuffle_buffer=None if source.dataset else shuffle_buffer or None,
        val_texts=_texts(source, source.val_split, config.seed, shuffle_buffer) if source.val_split else None,
        val_frac=val_frac if source.max_val_tokens is None and source.val_split is None else None,
        **options,
    )
    return "built"


def _named(source: CacheSource, folder: Path) -> dict[str, Any]:
    return {
        "dataset_name": source.dataset or folder.name,
        "dataset_config": source.config,
        "streaming": source.dataset is not None,
    }


def _note_not_built(config: CacheConfig, source: CacheSource, folder: Path, encoder: TextEncoder, reason: str) -> None:
    """Leave a meta.json with the reason; an earlier cache, or a folder that is not a cache, stays."""
    before = published_meta(folder)
    if (before or {}).get("built") or (before is None and folder.exists() and any(folder.iterdir())):
        return
    totals = {f"{split}_{'tokens' if source.kind == 'pretrain' else 'examples'}": 0 for split in _SPLITS}
    with staged(folder, overwrite=False) as staging:
        for split in _SPLITS if source.kind == "pretrain" else ():
            with os_errors("create", folder / split):
                os.mkdir(staging.path / split)
        meta = {**common_meta(encoder, folder, config.seed), **_named(source, folder), **totals, "totals": totals}
        publish(staging, {**meta, "built": False, "reason": reason, "split_rule": None})


def _copy_tokenizer(path: Path, target: Path, encoder: TextEncoder, *, overwrite: bool) -> None:
    """Copy the tokenizer's files; one that is there already must be the same."""
    identity = {"tokenizer_sha256": encoder.sha256(), "special_token_ids": encoder.special_ids}
    before = published_meta(target)
    if before is not None and identity.items() <= before.items():
        return
    if before is not None and not overwrite:
        raise TargetExistsError(
            f"{target} holds another tokenizer; choose another cache_dir, or add --overwrite to build all caches again"
        )
    files = tokenizer_files(path)
    sources = {"spm.model" if file.suffix == ".model" and len(files) == 1 else file.name: file for file in files}
    if path.is_dir():
        sources |= {name: path / name for name in _BESIDE if (path / name).is_file()}
    with staged(target, overwrite=overwrite) as staging:
        records = {}
        for name, source in sources.items():
            with os_errors("read", source):
                data = source.read_bytes()
            write_file(staging.path / name, data)
            records[name] = FileRecord(len(data), checksum(data, ALGORITHM))
        meta = {"vocab_size": encoder.vocab_size, "special_tokens": encoder.special_tokens}
        publish(staging, {**identity, **meta, "tokenizer": encoder.identity, **file_records(records)})


# ---- reading a source


def _fingerprint(paths: Iterable[str]) -> dict[str, Any]:
    """Return the size and checksum of files, wherever they are."""
    size, content = size_and_checksum([name for path in paths for name in expand_path(path) if not os.path.isdir(name)])
    return {"bytes": size, "checksum": content}


def _texts(source: CacheSource, split: str, seed: int, shuffle_buffer: int) -> Iterator[str]:
    """Yield the documents of a source for pretraining."""
    if source.dataset is None and not all(map(_holds_records, source.paths)):
        if any(map(_holds_records, source.paths)):
            raise InvalidInputError(f"path mixes text files and files of records ({source.path}); make two sources")
        for name in (name for path in source.paths for name in expand_path(path)):
            yield _text_of(name)
        return
    for where, record in _records(source, split, seed, shuffle_buffer):
        text = record.get(source.field)
        if type(text) is not str:
            problem = f"is {kind_of(text)}, and the record has {', '.join(map(str, record))}; set field to its text"
            raise RecordError(source.field, problem, where)
        yield text


def _holds_records(path: str) -> bool:
    lowered = path.lower()
    for suffix in _COMPRESSIONS:
        lowered = lowered.removesuffix(suffix)
    return lowered.endswith(_RECORD_SUFFIXES)


def _text_of(path: str) -> str:
    if os.path.isdir(path):
        raise InvalidInputError(f"{path} is a folder; give its files, such as {path}/**/*.md")
    data = b"".join(read_blocks(path, _COMPRESSIONS.get(os.path.splitext(path.lower())[1])))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"{path} is not UTF-8 (0x{data[error.start]:02X}); write the file in UTF-8, or remove it"
        ) from None


def _examples(source: CacheSource) -> Iterator[list[Message]]:
    """Yield the chats of a source as lists of messages."""
    records = _records(source, source.split)
    if source.message_trees:
        yield from conversations_in_trees(record for _, record in records)
        return
    adapt = adapter(source.schema, source.mapping or None)
    for where, record in records:
        try:
            yield _messages(adapt(record))
        except RecordError as error:
            raise error.at(where) from None
        except RecursionError:
            raise too_deep().at(where) from None


def _messages(record: object) -> list[Message]:
    if not isinstance(record, Conversation):
        raise RecordError("", "is not a chat; set kind: pretrain for texts, or schema or mapping for chats")
    if record.tools:
        raise RecordError("tools", "have no token in an SFT cache; use packed-sft prepare for chats with tools")
    messages: list[Message] = []
    for number, message in enumerate(record.messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLE_TOKENS:
            raise RecordError(f"messages[{number}].role", f"is {role!r}; use system, user or assistant")
        if type(content) is not str or set(message) - {"role", "content", "name"}:
            problem = "is not plain text, or comes with calls or reasoning, which an SFT cache cannot hold"
            raise RecordError(f"messages[{number}].content", f"{problem}; use packed-sft prepare for such chats")
        messages.append({"role": role, "content": content})
    return messages


def conversations_in_trees(records: Iterable[dict[str, Any]]) -> Iterator[list[Message]]:
    """Yield one conversation per tree: from its root along the best reply to each message, up to the last answer.

    The best reply has the lowest `rank`; of replies without one it is the first. The records of all trees are held in
    memory, since replies may come in any order. Conversations come in the order of their roots.

    Args:
        records: with `message_id`, `parent_id` (null for a root), `role`, `text`, and perhaps `rank` and `deleted`.

    Example:
        >>> rows = [
        ...     {"message_id": "a", "parent_id": None, "role": "prompter", "text": "Hi"},
        ...     {"message_id": "b", "parent_id": "a", "role": "assistant", "text": "What?", "rank": 1},
        ...     {"message_id": "c", "parent_id": "a", "role": "assistant", "text": "Hello!", "rank": 0},
        ... ]
        >>> [[one["content"] for one in chat] for chat in conversations_in_trees(rows)]
        [['Hi', 'Hello!']]
    """
    replies: dict[str | None, list[dict[str, Any]]] = {}
    for number, record in enumerate(records, 1):
        for name in ("message_id", "text"):
            if type(record.get(name)) is not str:
                raise RecordError(name, f"of message {number:,} is {kind_of(record.get(name))}; give a string")
        if record.get("role") not in _TREE_ROLES:
            raise RecordError("role", f"of message {number:,} is {record.get('role')!r}; use prompter or assistant")
        if not record.get("deleted"):
            replies.setdefault(record.get("parent_id"), []).append(record)
    for root in replies.pop(None, []):
        path = [root]
        while following := replies.pop(path[-1]["message_id"], None):
            path.append(min(following, key=lambda one: float("inf") if one.get("rank") is None else one["rank"]))
        while path and _TREE_ROLES[path[-1]["role"]] != "assistant":
            path.pop()
        if path:
            yield [{"role": _TREE_ROLES[one["role"]], "content": one["text"]} for one in path]  # type: ignore[typeddict-item]


def _records(
    source: CacheSource, split: str, seed: int = 0, shuffle_buffer: int = 0
) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Yield the records of a source with their places; the first that cannot be read is an error."""
    if source.dataset is not None:
        rows = stream_dataset(source.dataset, source.config, split, seed=seed, shuffle_buffer=shuffle_buffer)
        for number, row in enumerate(rows, 1):
            yield Location(f"{source.dataset}, {split}", number), row
        return
    for file in find_files(source.paths):
        for file_slice in scan_slices(file):
            for raw in read_slice(file_slice):
                if isinstance(raw.value, RecordError):
                    raise raw.value
                yield raw.where, raw.value
        file.refuse_changed()


def stream_dataset(
    name: str, config: str | None, split: str, *, seed: int = 0, shuffle_buffer: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield the records of one split of a dataset while it is downloaded, without a copy on disk.

    Args:
        name: of Hugging Face's hub, or a local folder of data files or one that `save_to_disk` wrote.
        config: of the dataset, if it has several.
        split: such as `train`.
        seed, shuffle_buffer: shuffle it, as `dataset.shuffle(seed=..., buffer_size=...)` does; 0 keeps the order.

    Raises:
        MissingDependencyError: `datasets` is not installed.
        StorageIOError: the dataset cannot be loaded or read: no network, no such name, damaged files.
    """
    datasets = load("datasets", "datasets", f"reading the dataset {name}")
    try:
        if os.path.exists(os.path.join(name, "state.json")):  # a folder that `save_to_disk` wrote
            dataset = datasets.load_from_disk(name).to_iterable_dataset()
        else:
            dataset = datasets.load_dataset(name, config, split=split, streaming=True)
        if shuffle_buffer:
            dataset = dataset.shuffle(seed=seed, buffer_size=shuffle_buffer)
        yield from dataset
    except Exception as error:  # datasets, file systems and the network raise many types
        where = f"{name}{f' ({config})' if config else ''}"
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise StorageIOError(
            f"cannot read the split {split} of the dataset {where}: {reason}; check the name and the network, or give "
            "a local folder"
        ) from error
