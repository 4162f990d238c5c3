"""Filters, overflow, measures and padding: what goes into bins, and what is counted when it does not."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf, ValidationError

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.options import STORABLE_OVERFLOWS, PackOptions
from megatron_packed_sft.packing.packer import pack, pack_with
from megatron_packed_sft.packing.plan import PackPlan
from tests.packing import lengths as made


def assert_conserved(plan: PackPlan, lengths: list[int]) -> None:
    accounting = plan.accounting
    assert accounting.num_sequences == len(lengths)
    assert accounting.num_tokens == sum(lengths)
    assert int(plan.bin_tokens.sum()) == accounting.num_tokens_packed
    packed = plan.indices if plan.chunks is None else np.unique(plan.chunks.sequence[plan.indices])
    assert packed.size == accounting.num_sequences_packed


def test_filters_drop_and_count_by_reason() -> None:
    lengths = [1, 5, 8, 20, 6]
    plan = pack(lengths, PackOptions(pack_size=20, min_len=5, max_len=8))
    assert sorted(plan.indices.tolist()) == [1, 2, 4]
    assert plan.accounting.dropped_sequences == {"below_min_len": 1, "above_max_len": 1}
    assert plan.accounting.dropped_tokens == {"below_min_len": 1, "above_max_len": 20}
    assert_conserved(plan, lengths)


def test_max_len_is_looked_at_before_overflow() -> None:
    plan = pack([5, 15, 30], PackOptions(pack_size=10, max_len=20, overflow="truncate"))
    assert plan.accounting.dropped_sequences == {"above_max_len": 1}
    assert plan.accounting.num_truncated == 1


def test_overflow_error_names_the_first_long_sequence_and_the_remedies() -> None:
    with pytest.raises(InvalidInputError) as caught:
        pack([5, 12, 30], pack_size=10)
    message = str(caught.value)
    assert "2 of 3 sequences are longer than the 10 tokens" in message
    assert "sequence 1 with 12" in message
    assert "'split'" in message


def test_a_sequence_as_long_as_the_pack_fits() -> None:
    assert pack([10], pack_size=10).num_bins == 1


def test_truncate_keeps_the_beginning_and_counts_what_is_cut() -> None:
    lengths = [5, 25]
    plan = pack(lengths, pack_size=10, overflow="truncate")
    assert plan.item_lengths.tolist() == [5, 10]
    assert plan.chunks is not None
    assert plan.chunks.sequence.tolist() == [0, 1]
    assert plan.chunks.start.tolist() == [0, 0]
    assert plan.accounting.dropped_tokens == {"truncated": 15}
    assert plan.accounting.dropped_sequences == {}
    assert_conserved(plan, lengths)


def test_split_covers_every_token_and_masks_the_overlap() -> None:
    lengths = [4, 27, 10]
    plan = pack(lengths, pack_size=12, overflow="split", stride=3)
    chunks = plan.chunks
    assert chunks is not None
    assert chunks.sequence.tolist() == [0, 1, 1, 1, 2]
    assert chunks.start.tolist() == [0, 0, 9, 18, 0]
    assert plan.item_lengths.tolist() == [4, 12, 12, 9, 10]
    assert chunks.masked_prefix.tolist() == [0, 0, 3, 3, 0]
    assert plan.accounting.num_overlap_tokens == 6
    assert (plan.accounting.num_split, plan.accounting.num_chunks) == (1, 3)
    trained = [
        token
        for start, length, masked in zip(chunks.start, plan.item_lengths, chunks.masked_prefix, strict=True)
        for token in range(start + masked, start + length)
    ]
    assert sorted(trained) == sorted([*range(4), *range(27), *range(10)])  # each exactly once
    assert_conserved(plan, lengths)


def test_split_without_stride_has_no_overlap() -> None:
    plan = pack([25], pack_size=10, overflow="split")
    assert plan.chunks is not None
    assert plan.chunks.masked_prefix.tolist() == [0, 0, 0]
    assert plan.item_lengths.tolist() == [10, 10, 5]


def test_a_tail_shorter_than_min_len_is_dropped_and_counted() -> None:
    lengths = [23, 27]
    plan = pack(lengths, PackOptions(pack_size=10, overflow="split", min_len=5))
    assert plan.item_lengths.tolist() == [10, 10, 10, 10, 7]
    assert plan.accounting.dropped_tokens == {"short_tail": 3}
    assert plan.accounting.dropped_sequences == {}
    assert plan.accounting.num_chunks == 5
    assert_conserved(plan, lengths)


def test_a_dropped_tail_costs_only_its_new_tokens() -> None:
    lengths = [19]
    plan = pack(lengths, PackOptions(pack_size=10, overflow="split", stride=4, min_len=9))
    # Pieces 0..9, 6..15, 12..18; the last has seven tokens, three of them new.
    assert plan.item_lengths.tolist() == [10, 10]
    assert plan.accounting.dropped_tokens == {"short_tail": 3}
    assert plan.accounting.num_overlap_tokens == 4
    assert_conserved(plan, lengths)


def test_nothing_is_kept_about_chunks_when_nothing_was_cut() -> None:
    for overflow in ("truncate", "split"):
        assert pack([3, 4], pack_size=10, overflow=overflow).chunks is None


def test_inputs_count_one_token_less_per_sequence() -> None:
    assert pack([6, 6], PackOptions(pack_size=10, measure="inputs")).num_bins == 1
    assert pack([6, 6], PackOptions(pack_size=10, measure="tokens")).num_bins == 2
    plan = pack([6, 6, 11], PackOptions(pack_size=10, measure="inputs"))
    assert plan.bin_room.tolist() == [10, 10]
    assert plan.bin_tokens.tolist() == [12, 11]
    assert plan.stats().max_bin_tokens == 12
    assert plan.stats().utilization == 1.0


def test_inputs_allow_one_token_more_than_the_pack() -> None:
    assert pack([11], PackOptions(pack_size=10, measure="inputs")).num_bins == 1
    with pytest.raises(InvalidInputError, match="at most 11 tokens, and the shortest has 12"):
        pack([12], PackOptions(pack_size=10, measure="inputs"))


@pytest.mark.parametrize(("length", "stored"), [(1, 1), (2, 5), (5, 5), (6, 9), (9, 9)], ids=lambda value: str(value))
def test_padding_to_a_multiple_rounds_the_inputs_up(length: int, stored: int) -> None:
    """L tokens are L - 1 inputs; with context parallelism these are padded to a multiple, here of 4."""
    plan = pack([length], pack_size=64, pad_seq_to_mult=4)
    assert plan.bin_room.tolist() == [stored]
    inputs = pack([length], PackOptions(pack_size=64, pad_seq_to_mult=4, measure="inputs"))
    assert inputs.bin_room.tolist() == [max(stored - 1, 1)]


def test_padded_sequences_fit_together_only_with_their_padding() -> None:
    assert pack([6, 6], pack_size=18, pad_seq_to_mult=4).num_bins == 1
    assert pack([6, 6], pack_size=17, pad_seq_to_mult=4).num_bins == 2


def test_cut_pieces_fit_with_their_padding() -> None:
    plan = pack([100], pack_size=30, overflow="split", pad_seq_to_mult=8)
    assert plan.item_lengths.max() == 25  # 24 inputs, a multiple of 8
    assert plan.bin_room.max() <= 30


def test_padding_is_not_utilization() -> None:
    stats = pack([6, 6], pack_size=18, pad_seq_to_mult=4).stats()
    assert (stats.utilization, stats.num_padding) == (12 / 18, 6)


@pytest.mark.parametrize("strategy", ["greedy", "first_fit", "first_fit_shuffle", "best_fit", "optimal", "window"])
def test_no_bin_has_more_sequences_than_allowed(strategy: str) -> None:
    lengths = np.tile([1, 2, 3, 30], 2000)
    plan = pack(lengths, pack_size=64, strategy=strategy, max_seqs_per_bin=5)
    assert np.diff(plan.bin_offsets).max() <= 5
    assert plan.lower_bound >= 8000 / 5


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="stride is 10; it must be below the 10 tokens"):
        pack([5], pack_size=10, overflow="split", stride=10)
    with pytest.raises(InvalidInputError, match="min_len 11 leaves nothing to pack"):
        pack([5], PackOptions(pack_size=10, min_len=11))
    with pytest.raises(InvalidInputError, match="min_len 6 leaves nothing to pack: at most 5"):
        pack([5], PackOptions(pack_size=10, min_len=6, max_len=5))
    with pytest.raises(InvalidInputError, match="choose one"):
        pack([5], PackOptions(pack_size=10, order_window=4), steps={"global_batch": 2, "balance": "attention"})
    with pytest.raises(InvalidInputError, match="whole_batches needs the batch size: set global_batch"):
        pack([5], PackOptions(pack_size=10, whole_batches=True))
    with pytest.raises(InvalidInputError, match="needs trained_tokens"):
        pack([5], pack_size=10, steps={"global_batch": 1, "balance": "trained_tokens"})


def test_keywords_replace_fields_of_the_options_and_there_are_at_most_twelve_arguments() -> None:
    arguments = inspect.signature(pack).parameters
    assert len(arguments) <= 12
    fields = {field.name for field in dataclasses.fields(PackOptions)}
    assert set(arguments) - fields == {"lengths", "options", "steps", "trained_tokens"}
    options = PackOptions(pack_size=10, overflow="drop", min_len=2, global_batch=4)
    plan = pack([1, 7, 30, 3], options, strategy="greedy", steps={"global_batch": 1, "balance": "attention"})
    assert (plan.strategy, plan.pack_size, plan.global_batch) == ("greedy", 10, 1)
    assert plan.accounting.dropped_sequences == {"below_min_len": 1, "longer_than_pack": 1}
    assert pack([1, 7], options, pack_size=20).pack_size == 20
    assert options == PackOptions(pack_size=10, overflow="drop", min_len=2, global_batch=4)
    with pytest.raises(InvalidInputError, match="pack_size is missing; pass pack_size=4096"):
        pack([1, 7])


def test_every_pack_option_is_documented() -> None:
    documented = inspect.getdoc(PackOptions) or ""
    for option in dataclasses.fields(PackOptions):
        assert f"\n    {option.name}: " in documented, option.name


def test_pack_options_are_a_hydra_schema() -> None:
    schema = OmegaConf.structured(PackOptions(overflow="drop", shuffle_output=True))
    chosen = OmegaConf.merge(schema, {"pack_size": 10, "strategy": "greedy", "max_len": None})
    options = OmegaConf.to_object(chosen)
    assert options == PackOptions(pack_size=10, strategy="greedy", overflow="drop", shuffle_output=True)
    with pytest.raises(ValidationError, match="pack_size"):
        OmegaConf.merge(schema, {"pack_size": "wide"})


def test_messages_name_the_options_as_the_user_wrote_them_and_only_the_choices_that_exist() -> None:
    choices: Any = {"prefix": "packing.", "overflows": STORABLE_OVERFLOWS}
    with pytest.raises(InvalidInputError, match=r"packing.overflow='drop', 'truncate' or 'split'$"):
        pack_with(PackOptions(pack_size=4), [3, 5], **choices)
    with pytest.raises(InvalidInputError, match=r"overflow='drop', 'truncate', 'split' or 'single'$"):
        pack([3, 5], pack_size=4)
    with pytest.raises(InvalidInputError, match=r"packing.overflow='single' .*from error, drop, truncate, split"):
        pack_with(PackOptions(pack_size=4, overflow="single"), [3, 5], **choices)
    with pytest.raises(InvalidInputError, match=r"relax packing.min_len, packing.max_len or packing.overflow"):
        pack_with(PackOptions(pack_size=4, overflow="drop"), [7, 5], **choices)
    with pytest.raises(InvalidInputError, match=r"packing.whole_batches needs .*set packing.global_batch"):
        pack_with(PackOptions(pack_size=4, whole_batches=True), [3], **choices)


def test_greedy_with_split_fills_every_bin_and_keeps_the_order() -> None:
    lengths = np.minimum(made.between(3, 60, 4000, 1) * made.between(3, 60, 4000, 2), 9000)
    plan = pack(lengths, PackOptions(pack_size=2048, overflow="split", stride=1, min_len=16), strategy="greedy")
    assert plan.stats().utilization > 0.99
    assert plan.indices.tolist() == list(range(plan.item_lengths.size))
    assert_conserved(plan, lengths.tolist())
    assert plan.chunks is not None
    assert int((plan.chunks.masked_prefix > 0).sum()) == plan.accounting.num_overlap_tokens
    # Each chunk continues where the one before it ended, but for the overlap.
    same = np.diff(plan.chunks.sequence) == 0
    ends = plan.chunks.start + plan.item_lengths
    assert np.array_equal(plan.chunks.start[1:][same], (ends[:-1] - plan.chunks.masked_prefix[1:])[same])


def test_greedy_with_split_cuts_no_chunk_below_min_len() -> None:
    plan = pack([9, 4, 7, 12], PackOptions(pack_size=10, overflow="split", min_len=3), strategy="greedy")
    assert plan.item_lengths.min() >= 3
    bins = [plan.item_lengths[plan.bin(number)].tolist() for number in range(plan.num_bins)]
    assert bins == [[9], [4, 4], [3, 7], [5]]
