"""Megatron-Core's parts of a run, made from the configuration: model, data parallelism, optimizer, scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.megatron.backend import Backend
from megatron_packed_sft.megatron.model import build_gpt_model
from megatron_packed_sft.train.config import ModelConfig, OptimizerConfig
from megatron_packed_sft.train.config_checks import PRECISIONS
from megatron_packed_sft.train.step_schedule import StepSchedule

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

_DTYPES = dict(zip(PRECISIONS, (None, torch.float32, torch.bfloat16), strict=True))


@dataclass(frozen=True, kw_only=True)
class TrainingParts:
    """What is trained and how.

    Args:
        model: the GPT model inside Megatron-Core's DistributedDataParallel.
        optimizer: Megatron-Core's.
        scheduler: of learning rate and weight decay; it counts samples.
    """

    model: Any  # Megatron-Core has no types
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    def sharded_state(self, *, is_loading: bool = False) -> dict[str, Any]:
        """Which piece of the checkpoint each tensor of this rank is."""
        model = self.model.module.sharded_state_dict()
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading)}

    def load(self, checkpoint: Path, scheduler: Mapping[str, Any]) -> None:
        """Take over the tensors of a checkpoint and the scheduler's state; a collective call."""
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self.sharded_state(is_loading=True), str(checkpoint))
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.scheduler.load_state_dict(dict(scheduler))


def build_parts(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    plan: StepSchedule,
    *,
    backend: Backend,
    vocab_size: int,
    sequence_length: int,
) -> TrainingParts:
    """Build model, optimizer and scheduler; `start_distributed` comes first.

    Args:
        model: the model's shape.
        optimizer: the optimizer's settings.
        plan: says over how many rows the learning rate decays.
        backend: what we run on.
        vocab_size: of the data.
        sequence_length: positions of a row.

    Example:
        >>> build_parts(config.model, config.optimizer, plan, backend=backend,  # doctest: +SKIP
        ...             vocab_size=32000, sequence_length=4096)
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer

    if optimizer.distributed and not backend.uses_transformer_engine:
        raise InvalidInputError(
            "optimizer.distributed=true needs CUDA and Transformer Engine: without it a resumed run silently loses "
            "Adam's step count; leave it false here"
        )
    if optimizer.precision == "bfloat16" and backend.device_type == "cpu":
        raise InvalidInputError(
            "optimizer.precision=bfloat16 needs CUDA: Megatron-Core's optimizer does not take it on a CPU; leave it at "
            "auto"
        )
    gpt = build_gpt_model(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        ffn_hidden_size=model.ffn_hidden_size,
        vocab_size=vocab_size,
        max_sequence_length=sequence_length,
        tie_embeddings=model.tie_embeddings,
        rotary_base=model.rotary_base,
        dtype=_DTYPES[optimizer.precision],
        backend=backend,
    )
    wrapped = DistributedDataParallel(
        config=gpt.config,
        # In float32 whatever the weights are: many small micro batches are added up in there.
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
    gpt.config.finalize_model_grads_func = finalize_model_grads
    gpt.config.no_sync_func = wrapped.no_sync
    gpt.config.grad_scale_func = megatron_optimizer.scale_loss
    return TrainingParts(
        model=wrapped,
        optimizer=megatron_optimizer,
        scheduler=_scheduler(megatron_optimizer, optimizer, plan),
    )


def _scheduler(optimizer: MegatronOptimizer, settings: OptimizerConfig, plan: StepSchedule) -> OptimizerParamScheduler:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    # It counts samples, so that a resumed run with steps of another size goes on where the schedule was.
    num_warmup_steps = int(settings.warmup_share * (plan.num_bins // plan.bins_per_step))
    return OptimizerParamScheduler(
        optimizer,
        # Steps at 1/(n+1), 2/(n+1), ... of the rate: from 0 on, the first step would change nothing.
        init_lr=settings.learning_rate / (num_warmup_steps + 1),
        max_lr=settings.learning_rate,
        min_lr=settings.min_learning_rate,
        lr_warmup_steps=num_warmup_steps * plan.bins_per_step,
        lr_decay_steps=plan.num_bins,
        lr_decay_style=settings.decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=plan.num_bins,
        wd_incr_style="constant",
        # A resumed run follows its own configuration: a longer run decays over its whole length.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
