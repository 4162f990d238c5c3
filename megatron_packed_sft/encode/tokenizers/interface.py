"""What templates hand to tokenizers, and tokenizers hand on: a small contract between the two halves of `encode`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from megatron_packed_sft.encode.sequences import Sequences


class MarkedText(NamedTuple):
    """A rendered text that knows which of its characters are to be trained.

    Args:
        text: what is tokenized, as it is: no token is added in front or behind.
        trained: half-open character ranges, ascending, not touching or overlapping.
        literal: half-open character ranges, ascending, in which no control token may begin or end: the text that came
            from a message and merely looks like one. Ordinary text for the tokenizer.
    """

    text: str
    trained: Sequence[tuple[int, int]] = ()
    literal: Sequence[tuple[int, int]] = ()


class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer. Picklable by its path, cheap to load again."""

    @property
    def path(self) -> str:
        """The file or folder it was loaded from."""

    @property
    def name(self) -> str:
        """A short name for manifests, from the folder or file."""

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides ids; equal files give equal fingerprints wherever they lie."""

    @property
    def vocab_size(self) -> int:
        """All ids are below it, those of added tokens too."""

    @property
    def bos_id(self) -> int | None:
        """Beginning of sequence, if it has one."""

    @property
    def eos_id(self) -> int | None:
        """End of sequence, if it has one."""

    @property
    def pad_id(self) -> int | None:
        """Padding, if it has one."""

    @property
    def chat_template(self) -> str | None:
        """Its own Jinja template, if it has one."""

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """What its template may name: bos_token, eos_token and the other special tokens, as text."""

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Text -> id of every token that is recognised in text as a whole (added tokens, user-defined symbols)."""

    def encode_many(self, texts: Sequence[MarkedText]) -> Sequences:
        """Tokenize many texts and map their trained characters to tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, control tokens included."""
