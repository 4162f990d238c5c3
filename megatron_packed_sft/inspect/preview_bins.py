"""Preview packed data: a bin sequence by sequence, or a sequence of a token store, as tokens with their text."""

from __future__ import annotations

import glob
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.data.bin_readers import BinReader
from megatron_packed_sft.data.opened_bins import open_bins
from megatron_packed_sft.data.order.sample_order import SampleOrder
from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect.opened_data import FoundTokenizer, find_tokenizer, open_data
from megatron_packed_sft.inspect.painting import LABEL, Painter, visible
from megatron_packed_sft.inspect.preview_record_view import tokens_json, tokens_table
from megatron_packed_sft.inspect.settings import PreviewRequest
from megatron_packed_sft.inspect.tokens_of_bin import Token, TokenDecoder, tokens_of_bin
from megatron_packed_sft.prepare.origins import BinOrigins, noted_tokenizer_paths
from megatron_packed_sft.records.files import expand_path, open_file
from megatron_packed_sft.remote.filesystem import base_name, child
from megatron_packed_sft.remote.objects import object_info
from megatron_packed_sft.remote.uploads import refuse_unfinished
from megatron_packed_sft.storage.dataset_directory import DATASET, has_dataset
from megatron_packed_sft.storage.registry import shards_inside, storage_of
from megatron_packed_sft.storage.token_stream.options import DEFAULT_SEQ_LENGTH, StreamOptions
from megatron_packed_sft.support.imports import load
from megatron_packed_sft.support.json_document import MANIFEST
from megatron_packed_sft.support.paths import is_url, redacted
from megatron_packed_sft.support.wording import plural
from megatron_packed_sft.tokens.store import TokenStore, open_token_store
from megatron_packed_sft.tokens.validate import is_token_store

if TYPE_CHECKING:
    from rich.console import RenderableType

_PACKED_COLUMNS = {"input_ids", "seq_start_id"}
_RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".gz", ".zst")


@dataclass(frozen=True)
class BinPreview:
    """A bin, or one sequence of a token store.

    Args:
        title: such as `bin 3 of 120`.
        where: the split or the store that it is in.
        number: of the bin or the sequence.
        sequences: the tokens of each sequence.
        origins: file and line of each sequence, where they are known.
        pack_size: of the bin; None for a sequence of a store.
        pad_id: the padding id of the bin.
        notes: further sentences about it.
    """

    title: str
    where: str
    number: int
    sequences: Sequence[Sequence[Token]]
    origins: Sequence[str | None] = ()
    pack_size: int | None = None
    pad_id: int | None = None
    notes: Sequence[str] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(map(len, self.sequences))

    @property
    def num_trained(self) -> int:
        """Trained tokens of all sequences."""
        return sum(token.is_trained for tokens in self.sequences for token in tokens)


