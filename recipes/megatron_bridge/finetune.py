"""Fine-tune on packed data with a recipe of Megatron-Bridge:

torchrun --nproc-per-node 8 recipes/megatron_bridge/finetune.py llama31_8b_sft_config recipes/megatron_bridge/packed.yaml [KEY=VALUE ...]
"""  # noqa: E501

from __future__ import annotations

import sys

from megatron.bridge import recipes
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

from megatron_packed_sft.megatron.bridge import allow_as_target

if __name__ == "__main__":
    recipe, file, *overrides = sys.argv[1:]
    allow_as_target()  # only listed packages may be named in a configuration
    config = process_config_with_overrides(getattr(recipes, recipe)(), file, overrides)
    if type(config.dataset).__name__ != "PackedSFTDatasetProvider":  # Megatron-Bridge only logs what went wrong
        sys.exit(f"the dataset of {file} was not taken; look for 'Failed to instantiate' in the log above")
    finetune(config, forward_step)
