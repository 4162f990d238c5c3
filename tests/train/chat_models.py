"""A small model of transformers in a folder with its tokenizer, and chats prepared with that tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_packed_sft import open_dataset
from tests.encode.tiny_tokenizers import CONFIG, byte_level_tokenizer, save_folder
from tests.prepare.preparing import chat, prepare, write_records

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


def answer(folder: Path, question: str) -> str:
    """What an exported model says, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**asked, max_new_tokens=24)
    text: str = tokenizer.decode(generated[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def transformers_loss(folder: Path, data: Path, split: str = "validation") -> float:
    """The mean loss of the trained tokens of a split, each sequence on its own, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, num_trained = 0.0, 0
    for shard in open_dataset(data).open_shards(split):
        for ids, mask, starts in shard:
            ends = [*starts[1:], len(ids)]
            for start, end in zip(starts, ends, strict=True):
                with torch.no_grad():
                    logits = model(torch.tensor(ids[start:end].astype("int64"))[None]).logits[0, :-1]
                losses = torch.nn.functional.cross_entropy(
                    logits, torch.tensor(ids[start + 1 : end].astype("int64")), reduction="none"
                )
                counted = torch.tensor(mask[start : end - 1].astype("bool"))
                total += losses[counted].sum().item()
                num_trained += int(counted.sum())
    return total / num_trained
