"""`build_sft_cache`: chats to one file of token ids per split, and the offset at which each example begins.

    [sys] ids of the content [eot] [usr] ids of the content [eot] [asst] ids of the content [eot]

Examples are encoded in batches into one file. When their number is known, val is drawn, and the file is dealt into
`train_tokens.bin` and `val_tokens.bin` block by block: only the lengths are ever held in memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from megatron_packed_sft.caches.meta import ALGORITHM, file_records
from megatron_packed_sft.caches.publishing import common_meta, publish, staged
from megatron_packed_sft.caches.shuffle import seeded
from megatron_packed_sft.caches.text_encoder import SPECIAL_TOKENS, Ids, TextEncoder
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.token_stream.writer import TOKEN_DTYPES, token_dtype_for
from megatron_packed_sft.support.array_files import AppendedFile, GrowingArrayFile
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.json_document import FileRecord
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.support.wording import plural

logger = logging.getLogger(__name__)

ROLE_TOKENS = {"system": "sys", "user": "usr", "assistant": "asst"}
_BATCH_CHARACTERS, _BATCH_EXAMPLES = 1 << 20, 1024
_BLOCK_TOKENS = 1 << 21
_SPOOL = "all_tokens.bin"


class Message(TypedDict):
    """One message of an example."""

    role: Literal["system", "user", "assistant"]
    content: str


def build_sft_cache(
    examples: Iterable[Sequence[Message]],
    out_dir: str | os.PathLike[str],
    *,
    tokenizer: Any,
    val_frac: float,
    seed: int,
    special_tokens: Mapping[str, str] = SPECIAL_TOKENS,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    extra_meta: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
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
        special_tokens: the texts of the tokens sys, usr, asst and eot, for tokenizers with other ones.
        dataset_name, dataset_config: for meta.json; the name of `out_dir` unless given.
        extra_meta: further keys for meta.json, or a function that is called for them at the end.
        overwrite: replace an earlier cache at `out_dir`.
        on_tokens: called with the number of tokens after each batch.

    Raises:
        InvalidInputError: an argument or an example is wrong, or the tokenizer lacks a special token.
        TargetExistsError: there is something at `out_dir`.
    """
    if not 0 <= val_frac <= 1:
        raise InvalidInputError(f"val_frac is {val_frac}; give a share from 0 to 1")
    generator = seeded(seed)
    encoder = TextEncoder(tokenizer, special_tokens)
    dtype = TOKEN_DTYPES[token_dtype_for(encoder.vocab_size)]
    with staged(out_dir, overwrite=overwrite) as staging, contextlib.ExitStack() as closing:
        spool = AppendedFile(staging.path / _SPOOL, ALGORITHM)
        closing.callback(spool.close)
        batches = _ExampleBatches(encoder)
        lengths = array("q")
        for batch in batches.of(examples):
            spool.append(batch.ids.astype(dtype))
            lengths.frombytes(batch.lengths.tobytes())
            if on_tokens is not None:
                on_tokens(len(batch.ids))
        if not lengths:
            raise InvalidInputError(f"there are no examples for {staging.target}; give at least one with messages")
        all_lengths = np.frombuffer(lengths, np.int64)
        is_val = _drawn(len(lengths), val_frac, generator)
        records = _deal(spool.path, dtype, all_lengths, is_val)
        with os_errors("remove", spool.path):
            os.unlink(spool.path)
        batches.announce_untrained(staging.target)
        totals = {"train_examples": int((~is_val).sum()), "val_examples": int(is_val.sum())}
        meta = {
            **common_meta(encoder, local_path(out_dir), dataset_name, dataset_config, seed),
            "split_rule": f"by example: the first int(n * {val_frac}) of torch.randperm(n) by the seed go to val",
            "val_frac": val_frac,
            "num_examples_without_assistant": batches.num_untrained,
            "num_empty_examples": batches.num_empty,
            "train_tokens": int(all_lengths[~is_val].sum()),
            "val_tokens": int(all_lengths[is_val].sum()),
            **totals,
            "totals": totals,
            **file_records(records),
            **((extra_meta() if callable(extra_meta) else extra_meta) or {}),
        }
        publish(staging, meta)


