"""What a run shows on its way: losses by name, early stopping, answers as text, trackers; in real processes."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from megatron_packed_sft.train.loop import EarlyStopping
from tests.train.counting_chats import NUM_COUNTED, write_dataset
from tests.train.launch import Runs, run_in_turn

SAMPLES = ["validation.num_samples=3", "validation.sample_tokens=6", "data.eos_id=200"]


def samples_of(runs: Runs, name: str, step: int) -> str:
    return (runs.home / name / "samples" / f"step_{step:06d}.txt").read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    home = tmp_path_factory.mktemp("runs")
    data = write_dataset(home / "data", 40)
    noise = write_dataset(home / "noise", 4, marks_answers=False)

    def arguments(name: str, *more: str) -> list[str]:
        return [
            f"data.path={data}",
            f"output={home / name}",
            "train.steps=12",
            "train.global_batch_size=4",
            "checkpoint.every=6",
            "optimizer.learning_rate=4e-3",
            "logger=none",
            *more,
        ]

    # At this rate the loss stays the same: three validations after the first end the run.
    impatient = ["validation.every=2", "validation.patience=3", "optimizer.learning_rate=1e-20"]
    dropout = ["model.dropout=0.1", "train.recompute=full"]
    frozen = ["parallel=pipeline_2", "model.tie_embeddings=true", "model.freeze=[embeddings,first_1_layers]"]
    by_name = f"validation.paths={{noise: {noise}, counting: {data}}}"
    result = Runs(home)
    result.printed = run_in_turn(
        2,
        [
            arguments("data_2", *SAMPLES, by_name),
            arguments("tensor_2", *SAMPLES, "parallel=tensor_2"),
            arguments("pipeline_2", *SAMPLES, "parallel=pipeline_2"),
            arguments("tied", *frozen),
            arguments("tied_and_resumed", *frozen, f"resume={home / 'tied' / 'checkpoints' / 'step_000006'}"),
        ],
    )
    resume = f"resume={home / 'dropped' / 'checkpoints' / 'step_000006'}"
    result.printed += run_in_turn(
        1,
        [
            arguments("impatient", *impatient),
            arguments("impatient", *impatient),
            arguments("dropped", *dropout),
            arguments("dropped_and_resumed", *dropout, resume),
        ],
    )
    return result


def test_validation_data_has_the_names_that_the_user_gave_and_a_perplexity(runs: Runs) -> None:
    records = runs.records("data_2", "validation")
    assert {record["name"] for record in records} == {"validation", "noise", "counting"}
    for record in records:
        assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
    last = {record["name"]: record["loss"] for record in records}
    assert last["counting"] == last["validation"] < last["noise"]
    assert re.search(r"step 12: loss [\d.]+ on noise \([\d,]+ trained tokens\), perplexity [\d,.]+\n", runs.printed)


def test_the_model_says_what_it_has_learnt(runs: Runs) -> None:
    before, after = (samples_of(runs, "data_2", step) for step in (0, 12))
    assert before.startswith("step 0: validation, greedy answers (as ids; set data.tokenizer to read text)\n")
    said = re.findall(r"the model says\n(.*)\n", after)
    expected = re.findall(r"the data says\n(.*)\n", after)
    assert len(said) == len(expected) == 3
    for line in said:
        assert all(int(token) < NUM_COUNTED for token in line.split()), line  # the answers' ids, not the prompts'
    assert any(int(token) >= NUM_COUNTED for line in re.findall(r"says\n(.*)\n", before) for token in line.split())
    prompts = re.findall(r"\(bin \d+\)\n(.*)\n", after)
    assert prompts == re.findall(r"\(bin \d+\)\n(.*)\n", before)
    for prompt in prompts:
        assert all(int(token) >= NUM_COUNTED for token in prompt.split())


@pytest.mark.parametrize("layout", ["tensor_2", "pipeline_2"])
def test_every_layout_of_the_ranks_says_something(runs: Runs, layout: str) -> None:
    said = re.findall(r"the model says\n(.*)\n", samples_of(runs, layout, 12))
    assert [len(line.split()) for line in said] == [6, 6, 6]
    if layout == "tensor_2":  # starts from the same weights
        assert said == re.findall(r"the model says\n(.*)\n", samples_of(runs, "data_2", 12))


def test_a_run_whose_loss_does_not_fall_stops_early_and_stays_stopped(runs: Runs) -> None:
    assert [record["step"] for record in runs.records("impatient")] == list(range(1, 7))
    assert [record["step"] for record in runs.records("impatient", "validation")] == [0, 2, 4, 6]
    assert (runs.home / "impatient" / "checkpoints" / "latest").read_text() == "step_000006\n"
    assert "stopped by early stopping at step 6 of 12" in runs.printed
    assert "nothing to do: the loss on validation has not fallen below" in runs.printed


def test_a_resumed_run_drops_what_it_would_have_dropped(runs: Runs) -> None:
    assert runs.losses("dropped_and_resumed") == runs.losses("dropped")[6:]


def test_frozen_layers_and_embeddings_have_no_optimizer_state_and_the_run_resumes(runs: Runs) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(runs.home / "tied" / "checkpoints" / "step_000012").read_metadata()
    names = [name for name in stored.state_dict_metadata if "exp_avg" in name]
    assert names
    assert not [name for name in names if "embedding" in name or "output_layer" in name]
    losses = runs.losses("tied")
    assert losses[-1] < losses[0]
    assert np.isfinite(losses).all()
    assert runs.losses("tied_and_resumed") == losses[6:]


def test_early_stopping_counts_on_from_recorded_losses() -> None:
    stopping = EarlyStopping(patience=2, losses=[3.0, 2.0, 2.5])
    assert not stopping.is_due
    stopping.add(math.nan)
    assert stopping.is_due
    assert not EarlyStopping(patience=2, losses=[3.0, 2.9, 3.0, 2.8]).is_due
