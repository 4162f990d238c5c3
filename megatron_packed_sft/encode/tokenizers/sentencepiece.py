"""SentencePiece models: text between control tokens goes through the model; control tokens are looked up.

Many models have a dummy prefix, a space in front of the text. It goes to the start of a text and nowhere else: what
follows a control token is encoded as it is, as Hugging Face does for Llama (`legacy=False`). A model that trims white
space (T5's) trims the text between any two control tokens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_packed_sft.encode.sequences import Sequences
from megatron_packed_sft.encode.tokenizers import _sentencepiece_proto as proto
from megatron_packed_sft.encode.tokenizers._remote import local_tokenizer
from megatron_packed_sft.encode.tokenizers._token_positions import trained_ranges, utf8_lengths, with_train_mask
from megatron_packed_sft.encode.tokenizers.control_tokens import SPACE_MARK, ControlTokens, is_control_text
from megatron_packed_sft.encode.tokenizers.interface import MarkedText
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.remote.copies import origin_of
from megatron_packed_sft.support.paths import refuse_special_file

_SPECIAL = ("bos", "eos", "pad", "unk")


class _Part(NamedTuple):
    """A control token, or the text between two of them."""

    text: str
    is_control: bool
    takes_prefix: bool
    has_lookalike: bool


class SentencePieceTokenizer:
    """A SentencePiece .model file. Implements the `Tokenizer` protocol.

    Control symbols (`<s>`) and user-defined symbols are recognised in text, outside of literal ranges.

    Args:
        path: the .model file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(path)
        refuse_special_file(self._path)
        try:
            self._model = Path(self._path).read_bytes()
        except OSError as error:
            raise InvalidInputError(
                f"{path} cannot be read ({error.strerror}); give the path of a SentencePiece .model file"
            ) from None
        try:
            self._facts = proto.model_facts(self._model)
            self._pieces = proto.model_pieces(self._model)
            self._processor = _processor(self._model)
            # For text after a control token, which gets no dummy prefix.
            has_prefix = self._facts.has_dummy_prefix
            self._inner = _processor(proto.without_dummy_prefix(self._model)) if has_prefix else self._processor
        except (InvalidInputError, RuntimeError, OSError, UnicodeDecodeError):
            raise InvalidInputError(f"{path} is not a SentencePiece model; give the .model file") from None
        self._controls = ControlTokens(
            {piece.text: number for number, piece in enumerate(self._pieces) if _is_control(piece)}
        )
        self._byte_ids = {number for number, piece in enumerate(self._pieces) if piece.type == proto.BYTE}
        self._widths = np.array([_num_bytes(piece) for piece in self._pieces], np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_again, (origin_of(self._path), self.fingerprint)

    @property
    def path(self) -> str:
        """The file it was loaded from."""
        return self._path

    @property
    def name(self) -> str:
        """The name of the file, or of its folder if the file is called tokenizer.model."""
        path = Path(self._path)
        return path.parent.name if path.name == "tokenizer.model" and path.parent.name else path.name

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the file."""
        return xxhash.xxh3_128(self._model).hexdigest()

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self._pieces)

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-sequence id, if any."""
        return self._id_of("bos")

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence id, if any."""
        return self._id_of("eos")

    @property
    def pad_id(self) -> int | None:
        """The padding id, if any."""
        return self._id_of("pad")

    @property
    def chat_template(self) -> None:
        """None: a .model file has no template."""
        return

    @property
    def tool_template(self) -> None:
        """None: such a model has no templates."""
        return

    @property
    def stop_tokens(self) -> Sequence[str]:
        """Its end of sequence, if it has one."""
        return [token] if (token := self.template_variables.get("eos_token")) else []

    @cached_property
    def template_variables(self) -> Mapping[str, Any]:
        """Those of bos_token, eos_token, pad_token and unk_token that the model has."""
        ids = {name: self._id_of(name) for name in _SPECIAL}
        return {f"{name}_token": self._pieces[number].text for name, number in ids.items() if number is not None}

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Text -> id of its control and user-defined symbols, except those that are text: white space and HTML."""
        return self._controls.ids

    def encode_many(self, texts: Sequence[MarkedText]) -> Sequences:
        """Tokenize many texts and map their trained characters to tokens."""
        num_bytes = utf8_lengths(texts)
        parts: list[_Part] = []
        num_parts = []
        for text, _, literal, _ in texts:
            split, has_lookalike = self._controls.split(text, literal)
            before = len(parts)
            for index, part in enumerate(split):
                if part:
                    takes_prefix = index == 0 and self._facts.has_dummy_prefix
                    parts.append(_Part(part, bool(index % 2), takes_prefix, has_lookalike))
            num_parts.append(len(parts) - before)
        found = self._ids_of(parts)
        counts = np.array([len(ids) for ids in found], np.int64)
        ids = np.fromiter(chain.from_iterable(found), np.int32, int(counts.sum()))
        starts, ends = self._positions(parts, ids, counts)
        tokens_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        lengths = np.diff(tokens_before[np.cumsum([0, *num_parts])])
        return with_train_mask(ids, lengths, starts, ends, trained_ranges(texts, num_bytes, in_bytes=True))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids, control tokens included."""
        texts = {number: text for text, number in self._controls.ids.items()}
        parts: list[str] = []
        run: list[int] = []

        def finish_run() -> None:
            # Only the first run can have a dummy prefix to remove.
            parts.append((self._inner if parts else self._processor).decode(run))
            run.clear()

        for number in map(int, ids):
            if number in texts:
                finish_run()
                parts.append(texts[number])
            else:
                run.append(number)
        finish_run()
        return "".join(parts)

    def _ids_of(self, parts: list[_Part]) -> list[list[int]]:
        found: list[list[int]] = [[]] * len(parts)
        places: dict[tuple[bool, bool], list[int]] = {}
        for place, part in enumerate(parts):
            if part.is_control:
                found[place] = [self._controls.ids[part.text]]
            else:
                places.setdefault((part.takes_prefix, part.has_lookalike), []).append(place)
        for wanted in places.values():
            processor = self._processor_of(parts[wanted[0]])
            many = processor.encode([parts[place].text for place in wanted], num_threads=1)
            for place, ids in zip(wanted, many, strict=True):
                found[place] = ids
        return found

    def _processor_of(self, part: _Part) -> Any:
        if part.has_lookalike:
            return self._literal_processor if part.takes_prefix else self._literal_inner
        return self._processor if part.takes_prefix else self._inner

    def _positions(
        self, parts: list[_Part], ids: npt.NDArray[np.int32], counts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the byte range of each token: from the lengths of pieces that spell the text, else from the model."""
        sizes = np.array([len(part.text.encode()) for part in parts], np.int64)
        first = np.cumsum(counts) - counts
        prefixed = [place for place, part in enumerate(parts) if part.takes_prefix and counts[place]]
        widths = self._widths[ids]
        widths[first[prefixed]] -= 1  # the dummy prefix is not in the text
        ends = np.cumsum(widths)
        sums = np.diff(np.concatenate([np.zeros(1, np.int64), ends])[np.append(first, len(ids))])
        bases = np.cumsum(sizes) - sizes
        ends += np.repeat(bases - (np.cumsum(sums) - sums), counts)
        starts = ends - widths
        for place, part in enumerate(parts):
            if part.is_control or (self._facts.keeps_text and sums[place] == sizes[place]):
                continue
            result = self._processor_of(part).encode(part.text, out_type="serialized_proto")
            spans = np.array(proto.piece_spans(result, self._byte_ids), np.int64).reshape(-1, 2) + bases[place]
            own = slice(first[place], first[place] + counts[place])
            starts[own], ends[own] = spans[:, 0], spans[:, 1]
        return starts, ends

    @cached_property
    def _literal_model(self) -> bytes:
        symbols = [piece for piece in self._pieces if piece.type == proto.USER_DEFINED and _is_control(piece)]
        return proto.without_pieces(self._model, symbols)

    @cached_property
    def _literal_processor(self) -> Any:
        return _processor(self._literal_model)

    @cached_property
    def _literal_inner(self) -> Any:
        return _processor(proto.without_dummy_prefix(self._literal_model))

    def _id_of(self, name: str) -> int | None:
        number = int(getattr(self._processor, f"{name}_id")())
        return number if number >= 0 else None


def _load_again(path: str, fingerprint: str) -> SentencePieceTokenizer:
    tokenizer = SentencePieceTokenizer(local_tokenizer(path))
    if tokenizer.fingerprint != fingerprint:
        raise InvalidInputError(
            f"the tokenizer {path} changed while it was in use ({fingerprint} before, {tokenizer.fingerprint} now); "
            "run again, and leave the tokenizer unchanged"
        )
    return tokenizer


def _is_control(piece: proto.Piece) -> bool:
    if piece.type not in (proto.CONTROL, proto.USER_DEFINED):
        return False
    return is_control_text(piece.text, special=piece.type == proto.CONTROL)


def _num_bytes(piece: proto.Piece) -> int:
    if piece.type == proto.UNKNOWN:
        return 0  # stands for any text: its part does not add up, so the model is asked for positions
    return 1 if piece.type == proto.BYTE else len(piece.text.replace(SPACE_MARK, " ").encode())


def _processor(model: bytes) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=model)
