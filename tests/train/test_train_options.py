"""Options of the run that reach Megatron-Core: each test looks at the effect, not at the setting."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.megatron.backend import choose_backend, seed_random_numbers
from megatron_packed_sft.megatron.forward_step import forward_step
from megatron_packed_sft.megatron.parameters import named_parameters
from megatron_packed_sft.train.app import main
from megatron_packed_sft.train.config import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    StepConfig,
    TrainConfig,
    ValidationConfig,
)
from megatron_packed_sft.train.config_checks import check_config
from megatron_packed_sft.train.data import open_data
from megatron_packed_sft.train.model_and_optimizer import (
    ModelAndOptimizer,
    build_model_and_optimizer,
    transformer_fields,
)
from megatron_packed_sft.train.pretrained import model_shape
from megatron_packed_sft.train.step_schedule import StepSchedule
from tests.megatron.tiny_gpt import WARNINGS, batch_of, make_row, run_of_one
from tests.train.counting_chats import write_dataset

pytestmark = [pytest.mark.filterwarnings(warning) for warning in WARNINGS] + [
    pytest.mark.filterwarnings("ignore:If you are using transformer_engine:UserWarning")
]
TINY = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 48}


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with run_of_one():
        yield


def config_of(**groups: Any) -> TrainConfig:
    model = ModelConfig(**{**TINY, **groups.pop("model", {})})  # type: ignore[arg-type]
    kinds = {
        "optimizer": OptimizerConfig,
        "train": StepConfig,
        "parallel": ParallelConfig,
        "validation": ValidationConfig,
    }
    config = TrainConfig(model=model, **{name: kinds[name](**values) for name, values in groups.items()})
    config.data.path = "somewhere"
    return config


def build(num_steps: int = 10, **groups: Any) -> ModelAndOptimizer:
    seed_random_numbers(7)
    schedule = StepSchedule(num_steps=num_steps, num_microbatches=1, bins_per_step=4, num_bins=4 * num_steps)
    config = config_of(**groups)
    check_config(config)
    shape = model_shape(config.model, vocab_size=256)
    return build_model_and_optimizer(shape, config, schedule, backend=choose_backend(), sequence_length=128)


def step(trained: ModelAndOptimizer) -> tuple[float, dict[str, torch.Tensor]]:
    """One step; the loss and the gradients."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    trained.model.zero_grad_buffer()
    seed_random_numbers(11)  # of dropout
    [report] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([batch_of(make_row(0), multiple=16)]),
        model=[trained.model],
        num_microbatches=1,
        seq_length=128,
        micro_batch_size=1,
        forward_only=False,
    )
    gradients = {
        name: one.main_grad.clone() for name, one in named_parameters(trained.model.module).items() if one.requires_grad
    }
    trained.optimizer.step()
    return report["lm loss"][0].item(), gradients


def weights(trained: ModelAndOptimizer) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in named_parameters(trained.model.module).items()}


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("model", [{}, {"dropout": 0.2}], ids=["plain", "dropout"])
def test_recomputed_activations_give_the_same_loss_and_gradients_bit_for_bit(recompute: str, model: Any) -> None:
    expected_loss, expected = step(build(model=model))
    loss, gradients = step(build(model=model, train={"recompute": recompute}))
    assert loss == expected_loss
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().sum() > 0, name
        assert torch.equal(gradients[name], gradient), name


def test_recomputing_really_runs_layers_again() -> None:
    counts = []
    for recompute in ("none", "full"):
        trained = build(train={"recompute": recompute})
        calls: list[int] = []
        trained.model.module.decoder.layers[0].mlp.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        step(trained)
        counts.append(len(calls))
    assert counts == [1, 2]


def test_dropout_changes_the_loss_in_training_and_not_in_evaluation() -> None:
    losses = []
    for share in (0.0, 0.5):
        trained = build(model={"dropout": share})
        batch = batch_of(make_row(0), multiple=16)
        for is_training in (True, False):
            trained.model.train(is_training)
            output, loss = forward_step(iter([batch]), trained.model)
            losses.append(loss(output)[0].item())
    plain_training, plain, dropped_training, dropped = losses
    assert plain_training == plain == dropped
    assert dropped_training != plain


