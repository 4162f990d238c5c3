"""What a checkpoint must at least record of its model and its scheduler."""

from __future__ import annotations

MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 96, "vocab_size": 256}
SCHEDULER = {"num_steps": 4}
