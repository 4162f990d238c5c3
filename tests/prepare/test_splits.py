"""Splits and weights: by content alone, in the asked proportions."""

from __future__ import annotations

import pytest

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.sources import SplitRule

ROWS = [str(number).encode() for number in range(20_000)]


def rule(validation: float = 0.0, test: float = 0.0) -> SplitRule:
    return SplitRule(validation_fraction=validation, test_fraction=test)


def test_shares_are_near_the_fractions() -> None:
    splits = [rule(0.1, 0.05).split_of(row) for row in ROWS]
    assert splits.count("validation") / len(ROWS) == pytest.approx(0.1, abs=0.01)
    assert splits.count("test") / len(ROWS) == pytest.approx(0.05, abs=0.01)


def test_a_larger_fraction_keeps_the_rows_it_had() -> None:
    small = {row for row in ROWS if rule(0.1).split_of(row) == "validation"}
    large = {row for row in ROWS if rule(0.2).split_of(row) == "validation"}
    assert small < large


def test_copies_follow_the_weight_and_do_not_depend_on_the_split() -> None:
    assert {rule().num_copies(row, 2.0) for row in ROWS} == {2}
    copies = [rule().num_copies(row, 1.25) for row in ROWS]
    assert set(copies) == {1, 2}
    assert sum(copies) / len(ROWS) == pytest.approx(1.25, abs=0.01)
    held_out = [rule(0.5).num_copies(row, 0.5) for row in ROWS if rule(0.5).split_of(row) == "train"]
    assert sum(held_out) / len(held_out) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((1.0, 0.0), "split.validation_fraction is 1.0"),
        ((0.0, -0.1), "split.test_fraction is -0.1"),
        ((0.5, 0.5), "leave nothing to train on"),
    ],
)
def test_impossible_rules_are_refused(arguments: tuple[float, float], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        rule(*arguments)
