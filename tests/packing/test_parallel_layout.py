"""The multiple to which sequences are padded, and data that does not have it."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.parallel_layout import ParallelLayout


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
