"""Models of transformers with random weights, one or two per family, and our models with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_packed_sft.megatron.backend import choose_backend
from megatron_packed_sft.megatron.model import build_gpt_model
from megatron_packed_sft.megatron.weights.folder import HuggingFaceFolder, load_pretrained

VOCAB_SIZE = 250  # not a multiple of anything, so that the vocabulary is padded
NUM_POSITIONS = 60
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
THETA = {"rope_type": "default", "rope_theta": 1e6}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rms_norm_eps": 1e-5}),
    "llama31": ("llama", {"rope_parameters": LLAMA3_SCALING, "head_dim": 32, "max_position_embeddings": 131072}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": THETA}),
    "qwen3": ("qwen3", {"head_dim": 16, "rope_parameters": THETA, "tie_word_embeddings": True}),
}


def make_model(case: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A model of transformers whose weights are all random, those of norms and biases, too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, settings = CASES[case]
    torch.manual_seed(7)
    config = AutoConfig.for_model(name, **{**SIZES, **settings, **changes})
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def save_model(case: str, folder: Path, *, max_shard_size: str = "5GB", **arguments: Any) -> Any:
    """Save such a model; return it."""
    model = make_model(case, **arguments)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def build_from(folder: Path, **arguments: Any) -> Any:
    """Our model with the weights of a folder."""
    opened = HuggingFaceFolder.open(folder)
    arguments = {"dtype": torch.float64, "max_sequence_length": 128, **opened.shape.model_arguments(), **arguments}
    model = build_gpt_model(backend=choose_backend(), **arguments)
    load_pretrained(model, opened)
    return model.eval()


def tokens() -> torch.Tensor:
    """Two sequences of random ids."""
    return torch.randint(0, VOCAB_SIZE, (2, NUM_POSITIONS), generator=torch.Generator().manual_seed(3))
