"""Pretrained weights: Hugging Face folders and torch_dist checkpoints in, Hugging Face folders and checkpoints out.

config.json ─▶ families ─▶ layout.ModelShape ─▶ layout.Weight: which rows of which tensor make up which Megatron weight
*.safetensors ─────────── folder ─────────────────────────▶ this rank's slices, into the model
torch_dist checkpoint ─ torch_dist ─────────────────────▶ safetensors_writer ─▶ *.safetensors
"""
