"""Train a small SentencePiece model in seconds: for demos, tests and languages that no public tokenizer covers."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from megatron_packed_sft.errors import InvalidInputError

CHATML_SYMBOLS = ("<|im_start|>", "<|im_end|>")


def train_sentencepiece(
    texts: Iterable[str],
    path: str | os.PathLike[str],
    *,
    vocab_size: int = 4096,
    user_defined_symbols: Sequence[str] = CHATML_SYMBOLS,
    seed: int = 0,
) -> Path:
    """Train a BPE model that gives every text back as it was: no normalization, all white space kept, bytes as a last
    resort. The same texts and arguments give the same file, byte by byte.

    Args:
        texts: what to learn from; a few megabytes are plenty.
        path: where the .model file goes.
        vocab_size: ids in total: `<unk>` 0, `<s>` 1, `</s>` 2, `<pad>` 3, the symbols, 256 bytes, and what is learned.
        user_defined_symbols: texts that become one token each, wherever they stand.
        seed: chooses among the texts when there are more than a million of them.

    Example:
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> train_sentencepiece(["a small text"] * 9, f"{home}/tiny.model", vocab_size=300).name
        'tiny.model'
    """
    import sentencepiece

    smallest = 4 + len(user_defined_symbols) + 256
    if vocab_size <= smallest:
        raise InvalidInputError(
            f"vocab_size is {vocab_size}; symbols and bytes alone take {smallest}, so give a larger one"
        )
    # SentencePiece reads lines; a text with line breaks inside is several.
    lines = (line for text in texts for line in text.splitlines() if line.strip())
    first = next(lines, None)
    if first is None:
        raise InvalidInputError("there is no text to train on; give texts that are not blank")
    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(seed)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chain([first], lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # little text has fewer pieces than asked for
            user_defined_symbols=list(user_defined_symbols),
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            input_sentence_size=1_000_000,
            shuffle_input_sentence=True,
            num_threads=1,  # more would make the file depend on their number
            minloglevel=2,
        )
    except RuntimeError as error:
        raise InvalidInputError(
            f"SentencePiece could not train on these texts ({error}); give more text or another vocab_size"
        ) from None
    target = Path(path)
    target.write_bytes(model.getvalue())
    return target
