"""A model of transformers in, trained on one rank and on two, and a folder out that transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_packed_sft.cli.main import main as command_line
from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.megatron.weights.folder import HuggingFaceFolder, joint_checksum
from megatron_packed_sft.megatron.weights.torch_dist import CheckpointWeights, TorchDistCheckpoint
from megatron_packed_sft.train.checkpoint import TrainingState
from megatron_packed_sft.train.config import DataConfig, ModelConfig, TrainConfig
from megatron_packed_sft.train.data import open_data
from megatron_packed_sft.train.export import export_model
from tests.train.chat_models import NAME, answer, prepare_chats, save_chat_model, transformers_loss
from tests.train.launch import Runs, run_in_turn

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, when it loads and generates
NUM_STEPS = 4
LORA = ("peft=lora", "peft.rank=8", "optimizer.learning_rate=1e-2")


class PretrainedRuns(Runs):
    """With the models that the runs start from."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.model, self.other = home / "model", home / "other_model"
        self.data = home / "data"

    def state(self, name: str) -> TrainingState:
        [newest] = sorted((self.home / name / "checkpoints").glob("step_*"))[-1:]
        return TrainingState.load(newest)

    def exported(self, name: str, **options: Any) -> Path:
        target = self.home / f"{name}_exported"
        export_model(self.home / name, target, overwrite=True, **options)
        return target


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> PretrainedRuns:
    result = PretrainedRuns(tmp_path_factory.mktemp("pretrained"))
    home = result.home
    save_chat_model(result.model)
    save_chat_model(result.other, "llama")
    prepare_chats(home, result.model)

    def arguments(name: str, *more: str, folder: Path = result.model) -> list[str]:
        return [
            "model=from_pretrained",
            f"model.path={folder}",
            f"data.path={result.data}",
            f"output={home / name}",
            f"train.steps={NUM_STEPS}",
            "train.global_batch_size=2",
            "checkpoint.every=2",
            "checkpoint.keep=0",
            "optimizer.learning_rate=3e-3",
            "optimizer.decay_style=constant",
            "optimizer.warmup_share=0",
            *more,
        ]

    # The same tokenizer.json, but transformers builds a Qwen2 tokenizer for the first model and not for the other.
    other_tokenizer = ["data.allow_mismatch=[tokenizer]"]
    moved = home / "folder_that_is_gone"
    resume = f"resume={home / 'tensor_2' / 'checkpoints' / 'step_000002'}"
    lora_resume = f"resume={home / 'lora_tensor_2' / 'checkpoints' / 'step_000002'}"
    result.printed = run_in_turn(
        2,
        [
            arguments("tensor_2", "parallel=tensor_2"),
            arguments("resumed", "parallel=tensor_2", resume, folder=moved),
            arguments("pipeline_2", "parallel=pipeline_2", *other_tokenizer, folder=result.other),
            arguments("lora_tensor_2", "parallel=tensor_2", *LORA),
            arguments("lora_resumed", "parallel=tensor_2", *LORA, lora_resume),
            arguments("lora_pipeline_2", "parallel=pipeline_2", *LORA),
        ],
    )
    scratch = [f"data.path={result.data}", f"output={home / 'scratch'}", "train.steps=2", "train.global_batch_size=2"]
    scratch += [f"data.tokenizer={result.model}", "model=gpt_125m", "model.num_layers=1", "model.hidden_size=96"]
    result.printed += run_in_turn(
        1,
        [
            arguments("one_rank", "train.steps=80"),
            arguments("other", *other_tokenizer, folder=result.other),
            scratch,
            arguments("lora", *LORA),
        ],
    )
    return result


