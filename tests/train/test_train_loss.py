"""Real runs with weights, train.loss=per_conversation and empty bins: what they log, and that ranks do not matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft import PackedBin
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.train.config import StepConfig, TrainConfig
from megatron_packed_sft.train.config_checks import check_config
from tests.packed_bins import make_bins, write_shard
from tests.storage.storage_checks import with_weights
from tests.train.launch import run_in_turn

BINS = [one for one in make_bins(30, 48, 100, seed=5) if len(one.input_ids) > 16][:16]
EMPTY = PackedBin(np.array([7]), np.array([0]), np.array([0]))  # a single id, which predicts nothing
DATA: dict[str, list[PackedBin]] = {
    "plain": BINS,
    "weighted": [with_weights(one) for one in BINS],
    # The same weight everywhere: the weighted mean is the mean.
    "half": [one._replace(loss_mask=one.loss_mask * np.float32(0.5)) for one in BINS],
    "with_empty": [bin for one in BINS[:4] for bin in (one, EMPTY)],
    "without_empty": BINS[:4],
    "only_empty": [EMPTY] * 8,
}
RUNS = {
    "plain": ("plain", "per_token"),
    "weighted": ("weighted", "per_token"),
    "half": ("half", "per_token"),
    "conversations": ("plain", "per_conversation"),
}
ALL_RUNS = {**RUNS, **{name: (name, "per_token") for name in ("with_empty", "without_empty", "only_empty")}}


class Runs:
    """The same runs with one and with two ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name, bins in DATA.items():
            write_shard(folder / name, bins, 48, pad_id=2, vocab_size=100)
        self.output = {
            num_ranks: run_in_turn(num_ranks, [self._arguments(name, num_ranks) for name in ALL_RUNS])
            for num_ranks in (1, 2)
        }

    def _arguments(self, name: str, num_ranks: int) -> list[str]:
        data, loss = ALL_RUNS[name]
        return [
            f"data.path={self._folder / data}",
            f"output={self._folder / f'{name}_{num_ranks}'}",
            f"train.loss={loss}",
            "train.steps=2",
            f"train.global_batch_size={min(len(DATA[data]), 8)}",
            f"validation.paths=[{self._folder / data}]",
            "model.num_layers=1",
        ]

    def records(self, name: str, num_ranks: int, event: str = "step") -> list[dict[str, Any]]:
        lines = (self._folder / f"{name}_{num_ranks}" / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["event"] == event]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", [*RUNS, "with_empty"])
def test_two_ranks_train_as_one(runs: Runs, name: str) -> None:
    for event in ("step", "validation"):
        pairs = list(zip(runs.records(name, 1, event), runs.records(name, 2, event), strict=True))
        assert len(pairs) == 2
        for one, two in pairs:
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
            assert two.get("grad_norm", 0) == pytest.approx(one.get("grad_norm", 0), rel=1e-4)


def test_the_same_weight_everywhere_changes_nothing(runs: Runs) -> None:
    for half, plain in zip(runs.records("half", 1), runs.records("plain", 1), strict=True):
        assert half["loss"] == pytest.approx(plain["loss"], rel=1e-6)
        assert half["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)


def test_bins_that_predict_nothing_are_trained_over(runs: Runs) -> None:
    for with_empty, without in zip(runs.records("with_empty", 1), runs.records("without_empty", 1), strict=True):
        assert with_empty["loss"] == pytest.approx(without["loss"], rel=1e-5)
    assert [record["step"] for record in runs.records("only_empty", 2)] == [1, 2]


def test_weights_and_conversations_change_the_loss(runs: Runs) -> None:
    first = {name: runs.records(name, 1)[0]["loss"] for name in RUNS}
    assert len({round(first[name], 5) for name in ("plain", "weighted", "conversations")}) == 3


def test_the_log_and_the_metrics_say_which_loss_it_is(runs: Runs) -> None:
    kinds = {name: {record["loss_kind"] for record in runs.records(name, 1)} for name in RUNS}
    assert kinds == {
        "plain": {"per_token"},
        "weighted": {"weighted_per_token"},
        "half": {"weighted_per_token"},
        "conversations": {"per_conversation"},
    }
    for line in (
        "loss: the mean over trained tokens (per_token)",
        "loss: the mean over trained tokens by their weights (per_token)",
        "loss: the mean over conversations of each one's own mean (per_conversation)",
    ):
        assert line in runs.output[1]
    trained = sum(int((one.loss_mask > 0).sum()) for one in BINS)
    for name in RUNS:  # trained tokens are counted as such, whatever the loss is divided by
        assert {record["num_trained"] for record in runs.records(name, 1, "validation")} == {trained}


def test_another_name_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"train\.loss is 'per_turn'; choose from per_token, per_conversation"):
        check_config(TrainConfig(train=StepConfig(loss="per_turn")))
