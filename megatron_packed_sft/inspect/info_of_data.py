"""Facts about packed data, token stores and plans, from manifests, headers and sizes; no array is read."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_packed_sft.packing.plan_file import read_plan_header
from megatron_packed_sft.prepare.origins import PreparedFrom
from megatron_packed_sft.prepare.usage import how_to_use
from megatron_packed_sft.storage.dataset_directory import DatasetDirectory, open_dataset
from megatron_packed_sft.storage.interface import Storage
from megatron_packed_sft.storage.registry import shards_inside, storage_of
from megatron_packed_sft.support.checksum import stored_size
from megatron_packed_sft.tokens.manifest import SEQUENCE_CHECKSUM_ALGORITHM
from megatron_packed_sft.tokens.store import open_token_store

Facts = dict[str, Any]

_MOST_SHARDS_MEASURED = 1000  # the size of more shards is estimated, because asking for each takes too long
# Names on disk that differ from the glossary.
_RENAMED = {"num_loss_tokens": "num_trained_tokens"}
_OF_A_SHARD = ("dtype", "bin_checksum_algorithm", "plan_fingerprint", "created_by")
_NUMBERS = (
    *(
        "num_files",
        "num_tokens_in_files",
        "num_bins",
        "num_sequences",
        "num_tokens",
        "num_loss_tokens",
        "pack_size",
        "max_seq_len",
        "max_seqs_per_bin",
    ),
    *("min_packed_len", "pad_seq_to_mult", "sum_loss_weights", "vocab_size", "pad_id"),
)


def dataset_facts(path: Path) -> Facts:
    """Return what dataset.json records of a dataset directory."""
    dataset = open_dataset(path)
    ordered = sorted(dataset.splits, key=lambda split: (split != "train", split))
    splits = {
        split: {"num_shards": len(dataset.splits[split]), **bin_facts(vars(dataset.figures[split]))}
        for split in ordered
    }
    first = dataset.figures[ordered[0]]
    size = _size_of(dataset)
    provenance = dataset.provenance
    prepared_from = PreparedFrom.of(dataset)
    return {
        "storage": dataset.storage.name,
        "splits": splits,
        "total": total_of(list(splits.values())),
        **size,
        "notes": [*size.get("notes", ()), *_verification(dataset, ordered[0])],
        "tokenizer": first.tokenizer or provenance.get("tokenizer"),
        "tokenizer_path": None if prepared_from is None else prepared_from.tokenizer_path,
        "chat_template": provenance.get("chat_template") or _template(first.chat_template_fingerprint),
        "sources": source_facts(provenance),
        "fingerprint": dataset.fingerprint,
        "plan_fingerprints": {name: one.get("plan_fingerprint") for name, one in provenance.get("splits", {}).items()},
        "made_by": provenance.get("made_by"),
        "how_to_use": how_to_use(
            str(path),
            packed_storage=dataset.storage.name,
            pack_size=first.pack_size,
            tokenizer_path=None if prepared_from is None else prepared_from.tokenizer_path,
        ),
    }


def shards_facts(path: Path) -> Facts:
    """Return what is recorded of a shard, a file or a directory of them, without reading a bin."""
    storage = storage_of(path)
    found = [(path, storage)] if storage is not None else shards_inside(path)
    parts = [_shard(shard, its_storage) for shard, its_storage in found if its_storage is not None]
    together = total_of(parts)
    first = parts[0]
    facts: Facts = {
        "storage": first["storage"],
        "num_shards": len(parts),
        "total": together,
        "num_bytes": sum(part["num_bytes"] for part in parts),
        "tokenizer": first.get("tokenizer"),
        "chat_template": _template(first.get("chat_template_fingerprint")),
        **{name: first[name] for name in _OF_A_SHARD if first.get(name)},
        "notes": list(dict.fromkeys(note for part in parts for note in part["notes"])),
        "how_to_use": how_to_use(
            str(path),
            packed_storage=first["storage"],
            pack_size=first["num_positions"] or together.get("pack_size"),
            tokenizer_path=None,
            in_windows=first["num_positions"] is not None,
        ),
    }
    if len(parts) == 1:
        facts["fingerprint"] = first["fingerprint"]
    return facts


def token_store_facts(path: Path) -> Facts:
    """Return what the manifests of a token store record."""
    store = open_token_store(path)
    manifests = [part.manifest for part in store.parts]
    num_trained = sum(one.num_trained_tokens for one in manifests)
    return {
        "num_parts": len(manifests),
        "total": {
            "num_sequences": len(store),
            "num_tokens": store.num_tokens,
            "num_trained_tokens": num_trained,
            "trained_share": _share(num_trained, store.num_tokens),
            "max_seq_len": max(one.max_seq_len for one in manifests),
            "mean_seq_len": _share(store.num_tokens, len(store)),
            "vocab_size": store.manifest.vocab_size,
            "has_weights": store.has_weights,
        },
        "dtype": store.manifest.dtype,
        "sequence_checksum_algorithm": SEQUENCE_CHECKSUM_ALGORITHM,
        "notes": [],
        "num_bytes": sum(record.bytes for one in manifests for record in one.files.values()),
        "tokenizer": store.manifest.tokenizer,
        "chat_template": _template(store.manifest.chat_template_fingerprint),
        "fingerprint": store.fingerprint,
        "created_by": store.manifest.created_by,
    }


def plan_facts(path: Path) -> Facts:
    """Return what the header of a plan's file records."""
    header = read_plan_header(path)
    accounting = header["accounting"]
    num_tokens = (
        accounting["num_tokens"] + accounting["num_overlap_tokens"] - sum(accounting["dropped_tokens"].values())
    )
    num_bins, num_items = header["num_bins"], header["num_items"]
    return {
        "strategy": header["strategy"],
        "method": header["method"],
        "total": {
            "num_bins": num_bins,
            "pack_size": header["pack_size"],
            "num_items": num_items,
            "num_tokens": num_tokens,
            "fullness": _share(num_tokens, num_bins * header["pack_size"]),
            "sequences_per_bin": _share(num_items, num_bins),
            "lower_bound": header["lower_bound"],
            "bins_above_lower_bound": num_bins - header["lower_bound"],
            "pad_seq_to_mult": header["pad_seq_to_mult"],
            "global_batch": header["global_batch"],
            "measure": header["measure"],
        },
        "accounting": accounting,
        "num_bytes": path.stat().st_size,
        "fingerprint": header["fingerprint"],
        "order_fingerprint": header["order_fingerprint"],
    }