def test_frozen_parameters_do_not_change_and_all_others_do() -> None:
    trained = build(model={"freeze": ["embeddings", "first_1_layers", "decoder.layers.1.mlp.linear_fc2.*"]})
    before = weights(trained)
    step(trained)
    changed = {name for name, weight in weights(trained).items() if not torch.equal(weight, before[name])}
    unchanged = before.keys() - changed
    assert "embedding.word_embeddings.weight" in unchanged
    assert "decoder.layers.1.mlp.linear_fc2.weight" in unchanged
    assert {name for name in before if name.startswith("decoder.layers.0.")} <= unchanged
    assert "decoder.layers.1.mlp.linear_fc1.weight" in changed
    assert {"decoder.final_layernorm.weight", "output_layer.weight"} <= changed
    assert len(unchanged) == 1 + 1 + sum(name.startswith("decoder.layers.0.") for name in before)


def test_layers_above_frozen_embeddings_learn_the_same_when_recomputed() -> None:
    # torch's checkpoints give no gradients at all when none of their inputs needs one.
    expected = step(build(model={"freeze": ["embeddings"]}))[1]
    gradients = step(build(model={"freeze": ["embeddings"]}, train={"recompute": "full"}))[1]
    for name, gradient in expected.items():
        assert gradient.abs().sum() > 0, name
        assert torch.equal(gradients[name], gradient), name


@pytest.mark.parametrize(
    ("freeze", "problem"),
    [
        (["embedings"], "model.freeze has 'embedings', which matches no parameter; choose from norms"),
        (["first_3_layers"], "model.freeze has 'first_3_layers', but the model has 2 layers"),
        (["*"], "freezes the whole model; leave something to train"),
    ],
)
def test_what_cannot_be_frozen_is_refused(freeze: list[str], problem: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        build(model={"freeze": freeze})
    assert problem in str(caught.value)


def test_tied_embeddings_are_not_frozen_by_the_name_of_the_output_layer() -> None:
    with pytest.raises(InvalidInputError, match="use embeddings, which are tied to it"):
        build(model={"freeze": ["output"], "tie_embeddings": True})


@pytest.mark.parametrize(
    ("exempt", "undecayed"),
    [
        (["norms", "biases"], "layernorm"),
        (["norms", "biases", "embeddings"], "layernorm|embedding"),
        (["decoder.layers.1.*"], r"layers\.1"),
        ([], "nothing"),
    ],
)
def test_weight_decay_leaves_alone_what_it_is_told_to(exempt: list[str], undecayed: str) -> None:
    import re

    # With a gradient of zero Adam changes nothing, so what changes was decayed.
    optimizer = {"no_weight_decay": exempt, "weight_decay": 0.5, "learning_rate": 0.1, "warmup_share": 0.0}
    trained = build(optimizer=optimizer)
    before = weights(trained)
    trained.model.zero_grad_buffer()
    trained.optimizer.step()
    for name, weight in weights(trained).items():
        is_decayed = not re.search(undecayed, name)
        assert torch.allclose(weight, before[name] * (0.95 if is_decayed else 1.0), rtol=1e-6, atol=0), name


def rates(num_steps: int = 10, **optimizer: Any) -> list[float]:
    """The learning rate of each step, as the optimizer has it, with a peak of 1."""
    given = {"learning_rate": 1.0, "min_learning_rate": 0.1, "warmup_share": 0.0, **optimizer}
    trained = build(num_steps, optimizer=given)
    found = []
    for _ in range(num_steps):
        found.append(trained.optimizer.param_groups[0]["lr"])
        trained.scheduler.step(increment=4)
    return found


def test_each_schedule_has_its_learning_rates() -> None:
    assert rates(decay_style="constant") == [1.0] * 10
    assert rates(decay_style="linear") == pytest.approx([1 - 0.9 * step / 10 for step in range(10)])
    cosine = [0.1 + 0.45 * (1 + math.cos(math.pi * step / 10)) for step in range(10)]
    assert rates(decay_style="cosine") == pytest.approx(cosine)
    decayed = [0.1 + 0.9 * (1 - math.sqrt(share)) for share in (0.25, 0.5, 0.75)]
    assert rates(decay_style="wsd", wsd_share=0.4) == pytest.approx([*[1.0] * 7, *decayed])


def test_warm_up_is_a_share_of_the_steps() -> None:
    assert rates(warmup_share=0.3, decay_style="constant")[:4] == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1.0])


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({"optimizer": {"fp8": "delayed"}}, {"fp8": "hybrid", "fp8_recipe": "delayed"}),
        ({"optimizer": {"fp8": "mxfp8"}}, {"fp8": "e4m3", "fp8_recipe": "mxfp8"}),
        ({"parallel": {"tensor": 2, "sequence_parallel": True}}, {"sequence_parallel": True}),
        (
            {"train": {"recompute": "selective"}},
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        ),
    ],
)
def test_megatron_core_accepts_the_fields_of_what_cannot_run_here(groups: Any, expected: dict[str, Any]) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = config_of(**groups)
    check_config(config)
    made = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=2, cuda_graph_scope=[], ffn_hidden_size=64,
        tensor_model_parallel_size=config.parallel.tensor, **transformer_fields(config),
    )  # fmt: skip
    assert {name: getattr(made, name) for name in expected} == expected


