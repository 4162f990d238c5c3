"""The training recipe's loop over real Megatron-Core parts: data, model, steps, checkpoints, metrics."""
