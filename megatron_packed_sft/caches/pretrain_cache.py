"""`build_pretrain_cache`: a stream of texts to flat shards of token ids, in bounded memory.

    texts ─ shuffle buffer ─▶ batches ─ tokenizer ─▶ ids and an eot after each document ─▶ val, train ─▶ shards

Which tokens are in which split depends on the documents and the seed alone, never on how they were batched.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from megatron_packed_sft.caches.meta import file_records
from megatron_packed_sft.caches.publishing import common_meta, publish, staged
from megatron_packed_sft.caches.shuffle import HeldOut, seeded, shuffled
from megatron_packed_sft.caches.text_encoder import SPECIAL_TOKENS, EncodedTexts, Ids, TextEncoder
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.token_stream.writer import TokenShardWriter, token_dtype_for
from megatron_packed_sft.support.atomic import Staging
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.support.wording import plural

logger = logging.getLogger(__name__)

TRAIN, VAL = "train", "val"
_SHUFFLE, _SPLIT, _SHUFFLE_VAL = range(3)  # purposes of random numbers
_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 20, 1024


class Documents(NamedTuple):
    """A batch of documents, each ended by the separator."""

    ids: Ids
    lengths: Ids


def build_pretrain_cache(
    texts: Iterable[str],
    out_dir: str | os.PathLike[str],
    *,
    tokenizer: Any,
    max_train_tokens: int | None,
    max_val_tokens: int | None,
    shard_bytes: int,
    seed: int,
    shuffle_buffer: int | None,
    val_texts: Iterable[str] | None = None,
    val_frac: float | None = None,
    special_tokens: Mapping[str, str] = SPECIAL_TOKENS,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    extra_meta: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    overwrite: bool = False,
    on_tokens: Callable[[int], None] | None = None,
) -> None:
    """Write `out_dir/train/shard_*.bin`, `out_dir/val/shard_*.bin` and `out_dir/meta.json`.

    Every document is followed by the eot token (or the tokenizer's end of sequence). Of the stream that results, the
    first `max_val_tokens` tokens are val and the next `max_train_tokens` are train, exactly; reading ends there. The
    document in which val ends continues in train. `val_frac` and `val_texts` replace this rule.

    Args:
        texts: documents, read once, in order.
        out_dir: the cache; published whole, or not at all.
        tokenizer: from `load_tokenizer`, of SentencePiece or Hugging Face, or anything with `encode`.
        max_train_tokens, max_val_tokens: the most tokens of a split, eot included; None for no limit.
        shard_bytes: the size of every shard but the last.
        seed: of the shuffle and of `val_frac`; the same seed and texts give the same bytes.
        shuffle_buffer: how many documents the shuffle holds; None keeps the order.
        val_texts: documents for val; `texts` are for train then.
        val_frac: the share of documents, drawn by the seed, that goes to val as whole documents.
        special_tokens: the texts of the tokens sys, usr, asst and eot, for tokenizers with other ones.
        dataset_name, dataset_config: for meta.json; the name of `out_dir` unless given.
        extra_meta: further keys for meta.json, or a function that is called for them at the end.
        overwrite: replace an earlier cache at `out_dir`.
        on_tokens: called with the number of tokens after each batch.

    Raises:
        InvalidInputError: an argument is wrong, a text is not a string, or it holds the text of a special token.
        TargetExistsError: there is something at `out_dir`.
    """
    encoder = TextEncoder(tokenizer, special_tokens)
    _check_limits(max_train_tokens, max_val_tokens, val_texts is not None, val_frac)
    rule = _split_rule(max_train_tokens, max_val_tokens, val_texts is not None, val_frac)
    with staged(out_dir, overwrite=overwrite) as staging:
        with _Splits(staging, encoder, shard_bytes, max_train_tokens, max_val_tokens, on_tokens) as splits:
            batches = _DocumentBatches(encoder)
            order = _ordered(texts, shuffle_buffer, seed, _SHUFFLE)
            if val_texts is not None:
                splits.fill(VAL, batches.of(_ordered(val_texts, shuffle_buffer, seed, _SHUFFLE_VAL)))
                splits.fill(TRAIN, batches.of(order))
            elif val_frac is not None:
                splits.deal(batches.of(order), HeldOut(val_frac, seeded(seed, _SPLIT)))
            else:
                splits.fill_both(batches.of(order))
            records = splits.finish()
        meta = {
            **common_meta(encoder, local_path(out_dir), dataset_name, dataset_config, seed),
            "split_rule": rule,
            "eos_id": encoder.separator_id(),
            "shard_bytes": shard_bytes,
            "shuffle_buffer": shuffle_buffer,
            "max_train_tokens": max_train_tokens,
            "max_val_tokens": max_val_tokens,
            **splits.num_documents(),
            **splits.totals(),
            "totals": splits.totals(),
            **file_records(records),
            **((extra_meta() if callable(extra_meta) else extra_meta) or {}),
        }
        _announce(staging, splits.totals(), batches.num_empty, max_train_tokens)
        publish(staging, meta)


def _announce(staging: Staging, totals: Mapping[str, int], num_empty: int, max_train_tokens: int | None) -> None:
    if not any(totals.values()):
        raise InvalidInputError(f"there is no text for {staging.target}; give at least one document with text")
    if totals["train_tokens"] == 0 and max_train_tokens != 0:
        logger.warning(
            "%s: all %s went to val and none to train; lower max_val_tokens, or use val_frac",
            staging.target,
            plural(totals["val_tokens"], "token"),
        )
    if num_empty:
        logger.warning("%s: left out %s without tokens; remove them", staging.target, plural(num_empty, "document"))


def _check_limits(max_train: int | None, max_val: int | None, has_val_texts: bool, val_frac: float | None) -> None:
    for name, limit in (("max_train_tokens", max_train), ("max_val_tokens", max_val)):
        if limit is not None and (type(limit) is not int or limit < 0):
            raise InvalidInputError(f"{name} is {limit!r}; give an integer of at least 0, or None for no limit")
    if max_train == 0 and max_val == 0:
        raise InvalidInputError("max_train_tokens and max_val_tokens are both 0; give at least one of them more")
    if has_val_texts and val_frac is not None:
        raise InvalidInputError("val_texts and val_frac are both given; val comes from one of them")
    if val_frac is not None and not 0 <= val_frac < 1:
        raise InvalidInputError(f"val_frac is {val_frac}; give a share of at least 0 and below 1")
    if max_val is None and not has_val_texts and val_frac is None:
        raise InvalidInputError(
            "max_val_tokens is None, so all tokens would go to val; give a number, val_frac or val_texts"
        )


def _split_rule(max_train: int | None, max_val: int | None, has_val_texts: bool, val_frac: float | None) -> str:
    train, val = (
        f"up to {plural(limit, 'token')}" if limit is not None else "all tokens" for limit in (max_train, max_val)
    )
    if has_val_texts:
        return f"val: {val} of the documents given for val; train: {train} of the others"
    if val_frac is not None:
        return (
            f"by document: one of every 1/{val_frac} documents, drawn with torch by the seed, goes to val ({val}), "
            f"the others to train ({train})"
        )
    return f"by token, in stream order: the first to val ({val}), the next to train ({train})"


def _ordered(texts: Iterable[str], shuffle_buffer: int | None, seed: int, purpose: int) -> Iterator[str]:
    generator = seeded(seed, purpose)  # also without a shuffle, so that a wrong seed is found
    return iter(texts) if shuffle_buffer is None else shuffled(texts, shuffle_buffer, generator)


class _DocumentBatches:
    """Turns texts into batches of documents; counts them."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder
        self._separator = encoder.separator_id()
        special = {number for number in encoder.special_ids.values() if number is not None}
        self._forbidden = special | {self._separator}
        self._num_read = 0
        self.num_empty = 0  # of what was read, which may be a batch more than what was written

    def of(self, texts: Iterator[str]) -> Iterator[Documents]:
        batch: list[str] = []
        num_characters = 0
        for text in texts:
            if not isinstance(text, str):
                place = self._num_read + len(batch) + 1
                raise InvalidInputError(f"document {place:,} is of the type {type(text).__name__}; give strings")
            batch.append(text)
            num_characters += len(text)
            if num_characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
                yield self._encoded(batch)
                batch, num_characters = [], 0
        if batch:
            yield self._encoded(batch)

    def _encoded(self, batch: list[str]) -> Documents:
        found = self._encoder.encode(batch)
        odd = self._encoder.first_with_special(found, self._forbidden)
        if odd is not None:
            raise InvalidInputError(
                f"document {self._num_read + odd + 1:,} holds the text of a special token, which "
                "this tokenizer would take for the token; remove it, or use the tokenizer of load_tokenizer, which "
                "reads it as text"
            )
        kept = found.lengths > 0
        self._num_read += len(batch)
        self.num_empty += len(batch) - int(kept.sum())
        return _with_separator(EncodedTexts(found.ids, found.lengths[kept]), self._separator)


def _with_separator(found: EncodedTexts, separator: int) -> Documents:
    """Put a token after each document."""
    lengths = found.lengths + 1
    ends = np.cumsum(lengths) - 1
    ids = np.empty(len(found.ids) + len(lengths), np.int64)
    is_text = np.ones(len(ids), np.bool_)
    is_text[ends] = False
    ids[is_text] = found.ids
    ids[ends] = separator
    return Documents(ids, lengths)


class _Splits:
    """The shards of both splits in the making, each with its limit."""

    def __init__(
        self,
        staging: Staging,
        encoder: TextEncoder,
        shard_bytes: int,
        max_train: int | None,
        max_val: int | None,
        on_tokens: Callable[[int], None] | None,
    ) -> None:
        self._limits = {TRAIN: max_train, VAL: max_val}
        self._on_tokens = on_tokens
        self._separator = encoder.separator_id()
        self._num_ends = {TRAIN: 0, VAL: 0}
        self._cleanup = contextlib.ExitStack()
        dtype = token_dtype_for(encoder.vocab_size)
        self._writers = {
            split: self._cleanup.enter_context(TokenShardWriter(staging.path / split, dtype, shard_bytes))
            for split in (TRAIN, VAL)
        }

    def __enter__(self) -> _Splits:
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()

    def fill(self, split: str, batches: Iterator[Documents]) -> None:
        """Write documents to one split until it is full."""
        if self._is_full(split):
            return
        for batch in batches:
            self._append(split, batch.ids)
            if self._is_full(split):
                return

    def fill_both(self, batches: Iterator[Documents]) -> None:
        """Write the first tokens to val until it is full, and the next ones to train."""
        for batch in batches:
            self._append(TRAIN, self._append(VAL, batch.ids))
            if self._is_full(VAL) and self._is_full(TRAIN):
                return

    def deal(self, batches: Iterator[Documents], held_out: HeldOut) -> None:
        """Write whole documents to val or train, as they are drawn; what a full split draws is left out."""
        for batch in batches:
            is_val = np.fromiter((held_out.next() for _ in batch.lengths), np.bool_, len(batch.lengths))
            of_val = np.repeat(is_val, batch.lengths)
            self._append(VAL, batch.ids[of_val])
            self._append(TRAIN, batch.ids[~of_val])
            if self._is_full(VAL) and self._is_full(TRAIN):
                return

    def finish(self) -> dict[str, FileRecord]:
        """Make everything durable; return the files by their paths inside the cache."""
        return {
            f"{split}/{name}": record
            for split, writer in self._writers.items()
            for name, record in writer.finish().items()
        }

    def totals(self) -> dict[str, int]:
        """Return the number of tokens of each split."""
        return {f"{split}_tokens": writer.num_tokens for split, writer in self._writers.items()}

    def num_documents(self) -> dict[str, int]:
        """Return how many documents end in each split."""
        return {f"{split}_documents": count for split, count in self._num_ends.items()}

    def _append(self, split: str, ids: Ids) -> Ids:
        """Write ids up to the limit; return what is left."""
        writer, limit = self._writers[split], self._limits[split]
        room = len(ids) if limit is None else min(len(ids), limit - writer.num_tokens)
        writer.append(ids[:room])
        self._num_ends[split] += int((ids[:room] == self._separator).sum())
        if self._on_tokens is not None and room:
            self._on_tokens(room)
        return ids[room:]

    def _is_full(self, split: str) -> bool:
        limit = self._limits[split]
        return limit is not None and self._writers[split].num_tokens >= limit
