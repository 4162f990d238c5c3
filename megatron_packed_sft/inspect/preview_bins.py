"""Packed data to look at: a bin sequence by sequence, or a sequence of a token store, as tokens with their text."""

from __future__ import annotations

import glob
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_packed_sft.data.opened_bins import open_bins
from megatron_packed_sft.data.order.sample_order import SampleOrder
from megatron_packed_sft.data.readers.interface import BinReader
from megatron_packed_sft.encode.tokenizers.load import load_tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect.opened_data import FoundTokenizer, find_tokenizer, open_data
from megatron_packed_sft.inspect.painting import LABEL, Painter, visible
from megatron_packed_sft.inspect.preview_record_view import tokens_json, tokens_table
from megatron_packed_sft.inspect.tokens_of_bin import Token, TokenDecoder, tokens_of_bin
from megatron_packed_sft.prepare.origins import BinOrigins, noted_tokenizer_paths
from megatron_packed_sft.records.files import expand_path
from megatron_packed_sft.records.streams import open_file
from megatron_packed_sft.remote.filesystem import base_name, child
from megatron_packed_sft.remote.objects import object_info
from megatron_packed_sft.remote.uploads import refuse_unfinished
from megatron_packed_sft.storage.dataset_directory import DATASET, has_dataset
from megatron_packed_sft.storage.registry import shards_inside, storage_of
from megatron_packed_sft.storage.token_stream.options import DEFAULT_SEQ_LENGTH, StreamOptions
from megatron_packed_sft.storage.token_stream.storage import TokenStreamStorage
from megatron_packed_sft.support.imports import load
from megatron_packed_sft.support.json_document import MANIFEST
from megatron_packed_sft.support.paths import is_url, redacted
from megatron_packed_sft.support.wording import plural
from megatron_packed_sft.tokens.store import TokenStore, open_token_store
from megatron_packed_sft.tokens.validate import is_token_store

_PACKED_COLUMNS = {"input_ids", "seq_start_id"}
_RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json", ".gz", ".zst")


@dataclass(frozen=True)
class BinPreview:
    """A bin, or one sequence of a token store.

    Args:
        what: what it is called, such as `bin 3 of 120`.
        where: the split or the store that it is in.
        number: which one it is.
        sequences: its tokens.
        origins: file and line of each sequence, where that is still known.
        pack_size: what a bin can hold; None for a sequence of a store.
        pad_id: what fills sequences up.
        notes: further sentences about it.
    """

    what: str
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


def refuse_nothing(path: str) -> None:
    """Raise an error for a path that shows nothing: no file, or the work directory of a preparation."""
    if is_url(path):
        expand_path(path)
        return
    if not os.path.lexists(path) and not glob.glob(path, recursive=True):
        raise InvalidInputError(f"{path} does not exist and matches no file; check the path")
    work = Path(path)
    if (work / "tokens").is_dir() and (work / "lock").exists():
        raise InvalidInputError(
            f"{path} is the work directory of a preparation; look at its dataset, or at {work / 'tokens' / 'train'}"
        )


