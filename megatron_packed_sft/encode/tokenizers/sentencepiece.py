"""SentencePiece tokenizers: control tokens are looked up, and the text between them goes through the model.

Many models have a dummy prefix, a space in front of the text. Only the start of a text gets it: what follows a control
token is encoded as it is, as Hugging Face does for Llama (`legacy=False`). A model that trims white space (T5's) trims
the text between any two control tokens.
"""

from __future__ import annotations

import io
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_packed_sft.encode.sequences import MarkedText, Sequences, trained_ranges, utf8_lengths, with_train_mask
from megatron_packed_sft.encode.tokenizers.interface import SPACE_MARK, ControlTokens, is_control_text, local_tokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.remote.copies import origin_of
from megatron_packed_sft.support.paths import local_path, refuse_special_file

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
        self.path = os.path.abspath(path)
        self.chat_template = self.tool_template = None  # a .model file has no templates
        refuse_special_file(self.path)
        try:
            self._model = Path(self.path).read_bytes()
        except OSError as error:
            raise InvalidInputError(
                f"{path} cannot be read ({error.strerror}); give the path of a SentencePiece .model file"
            ) from None
        try:
            self._facts = model_facts(self._model)
            self._pieces = model_pieces(self._model)
            self._processor = _processor(self._model)
            # For text after a control token, which gets no dummy prefix.
            has_prefix = self._facts.has_dummy_prefix
            self._inner = _processor(without_dummy_prefix(self._model)) if has_prefix else self._processor
        except (InvalidInputError, RuntimeError, OSError, UnicodeDecodeError):
            raise InvalidInputError(f"{path} is not a SentencePiece model; give the .model file") from None
        self.fingerprint = xxhash.xxh3_128(self._model).hexdigest()
        self.vocab_size = len(self._pieces)
        self._controls = ControlTokens(
            {piece.text: number for number, piece in enumerate(self._pieces) if _is_control(piece)}
        )
        self._byte_ids = {number for number, piece in enumerate(self._pieces) if piece.type == BYTE}
        self._widths = np.array([_num_bytes(piece) for piece in self._pieces], np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_again, (origin_of(self.path), self.fingerprint)

    @property
    def name(self) -> str:
        """The name of the file, or of its folder if the file is called tokenizer.model."""
        path = Path(self.path)
        return path.parent.name if path.name == "tokenizer.model" and path.parent.name else path.name

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
        """Return the byte range of each token: by the lengths of pieces if they spell the text, or from the model."""
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
            spans = np.array(piece_spans(result, self._byte_ids), np.int64).reshape(-1, 2) + bases[place]
            own = slice(first[place], first[place] + counts[place])
            starts[own], ends[own] = spans[:, 0], spans[:, 1]
        return starts, ends

    @cached_property
    def _literal_model(self) -> bytes:
        symbols = [piece for piece in self._pieces if piece.type == USER_DEFINED and _is_control(piece)]
        return without_pieces(self._model, symbols)

    @cached_property
    def _literal_processor(self) -> Any:
        return _processor(self._literal_model)

    @cached_property
    def _literal_inner(self) -> Any:
        return _processor(without_dummy_prefix(self._literal_model))

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


def _is_control(piece: Piece) -> bool:
    if piece.type not in (CONTROL, USER_DEFINED):
        return False
    return is_control_text(piece.text, special=piece.type == CONTROL)


def _num_bytes(piece: Piece) -> int:
    if piece.type == UNKNOWN:
        return 0  # stands for any text; where the lengths do not add up, the model computes positions
    return 1 if piece.type == BYTE else len(piece.text.replace(SPACE_MARK, " ").encode())


def _processor(model: bytes) -> Any:
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=model)


# The parts of SentencePiece's protocol buffers that its library neither reads nor changes for us:
#
# ModelProto (the .model file)   1 pieces, 2 trainer_spec, 3 normalizer_spec
#   SentencePiece                1 piece, 3 type (4 is USER_DEFINED, 5 is UNUSED)
#   TrainerSpec                  24 treat_whitespace_as_suffix
#   NormalizerSpec               2 precompiled_charsmap, 3 add_dummy_prefix, 4 remove_extra_whitespaces,
#                                5 escape_whitespaces
# SentencePieceText (a result)   2 pieces
#   SentencePiece                4 begin, 5 end, in bytes of the text

# Types of pieces. An unused piece keeps its id, but no text produces it.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Field(NamedTuple):
    """One field of a message: its number, where its value is in the file, and the value itself if it is a varint."""

    number: int
    begin: int
    end: int
    value: int


class Piece(NamedTuple):
    """A piece of the vocabulary, and where in the file its type is written."""

    text: str
    type: int
    type_at: int


class ModelFacts(NamedTuple):
    """How a model treats text.

    Args:
        has_dummy_prefix: whether a space is put in front of the text.
        keeps_text: whether nothing else changes, so that the pieces spell the text byte by byte.
    """

    has_dummy_prefix: bool
    keeps_text: bool


