"""Your own training loop over packed data, with a Hugging Face model: python recipes/hf_style_loop.py my_dataset

A batch carries what keeps its packed conversations apart: restarting position ids, boundaries and `use_cache=False`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from megatron_packed_sft import PackedLoader, create_sft_dataset, require_separate_sequences, weighted_loss


def small_model(vocab_size: int) -> PreTrainedModel:
    """Return a Llama with two layers, just large enough to see it learn."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocab_size, **shape))


def train(model: PreTrainedModel, loader: Iterable[dict[str, Any]], learning_rate: float) -> Iterator[float]:
    """Train on every batch and yield each step's loss per trained token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for batch in loader:
        own = {key: value.to(model.device) if torch.is_tensor(value) else value for key, value in batch.items()}
        output = model(**own)
        loss = output.loss if "labels" in own else weighted_loss(output.logits, own)  # data with weights
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> None:
    """Open the dataset, train, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="packed data: a dataset directory, a shard, a legacy .npy, a Parquet file")
    parser.add_argument("--model", help="a folder or name on the Hugging Face Hub; by default a small untrained Llama")
    parser.add_argument("--vocab-size", type=int, help="of the small Llama; by default the one recorded with the data")
    parser.add_argument("--eos-id", type=int, help="padding id; by default the one recorded with the data")
    parser.add_argument("--output", help="a folder to save the trained model in; by default it is not saved")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--bins-per-step", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    given = parser.parse_args()
    length = given.steps * given.bins_per_step
    dataset = create_sft_dataset(given.dataset, given.eos_id, contract="hf", max_num_samples=length)
    vocab_size = given.vocab_size or dataset.source.vocab_size
    if not given.model and vocab_size is None:
        parser.error(f"{given.dataset} does not record its vocabulary size; add --vocab-size or --model")
    model = AutoModelForCausalLM.from_pretrained(given.model) if given.model else small_model(vocab_size)
    require_separate_sequences(model)  # a few architectures do not keep them apart
    loader = PackedLoader(dataset, micro_batch_size=given.bins_per_step)
    for step, loss in enumerate(train(model.train(), loader, given.learning_rate), start=1):
        print(f"step {step:>4}  loss {loss:.4f}", flush=True)
    if given.output:
        model.save_pretrained(given.output)


if __name__ == "__main__":
    main()
