"""What passes between templates and tokenizers: marked texts in, sequences out."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

from megatron_packed_sft.encode.sequences import Sequences


class Segment(NamedTuple):
    """Trained characters of one weight and kind.

    Args:
        start, end: a half-open range of characters.
        weight: how much the loss of its tokens counts, above 0.
        kind: what it is, one of `encode.masks.turn_kinds.KINDS`; counted by audits.
    """

    start: int
    end: int
    weight: float = 1.0
    kind: int = 0


class MarkedText(NamedTuple):
    """A rendered text and which of its characters are trained.

    Args:
        text: what is tokenized, as it is; no token is added at either end.
        trained: half-open character ranges, ascending, not touching or overlapping.
        literal: half-open character ranges, ascending, in which no control token may begin or end: text of a message
            that only looks like one, and is ordinary text for the tokenizer.
        segments: the trained ranges cut at every change of weight or kind, ascending; none if all have weight 1 and
            nobody asked for kinds.
    """

    text: str
    trained: Sequence[tuple[int, int]] = ()
    literal: Sequence[tuple[int, int]] = ()
    segments: Sequence[Segment] = ()

    def composed(self) -> MarkedText | None:
        r"""Return it with its characters composed (NFC), or None if some would be composed across an edge of a range.

        Example:
            >>> MarkedText("e\u0301 e\u0301", [(2, 5)]).composed()
            MarkedText(text='é é', trained=[(1, 3)], literal=[], segments=[])
        """
        ranges = [*self.trained, *self.literal, *(segment[:2] for segment in self.segments)]
        edges = sorted({0, len(self.text), *(edge for both in ranges for edge in both)})
        parts = [unicodedata.normalize("NFC", self.text[start:end]) for start, end in pairwise(edges)]
        text = "".join(parts)
        if text != unicodedata.normalize("NFC", self.text):
            return None
        at = dict(zip(edges, accumulate(map(len, parts), initial=0), strict=True))
        return MarkedText(
            text,
            [(at[start], at[end]) for start, end in self.trained],
            [(at[start], at[end]) for start, end in self.literal],
            [segment._replace(start=at[segment.start], end=at[segment.end]) for segment in self.segments],
        )


class Tokenizer(Protocol):
    """What the package needs of a tokenizer. It is pickled by its path and cheap to load again."""

    @property
    def path(self) -> str:
        """The file or folder it was loaded from."""

    @property
    def name(self) -> str:
        """A short name for manifests, from the folder or file."""

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides ids; equal files have equal fingerprints, wherever they are."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-sequence id, if any."""

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence id, if any."""

    @property
    def pad_id(self) -> int | None:
        """The padding id, if any."""

    @property
    def chat_template(self) -> str | None:
        """Its own Jinja template, if any."""

    @property
    def tool_template(self) -> str | None:
        """Another Jinja template for chats with tools, if it has one."""

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """Variables for its template: bos_token, eos_token and the other special tokens, as text."""

    @property
    def stop_tokens(self) -> Sequence[str]:
        """The texts at which generation stops: the end of sequence and those of generation_config.json."""

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Text -> id of every token that is recognised as a whole (added tokens, user-defined symbols)."""

    def encode_many(self, texts: Sequence[MarkedText]) -> Sequences:
        """Tokenize many texts and map their trained characters to tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, control tokens included."""
