"""`block_tokenize_fn`: texts in, packed blocks out, one batch of `datasets.map` at a time."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.encode.sequences import MarkedText, Sequences
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.items import Accounting, make_items
from megatron_packed_sft.packing.options import PackOptions, check_count
from megatron_packed_sft.packing.packer import pack_with
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.packing.strategies.registry import CustomStrategy, GivenStrategy, is_dotted

_logger = logging.getLogger(__name__)
_lost: Counter[str] = Counter()  # in this process, over all batches: announced again at each power of ten

Blocks = dict[str, list[Any]]


def block_tokenize_fn(
    features: Mapping[str, Any],
    tokenizer: Any,
    feature: str = "text",
    *,
    max_length: int = 512,
    overflow: bool = True,
    stride: int = 0,
    packed: bool = False,
    packing_strategy: str | CustomStrategy = "greedy",
    shuffle_output: bool = False,
    seed: int | None = 42,
    min_len: int = 1,
    max_len: int | None = None,
    add_bos: bool = True,
    add_eos: bool = True,
) -> Blocks:
    """Tokenize the documents of a batch and pack them into blocks: a function for `datasets.map(batched=True)`.

    Bind the arguments with a lambda or with functools.partial, and remove the text columns: there are fewer blocks than
    documents, and an empty text gives none. What is left out is counted and logged, at WARNING each time the count of
    tokens gains a digit.

    Args:
        features: a batch: columns of equal length.
        tokenizer: of transformers, of `tokenizers`, or of `load_tokenizer`.
        feature: the column with the text.
        max_length: the most tokens in a block.
        overflow: split documents longer than a block; otherwise they are truncated, which is counted.
        stride: tokens that two neighbouring chunks of a split document share; the collator trains them once.
        packed: several documents to a block; otherwise one document, or one chunk of it, and the order is kept.
        packing_strategy: greedy (keeps the order, and with `overflow` fills every block), best_fit, first_fit, another
            strategy of `pack`, or a function of yours.
        shuffle_output: shuffle the blocks of the batch.
        seed: of the shuffling; None draws one for each batch and returns it in the column `packing_seed`.
        min_len: shorter documents are dropped and counted, BOS and EOS included; no block is shorter.
        max_len: longer documents are dropped and counted.
        add_bos, add_eos: frame each document, unless its ids begin or end so already.

    Returns:
        `input_ids` and `document_starts` (where the documents, or chunks of them, begin in a block), as int32 arrays;
        with `overflow` and a stride also `overlaps`: how many tokens at each start repeat the chunk before.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers, processors
        >>> tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="b"))
        >>> tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer.post_processor = processors.BertProcessing(("</s>", 1), ("<s>", 0))
        >>> batch = {"text": ["a b", "b", "a a a"]}
        >>> blocks = block_tokenize_fn(batch, tokenizer, max_length=8, packed=True, packing_strategy="best_fit")
        >>> [block.tolist() for block in blocks["input_ids"]]
        [[0, 2, 3, 1], [0, 3, 1, 0, 2, 2, 2, 1]]
        >>> [starts.tolist() for starts in blocks["document_starts"]]
        [[0], [0, 3]]
    """
    check_count("max_length", max_length)
    named = {"overflow": overflow, "packed": packed, "shuffle_output": shuffle_output}
    for name, flag in {**named, "add_bos": add_bos, "add_eos": add_eos}.items():
        if not isinstance(flag, bool):
            raise InvalidInputError(f"{name} must be True or False, not {flag!r}")
    given_seed = secrets.randbelow(2**31) if seed is None else seed
    options = PackOptions(
        pack_size=max_length,
        strategy=_strategy(packing_strategy) if packed else "greedy",
        overflow="split" if overflow else "truncate",
        stride=stride,
        min_len=min_len,
        max_len=max_len,
        max_seqs_per_bin=None if packed else 1,
        shuffle_output=shuffle_output,
        seed=given_seed,
    )
    options.check()
    bos_id, eos_id = framing_ids(tokenizer, add_bos=add_bos, add_eos=add_eos)
    documents = encode_texts(tokenizer, _texts(features, feature))
    everyone = np.ones(len(documents.lengths), np.bool_)
    if bos_id is not None:
        documents = documents.with_bos(everyone, bos_id)
    if eos_id is not None:
        documents = documents.with_eos(everyone, eos_id)
    blocks = _pack(documents, options, with_overlaps=overflow and stride > 0)
    if seed is None:
        _logger.info("seed=None: drew packing seed %d for a batch of %d texts", given_seed, len(everyone))
        blocks["packing_seed"] = [given_seed] * len(blocks["input_ids"])
    return blocks


def _strategy(given: str | CustomStrategy) -> str:
    if callable(given):
        return GivenStrategy.of(given)
    if not isinstance(given, str):
        raise InvalidInputError(f"packing_strategy must be a name or a function, not {given!r}")
    if is_dotted(given):
        raise InvalidInputError(f"packing_strategy {given!r} is the path of a function; pass the function itself")
    return given


def _texts(features: Mapping[str, Any], feature: str) -> list[str]:
    if feature not in features:
        names = ", ".join(map(str, features)) or "no columns"
        raise InvalidInputError(f"the batch has no column {feature!r}, but {names}; pass feature=NAME")
    column = features[feature]
    if isinstance(column, str):
        raise InvalidInputError(f"column {feature!r} is one text, not a batch of them; call map with batched=True")
    texts = list(column)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidInputError(
                f"text {index} of the batch ({feature!r}) is {type(text).__name__}, not a text; filter such records "
                "out first"
            )
    return texts


def _pack(documents: Sequences, options: PackOptions, *, with_overlaps: bool) -> Blocks:
    """Pack the documents and lay them out, block by block."""
    names = ["input_ids", "document_starts", *(["overlaps"] if with_overlaps else [])]
    filled = np.flatnonzero(documents.lengths)  # without BOS and EOS an empty text has no token
    lengths = documents.lengths[filled]
    is_kept = (lengths >= options.min_len) & (lengths <= (options.max_len or np.iinfo(np.int64).max))
    if not is_kept.any():
        if filled.size:
            nothing = make_items(
                lengths, limit=options.pack_size, overflow="drop", min_len=options.min_len, max_len=options.max_len
            )
            _announce(nothing.accounting)
        return {name: [] for name in names}
    plan = pack_with(options, lengths)
    _announce(plan.accounting)
    starts = (documents.ends - documents.lengths)[filled]
    arrays = _laid_out(plan, documents.input_ids, starts)
    return {name: arrays[name] for name in names}


def _laid_out(plan: PackPlan, flat_ids: npt.NDArray[np.int32], starts: npt.NDArray[np.int64]) -> Blocks:
    order = plan.bin_order
    items = np.concatenate([plan.bin(number) for number in order.tolist()])
    lengths = plan.item_lengths[items].astype(np.int64)
    overlaps = np.zeros(items.size, np.int32)
    if plan.chunks is None:
        begin = starts[items]
    else:
        begin = starts[plan.chunks.sequence[items]] + plan.chunks.start[items]
        overlaps = plan.chunks.masked_prefix[items]
    ends = np.cumsum(lengths)
    ids = flat_ids[np.repeat(begin - ends + lengths, lengths) + np.arange(ends[-1])]
    first_item = np.concatenate([[0], np.cumsum(np.diff(plan.bin_offsets)[order])])
    block_starts = (ends - lengths)[first_item[:-1]]
    document_starts = ends - lengths - np.repeat(block_starts, np.diff(first_item))
    return {
        "input_ids": np.split(ids, block_starts[1:]),
        "document_starts": np.split(document_starts.astype(np.int32), first_item[1:-1]),
        "overlaps": np.split(overlaps, first_item[1:-1]),
    }


def _announce(accounting: Accounting) -> None:
    """Count what is left out, and say so: a few times at WARNING, not for each of thousands of batches."""
    before = sum(_lost.values())
    _lost.update(accounting.dropped_tokens)
    total = sum(_lost.values())
    if total == before:
        return
    is_news = before == 0 or len(str(total)) > len(str(before))
    reasons = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(_lost.items()))
    _logger.log(
        logging.WARNING if is_news else logging.INFO,
        "block_tokenize_fn has left out %s tokens so far in this process (%s); of the %d documents of this batch, %d "
        "are dropped and %d truncated",
        f"{total:,}",
        reasons,
        accounting.num_sequences,
        accounting.num_sequences - accounting.num_sequences_packed,
        accounting.num_truncated,
    )


_WRAP = "wrap it in transformers' PreTrainedTokenizerFast(tokenizer_object=..., bos_token=..., eos_token=...)"


class SpecialIds(NamedTuple):
    """The ids that frame a document and fill a batch; None where the tokenizer has none."""

    bos: int | None
    eos: int | None
    pad: int | None


def special_ids(tokenizer: Any) -> SpecialIds:
    """Return the special ids of a tokenizer.

    A bare tokenizer of `tokenizers` names none; those that its post-processor puts around a text are taken.
    """
    if _is_bare(tokenizer):
        _check_bare(tokenizer)
        probe = _probe(tokenizer)
        plain, framed = (tokenizer.encode(probe, add_special_tokens=added).ids for added in (False, True))
        num_before = next((n for n in range(len(framed)) if framed[n : n + len(plain)] == plain), 0)
        before, after = framed[:num_before], framed[num_before + len(plain) :]
        return SpecialIds(before[0] if len(before) == 1 else None, after[0] if len(after) == 1 else None, None)
    names = ("bos_id", "eos_id", "pad_id") if _is_ours(tokenizer) else ("bos_token_id", "eos_token_id", "pad_token_id")
    return SpecialIds(*(getattr(tokenizer, name, None) for name in names))


def framing_ids(tokenizer: Any, *, add_bos: bool, add_eos: bool) -> tuple[int | None, int | None]:
    """Return the ids to put before and after each document, None where none is wanted; a missing one is an error."""
    found = special_ids(tokenizer)
    for name, wanted, value in (("bos", add_bos, found.bos), ("eos", add_eos, found.eos)):
        if wanted and value is None:
            remedy = _WRAP if _is_bare(tokenizer) else "set one on the tokenizer"
            raise InvalidInputError(
                f"the tokenizer ({type(tokenizer).__name__}) has no {name.upper()} token to add; set add_{name}=False, "
                f"or {remedy}"
            )
    return found.bos if add_bos else None, found.eos if add_eos else None


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> Sequences:
    """Tokenize texts in one go, without special tokens; `framing_ids` has refused truncation and padding."""
    if _is_ours(tokenizer):
        ours: Sequences = tokenizer.encode_many([MarkedText(text) for text in texts])
        return ours
    if _is_bare(tokenizer):
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    elif callable(tokenizer):
        # Long documents are cut here, so the tokenizer's warning about them would mislead.
        encoded = tokenizer([*texts, ""], add_special_tokens=False, return_attention_mask=False, verbose=False)
        ids = encoded["input_ids"][:-1]  # a batch without texts would be an error
    else:
        raise InvalidInputError(
            f"tokenizer is {type(tokenizer).__name__}; pass one of transformers, of tokenizers or of load_tokenizer"
        )
    lengths = np.array([len(one) for one in ids], np.int64)
    flat = np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum()))
    return Sequences(flat, np.zeros(flat.size, np.uint8), lengths, np.arange(len(texts)))


def _is_ours(tokenizer: Any) -> bool:
    return hasattr(tokenizer, "encode_many")


def _is_bare(tokenizer: Any) -> bool:
    """Return whether it is a `tokenizers.Tokenizer`, which that import would tell at the price of loading it."""
    return hasattr(tokenizer, "encode_batch_fast") and hasattr(tokenizer, "token_to_id")


def _probe(tokenizer: Any) -> str:
    """Return a text with tokens of its own: a small vocabulary may not know the first one that comes to mind."""
    frame = set(tokenizer.encode("").ids)
    if set(tokenizer.encode("a", add_special_tokens=False).ids) - frame:
        return "a"
    return next((text for text, number in tokenizer.get_vocab().items() if number not in frame), "a")


def _check_bare(tokenizer: Any) -> None:
    for name in ("truncation", "padding"):
        if getattr(tokenizer, name, None) is not None:
            raise InvalidInputError(
                f"the tokenizer's own {name} would change documents without a warning; call tokenizer.no_{name}() first"
            )
