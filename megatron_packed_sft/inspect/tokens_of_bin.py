"""The tokens of a packed bin: text, id, position, and whether each is trained.

input_ids    11 12 13 14 15 | 21 22 23        the loss mask at a position is that of the prediction made there,
loss_mask     0  1  1  1  0 |  1  1  0        so a token is trained if the mask of the position before it is set
trained       .  .  T  T  T |  .  T  T
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.encode.sequences import MarkedText
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.storage.bins import PackedBin

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # decoders write it for a part of a character
_LONGEST_CHARACTER = 16  # tokens; a character has at most four bytes, but some decoders need more context


class Token(NamedTuple):
    """One token of a bin.

    Args:
        text: what it adds to the text; if several tokens spell one character, the first has it.
        id: its id.
        position: its position in the sequence.
        sequence: the number of its sequence in the bin.
        weight: the weight of its loss; 0 if it is not trained.
        is_control: whether it is a control token, such as an end of turn.
    """

    text: str
    id: int
    position: int
    sequence: int
    weight: float
    is_control: bool

    @property
    def is_trained(self) -> bool:
        """Whether the loss includes its prediction."""
        return self.weight > 0


class TokenDecoder:
    """Decodes tokens one by one; without a tokenizer, their text is their id.

    Args:
        tokenizer: the tokenizer that made the data, or None.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self.control_ids: frozenset[int] = frozenset()
        self._before: list[int] = []
        self._length_before = 0
        if tokenizer is not None:
            self.control_ids = frozenset(
                {*tokenizer.control_tokens.values()}
                | {one for one in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) if one is not None}
            )
            # Decoders drop a blank at the start of a text, so each token is decoded after an ordinary letter.
            self._before = tokenizer.encode_many([MarkedText("a")]).input_ids.tolist()[-1:]
            self._length_before = len(tokenizer.decode(self._before))

    def texts(self, ids: npt.NDArray[Any] | Sequence[int]) -> list[str]:
        """Return what each token of a sequence adds to the text.

        If several tokens spell one character, the first has it and the others are empty.

        Example:
            >>> TokenDecoder(None).texts([5, 6])
            ['5 ', '6 ']
        """
        numbers = [int(number) for number in ids]
        texts = [self.text(number) for number in numbers]
        place = 0
        while place < len(texts):
            if _BROKEN not in texts[place]:
                place += 1
                continue
            end, joined = self._whole_characters(numbers, place)
            texts[place:end] = [joined, *[""] * (end - place - 1)]
            place = end
        return texts

    def text(self, number: int) -> str:
        """Return the text of one token in the middle of a text."""
        known = self._texts.get(number)
        if known is None:
            known = self._texts[number] = self._decoded([number])
        return known

    def tokens(self, ids: npt.NDArray[Any], weights: npt.NDArray[Any], sequence: int = 0) -> list[Token]:
        """Return the tokens of a sequence, given their ids and the weights of their losses."""
        numbers: list[int] = ids.tolist()
        return [
            Token(text, one, position, sequence, weight, one in self.control_ids)
            for position, (one, text, weight) in enumerate(
                zip(numbers, self.texts(numbers), weights.tolist(), strict=True)
            )
        ]

    def _decoded(self, numbers: list[int]) -> str:
        if self.tokenizer is None:
            return "".join(f"{number} " for number in numbers)
        if any(not 0 <= number < self.tokenizer.vocab_size for number in numbers):
            return "".join(f"[{number}]" for number in numbers)  # of a padded vocabulary or another tokenizer
        return self.tokenizer.decode([*self._before, *numbers])[self._length_before :]

    def _whole_characters(self, numbers: list[int], start: int) -> tuple[int, str]:
        """Return the characters that begin at a token, and the end of their tokens."""
        for end in range(start + 2, min(start + _LONGEST_CHARACTER, len(numbers)) + 1):
            text = self._decoded(numbers[start:end])
            if _BROKEN not in text:
                return end, text
        return start + 1, self.text(numbers[start])


def trained_weights(packed: PackedBin) -> npt.NDArray[np.float32]:
    """Return the weight of each token's loss at the token's own position; 0 if it is not trained.

    Example:
        >>> bin = PackedBin(np.array([7, 8, 9, 5, 6]), np.array([0, 1, 0, 1, 0]), np.array([0, 3]))
        >>> trained_weights(bin).tolist()
        [0.0, 0.0, 1.0, 0.0, 1.0]
    """
    weights = np.zeros(len(packed.input_ids), np.float32)
    weights[1:] = packed.loss_mask[:-1]
    weights[packed.seq_start_id] = 0  # the first token of a sequence has no prediction
    return weights


def sequence_ends(packed: PackedBin) -> npt.NDArray[np.int64]:
    """Return where each sequence of a bin ends."""
    return np.append(packed.seq_start_id[1:].astype(np.int64), len(packed.input_ids))


def tokens_of_bin(packed: PackedBin, decoder: TokenDecoder) -> Iterator[list[Token]]:
    """Yield the tokens of each sequence of a bin.

    Example:
        >>> bin = PackedBin(np.array([7, 8, 9, 5, 6]), np.array([0, 1, 0, 1, 0]), np.array([0, 3]))
        >>> for tokens in tokens_of_bin(bin, TokenDecoder(None)):
        ...     print([(token.id, token.position, token.is_trained) for token in tokens])
        [(7, 0, False), (8, 1, False), (9, 2, True)]
        [(5, 0, False), (6, 1, True)]
    """
    weights = trained_weights(packed)
    for number, (start, end) in enumerate(
        zip(packed.seq_start_id.tolist(), sequence_ends(packed).tolist(), strict=True)
    ):
        yield decoder.tokens(packed.input_ids[start:end], weights[start:end], number)


_ESCAPED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


def escape_invisible(text: str) -> str:
    r"""Return text with escapes for characters that are invisible or change the direction of the text.

    Example:
        >>> escape_invisible("a\u202eb\tc\n")
        'a\\u202eb\tc\n'
    """
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
