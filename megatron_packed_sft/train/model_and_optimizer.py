"""Build the trained state from the configuration: Megatron-Core's model, data parallelism, optimizer, scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from megatron_packed_sft.errors import InvalidInputError, ShardFileError
from megatron_packed_sft.megatron.backend import Backend
from megatron_packed_sft.megatron.lora import add_lora
from megatron_packed_sft.megatron.model import build_gpt_model
from megatron_packed_sft.megatron.parameters import (
    FinalizeGradients,
    freeze,
    keep_gradients_when_recomputing,
    without_weight_decay,
)
from megatron_packed_sft.megatron.weights.folder import HuggingFaceFolder, load_pretrained
from megatron_packed_sft.megatron.weights.layout import LoraSettings, ModelShape
from megatron_packed_sft.megatron.weights.torch_dist import load_checkpoint, plain_data_only
from megatron_packed_sft.train.config import OptimizerConfig, TrainConfig
from megatron_packed_sft.train.config_checks import PRECISIONS
from megatron_packed_sft.train.step_schedule import StepSchedule

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

_STEP_COUNT: Final = "common_step"  # Adam's, which all parameters share
_DTYPES = dict(zip(PRECISIONS, (None, torch.float32, torch.bfloat16), strict=True))


@dataclass(frozen=True, kw_only=True)
class ModelAndOptimizer:
    """The model, optimizer and scheduler of a run.

    Args:
        model: the GPT model inside Megatron-Core's DistributedDataParallel.
        optimizer: Megatron-Core's.
        scheduler: of learning rate and weight decay; it counts bins.
        shape: the model's.
    """

    model: Any  # Megatron-Core has no types
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    shape: ModelShape

    def sharded_state(self, *, is_loading: bool = False) -> dict[str, Any]:
        """Return the tensors of this rank, each with its place in the checkpoint."""
        model = self.model.module.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading)
        _share_step_count(optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, checkpoint: Path, scheduler: Mapping[str, Any]) -> None:
        """Load the tensors of a checkpoint and the scheduler's state; a collective call."""
        loaded = load_checkpoint(self.sharded_state(is_loading=True), checkpoint)
        try:
            with plain_data_only():  # Transformer Engine unpickles the state of FP8
                self.model.module.load_state_dict(loaded["model"])
            self.optimizer.load_state_dict(loaded["optimizer"])
            self.scheduler.load_state_dict(dict(scheduler))
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ShardFileError(
                f"{checkpoint} does not fit this run ({type(error).__name__}: {reason}); restore the checkpoint"
            ) from error


def _inner(optimizer: Any) -> dict[str, Any]:
    """Return what torch's optimizer has of the state of Megatron's, which may be around it."""
    return optimizer.get("optimizer", optimizer)  # type: ignore[no-any-return]


def _share_step_count(optimizer: Mapping[str, Any]) -> None:
    """Give Adam's step count to ranks that have none; a collective call.

    A checkpoint takes it from the first rank, whose whole part of the model may be frozen.
    """
    state = _inner(optimizer).get("state", {})
    counts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(counts, state.get(_STEP_COUNT))
    known = [count for count in counts if count is not None]
    if known and isinstance(state, dict):
        state.setdefault(_STEP_COUNT, known[0])


