"""Blends in the recipe: named sources, weights that change over the run, the mixture in the metrics."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from megatron_packed_sft.config.schema import build
from megatron_packed_sft.data.order.blend import SourceProgress
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.megatron.weights.torch_dist import TorchDistCheckpoint
from megatron_packed_sft.train.app import main
from megatron_packed_sft.train.config import DataConfig, TrainConfig, ValidationConfig
from megatron_packed_sft.train.data import open_data, training_loader
from megatron_packed_sft.train.metrics import MetricsFile, Totals, read_metrics, step_record
from tests.indexed_files import write_indexed
from tests.train.counting_chats import PACK_SIZE, VOCAB_SIZE, write_dataset
from tests.train.launch import Runs, run_in_turn
from tests.train.test_train_token_stream import write_counting_stream

NAMED = "data.path={a: first, b: second}"
SCHEDULE = {"start": {"chats": 1, "web": 0}, "end": {"chats": 0.5, "web": 0.5}, "from": 0.5, "to": 1.0}


def blend(start: str = "{a: 1, b: 0}", end: str = "{a: 1, b: 1}", begin: Any = 0.8, to: Any = 1.0) -> str:
    return f"data.weights={{start: {start}, end: {end}, from: {begin}, to: {to}}}"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("sources")
    return {name: str(write_dataset(home / name, num_bins)) for name, num_bins in (("chats", 20), ("web", 12))}


def config_of(path: Any, **settings: Any) -> TrainConfig:
    return TrainConfig(data=DataConfig(path=path, **settings))


def counts_after(config: TrainConfig, num_bins: int, *, run: int) -> list[int]:
    loader = training_loader(open_data(config), config, num_bins=run)
    for _ in itertools.islice(loader, num_bins):
        pass
    counts: list[int] = loader.state_dict()["blend"]["counts"]
    return counts


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([NAMED, "data.weights={a: 1, c: 2}"], "data.weights names c, which is not a source; choose from a, b"),
        ([NAMED, "data.weights=3"], "data.weights is 3; give a list of numbers, or a number for each name"),
        ([NAMED, "data.shuffle=false", blend()], "data.shuffle=false cannot be combined with data.weights"),
        ([NAMED, "data.weights={start: [1, 2], stop: [2, 1]}"], "give it start and end weights, and from and to"),
        ([NAMED, blend(start="{a: -1, b: 1}")], "data.weights.start.a is -1; give a number of at least 0"),
        (
            [NAMED, blend(begin=0.9, to=0.5)],
            "data.weights.from is 0.9 and data.weights.to is 0.5; from must not be above",
        ),
        ([NAMED, blend(to=80)], "data.weights.to is 80; it is a share of the run, from 0 to 1"),
    ],
)
def test_a_wrong_blend_is_one_sentence(
    overrides: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"data.path={tmp_path}", f"output={tmp_path / 'run'}", *overrides]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert not (tmp_path / "run").exists()


def test_named_paths_are_blended_by_name_whatever_the_order_of_the_names(sources: dict[str, str]) -> None:
    assert counts_after(config_of(sources, weights={"web": 1, "chats": 3}), 8, run=100) == [6, 2]
    assert counts_after(config_of(sources, weights=[3, 1]), 8, run=100) == [6, 2]
    assert counts_after(config_of(list(sources.values()), weights=[3, 1]), 8, run=100) == [6, 2]


def test_named_paths_without_weights_are_laid_end_to_end(sources: dict[str, str]) -> None:
    data = open_data(config_of(sources))
    assert (len(data.dataset), data.blended) == (32, None)


def test_weights_move_over_the_run_by_share_of_it(sources: dict[str, str]) -> None:
    config = config_of(sources, weights=SCHEDULE)
    assert counts_after(config, 20, run=40) == [20, 0]
    assert counts_after(config, 40, run=40) == [35, 5]  # 20, and then 3/4 and 1/4 of 20
    assert counts_after(config, 60, run=40) == [45, 15]  # the end weights hold when a run goes on
    assert counts_after(config, 40, run=80) == [40, 0]


def test_a_run_of_another_length_is_refused_unless_the_new_schedule_is_meant(sources: dict[str, str]) -> None:
    config = config_of(sources, weights=SCHEDULE)
    first = training_loader(open_data(config), config, num_bins=40)
    for _ in itertools.islice(first, 30):
        pass
    state = first.state_dict()
    with pytest.raises(
        InvalidInputError, match=r"schedule was 'to 1:1 over samples 20 to 40' and is '.* 30 to 60' now"
    ):
        training_loader(open_data(config), config, num_bins=60).load_state_dict(state)
    config.data.allow_mismatch = ["schedule"]
    longer = training_loader(open_data(config), config, num_bins=60)
    longer.load_state_dict(state)
    for _ in itertools.islice(longer, 30):
        pass
    counts = longer.state_dict()["blend"]["counts"]
    before = state["blend"]["counts"]
    assert sum(counts) == 60
    assert abs(counts[1] - before[1] - 30 / 4) < 1  # from here on, the weights of the longer run


def test_the_own_validation_splits_of_named_paths_go_by_these_names(sources: dict[str, str]) -> None:
    config = config_of(sources, weights=[1, 1])
    assert list(open_data(config).validation) == ["chats", "web"]
    config.validation = ValidationConfig(paths={"chats": sources["web"] + "/train"})
    with pytest.raises(InvalidInputError, match=r"the name 'chats' is that of .*/web/train in validation.paths and of"):
        open_data(config)


def test_a_blend_can_be_written_on_the_command_line(
    sources: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    named = "{" + ", ".join(f"{name}: '{path}'" for name, path in sources.items()) + "}"
    inline = "{start: {chats: 1, web: 0}, end: {chats: 0.5, web: 0.5}, from: 0.5, to: 1.0}"
    assert main([f"data.path={named}", f"data.weights={inline}", "--cfg", "job"]) == 0
    config = build(TrainConfig, yaml.safe_load(capsys.readouterr().out))
    assert (config.data.path, config.data.weights) == (sources, SCHEDULE)


def weights_of(runs: Runs, name: str) -> dict[str, torch.Tensor]:
    with TorchDistCheckpoint(runs.home / name / "checkpoints" / f"step_{NUM_STEPS:06d}") as checkpoint:
        return {tensor: checkpoint.read(tensor) for tensor in checkpoint.tensors}


NUM_STEPS = 16


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run on a stream, an indexed dataset and chats that are annealed, whole, and stopped and resumed."""
    home = tmp_path_factory.mktemp("runs")
    write_dataset(home / "chats", 40)
    write_counting_stream(home / "text")
    write_indexed(home / "web_text_document", np.concatenate([np.load(home / "text" / "shard_00001.npy")] * 2))
    path = f"{{chats: {home / 'chats'}, text: {home / 'text'}, web: {home / 'web_text_document'}}}"

    def arguments(name: str, *more: str) -> list[str]:
        return [
            f"data.path={path}",
            "data.weights={start: {chats: 0, text: 3, web: 1}, end: {chats: 1, text: 0, web: 1}, from: 0.25, to: 0.75}",
            f"data.sequence_length={PACK_SIZE}",
            "data.pack_sequences=true",
            "data.eos_id=2",
            f"output={home / name}",
            f"train.steps={NUM_STEPS}",
            "train.global_batch_size=4",
            "checkpoint.every=0",
            f"model.vocab_size={VOCAB_SIZE}",
            "logger=none",
            *more,
        ]

    # Stopped by a signal in the middle of the line, at whatever step that is, and started again by the same command.
    stopped = arguments("stopped", "--sigterm-after=6")
    result = Runs(home)
    result.printed = run_in_turn(2, [arguments("straight"), stopped, arguments("stopped")])
    return result


