"""A family of models: Llamas under another name."""

from __future__ import annotations

from megatron_packed_sft.megatron.weights.families import Family

FAMILY = Family(name="acme_llama", architecture="AcmeForCausalLM")
