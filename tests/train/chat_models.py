"""A small model of transformers in a folder with its tokenizer, and chats prepared with that tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recipes.demo_pretrained import answer, transformers_loss
from tests.encode.tiny_tokenizers import CONFIG, byte_level_tokenizer, save_folder
from tests.prepare.preparing import chat, prepare, write_records

__all__ = ["NAME", "NUM_CHATS", "answer", "prepare_chats", "save_chat_model", "transformers_loss"]

NUM_CHATS = 120
NAME = "Quixelby"  # of an assistant that no model has heard of


def save_chat_model(folder: Path, name: str = "qwen2", **changes: Any) -> Path:
    """A model with random weights in bfloat16, its tokenizer and its chat template."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    template = CONFIG["chat_template"] + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    save_folder(byte_level_tokenizer(vocab_size=300), folder, {**CONFIG, "chat_template": template})
    torch.manual_seed(11)
    sizes = {
        "vocab_size": 331,  # more than the tokenizer has, as is usual
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": name == "qwen2",
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**sizes, **changes}))
    model.generation_config = GenerationConfig(eos_token_id=[302, 300], do_sample=False)
    model.bfloat16().save_pretrained(folder)
    return folder


def prepare_chats(home: Path, tokenizer: Path) -> Path:
    """A dataset directory with a training and a validation split."""
    rows = [chat(f"Who are you? ({number})", f"I am {NAME}, number {number % 7}.") for number in range(NUM_CHATS)]
    records = write_records(home / "chats.jsonl", rows)
    done = prepare(
        f"input={records}",
        f"output={home / 'data'}",
        f"tokenizer.path={tokenizer}",
        "packing.pack_size=256",
        "split.validation_fraction=0.3",
    )
    assert done.code == 0, done.err
    return home / "data"
