"""Train a small SentencePiece model in seconds: for demos, tests and languages that no public tokenizer covers."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.support.paths import local_path

CHATML_SYMBOLS = ("<|im_start|>", "<|im_end|>")


def train_sentencepiece(
    texts: Iterable[str],
    path: str | os.PathLike[str],
    *,
    vocab_size: int = 4096,
    user_defined_symbols: Sequence[str] = CHATML_SYMBOLS,
    seed: int = 0,
) -> Path:
    """Train a BPE model that loses nothing: no normalization, all white space kept, bytes for unknown characters.

    The same texts and arguments give the same file, byte for byte.

    Args:
        texts: training texts; a few megabytes are plenty.
        path: the .model file to write.
        vocab_size: number of ids: `<unk>` 0, `<s>` 1, `</s>` 2, `<pad>` 3, the symbols, 256 bytes, and learned pieces.
        user_defined_symbols: texts that are always one token.
        seed: selects lines if there are more than a million.

    Example:
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> train_sentencepiece(["a small text"] * 9, f"{home}/tiny.model", vocab_size=300).name
        'tiny.model'
    """
    import sentencepiece

    local_path(path, "the model's path")  # refuses a URL
    smallest = 4 + len(user_defined_symbols) + 256
    if vocab_size <= smallest:
        raise InvalidInputError(
            f"vocab_size is {vocab_size}; use more than {smallest}, which symbols and bytes alone take"
        )
    # SentencePiece trains on lines.
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
            hard_vocab_limit=False,  # a short text may not have enough pieces
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
            num_threads=1,  # with more, the file would depend on their number
            minloglevel=2,
        )
    except RuntimeError as error:
        raise InvalidInputError(
            f"SentencePiece could not train on these texts ({error}); give more text, or change vocab_size"
        ) from None
    target = Path(path)
    target.write_bytes(model.getvalue())
    return target
