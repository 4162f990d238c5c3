"""The parts of SentencePiece's protocol buffers that its library neither reads nor changes for us.

ModelProto (the .model file)   1 pieces, 2 trainer_spec, 3 normalizer_spec
  SentencePiece                1 piece, 3 type (4 is USER_DEFINED, 5 is UNUSED)
  TrainerSpec                  24 treat_whitespace_as_suffix
  NormalizerSpec               2 precompiled_charsmap, 3 add_dummy_prefix, 4 remove_extra_whitespaces,
                               5 escape_whitespaces
SentencePieceText (a result)   2 pieces
  SentencePiece                4 begin, 5 end, in bytes of the text
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from megatron_packed_sft.errors import InvalidInputError

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

    If byte pieces spell one character, SentencePiece assigns it to the last of them; here each of them gets it.

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
