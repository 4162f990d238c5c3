"""`packed-sft info`: find out what a path is, collect what is recorded there, and show it.

describe ─▶ the kind of the path ─▶ info_of_data or info_of_training: the facts ─▶ view
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.text import Text

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.inspect import info_of_data, info_of_training
from megatron_packed_sft.prepare.usage import path_line, path_setting
from megatron_packed_sft.remote.copies import copy_of
from megatron_packed_sft.remote.objects import object_info
from megatron_packed_sft.remote.outline import Outline
from megatron_packed_sft.storage.dataset_directory import DATASET
from megatron_packed_sft.storage.registry import shards_inside, storage_of
from megatron_packed_sft.support.paths import is_url, local_path, redacted
from megatron_packed_sft.support.terminal import table
from megatron_packed_sft.support.wording import byte_count
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
    Kind("dataset directory", lambda path: os.path.lexists(path / DATASET), info_of_data.dataset_facts),
    Kind("checkpoint", info_of_training.is_checkpoint, info_of_training.checkpoint_facts),
    Kind("run", info_of_training.is_run, info_of_training.run_facts),
    Kind("token store", is_token_store, info_of_data.token_store_facts),
    Kind("plan", lambda path: path.suffix == ".npz", info_of_data.plan_facts),
    Kind(
        "token stream",
        lambda path: getattr(storage_of(path), "name", None) == "token_stream",
        info_of_data.shards_facts,
    ),
    Kind("shard", lambda path: storage_of(path) is not None, info_of_data.shards_facts),
    Kind("Megatron checkpoint", info_of_training.is_foreign_checkpoint, info_of_training.foreign_checkpoint_facts),
    Kind("directory of shards", lambda path: bool(shards_inside(path)), info_of_data.shards_facts),
)


def describe(path: str | os.PathLike[str]) -> Facts:
    """Return what a path is and what is recorded there, as `packed-sft info --json` prints it.

    Args:
        path: a dataset directory, a shard, file or stream of any storage, a token store, a plan, a checkpoint or a run;
            or the URL of one. Of directories, documents and headers are read; single files are fetched.

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
        return _describe_url(os.fspath(path))
    location = local_path(path)
    if not os.path.lexists(location):
        raise InvalidInputError(f"{location} does not exist; check the path")
    kind = next((one for one in KINDS if one.recognises(location)), None)
    if kind is None:
        raise InvalidInputError(f"{location} {_what_else(location)}")
    return {"path": str(location), "kind": kind.name, **kind.facts(location)}


def _describe_url(url: str) -> Facts:
    """Describe a URL: a single file by a copy, a directory by its documents and headers."""
    if object_info(url) is not None:  # a single file may have its facts anywhere
        path = copy_of(url)
        try:
            return _with_url(describe(path), path, url)
        except PackedSFTError as error:
            error.args = (str(error).replace(str(path), redacted(url)),)
            raise
    with Outline.of(url) as outline:
        return _with_url(describe(outline.path), outline.path, url)


def _with_url(facts: Facts, path: Path, url: str) -> Facts:
    """Return facts with the path of a copy replaced by its URL, which is quoted in the lines to paste."""
    quoted = {path_setting(str(path)): path_setting(redacted(url)), path_line(str(path)): path_line(redacted(url))}
    for number, line in enumerate(facts.get("how_to_use") or ()):
        for old, new in quoted.items():
            facts["how_to_use"][number] = line = line.replace(old, new)
    place, name = (json.dumps(one)[1:-1] for one in (str(path), redacted(url)))
    renamed: Facts = json.loads(json.dumps(facts).replace(place, name))
    return renamed


def _what_else(path: Path) -> str:
    """Return what a path is that is none of `KINDS`, judging by names, and what to do with it."""
    if path.is_dir():
        names = set(os.listdir(path))
        if not names:
            return "is an empty directory; check the path"
        if {"tokens", "plans"} <= names:
            return (
                "is the work directory of a preparation; describe a part of it, such as "
                f"{path / 'tokens' / 'train'} or {path / 'plans' / 'train.npz'}"
            )
        if names & set(_MODEL_FILES):
            return "is the folder of a model or a tokenizer, not data; use it as tokenizer.path or model.path"
        if any(name.endswith(_RECORD_SUFFIXES) for name in names):
            return "is a directory of records; `packed-sft prepare` turns them into a dataset"
    elif path.suffix == ".model":
        return "is the model of a tokenizer, not data; use it as tokenizer.path"
    elif path.suffix in _RECORD_SUFFIXES:
        return "is a file of records; `packed-sft prepare` turns it into a dataset"
    *kinds, last = (kind.name for kind in KINDS)
    return f"is not a {', '.join(kinds)} or {last}; check the path"


_STYLES = {"trained": "green", "dropped": "yellow", "": "cyan"}
_SPLIT_COLUMNS = {
    "shards": "num_shards",
    "bins": "num_bins",
    "sequences": "num_sequences",
    "tokens": "num_tokens",
    "trained": "trained_share",
    "pack size": "pack_size",
    "full": "fullness",
    "sequences/bin": "sequences_per_bin",
    "longest": "max_seq_len",
}
_PERCENTAGES = ("trained_share", "fullness", "padding_share", "data_share")
_LOSSES = ("loss", "first_loss")
_WORDS = {
    "max_seq_len": "longest sequence",
    "mean_seq_len": "tokens per sequence",
    "max_seqs_per_bin": "most sequences in a bin",
    "min_packed_len": "shortest bin",
    "pad_seq_to_mult": "sequences padded to a multiple of",
    "num_trained_tokens": "trained tokens",
    "sum_loss_weights": "sum of loss weights",
}


