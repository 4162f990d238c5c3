"""Open packed data for preview, report and compare: its splits, what it records, and the tokenizer that made it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_packed_sft.data.bin_readers import BinReader
from megatron_packed_sft.data.opened_bins import open_bins
from megatron_packed_sft.data.shard_readers import ShardBinReader
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer, load_tokenizer
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.prepare.origins import PreparedFrom, noted_tokenizer_paths
from megatron_packed_sft.remote.filesystem import base_name
from megatron_packed_sft.storage.dataset_directory import DATASET, has_dataset, open_dataset
from megatron_packed_sft.storage.remote_shard import local_copy
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from megatron_packed_sft.support.paths import is_url, local_path, redacted


@dataclass(frozen=True)
class OpenedData:
    """Packed data of any storage.

    Args:
        path: the data; of a URL, its copy in the node's cache.
        storage: the name of its storage.
        splits: the bins of each split; data without splits has one, called train.
        provenance: what it was made from, according to its dataset.json.
        prepared_from: its work directory, if that still exists.
        num_shards: of each split, where it is known.
        is_dataset: whether it is a dataset directory.
        url: its URL, if it is in an object store.
    """

    path: Path
    storage: str
    splits: Mapping[str, BinReader]
    provenance: Mapping[str, Any]
    prepared_from: PreparedFrom | None
    num_shards: Mapping[str, int]
    is_dataset: bool = False
    url: str | None = None

    @property
    def name(self) -> str:
        """The last part of its path or URL."""
        return self.path.name if self.url is None else base_name(self.url)

    @property
    def location(self) -> str:
        """Its path or URL for messages, without credentials."""
        return str(self.path) if self.url is None else redacted(self.url)

    @property
    def recorded_tokenizer(self) -> Mapping[str, Any] | None:
        """Name and fingerprint of the tokenizer that made it, if they are recorded."""
        return next((one.figures.tokenizer for one in self.splits.values() if one.figures.tokenizer), None)

    def find_tokenizer(self, given: str | os.PathLike[str] | None = None) -> FoundTokenizer:
        """Return its tokenizer: the given one, the one that prepared it, or one of the same name beside the data."""
        candidates: list[str | os.PathLike[str]] = []
        beside = [Path.cwd()]
        if self.prepared_from is not None and self.prepared_from.tokenizer_path:
            candidates.append(self.prepared_from.tokenizer_path)
        if self.url is None:
            beside.insert(0, self.path.parent)
            dataset = self.path.resolve().parent.parent
            if (dataset / DATASET).exists():  # the data is one shard of a dataset
                candidates += noted_tokenizer_paths(dataset.with_name(f"{dataset.name}.work"))
        return find_tokenizer(self.recorded_tokenizer, given=given, candidates=candidates, beside=beside)


def open_data(
    path: str | os.PathLike[str],
    *,
    work_dir: str | os.PathLike[str] | None = None,
    stream: StreamOptions | None = None,
) -> OpenedData:
    """Open packed data: a dataset directory, a shard or file of any storage, or a directory of shards.

    Args:
        path: the data or its URL; shards are fetched into the node's cache when they are read.
        work_dir: its work directory, if that is not where `prepare` puts it by default.
        stream: how to read a token stream.
    """
    url = os.fspath(path) if is_url(path) else None
    if has_dataset(path):
        dataset = open_dataset(path)
        ordered = sorted(dataset.splits, key=lambda split: (split != "train", split))
        return OpenedData(
            dataset.path,
            dataset.storage.name,
            {split: ShardBinReader.of_dataset(dataset, split) for split in ordered},
            dataset.provenance,
            PreparedFrom.of(dataset, None if work_dir is None else local_path(work_dir, "work_dir")),
            {split: len(dataset.splits[split]) for split in ordered},
            is_dataset=True,
            url=url,
        )
    location = local_path(path) if url is None else local_copy(url)
    reader = open_bins(location, stream=stream).source
    storage, num_shards = "several storages", {}
    if isinstance(reader, ShardBinReader):
        storage, num_shards = reader.storage.name, {"train": len(reader.paths)}
    return OpenedData(location, storage, {"train": reader}, {}, None, num_shards, url=url)


class FoundTokenizer(NamedTuple):
    """A tokenizer, or a sentence that says why there is none."""

    tokenizer: Tokenizer | None
    note: str = ""


def find_tokenizer(
    recorded: Mapping[str, Any] | None,
    *,
    given: str | os.PathLike[str] | None = None,
    candidates: Iterable[str | os.PathLike[str]] = (),
    beside: Iterable[Path] = (),
) -> FoundTokenizer:
    """Return the tokenizer that made some data.

    Data records the name and the fingerprint of its tokenizer, never the path, so that equal data has equal bytes. Only
    a tokenizer with the recorded fingerprint is returned.

    Args:
        recorded: name and fingerprint, as the data records them; None if it records none.
        given: the path that the user named; a tokenizer with another fingerprint is an error.
        candidates: paths to try, such as the one that the work directory of `prepare` noted.
        beside: folders to try for a tokenizer of the recorded name.

    Example:
        >>> find_tokenizer({"name": "qwen3", "fingerprint": "ab12"}).note
        "the tokenizer 'qwen3' (ab12) was not found; give its path with --tokenizer to see text"
    """
    name, fingerprint = (recorded or {}).get("name"), (recorded or {}).get("fingerprint")
    if given is not None:
        tokenizer = load_tokenizer(given)
        if fingerprint and tokenizer.fingerprint != fingerprint:
            raise InvalidInputError(
                f"the data was made with the tokenizer {name!r} ({fingerprint}), not with {redacted(os.fspath(given))} "
                f"({tokenizer.fingerprint}), so its text would be wrong; give that tokenizer"
            )
        return FoundTokenizer(tokenizer)
    if not fingerprint:
        return FoundTokenizer(None, "the data records no tokenizer; give its path with --tokenizer to see text")
    by_name = [folder / Path(str(name)).name for folder in beside] if name else []
    for path in dict.fromkeys(os.fspath(one) for one in (*candidates, *by_name)):
        if not is_url(path) and not Path(path).exists():
            continue
        try:
            tokenizer = load_tokenizer(path)
        except PackedSFTError:
            continue
        if tokenizer.fingerprint == fingerprint:
            return FoundTokenizer(tokenizer)
    return FoundTokenizer(
        None, f"the tokenizer {name!r} ({fingerprint}) was not found; give its path with --tokenizer to see text"
    )
