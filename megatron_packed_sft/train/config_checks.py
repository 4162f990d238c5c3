"""Values that a configuration's types allow and a run does not: refused before anything heavy is imported."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from megatron_packed_sft.data.order.state import COMPARED
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.train.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig

PRECISIONS: Final = ("auto", "float32", "bfloat16")
DECAY_STYLES: Final = ("cosine", "linear", "constant")


def check_settings(config: TrainConfig) -> None:
    """Refuse the first value that model, optimizer, schedule or loop could not follow.

    Example:
        >>> check_settings(TrainConfig(optimizer=OptimizerConfig(beta1=1.5)))
        Traceback (most recent call last):
        megatron_packed_sft.errors.InvalidInputError: optimizer.beta1 is 1.5; it must be from 0 to below 1
    """
    for problem in _problems(config):
        raise InvalidInputError(problem)


def _problems(config: TrainConfig) -> Iterator[str]:
    for key in ("output", "resume"):
        if not getattr(config, key):  # it would be the working directory
            yield f"{key} is empty; give it a value, or leave the key out"
    yield from _data_problems(config.data)
    yield from _optimizer_problems(config.optimizer)
    train, validation, checkpoint = config.train, config.validation, config.checkpoint
    yield from _below(1, {"train.global_batch_size": train.global_batch_size, "train.log_every": train.log_every})
    yield from _below(1, {"validation.steps": validation.steps})
    yield from _below(0, {"validation.every": validation.every})
    yield from _below(0, {"checkpoint.every": checkpoint.every, "checkpoint.keep": checkpoint.keep})
    yield from _below(0, {"seed": config.seed})
    yield from _model_problems(config.model, config.parallel)


def _data_problems(data: DataConfig) -> Iterator[str]:
    # The key has no type, because it is a text or a list of texts.
    paths = data.path if isinstance(data.path, list) else [data.path]
    if not paths or not all(isinstance(path, str) and path for path in paths):
        yield f"data.path is {data.path!r}; give a path, or a list of paths such as [first,second]"
    if data.weights is not None and not data.shuffle:
        yield "data.shuffle=false does not go with data.weights; leave one of them out"
    unknown = [name for name in data.allow_mismatch if name not in COMPARED]
    if unknown:
        yield f"data.allow_mismatch has {', '.join(unknown)}; choose from {', '.join(COMPARED)}"
    yield from _below(0, {"data.prefetch": data.prefetch, "data.eos_id": data.eos_id})


def _optimizer_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    for name, choices in {"precision": PRECISIONS, "decay_style": DECAY_STYLES}.items():
        if getattr(optimizer, name) not in choices:
            yield f"optimizer.{name} is {getattr(optimizer, name)!r}; choose from {', '.join(choices)}"
    if not 0 <= optimizer.warmup_share < 1:
        yield f"optimizer.warmup_share is {optimizer.warmup_share}; it is a share of all steps, from 0 to below 1"
    if not 0 < optimizer.learning_rate < math.inf:
        yield f"optimizer.learning_rate is {optimizer.learning_rate}; it must be above 0"
    if not 0 <= optimizer.min_learning_rate <= optimizer.learning_rate:
        yield (
            f"optimizer.min_learning_rate {optimizer.min_learning_rate} must lie between 0 and optimizer.learning_rate "
            f"{optimizer.learning_rate}"
        )
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(optimizer, name) < 1:
            yield f"optimizer.{name} is {getattr(optimizer, name)}; it must be from 0 to below 1"
    for name in ("weight_decay", "eps", "clip_grad"):
        if not 0 <= getattr(optimizer, name) < math.inf:
            yield f"optimizer.{name} is {getattr(optimizer, name)}; it must be at least 0"


def _model_problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    sizes = {name: value for name, value in vars(model).items() if not isinstance(value, bool)}
    yield from _below(1, {f"model.{name}": value for name, value in sizes.items()})
    yield from _below(1, {f"parallel.{name}": value for name, value in vars(parallel).items()})
    num_heads, num_groups = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
    if model.hidden_size % (2 * num_heads):
        yield (
            f"model.hidden_size {model.hidden_size} is not a multiple of 2 x model.num_attention_heads {num_heads}; "
            "every head needs the same, even width for rotary positions"
        )
    if num_heads % num_groups:
        yield (
            f"model.num_attention_heads {num_heads} cannot be shared out to model.num_query_groups {num_groups}; use a "
            "divisor"
        )
    for key, value, name in (
        ("model.num_layers", model.num_layers, "pipeline"),
        ("model.num_attention_heads", num_heads, "tensor"),
        ("model.ffn_hidden_size", model.ffn_hidden_size, "tensor"),
    ):
        if value % getattr(parallel, name):
            yield f"{key} {value} cannot be divided by parallel.{name} {getattr(parallel, name)}; change one of them"


def _below(least: int, values: dict[str, int | None]) -> Iterator[str]:
    """Numbers that are too small; None is the default's business."""
    for key, value in values.items():
        if value is not None and value < least:
            yield f"{key} is {value}; it must be at least {least}"
