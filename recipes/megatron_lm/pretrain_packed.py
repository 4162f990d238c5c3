"""Packed data in Megatron-LM: copy this file beside its pretrain_gpt.py and start it instead, with the same arguments.

torchrun --nproc-per-node 8 pretrain_packed.py --sft --data-path my_dataset --micro-batch-size 1 --seq-length 4096 ...

For Megatron-Core 0.16 to 0.19. `--sft` finds our class under the name of Megatron-LM's own.
"""

from __future__ import annotations

import runpy
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.training.datasets import sft_dataset

from megatron_packed_sft.megatron.megatron_lm import PackedSFTMegatronDataset

sft_dataset.SFTDataset = PackedSFTMegatronDataset
stock = PackedSeqParams.__init__


def with_flat_boundaries(self: PackedSeqParams, *values: Any, **named: Any) -> None:
    """Drop the batch dimension: data loaders pass boundaries as [1, K], and attention needs [K]."""
    for name, value in named.items():
        if name.startswith("cu_seqlens") and value is not None:
            named[name] = value.reshape(-1)
    stock(self, *values, **named)


# 0.16 and 0.17 make them of a batch in another function than 0.18 and later.
PackedSeqParams.__init__ = with_flat_boundaries  # type: ignore[method-assign]

if __name__ == "__main__":
    runpy.run_path("pretrain_gpt.py", run_name="__main__")
