"""Pretrained weights: Hugging Face folders and torch_dist checkpoints in, Hugging Face folders out.

config.json ─▶ families ─▶ ModelShape ─▶ layout: which rows of which tensor make up which Megatron weight
*.safetensors ─ folder ──────────────────▶ load: this rank's slices, into the model
torch_dist checkpoint ─ torch_dist ──────▶ export ─ safetensors_file ─▶ *.safetensors
"""
