"""For users of Hugging Face `datasets` and `transformers`, who tokenize and pack inside `datasets.map`.

    texts ─ block_tokenize_fn (datasets.map) ─▶ blocks with document_starts ─ DataCollatorForCausalLM ─▶ a batch

Packers and collate kernel are shared with the rest of the package; docs/huggingface.md shows both in a Trainer.
"""
