"""For users of Hugging Face `datasets` and `transformers`, who tokenize and pack inside `datasets.map`.

    texts ─ block_tokenize_fn (datasets.map) ─▶ blocks with document_starts ─ DataCollatorForCausalLM ─▶ a batch

The packers and the collate kernel are those of everything else here; docs/huggingface.md shows both in a Trainer.
"""
