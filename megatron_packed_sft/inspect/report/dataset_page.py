"""The page of a dataset as plain values: its splits, tables and settings, and the bins that it carries.

data ─ BinLengths ─▶ charts, tables
   └── TokensRead ─▶ suspicions ─▶ choose_bins ─▶ BinsInPage: one vocabulary, and the bins as numbers into it
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft._version import __version__
from megatron_packed_sft.data.bin_readers import BinReader
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect.opened_data import OpenedData
from megatron_packed_sft.inspect.report import charts, tables
from megatron_packed_sft.inspect.report.charts import StepShape
from megatron_packed_sft.inspect.report.read_bins import (
    BinLengths,
    Int64,
    bin_lengths,
    bins_to_read,
    read_tokens,
    spread,
)
from megatron_packed_sft.inspect.report.suspicions import find_suspicions
from megatron_packed_sft.inspect.tokens_of_bin import TokenDecoder, escape_invisible, sequence_ends, trained_weights
from megatron_packed_sft.prepare.origins import BinOrigins
from megatron_packed_sft.storage.bins import PackedBin

TOKENS_IN_PAGE = 700_000  # about 2.5 bytes each, and their texts
_MOST_BINS = 2_000


def dataset_page(
    data: OpenedData,
    *,
    tokenizer: str | None = None,
    global_batch: int | None = None,
    ranks: int | None = None,
    bins: Sequence[int] = (),
    tokens_in_page: int = TOKENS_IN_PAGE,
) -> dict[str, Any]:
    """Return what the page of a dataset shows.

    Args:
        data: the dataset.
        tokenizer: the path of its tokenizer; by default it is found where the data was prepared.
        global_batch: bins per step, for the balance over ranks; by default what the data was packed for.
        ranks: data-parallel ranks that share a step.
        bins: bins of the first split to include.
        tokens_in_page: about how many tokens the included bins may have.
    """
    found = data.find_tokenizer(tokenizer)
    decoder = TokenDecoder(found.tokenizer)
    in_page = BinsInPage(decoder)
    room = _room(data, tokens_in_page)
    splits = {}
    for number, (split, reader) in enumerate(data.splits.items()):
        asked = _checked(bins, reader, split) if number == 0 else []
        shape = StepShape.choose(len(reader), _recorded_batch(data), global_batch, ranks)
        splits[split] = _split(data, split, reader, decoder, in_page, shape, asked, room[split])
    sources, drops = tables.sources(data), tables.drops(data)
    return {
        "kind": "dataset",
        "title": data.name,
        "version": __version__,
        "storage": data.storage,
        "tokenizer": dict(data.recorded_tokenizer or {}) or None,
        "tokenizer_note": found.note,
        "chat_template": next((one.figures.chat_template_fingerprint for one in data.splits.values()), None),
        "splits": splits,
        "num_bins_shown": sum(one["shown"]["num_bins"] for one in splits.values()),
        "bins": in_page.to_json(),
        "sources": sources,
        "source_table": tables.table(tables.SOURCES, sources),
        "drops": drops,
        "drop_table": tables.table(tables.DROPS, drops),
        "has_provenance": bool(data.provenance.get("sources")),
        "settings": _flat(data.provenance.get("settings", {})),
    }


def _split(
    data: OpenedData,
    split: str,
    reader: BinReader,
    decoder: TokenDecoder,
    in_page: BinsInPage,
    shape: StepShape,
    asked: list[int],
    room: int,
) -> dict[str, Any]:
    lengths = bin_lengths(reader)
    pack_size = reader.figures.pack_size
    read = read_tokens(reader, bins_to_read(lengths, np.array(asked, np.int64)))
    is_padded = (reader.figures.pad_seq_to_mult or 1) > 1
    are_windows = data.storage == "token_stream"
    suspicions = find_suspicions(read, decoder, reader.pad_id if is_padded else None, are_windows=are_windows)
    pointed_at = [one.bin for suspicion in suspicions for one in suspicion.examples]
    chosen = choose_bins(lengths, asked, pointed_at, room)
    for suspicion in suspicions:
        suspicion.examples = [one for one in suspicion.examples if one.bin in set(chosen.tolist())]
    origins = None if data.prepared_from is None else data.prepared_from.origins(split)
    in_page.add(split, reader, chosen, origins)
    shares = read.num_trained / read.lengths
    packing = data.provenance.get("settings", {}).get("packing", {})
    return {
        "totals": tables.totals(reader.figures, lengths)
        | {"num_shards": data.num_shards.get(split), "num_trained_read": int(read.num_trained.sum())},
        "lengths": charts.length_histogram(lengths.lengths, pack_size),
        "fullness": charts.fullness(lengths, pack_size),
        "trained": charts.histogram(shares, 0, 1, 50) | {"mean": float(shares.mean())},
        "attention": charts.attention(lengths, pack_size, shape)
        | tables.balance_tables(lengths.attention_costs, shape),
        "strategies": tables.strategies(lengths.lengths, pack_size, packing.get("max_seqs_per_bin")),
        "suspicions": [one.to_json() for one in suspicions],
        "read": {"num_bins": len(read.bins), "num_sequences": len(read.starts), "num_tokens": len(read.ids)},
        "shown": {"num_bins": len(chosen), "of": lengths.num_bins},
    }


def _room(data: OpenedData, tokens_in_page: int) -> dict[str, int]:
    """Return how many tokens of each split to include; large splits get what small ones do not need."""
    sizes = {
        split: reader.figures.num_tokens or len(reader) * reader.figures.pack_size
        for split, reader in data.splits.items()
    }
    room, left = {}, tokens_in_page
    for number, split in enumerate(sorted(sizes, key=lambda one: (sizes[one], one))):
        room[split] = min(sizes[split], left // (len(sizes) - number))
        left -= room[split]
    return room


def _checked(bins: Sequence[int], reader: BinReader, split: str) -> list[int]:
    for one in bins:
        if not 0 <= one < len(reader):
            raise InvalidInputError(f"bin {one} is not in split {split!r}, which has {len(reader):,} bins")
    return list(bins)


def _recorded_batch(data: OpenedData) -> int | None:
    """Return the global batch that the data was packed for."""
    batch: int | None = data.provenance.get("settings", {}).get("packing", {}).get("global_batch")
    return batch


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[list[Any]]:
    """Return nested settings as [dotted key, value]."""
    found: list[list[Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append([f"{prefix}{key}", value])
    return found


def choose_bins(lengths: BinLengths, asked: Iterable[int], suspicious: Iterable[int], num_tokens: int) -> Int64:
    """Return the bins to include: the requested ones, those of suspicious examples, then an even spread of the others.

    Args:
        lengths: of all bins.
        asked: bins that the user requested.
        suspicious: bins of suspicious examples; they take at most half of the tokens.
        num_tokens: about how many tokens the page may have.
    """
    sizes = lengths.bin_tokens
    if int(sizes.sum()) <= num_tokens and lengths.num_bins <= _MOST_BINS:
        return np.arange(lengths.num_bins)
    chosen: dict[int, None] = dict.fromkeys(asked)
    used = int(sum(sizes[one] for one in chosen))
    for one in suspicious:
        if one not in chosen and used + int(sizes[one]) <= num_tokens // 2:
            chosen[one] = None
            used += int(sizes[one])
    left = max(1 if not chosen else 0, (num_tokens - used) // max(1, int(sizes.mean())))
    for one in spread(lengths.num_bins, min(left, _MOST_BINS)).tolist() if left else []:
        if one not in chosen and (used + int(sizes[one]) <= num_tokens or not chosen):
            chosen[one] = None
            used += int(sizes[one])
    return np.array(sorted(chosen), np.int64)


class BinsInPage:
    """The bins that a page carries, in a small form that the page decodes.

    vocabulary   id and text of every token that occurs, the most frequent first
    bin          numbers into the vocabulary, one to three bytes each, as base64; runs of one loss weight; starts of
                 sequences, and the records that they came from

    Args:
        decoder: gives tokens their texts.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._counts: Counter[int] = Counter()
        self._files: dict[str, int] = {}
        self._bins: dict[str, list[tuple[int, PackedBin, list[Any] | None]]] = {}

    def add(self, split: str, reader: BinReader, numbers: Int64, origins: BinOrigins | None) -> None:
        """Add bins of a split."""
        for number in numbers.tolist():
            packed = reader.bin(number)
            packed = PackedBin(packed.input_ids.copy(), packed.loss_mask.copy(), packed.seq_start_id.copy())
            ids, counts = np.unique(packed.input_ids, return_counts=True)
            self._counts.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
            origin_of = None
            if origins is not None:
                found = origins.of_bin(number)
                if len(found) == packed.num_sequences:
                    origin_of = [None if one is None else [self._file(one.file), one.line] for one in found]
            self._bins.setdefault(split, []).append((number, packed, origin_of))

    def _file(self, path: str) -> int:
        return self._files.setdefault(path, len(self._files))

    def to_json(self) -> dict[str, Any]:
        """Return the vocabulary, the files, and the bins of each split."""
        ordered = sorted(self._counts, key=lambda one: (-self._counts[one], one))
        place = {one: number for number, one in enumerate(ordered)}
        return {
            "has_text": self._decoder.tokenizer is not None,
            "ids": ordered,
            "texts": [escape_invisible(self._decoder.text(one)) for one in ordered],
            "control": [place[one] for one in ordered if one in self._decoder.control_ids],
            "files": list(self._files),
            "splits": {split: [self._bin(place, *one) for one in bins] for split, bins in self._bins.items()},
        }

    def _bin(self, place: dict[int, int], number: int, packed: PackedBin, origins: list[Any] | None) -> dict[str, Any]:
        ids = packed.input_ids.tolist()
        return {
            "number": number,
            "tokens": _as_text([place[one] for one in ids]),
            "starts": packed.seq_start_id.tolist(),
            "runs": _runs(trained_weights(packed)),
            "texts": self._other_texts(packed),
            **({} if origins is None else {"origins": origins}),
        }

    def _other_texts(self, packed: PackedBin) -> list[Any]:
        """Return [position, text, ...] of tokens whose text depends on their neighbours: parts of characters."""
        found: list[Any] = []
        for start, end in zip(packed.seq_start_id.tolist(), sequence_ends(packed).tolist(), strict=True):
            ids = packed.input_ids[start:end].tolist()
            for position, (one, text) in enumerate(zip(ids, self._decoder.texts(ids), strict=True)):
                if text != self._decoder.text(one):
                    found += [start + position, escape_invisible(text)]
        return found


def _as_text(numbers: list[int]) -> str:
    """Return numbers as base64 of bytes with seven bits each, lowest first; the eighth bit says that more follow."""
    data = bytearray()
    for number in numbers:
        while number >= 128:
            data.append(number & 127 | 128)
            number >>= 7
        data.append(number)
    return base64.b64encode(bytes(data)).decode()


def _runs(weights: npt.NDArray[np.float32]) -> list[float]:
    """Return [length, weight, length, weight, ...] of stretches of tokens with one weight.

    Example:
        >>> _runs(np.array([0, 0, 1, 0.5], np.float32))
        [2, 0, 1, 1, 1, 0.5]
    """
    edges = np.concatenate([[0], np.flatnonzero(np.diff(weights)) + 1, [len(weights)]])
    runs: list[float] = []
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        weight = round(float(weights[start]), 6)
        runs += [end - start, int(weight) if weight.is_integer() else weight]
    return runs
