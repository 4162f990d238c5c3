"""Packed data opened to be looked at: its splits, what it records, and what its work directory still knows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_packed_sft.data.opened_bins import open_bins
from megatron_packed_sft.data.readers.interface import BinReader
from megatron_packed_sft.data.readers.shards import ShardBinReader
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.encode.tokenizers.load import load_tokenizer
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.prepare.origins import PreparedFrom
from megatron_packed_sft.remote.filesystem import base_name
from megatron_packed_sft.storage.dataset_directory import has_dataset, open_dataset
from megatron_packed_sft.storage.remote_shard import local_copy
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from megatron_packed_sft.support.paths import is_url, local_path, redacted


@dataclass(frozen=True)
class OpenedData:
    """Packed data of any storage.

    Args:
        path: where it is; of a URL, where the cache has it.
        storage: the name of its storage.
        splits: the bins of each split; data without splits is one, called train.
        provenance: what its dataset.json says it was made from.
        prepared_from: the work directory that made it, if it is still there.
        num_shards: of each split, where it is known.
        is_dataset: whether it is a dataset directory.
        url: where it is, if it is in an object store.
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
        """Its last name."""
        return self.path.name if self.url is None else base_name(self.url)

    @property
    def location(self) -> str:
        """Where it is, for messages: a path, or a URL without credentials."""
        return str(self.path) if self.url is None else redacted(self.url)

    @property
    def recorded_tokenizer(self) -> Mapping[str, Any] | None:
        """Name and fingerprint of the tokenizer that made it, as far as anybody recorded."""
        return next((one.figures.tokenizer for one in self.splits.values() if one.figures.tokenizer), None)

    def find_tokenizer(self, given: str | os.PathLike[str] | None = None) -> FoundTokenizer:
        """Return its tokenizer: the given one, the one that prepared it, or one of its name beside the data."""
        recorded = self.recorded_tokenizer
        candidates: list[str | os.PathLike[str]] = []
        if self.prepared_from is not None and self.prepared_from.tokenizer_path:
            candidates.append(self.prepared_from.tokenizer_path)
        if recorded and recorded.get("name"):
            beside = [] if self.url is not None else [self.path.parent]
            candidates += [folder / Path(str(recorded["name"])).name for folder in (*beside, Path.cwd())]
        return find_tokenizer(recorded, given=given, candidates=candidates)


def open_data(
    path: str | os.PathLike[str],
    *,
    work_dir: str | os.PathLike[str] | None = None,
    stream: StreamOptions | None = None,
) -> OpenedData:
    """Open packed data: a dataset directory, a shard or file of any storage, or a directory of shards.

    Args:
        path: the data, or its URL: its shards are fetched into the cache of the node when they are read.
        work_dir: the work directory that made it, if that is not where `prepare` puts it.
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
    """A tokenizer, or in one sentence why there is none."""

    tokenizer: Tokenizer | None
    note: str = ""


def find_tokenizer(
    recorded: Mapping[str, Any] | None,
    *,
    given: str | os.PathLike[str] | None = None,
    candidates: Iterable[str | os.PathLike[str]] = (),
) -> FoundTokenizer:
    """Return the tokenizer that made some data.

    Args:
        recorded: name and fingerprint, as the data records them; None if it records none.
        given: the path that the user names; one with another fingerprint is refused.
        candidates: paths where it may be, such as the one it was loaded from when the data was made.

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
    for path in dict.fromkeys(os.fspath(one) for one in candidates):
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