class PackedPreviewer:
    """Opens packed data and previews its bins, or the sequences of a token store.

    Args:
        path: a dataset directory, a shard or file of any storage, a directory of shards, a token store or a token
            stream; or its URL: then the shard of a bin, or the whole token store, is fetched into the node's cache.
        request: which split or plan to show, and how to read a token stream.
        tokenizer: the path of the tokenizer that made it; by default it is found where the data was prepared.
    """

    def __init__(self, path: str, request: PreviewRequest, tokenizer: str | None = None) -> None:
        self.url = path if is_url(path) else None
        self.path = Path(path) if self.url is None else Path(base_name(self.url))
        self.where = str(path) if self.url is None else redacted(self.url)
        self.found: FoundTokenizer
        self._reader: BinReader | None = None
        self._store: TokenStore | None = None
        self._origins: BinOrigins | None = None
        if is_token_store(path):
            _refuse_other_option(request, ("seq_length", "pack_sequences", "eos_id"), "a token stream", self.where)
            _refuse_other_option(request, ("split",), "a dataset directory", self.where)
            self._open_store(tokenizer, request.plan)
        else:
            _refuse_other_option(request, ("plan",), "a token store", self.where)
            self._open_bins(request, tokenizer)
        self.decoder = TokenDecoder(self.found.tokenizer)

    @property
    def is_store(self) -> bool:
        """Whether it previews the sequences of a token store."""
        return self._store is not None

    @property
    def num_entries(self) -> int:
        """Number of bins, or of sequences of a store."""
        return len(self._store) if self._store is not None else len(self._bins)

    def draw(self, count: int, seed: int | None) -> list[int]:
        """Return the numbers of random bins or sequences, in ascending order."""
        if count < 1:
            raise InvalidInputError(f"--random is {count}; it must be at least 1")
        return sorted(random.Random(seed).sample(range(self.num_entries), min(count, self.num_entries)))

    def entry(self, number: int) -> BinPreview:
        """Return a bin, or a sequence of a store."""
        return self.sequence(number) if self.is_store else self.bin(number)

    def sample(self, position: int, seed: int) -> BinPreview:
        """Return the bin of a sample, numbered as in `create_sft_dataset(path, max_num_samples=..., seed=seed)`."""
        if self.is_store:
            raise InvalidInputError(
                "--sample needs bins, but a token store has sequences; use --sequence or add --plan"
            )
        if position < 0:
            raise InvalidInputError(f"--sample is {position}; samples are counted from 0")
        reader = self._bins
        by_dataset = SampleOrder(len(reader), seed=seed, fingerprint=reader.fingerprint)[position]
        by_recipe = SampleOrder(len(reader), seed=seed)[position]
        notes = [
            f"sample {position} of create_sft_dataset(..., max_num_samples=N, seed={seed}) is bin {by_dataset}; "
            f"packed-sft train seed={seed} reads bin {by_recipe} there; without max_num_samples it is bin {position}"
        ]
        return self.bin(by_dataset, notes)

    def bin(self, number: int, notes: Sequence[str] = ()) -> BinPreview:
        """Return a bin."""
        if self.is_store:
            raise InvalidInputError(
                f"{self.where} is a token store, which has sequences, not bins; use --sequence or add --plan FILE"
            )
        reader = self._bins
        self._refuse_outside("--bin", number, "bin")
        packed = reader.bin(number)
        origins = [] if self._origins is None else self._origins.of_bin(number)
        return BinPreview(
            f"bin {number:,} of {len(reader):,}",
            self.where,
            number,
            list(tokens_of_bin(packed, self.decoder)),
            [None if one is None else f"{one.file}, line {one.line}" for one in origins],
            reader.figures.pack_size,
            reader.figures.pad_id if reader.figures.pad_id is not None else reader.pad_id,
            notes,
        )

    def sequence(self, number: int) -> BinPreview:
        """Return a sequence of a token store."""
        if self._store is None:
            raise InvalidInputError(f"--sequence needs a token store, but {self.where} has bins; use --bin")
        self._refuse_outside("--sequence", number, "sequence")
        ids, weights = self._store.weighted(number)
        tokens = self.decoder.tokens(ids, weights)
        return BinPreview(f"sequence {number:,} of {len(self._store):,}", self.where, number, [tokens])

    @property
    def _bins(self) -> BinReader:
        assert self._reader is not None
        return self._reader

    def _open_bins(self, request: PreviewRequest, tokenizer: str | None) -> None:
        storage = None if self.url is not None else storage_of(self.path)
        stream = None
        if storage is not None and storage.name == "token_stream":
            stream = StreamOptions(
                seq_length=DEFAULT_SEQ_LENGTH if request.seq_length is None else request.seq_length,
                pack_sequences=bool(request.pack_sequences),
                eos_id=request.eos_id,
                tokenizer_eos_id=None if tokenizer is None else load_tokenizer(tokenizer).eos_id,
                spelling="flag",
            )
        else:
            _refuse_other_option(request, ("seq_length", "pack_sequences", "eos_id"), "a token stream", self.where)
        opened = open_data(self.url or self.path, work_dir=request.work_dir, stream=stream)
        split = request.split
        if split is None:
            split = "train" if "train" in opened.splits else next(iter(opened.splits))
        if split not in opened.splits:
            raise InvalidInputError(f"{self.where} has no split {split!r}; choose one of {', '.join(opened.splits)}")
        self._reader = opened.splits[split]
        if opened.is_dataset:
            self.where = f"{self.where}, split {split}"
        if opened.prepared_from is not None:
            self._origins = opened.prepared_from.origins(split)
        self.found = opened.find_tokenizer(tokenizer)

    def _open_store(self, tokenizer: str | None, plan: str | None) -> None:
        store = open_token_store(self.url or self.path)
        noted = noted_tokenizer_paths(self.path.resolve().parents[1])
        self.found = find_tokenizer(store.manifest.tokenizer, given=tokenizer, candidates=noted, beside=[Path.cwd()])
        if plan is None:
            self._store = store
            return
        its = self.found.tokenizer
        padding = () if its is None else (its.pad_id, its.eos_id)  # as prepare chooses it
        pad_id = next((one for one in padding if one is not None), 0)
        self._reader = open_bins(self.url or self.path, plan=plan, pad_id=pad_id).source

    def _refuse_outside(self, option: str, number: int, noun: str) -> None:
        if not 0 <= number < self.num_entries:
            raise InvalidInputError(
                f"{option} is {number}, but {self.where} has the {noun}s 0 to {self.num_entries - 1}; choose one"
            )


