"""The state: plain values in and out, and a refusal that names what differs and the override."""

from __future__ import annotations

import json
import logging
import pickle
from dataclasses import replace
from typing import Any

import pytest

from megatron_packed_sft.data.order.blend_weights import AnnealedWeights
from megatron_packed_sft.data.order.state import COMPARED, BlendState, LoaderState
from megatron_packed_sft.errors import InvalidInputError

BLEND = BlendState(
    weights=(1, 3), counts=(10, 30), shares=(0.25, 0.75), epochs=(1.0, 0.5), origin_position=0, origin_counts=(0, 0)
)
STATE = LoaderState(
    consumed_samples=40,
    fingerprint="ab12",
    num_samples=100,
    shuffle=True,
    seed=1234,
    tokenizer="cd34",
    chat_template="ef56",
    blend=BLEND,
)


def test_a_state_survives_json() -> None:
    assert LoaderState.from_dict(json.loads(json.dumps(STATE.to_dict()))) == STATE
    alone = LoaderState(consumed_samples=0, fingerprint="", num_samples=1, shuffle=False)
    assert LoaderState.from_dict(json.loads(json.dumps(alone.to_dict()))) == alone


def test_a_state_of_weights_that_change_survives_json_and_tells_runs_of_another_length_apart() -> None:
    annealed = replace(STATE, blend=replace(BLEND, annealing=AnnealedWeights((1, 3), (1, 1), first=80, last=100)))
    assert LoaderState.from_dict(json.loads(json.dumps(annealed.to_dict()))) == annealed
    longer = replace(STATE, blend=replace(BLEND, annealing=AnnealedWeights((1, 3), (1, 1), first=160, last=200)))
    with pytest.raises(InvalidInputError) as caught:
        annealed.check(longer)
    assert "schedule was 'to 1:1 over samples 80 to 100' and is 'to 1:1 over samples 160 to 200' now" in str(
        caught.value
    )


def test_a_state_from_before_weights_could_change_is_read() -> None:
    document = STATE.to_dict()
    del document["blend"]["annealing"]
    assert LoaderState.from_dict(document) == STATE


def test_a_state_survives_a_writer_that_shortens_floats() -> None:
    document = STATE.to_dict()
    document["blend"]["epochs"] = [1, 0.5]
    assert LoaderState.from_dict(document) == STATE


def test_a_state_names_its_format_and_version() -> None:
    document = STATE.to_dict()
    assert document["format"] == "packed_sft_loader_state"
    assert document["version"] == 1


def test_the_same_run_may_go_on() -> None:
    STATE.check(STATE)
    STATE.check(replace(STATE, consumed_samples=0, blend=BlendState(weights=(1, 3), counts=(0, 0))))


OTHER: dict[str, dict[str, Any]] = {
    "fingerprint": {"fingerprint": "9999"},
    "num_samples": {"num_samples": 101},
    "tokenizer": {"tokenizer": "other"},
    "chat_template": {"chat_template": "other"},
    "shuffle": {"shuffle": False},
    "seed": {"seed": 4321},
    "weights": {"blend": BlendState(weights=(1, 4), counts=(0, 0))},
    "schedule": {"blend": replace(BLEND, annealing=AnnealedWeights((1, 3), (1, 1), first=80, last=100))},
}


def test_there_is_a_case_for_every_field_that_is_compared() -> None:
    assert set(OTHER) == set(COMPARED)


@pytest.mark.parametrize("name", COMPARED)
def test_another_run_is_refused_by_name_unless_that_name_is_allowed(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    current = replace(STATE, **OTHER[name])
    before, now = getattr(STATE, name), getattr(current, name)
    with pytest.raises(InvalidInputError) as caught:
        STATE.check(current)
    assert f"{name} was {before!r} and is {now!r} now" in str(caught.value)
    assert f"allow_mismatch=({name!r},)" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # out of a worker process, say
    with caplog.at_level(logging.WARNING):
        STATE.check(current, allow_mismatch=(name,))
    assert name in caplog.text


def test_all_differences_are_named_at_once() -> None:
    current = replace(STATE, fingerprint="9999", tokenizer="other", seed=1)
    with pytest.raises(InvalidInputError) as caught:
        STATE.check(current, allow_mismatch=("seed",))
    message = str(caught.value)
    assert "fingerprint was 'ab12' and is '9999' now, tokenizer was 'cd34' and is 'other' now;" in message
    assert "seed was" not in message
    assert "allow_mismatch=('fingerprint', 'tokenizer', 'seed')" in message


def test_a_blend_and_a_single_dataset_are_not_the_same() -> None:
    with pytest.raises(InvalidInputError, match=r"weights was \(1, 3\) and is None now"):
        STATE.check(replace(STATE, blend=None))


def test_what_one_side_does_not_know_is_not_compared() -> None:
    STATE.check(replace(STATE, tokenizer=None, chat_template=None))
    replace(STATE, tokenizer=None, chat_template=None).check(STATE)


@pytest.mark.parametrize("wrong", [("fingerprints",), "fingerprint", ["seed", ""]])
def test_a_misspelt_override_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInputError, match="must be a tuple of names from fingerprint, num_samples"):
        STATE.check(STATE, allow_mismatch=wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not a loader state of this package .its format is other"),
        ({"version": 2}, "has version 2, and this release reads 1"),
        ({"consumed_samples": -1}, "consumed_samples is -1, not a non-negative integer"),
        ({"consumed_samples": True}, "consumed_samples is True, not a non-negative integer"),
        ({"consumed_samples": 1.0}, "consumed_samples is 1.0, not a non-negative integer"),
        ({"fingerprint": None}, "fingerprint is None, not a string"),
        ({"num_samples": "7"}, "num_samples is '7', not a non-negative integer"),
        ({"shuffle": 1}, "shuffle is 1, not true or false"),
        ({"seed": "x"}, "seed is 'x', not an integer"),
        ({"tokenizer": 5}, "tokenizer is 5, not a string"),
        ({"blend": [1]}, r"blend is \[1\], not a mapping"),
        (
            {"blend": {**STATE.to_dict()["blend"], "counts": [-1, 2]}},
            r"blend counts is \[-1, 2\], not a list of non-negative numb",
        ),
        (
            {"blend": {**STATE.to_dict()["blend"], "weights": "13"}},
            "blend weights is '13', not a list of non-negative numbers",
        ),
        ({"blend": {**STATE.to_dict()["blend"], "annealing": 3}}, "blend annealing is 3, not a mapping"),
        ({"blend": {**STATE.to_dict()["blend"], "annealing": {}}}, "blend start is None, not a list of non-negative"),
        ({"blend": {}}, "blend weights is None, not a list of non-negative numbers"),
    ],
)
def test_a_damaged_state_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        LoaderState.from_dict({**STATE.to_dict(), **change})


@pytest.mark.parametrize("nonsense", [None, 7, "state", [], {}])
def test_what_is_no_state_is_refused(nonsense: Any) -> None:
    with pytest.raises(InvalidInputError, match="not a loader state of this package"):
        LoaderState.from_dict(nonsense)


def test_a_negative_seed_is_a_seed() -> None:
    state = replace(STATE, seed=-5)
    assert LoaderState.from_dict(state.to_dict()) == state
