"""Refuse values that have the right type but cannot work, before anything slow is imported."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from megatron_packed_sft.data.options import MODES, STATIC
from megatron_packed_sft.data.order.blend_weights import mixing_of
from megatron_packed_sft.data.order.state import COMPARED
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.megatron.weights.layout import TARGETS, ModelShape
from megatron_packed_sft.packing.parallel_layout import FP8_MULTIPLES
from megatron_packed_sft.remote.filesystem import refuse_read_only
from megatron_packed_sft.remote.node_cache import parse_size
from megatron_packed_sft.storage.interface import VERIFY
from megatron_packed_sft.support.paths import is_url, local_path
from megatron_packed_sft.train.config import (
    DataConfig,
    LoggerConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PeftConfig,
    StepConfig,
    TrainConfig,
    ValidationConfig,
)
from megatron_packed_sft.train.trackers import TRACKERS

PEFT_METHODS: Final = ("none", "lora")
PRECISIONS: Final = ("auto", "float32", "bfloat16")
DECAY_STYLES: Final = ("cosine", "linear", "constant", "wsd")
RECOMPUTES: Final = ("none", "selective", "full")
BATCH_UNITS: Final = ("bins", "sequences")
_MAY_BE_URLS: Final = ("data.path", "validation.paths", "resume", "checkpoint.copy_to")
LOSSES: Final = ("per_token", "per_conversation")


def check_config(config: TrainConfig) -> None:
    """Refuse the first value that cannot work, naming its key.

    Example:
        >>> check_config(TrainConfig(optimizer=OptimizerConfig(betas=[1.5, 0.95])))
        Traceback (most recent call last):
        megatron_packed_sft.errors.InvalidInputError: optimizer.betas is [1.5, 0.95]; give two numbers from 0 to below 1
    """
    for problem in _problems(config):
        raise InvalidInputError(problem)
    for key, path in _paths(config):
        if key not in _MAY_BE_URLS:
            local_path(path, key)
    if config.checkpoint.copy_to is not None and is_url(config.checkpoint.copy_to):
        refuse_read_only(config.checkpoint.copy_to, "checkpoint.copy_to")
    if config.data.cache_size is not None:
        parse_size(config.data.cache_size, "data.cache_size")


def _problems(config: TrainConfig) -> Iterator[str]:
    for key in ("output", "resume"):
        if not getattr(config, key):  # it would mean the working directory
            yield f"{key} is empty; give it a value, or leave the key out"
    yield from _data_problems(config.data)
    yield from _static_problems(config)
    yield from _optimizer_problems(config.optimizer)
    yield from _step_problems(config.train)
    yield from _peft_problems(config.peft, config.model)
    yield from _validation_problems(config.validation, config.parallel)
    yield from _logger_problems(config.logger)
    checkpoint = config.checkpoint
    yield from _below(0, {"checkpoint.every": checkpoint.every, "checkpoint.keep": checkpoint.keep})
    yield from _copy_problems(config)
    yield from _below(0, {"seed": config.seed})
    yield from _model_problems(config.model, config.parallel)


def _copy_problems(config: TrainConfig) -> Iterator[str]:
    place = config.checkpoint.copy_to
    if place is None:
        return
    if not place:
        yield "checkpoint.copy_to is empty; give a URL or a directory, or leave the key out"
    elif not is_url(place) and not is_url(config.output):
        copies, output = local_path(place), local_path(config.output)
        if copies == output or output in copies.parents:
            yield f"checkpoint.copy_to={place} is in output={config.output}; choose a place outside"


def _paths(config: TrainConfig) -> Iterator[tuple[str, str]]:
    yield "output", config.output
    yield "resume", config.resume
    if config.checkpoint.copy_to is not None:
        yield "checkpoint.copy_to", config.checkpoint.copy_to
    for path in listed_paths(config.data.path):
        yield "data.path", path
    for path in named_paths(config.validation.paths).values():
        yield "validation.paths", path
    if config.model.path is not None:
        yield "model.path", config.model.path
    for name in ("plan", "tokenizer"):
        if getattr(config.data, name) is not None:
            yield f"data.{name}", getattr(config.data, name)


def named_paths(paths: Any) -> dict[str, str]:
    """Return name -> path of validation.paths, which is a list or has names.

    Example:
        >>> named_paths(["data/maths"]), named_paths({"maths": "data/maths"})
        ({'data/maths': 'data/maths'}, {'maths': 'data/maths'})
    """
    return dict(paths) if isinstance(paths, dict) else {path: path for path in paths or ()}


def listed_paths(paths: Any) -> list[Any]:
    """Return the paths of data.path, which is one of them, a list, or has names.

    Example:
        >>> listed_paths("data/maths"), listed_paths({"maths": "data/maths"})
        (['data/maths'], ['data/maths'])
    """
    return list(paths.values()) if isinstance(paths, dict) else paths if isinstance(paths, list) else [paths]


def _data_problems(data: DataConfig) -> Iterator[str]:
    # The key has no type in the schema, because it is a string, a list of strings, or strings by name.
    paths = listed_paths(data.path)
    if not paths or not all(isinstance(path, str) and path for path in paths):
        yield (
            f"data.path is {data.path!r}; give a path, a list of paths such as [first,second], or names such as "
            "{chats: PATH, web: PATH}"
        )
    yield from _blend_problems(data)
    others = (data.weights, data.plan, None if data.shuffle else data.shuffle)
    if data.shard_window is not None and any(one is not None for one in others):
        yield "data.shard_window shuffles one dataset of shards; leave out data.weights, plan and shuffle=false"
    yield from _below(1, {"data.shard_window": data.shard_window})
    if data.verify not in VERIFY:
        yield f"data.verify is {data.verify!r}; choose from {', '.join(VERIFY)}"
    unknown = [name for name in data.allow_mismatch if name not in COMPARED]
    if unknown:
        yield f"data.allow_mismatch has {', '.join(unknown)}; choose from {', '.join(COMPARED)}"
    yield from _below(0, {"data.eos_id": data.eos_id})


def _blend_problems(data: DataConfig) -> Iterator[str]:
    if data.weights is not None and not data.shuffle:
        yield "data.shuffle=false cannot be combined with data.weights; leave one of them out"
    names = list(data.path) if isinstance(data.path, dict) else []
    try:
        mixing_of(data.weights, names, num_sources=len(names) or None, where="data.weights")
    except InvalidInputError as error:
        yield str(error)


def _static_problems(config: TrainConfig) -> Iterator[str]:
    data, default = config.data, TrainConfig()
    if config.packing_mode not in MODES:
        yield (
            f"packing_mode is {config.packing_mode!r}; choose from {', '.join(MODES)}: packs are planned before the "
            "first step, never on the way"
        )
    if config.packing_mode != STATIC:
        names = ("dataloader_drop_last", "packing_allow_single_long", "packing_full_is_oversized")
        keys = [name for name in names if getattr(config, name) != getattr(default, name)]
        keys += ["data.samples"] if data.samples is not None else []
        for key in keys:
            yield f"{key} goes with packing_mode=static; set that, or leave it out"
        return
    if data.sequence_length is None:
        yield "packing_mode=static needs data.sequence_length: what a pack of several samples holds at most"
    yield from _below(1, {"data.sequence_length": data.sequence_length})
    for key, is_given in {
        "data.weights": data.weights is not None,
        "data.plan": data.plan is not None,
        "data.pack_sequences": data.pack_sequences,
        "data.file_pattern": data.file_pattern is not None,
        "data.dtype": data.dtype is not None,
        "a list in data.path": not isinstance(data.path, str),
        f"packed_storage={config.packed_storage}": config.packed_storage != default.packed_storage,
    }.items():
        if is_given:
            yield (
                f"packing_mode=static packs one token store or dataset when the run starts, so {key} has no meaning; "
                "leave it out"
            )
    if data.samples is not None and not data.allow_code:
        yield (
            f"data.samples={data.samples} would import and call code of that name; set data.allow_code=true if that "
            "is meant"
        )


def _optimizer_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    for name, choices in {
        "precision": PRECISIONS,
        "decay_style": DECAY_STYLES,
        "fp8": (None, *FP8_MULTIPLES),
    }.items():
        if getattr(optimizer, name) not in choices:
            shown = ", ".join("null" if choice is None else choice for choice in choices)
            yield f"optimizer.{name} is {getattr(optimizer, name)!r}; choose from {shown}"
    if optimizer.precision == "float32" and optimizer.fp8:
        yield f"optimizer.fp8={optimizer.fp8} needs optimizer.precision=bfloat16; change one of them"
    if not 0 < optimizer.wsd_share <= 1:
        yield f"optimizer.wsd_share is {optimizer.wsd_share}; it is a share of all steps, above 0 and at most 1"
    if optimizer.decay_style == "wsd" and optimizer.warmup_share + optimizer.wsd_share > 1:
        yield (
            f"optimizer.warmup_share {optimizer.warmup_share} and optimizer.wsd_share {optimizer.wsd_share} add up to "
            "more than 1; lower one of them"
        )
    if not 0 <= optimizer.warmup_share < 1:
        yield f"optimizer.warmup_share is {optimizer.warmup_share}; it is a share of all steps, from 0 to below 1"
    if not 0 < optimizer.learning_rate < math.inf:
        yield f"optimizer.learning_rate is {optimizer.learning_rate}; it must be above 0"
    if not 0 <= optimizer.min_learning_rate <= optimizer.learning_rate:
        yield (
            f"optimizer.min_learning_rate {optimizer.min_learning_rate} must be between 0 and optimizer.learning_rate "
            f"{optimizer.learning_rate}"
        )
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        yield f"optimizer.betas is {optimizer.betas}; give two numbers from 0 to below 1"
    for name in ("weight_decay", "clip_grad"):
        if not 0 <= getattr(optimizer, name) < math.inf:
            yield f"optimizer.{name} is {getattr(optimizer, name)}; it must be at least 0"


def _peft_problems(peft: PeftConfig, model: ModelConfig) -> Iterator[str]:
    if peft.method == "lora" and model.freeze:
        yield "model.freeze goes with peft=none: adapters train beside weights that are frozen anyway; leave it out"
    if peft.method not in PEFT_METHODS:
        yield f"peft.method is {peft.method!r}; choose from {', '.join(PEFT_METHODS)}"
    yield from _below(1, {"peft.rank": peft.rank})
    if not 0 < peft.alpha < math.inf:
        yield f"peft.alpha is {peft.alpha}; it must be above 0"
    if not 0 <= peft.dropout < 1:
        yield f"peft.dropout is {peft.dropout}; it must be from 0 to below 1"
    unknown = [name for name in peft.target_modules if name not in TARGETS]
    if unknown or not peft.target_modules or len(set(peft.target_modules)) < len(peft.target_modules):
        yield (
            f"peft.target_modules is [{', '.join(peft.target_modules)}]; choose from {', '.join(TARGETS)}: the "
            "fused layers, of which linear_qkv is q_proj, k_proj and v_proj, linear_proj o_proj, linear_fc1 gate_proj "
            "and up_proj, linear_fc2 down_proj"
        )


def _step_problems(train: StepConfig) -> Iterator[str]:
    names = ("global_batch_size", "gradient_accumulation", "log_every")
    yield from _below(1, {f"train.{name}": getattr(train, name) for name in names})
    if train.batch_unit not in BATCH_UNITS:
        yield f"train.batch_unit is {train.batch_unit!r}; choose from {', '.join(BATCH_UNITS)}"
    if train.loss not in LOSSES:
        yield f"train.loss is {train.loss!r}; choose from {', '.join(LOSSES)}"
    if train.recompute not in RECOMPUTES:
        yield f"train.recompute is {train.recompute!r}; choose from {', '.join(RECOMPUTES)}"
    if train.steps is not None and train.steps < 1:
        yield f"train.steps is {train.steps}; it must be at least 1, or null to use train.epochs"
    if not 0 < train.epochs < math.inf:
        yield f"train.epochs is {train.epochs}; it must be above 0"
    if train.gradient_accumulation is not None and train.global_batch_size is not None:
        yield (
            f"train.gradient_accumulation={train.gradient_accumulation} needs train.global_batch_size=null, because "
            "either follows from the other; leave one of them out"
        )


def _validation_problems(validation: ValidationConfig, parallel: ParallelConfig) -> Iterator[str]:
    paths = validation.paths
    listed = list(paths.values()) if isinstance(paths, dict) else paths or []
    if not isinstance(listed, list) or not all(isinstance(path, str) and path for path in listed):
        yield f"validation.paths is {paths!r}; give a list of paths, or names such as {{maths: PATH}}"
    yield from _below(1, {"validation.steps": validation.steps, "validation.patience": validation.patience})
    yield from _below(0, {"validation.every": validation.every, "validation.num_samples": validation.num_samples})
    yield from _below(1, {"validation.sample_tokens": validation.sample_tokens})
    if validation.patience is not None and not validation.every:
        yield "validation.patience needs validation.every: set after how many steps to validate"
    if validation.num_samples and parallel.context > 1:
        yield (
            f"validation.num_samples={validation.num_samples} needs parallel.context=1: an answer grows token by "
            "token and is not split over ranks; leave one of them out"
        )


def _logger_problems(logger: LoggerConfig) -> Iterator[str]:
    for name in logger.names:
        if name not in TRACKERS:
            yield f"logger.names has {name!r}; choose from {', '.join(TRACKERS)}, or [] for none"


def _model_problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    for group, values in {"model": vars(model), "parallel": vars(parallel)}.items():
        yield from _below(1, {f"{group}.{name}": value for name, value in values.items() if type(value) is int})
    if not 0 <= model.dropout < 1:
        yield f"model.dropout is {model.dropout}; it is a share, from 0 to below 1"
    if parallel.sequence_parallel and parallel.tensor == 1:
        yield "parallel.sequence_parallel=true needs parallel.tensor above 1; change one of them"
    if model.path is not None:
        if not model.path:
            yield "model.path is empty; give a Hugging Face folder, or choose a shape such as model=tiny"
        return  # the folder gives the sizes
    for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"):
        if getattr(model, name) is None:
            yield f"model.{name} has no value; add model.{name}=..., or choose a model such as model=tiny"
    num_heads, hidden_size = model.num_attention_heads or 1, model.hidden_size or 0
    num_groups = model.num_query_groups or num_heads
    if hidden_size % (2 * num_heads):
        yield (
            f"model.hidden_size {hidden_size} is not a multiple of 2 x model.num_attention_heads {num_heads}; "
            "every head needs the same, even width for rotary positions"
        )
    if num_heads % num_groups:
        yield (
            f"model.num_attention_heads {num_heads} is not a multiple of model.num_query_groups {num_groups}; change "
            "one of them"
        )
    yield from _parallel_problems(model, parallel)


def check_parallel(shape: ModelShape, parallel: ParallelConfig) -> None:
    """Refuse a division of the ranks that a model does not allow, naming the keys.

    Example:
        >>> shape = ModelShape.of_sizes(
        ...     num_layers=2, hidden_size=96, num_attention_heads=3, ffn_hidden_size=96, vocab_size=256
        ... )
        >>> check_parallel(shape, ParallelConfig(tensor=2))
        Traceback (most recent call last):
        megatron_packed_sft.errors.InvalidInputError: model.num_attention_heads 3 is not a multiple of \
parallel.tensor 2; change one of them
    """
    for problem in _parallel_problems(shape, parallel):
        raise InvalidInputError(problem)


def _parallel_problems(model: ModelConfig | ModelShape, parallel: ParallelConfig) -> Iterator[str]:
    for name, way in (("num_layers", "pipeline"), ("num_attention_heads", "tensor"), ("ffn_hidden_size", "tensor")):
        value, num_ranks = getattr(model, name), getattr(parallel, way)
        if value % num_ranks:
            yield f"model.{name} {value} is not a multiple of parallel.{way} {num_ranks}; change one of them"


def _below(least: int, values: dict[str, int | None]) -> Iterator[str]:
    """Yield a problem for each number that is too small; None means the default."""
    for key, value in values.items():
        if value is not None and value < least:
            yield f"{key} is {value}; it must be at least {least}"
