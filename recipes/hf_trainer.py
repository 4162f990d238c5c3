"""transformers' own Trainer over packed data: python recipes/hf_trainer.py my_dataset --model MODEL --output my_model

Three lines make it work: a dataset with the contract `hf`, its `collate_fn` as data collator, and
`remove_unused_columns=False`, because a bin has columns that no model's signature names. Gradients are averaged over
the trained tokens of a whole step, gradient accumulation included.
"""

from __future__ import annotations

import argparse

from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Trainer, TrainingArguments

from megatron_packed_sft import create_sft_dataset, require_separate_sequences

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_trainer(model: PreTrainedModel, path: str, arguments: TrainingArguments, eos_id: int | None = None) -> Trainer:
    """Return a Trainer on a dataset's training split, which validates on its validation split if there is one."""
    require_separate_sequences(model)  # a few architectures do not keep packed conversations apart
    train = create_sft_dataset(path, eos_id, contract="hf")
    validation = None
    if arguments.eval_strategy != "no":
        validation = create_sft_dataset(path, eos_id, contract="hf", split="validation")
    return Trainer(
        model=model, args=arguments, train_dataset=train, eval_dataset=validation, data_collator=train.collate_fn
    )


def main() -> None:
    """Open the dataset, train, and save the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="packed data: a dataset directory, a shard, a legacy .npy, a Parquet file")
    parser.add_argument("--model", help="a folder or name on the Hugging Face Hub; by default a small untrained Llama")
    parser.add_argument("--output", default="hf_model", help="where the model is saved (default: hf_model)")
    parser.add_argument("--eos-id", type=int, help="padding id; by default the one recorded with the data")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--bins-per-pass", type=int, default=1, help="bins in one forward pass")
    parser.add_argument("--gradient-accumulation", type=int, default=1, help="forward passes in one step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--validate", action="store_true", help="also on the validation split, at the end")
    given = parser.parse_args()
    if given.model:
        model = AutoModelForCausalLM.from_pretrained(given.model)
    else:
        vocab_size = create_sft_dataset(given.dataset, given.eos_id, contract="hf").source.vocab_size
        if vocab_size is None:
            parser.error(f"{given.dataset} does not record its vocabulary size; add --model")
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocab_size, **SMALL))
    arguments = TrainingArguments(
        output_dir=given.output,
        max_steps=given.steps,
        per_device_train_batch_size=given.bins_per_pass,
        per_device_eval_batch_size=given.bins_per_pass,
        gradient_accumulation_steps=given.gradient_accumulation,
        learning_rate=given.learning_rate,
        remove_unused_columns=False,
        prediction_loss_only=True,
        eval_strategy="steps" if given.validate else "no",
        eval_steps=given.steps if given.validate else None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = make_trainer(model, given.dataset, arguments, given.eos_id)
    trainer.train()
    trainer.save_model(given.output)


if __name__ == "__main__":
    main()