def test_an_annealed_blend_of_streams_and_chats_resumes_bit_for_bit_under_torchrun(runs: Runs) -> None:
    assert "stopped by SIGTERM at step" in runs.printed
    straight, stopped = runs.records("straight"), runs.records("stopped")
    assert len(straight) == NUM_STEPS
    assert [record["loss"] for record in stopped] == [record["loss"] for record in straight]
    assert [record["grad_norm"] for record in stopped] == [record["grad_norm"] for record in straight]
    weights, resumed = weights_of(runs, "straight"), weights_of(runs, "stopped")
    assert weights.keys() == resumed.keys()
    assert len(weights) > 10
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights.items())


def test_the_metrics_of_a_run_show_the_mixture_that_was_asked_for(runs: Runs) -> None:
    total = 4 * NUM_STEPS
    for record in [*runs.records("straight"), *runs.records("stopped")]:
        position, sources = record["consumed_samples"], record["sources"]
        assert list(sources) == ["chats", "text", "web"]
        assert sum(source["num_samples"] for source in sources.values()) == position
        moved = min(max(position - total / 4, 0), total / 2)  # samples on the line between the weights
        after = max(position - 3 * total / 4, 0)
        due = moved * moved / total / 2 + after / 2  # the area below the rising weight of the chats
        assert abs(sources["chats"]["num_samples"] - due) < 1
        for name, num_bins in {"chats": 40, "text": 2 * 40, "web": 2 * 40}.items():
            source = sources[name]
            assert source["share"] == source["num_samples"] / position
            assert source["epochs"] == pytest.approx(source["num_samples"] / num_bins, rel=0.03)
    assert [source["weight"] for source in runs.records("straight")[0]["sources"].values()] == [0.0, 0.75, 0.25]
    assert [source["weight"] for source in runs.records("straight")[-1]["sources"].values()] == [0.5, 0.0, 0.5]


