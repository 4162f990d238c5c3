"""Turn a plan and a token store into shards: one compiled pass per block of bins, straight into the writer.

    plan.bin_order ─▶ block of bins ─▶ where each item goes (NumPy) ─▶ copy + mask alignment (compiled) ─▶ write_block

Memory is two blocks, however many bins there are; tokens are read through the store's maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.packing.items import sizes_of
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.interface import PackedShardWriter
from megatron_packed_sft.support.checksum import hash_function
from megatron_packed_sft.tokens.gathered import GatheredSequences
from megatron_packed_sft.tokens.store import TokenPart, TokenStore

_BLOCK_BYTES = 4 << 20  # smaller blocks lose more to handing the GIL over than they win in cache


class Placements(NamedTuple):
    """Where the items of a block of bins come from and go to: one entry per item, bin after bin."""

    sequences: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]  # inside the sequence
    lengths: npt.NDArray[np.int64]
    overlaps: npt.NDArray[np.int64]
    bins: npt.NDArray[np.int64]  # inside the block
    positions: npt.NDArray[np.int64]  # inside the bin
    ends: npt.NDArray[np.int64]  # of the room each takes: its position + its padded length
    counts: npt.NDArray[np.int64]  # items per bin
    packed_len: npt.NDArray[np.int64]  # per bin


class _Buffer(NamedTuple):
    """The arrays of a block of bins."""

    ids: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8]
    weights: npt.NDArray[np.float32] | None

    @classmethod
    def of(cls, shape: tuple[int, int], store: TokenStore | GatheredSequences) -> _Buffer:
        """Return empty arrays for bins of a store."""
        weights = np.empty(shape, np.float32) if store.has_weights else None
        return cls(np.empty(shape, store.manifest.dtype), np.empty(shape, np.uint8), weights)


def stored_width(plan: PackPlan) -> int:
    """Return how many tokens the longest bin of a plan stores.

    That is at most `pack_size` for plans by `measure="tokens"`. Plans by `measure="inputs"`, and sequences longer than
    the pack (`overflow="single"`), need more.

    Example:
        >>> from megatron_packed_sft.packing.packer import pack
        >>> stored_width(pack([3, 1, 2, 2], pack_size=4))
        4
    """
    sizes = sizes_of(plan.item_lengths, "tokens", plan.pad_seq_to_mult)
    return int(np.add.reduceat(sizes[plan.indices], plan.bin_offsets[:-1], dtype=np.int64).max())


def plan_block(plan: PackPlan, store: TokenStore, bins: npt.NDArray[np.int64], width: int, pad_id: int = 0) -> BinBlock:
    """Return some bins of a plan, by their canonical numbers, as a block that owns its arrays."""
    [(_, block)] = _blocks(plan, store, bins, len(bins), width, pad_id)
    return block


def materialize(
    plan: PackPlan,
    store: TokenStore,
    writer: PackedShardWriter,
    *,
    bins: npt.NDArray[Any] | Sequence[int] | None = None,
    width: int | None = None,
    pad_id: int = 0,
    on_bins: Callable[[int], object] | None = None,
) -> int:
    """Write the bins of a plan, in its reading order, as bins 0, 1, 2, ... of a writer; return the tokens written.

    Masks come out next-token aligned; the overlap of split sequences is not trained twice; with `pad_seq_to_mult` each
    sequence is padded with `pad_id` so that its inputs are a multiple. `writer.finalize` is left to the caller.

    Args:
        plan: from `pack`, over `store.lengths`.
        store: the token store.
        writer: has room for the bins, each up to `width` tokens.
        bins: canonical numbers of the bins to write; all of them, in reading order, when not given.
        width: the writer's pack size; the plan's pack_size when not given.
        pad_id: fills bins and padded sequences; the writer's pad_id.
        on_bins: called with the number of bins after each block, such as a progress bar's `update`.
    """
    chosen = plan.bin_order.astype(np.int64) if bins is None else np.asarray(bins, np.int64)
    width = plan.pack_size if width is None else width
    check_fit(plan, store, width)
    return write_bins(plan, store, writer, chosen, width, pad_id, on_bins or no_progress)


def no_progress(num_bins: int) -> None:
    """Take a number of bins and do nothing with it."""


def write_bins(
    plan: PackPlan,
    store: TokenStore | GatheredSequences,
    writer: PackedShardWriter,
    bins: npt.NDArray[np.int64],
    width: int,
    pad_id: int,
    on_bins: Callable[[int], object],
) -> int:
    """Write some bins of a plan, block by block; return the tokens written."""
    num_tokens = 0
    blocks = _blocks(plan, store, bins, max(1, _BLOCK_BYTES // (width * 5)), width, pad_id)
    for first, block in _one_ahead(blocks):
        writer.write_block(first, block)
        num_tokens += int(block.packed_len.sum(dtype=np.int64))
        on_bins(len(block))
    return num_tokens


def _one_ahead(blocks: Iterator[tuple[int, BinBlock]]) -> Iterator[tuple[int, BinBlock]]:
    """Fill the next block in a thread while the caller writes this one; copies, checks and writes release the GIL."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, blocks, None)
        while (block := coming.result()) is not None:
            coming = thread.submit(next, blocks, None)
            yield block