def bin_view(
    preview: BinPreview, previewer: PackedPreviewer, painter: Painter, *, ids: bool = False
) -> Iterator[RenderableType]:
    """Yield what to print about a bin or a sequence.

    Args:
        preview: the bin.
        previewer: what opened it.
        painter: for its text.
        ids: print one token per line, with its id.
    """
    from rich.text import Text

    yield Text.assemble((f"{visible(preview.where, breaks=False)}, {preview.title}", "bold"), f"  {_summary(preview)}")
    tokenizer = previewer.found.tokenizer
    found = f"tokenizer {tokenizer.name}" if tokenizer else previewer.found.note
    yield Text(visible(found, breaks=False), style="dim")
    for note in preview.notes:
        yield Text(note, style="dim")
    start = 0
    for number, tokens in enumerate(preview.sequences):
        trained = sum(token.is_trained for token in tokens)
        heading = f"sequence {number}: tokens {start}-{start + len(tokens) - 1}, {trained:,} trained"
        origin = preview.origins[number] if number < len(preview.origins) else None
        yield Text("")
        if not previewer.is_store:
            yield Text.assemble((heading, LABEL), f", from {visible(origin, breaks=False)}" if origin else "")
        yield tokens_table(tokens, painter) if ids else painter.text(tokens)
        start += len(tokens)
    if not ids:
        yield Text("")
        yield painter.legend()


def bin_json(preview: BinPreview, previewer: PackedPreviewer) -> dict[str, Any]:
    """Return a preview as plain values."""
    tokenizer = previewer.found.tokenizer
    return {
        "path": str(previewer.path) if previewer.url is None else redacted(previewer.url),
        "where": preview.where,
        "sequence" if previewer.is_store else "bin": preview.number,
        "of": previewer.num_entries,
        "num_tokens": preview.num_tokens,
        "num_trained": preview.num_trained,
        "pack_size": preview.pack_size,
        "tokenizer": None if tokenizer is None else {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        "notes": [*preview.notes, *([previewer.found.note] if previewer.found.note else [])],
        "sequences": [
            {
                "origin": preview.origins[number] if number < len(preview.origins) else None,
                "tokens": tokens_json(tokens),
            }
            for number, tokens in enumerate(preview.sequences)
        ],
    }


def refuse_unusable(path: str) -> None:
    """Raise an error for a path without anything to preview: no file, or the work directory of a preparation."""
    if is_url(path):
        expand_path(path)
        return
    if not os.path.lexists(path) and not glob.glob(path, recursive=True):
        raise InvalidInputError(f"{path} does not exist and matches no file; check the path")
    work = Path(path)
    if (work / "tokens").is_dir() and (work / "lock").exists():
        raise InvalidInputError(
            f"{path} is the work directory of a preparation; preview its dataset, or {work / 'tokens' / 'train'}"
        )


def is_packed(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is packed data or a token store, and not a file of chats."""
    if is_url(path):
        return _is_packed_url(os.fspath(path))
    location = Path(path)
    if not location.exists():
        return False
    if (location / DATASET).exists() or is_token_store(location):
        return True
    storage = storage_of(location)
    if storage is None:
        return location.is_dir() and any(one.name != "parquet" for _, one in shards_inside(location))
    return storage.name != "parquet" or _has_packed_columns(str(location))


def _is_packed_url(url: str) -> bool:
    """Return whether a URL is packed data, judging by its name and by what is below it."""
    name = base_name(url)
    if name.endswith(_RECORD_SUFFIXES) or any(letter in url for letter in "*?["):
        return False
    if name.endswith((".parquet", ".pq")):
        return object_info(url) is not None and _has_packed_columns(url)
    if name.endswith(".npy"):
        return True
    packed = has_dataset(url) or is_token_store(url) or object_info(child(url, MANIFEST)) is not None
    if not packed:
        refuse_unfinished(url)
    return packed


def _has_packed_columns(path: str) -> bool:
    """Return whether a Parquet file, local or of a URL, has bins: chats also come in Parquet files."""
    parquet = load("pyarrow.parquet", "parquet", "reading Parquet")
    with open_file(path) as file:
        try:
            return set(parquet.read_schema(file).names) >= _PACKED_COLUMNS
        except Exception:  # pyarrow raises many types; reading the file as chats says what is wrong with it
            return False


def _refuse_other_option(request: PreviewRequest, names: Sequence[str], kind: str, where: str) -> None:
    """Raise an error if an option was given that needs another kind of data."""
    for name in names:
        if getattr(request, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise InvalidInputError(f"{option} needs {kind}, and {where} is not one; leave it out")


def _summary(preview: BinPreview) -> str:
    share = preview.num_trained / max(1, preview.num_tokens)
    words = f"{plural(preview.num_tokens, 'token')}, {preview.num_trained:,} trained ({share:.1%})"
    if preview.pack_size is not None:
        full = preview.num_tokens / preview.pack_size
        words += f", {plural(len(preview.sequences), 'sequence')}, {full:.1%} of the pack size {preview.pack_size:,}"
    return words
