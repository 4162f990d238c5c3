"""Write the packed `.npy` file that Megatron-Bridge and NeMo load: an object array of dicts of integer lists.

    header | array, dtype | ( bin 0 bin 1 ... bin 999 e ( bin 1000 ... e | BUILD STOP
                            └ each bin a fragment of its own, encoded by encode_kernel.encode_rows

No Python list is ever made: memory does not grow with the tokens. A bin that arrives in its turn goes straight out;
one that comes early waits in a spool file beside the output.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.disk.atomic import os_errors, write_at
from megatron_packed_sft.disk.staged_writer import StagedWriter
from megatron_packed_sft.errors import InvalidInputError, WriterStateError
from megatron_packed_sft.storage.bins import BinBlock, as_int_array, cast_checked, find_violations
from megatron_packed_sft.storage.legacy.pickle_tables import FIELDS

_BATCH = 1000  # as Python's own pickler does: readers keep one batch on their stack
_BUFFER_BYTES = 8 << 20
_ID_LIMIT = 2**31
_OUTPUT, _SPOOL = "output.npy", "spool"
# The old module path: NumPy 2 still knows it, NumPy 1 knows no other.
_PREAMBLE = (
    b"\x80\x04"
    b"\x8c\x15numpy.core.multiarray\x8c\x0c_reconstruct\x93"
    b"\x8c\x05numpy\x8c\x07ndarray\x93K\x00\x85C\x01b\x87R"
    b"(K\x01%b\x85"
    b"\x8c\x05numpy\x8c\x05dtype\x93\x8c\x02O8\x89\x88\x87R(K\x03\x8c\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"
    b"\x89]"
)
_ENDING = b"tb."
_PICKLED_KEYS = [b"\x8c" + bytes([len(name)]) + name.encode() for name in FIELDS]
_KEYS = np.frombuffer(b"".join(_PICKLED_KEYS), np.uint8)
_KEY_ENDS = np.cumsum([len(key) for key in _PICKLED_KEYS]).astype(np.int64)
# An upper bound of a fragment: 5 bytes per id and per start, 2 per mask entry, and this for all around them.
_FRAGMENT_OVERHEAD = len(_KEYS) + 32


class LegacyPickleWriter(StagedWriter):
    """Write bins in any order, each once, and publish the whole file at `finalize`.

    As a context manager it leaves nothing behind unless finalized.

    Args:
        output_path: the .npy file to publish; the name is taken as it is.
        num_bins: how many bins the file will hold.
        pack_size: no bin may be longer; None for no limit.
        vocab_size: ids must be below it; None for what an int32 holds.
        overwrite: replace a published file.

    Example:
        >>> import tempfile; path = os.path.join(tempfile.mkdtemp(), "packed.npy")
        >>> with LegacyPickleWriter(path, num_bins=1) as writer:
        ...     writer.write_bin(0, [5, 6, 7], [1, 1, 0], [0])
        ...     totals = writer.finalize()
        >>> np.load(path, allow_pickle=True)[0]
        {'input_ids': [5, 6, 7], 'loss_mask': [1, 1, 0], 'seq_start_id': [0]}
    """

    def __init__(
        self,
        output_path: str | os.PathLike[str],
        *,
        num_bins: int,
        pack_size: int | None = None,
        vocab_size: int | None = None,
        overwrite: bool = False,
    ) -> None:
        if not 1 <= num_bins < _ID_LIMIT:
            raise InvalidInputError(f"num_bins is {num_bins}; a packed file holds at least one bin")
        if vocab_size is not None and not 1 <= vocab_size <= _ID_LIMIT:
            raise InvalidInputError(f"vocab_size is {vocab_size}; it must be in 1..{_ID_LIMIT}")
        self.num_bins = num_bins
        self._pack_size = pack_size
        self._vocab_size = _ID_LIMIT if vocab_size is None else vocab_size
        self._totals = {"num_sequences": 0, "num_tokens": 0, "num_loss_tokens": 0, "pack_size": 0}
        self._is_written = np.zeros(num_bins, np.bool_)
        self._next_bin = 0
        self._size = 0
        self._spool_size = 0
        self._spool_places: npt.NDArray[np.int64] | None = None  # per bin: where it begins and ends there
        self._output_fd = -1
        self._spool_fd = -1
        super().__init__(output_path, overwrite=overwrite)
        self.path = self.target
        with self._aborting_on_error():
            self._output_fd = self._create(_OUTPUT)
            self._write_out(_npy_header(num_bins) + _PREAMBLE % _pickled_int(num_bins))

    def write_bin(self, bin_id: int, input_ids: Any, loss_mask: Any, seq_start_id: Any) -> None:
        """Check and write one bin, given as lists or integer arrays.

        Example:
            >>> writer.write_bin(7, [5, 6, 7], [1, 1, 0], [0])  # doctest: +SKIP
        """
        self._refuse_out_of_turn(bin_id, bin_id + 1)
        given = zip(FIELDS, (input_ids, loss_mask, seq_start_id), strict=True)
        ids, mask, starts = (as_int_array(values, f"bin {bin_id}: {name}") for name, values in given)
        if not (len(ids) and len(starts)):
            raise InvalidInputError(f"bin {bin_id}: {'seq_start_id' if len(ids) else 'input_ids'} is empty")
        if len(ids) != len(mask):
            raise InvalidInputError(f"bin {bin_id}: loss_mask has {len(mask)} entries, but input_ids has {len(ids)}")
        block = BinBlock(
            input_ids=cast_checked(ids, "<i4", self._vocab_size, f"bin {bin_id}: input_ids")[np.newaxis],
            loss_mask=cast_checked(mask, "|u1", 2**8, f"bin {bin_id}: loss_mask")[np.newaxis],
            packed_len=np.array([len(ids)], np.uint32),
            seq_offsets=np.array([0, len(starts)], np.uint32),
            seq_starts=cast_checked(starts, "<u4", 2**32, f"bin {bin_id}: seq_start_id"),
        )
        self._write(bin_id, block)

    def write_block(self, first_bin: int, block: BinBlock) -> None:
        """Check and write consecutive bins, the first of which is `first_bin`. One wrong bin keeps all of them out.

        Example:
            >>> writer.write_block(0, shard.block(0, 1024))  # doctest: +SKIP
        """
        self._refuse_out_of_turn(first_bin, first_bin + len(block))
        self._write(first_bin, _typed_block(block, f"block at bin {first_bin}"))

    def finalize(self) -> dict[str, Any]:
        """Publish the file and return its totals; a missing bin is an error, and nothing is published.

        Example:
            >>> writer.finalize()["num_tokens"]  # doctest: +SKIP
            8192000
        """
        self._refuse_out_of_turn(0, 0)
        num_missing = self.num_bins - int(np.count_nonzero(self._is_written))
        if num_missing:
            raise WriterStateError(
                f"{self.path}: bin {int(np.argmin(self._is_written))} was never written ({num_missing} of "
                f"{self.num_bins} bins are missing); write every bin before finalize"
            )
        with self._closing():
            self._write_out(_ENDING)
            with os_errors("write", self.path):
                os.fsync(self._output_fd)
            self._staging.publish_file(_OUTPUT)
        return {"format": "legacy_npy_pickle", "num_bins": self.num_bins, **self._totals, "num_bytes": self._size}

    def _refuse_out_of_turn(self, first: int, stop: int) -> None:
        self._require_open()
        if not 0 <= first <= stop <= self.num_bins:
            raise InvalidInputError(f"{self.path}: bins {first}..{stop - 1} are not within 0..{self.num_bins - 1}")
        if self._is_written[first:stop].any():
            taken = first + int(np.argmax(self._is_written[first:stop]))
            raise WriterStateError(f"{self.path}: bin {taken} was written already; write each bin once")

    def _write(self, first_bin: int, block: BinBlock) -> None:
        longest = int(block.packed_len.max(initial=0))
        if self._pack_size is not None and longest > self._pack_size:
            row = int(np.argmax(block.packed_len > self._pack_size))
            raise InvalidInputError(
                f"bin {first_bin + row}: input_ids has {block.packed_len[row]} tokens, more than pack_size "
                f"{self._pack_size}"
            )
        violations, sums = find_violations(block, vocab_size=self._vocab_size, pad_id=None)
        if violations:
            row, field, message = violations[0]
            raise InvalidInputError(f"bin {first_bin + row}: {field} {message}")
        rows_at_once = max(1, _BUFFER_BYTES // (7 * longest + _FRAGMENT_OVERHEAD))
        with self._aborting_on_error():  # part of the block may be on disk: there is no clean state to go on from
            for start in range(0, len(block), rows_at_once):
                stop = min(start + rows_at_once, len(block))
                self._put(first_bin + start, *_encoded(block, start, stop, first_bin, self.num_bins))
        self._is_written[first_bin : first_bin + len(block)] = True
        self._totals["num_sequences"] += int(block.seq_offsets[-1]) - int(block.seq_offsets[0])
        self._totals["num_tokens"] += sums.num_tokens
        self._totals["num_loss_tokens"] += sums.num_loss_tokens
        self._totals["pack_size"] = max(self._totals["pack_size"], longest)

    def _put(self, first_bin: int, fragments: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> None:
        """Write the fragments out, and what they were waited for by; or spool them."""
        if first_bin == self._next_bin:
            self._write_out(fragments.data)
            self._next_bin += len(ends)
            self._write_out_spooled()
            return
        if self._spool_places is None:
            self._spool_places = np.zeros((self.num_bins, 2), np.int64)
            self._spool_fd = self._create(_SPOOL)
        with os_errors("write the spool of", self.path, self._spool_size + len(fragments)):
            write_at(self._spool_fd, fragments.data, self._spool_size)
        places = self._spool_places[first_bin : first_bin + len(ends)]
        places[:, 1] = self._spool_size + ends
        places[0, 0] = self._spool_size
        places[1:, 0] = places[:-1, 1]
        self._spool_size += len(fragments)

    def _write_out_spooled(self) -> None:
        """Copy the bins whose turn it is out of the spool, neighbours together."""
        if self._spool_places is None:
            return
        while self._next_bin < self.num_bins and self._spool_places[self._next_bin, 1] > 0:
            place, end = self._spool_places[self._next_bin].tolist()
            self._next_bin += 1
            while self._next_bin < self.num_bins and end - place < _BUFFER_BYTES:
                following, following_end = self._spool_places[self._next_bin].tolist()
                if following != end:
                    break
                end = following_end
                self._next_bin += 1
            with os_errors("read the spool of", self.path):
                while place < end:
                    data = os.pread(self._spool_fd, min(end - place, _BUFFER_BYTES), place)
                    if not data:
                        raise WriterStateError(f"{self.path}: its spool file was cut by another process")
                    self._write_out(data)
                    place += len(data)

    def _write_out(self, data: memoryview | bytes) -> None:
        with os_errors("write", self.path, self._size + len(data)):
            write_at(self._output_fd, data, self._size)
        self._size += len(data)

    def _create(self, name: str) -> int:
        with os_errors("create a file for", self.path):
            fd = os.open(self._staging.path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._cleanup.callback(os.close, fd)
        return fd


def _encoded(
    block: BinBlock, start: int, stop: int, first_bin: int, num_bins: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the pickle fragments of some rows, one behind the other, and where each ends."""
    from megatron_packed_sft.storage.legacy import encode_kernel

    lengths = block.packed_len[start:stop]
    offsets = block.seq_offsets[start : stop + 1]
    base = int(block.seq_offsets[0])
    starts = block.seq_starts[int(offsets[0]) - base : int(offsets[-1]) - base]
    bound = 7 * int(lengths.sum(dtype=np.int64)) + 5 * len(starts) + _FRAGMENT_OVERHEAD * len(lengths)
    out = np.empty(bound, np.uint8)
    ends = np.empty(len(lengths), np.int64)
    encode_kernel.encode_rows(
        block.input_ids[start:stop],
        block.loss_mask[start:stop],
        lengths,
        offsets,
        starts,
        first_bin + start,
        num_bins,
        _BATCH,
        _KEYS,
        _KEY_ENDS,
        out,
        ends,
    )
    return out[: ends[-1]], ends