def model_facts(model: bytes) -> ModelFacts:
    """Return how a model treats text.

    Example:
        >>> model_facts(b"")  # the defaults of the format
        ModelFacts(has_dummy_prefix=True, keeps_text=False)
    """
    flags = {3: 1, 4: 1, 5: 1}
    charsmap = suffix = 0
    for part in _fields(model, 0, len(model)):
        if part.number == 3:
            for field in _fields(model, part.begin, part.end):
                charsmap = max(charsmap, field.end - field.begin if field.number == 2 else 0)
                flags[field.number] = field.value
        elif part.number == 2:
            suffix = max([suffix, *(field.value for field in _fields(model, *part[1:3]) if field.number == 24)])
    keeps_text = not charsmap and not suffix and not flags[4] and bool(flags[5])
    return ModelFacts(has_dummy_prefix=bool(flags[3]), keeps_text=keeps_text)


def model_pieces(model: bytes) -> list[Piece]:
    r"""Return all pieces, in the order of their ids.

    Example:
        >>> model_pieces(b"\x0a\x05\x0a\x01x\x18\x04")
        [Piece(text='x', type=4, type_at=6)]
    """
    pieces = []
    for part in _fields(model, 0, len(model)):
        if part.number == 1:
            text, kind, type_at = "", NORMAL, -1
            for field in _fields(model, part.begin, part.end):
                if field.number == 1:
                    text = model[field.begin : field.end].decode()
                elif field.number == 3:
                    kind, type_at = field.value, field.begin
            pieces.append(Piece(text, kind, type_at))
    return pieces


def piece_spans(result: bytes, byte_ids: Container[int]) -> list[tuple[int, int]]:
    r"""Return the byte range of the text that each piece of an encoded text stands for.

    Where byte pieces spell one character, SentencePiece assigns it to the last of them; here it is assigned to all.

    Example:
        >>> piece_spans(b"\x12\x06\x10\x07\x20\x00\x28\x00" + b"\x12\x06\x10\x08\x20\x00\x28\x02", byte_ids={7, 8})
        [(0, 2), (0, 2)]
    """
    spans: list[tuple[int, int]] = []
    num_waiting = 0
    for piece in _fields(result, 0, len(result)):
        if piece.number != 2:
            continue
        values = {field.number: field.value for field in _fields(result, piece.begin, piece.end)}
        begin, end = values.get(4, 0), values.get(5, 0)
        if begin == end and values.get(2, 0) in byte_ids:
            num_waiting += 1
        else:
            spans += [(begin, end)] * (1 + num_waiting)
            num_waiting = 0
    return spans


def without_dummy_prefix(model: bytes) -> bytes:
    """Return the model without the space in front of the text.

    Example:
        >>> model_facts(without_dummy_prefix(b"")).has_dummy_prefix
        False
    """
    # Repeated messages are merged, and later values win. This is normalizer_spec { add_dummy_prefix: false }.
    return model + bytes([3 << 3 | _BYTES, 2, 3 << 3 | _VARINT, 0])


def without_pieces(model: bytes, pieces: Iterable[Piece]) -> bytes:
    r"""Return the model with some pieces marked as unused; each must have a type in the file.

    Example:
        >>> model = b"\x0a\x05\x0a\x01x\x18\x04"
        >>> model_pieces(without_pieces(model, model_pieces(model)))[0].type == UNUSED
        True
    """
    changed = bytearray(model)
    for piece in pieces:
        changed[piece.type_at] = UNUSED
    return bytes(changed)


def _fields(data: bytes, position: int, end: int) -> Iterator[Field]:
    try:
        while position < end:
            key, position = _varint(data, position)
            kind = key & 7
            value = 0
            begin = position
            if kind == _VARINT:
                value, position = _varint(data, position)
            elif kind == _BYTES:
                size, begin = _varint(data, position)
                position = begin + size
            elif kind in (_FIXED32, _FIXED64):
                position += 4 if kind == _FIXED32 else 8
            else:
                raise IndexError
            if position > end:
                raise IndexError
            yield Field(key >> 3, begin, position, value)
    except IndexError:
        raise InvalidInputError("the file is not a SentencePiece model; give the .model file") from None


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


# Training small models: for demos, tests and languages that no public tokenizer covers.

CHATML_SYMBOLS = ("<|im_start|>", "<|im_end|>")


def train_sentencepiece(
    texts: Iterable[str],
    path: str | os.PathLike[str],
    *,
    vocab_size: int = 4096,
    user_defined_symbols: Sequence[str] = CHATML_SYMBOLS,
    seed: int = 0,
) -> Path:
    """Train a lossless BPE model: no normalization, all white space kept, bytes for unknown characters.

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
            f"vocab_size is {vocab_size}; use more than {smallest}, the number of its symbols and bytes"
        )
    # SentencePiece trains on lines.
    lines = (line for text in texts for line in text.splitlines() if line.strip())
    first = next(lines, None)
    if first is None:
        raise InvalidInputError("the texts are blank; give some text to train on")
    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(seed)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chain([first], lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # a short text may have too few pieces
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
            f"SentencePiece could not train on these texts ({error}); give more text, or change vocab_size"
        ) from None
    target = Path(path)
    target.write_bytes(model.getvalue())
    return target
