"""Building a token cache beside the bare tokenizer: the same documents, the same model, one after the other in one run.

python -m benchmarks.caches --megabytes 16

The bare tokenizer encodes each document and keeps nothing. Ours also ends documents, checks ids, splits, writes shards,
checksums, fsyncs and publishes.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import print_table, timed
from megatron_packed_sft import load_tokenizer, train_sentencepiece
from megatron_packed_sft.caches import SPECIAL_TOKENS, Message, build_pretrain_cache, build_sft_cache
from megatron_packed_sft.records.samples import sample_conversations

ROUNDS = 3


def documents(megabytes: float) -> list[str]:
    """Texts of made-up chats, about a thousand characters each."""
    found: list[str] = []
    size = 0
    for conversation in _conversations():
        found.append("\n\n".join(message["content"] for message in conversation if message["content"]))
        size += len(found[-1])
        if size >= megabytes * 1e6:
            return found
    return found


def _conversations() -> Iterator[list[dict[str, Any]]]:
    seed = 0
    while True:
        for conversation in sample_conversations(2000, seed=seed):
            yield [message for message in conversation.messages if isinstance(message.get("content"), str)]
        seed += 1


def chats(texts: Sequence[str]) -> list[list[Message]]:
    """The same texts, each as a question and an answer."""
    return [
        [{"role": "user", "content": text[: len(text) // 3]}, {"role": "assistant", "content": text[len(text) // 3 :]}]
        for text in texts
    ]


def compare(kind: str, home: Path, bare: Callable[[], Any], build: Callable[[Path], None]) -> list[str]:
    """Time the bare tokenizer and the build in turns; return a line of the table."""

    def built() -> None:
        build(home / "cache")

    bare_seconds, built_seconds = [], []
    for _ in range(ROUNDS):
        shutil.rmtree(home / "cache", ignore_errors=True)
        bare_seconds.append(timed(bare))
        built_seconds.append(timed(built))
    ratio = min(built_seconds) / min(bare_seconds)
    return [kind, f"{min(bare_seconds):.2f} s", f"{min(built_seconds):.2f} s", f"{ratio:.2f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=8.0)
    options = parser.parse_args(arguments)
    home = Path(tempfile.mkdtemp(prefix="caches-"))
    try:
        texts = documents(options.megabytes)
        symbols = tuple(SPECIAL_TOKENS.values())
        path = train_sentencepiece(texts[:1000], home / "spm.model", vocab_size=4096, user_defined_symbols=symbols)
        print_table(
            f"caches: {len(texts):,} documents, {sum(map(len, texts)) / 1e6:.1f} MB",
            ["cache", "bare tokenizer", "cache build", "ratio"],
            list(_lines(home, path, texts)),
        )
    finally:
        shutil.rmtree(home)


def _lines(home: Path, path: Path, texts: list[str]) -> Iterator[list[str]]:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    examples = chats(texts)

    def bare() -> None:
        for text in texts:
            processor.encode(text)

    tokenizer = load_tokenizer(path)

    def pretrain(target: Path) -> None:
        build_pretrain_cache(
            texts,
            target,
            tokenizer=tokenizer,
            max_train_tokens=None,
            max_val_tokens=100_000,
            shard_bytes=128 << 20,
            seed=42,
            shuffle_buffer=10_000,
        )

    def sft(target: Path) -> None:
        build_sft_cache(examples, target, tokenizer=tokenizer, val_frac=0.1, seed=42)

    yield compare("pretrain", home, bare, pretrain)
    yield compare("sft", home, bare, sft)


if __name__ == "__main__":
    main()
