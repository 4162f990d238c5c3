"""States and settings in a checkpoint that no run writes: refused by name, before anything is made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed_sft.errors import ManifestError
from megatron_packed_sft.inspect.info import describe
from megatron_packed_sft.train.checkpoint import MAX_STATE_BYTES, STATE, TrainingState
from megatron_packed_sft.train.model_and_optimizer import _refuse_odd_settings
from tests.train.sound_states import MODEL, SCHEDULER

SOUND = TrainingState(step=1, data={}, scheduler=SCHEDULER, model=MODEL)
PEFT = {"method": "lora", "rank": 8, "alpha": 16, "dropout": 0.0, "target_modules": ["linear_qkv"]}


def load(folder: Path, **changes: Any) -> TrainingState:
    (folder / STATE).write_bytes(replace(SOUND, **changes).to_bytes())
    return TrainingState.load(folder)


def test_sound_states_are_read(tmp_path: Path) -> None:
    assert load(tmp_path).model == MODEL
    assert load(tmp_path, peft=PEFT).peft == PEFT
    full = {**MODEL, "num_query_groups": 2, "rotary_base": 500000, "rotary_scaling_factor": None, "qkv_bias": True}
    assert load(tmp_path, model=full).model == full


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("model", {}),
        *[("model", {**MODEL, name: value}) for name in MODEL for value in ("x", -1, 0, 1 << 62, [1], 1.5, True, None)],
        ("model", {**MODEL, "num_query_groups": 1 << 62}),
        ("model", {**MODEL, "num_query_groups": 3}),
        ("model", {**MODEL, "family": ["llama"]}),
        ("model", {**MODEL, "tie_embeddings": 0}),
        ("model", {**MODEL, "rotary_base": "x"}),
        ("scheduler", {}),
        ("scheduler", {"num_steps": "x"}),
        ("scheduler", {"num_steps": -1}),
        ("pretrained", {"path": 5}),
        ("pretrained", {"path": "a", "family": "b", "dtype": ["c"], "checksum": "d"}),
        ("peft", {"rank": 8}),
        *[("peft", {**PEFT, name: value}) for name in PEFT for value in (["x"], -1, "other", None)],
    ],
)
def test_a_state_that_cannot_be_is_refused_by_file_and_key(
    tmp_path: Path, section: str, values: dict[str, Any]
) -> None:
    with pytest.raises(ManifestError, match=f"{STATE}, {section}: .*; restore the file from the original") as caught:
        load(tmp_path, **{section: values})
    assert "\n" not in str(caught.value)


def test_a_huge_state_is_not_read_whole(tmp_path: Path) -> None:
    load(tmp_path)
    with open(tmp_path / STATE, "ab") as file:
        file.truncate(1 << 40)
    assert MAX_STATE_BYTES < 1 << 30
    for read in (TrainingState.load, lambda folder: describe(str(folder))):
        with pytest.raises(ManifestError, match="is not valid JSON"):
            read(tmp_path)


GROUP = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "foreach": None, "default_config": True}


def test_sound_settings_are_taken() -> None:
    sound = {"state": {0: {}, "common_step": torch.tensor(2.0)}, "param_groups": [{**GROUP, "lr": 0, "of_later": "x"}]}
    _refuse_odd_settings(sound, {0}, [{**GROUP, "params": []}])


@pytest.mark.parametrize(
    ("group", "state"),
    [
        *[({"betas": value}, {}) for value in (("a", "b"), None, (0.9,), (9.0, 9.0), [0.9, 0.95])],
        *[({"eps": value}, {}) for value in ("x", float("nan"), torch.zeros(3), -1.0)],
        *[({"amsgrad": value}, {}) for value in (True, 0, None)],
        ({"foreach": True}, {}),
        *[({}, {"common_step": value}) for value in (torch.zeros(5), torch.tensor(float("nan")), -1.0)],
        ({}, {"another": {}}),
    ],
)
def test_settings_that_the_optimizer_would_fail_with_later_are_refused(
    group: dict[str, Any], state: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"^(state|common_step|betas|eps|amsgrad|foreach) "):
        _refuse_odd_settings({"state": state, "param_groups": [{**GROUP, **group}]}, {0}, [{**GROUP, "params": []}])
