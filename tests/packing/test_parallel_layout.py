"""How ranks share packed data: the multiple that sequences are padded to, and the batch that the user asked for."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.parallel_layout import ParallelLayout, effective_batch


@pytest.mark.parametrize(
    ("layout", "sequence_multiple", "bin_multiple"),
    [
        ({}, 1, 1),
        ({"tensor": 8}, 1, 1),
        ({"tensor": 8, "sequence_parallel": True}, 8, 8),
        ({"context": 2}, 4, 4),
        ({"context": 3, "tensor": 4}, 6, 6),
        ({"context": 2, "tensor": 2, "sequence_parallel": True}, 4, 4),
        ({"context": 3, "tensor": 4, "sequence_parallel": True}, 12, 12),
        ({"fp8": "delayed"}, 16, 16),
        ({"fp8": "mxfp8", "context": 3}, 96, 96),
        ({"fp8": "tensorwise", "context": 2, "tensor": 4, "sequence_parallel": True}, 16, 128),
    ],
)
def test_the_multiple_of_a_layout(layout: Any, sequence_multiple: int, bin_multiple: int) -> None:
    made = ParallelLayout(**layout)
    assert (made.sequence_multiple, made.bin_multiple) == (sequence_multiple, bin_multiple)


def test_data_that_ranks_cannot_share_is_refused_with_what_to_run() -> None:
    layout = ParallelLayout(tensor=4, context=2, sequence_parallel=True)
    layout.refuse_unpadded([("good", 8), ("better", 16)])
    with pytest.raises(InvalidInputError) as caught:
        layout.refuse_unpadded([("good", 8), ("bad", 4)])
    assert str(caught.value).startswith("bad: sequences are padded to a multiple of 4")
    assert str(caught.value).endswith("--overwrite 'packing.for_parallel={tensor:4,context:2,sequence_parallel:true}'")
    with pytest.raises(InvalidInputError, match="a multiple of 1, but"):
        layout.refuse_unpadded([("a legacy file", None)])


def test_without_context_parallelism_any_data_will_do() -> None:
    ParallelLayout(tensor=8, sequence_parallel=True, fp8="mxfp8").refuse_unpadded([("data", 1), ("file", None)])


@pytest.mark.parametrize(("layout", "problem"), [({"context": 0}, "context is 0"), ({"fp8": "e5m2"}, "fp8 is 'e5m2'")])
def test_impossible_layouts_are_refused(layout: Any, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        ParallelLayout(**layout)


def test_effective_batch_size_is_honoured_after_packing_forces_micro_batch_one() -> None:
    """GIVEN effective_batch_size and a micro batch other than 1, accumulation is recomputed to match it."""
    batch = effective_batch(64, ranks=8, micro_batch=4, gradient_accumulation=2)
    assert batch.micro_batch == 1
    assert batch.gradient_accumulation == 8
    assert batch.bins_per_step == 64


def test_the_global_batch_is_kept_when_effective_batch_size_is_unset() -> None:
    """GIVEN no effective_batch_size, what micro batch, accumulation and ranks gave before is kept."""
    batch = effective_batch(ranks=8, micro_batch=4, gradient_accumulation=2)
    assert batch.bins_per_step == 4 * 2 * 8
    assert batch.gradient_accumulation == 8


def test_nothing_changes_for_a_micro_batch_of_one() -> None:
    assert effective_batch(ranks=4, micro_batch=1, gradient_accumulation=6).gradient_accumulation == 6


def test_a_batch_that_cannot_be_realised_is_refused_and_not_changed_silently() -> None:
    with pytest.raises(InvalidInputError, match=r"batch of 30 bins is not a multiple of 8 ranks.*choose 24 or 32"):
        effective_batch(30, ranks=8, micro_batch=1)
    with pytest.raises(InvalidInputError, match=r"choose 8$"):
        effective_batch(3, ranks=8, micro_batch=1)


def test_a_packed_micro_batch_above_one_is_taken_into_account() -> None:
    assert effective_batch(64, ranks=8, micro_batch=4, packed_micro_batch=2).gradient_accumulation == 4


def test_with_a_packing_factor_the_batch_counts_sequences() -> None:
    batch = effective_batch(256, ranks=4, micro_batch=8, packing_factor=9.7)
    # 256 / 9.7 = 26.4 bins; the nearest multiple of four ranks is 28 (7 * 4) or 24 (6 * 4): 26.4 / 4 = 6.6 -> 7.
    assert (batch.gradient_accumulation, batch.bins_per_step) == (7, 28)
    assert batch.sequences_per_step == pytest.approx(271.6)
    assert effective_batch(8, ranks=4, micro_batch=1, packing_factor=50.0).gradient_accumulation == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wanted": 0}, "wanted must be a positive integer"),
        ({"ranks": 0}, "ranks must be a positive integer"),
        ({"micro_batch": 1.5}, "micro_batch must be a positive integer"),
        ({"gradient_accumulation": True}, "gradient_accumulation must be a positive integer"),
        ({"packed_micro_batch": -1}, "packed_micro_batch must be a positive integer"),
        ({"packing_factor": 0.5}, "packing_factor must be at least 1"),
        ({"packing_factor": float("nan")}, "packing_factor must be at least 1"),
    ],
)
def test_wrong_numbers_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        effective_batch(**{"wanted": 8, "ranks": 1, "micro_batch": 1, **arguments})