def bin_facts(figures: Mapping[str, Any]) -> Facts:
    """Return the known numbers of some bins, and the shares and means that follow from them.

    Example:
        >>> bin_facts({"num_bins": 2, "pack_size": 8, "num_tokens": 12, "num_loss_tokens": 6})["fullness"]
        0.75
    """
    known = {_RENAMED.get(name, name): figures[name] for name in _NUMBERS if figures.get(name) is not None}
    num_bins, num_tokens = known.get("num_bins"), known.get("num_tokens")
    capacity = num_bins * known["pack_size"] if num_bins and known.get("pack_size") else None
    derived = {
        "trained_share": _share(known.get("num_trained_tokens"), num_tokens),
        "fullness": _share(num_tokens, capacity),
        "sequences_per_bin": _share(known.get("num_sequences"), num_bins),
        "mean_seq_len": _share(num_tokens, known.get("num_sequences")),
    }
    return known | {name: value for name, value in derived.items() if value is not None}


def source_facts(provenance: Mapping[str, Any]) -> dict[str, Facts]:
    """Return what was read of each source, what was dropped and why, and what of it is in the bins of all splits."""
    found = {}
    for name, recorded in provenance.get("sources", {}).items():
        in_bins = recorded.get("in_bins", {})
        dropped = Counter(recorded.get("dropped", {})) + Counter(recorded.get("dropped_by_plan", {}))
        num_tokens, num_trained = in_bins.get("num_tokens", 0), in_bins.get("num_trained_tokens", 0)
        found[name] = {
            "num_records": recorded.get("num_rows"),
            "dropped": dict(dropped),
            "num_sequences": in_bins.get("num_sequences", 0),
            "num_tokens": num_tokens,
            "num_trained_tokens": num_trained,
            "trained_share": _share(num_trained, num_tokens),
            "weight": recorded.get("weight"),
            "schema": recorded.get("schema"),
            "files": recorded.get("files", []),
        }
    return found