class _Examples(NamedTuple):
    ids: Ids
    lengths: Ids


class _ExampleBatches:
    """Turns examples into batches of token ids; counts them."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder
        self._ids = encoder.required(SPECIAL_TOKENS)
        if len(set(self._ids.values())) < len(self._ids):
            raise InvalidInputError(f"special_tokens share an id ({self._ids}); name four different tokens")
        self.num_empty = self.num_untrained = 0

    def of(self, examples: Iterable[Sequence[Message]]) -> Iterator[_Examples]:
        batch: list[Sequence[Message]] = []
        num_characters = 0
        for place, example in enumerate(examples, 1):
            num_characters += _checked(example, place)
            if not example:
                self.num_empty += 1
                continue
            self.num_untrained += all(message["role"] != "assistant" for message in example)
            batch.append(example)
            if num_characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_EXAMPLES:
                yield self._encoded(batch, place - len(batch))
                batch, num_characters = [], 0
        if batch:
            yield self._encoded(batch, place - len(batch))
        if self.num_empty:
            logger.warning("left out %s without messages; remove them", plural(self.num_empty, "example"))

    def announce_untrained(self, target: Path) -> None:
        """Say how many examples teach nothing; they are kept, as the caller gave them."""
        if self.num_untrained:
            logger.warning(
                "%s: %s without an assistant message, of which no token counts in the loss; remove them",
                target,
                plural(self.num_untrained, "example"),
            )

    def _encoded(self, batch: list[Sequence[Message]], num_before: int) -> _Examples:
        messages = [message for example in batch for message in example]
        num_messages = np.fromiter(map(len, batch), np.int64, len(batch))
        found = self._encoder.encode([message["content"] for message in messages])
        odd = self._encoder.first_with_special(found, self._ids.values())
        if odd is not None:
            place = num_before + 1 + int(np.searchsorted(np.cumsum(num_messages), odd, side="right"))
            raise InvalidInputError(
                f"example {place:,} holds the text of a special token in a message, which this tokenizer would take "
                "for the token; remove it, or use the tokenizer of load_tokenizer, which reads it as text"
            )
        roles = np.array([self._ids[ROLE_TOKENS[message["role"]]] for message in messages], np.int64)
        lengths = found.lengths + 2
        ends = np.cumsum(lengths)
        ids = np.empty(int(ends[-1]), np.int64)
        is_text = np.ones(len(ids), np.bool_)
        is_text[ends - lengths] = is_text[ends - 1] = False
        ids[is_text] = found.ids
        ids[ends - lengths] = roles
        ids[ends - 1] = self._ids["eot"]
        return _Examples(ids, np.diff(ends[np.cumsum(num_messages) - 1], prepend=0))


def _checked(example: Any, place: int) -> int:
    """Refuse an example that is no list of messages; return its number of characters."""
    if not isinstance(example, Sequence) or isinstance(example, str):
        raise InvalidInputError(f"example {place:,} is of the type {type(example).__name__}; give a list of messages")
    num_characters = 0
    for number, message in enumerate(example):
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if role not in ROLE_TOKENS:
            raise InvalidInputError(
                f"example {place:,}, message {number} has the role {role!r}; use system, user or assistant"
            )
        if not isinstance(content, str):
            raise InvalidInputError(
                f"example {place:,}, message {number} has content of the type {type(content).__name__}; give a string"
            )
        num_characters += len(content)
    return num_characters


def _drawn(num_examples: int, val_frac: float, generator: torch.Generator) -> npt.NDArray[np.bool_]:
    num_val = int(num_examples * val_frac)
    if val_frac > 0 and num_examples > 1:
        num_val = max(num_val, 1)
    is_val = np.zeros(num_examples, np.bool_)
    is_val[torch.randperm(num_examples, generator=generator)[:num_val].numpy()] = True
    return is_val


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
