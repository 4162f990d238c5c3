"""What a user can say about a token stream: how long its windows are, where documents end, which files and dtype."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.token_stream.metadata import parse_dtype

DEFAULT_SEQ_LENGTH = 2048  # that of `create_sft_dataset`
_ID_LIMIT = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions:
    """How a token stream is read.

    Args:
        seq_length: predictions of a window, which holds one token more.
        pack_sequences: tell the documents of a window apart; needs an EOS id.
        eos_id: the token that ends a document; None takes the one recorded beside the files.
        tokenizer_eos_id: the EOS of the tokenizer in use, for files beside which nothing is recorded.
        file_pattern: which files of the directory; None takes all .npy files, or all .bin files.
        file_names: exactly these files of the directory, instead of a pattern.
        dtype: of .bin files, such as `uint16`; None takes what is recorded beside them, else their sizes decide.
        vocab_size: a window with a larger id is an error; None takes the one recorded beside the files.
        documents: of Megatron's indexed datasets: a bin is a whole document instead of a window.
        overlap: windows share one token, so that every token but a file's first is predicted once. Without it they
            share none, and the first token of each window is predicted by nobody.
        spelling: how the caller's users write these, for messages: as an `argument`, a `key` of the recipe or a `flag`.

    Example:
        >>> StreamOptions(seq_length=4, dtype="uint16-le").window_length
        5
    """

    seq_length: int = DEFAULT_SEQ_LENGTH
    pack_sequences: bool = False
    eos_id: int | None = None
    tokenizer_eos_id: int | None = None
    file_pattern: str | None = None
    file_names: tuple[str, ...] | None = None
    dtype: str | None = None
    vocab_size: int | None = None
    documents: bool = False
    overlap: bool = True
    spelling: Literal["argument", "key", "flag"] = "argument"

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise InvalidInputError(
                f"{self.spelled('seq_length')} is {self.seq_length}; a window predicts at least 1 token"
            )
        if self.eos_id is not None and not 0 <= self.eos_id < _ID_LIMIT:
            raise InvalidInputError(
                f"{self.spelled('eos_id')} is {self.eos_id}; it must be a token id, in 0..{_ID_LIMIT - 1}"
            )
        if self.vocab_size is not None and self.vocab_size < 1:
            raise InvalidInputError(f"{self.spelled('vocab_size')} is {self.vocab_size}; it must be at least 1")
        if self.file_pattern is not None and (not self.file_pattern or os.sep in self.file_pattern):
            raise InvalidInputError(
                f"{self.spelled('file_pattern')} is {self.file_pattern!r}; it names files of the directory, such as "
                "*.npy"
            )
        if self.documents and self.pack_sequences:
            raise InvalidInputError(
                f"{self.spelled('documents')} and {self.spelled('pack_sequences')} cannot be combined: a document is "
                "one sequence; leave one of them out"
            )
        if self.dtype is not None:
            parse_dtype(self.dtype, self.spelled("dtype"))

    def spelled(self, name: str) -> str:
        """Return how the caller's users write one of these options.

        Example:
            >>> StreamOptions(spelling="key").spelled("seq_length"), StreamOptions(spelling="flag").spelled("eos_id")
            ('data.sequence_length', '--eos-id')
        """
        if self.spelling == "key":
            return f"data.{'sequence_length' if name == 'seq_length' else name}"
        return f"--{name.replace('_', '-')}" if self.spelling == "flag" else name

    @property
    def window_length(self) -> int:
        """Tokens of a window."""
        return self.seq_length + 1

    @property
    def stride(self) -> int:
        """Tokens from the start of one window to that of the next."""
        return self.seq_length if self.overlap else self.window_length
