"""Build the trained state from the configuration: Megatron-Core's model, data parallelism, optimizer, scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.megatron.backend import Backend
from megatron_packed_sft.megatron.gradients import FinalizeGradients
from megatron_packed_sft.megatron.lora import add_lora
from megatron_packed_sft.megatron.lora_settings import LoraSettings
from megatron_packed_sft.megatron.model import build_gpt_model
from megatron_packed_sft.megatron.weights.folder import HuggingFaceFolder
from megatron_packed_sft.megatron.weights.load import load_pretrained
from megatron_packed_sft.megatron.weights.shape import ModelShape
from megatron_packed_sft.train.config import OptimizerConfig
from megatron_packed_sft.train.config_checks import PRECISIONS
from megatron_packed_sft.train.step_schedule import StepSchedule

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

_DTYPES = dict(zip(PRECISIONS, (None, torch.float32, torch.bfloat16), strict=True))


@dataclass(frozen=True, kw_only=True)
class ModelAndOptimizer:
    """What a run trains and saves.

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
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading)}

    def load(self, checkpoint: Path, scheduler: Mapping[str, Any]) -> None:
        """Load the tensors of a checkpoint and the scheduler's state; a collective call."""
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self.sharded_state(is_loading=True), str(checkpoint))
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.scheduler.load_state_dict(dict(scheduler))


def build_model_and_optimizer(
    shape: ModelShape,
    optimizer: OptimizerConfig,
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
        optimizer: the optimizer's settings.
        schedule: gives the number of bins over which the learning rate decays.
        backend: what the run computes on.
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

    if optimizer.distributed and not backend.uses_transformer_engine:
        raise InvalidInputError(
            "optimizer.distributed=true needs CUDA and Transformer Engine: without them a resumed run silently loses "
            "Adam's step count; set optimizer.distributed=false"
        )
    if optimizer.precision == "bfloat16" and backend.device_type == "cpu":
        raise InvalidInputError(
            "optimizer.precision=bfloat16 needs CUDA: Megatron-Core's optimizer does not support it on a CPU; set "
            "optimizer.precision=auto"
        )
    gpt = build_gpt_model(
        **shape.model_arguments(),
        max_sequence_length=sequence_length,
        dtype=_DTYPES[optimizer.precision],
        backend=backend,
    )
    if weights is not None:  # before the optimizer copies them
        load_pretrained(gpt, weights)
    if lora is not None:
        add_lora(gpt, lora)
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
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_eps=optimizer.eps,
            clip_grad=optimizer.clip_grad,
            bf16=gpt.config.bf16,
            params_dtype=gpt.config.params_dtype,
            use_distributed_optimizer=optimizer.distributed,
        ),
        [wrapped],
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


def _scheduler(
    optimizer: MegatronOptimizer, settings: OptimizerConfig, schedule: StepSchedule
) -> OptimizerParamScheduler:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    # It counts bins, so that a run resumed with another batch size continues where the schedule was.
    num_warmup_steps = int(settings.warmup_share * (schedule.num_bins // schedule.bins_per_step))
    return OptimizerParamScheduler(
        optimizer,
        # Steps at 1/(n+1), 2/(n+1), ... of the rate: at 0, the first step would change nothing.
        init_lr=settings.learning_rate / (num_warmup_steps + 1),
        max_lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        lr_warmup_steps=num_warmup_steps * schedule.bins_per_step,
        lr_decay_steps=schedule.num_bins,
        lr_decay_style=settings.decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=schedule.num_bins,
        wd_incr_style="constant",
        # A resumed run follows its own configuration: a run made longer decays over its new length.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
