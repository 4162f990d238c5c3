"""What a user's function for `data.samples` looks like: a path in, a map-style dataset of encoded samples out."""

from __future__ import annotations

from typing import Any

from megatron_packed_sft import open_token_store


class StoredSamples:
    """The sequences of a token store as samples of a tokenizer, with labels."""

    def __init__(self, path: str, **more: Any) -> None:
        self._store = open_token_store(path)
        self._more = more
        self.fingerprint = f"stored samples 1 {self._store.fingerprint} {more}"

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids, is_trained = self._store[index]
        labels = ids.astype("int64")
        labels[is_trained == 0] = -100
        return {"input_ids": ids, "labels": labels, **self._more}


def make_samples(path: str) -> StoredSamples:
    """The samples of a path."""
    return StoredSamples(path)


def make_pictures(path: str) -> StoredSamples:
    """Samples with something that a text model cannot see."""
    return StoredSamples(path, pixel_values=[[0.5]])


def make_anonymous(path: str) -> list[dict[str, Any]]:
    """Samples that do not say which they are."""
    return [StoredSamples(path)[0]]


def make_other_on_each_rank(path: str) -> StoredSamples:
    """Samples that depend on the rank, as no samples should."""
    import os

    return StoredSamples(path, rank=os.environ.get("RANK"))
