"""The words of the pickle machine in `pickle_kernel.py`: opcodes, kinds of entries, forms of values, error codes.

Numba freezes these constants into its cached kernels; `support/compiled.py` makes sure that an edit here is noticed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]
LongArray = npt.NDArray[np.int64]

# How a run ended. `status` holds the code, the place in the file, and up to two details.
OK = 0
TRUNCATED = 1
BAD_OPCODE = 2
FOREIGN_GLOBAL = 3  # details: places of the module's and the name's string, or -1 for the GLOBAL opcode
BAD_CALL = 4  # detail: the callable's number
MALFORMED = 5
TOO_DEEP = 6
MEMO_GAP = 7  # detail: the slot
MEMO_EMPTY = 8  # detail: the slot
OVER_BUDGET = 9
BAD_DTYPE = 10
BIG_ENDIAN = 11
NOT_ONE_DIMENSIONAL = 12
ARRAY_SIZE = 13
MIXED_LIST = 14
UNKNOWN_KEY = 15  # detail: bin
DUPLICATE_KEY = 16  # details: bin, field
MISSING_KEY = 17  # details: bin, field
BAD_VALUE = 18  # details: bin, field
BIN_COUNT = 19
NOT_BINS = 20
TRAILING_BYTES = 21
BAD_PROTOCOL = 22
BAD_KEY = 23  # detail: bin

# Opcodes, by their names in Python's pickletools.
MARK, STOP, NONE = ord("("), ord("."), ord("N")
BININT, BININT1, BININT2, LONG1, INT = ord("J"), ord("K"), ord("M"), 0x8A, ord("I")
NEWTRUE, NEWFALSE = 0x88, 0x89
BINUNICODE, SHORT_BINUNICODE, BINUNICODE8 = ord("X"), 0x8C, 0x8D
BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8 = ord("B"), ord("C"), 0x8E, 0x96
EMPTY_LIST, APPEND, APPENDS = ord("]"), ord("a"), ord("e")
EMPTY_DICT, SETITEM, SETITEMS = ord("}"), ord("s"), ord("u")
EMPTY_TUPLE, TUPLE, TUPLE1, TUPLE2, TUPLE3 = ord(")"), ord("t"), 0x85, 0x86, 0x87
GLOBAL, STACK_GLOBAL, REDUCE, BUILD = ord("c"), 0x93, ord("R"), ord("b")
BINPUT, LONG_BINPUT, MEMOIZE, BINGET, LONG_BINGET = ord("q"), ord("r"), 0x94, ord("h"), ord("j")
PROTO, FRAME = 0x80, 0x95

NEWLINE, MINUS_SIGN, DIGIT_ZERO, DIGIT_NINE = ord("\n"), ord("-"), ord("0"), ord("9")
LETTER_B, LETTER_C, ORDER_BIG, ORDER_LITTLE, ORDER_NONE = ord("b"), ord("C"), ord(">"), ord("<"), ord("|")

# Bytes that follow an accepted opcode, and whether they are the length of more bytes; -1 refuses the opcode.
_ARGUMENTS: dict[int, int] = {BININT: 4, BININT1: 1, BININT2: 2, BINPUT: 1, LONG_BINPUT: 4, BINGET: 1, LONG_BINGET: 4}
_ARGUMENTS |= {FRAME: 8, INT: 0, GLOBAL: 0, NEWTRUE: 0, NEWFALSE: 0, MARK: 0, STOP: 0, NONE: 0, MEMOIZE: 0}
_ARGUMENTS |= dict.fromkeys((EMPTY_LIST, APPEND, APPENDS, EMPTY_DICT, SETITEM, SETITEMS, EMPTY_TUPLE, TUPLE), 0)
_ARGUMENTS |= dict.fromkeys((TUPLE1, TUPLE2, TUPLE3, STACK_GLOBAL, REDUCE, BUILD), 0)
_COUNTED = {LONG1: 1, SHORT_BINUNICODE: 1, BINUNICODE: 4, BINUNICODE8: 8}
_COUNTED |= {SHORT_BINBYTES: 1, BINBYTES: 4, BINBYTES8: 8, BYTEARRAY8: 8}
ARGUMENT_BYTES = np.array([(_ARGUMENTS | _COUNTED).get(op, -1) for op in range(256)], np.int8)
IS_COUNTED = np.array([op in _COUNTED for op in range(256)], np.bool_)

# The integers that lists are made of, by whole size; 0 for all else (LONG1 and INT are rare and read apart).
_INTEGERS = {BININT1: 2, BININT2: 3, BININT: 5, NEWTRUE: 1, NEWFALSE: 1}
INTEGER_BYTES = np.array([_INTEGERS.get(op, 0) for op in range(256)], np.int8)

# What a stack or memo entry is; the payload is in the comment.
KIND_BITS = 5
KIND_MASK = 31
KIND_MARK = 0  # where on the stack the mark below is, plus one
KIND_NONE = 1
KIND_INT = 2  # place of its opcode, also for booleans
KIND_STRING = 3  # place of its opcode
KIND_BYTES = 4  # place of its opcode
KIND_LATIN1 = 5  # place of the string that protocol 2 keeps bytes in
KIND_EMPTY_BYTES = 6
KIND_LIST = 7  # value
KIND_INT_TUPLE = 8  # value
KIND_ONE_INT = 9  # place of the integer: a tuple of one, mostly a shape
KIND_EMPTY_TUPLE = 10
KIND_DICT = 11  # dict
KIND_ARRAY = 12  # value
KIND_DTYPE = 13  # form
KIND_GLOBAL = 14  # number
KIND_ENCODE_ARGUMENTS = 15  # place of the string
KIND_RECONSTRUCT_ARGUMENTS = 16
KIND_DTYPE_ARGUMENTS = 17  # form
KIND_DTYPE_STATE = 18  # flags
KIND_ARRAY_STATE = 19  # value
KIND_BUFFER_ARGUMENTS = 20  # value
# Opcodes that only push what they are, by kind; -1 for all others.
_PLAIN = dict.fromkeys((*_INTEGERS, LONG1, INT), KIND_INT) | {NONE: KIND_NONE, EMPTY_TUPLE: KIND_EMPTY_TUPLE}
_PLAIN |= dict.fromkeys((BINUNICODE, SHORT_BINUNICODE, BINUNICODE8), KIND_STRING)
_PLAIN |= dict.fromkeys((BINBYTES, SHORT_BINBYTES, BINBYTES8, BYTEARRAY8), KIND_BYTES)
PLAIN_KINDS = np.array([_PLAIN.get(op, -1) for op in range(256)], np.int8)
_FIELD_KINDS = (KIND_LIST, KIND_ARRAY, KIND_INT_TUPLE, KIND_ONE_INT, KIND_EMPTY_TUPLE)
IS_FIELD_KIND = np.array([kind in _FIELD_KINDS for kind in range(32)], np.bool_)

# What a value is: `count << FORM_BITS | form`. Array forms carry log2 of the item size in their lowest two bits.
FORM_BITS = 8
FORM_MASK = 255
UNBUILT = 0
INTS = 1  # pickled integers, from a place on
BINS = 2  # the one list of dicts
SIGNED_ARRAY = 4  # 4..7: int8, int16, int32, int64
UNSIGNED_ARRAY = 8  # 8..11: uint8, uint16, uint32, uint64
OBJECT_ARRAY = 12
BOOL_ARRAY = 16
OBJECT_FLAGS = 63  # what NumPy writes for the object dtype; for integers it writes 0
LATIN1_FORM = 64  # added: the bytes are the characters of a string, and the place is the string's opcode

CALLABLES = (
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
    ("_codecs", "encode"),
    ("__builtin__", "bytes"),
    ("builtins", "bytes"),
)
CALLABLE_NDARRAY = 2
# What each of them is called with and gives: (kind of the arguments, kind of the result).
CALLABLE_ARGUMENTS = np.array(
    [KIND_RECONSTRUCT_ARGUMENTS] * 2
    + [-1, KIND_DTYPE_ARGUMENTS]
    + [KIND_BUFFER_ARGUMENTS] * 2
    + [KIND_ENCODE_ARGUMENTS]
    + [KIND_EMPTY_TUPLE] * 2,
    np.int64,
)
CALLABLE_RESULTS = np.array(
    [KIND_ARRAY] * 2 + [-1, KIND_DTYPE] + [KIND_ARRAY] * 2 + [KIND_LATIN1] + [KIND_EMPTY_BYTES] * 2, np.int64
)
FIELDS = ("input_ids", "loss_mask", "seq_start_id")


def text_table(texts: tuple[str, ...]) -> tuple[ByteArray, LongArray]:
    """Texts end to end, and where each ends."""
    ends = np.cumsum([0, *(len(text) for text in texts)])
    return np.frombuffer("".join(texts).encode(), np.uint8), ends.astype(np.int64)


MODULE_TEXT, MODULE_ENDS = text_table(tuple(module for module, _ in CALLABLES))
NAME_TEXT, NAME_ENDS = text_table(tuple(name for _, name in CALLABLES))
FIELD_TEXT, FIELD_ENDS = text_table(FIELDS)
DTYPE_TEXT, DTYPE_ENDS = text_table(("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1", "O8"))
DTYPE_FORMS = np.array(
    [SIGNED_ARRAY + log_size for log_size in range(4)]
    + [UNSIGNED_ARRAY + log_size for log_size in range(4)]
    + [BOOL_ARRAY, OBJECT_ARRAY],
    np.int64,
)
LATIN1_TEXT, LATIN1_ENDS = text_table(("latin1",))

# Picklers hand over at most 1,000 items at a time, so real files stay far below this.
STACK_LIMIT = 16_384
# The smallest bin takes 25 bytes, so this guess of the tables' sizes rarely has to grow.
SMALLEST_BIN = 24
LONGEST_STATE = 64  # no tuple of NumPy's that mixes integers with other things comes near this
SATURATED = np.int64(1) << 62  # stands for integers too long for an int64; far outside every allowed range