def check_fit(plan: PackPlan, store: TokenStore, width: int) -> None:
    """Refuse a plan that was made from other sequences, or that needs wider bins."""
    needed = stored_width(plan)
    if needed > width:
        raise InvalidInputError(
            f"a bin of this plan stores {needed} tokens, but the pack size is {width}; use {needed}, or plan with "
            "measure='tokens' and without overflow='single'"
        )
    lengths = store.lengths
    if plan.chunks is None:
        fits = len(lengths) == len(plan.item_lengths) and np.array_equal(lengths, plan.item_lengths)
    else:
        chunks = plan.chunks
        fits = len(chunks.sequence) == 0 or (
            int(chunks.sequence.max()) < len(lengths)
            and bool(np.all(chunks.start.astype(np.int64) + plan.item_lengths <= lengths[chunks.sequence]))
        )
    if not fits:
        for part in store.parts if not store.is_remote else ():
            part.spans(np.arange(len(part)))  # a wrong offset has a wrong length, too
        raise _made_from_others(store)


def _refused(
    store: TokenStore | GatheredSequences, part: TokenPart | GatheredSequences, sequence: int, is_unsound: bool
) -> PackedSFTError:
    """Return the error for a sequence that could not be put into a bin."""
    if is_unsound:
        return part.damaged(sequence)
    try:
        part.spans(np.array([sequence]))
    except PackedSFTError as error:
        return error
    return _made_from_others(store)


def _made_from_others(store: TokenStore | GatheredSequences) -> InvalidInputError:
    return InvalidInputError(
        f"the plan was not made from {store.path}: their lengths differ; plan again with the lengths of this store"
    )


def _blocks(
    plan: PackPlan,
    store: TokenStore | GatheredSequences,
    bins: npt.NDArray[np.int64],
    bins_at_once: int,
    width: int,
    pad_id: int,
) -> Iterator[tuple[int, BinBlock]]:
    from megatron_packed_sft.tokens import gather_kernel

    shape = (min(bins_at_once, len(bins)), width)
    # Two buffers: one is written by the caller while the other is filled (see _one_ahead).
    num_buffers = min(2, -(-len(bins) // bins_at_once))
    buffers = [_Buffer.of(shape, store) for _ in range(num_buffers)]
    for number, first in enumerate(range(0, len(bins), bins_at_once)):
        ids, mask, weights = buffers[number % num_buffers]
        items = place(plan, bins[first : first + bins_at_once])
        num_bins = len(items.counts)
        if weights is not None:
            weights[:] = 0
        for part, chosen, inside in store.by_part(items.sequences):
            arrays = part.arrays
            if not hash_function():  # an xxhash that does not export its functions
                part.spans(inside)
            code, bad = gather_kernel.fill_bins(
                *arrays.for_kernels(part.verify),
                inside,
                chosen,
                items.starts,
                items.lengths,
                items.overlaps,
                plan.chunks is None,
                items.bins,
                items.positions,
                ids,
                mask,
            )
            if code != gather_kernel.OK:
                raise _refused(store, part, int(inside[bad]), code == gather_kernel.BAD_CHECKSUM)
            if weights is not None:
                gather_kernel.fill_weights(
                    arrays.kernel_weights(),
                    arrays.begins,
                    inside,
                    chosen,
                    items.starts,
                    items.lengths,
                    items.bins,
                    items.positions,
                    mask,
                    weights,
                )
        if plan.pad_seq_to_mult > 1:
            gather_kernel.fill_gaps(items.bins, items.positions + items.lengths, items.ends, pad_id, ids, mask)
        tails = np.full(num_bins, width, np.int64)
        gather_kernel.fill_gaps(np.arange(num_bins), items.packed_len, tails, pad_id, ids, mask)
        yield (
            first,
            BinBlock(
                ids[:num_bins],
                mask[:num_bins],
                items.packed_len.astype(np.uint32),
                np.concatenate(([0], np.cumsum(items.counts))).astype(np.uint32),
                items.positions.astype(np.uint32),
                None if weights is None else weights[:num_bins],
            ),
        )


def place(plan: PackPlan, bins: npt.NDArray[np.int64]) -> Placements:
    """Return where the items of some bins come from and go to."""
    first = plan.bin_offsets[bins]
    counts = plan.bin_offsets[bins + 1] - first
    offsets = np.concatenate(([0], np.cumsum(counts)))
    items = plan.indices[np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], counts)]
    lengths = plan.item_lengths[items].astype(np.int64)
    sizes = sizes_of(plan.item_lengths[items], "tokens", plan.pad_seq_to_mult).astype(np.int64)
    filled = np.concatenate(([0], np.cumsum(sizes)))
    positions = filled[:-1] - np.repeat(filled[offsets[:-1]], counts)
    if plan.chunks is None:
        sequences, starts, overlaps = items.astype(np.int64), np.zeros_like(lengths), np.zeros_like(lengths)
    else:
        sequences, starts, overlaps = (
            array[items].astype(np.int64)
            for array in (plan.chunks.sequence, plan.chunks.start, plan.chunks.masked_prefix)
        )
    return Placements(
        sequences=sequences,
        starts=starts,
        lengths=lengths,
        overlaps=overlaps,
        bins=np.repeat(np.arange(len(bins)), counts),
        positions=positions,
        ends=positions + sizes,
        counts=counts,
        packed_len=filled[offsets[1:]] - filled[offsets[:-1]],
    )
