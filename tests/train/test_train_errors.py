"""Wrong configurations: one sentence each, before megatron.core is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_packed_sft.config.composition import config_directory
from megatron_packed_sft.train.app import main
from megatron_packed_sft.train.checkpoint import STATE, TrainingState, recorded_model
from megatron_packed_sft.train.config import ModelConfig, TrainConfig
from megatron_packed_sft.train.pretrained import model_shape
from tests.train.counting_chats import PACK_SIZE, VOCAB_SIZE, write_dataset, write_legacy
from tests.train.launch import RECIPE, environment, torchrun
from tests.train.sound_states import SCHEDULER

TINY = ModelConfig(num_layers=2, hidden_size=128, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=256)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("errors") / "data", 40)


@pytest.fixture(autouse=True)
def megatron_core_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever tests ran before in this process: an import of megatron.core would put it back."""
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence that a wrong command line gives."""
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("packed-sft train: error: ")
    assert "megatron.core" not in sys.modules
    return line.removeprefix("packed-sft train: error: ")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["packing_length=4096"], "packing_length is not a key; use data.sequence_length"),
        (["train.effective_batch_size=8"], "use train.global_batch_size"),
        (["optimizer.lr=1e-4"], "optimizer.lr is not a key; use optimizer.learning_rate"),
        (
            ["parallel.context=2"],
            "need a multiple of 4; run the packed-sft prepare command that made the data again",
        ),
        (["train.stepz=3"], "train.stepz is not a key; did you mean train.steps?"),
        (["train.steps=many"], "train.steps is 'many'; it must be an integer or null"),
        (["data.sequence_length=128"], f"data.sequence_length is 128, but bins of ... have up to {PACK_SIZE} tokens"),
        (["train.gradient_accumulation=0"], "train.gradient_accumulation is 0; it must be at least 1"),
        (["per_device_train_batch_size=2"], "is not a key; use train.gradient_accumulation"),
        (["optimizer.betas=[0.9]"], "optimizer.betas is [0.9]; give two numbers from 0 to below 1"),
        (["train.gradient_accumulation=2"], "train.gradient_accumulation=2 needs train.global_batch_size=null"),
        (["train.gradient_accumulation_steps=2"], "is not a key; did you mean train.gradient_accumulation?"),
        (["train.batch_unit=tokens"], "train.batch_unit is 'tokens'; choose from bins, sequences"),
        (["train.steps=0"], "train.steps is 0; it must be at least 1, or null"),
        (["train.epochs=0"], "train.epochs is 0.0; it must be above 0"),
        (["train.log_every=0"], "train.log_every is 0; it must be at least 1"),
        (["optimizer.warmup_share=1.5"], "optimizer.warmup_share is 1.5; it is a share of all steps"),
        (["optimizer.decay_style=steps"], "optimizer.decay_style is 'steps'; choose from cosine"),
        (["optimizer.precision=int8"], "optimizer.precision is 'int8'; choose from auto"),
        (["optimizer.min_learning_rate=1"], "optimizer.min_learning_rate 1.0 must be between 0 and"),
        (["model.vocab_size=100"], f"model.vocab_size is 100, but the data has ids up to {VOCAB_SIZE - 1}"),
        (["parallel=tensor_2"], "1 processes cannot be divided into parallel.tensor 2"),
        (["parallel.pipeline=0"], "parallel.pipeline is 0; it must be at least 1"),
        (["resume=/no/such/step_000100"], "resume=/no/such/step_000100 is not a directory"),
        (["validation.paths=[/no/such/data]"], "/no/such/data does not exist"),
        (["output="], "output is empty; give it a value"),
        (["resume="], "resume is empty; give it a value"),
        (["seed=-1"], "seed is -1; it must be at least 0"),
        (["data.eos_id=-1"], "data.eos_id is -1; it must be at least 0"),
        (["data.eos_id=256"], "data.eos_id is 256, but the vocabulary ends at 255"),
        (["data.allow_mismatch=[sed]"], "data.allow_mismatch has sed; choose from fingerprint"),
        (["data.weights=[1,2]", "data.shuffle=false"], "data.shuffle=false cannot be combined with data.weights"),
        (["data.path=3"], "data.path is 3; give a path, a list of paths"),
        (["data.path=null"], "data.path is None; give a path"),
        (["data.path=[]"], "data.path is []; give a path"),
        (["data.path={a: 3}"], "data.path is {'a': 3}; give a path ... or names such as {chats: PATH, web: PATH}"),
        (["data.path={a: /no/such/data}"], "/no/such/data does not exist and matches nothing; check the path"),
        (["data.path=/no/such/data"], "/no/such/data does not exist and matches nothing; check the path"),
    ],
)
def test_a_wrong_key_or_value_is_one_sentence(
    overrides: list[str], sentence: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = error_of(capsys, f"data.path={data}", f"output={tmp_path / 'run'}", *overrides)
    for part in sentence.split(" ... "):
        assert part in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["output", "data.plan", "data.tokenizer"])
def test_a_url_is_refused_under_the_name_of_its_key(
    key: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    message = error_of(capsys, f"data.path={data}", f"{key}=s3://bucket/x")
    assert message.startswith(f"{key} s3://bucket/x is a URL")
    assert list(tmp_path.iterdir()) == []


def test_a_storage_that_is_not_there_is_named(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    legacy = write_legacy(data, tmp_path / "data.npy")
    message = error_of(capsys, f"data.path={legacy}", "packed_storage=memmap_v1")
    assert message.endswith("but packed_storage asks for 'memmap_v1'; set packed_storage to legacy")
    message = error_of(capsys, f"data.path={legacy}", "storage=legacy")
    assert message.endswith("does not record its vocabulary size; set model.vocab_size or data.tokenizer")


def test_under_torchrun_a_mistake_is_said_once_by_us_and_again_where_torchrun_sums_up(tmp_path: Path) -> None:
    command = torchrun(2, RECIPE, "data.path=/no/such/data", f"output={tmp_path / 'run'}")
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, check=False)
    sentence = "/no/such/data does not exist and matches nothing; check the path"
    assert done.returncode != 0
    assert done.stderr.count(f"packed-sft train: error: {sentence}\n") == 1
    assert f"  traceback : {sentence}\n" in done.stderr.partition("Root Cause")[2]
    assert "megatron_packed_sft" not in done.stderr  # no trace of ours


def test_a_batch_that_the_ranks_cannot_share_names_its_neighbours(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    message = error_of(capsys, f"data.path={data}", "train.global_batch_size=6")
    assert message.startswith("train.global_batch_size=6: ")
    assert message.endswith("choose 4 or 8")


def saved_run(output: Path, **changes: object) -> Path:
    """A checkpoint as far as it is read before megatron.core is."""
    data = {
        "format": "packed_sft_loader_state",
        "version": 1,
        "consumed_samples": 8,
        "fingerprint": "0123",
        "num_samples": 40,
        "shuffle": True,
        "seed": 1234,
        **changes,
    }
    state = TrainingState(
        step=2, data=data, scheduler=SCHEDULER, model=recorded_model(model_shape(TINY, VOCAB_SIZE), TrainConfig())
    )
    checkpoint = output / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / STATE).write_bytes(state.to_bytes())
    return checkpoint


def test_other_data_than_the_checkpoints_is_refused_with_the_key_that_allows_it(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = saved_run(tmp_path, seed=7)
    message = error_of(capsys, f"data.path={data}", f"output={tmp_path}")
    assert message.startswith(f"cannot resume from {checkpoint}: the state is from another run: fingerprint was '0123'")
    assert "seed was 7 and is 1234 now" in message
    assert message.endswith("or set data.allow_mismatch=[fingerprint, seed] to resume anyway")


def test_a_checkpoint_of_another_model_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_run(tmp_path)
    message = error_of(capsys, f"data.path={data}", f"output={tmp_path}", "model.num_layers=3")
    assert "holds a different model: model.num_layers was 2 and is 3 now" in message


def test_beginning_anew_never_overwrites_a_run(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved_run(tmp_path)
    message = error_of(capsys, f"data.path={data}", f"output={tmp_path}", "resume=never")
    assert "already has checkpoints up to step_000002; choose another output" in message


@pytest.mark.parametrize("group", ["model", "data", "optimizer", "parallel"])
def test_every_configuration_of_a_group_composes(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = sorted(path.stem for path in (config_directory() / group).glob("*.yaml"))
    assert len(names) >= 2
    for name in names:
        assert main([f"{group}={name}", "--cfg", "job"]) == 0
        assert f"\n{group}:\n" in capsys.readouterr().out


def test_help_shows_examples_and_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "torchrun --nproc-per-node 2 recipes/sft.py",
        "train.global_batch_size=8",
        "data.sequence_length=null",
        "query heads",
    ):
        assert text in printed
