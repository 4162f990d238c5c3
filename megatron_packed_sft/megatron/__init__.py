"""Everything that touches Megatron: model, attention without Transformer Engine, forward step, dataset providers."""
