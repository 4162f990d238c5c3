"""Batch arithmetic."""

from __future__ import annotations

import pytest

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.train.config import StepConfig
from megatron_packed_sft.train.step_schedule import schedule_steps


def test_accumulation_follows_from_the_global_batch() -> None:
    schedule = schedule_steps(StepConfig(global_batch_size=64), num_bins=1000, num_sequences=1000, data_parallel_size=8)
    assert (schedule.num_microbatches, schedule.bins_per_step, schedule.num_steps, schedule.notes) == (8, 64, 16, ())


def test_epochs_are_rounded_up_and_steps_win_over_them() -> None:
    settings = StepConfig(epochs=1.5, global_batch_size=4)
    assert schedule_steps(settings, num_bins=10, num_sequences=None, data_parallel_size=1).num_steps == 4
    settings.steps = 7
    assert schedule_steps(settings, num_bins=10, num_sequences=None, data_parallel_size=1).num_steps == 7


def test_counting_bins_warns_how_many_sequences_that_is() -> None:
    schedule = schedule_steps(StepConfig(global_batch_size=8), num_bins=100, num_sequences=1200, data_parallel_size=2)
    [note] = schedule.notes
    assert "at 12.0 sequences per bin, a step trains on about 96 sequences" in note
    assert "train.batch_unit=sequences" in note


def test_counting_sequences_takes_the_nearest_number_of_bins() -> None:
    settings = StepConfig(global_batch_size=96, batch_unit="sequences")
    schedule = schedule_steps(settings, num_bins=100, num_sequences=1200, data_parallel_size=2)
    assert (schedule.bins_per_step, schedule.num_microbatches, schedule.notes) == (8, 4, ())
    settings.global_batch_size = 4
    [note] = schedule_steps(settings, num_bins=100, num_sequences=1200, data_parallel_size=2).notes
    assert "a step of 2 bins trains on about 24 sequences" in note


def test_without_a_global_batch_the_implied_one_is_kept() -> None:
    settings = StepConfig(global_batch_size=None, gradient_accumulation=12)
    schedule = schedule_steps(settings, num_bins=100, num_sequences=None, data_parallel_size=2)
    assert (schedule.num_microbatches, schedule.bins_per_step) == (12, 24)


def test_counting_sequences_needs_their_number() -> None:
    with pytest.raises(InvalidInputError, match=r"was not recorded with the data; use train\.batch_unit=bins"):
        schedule_steps(StepConfig(batch_unit="sequences"), num_bins=10, num_sequences=None, data_parallel_size=1)


def test_a_step_larger_than_the_data_is_a_warning() -> None:
    schedule = schedule_steps(StepConfig(global_batch_size=16), num_bins=10, num_sequences=10, data_parallel_size=1)
    assert "every step sees some bins more than once" in schedule.notes[0]


def test_a_resumed_run_counts_the_bins_that_are_left_in_steps_of_its_own_size() -> None:
    settings = StepConfig(epochs=2.0, global_batch_size=4)
    sizes = {"num_bins": 100, "num_sequences": None, "data_parallel_size": 1}
    assert schedule_steps(settings, **sizes, num_steps_done=20, num_bins_done=80) == schedule_steps(settings, **sizes)
    settings.global_batch_size = 8
    schedule = schedule_steps(settings, **sizes, num_steps_done=20, num_bins_done=80)
    assert (schedule.num_steps, schedule.num_bins) == (20 + 15, 200)
    settings.steps = 30
    schedule = schedule_steps(settings, **sizes, num_steps_done=20, num_bins_done=80)
    assert (schedule.num_steps, schedule.num_bins) == (30, 160)


def test_a_resumed_run_that_has_done_enough_has_no_steps_left() -> None:
    settings = StepConfig(steps=10)
    schedule = schedule_steps(
        settings, num_bins=100, num_sequences=None, data_parallel_size=1, num_steps_done=20, num_bins_done=160
    )
    assert (schedule.num_steps, schedule.num_bins) == (20, 160)
