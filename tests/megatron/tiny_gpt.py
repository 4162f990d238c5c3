"""A GPT of a few thousand weights and rows to feed it, for the tests in this process and for those in two ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_packed_sft.data.batch.collate import collate
from megatron_packed_sft.data.batch.contracts import Batch, CollateOptions
from megatron_packed_sft.data.batch.located_bins import locate_in_samples
from megatron_packed_sft.megatron.backend import choose_backend, start_distributed, stop_distributed
from megatron_packed_sft.megatron.forward_step import forward_step
from megatron_packed_sft.megatron.model import build_gpt_model

VOCAB_SIZE = 256
EOS_ID = 2
# Of ids, so each has one token less: there is an empty sequence, and one of a single token.
LENGTHS = (9, 17, 2, 30, 1, 12)
ALIGNMENT = 8

# What Megatron-Core says at import, and when it builds a model or loads a checkpoint; files of tests carry these marks.
WARNINGS = [
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:(Transformer Engine and )?Apex (is|are) not installed:UserWarning",
    "ignore:The following imports from `dynamic_context.py` will be removed:DeprecationWarning",
    "ignore:The 'megatron.core.transformer.custom_layers.transformer_engine':DeprecationWarning",
    "ignore:MLP requires ffn_hidden_size, but it was not provided:DeprecationWarning",
    "ignore:`load_state_dict` is deprecated and will be removed:FutureWarning",
    "ignore:Please use DTensor instead and we are deprecating ShardedTensor:FutureWarning",
    "ignore:Warning. tp_group is None, using default tp group:DeprecationWarning",
]

Row = dict[str, Any]


def make_row(seed: int, lengths: Sequence[int] = LENGTHS) -> Row:
    """A packed row of random ids; about half of its tokens are trained."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(lengths)
    mask = rng.integers(0, 2, ends[-1])
    mask[ends - 1] = 0
    ids = rng.integers(EOS_ID + 1, VOCAB_SIZE, ends[-1])
    return {"input_ids": ids, "seq_boundaries": [0, *ends.tolist()], "loss_mask": mask}


def make_aligned_row(seed: int) -> Row:
    """The same, with sequences that EOS ids pad to a multiple of `ALIGNMENT` tokens, as for context parallelism."""
    ids, masks = [], []
    for alone in sequences_of(make_row(seed)):
        num_added = -(len(alone["input_ids"]) - 1) % ALIGNMENT
        ids.append(np.pad(alone["input_ids"], (0, num_added), constant_values=EOS_ID))
        masks.append(np.pad(alone["loss_mask"], (0, num_added)))
    ends = np.cumsum([len(one) for one in ids])
    return {
        "input_ids": np.concatenate(ids),
        "seq_boundaries": [0, *ends.tolist()],
        "loss_mask": np.concatenate(masks),
    }


def with_weights(row: Row, seed: int = 0) -> Row:
    """The same, with weights from 0.1 to 3 where the mask is 1."""
    rng = np.random.default_rng(seed)
    weights = rng.choice(np.array([0.1, 0.5, 1, 3], np.float32), len(row["loss_mask"]))
    return {**row, "loss_mask": weights * row["loss_mask"].astype(np.float32)}


def sequences_of(row: Row) -> list[Row]:
    """The sequences of a row, each in a row of its own; one of a single id predicts nothing and is left out."""
    return [
        {
            "input_ids": row["input_ids"][start:end],
            "seq_boundaries": [0, end - start],
            "loss_mask": row["loss_mask"][start:end],
        }
        for start, end in zip(row["seq_boundaries"], row["seq_boundaries"][1:], strict=False)
        if end - start > 1
    ]


def batch_of(row: Row, *, multiple: int = 1, **options: Any) -> Batch:
    """A batch of one row, padded to a multiple."""
    options = {"contract": "mcore", "eos_id": EOS_ID, "max_seq_length": 128, **options}
    return collate([locate_in_samples([row])], 1, CollateOptions(pad_seq_length_to_mult=multiple, **options))


def build(**arguments: Any) -> Any:
    """Two layers with fewer heads for keys than for queries."""
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 96}
    return build_gpt_model(
        **{**shape, "vocab_size": VOCAB_SIZE, "max_sequence_length": 128, "backend": choose_backend(), **arguments}
    )


@contextmanager
def run_of_one(**arguments: Any) -> Iterator[None]:
    """Megatron's groups, for this process alone."""
    start_distributed(choose_backend(), **arguments)
    try:
        yield
    finally:
        stop_distributed()


class Step(NamedTuple):
    """What a training step has shown."""

    loss: float  # of the global batch, before the step; nan where this rank's stage has none
    gradient_norm: float


def train(
    model: Any, steps: Iterable[list[Batch]], *, finalize: Any = None
) -> tuple[list[Step], dict[str, torch.Tensor]]:
    """Train with Megatron's own parts; each step has this rank's micro batches. Also the first step's gradients."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = model.config
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(
        # Clipping is always on at this bound, so it is tested, too.
        OptimizerConfig(optimizer="adam", lr=0.01, weight_decay=0.1, clip_grad=0.5, params_dtype=config.params_dtype),
        [wrapped],
    )
    config.finalize_model_grads_func = finalize or finalize_model_grads
    shown, gradients = [], {}
    for batches in steps:
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[wrapped],
            num_microbatches=len(batches),
            seq_length=batches[0]["tokens"].shape[1],
            micro_batch_size=1,
            forward_only=False,
        )
        if not gradients:
            gradients = {name: weight.main_grad.clone() for name, weight in model.named_parameters()}
        _, norm, _ = optimizer.step()
        total = sum((report["lm loss"] for report in reports), torch.zeros(2))
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        shown.append(Step((total[0] / total[1]).item(), norm))
    return shown, gradients


def save(model: Any, path: Path) -> None:
    """A checkpoint of the weights, whatever the layout of the ranks."""
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(model.sharded_state_dict(), str(path))


def load(model: Any, path: Path) -> None:
    """Put a checkpoint's weights into the model."""
    from megatron.core import dist_checkpointing

    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(path)))
