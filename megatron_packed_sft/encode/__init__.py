"""Records to token ids and an exact train mask: tokenizers, chat templates and masks."""