def is_packed(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is packed data or tokens, and not a file of chats."""
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


def _has_packed_columns(path: str) -> bool:
    """Return whether a Parquet file, local or of a URL, holds bins: chats come in such files, too."""
    parquet = load("pyarrow.parquet", "parquet", "reading Parquet")
    with open_file(path) as file:
        try:
            return set(parquet.read_schema(file).names) >= _PACKED_COLUMNS
        except Exception:  # pyarrow raises many types; whoever reads the file says what is wrong with it
            return False


def _is_packed_url(url: str) -> bool:
    """Return whether a URL is packed data, by its name and by what is below it."""
    name = base_name(url)
    if name.endswith(_RECORD_SUFFIXES) or any(letter in url for letter in "*?["):
        return False
    if name.endswith((".parquet", ".pq")):
        return object_info(url) is not None and _has_packed_columns(url)
    if name.endswith(".npy"):
        return True
    is_packed = has_dataset(url) or is_token_store(url) or object_info(child(url, MANIFEST)) is not None
    if not is_packed:
        refuse_unfinished(url)
    return is_packed


class PackedPreviewer:
    """Opens packed data and shows its bins.

    Args:
        path: a dataset directory, a shard or file of any storage, a directory of shards, or a token store; or the URL
            of one of these: then the shard that holds the bin, or the token store, is fetched into the node's cache.
        split: of a dataset directory; None takes train, or the only one.
        tokenizer: the path of the tokenizer that made it, if it is not to be looked for.
        plan: of a token store: show its bins and not its sequences.
        work_dir: the work directory that made it, if that is not beside it.
        seq_length: of a token stream: predictions of a window.
        pack_sequences: of a token stream: tell its documents apart.
        eos_id: of a token stream: ends a document; None takes what is recorded, or the tokenizer's end of sequence.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split: str | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        plan: str | os.PathLike[str] | None = None,
        work_dir: str | os.PathLike[str] | None = None,
        seq_length: int | None = None,
        pack_sequences: bool = False,
        eos_id: int | None = None,
    ) -> None:
        self.url = os.fspath(path) if is_url(path) else None
        self.path = Path(path) if self.url is None else Path(base_name(self.url))
        self.where = str(path) if self.url is None else redacted(self.url)
        self._reader: BinReader | None = None
        self._store: TokenStore | None = None
        self._origins: BinOrigins | None = None
        self.found: FoundTokenizer
        is_store = is_token_store(path)
        is_stream = self.url is None and isinstance(storage_of(self.path), TokenStreamStorage)
        about_streams = {"--seq-length": seq_length, "--pack-sequences": pack_sequences or None, "--eos-id": eos_id}
        option = next((name for name, value in about_streams.items() if value is not None), None)
        if option is not None and not is_stream:
            raise InvalidInputError(f"{option} goes with a token stream, and {path} is none; leave it out")
        stream = self._stream_options(tokenizer, seq_length, pack_sequences, eos_id) if is_stream else None
        if is_store:
            self._open_store(tokenizer, plan)
        else:
            if plan is not None:
                raise InvalidInputError(f"--plan goes with a token store, and {path} is packed already; leave it out")
            self._open_packed(split, tokenizer, work_dir, stream)
        if self._store is not None and split is not None:
            raise InvalidInputError(f"--split goes with a dataset directory, and {path} is a token store; leave it out")
        self.decoder = TokenDecoder(self.found.tokenizer)

    def _stream_options(
        self, tokenizer: Any, seq_length: int | None, pack_sequences: bool, eos_id: int | None
    ) -> StreamOptions:
        """Return how to read a token stream: documents end where it records that, or as its tokenizer ends them."""
        return StreamOptions(
            seq_length=DEFAULT_SEQ_LENGTH if seq_length is None else seq_length,
            pack_sequences=pack_sequences,
            eos_id=eos_id,
            tokenizer_eos_id=None if tokenizer is None else load_tokenizer(tokenizer).eos_id,
            spelling="flag",
        )

    def _open_packed(self, split: str | None, tokenizer: Any, work_dir: Any, stream: StreamOptions | None) -> None:
        opened = open_data(self.url or self.path, work_dir=work_dir, stream=stream)
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
        if self.url is not None:
            return
        parent = self.path.resolve().parent.parent
        if self.found.tokenizer is None and (parent / DATASET).exists():  # one shard of a dataset
            candidates = noted_tokenizer_paths(parent.with_name(f"{parent.name}.work"))
            self.found = find_tokenizer(opened.recorded_tokenizer, candidates=candidates)

    def _open_store(self, tokenizer: Any, plan: Any) -> None:
        store = open_token_store(self.url or self.path)
        recorded: Mapping[str, Any] | None = store.manifest.tokenizer
        candidates: list[str | os.PathLike[str]] = [*noted_tokenizer_paths(self.path.resolve().parents[1])]
        if recorded and recorded.get("name"):
            candidates.append(Path.cwd() / Path(str(recorded["name"])).name)
        self.found = find_tokenizer(recorded, given=tokenizer, candidates=candidates)
        if plan is None:
            self._store = store
        else:
            made = self.found.tokenizer
            padding = () if made is None else (made.pad_id, made.eos_id)  # as prepare chooses it
            pad_id = next((one for one in padding if one is not None), 0)
            self._reader = open_bins(self.url or self.path, plan=plan, pad_id=pad_id).source

    @property
    def is_store(self) -> bool:
        """Whether it shows the sequences of a token store."""
        return self._store is not None

    @property
    def num_entries(self) -> int:
        """Bins, or sequences of a store."""
        return len(self._store) if self._store is not None else len(self._bins)

    @property
    def _bins(self) -> BinReader:
        assert self._reader is not None
        return self._reader

    def draw(self, count: int, seed: int | None) -> list[int]:
        """Draw numbers by lot, and return them in order."""
        if count < 1:
            raise InvalidInputError(f"--random is {count}; draw at least 1")
        return sorted(random.Random(seed).sample(range(self.num_entries), min(count, self.num_entries)))

    def sample(self, position: int, seed: int) -> BinPreview:
        """Return the bin that is a sample of a dataset.

        Samples are numbered as `create_sft_dataset(path, max_num_samples=..., seed=seed)` does.
        """
        if self.is_store:
            raise InvalidInputError(
                "--sample is for bins, and a token store has sequences; use --sequence, or add --plan"
            )
        if position < 0:
            raise InvalidInputError(f"--sample is {position}; samples are counted from 0")
        reader = self._bins
        by_dataset = SampleOrder(len(reader), seed=seed, fingerprint=reader.fingerprint)[position]
        by_recipe = SampleOrder(len(reader), seed=seed)[position]
        notes = [
            f"sample {position} is bin {by_dataset} in the order of create_sft_dataset(..., max_num_samples=N, "
            f"seed={seed}); packed-sft train seed={seed} reads bin {by_recipe} there, and a dataset without "
            f"max_num_samples bin {position}"
        ]
        return self.bin(by_dataset, notes)

    def entry(self, number: int) -> BinPreview:
        """Return a bin, or a sequence of a store."""
        return self.sequence(number) if self.is_store else self.bin(number)

    def bin(self, number: int, notes: Sequence[str] = ()) -> BinPreview:
        """Return a bin."""
        if self.is_store:
            raise InvalidInputError(
                f"{self.where} is a token store, which has sequences and no bins; use --sequence, or add --plan FILE"
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
            raise InvalidInputError(f"--sequence goes with a token store, and {self.where} has bins; use --bin")
        self._refuse_outside("--sequence", number, "sequence")
        ids, weights = self._store.weighted(number)
        texts = self.decoder.texts(ids)
        tokens = [
            Token(text, int(one), position, 0, float(weight), int(one) in self.decoder.control_ids)
            for position, (text, one, weight) in enumerate(zip(texts, ids, weights, strict=True))
        ]
        return BinPreview(f"sequence {number:,} of {len(self._store):,}", self.where, number, [tokens])

    def _refuse_outside(self, option: str, number: int, noun: str) -> None:
        if not 0 <= number < self.num_entries:
            raise InvalidInputError(
                f"{option} is {number}, but {self.where} has the {noun}s 0 to {self.num_entries - 1}; choose one"
            )


if TYPE_CHECKING:
    from rich.console import RenderableType


def bin_view(
    preview: BinPreview, previewer: PackedPreviewer, painter: Painter, *, ids: bool = False
) -> Iterator[RenderableType]:
    """Yield what to show of a bin or a sequence.

    Args:
        preview: the bin.
        previewer: what opened it.
        painter: for its text.
        ids: show every token on a line of its own, with its id.
    """
    from rich.text import Text

    yield Text.assemble((f"{visible(preview.where, breaks=False)}, {preview.what}", "bold"), f"  {_summary(preview)}")
    tokenizer = previewer.found.tokenizer
    found = f"tokenizer {tokenizer.name}" if tokenizer else previewer.found.note
    yield Text(visible(found, breaks=False), style="dim")
    for note in preview.notes:
        yield Text(note, style="dim")
    start = 0
    for number, tokens in enumerate(preview.sequences):
        trained = sum(token.is_trained for token in tokens)
        words = f"sequence {number}: tokens {start}-{start + len(tokens) - 1}, {trained:,} trained"
        origin = preview.origins[number] if number < len(preview.origins) else None
        yield Text("")
        if not previewer.is_store:
            yield Text.assemble((words, LABEL), f", from {visible(origin, breaks=False)}" if origin else "")
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


def _summary(preview: BinPreview) -> str:
    share = preview.num_trained / max(1, preview.num_tokens)
    words = f"{plural(preview.num_tokens, 'token')}, {preview.num_trained:,} trained ({share:.1%})"
    if preview.pack_size is not None:
        full = preview.num_tokens / preview.pack_size
        words += f", {plural(len(preview.sequences), 'sequence')}, {full:.1%} of {preview.pack_size:,} full"
    return words