def test_a_run_says_how_it_blends_at_the_start_and_what_it_blended_at_the_end(runs: Runs) -> None:
    begins = "blend: chats 0.00% to 50.00%, text 75.00% to 0.00%, web 25.00% to 50.00%, from bin 16 to bin 48 of 64"
    assert runs.printed.count(begins) == 3
    last = runs.records("straight")[-1]["sources"]["chats"]
    ends = f"blend: chats {last['share']:.2%} ({last['num_samples']} bins, {last['epochs']:.2f} epochs), text"
    assert ends in runs.printed


def test_a_longer_run_is_refused_before_anything_starts(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load((runs.home / "stopped" / "config.yaml").read_text())
    given = [f"data.{key}={json.dumps(config['data'][key])}" for key in ("path", "weights")]
    given = [one.replace('"', "") for one in given]
    more = [f"data.sequence_length={PACK_SIZE}", "data.pack_sequences=true", "data.eos_id=2"]
    more += [f"output={runs.home / 'stopped'}", f"train.steps={2 * NUM_STEPS}", "train.global_batch_size=4"]
    assert main([*given, *more, f"model.vocab_size={VOCAB_SIZE}"]) == 2
    message = capsys.readouterr().err
    assert "schedule was 'to 1:0:1 over samples 16 to 48' and is 'to 1:0:1 over samples 32 to 96' now" in message
    assert "or set data.allow_mismatch=[schedule] to resume anyway" in message


class Shown:
    """What a tracker is shown."""

    name = "shown"

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def log(self, values: dict[str, float], step: int) -> None:
        self.values.update(values)

    def close(self) -> None:
        pass


def test_the_realised_mixture_is_in_the_metrics_and_in_the_trackers(tmp_path: Path) -> None:
    totals = Totals(
        num_steps=1, loss_sum=6.0, num_trained=3, num_tokens=8, num_positions=16, seconds=2.0, data_seconds=0.1
    )
    record = step_record(totals, step=1, learning_rate=1.0, grad_norm=1.0, consumed_samples=8, num_samples=32)
    mixture = {"chats": SourceProgress(0.5, 0.75, 6, 0.3), "web/en": SourceProgress(0.5, 0.25, 2, 0.1)}
    shown = Shown()
    with MetricsFile(tmp_path, first_step=0, trackers=[shown]) as metrics:
        metrics.write_step(record)
        assert not any("sources" in name for name in shown.values)
        metrics.write_step(replace(record, step=2, sources=mixture))
    alone, blended = read_metrics(tmp_path / "metrics.jsonl")
    assert "sources" not in alone
    assert json.loads(json.dumps(blended["sources"]["chats"])) == {
        "weight": 0.5,
        "share": 0.75,
        "num_samples": 6,
        "epochs": 0.3,
    }
    assert (shown.values["sources/chats/share"], shown.values["sources/web/en/num_samples"]) == (0.75, 2)
