"""`packed-sft sample-data`: write synthetic chats for trying things out."""

from __future__ import annotations

from pathlib import Path

import click

from megatron_packed_sft.cli._verb import argument, quiet_option, verb

_VOCAB_SIZE = 2048


@verb(
    examples="""
        packed-sft sample-data chats
        packed-sft sample-data chats --rows 5000 --seed 7 --tokenizer tokenizer.model
    """
)
@argument("directory", help="the folder for the files, created if it is missing")
@click.option("--rows", type=int, default=2000, metavar="N", show_default=True, help="records in all files together")
@click.option("--seed", type=int, default=0, metavar="N", show_default=True, help="seed of the chats")
@click.option(
    "--tokenizer",
    type=click.Path(),
    metavar="FILE",
    help="also train a small SentencePiece model on these chats, for use with template=chatml",
)
@quiet_option
def command(directory: str, rows: int, seed: int, tokenizer: str | None, quiet: bool, as_json: bool) -> int:
    """Write synthetic chats: single-turn and multi-turn, with system prompts and tools, short and long. The same seed
    gives the same bytes.
    """
    from megatron_packed_sft.records.samples import write_sample_data
    from megatron_packed_sft.support.terminal import show_json

    files = write_sample_data(directory, num_records=rows, seed=seed)
    if tokenizer is not None:
        files.append(_train_tokenizer(tokenizer, rows, seed))
    if as_json:
        show_json({"files": [{"path": str(file), "num_bytes": file.stat().st_size} for file in files]})
    elif not quiet:
        for file in files:
            print(f"{file}: {file.stat().st_size:,} bytes")
    return 0


def _train_tokenizer(path: str, num_records: int, seed: int) -> Path:
    """Train on the same kind of chats, in about a second."""
    from megatron_packed_sft.encode.tokenizers.sentencepiece import train_sentencepiece
    from megatron_packed_sft.records.samples import sample_conversations

    chats = sample_conversations(num_records, seed)
    texts = (message["content"] for chat in chats for message in chat.messages if message.get("content"))
    return train_sentencepiece(texts, path, vocab_size=_VOCAB_SIZE)