def _typed_block(block: BinBlock, where: str) -> BinBlock:
    """Return a block as the kernels take it; a block whose arrays do not fit each other is an error."""
    ids = as_int_array(block.input_ids, f"{where}: input_ids", ndim=2)
    mask = as_int_array(block.loss_mask, f"{where}: loss_mask", ndim=2)
    lengths, offsets, starts = (
        cast_checked(as_int_array(getattr(block, name), f"{where}: {name}"), "<u4", 2**32, f"{where}: {name}")
        for name in ("packed_len", "seq_offsets", "seq_starts")
    )
    if ids.shape != mask.shape or len(lengths) != len(ids) or len(offsets) != len(ids) + 1:
        raise InvalidInputError(
            f"{where}: input_ids {ids.shape}, loss_mask {mask.shape}, packed_len {lengths.shape} and seq_offsets "
            f"{offsets.shape} do not belong together"
        )
    if ids.dtype.str not in ("<i4", "<u2"):
        ids = cast_checked(ids, "<i4", _ID_LIMIT, f"{where}: input_ids")
    return BinBlock(
        input_ids=np.ascontiguousarray(ids, "<i4"),
        loss_mask=np.ascontiguousarray(cast_checked(mask, "|u1", 2**8, f"{where}: loss_mask")),
        packed_len=lengths,
        seq_offsets=offsets,
        seq_starts=starts,
    )


def _npy_header(num_bins: int) -> bytes:
    text = f"{{'descr': '|O', 'fortran_order': False, 'shape': ({num_bins},), }}".encode()
    padding = -(10 + len(text) + 1) % 64
    return b"\x93NUMPY\x01\x00" + (len(text) + padding + 1).to_bytes(2, "little") + text + b" " * padding + b"\n"


def _pickled_int(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little")
