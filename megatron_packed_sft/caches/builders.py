"""`build_pretrain_cache` and `build_sft_cache`: a stream of texts or chats to flat files of ids, in bounded memory.

    texts ─ shuffle buffer ─▶ batches ─ tokenizer ─▶ ids, each document ended by eot ─▶ val, train ─▶ shards
    chats ──────────────────▶ batches ─ tokenizer ─▶ [usr] ids [eot] [asst] ids [eot] ─▶ one file ─▶ train, val

The tokens of a split depend on the input and the seed alone, never on how it was batched.
"""

from __future__ import annotations

import contextlib
import logging
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from megatron_packed_sft.caches.cache_folder import common_meta, file_records, publish, staged
from megatron_packed_sft.caches.text_encoder import ALGORITHM, SPECIAL_TOKENS, EncodedTexts, Ids, TextEncoder
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.token_stream.writer import TOKEN_DTYPES, TokenShardWriter, token_dtype_for
from megatron_packed_sft.support.array_files import AppendedFile, GrowingArrayFile
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.wording import plural

logger = logging.getLogger(__name__)

ROLE_TOKENS = {"system": "sys", "user": "usr", "assistant": "asst"}
_BATCH_CHARACTERS, _BATCH_SIZE = 1 << 20, 1024
_BLOCK_TOKENS = 1 << 21
_DRAWS_AT_ONCE = 1024  # a single draw costs as much as a hundred
_SHUFFLE, _SPLIT, _SHUFFLE_VAL = range(3)  # purposes of random numbers
_LARGEST_SEED = (1 << 63) - 1


class Message(TypedDict):
    """One message of an example."""

    role: Literal["system", "user", "assistant"]
    content: str


