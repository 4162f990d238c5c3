"""A training loop of your own over packed data, with a Hugging Face model: python recipes/hf_style_loop.py DATASET.

Every batch is one long row. Its position ids start again with each sequence, which is how `transformers` keeps the
sequences apart; on a GPU with FlashAttention, the boundaries that are in the batch as well do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from megatron_packed_sft import PackedLoader, create_sft_dataset


def small_model(vocab_size: int) -> PreTrainedModel:
    """A Llama with two layers, of no use but to see that it learns."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocab_size, **shape))


def train(model: PreTrainedModel, loader: Iterable[dict[str, Any]], learning_rate: float) -> Iterator[float]:
    """Train on every batch; yields the loss per trained token of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for batch in loader:
        on_device = {key: value.to(model.device) if torch.is_tensor(value) else value for key, value in batch.items()}
        loss = model(**on_device, use_cache=False).loss  # with a cache, transformers takes the row for one text
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> None:
    """Open the dataset, train, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a dataset directory, a shard, a legacy .npy")
    parser.add_argument("--model", help="a folder or a name of Hugging Face; by default a small Llama without training")
    parser.add_argument("--vocab-size", type=int, default=32_000, help="of the small Llama")
    parser.add_argument("--eos-id", type=int, default=2)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows-per-step", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    given = parser.parse_args()
    options = {"contract": "hf", "max_num_samples": given.steps * given.rows_per_step}
    dataset = create_sft_dataset(given.dataset, given.eos_id, given.seq_length, **options)
    loader = PackedLoader(dataset, micro_batch_size=given.rows_per_step)
    model = AutoModelForCausalLM.from_pretrained(given.model) if given.model else small_model(given.vocab_size)
    for step, loss in enumerate(train(model.train(), loader, given.learning_rate), start=1):
        print(f"step {step:>4}  loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