def view(facts: Facts) -> Iterator[RenderableType]:
    """Yield what to print of the facts that `describe` returns."""
    storage = f", storage {facts['storage']}" if facts.get("storage") else ""
    yield Text.assemble((facts["path"], "bold"), f": {facts['kind']}{storage}, {_size(facts)}")
    if facts.get("splits"):
        yield ""
        yield _splits(facts["splits"])
    else:
        yield ""
        yield table(["", ""], [(f"  {_word(name)}", _value(name, value)) for name, value in facts["total"].items()
                               if value is not None], left=1)  # fmt: skip
    for name, draw in _TABLES.items():
        if facts.get(name):
            yield ""
            yield draw(facts[name])
    drops = _drops(facts)
    if drops:
        yield ""
        yield table(["dropped", "records"], drops, styles=_STYLES)
    yield ""
    yield table(["", ""], list(_made_with(facts)), left=2)
    for note in facts.get("notes", ()):
        yield Text(f"note: {note}", "yellow")
    if facts.get("how_to_use"):
        yield ""
        yield from facts["how_to_use"]


def _splits(splits: Facts) -> RenderableType:
    rows = [[name, *(_value(key, one.get(key)) for key in _SPLIT_COLUMNS.values())] for name, one in splits.items()]
    return table(["split", *_SPLIT_COLUMNS], rows, styles=_STYLES)


def _sources(sources: Facts) -> RenderableType:
    rows = [
        [
            name,
            _value("num_records", one["num_records"]),
            sum(one["dropped"].values()),
            one["num_sequences"],
            one["num_tokens"],
            _value("trained_share", one["trained_share"]),
            len(one["files"]),
        ]
        for name, one in sources.items()
    ]
    return table(["source", "records", "dropped", "sequences", "tokens", "trained", "files"], rows, styles=_STYLES)


def _drops(facts: Facts) -> list[tuple[str, int]]:
    found: dict[str, int] = dict(facts.get("accounting", {}).get("dropped_sequences", {}))
    for source in facts.get("sources", {}).values():
        for reason, count in source["dropped"].items():
            found[reason] = found.get(reason, 0) + count
    return sorted(found.items())


def _validations(found: Facts) -> RenderableType:
    rows = [[name, _value("step", one["step"]), *(_value(key, one[key]) for key in ("loss", "perplexity"))]
            for name, one in found.items()]  # fmt: skip
    return table(["validation", "step", "loss", "perplexity"], rows)


def _checkpoints(found: Sequence[Facts]) -> RenderableType:
    rows = [[one["name"], one["step"], byte_count(one["num_bytes"])] for one in found]
    return table(["checkpoint", "step", "on disk"], rows)


def _made_with(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield names and values of what it was made with and what identifies it."""
    tokenizer, template = facts.get("tokenizer"), facts.get("chat_template")
    if tokenizer:
        where = f", {facts['tokenizer_path']}" if facts.get("tokenizer_path") else ""
        yield "tokenizer", f"{_named(tokenizer)}{where}"
    elif "tokenizer" in facts:
        yield "tokenizer", "not recorded"
    if template:
        yield "chat template", _named(template)
    for name in ("model", "adapters", "pretrained"):
        if facts.get(name):
            yield (
                name,
                ", ".join(f"{key}={value}" for key, value in facts[name].items() if value not in (None, [], False)),
            )
    for name in ("dtype", "bin_checksum_algorithm", "sequence_checksum_algorithm", "strategy", "method", "format",
                 "fingerprint", "order_fingerprint", "plan_fingerprint", "data_fingerprint", "settings", "made_by",
                 "created_by"):  # fmt: skip
        if facts.get(name):
            yield name.replace("_", " "), str(facts[name])
    for split, one in facts.get("plan_fingerprints", {}).items():
        if one:
            yield f"plan of {split}", one


def _size(facts: Facts) -> str:
    return f"{'about ' if facts.get('num_bytes_is_estimated') else ''}{byte_count(facts['num_bytes'])}"


def _named(one: Facts) -> str:
    name = f"{one['name']} " if one.get("name") else ""
    return f"{name}({one.get('fingerprint')})"


def _word(name: str) -> str:
    return _WORDS.get(name) or name.removeprefix("num_").replace("_", " ")


def _value(name: str, value: Any) -> str | int:
    if value is None:
        return "-"
    if name in _PERCENTAGES:
        return f"{100 * value:.2f} %" if name == "fullness" else f"{100 * value:.1f} %"
    if name in _LOSSES:
        return f"{value:.4f}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1 else f"{value:.3g}"
    return value if isinstance(value, int) and not isinstance(value, bool) else str(value)


_TABLES: dict[str, Callable[[Any], RenderableType]] = {
    "sources": _sources,
    "validation": _validations,
    "checkpoints": _checkpoints,
}