def build_model_and_optimizer(
    shape: ModelShape,
    config: TrainConfig,
    schedule: StepSchedule,
    *,
    backend: Backend,
    sequence_length: int,
    weights: HuggingFaceFolder | None = None,
    lora: LoraSettings | None = None,
) -> ModelAndOptimizer:
    """Build model, optimizer and scheduler; call `start_distributed` first.

    Args:
        shape: the model's shape.
        config: of the run.
        schedule: gives the number of bins over which the learning rate decays.
        backend: from `choose_backend`.
        sequence_length: largest number of positions in a batch.
        weights: pretrained ones to start from; by default they are random.
        lora: adapters to train instead of the weights.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer

    model, optimizer = config.model, config.optimizer
    refuse_without_gpu(config, backend)
    gpt = build_gpt_model(
        **shape.model_arguments(),
        max_sequence_length=sequence_length,
        dtype=_DTYPES[optimizer.precision],
        backend=backend,
        **transformer_fields(config),
    )
    if weights is not None:  # before the optimizer copies them
        load_pretrained(gpt, weights)
    if lora is not None:
        add_lora(gpt, lora)
        keep_gradients_when_recomputing(gpt)
    if model.freeze:
        freeze(gpt, model.freeze)
    wrapped = DistributedDataParallel(
        config=gpt.config,
        # In float32 whatever the weights are: the gradients of many micro batches are summed here.
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=optimizer.distributed
        ),
        module=gpt,
    )
    wrapped.broadcast_params()
    megatron_optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=optimizer.learning_rate,
            min_lr=optimizer.min_learning_rate,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            clip_grad=optimizer.clip_grad,
            bf16=gpt.config.bf16,
            params_dtype=gpt.config.params_dtype,
            use_distributed_optimizer=optimizer.distributed,
        ),
        [wrapped],
        config_overrides=without_weight_decay(gpt, optimizer.no_weight_decay),
    )
    gpt.config.finalize_model_grads_func = FinalizeGradients()
    gpt.config.no_sync_func = wrapped.no_sync
    gpt.config.grad_scale_func = megatron_optimizer.scale_loss
    return ModelAndOptimizer(
        model=wrapped,
        optimizer=megatron_optimizer,
        scheduler=_scheduler(megatron_optimizer, optimizer, schedule),
        shape=shape,
    )


def transformer_fields(config: TrainConfig) -> dict[str, Any]:
    """Return the fields of Megatron-Core's `TransformerConfig` that the run's options set.

    Example:
        >>> config = TrainConfig()
        >>> config.train.recompute = "selective"
        >>> transformer_fields(config)["recompute_granularity"]
        'selective'
    """
    fields: dict[str, Any] = {
        "hidden_dropout": config.model.dropout,
        "attention_dropout": config.model.dropout,
        "sequence_parallel": config.parallel.sequence_parallel,
    }
    if config.model.freeze:  # else a checkpoint has one tensor for all layers, and a frozen one has no optimizer state
        fields["hetereogenous_dist_checkpoint"] = True  # spelled like this there
    if config.train.recompute != "none":
        fields["recompute_granularity"] = config.train.recompute
    if config.train.recompute == "full":  # each layer on its own: the least memory
        fields |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if config.optimizer.fp8 is not None:
        # As Megatron-Bridge's recipes: gradients in e5m2 with one scale per tensor, all in e4m3 with scales per block.
        per_tensor = config.optimizer.fp8 in ("delayed", "tensorwise")
        fields |= {"fp8": "hybrid" if per_tensor else "e4m3", "fp8_recipe": config.optimizer.fp8}
    return fields


def refuse_without_gpu(config: TrainConfig, backend: Backend) -> None:
    """Refuse settings that need CUDA or Transformer Engine on a machine without them, naming the key."""
    optimizer, parallel = config.optimizer, config.parallel
    needs_engine = {
        f"optimizer.fp8={optimizer.fp8}": optimizer.fp8 is not None,
        f"parallel.context={parallel.context}": parallel.context > 1,
        "parallel.sequence_parallel=true": parallel.sequence_parallel,
    }
    for key, is_wanted in needs_engine.items():
        if is_wanted and not backend.uses_transformer_engine:
            raise InvalidInputError(f"{key} needs CUDA and Transformer Engine, which this machine lacks; leave it out")
    if optimizer.distributed and not backend.uses_transformer_engine:
        raise InvalidInputError(
            "optimizer.distributed=true needs CUDA and Transformer Engine: without them a resumed run silently loses "
            "Adam's step count; set optimizer.distributed=false"
        )
    if optimizer.precision == "bfloat16" and backend.device_type == "cpu":
        raise InvalidInputError(
            "optimizer.precision=bfloat16 needs CUDA: Megatron-Core's optimizer does not support it on a CPU; leave "
            "optimizer.precision out"
        )


def _scheduler(
    optimizer: MegatronOptimizer, settings: OptimizerConfig, schedule: StepSchedule
) -> OptimizerParamScheduler:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    # It counts bins, so that a run resumed with another batch size continues where the schedule was.
    num_steps = schedule.num_bins // schedule.bins_per_step
    num_warmup_steps = int(settings.warmup_share * num_steps)
    return OptimizerParamScheduler(
        optimizer,
        # Steps at 1/(n+1), 2/(n+1), ... of the rate: at 0, the first step would change nothing.
        init_lr=settings.learning_rate / (num_warmup_steps + 1),
        max_lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        lr_warmup_steps=num_warmup_steps * schedule.bins_per_step,
        lr_decay_steps=schedule.num_bins,
        lr_decay_style="WSD" if settings.decay_style == "wsd" else settings.decay_style,
        wsd_decay_steps=max(round(settings.wsd_share * schedule.num_bins), 1),
        lr_wsd_decay_style="minus_sqrt",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=schedule.num_bins,
        wd_incr_style="constant",
        # A resumed run follows its own configuration: one with more steps decays over its new length.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
