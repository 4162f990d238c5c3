"""What the flags of `packed-sft validate` say about a token stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_packed_sft.storage.token_stream.options import StreamOptions


def stream_options(
    *,
    tokenizer: str | None = None,
    eos_id: int | None = None,
    vocab_size: int | None = None,
    dtype: str | None = None,
    seq_length: int | None = None,
    file_pattern: str | None = None,
) -> StreamOptions | None:
    """Return how a stream is to be read, or None when no flag says anything about one.

    Args:
        tokenizer: a folder or file; gives the EOS id, where nothing else says it, and the vocabulary.
        eos_id, vocab_size, dtype, seq_length, file_pattern: as in `StreamOptions`.
    """
    if all(value is None for value in (tokenizer, eos_id, vocab_size, dtype, seq_length, file_pattern)):
        return None
    from megatron_packed_sft.storage.token_stream.options import DEFAULT_SEQ_LENGTH, StreamOptions

    tokenizer_eos_id = None
    if tokenizer is not None:
        from megatron_packed_sft.encode.tokenizers.load import load_tokenizer

        loaded = load_tokenizer(tokenizer)
        tokenizer_eos_id = loaded.eos_id
        vocab_size = loaded.vocab_size if vocab_size is None else vocab_size
    return StreamOptions(
        seq_length=DEFAULT_SEQ_LENGTH if seq_length is None else seq_length,
        eos_id=eos_id,
        tokenizer_eos_id=tokenizer_eos_id,
        file_pattern=file_pattern,
        dtype=dtype,
        vocab_size=vocab_size,
        spelling="flag",
    )