def build_pretrain_cache(
    texts: Iterable[str],
    out_dir: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    max_train_tokens: int | None,
    max_val_tokens: int | None,
    shard_bytes: int,
    seed: int,
    shuffle_buffer: int | None,
    val_texts: Iterable[str] | None = None,
    val_frac: float | None = None,
    special_tokens: Mapping[str, str] = SPECIAL_TOKENS,
    meta: Mapping[str, Any] | None = None,
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
        tokenizer: of `load_tokenizer`.
        max_train_tokens, max_val_tokens: the most tokens of a split, eot included; None for no limit.
        shard_bytes: the size of every shard but the last.
        seed: of the shuffle and of `val_frac`; the same seed and texts give the same bytes.
        shuffle_buffer: the number of documents that the shuffle holds; None keeps the order.
        val_texts: documents for val; `texts` are for train then.
        val_frac: the share of documents, drawn by the seed, that goes to val as whole documents.
        special_tokens: the texts of the tokens sys, usr, asst and eot, for tokenizers with other ones.
        meta: further keys for meta.json, such as dataset_name (the name of `out_dir`) and dataset_config (null).
        overwrite: replace an earlier cache at `out_dir`.
        on_tokens: called with the number of tokens after each batch.

    Raises:
        InvalidInputError: an argument is wrong, or a text is not a string.
        TargetExistsError: `out_dir` exists.
    """
    encoder = TextEncoder(tokenizer, special_tokens)
    limits = {"train": max_train_tokens, "val": max_val_tokens}
    rule = _split_rule(limits, val_texts is not None, val_frac)
    generators = [_seeded(seed, purpose) for purpose in (_SHUFFLE, _SPLIT, _SHUFFLE_VAL)]
    documents = _DocumentBatches(encoder)
    with staged(out_dir, overwrite=overwrite) as staging:
        with _Splits(staging.path, encoder, shard_bytes, limits, on_tokens) as splits:
            batches = documents.of(_shuffled(texts, shuffle_buffer, generators[_SHUFFLE]))
            if val_texts is not None:
                splits.fill(documents.of(_shuffled(val_texts, shuffle_buffer, generators[_SHUFFLE_VAL])), "val")
                splits.fill(batches, "train")
            elif val_frac is not None:
                splits.deal(batches, _held_out(val_frac, generators[_SPLIT]))
            else:
                splits.fill(batches, "val", "train")
            records = splits.finish()
        totals = {f"{split}_tokens": splits.num_tokens(split) for split in ("train", "val")}
        if not any(totals.values()):
            raise InvalidInputError(f"no text was given for {staging.target}; give at least one document with text")
        if not totals["train_tokens"] and max_train_tokens != 0:
            logger.warning("%s: all tokens went to val; lower max_val_tokens, or use val_frac", staging.target)
        if documents.num_empty:
            logger.warning("%s: %s without text dropped", staging.target, plural(documents.num_empty, "document"))
        described = {
            **common_meta(encoder, staging.target, seed),
            "split_rule": rule,
            "eos_id": encoder.separator_id,
            "shard_bytes": shard_bytes,
            "shuffle_buffer": shuffle_buffer,
            **totals,
            "totals": totals,
            **file_records(records),
            **(meta or {}),
        }
        publish(staging, described)


def build_sft_cache(
    examples: Iterable[Sequence[Message]],
    out_dir: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    val_frac: float,
    seed: int,
    special_tokens: Mapping[str, str] = SPECIAL_TOKENS,
    meta: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    on_tokens: Callable[[int], None] | None = None,
) -> None:
    """Write `train_tokens.bin`, `train_idx.npy`, `val_tokens.bin`, `val_idx.npy` and `meta.json` to `out_dir`.

    Each message becomes the token of its role, the ids of its content and the eot token. An entry of an idx file is the
    number of tokens before an example (int64); the example ends where the next one begins, the last at the end of the
    file. Of n examples, `int(n * val_frac)` go to val, at least one if there are two and `val_frac` is above 0; they
    are the first of `torch.randperm(n)` by the seed. Both splits keep the order of the input.

    Args:
        examples: lists of messages, read once, in order.
        out_dir: the cache; published whole, or not at all.
        tokenizer: as in `build_pretrain_cache`; it must have the four special tokens.
        val_frac: the share of the examples that goes to val.
        seed: of the draw; the same seed and examples give the same bytes.
        special_tokens, meta, overwrite, on_tokens: as in `build_pretrain_cache`.

    Raises:
        InvalidInputError: an argument or an example is wrong, or the tokenizer lacks a special token.
        TargetExistsError: `out_dir` exists.
    """
    if not 0 <= val_frac <= 1:
        raise InvalidInputError(f"val_frac is {val_frac}; give a share from 0 to 1")
    generator = _seeded(seed)
    encoder = TextEncoder(tokenizer, special_tokens)
    batches = _ExampleBatches(encoder)
    dtype = TOKEN_DTYPES[token_dtype_for(encoder.vocab_size)]
    with staged(out_dir, overwrite=overwrite) as staging, contextlib.ExitStack() as closing:
        # The size of val is known at the end, so all examples go to one file, and are dealt from there.
        spool = AppendedFile(staging.path / "all_tokens.bin", ALGORITHM)
        closing.callback(spool.close)
        numbers = array("q")
        for batch in batches.of(examples):
            spool.append(batch.ids.astype(dtype))
            numbers.frombytes(batch.lengths.tobytes())
            if on_tokens is not None:
                on_tokens(len(batch.ids))
        if not numbers:
            raise InvalidInputError(f"no examples were given for {staging.target}; give at least one with messages")
        lengths = np.frombuffer(numbers, np.int64)
        is_val = _drawn(len(lengths), val_frac, generator)
        records = _deal(spool.path, dtype, lengths, is_val)
        with os_errors("remove", spool.path):
            os.unlink(spool.path)
        for count, problem in (
            (batches.num_empty, "without messages dropped"),
            (batches.num_untrained, "without an assistant message: none of their tokens counts in the loss"),
        ):
            if count:
                logger.warning("%s: %s %s", staging.target, plural(count, "example"), problem)
        totals = {"train_examples": int((~is_val).sum()), "val_examples": int(is_val.sum())}
        described = {
            **common_meta(encoder, staging.target, seed),
            "split_rule": f"by example: the first int(n * {val_frac}) of torch.randperm(n) by the seed go to val",
            "val_frac": val_frac,
            "train_tokens": int(lengths[~is_val].sum()),
            "val_tokens": int(lengths[is_val].sum()),
            **totals,
            "totals": totals,
            **file_records(records),
            **(meta or {}),
        }
        publish(staging, described)


def _split_rule(limits: Mapping[str, int | None], has_val_texts: bool, val_frac: float | None) -> str:
    """Check what decides the splits, and describe it."""
    for name, limit in limits.items():
        if limit is not None and (type(limit) is not int or limit < 0):
            raise InvalidInputError(f"max_{name}_tokens is {limit!r}; give an integer of at least 0, or None for all")
    if limits["train"] == limits["val"] == 0:
        raise InvalidInputError("max_train_tokens and max_val_tokens are both 0; raise one of them")
    if has_val_texts and val_frac is not None:
        raise InvalidInputError("val_texts and val_frac are both given; give one of them")
    if val_frac is not None and not 0 <= val_frac < 1:
        raise InvalidInputError(f"val_frac is {val_frac}; give a share of at least 0 and below 1")
    if limits["val"] is None and not has_val_texts and val_frac is None:
        raise InvalidInputError("max_val_tokens is None, so all tokens would go to val; give a number or val_frac")
    train, val = (f"at most {plural(one, 'token')}" if one is not None else "all tokens" for one in limits.values())
    if has_val_texts:
        return f"val: {val} of the documents given for val; train: {train} of the others"
    if val_frac is not None:
        return (
            f"by document: one of every 1/{val_frac}, drawn by the seed, goes to val ({val}), others to train ({train})"
        )
    return f"by token, in stream order: the first to val ({val}), the next to train ({train})"


# ---- random numbers: torch's alone


def _seeded(seed: int, purpose: int | None = None) -> torch.Generator:
    """Return a generator; one seed gives independent generators for different purposes, and a plain one for none."""
    if type(seed) is not int or not 0 <= seed <= _LARGEST_SEED:
        raise InvalidInputError(f"seed is {seed!r}; give an integer from 0 to 2**63 - 1")
    if purpose is None:
        return torch.Generator().manual_seed(seed)
    draws = torch.randint(_LARGEST_SEED, (purpose + 1,), generator=torch.Generator().manual_seed(seed))
    return torch.Generator().manual_seed(int(draws[purpose]))


def _shuffled(texts: Iterable[str], buffer_size: int | None, generator: torch.Generator) -> Iterator[str]:
    """Yield texts in random order, holding `buffer_size` of them at most; None keeps the order.

    The buffer is filled; then each draw yields one of its texts, and the next text takes its place.
    """
    if buffer_size is None:
        yield from texts
        return
    if buffer_size < 1:
        raise InvalidInputError(f"shuffle_buffer is {buffer_size}; give at least 1, or None for the order of the input")
    stream = iter(texts)
    held = list(islice(stream, buffer_size))
    places = chain.from_iterable(
        torch.randint(len(held), (_DRAWS_AT_ONCE,), generator=generator).tolist() for _ in iter(int, 1)
    )
    for following in stream:
        place = next(places)
        yield held[place]
        held[place] = following
    for place in torch.randperm(len(held), generator=generator).tolist():
        yield held[place]


def _held_out(share: float, generator: torch.Generator) -> Iterator[bool]:
    """Yield whether each document goes to val: one, drawn at random, of every 1 / share documents.

    So the share is right in every part of the stream, and its length need not be known.
    """
    position = 0
    for stratum in range(_LARGEST_SEED):
        draw = float(torch.rand((), generator=generator, dtype=torch.float64))
        chosen = max(int((stratum + draw) / share), position) if share else _LARGEST_SEED
        for _ in range(position, chosen):
            yield False
        yield True
        position = chosen + 1


def _drawn(num_examples: int, val_frac: float, generator: torch.Generator) -> npt.NDArray[np.bool_]:
    """Return which examples go to val."""
    num_val = int(num_examples * val_frac)
    if val_frac > 0 and num_examples > 1:
        num_val = max(num_val, 1)
    is_val = np.zeros(num_examples, np.bool_)
    is_val[torch.randperm(num_examples, generator=generator)[:num_val].numpy()] = True
    return is_val


# ---- texts


class _DocumentBatches:
    """Turns texts into batches of ids, each document ended by the separator; counts documents without tokens."""

    def __init__(self, encoder: TextEncoder) -> None:
        if encoder.separator_id is None:
            raise InvalidInputError(
                f"the tokenizer has neither {encoder.special_tokens['eot']} nor an end-of-sequence token to end "
                "documents with; name a token that it has with special_tokens"
            )
        self._encoder, self._separator = encoder, encoder.separator_id
        self._num_read = self.num_empty = 0

    def of(self, texts: Iterator[str]) -> Iterator[EncodedTexts]:
        batch: list[str] = []
        num_characters = 0
        for text in texts:
            if not isinstance(text, str):
                place = self._num_read + len(batch) + 1
                raise InvalidInputError(f"document {place:,} is of the type {type(text).__name__}; give strings")
            batch.append(text)
            num_characters += len(text)
            if num_characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_SIZE:
                yield self._encoded(batch)
                batch, num_characters = [], 0
        if batch:
            yield self._encoded(batch)

    def _encoded(self, batch: list[str]) -> EncodedTexts:
        found = self._encoder.encode(batch)
        self._num_read += len(batch)
        lengths = found.lengths[found.lengths > 0]
        self.num_empty += len(batch) - len(lengths)
        ends = np.cumsum(lengths + 1) - 1
        return EncodedTexts(_interleaved(found.ids, (self._separator, ends)), lengths + 1)


def _interleaved(ids: Ids, *inserted: tuple[Any, Ids]) -> Ids:
    """Return ids with others among them: pairs of a number (or one number per place) and its places in the result."""
    result = np.empty(len(ids) + sum(len(places) for _, places in inserted), np.int64)
    is_text = np.ones(len(result), np.bool_)
    for numbers, places in inserted:
        result[places] = numbers
        is_text[places] = False
    result[is_text] = ids
    return result


class _Splits(contextlib.ExitStack):
    """The shards of both splits while they are written, each split with its limit."""

    def __init__(
        self,
        folder: Path,
        encoder: TextEncoder,
        shard_bytes: int,
        limits: Mapping[str, int | None],
        on_tokens: Callable[[int], None] | None,
    ) -> None:
        super().__init__()
        self._limits, self._on_tokens = limits, on_tokens
        dtype = token_dtype_for(encoder.vocab_size)
        self._writers = {split: TokenShardWriter(folder / split, dtype, shard_bytes) for split in limits}
        for writer in self._writers.values():
            self.enter_context(writer)

    def num_tokens(self, split: str) -> int:
        return self._writers[split].num_tokens

    def fill(self, batches: Iterator[EncodedTexts], *splits: str) -> None:
        """Write the first tokens to the first split until it is full, the next ones to the second; then stop."""
        while not all(map(self._is_full, splits)) and (batch := next(batches, None)) is not None:
            ids = batch.ids
            for split in splits:
                ids = self._append(split, ids)

    def deal(self, batches: Iterator[EncodedTexts], held_out: Iterator[bool]) -> None:
        """Write whole documents to val or train; those of a full split are dropped."""
        for batch in batches:
            is_val = np.repeat(list(islice(held_out, len(batch.lengths))), batch.lengths)
            self._append("val", batch.ids[is_val])
            self._append("train", batch.ids[~is_val])
            if self._is_full("val") and self._is_full("train"):
                return

    def finish(self) -> dict[str, FileRecord]:
        """Make everything durable; return the files by their paths inside the cache."""
        return {
            f"{split}/{name}": record
            for split, writer in self._writers.items()
            for name, record in writer.finish().items()
        }

    def _append(self, split: str, ids: Ids) -> Ids:
        """Write ids up to the limit; return the rest."""
        writer, limit = self._writers[split], self._limits[split]
        room = len(ids) if limit is None else min(len(ids), limit - writer.num_tokens)
        writer.append(ids[:room])
        if self._on_tokens is not None and room:
            self._on_tokens(room)
        return ids[room:]

    def _is_full(self, split: str) -> bool:
        limit = self._limits[split]
        return limit is not None and self._writers[split].num_tokens >= limit


# ---- chats


class _ExampleBatches:
    """Turns examples into batches of ids; counts those without messages and without an assistant message."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder
        missing = [encoder.special_tokens[name] for name, number in encoder.special_ids.items() if number is None]
        if missing:
            raise InvalidInputError(
                f"the tokenizer has no token {' and no token '.join(missing)}; add it to the vocabulary, or name the "
                "tokens that it has with special_tokens={'sys': ..., 'usr': ..., 'asst': ..., 'eot': ...}"
            )
        self._ids = {name: int(number) for name, number in encoder.special_ids.items() if number is not None}
        if len(set(self._ids.values())) < len(self._ids):
            raise InvalidInputError(f"special_tokens share an id ({self._ids}); name four different tokens")
        self.num_empty = self.num_untrained = 0

    def of(self, examples: Iterable[Sequence[Message]]) -> Iterator[EncodedTexts]:
        batch: list[Sequence[Message]] = []
        num_characters = 0
        for place, example in enumerate(examples, 1):
            num_characters += _checked(example, place)
            if not example:
                self.num_empty += 1
                continue
            self.num_untrained += all(message["role"] != "assistant" for message in example)
            batch.append(example)
            if num_characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_SIZE:
                yield self._encoded(batch)
                batch, num_characters = [], 0
        if batch:
            yield self._encoded(batch)

    def _encoded(self, batch: list[Sequence[Message]]) -> EncodedTexts:
        messages = [message for example in batch for message in example]
        last_messages = np.cumsum(list(map(len, batch)))
        found = self._encoder.encode([message["content"] for message in messages])
        roles = [self._ids[ROLE_TOKENS[message["role"]]] for message in messages]
        ends = np.cumsum(found.lengths + 2)
        ids = _interleaved(found.ids, (roles, ends - found.lengths - 2), (self._ids["eot"], ends - 1))
        return EncodedTexts(ids, np.diff(ends[last_messages - 1], prepend=0))


def _checked(example: Any, place: int) -> int:
    """Refuse an example that is not a list of messages; return its number of characters."""
    if not isinstance(example, Sequence) or isinstance(example, str):
        raise InvalidInputError(f"example {place:,} is of the type {type(example).__name__}; give a list of messages")
    for number, message in enumerate(example):
        role, content = (message.get(key) if isinstance(message, Mapping) else None for key in ("role", "content"))
        if role not in ROLE_TOKENS:
            raise InvalidInputError(
                f"example {place:,}, message {number} has the role {role!r}; use system, user or assistant"
            )
        if not isinstance(content, str):
            raise InvalidInputError(
                f"example {place:,}, message {number} has content of the type {type(content).__name__}; give a string"
            )
    return sum(len(message["content"]) for message in example)


def _deal(spool: Path, dtype: str, lengths: Ids, is_val: npt.NDArray[np.bool_]) -> dict[str, FileRecord]:
    """Copy the examples of one file into the files of their splits; return these files."""
    records: dict[str, FileRecord] = {}
    for split, chosen in (("train", ~is_val), ("val", is_val)):
        tokens = AppendedFile(spool.with_name(f"{split}_tokens.bin"), ALGORITHM)
        index = GrowingArrayFile(spool.with_name(f"{split}_idx.npy"), "<i8", ALGORITHM)
        with contextlib.closing(tokens), contextlib.closing(index):
            for ids, kept in _blocks(spool, dtype, lengths, chosen):
                tokens.append(ids[kept])
            index.append((np.cumsum(lengths[chosen]) - lengths[chosen]).astype("<i8"))
            records[tokens.path.name] = tokens.finish()
            records[index.path.name] = index.finish()
    return records


def _blocks(
    spool: Path, dtype: str, lengths: Ids, chosen: npt.NDArray[np.bool_]
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]]:
    """Yield the tokens in blocks of whole examples, and which of them are of the chosen examples."""
    ends = np.cumsum(lengths)
    first = 0
    with os_errors("read", spool), open(spool, "rb") as file:
        while first < len(lengths):
            before = int(ends[first] - lengths[first])
            last = max(first + 1, int(np.searchsorted(ends, before + _BLOCK_TOKENS, side="right")))
            ids = np.fromfile(file, dtype, int(ends[last - 1]) - before)
            yield ids, np.repeat(chosen[first:last], lengths[first:last])
            first = last
