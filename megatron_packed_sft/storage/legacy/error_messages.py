"""Error messages for legacy files: from the codes of the kernels to one sentence each."""

from __future__ import annotations

from pathlib import Path

from megatron_packed_sft.errors import LegacyFormatError
from megatron_packed_sft.storage.legacy import pickle_tables as tables
from megatron_packed_sft.storage.legacy.pickle_tables import ByteArray, LongArray

_SAVE_AGAIN = "save the bins again with numpy.save, each a dict of three lists of integers"
_MAX_NAME = 80


def pickle_error(path: Path, data: ByteArray, status: LongArray) -> LegacyFormatError:
    """Return why `run_pickle` stopped. Strings out of the file are cut short and shown escaped."""
    code, place, first, second = status[:4].tolist()
    if code in _BIN_SENTENCES:
        field = tables.FIELDS[second] if second >= 0 else ""
        sentence = _BIN_SENTENCES[code].format(field=field, key=_string(data, place))
        return LegacyFormatError(f"{path}: bin {first}: {sentence}")
    if code == tables.FOREIGN_GLOBAL:
        name = _global_name(data, place) if first < 0 else f"{_string(data, first)}.{_string(data, second)}"
        what = f"the pickle calls {name}, which is not part of packed SFT data"
    elif code == tables.BAD_CALL:
        what = f"the pickle calls {'.'.join(tables.CALLABLES[first])} as NumPy never does when it loads packed SFT data"
    elif code == tables.BAD_DTYPE:
        what = f"the pickle holds an array that is not of integers ({_string(data, place) or 'object'}, byte {place})"
    elif code == tables.MIXED_LIST and place < data.size and tables.ARGUMENT_BYTES[data[place]] >= 0:
        what = f"a list of the pickle holds something that does not belong there ({_opcode(data, place)})"
    elif code in (tables.BAD_OPCODE, tables.MIXED_LIST) and place < data.size:
        what = f"the pickle uses {_opcode(data, place)}, which is not part of packed SFT data"
    elif code in (tables.TRUNCATED, tables.MIXED_LIST):
        return LegacyFormatError(
            f"{path}: the file ends inside its pickle ({_opcode(data, place)} asks for more); "
            "copy it again from its source"
        )
    else:
        what = _SENTENCES[code].format(opcode=_opcode(data, place), slot=first, place=place)
    return LegacyFormatError(f"{path}: refused: {what}; nothing was executed")


def bin_error(path: Path, status: LongArray) -> LegacyFormatError:
    """Return what is wrong with the bin that `measure_bins` or `decode_bins` stopped at."""
    from megatron_packed_sft.storage.legacy import decode_kernel as kernel

    code, index, field, position, value = status[:5].tolist()
    name = tables.FIELDS[field]
    shown = "too large" if value >= tables.SATURATED else str(value)
    sentences = {
        kernel.NOT_INTEGERS: f"{name} is not a list or an array of integers",
        kernel.EMPTY: f"{name} is empty",
        kernel.LENGTHS_DIFFER: f"loss_mask has {value} entries, but input_ids has {position}",
        kernel.BIN_TOO_LONG: f"input_ids has {position} tokens, more than a bin can have",
        kernel.BAD_BYTES: f"{name} is an array whose bytes do not fit its type and shape, or the file changed",
        kernel.BAD_ID: f"input_ids is {shown} at position {position}, not in 0..{kernel.LARGEST_ID}",
        kernel.BAD_MASK: f"loss_mask is {shown} at position {position}, not 0 or 1",
        kernel.FIRST_START_NOT_ZERO: f"seq_start_id begins with {shown}, not 0",
        kernel.STARTS_NOT_INCREASING: f"seq_start_id does not increase at entry {position}",
        kernel.START_BEYOND_BIN: f"seq_start_id has an entry {position} that is not below the bin's length",
    }
    return LegacyFormatError(f"{path}: bin {index}: {sentences[code]}")


_BIN_SENTENCES = {
    tables.UNKNOWN_KEY: "has the key {key!r}; a packed bin has exactly input_ids, loss_mask and seq_start_id",
    tables.BAD_KEY: "has a key that is not a string; a packed bin has exactly input_ids, loss_mask and seq_start_id",
    tables.DUPLICATE_KEY: "has the key {field} twice",
    tables.MISSING_KEY: "{field} is missing",
    tables.BAD_VALUE: "{field} is not a list or an array of integers",
}

_SENTENCES = {
    tables.MALFORMED: "{opcode} builds nothing that NumPy writes for packed SFT data",
    tables.TOO_DEEP: f"the pickle nests or queues more than {tables.STACK_LIMIT} objects ({{opcode}})",
    tables.MEMO_GAP: "{opcode} stores into slot {slot} of the memo, far beyond those in use",
    tables.MEMO_EMPTY: "{opcode} reads slot {slot} of the memo, which is empty",
    tables.OVER_BUDGET: f"the pickle makes more objects than packed bins need ({{opcode}}); {_SAVE_AGAIN}",
    tables.BIG_ENDIAN: "the pickle holds a big-endian array (byte {place}); save it again little-endian",
    tables.NOT_ONE_DIMENSIONAL: "the pickle holds an array that is not one-dimensional (byte {place})",
    tables.ARRAY_SIZE: "the pickle holds an array whose bytes do not fit its shape (byte {place})",
    tables.BIN_COUNT: "the pickle does not hold as many bins as the header says (byte {place})",
    tables.NOT_BINS: f"the pickle is not an object array of bins; {_SAVE_AGAIN}",
    tables.TRAILING_BYTES: "there are bytes behind the end of the pickle",
    tables.BAD_PROTOCOL: "no pickle of protocol 2 to 5 follows the header",
}


def _opcode(data: ByteArray, place: int) -> str:
    """Return the name of the opcode at a place; the pickle itself is never passed to pickletools."""
    from pickletools import opcodes

    if place >= data.size:
        return f"byte {place}"
    names = {ord(opcode.code): opcode.name for opcode in opcodes}
    return f"opcode {names.get(int(data[place]), hex(data[place]))} at byte {place}"


def _string(data: ByteArray, place: int) -> str:
    """Return the string that begins at a place, or an empty one."""
    from megatron_packed_sft.storage.legacy.pickle_bytes_kernel import payload_span

    if not 0 <= place < data.size or tables.ARGUMENT_BYTES[data[place]] < 1:
        return ""
    start, length = payload_span(data, place, data.size)
    return _shown(data[start : start + min(length, _MAX_NAME)])


def _global_name(data: ByteArray, place: int) -> str:
    """Return the module and the name behind a GLOBAL opcode."""
    lines = bytes(data[place + 1 : place + 1 + 2 * _MAX_NAME]).split(b"\n")
    return ".".join(ascii(line[:_MAX_NAME].decode("utf-8", "replace"))[1:-1] for line in lines[:2])


def _shown(text: ByteArray) -> str:
    return ascii(bytes(text).decode("utf-8", "replace"))[1:-1]