def test_fp8_is_padded_as_megatron_core_says() -> None:
    from megatron.core.enums import Fp8Recipe
    from megatron.core.fp8_utils import get_fp8_align_size

    from megatron_packed_sft.packing.parallel_layout import FP8_MULTIPLES

    assert {name: get_fp8_align_size(Fp8Recipe(name)) for name in FP8_MULTIPLES} == FP8_MULTIPLES


@pytest.mark.skipif(torch.cuda.is_available(), reason="these work with CUDA")
@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("optimizer.fp8=delayed", "optimizer.fp8=delayed needs CUDA and Transformer Engine"),
        ("optimizer.distributed=true", "optimizer.distributed=true needs CUDA and Transformer Engine"),
        ("optimizer.precision=bfloat16", "optimizer.precision=bfloat16 needs CUDA"),
        ("parallel.sequence_parallel=true", "parallel.sequence_parallel=true needs parallel.tensor above 1"),
        ("train.recompute=some", "train.recompute is 'some'; choose from none, selective, full"),
        ("optimizer.decay_style=wsd optimizer.wsd_share=0.99", "add up to more than 1"),
        ("optimizer.fp8=delayed optimizer.precision=float32", "optimizer.fp8=delayed needs optimizer.precision=bfl"),
        ("model.dropout=1", "model.dropout is 1.0; it is a share"),
        ("validation.patience=2", "validation.patience needs validation.every"),
        ("validation.num_samples=2 parallel.context=2", "validation.num_samples=2 needs parallel.context=1"),
        ("logger.names=[comet]", "logger.names has 'comet'; choose from tensorboard, wandb, mlflow"),
    ],
)
def test_what_this_machine_or_recipe_cannot_do_is_refused_by_name(
    argument: str, problem: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"data.path={data}", f"output={tmp_path / 'run'}", *argument.split()]) != 0
    assert problem in capsys.readouterr().err


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("options") / "data", 4)


def test_context_parallelism_asks_for_data_that_was_prepared_for_it(data: Path) -> None:
    config = config_of(parallel={"context": 2, "tensor": 2, "sequence_parallel": True})
    config.data.path = str(data)
    with pytest.raises(InvalidInputError) as caught:
        open_data(config)
    assert "--overwrite 'packing.for_parallel={tensor:2,context:2,sequence_parallel:true}'" in str(caught.value)


def test_batches_are_padded_to_what_the_ranks_share(data: Path) -> None:
    config = config_of(parallel={"tensor": 3, "sequence_parallel": True}, optimizer={"fp8": "mxfp8"})
    config.data.path = str(data)
    opened = open_data(config)
    assert opened.sequence_length == 288  # 256 rounded up to a multiple of 3 x 32
    assert opened.dataset.fetch_batch([0])["tokens"].shape[1] % 96 == 0