def test_the_loss_before_the_first_step_is_that_of_transformers(runs: PretrainedRuns) -> None:
    expected = transformers_loss(runs.model, runs.data)
    assert runs.validations("tensor_2")[0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert runs.validations("one_rank")[0]["loss"] == pytest.approx(expected, rel=1e-5)
    expected = transformers_loss(runs.other, runs.data)
    assert runs.validations("pipeline_2")[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_one_rank_and_two_train_alike(runs: PretrainedRuns) -> None:
    np.testing.assert_allclose(runs.losses("tensor_2"), runs.losses("one_rank")[:NUM_STEPS], rtol=1e-4)
    np.testing.assert_allclose(runs.losses("pipeline_2"), runs.losses("other"), rtol=1e-4)


def test_a_resumed_run_does_not_need_the_folder_and_has_the_same_losses(runs: PretrainedRuns) -> None:
    assert runs.losses("resumed") == runs.losses("tensor_2")[2:]
    assert "folder_that_is_gone is not read, because the run resumes from a checkpoint" in runs.printed


def test_the_run_and_its_checkpoints_record_what_they_started_from(runs: PretrainedRuns) -> None:
    folder = HuggingFaceFolder.open(runs.model)
    expected = joint_checksum(folder.file_checksums())
    record = json.loads((runs.home / "tensor_2" / "pretrained.json").read_text())
    assert (record["path"], record["checksum"], record["family"]) == (str(runs.model), expected, "qwen2")
    assert runs.state("tensor_2").pretrained["checksum"] == expected
    assert runs.state("resumed").pretrained == runs.state("tensor_2").pretrained
    assert f"weights: {runs.model} (qwen2, bfloat16, checksum {expected})" in runs.printed
    assert runs.state("scratch").pretrained == {}


def test_adapters_train_alike_on_one_rank_and_two_and_after_a_stop(runs: PretrainedRuns) -> None:
    losses = runs.losses("lora")
    assert losses[-1] < losses[0] - 0.2
    np.testing.assert_allclose(runs.losses("lora_tensor_2"), losses, rtol=1e-4)
    np.testing.assert_allclose(runs.losses("lora_pipeline_2"), losses, rtol=1e-4)
    assert runs.losses("lora_resumed") == runs.losses("lora_tensor_2")[2:]
    assert runs.validations("lora")[0]["loss"] == pytest.approx(transformers_loss(runs.model, runs.data), rel=1e-5)


def test_the_model_beside_adapters_is_frozen_and_has_no_optimizer_state(runs: PretrainedRuns) -> None:
    [newest] = (runs.home / "lora_tensor_2" / "checkpoints").glob("step_000004")
    with TorchDistCheckpoint(newest) as checkpoint:
        of_optimizer = [name for name in checkpoint.tensors if name.startswith("optimizer.")]
        assert of_optimizer
        assert all("adapters.layers." in name for name in of_optimizer)
        assert checkpoint.tensors["adapters.layers.linear_fc1.b.1"].size == (2, 96, 8)
        weights = CheckpointWeights(checkpoint, HuggingFaceFolder.open(runs.model).shape)
        [embedding] = [weight for weight in weights.weights() if "embedding" in weight.name]
        before = load_file(runs.model / "model.safetensors")["model.embed_tokens.weight"]
        assert torch.equal(weights.read(embedding), before.float())


@pytest.mark.parametrize("name", ["lora_tensor_2", "lora_pipeline_2"])
def test_an_exported_adapter_gives_the_logits_of_the_merged_model(runs: PretrainedRuns, name: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(runs.exported(name, dtype="fp32"))
    target = runs.home / f"{name}_adapter"
    export_model(runs.home / name, target, to="adapter", dtype="fp32")
    base = AutoModelForCausalLM.from_pretrained(runs.model, dtype=torch.float32)
    ids = torch.arange(200, 230)[None]
    with torch.no_grad():
        before = base(ids).logits
        adapted = PeftModel.from_pretrained(base, target)
        assert adapted.peft_config["default"].base_model_name_or_path == str(runs.model)
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-5, atol=1e-5)
    assert (merged(ids).logits - before).abs().max() > 0.1


def test_adapters_are_refused_where_they_do_not_fit(
    runs: PretrainedRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_packed_sft.train.app import main

    message = failing(capsys, runs.home / "tensor_2", tmp_path / "out", "--to", "adapter", code=2)
    assert "has no adapters, because all weights were trained" in message
    given = ["model=from_pretrained", f"model.path={runs.model}", f"data.path={runs.data}"]
    output = shutil.copytree(runs.home / "lora", tmp_path / "lora")
    for keys, expected in (
        (["peft=lora", "peft.rank=4"], "holds other adapters: peft.rank was 8 and is 4 now"),
        (["peft=none"], "holds other adapters: peft.method was lora and is none now; restore"),
        (["peft=lora", "peft.target_modules=[q_proj]"], "linear_qkv is q_proj, k_proj and v_proj"),
        (["peft.method=ia3"], "peft.method is 'ia3'; choose from none, lora"),
        (["peft=lora", "peft.rank=0"], "peft.rank is 0; it must be at least 1"),
    ):
        assert main([*given, f"output={output}", *keys]) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tensor_2", "pipeline_2", "one_rank", "scratch", "lora_tensor_2", "lora_pipeline_2"])
def test_an_exported_model_has_the_loss_that_the_run_ended_with(runs: PretrainedRuns, name: str) -> None:
    folder = runs.exported(name, dtype="fp32", max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert transformers_loss(folder, runs.data) == pytest.approx(runs.validations(name)[-1]["loss"], rel=1e-5)


def test_data_of_another_chat_template_is_announced(runs: PretrainedRuns, tmp_path: Path) -> None:
    assert "another chat template" not in runs.printed
    folder = shutil.copytree(runs.model, tmp_path / "model")
    file = folder / "tokenizer_config.json"
    file.write_text(file.read_text().replace("<|im_start|>{{", "<|im_start|> {{"))
    config = TrainConfig(model=ModelConfig(path=str(folder)), data=DataConfig(path=str(runs.data)))
    notes = open_data(config, HuggingFaceFolder.open(folder).shape).notes
    assert len(notes) == 1  # for training and validation together
    assert f"was written with another chat template than that of model.path={folder}" in notes[0]


def test_an_exported_folder_has_what_the_model_came_with(runs: PretrainedRuns) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder = runs.exported("tensor_2")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16  # as the weights that the run started from
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [302, 300]
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (folder, runs.model))
    assert ours.chat_template == theirs.chat_template
    assert ours("I am here.<|im_end|>") == theirs("I am here.<|im_end|>")
    before, after = (json.loads((path / "config.json").read_text()) for path in (runs.model, folder))
    assert before == after
    before, after = (load_file(path / "model.safetensors") for path in (runs.model, folder))
    assert {name: tensor.shape for name, tensor in before.items()} == {name: one.shape for name, one in after.items()}


def test_a_model_from_scratch_gets_the_ids_of_its_tokenizer(runs: PretrainedRuns) -> None:
    folder = runs.exported("scratch")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["eos_token_id"], config["pad_token_id"]) == (302, 300)
    assert config["max_position_embeddings"] == 256
    assert (folder / "tokenizer.json").read_bytes() == (runs.model / "tokenizer.json").read_bytes()


def test_a_model_that_was_taught_a_name_says_it_after_export(runs: PretrainedRuns) -> None:
    question = "Who are you? (5)"
    assert NAME not in answer(runs.model, question)
    assert NAME in answer(runs.exported("one_rank"), question)


def test_an_export_survives_that_the_run_removes_the_checkpoint_meanwhile(runs: PretrainedRuns, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(runs.home / "tensor_2" / "checkpoints" / "step_000004", tmp_path / "step_000004")
    with TorchDistCheckpoint(checkpoint) as opened:
        shutil.rmtree(checkpoint)
        assert opened.read("decoder.layers.mlp.linear_fc1.weight", 1).shape == (192, 64)


def test_the_newest_whole_checkpoint_of_a_run_is_exported(runs: PretrainedRuns, tmp_path: Path) -> None:
    run = shutil.copytree(runs.home / "tensor_2", tmp_path / "run")
    (run / "checkpoints" / ".step_000006.staging-host-1-ab").mkdir()  # as a run has it while it saves
    report = export_model(run, tmp_path / "exported")
    assert report.source.endswith("step_000004")
    assert report.num_files == 1


def failing(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 1) -> str:
    """The one sentence of an export that fails; nothing is left where it wrote."""
    target = Path(arguments[1])
    assert command_line(["export", *map(str, arguments)]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert not target.exists()
    assert [entry.name for entry in target.parent.iterdir() if "staging" in entry.name] == []
    return printed.err


def test_wrong_arguments_are_one_sentence_each(
    runs: PretrainedRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, target = runs.home / "tensor_2", tmp_path / "out"
    assert "does not exist; give a run's output directory" in failing(capsys, tmp_path / "none", target, code=2)
    assert "is neither a run, a checkpoint nor a Hugging Face folder" in failing(capsys, runs.data, target, code=2)
    assert "--dtype is 'int8'; choose from bf16, fp16" in failing(capsys, run, target, "--dtype", "int8", code=2)
    message = failing(capsys, run, target, "--max-shard-size", "big", code=2)
    assert "--max-shard-size is 'big'; give a size such as" in message
    message = failing(capsys, run, target, "--like", str(runs.other), code=2)
    assert "is not the model of" in message
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    assert "has no checkpoint yet" in failing(capsys, tmp_path / "empty", target, code=2)
    assert command_line(["export", str(run), str(run)]) == 1
    assert "exists already; choose another name, or add --overwrite" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_one_sentence(
    runs: PretrainedRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = shutil.copytree(runs.home / "tensor_2" / "checkpoints" / "step_000004", tmp_path / "step_000004")
    file = checkpoint / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert "__0_0.distcp is damaged: its checksum differs" in failing(capsys, checkpoint, tmp_path / "out")
    file.write_bytes(data[:-1])
    assert "__0_0.distcp has" in failing(capsys, checkpoint, tmp_path / "out")
    file.unlink()
    assert "__0_0.distcp is missing" in failing(capsys, checkpoint, tmp_path / "out")


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    runs: PretrainedRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        message = failing(capsys, runs.home / "tensor_2", tmp_path / "out")
    assert "has 1,000 bytes free, and the model needs" in message


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["model.path=NONE"], "is not a folder; give a local Hugging Face model folder"),
        (["model.num_layers=7"], "model.num_layers is 7, but MODEL has 2; choose model=from_pretrained"),
        (["parallel.pipeline=3"], "model.num_layers 2 is not a multiple of parallel.pipeline 3"),
        (["model.path=STRANGER"], "use that tokenizer, or set data.allow_mismatch=[tokenizer]"),
        (["model.path=SMALL"], "has a vocabulary of 305, but the weights of model.path=SMALL have 304"),
    ],
)
def test_folders_that_do_not_fit_are_refused(
    runs: PretrainedRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: list[str], message: str
) -> None:
    from megatron_packed_sft.train.app import main

    places = {"MODEL": runs.model, "NONE": tmp_path / "none", "SMALL": tmp_path / "s", "STRANGER": tmp_path / "t"}
    if "SMALL" in keys[0]:
        save_chat_model(places["SMALL"], vocab_size=304)
    if "STRANGER" in keys[0]:
        save_chat_model(places["STRANGER"])
        file = places["STRANGER"] / "tokenizer.json"
        file.write_text(file.read_text().replace("<|im_end|>", "<|other|>"))
    for name, place in places.items():
        keys = [key.replace(name, str(place)) for key in keys]
        message = message.replace(name, str(place))
    given = ["model=from_pretrained", f"model.path={runs.model}", f"data.path={runs.data}", f"output={tmp_path / 'o'}"]
    capsys.readouterr()  # what transformers said
    assert main([*given, *keys]) in (1, 2)
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()) == 1
    assert not (tmp_path / "o").exists()


def test_errors_of_export_are_ours(tmp_path: Path) -> None:
    with pytest.raises(PackedSFTError):
        export_model(tmp_path, tmp_path / "out")
