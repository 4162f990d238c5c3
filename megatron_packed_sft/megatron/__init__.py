"""What touches Megatron: attention for packed rows without Transformer Engine, forward step and loss, providers."""
