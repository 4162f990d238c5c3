"""`packed-sft sample-data`: synthetic chats for trying things out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_packed_sft.cli._common import add_quiet

_VOCAB_SIZE = 2048


def add_parser(commands: Any) -> None:
    """Add the verb to the command line."""
    parser = commands.add_parser(
        "sample-data",
        help="write synthetic chats in several file formats, for trying things out",
        description="Write synthetic but natural chats: single and multi turn, system prompts, tools, many lengths. "
        "The same seed gives the same bytes.",
        epilog="example:\n  packed-sft sample-data chats --rows 5000 --seed 7 --tokenizer tokenizer.model",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", help="where to write the files; created if missing")
    parser.add_argument(
        "--rows", type=int, default=2000, metavar="N", help="records in all files together (default: 2000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the chats (default: 0)")
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="also train a small SentencePiece model on the chats, for template=chatml"
    )
    add_quiet(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from megatron_packed_sft.records.samples.sample_chats import write_sample_data

    files = write_sample_data(arguments.directory, num_records=arguments.rows, seed=arguments.seed)
    if arguments.tokenizer is not None:
        files.append(_train_tokenizer(arguments.tokenizer, arguments.rows, arguments.seed))
    if not arguments.quiet:
        for file in files:
            print(f"{file}: {file.stat().st_size:,} bytes")
    return 0


def _train_tokenizer(path: str, num_records: int, seed: int) -> Path:
    """Train on chats like those that were written, in about a second."""
    from megatron_packed_sft.encode.tokenizers.train_sentencepiece import train_sentencepiece
    from megatron_packed_sft.records.samples.sample_chats import sample_conversations

    chats = sample_conversations(num_records, seed)
    texts = (message["content"] for chat in chats for message in chat.messages if message.get("content"))
    return train_sentencepiece(texts, path, vocab_size=_VOCAB_SIZE)
