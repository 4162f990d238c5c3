"""Write the packed `.npy` file that Megatron-Bridge and NeMo load: an object array of dicts of integer lists.

    header | array, dtype | ( bin 0 bin 1 ... bin 999 e ( bin 1000 ... e | BUILD STOP
                            └ each bin a fragment of its own, encoded by encode_kernel.encode_bins

No Python list is ever made. The header holds the number of bins, so it is written last.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.flat_files import DEFAULT_OPTIONS, FIELDS, OrderedShardWriter
from megatron_packed_sft.storage.interface import WriterOptions
from megatron_packed_sft.support.atomic import os_errors, write_at

_BATCH = 1000  # as Python's own pickler does: readers keep one batch on their stack
_BUFFER_BYTES = 8 << 20
# The old module path: NumPy 2 still knows it, NumPy 1 knows no other.
_PREAMBLE = (
    b"\x80\x04"
    b"\x8c\x15numpy.core.multiarray\x8c\x0c_reconstruct\x93"
    b"\x8c\x05numpy\x8c\x07ndarray\x93K\x00\x85C\x01b\x87R"
    b"(K\x01%b\x85"
    b"\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02O8\x89\x88\x87R(K\x03\x8c\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"
    b"\x89]"
)
_END_OF_BATCH = b"e"
_ENDING = b"tb."
_PICKLED_KEYS = [b"\x8c" + bytes([len(name)]) + name.encode() for name in FIELDS]
_KEYS = np.frombuffer(b"".join(_PICKLED_KEYS), np.uint8)
_KEY_ENDS = np.cumsum([len(key) for key in _PICKLED_KEYS]).astype(np.int64)
# An upper bound of a fragment: 5 bytes per id and per start, 2 per mask entry, and this for all around them.
_FRAGMENT_OVERHEAD = len(_KEYS) + 32


class LegacyPickleWriter(OrderedShardWriter):
    """Write bins in their order, and publish the whole file at `finalize`.

    As a context manager it leaves nothing behind unless finalized. The arguments are those of `OrderedShardWriter`.

    Example:
        >>> import tempfile; path = os.path.join(tempfile.mkdtemp(), "packed.npy")
        >>> with LegacyPickleWriter(path) as writer:
        ...     writer.write_bin(0, [5, 6, 7], [1, 1, 0], [0])
        ...     totals = writer.finalize()
        >>> np.load(path, allow_pickle=True)[0]
        {'input_ids': [5, 6, 7], 'loss_mask': [1, 1, 0], 'seq_start_id': [0]}
    """

    _OUTPUT = "output.npy"

    def __init__(self, output_path: str | os.PathLike[str], options: WriterOptions = DEFAULT_OPTIONS) -> None:
        super().__init__(output_path, options)
        self._size = len(_beginning(1))
        with self._aborting_on_error():
            self._fd = self._create(self._OUTPUT)

    def finalize(self) -> dict[str, Any]:
        """Publish the file and return its figures; a missing bin is an error, and nothing is published."""
        return {"format": "legacy_npy_pickle", **super().finalize()}

    def _append(self, first_bin: int, block: BinBlock) -> None:
        longest = int(block.packed_len.max(initial=0))
        bins_at_once = max(1, _BUFFER_BYTES // (7 * longest + _FRAGMENT_OVERHEAD))
        for start in range(0, len(block), bins_at_once):
            self._write_out(_encoded(block, start, min(start + bins_at_once, len(block)), first_bin).data)

    def _complete(self, num_bins: int) -> int:
        self._write_out(_ENDING if num_bins % _BATCH == 0 else _END_OF_BATCH + _ENDING)
        with os_errors("write", self.path):
            write_at(self._fd, _beginning(num_bins), 0)
            os.fsync(self._fd)
        return self._size

    def _write_out(self, data: memoryview | bytes) -> None:
        with os_errors("write", self.path, self._size + len(data)):
            write_at(self._fd, data, self._size)
        self._size += len(data)


def _encoded(block: BinBlock, start: int, stop: int, first_bin: int) -> npt.NDArray[np.uint8]:
    """Return the pickle fragments of some bins, one behind the other."""
    from megatron_packed_sft.storage.legacy import encode_kernel

    lengths = block.packed_len[start:stop]
    offsets = block.seq_offsets[start : stop + 1]
    base = int(block.seq_offsets[0])
    starts = block.seq_starts[int(offsets[0]) - base : int(offsets[-1]) - base]
    bound = 7 * int(lengths.sum(dtype=np.int64)) + 5 * len(starts) + _FRAGMENT_OVERHEAD * len(lengths)
    out = np.empty(bound, np.uint8)
    size = encode_kernel.encode_bins(
        block.input_ids[start:stop],
        block.loss_mask[start:stop],
        lengths,
        offsets,
        starts,
        first_bin + start,
        _BATCH,
        _KEYS,
        _KEY_ENDS,
        out,
    )
    return out[:size]


def _beginning(num_bins: int) -> bytes:
    """Return what comes before the first bin; it has the same size for every number of bins."""
    text = f"{{'descr': '|O', 'fortran_order': False, 'shape': ({num_bins},), }}".encode()
    padding = -(10 + len(text) + 1) % 64
    header = b"\x93NUMPY\x01\x00" + (len(text) + padding + 1).to_bytes(2, "little") + text + b" " * padding + b"\n"
    return header + _PREAMBLE % (b"J" + num_bins.to_bytes(4, "little"))