def total_of(parts: Sequence[Mapping[str, Any]]) -> Facts:
    """Return the numbers of several parts together, without those that are unknown for one of them."""
    sums = (
        "num_shards",
        "num_files",
        "num_tokens_in_files",
        "num_bins",
        "num_sequences",
        "num_tokens",
        "num_trained_tokens",
        "sum_loss_weights",
    )
    largest = ("pack_size", "max_seq_len", "max_seqs_per_bin", "pad_seq_to_mult", "vocab_size")
    extremes: dict[str, Callable[..., Any]] = {"min_packed_len": min, **dict.fromkeys(largest, max)}
    known: Facts = {}
    for name, reduce in {**dict.fromkeys(sums, math.fsum), **extremes}.items():
        values = [part[name] for part in parts if part.get(name) is not None]
        if len(values) == len(parts):
            result = reduce(values)
            known[name] = int(result) if all(isinstance(value, int) for value in values) else result
    return known | bin_facts({**known, "num_loss_tokens": known.get("num_trained_tokens")})


def _shard(path: Path, storage: Storage) -> Facts:
    recorded = storage.recorded(path)
    notes = list(recorded.get("notes", ()))
    if storage.in_memory and recorded.get("num_loss_tokens") is None:
        notes.append(f"a {storage.name} file records little about itself; `packed-sft report` reads the data")
    return {
        "storage": storage.name,
        **bin_facts(recorded),
        **{name: recorded.get(name) for name in ("tokenizer", "chat_template_fingerprint", "dtype", "created_by")},
        "plan_fingerprint": recorded.get("plan_fingerprint"),
        "bin_checksum_algorithm": recorded.get("bin_checksum_algorithm"),
        "num_positions": recorded.get("max_input_len"),
        "fingerprint": storage.checksum(path) if storage.has_manifest else None,
        "num_bytes": stored_size(path),
        "notes": notes,
    }


def _size_of(dataset: DatasetDirectory) -> Facts:
    """Return the bytes of all shards; of very many, some are measured and the rest is estimated from them."""
    entries = [(split, entry) for split, listed in dataset.splits.items() for entry in listed]
    recorded = [entry.num_bytes for _, entry in entries]
    if all(one is not None for one in recorded):
        return {"num_bytes": sum(one or 0 for one in recorded)}
    measured, missing = [], []
    for split, entry in islice(entries, _MOST_SHARDS_MEASURED):
        path = dataset.shard_path(split, entry)
        if os.path.lexists(path):
            measured.append((entry.num_bins, stored_size(path)))
        else:
            missing.append(f"{path} is missing; copy the dataset again")
    num_bytes = sum(size for _, size in measured)
    if len(measured) == len(entries):
        return {"num_bytes": num_bytes}
    share = sum(entry.num_bins for _, entry in entries) / max(sum(bins for bins, _ in measured), 1)
    return {"num_bytes": round(num_bytes * share), "num_bytes_is_estimated": True, "notes": missing}


def _verification(dataset: DatasetDirectory, split: str) -> list[str]:
    """Return the notes of the first shard, for example that its bins cannot be verified."""
    path = dataset.shard_path(split, dataset.splits[split][0])
    if dataset.url is not None or not dataset.storage.has_manifest or not os.path.lexists(path):
        return []
    return [f"{path}: {note}" for note in dataset.storage.recorded(path).get("notes", ())]


def _template(fingerprint: str | None) -> Facts | None:
    return None if fingerprint is None else {"fingerprint": fingerprint}


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
