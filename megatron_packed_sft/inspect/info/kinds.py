"""One dispatch: what kind of thing a path is, and one sentence when it is none that we know."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.inspect.info import packed_data, training
from megatron_packed_sft.prepare.report import path_line, path_setting
from megatron_packed_sft.remote.copies import copy_of
from megatron_packed_sft.remote.objects import object_info
from megatron_packed_sft.remote.outline import Outline
from megatron_packed_sft.storage.dataset_directory import DATASET
from megatron_packed_sft.storage.registry import shards_inside, storage_of
from megatron_packed_sft.support.paths import is_url, local_path, redacted
from megatron_packed_sft.tokens.validate import is_token_store

Facts = dict[str, Any]

_MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_RECORD_SUFFIXES = (".jsonl", ".json", ".gz", ".zst", ".arrow")


class Kind(NamedTuple):
    """A kind of thing on disk."""

    name: str
    recognises: Callable[[Path], bool]
    facts: Callable[[Path], Facts]


KINDS = (
    Kind("dataset directory", lambda path: os.path.lexists(path / DATASET), packed_data.dataset_facts),
    Kind("checkpoint", training.is_checkpoint, training.checkpoint_facts),
    Kind("run", training.is_run, training.run_facts),
    Kind("token store", is_token_store, packed_data.token_store_facts),
    Kind("plan", lambda path: path.suffix == ".npz", packed_data.plan_facts),
    Kind(
        "token stream", lambda path: getattr(storage_of(path), "name", None) == "token_stream", packed_data.shards_facts
    ),
    Kind("shard", lambda path: storage_of(path) is not None, packed_data.shards_facts),
    Kind("Megatron checkpoint", training.is_foreign_checkpoint, training.foreign_checkpoint_facts),
    Kind("directory of shards", lambda path: bool(shards_inside(path)), packed_data.shards_facts),
)


def describe(path: str | os.PathLike[str], *, deep: bool = False) -> Facts:
    """Return what a path is and what is recorded of it: plain values, as `packed-sft info --json` prints them.

    Args:
        path: a dataset directory, a shard, file or stream of any storage, a token store, a plan, a checkpoint or a run;
            or the URL of one: of directories documents and headers are read, single files are fetched.
        deep: also read the data, for histograms.

    Example:
        >>> import tempfile
        >>> from megatron_packed_sft.storage.registry import create_shard_writer
        >>> home = tempfile.mkdtemp()
        >>> with create_shard_writer("memmap_v1", f"{home}/shard", num_bins=1, pack_size=4) as writer:
        ...     writer.write_bin(0, [1, 2], [1, 0], [0])
        ...     _ = writer.finalize()
        >>> facts = describe(f"{home}/shard")
        >>> facts["kind"], facts["total"]["fullness"]
        ('shard', 0.5)
    """
    if is_url(path):
        return _describe_url(os.fspath(path), deep)
    location = local_path(path)
    if not os.path.lexists(location):
        raise InvalidInputError(f"{location} does not exist; check the path")
    kind = next((one for one in KINDS if one.recognises(location)), None)
    if kind is None:
        raise InvalidInputError(f"{location} {_what_else(location)}")
    facts = {"path": str(location), "kind": kind.name, **kind.facts(location)}
    if deep:
        from megatron_packed_sft.inspect.info.histograms import deep_facts

        facts |= deep_facts(kind.name, location, facts)
    return facts


def _describe_url(url: str, deep: bool) -> Facts:
    """Describe a dataset or shard of a store by its documents and headers alone."""
    if deep:
        raise InvalidInputError(f"--deep reads all data, and {redacted(url)} is a URL; copy the data, or leave it out")
    if object_info(url) is not None:  # one file, whose facts may be anywhere in it
        path = copy_of(url)
        try:
            return _at_home(describe(path), path, url)
        except PackedSFTError as error:
            error.args = (str(error).replace(str(path), redacted(url)),)
            raise
    with Outline.of(url) as outline:
        return _at_home(describe(outline.path), outline.path, url)


def _at_home(facts: Facts, path: Path, url: str) -> Facts:
    """Return facts about a copy as ones about the store; lines to paste are quoted as the URL needs it."""
    quoted = {path_setting(str(path)): path_setting(redacted(url)), path_line(str(path)): path_line(redacted(url))}
    for number, line in enumerate(facts.get("how_to_use") or ()):
        for old, new in quoted.items():
            facts["how_to_use"][number] = line = line.replace(old, new)
    place, name = (json.dumps(one)[1:-1] for one in (str(path), redacted(url)))
    at_home: Facts = json.loads(json.dumps(facts).replace(place, name))
    return at_home


def _what_else(path: Path) -> str:
    """Say what a path is instead, as far as a look at its names tells."""
    if path.is_dir():
        names = set(os.listdir(path))
        if not names:
            return "is an empty directory; check the path"
        if {"tokens", "plans"} <= names:
            return (
                "is the work directory of a preparation; look at what it holds, such as "
                f"{path / 'tokens' / 'train'} or {path / 'plans' / 'train.npz'}"
            )
        if names & set(_MODEL_FILES):
            return "is the folder of a model or a tokenizer, not data; tokenizer.path and model.path take it"
        if any(name.endswith(_RECORD_SUFFIXES) for name in names):
            return "is a directory of records; `packed-sft prepare` makes a dataset of them"
    elif path.suffix == ".model":
        return "is a tokenizer's model, not data; tokenizer.path takes it"
    elif path.suffix in _RECORD_SUFFIXES:
        return "is a file of records; `packed-sft prepare` makes a dataset of it"
    *kinds, last = (kind.name for kind in KINDS)
    return f"is no {', '.join(kinds)} or {last}; check the path"
