"""Windows of a token stream, cut out of the mapped files on demand.

A window is a bin: seq_length + 1 tokens of one file, whose documents are its sequences. With `pack_sequences` each
document ends with its EOS; otherwise the window is one sequence. Every prediction inside a document
is trained.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError, ShardError, ShardFileError
from megatron_packed_sft.storage.bins import GatheredBins, PackedBin
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.interface import PackedShard
from megatron_packed_sft.storage.token_stream.files import GUESSED_ID_LIMIT, FlatFile, find_files
from megatron_packed_sft.storage.token_stream.options import (
    StreamMetadata,
    StreamOptions,
    read_metadata,
)
from megatron_packed_sft.support.array_files import ID_DTYPE, ID_LIMITS, SMALL_ID_DTYPE
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM, new_hasher
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.support.wording import plural

_NUM_SAMPLES = 64  # positions across the stream whose tokens are part of its fingerprint
_SAMPLE_BYTES = 4096
_NUM_TOKENS_SEARCHED = 1 << 24  # for the first EOS, if the samples have none


def open_token_stream(path: str | os.PathLike[str], options: StreamOptions | None = None) -> TokenStream:
    """Open a directory of flat files of token ids, or one such file; only headers and a few samples are read.

    Args:
        path: the directory or file.
        options: how to read it; by default windows of 2,048 predictions that ignore document boundaries.

    Example:
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> np.save(f"{home}/shard_0.npy", np.arange(10, dtype=np.uint16))
        >>> stream = open_token_stream(home, StreamOptions(seq_length=4))
        >>> len(stream), stream[1].input_ids.tolist()
        (2, [4, 5, 6, 7, 8])
    """
    location = local_path(path)
    if not os.path.lexists(location):
        raise ShardError(f"{location} does not exist; check the path")
    options = options or StreamOptions()
    if options.documents:
        raise InvalidInputError(
            f"{location} has no .idx with document boundaries; leave {options.spelled('documents')} out, or use "
            f"{options.spelled('pack_sequences')} with the EOS id"
        )
    metadata = read_metadata(location if location.is_dir() else location.parent)
    return TokenStream(location, find_files(location, options, metadata), options, metadata)


class TokenStream(PackedShard):
    """The windows of flat files, numbered from the first window of the first file.

    Args:
        path: the location of the files, for messages.
        files: the files in order, all of one dtype.
        options: how to cut them.
        metadata: as recorded beside them.

    Attributes:
        warnings: about files that are too short.
        notes: how many tokens are in no window.
    """

    def __init__(
        self, path: Path, files: Sequence[FlatFile], options: StreamOptions, metadata: StreamMetadata | None = None
    ) -> None:
        metadata = metadata or StreamMetadata()
        self.path = path
        self.files = tuple(files)
        self.options = options
        self.metadata = metadata
        # The EOS recorded with the stream takes precedence over the tokenizer's.
        known = (options.eos_id, metadata.eos_id, options.tokenizer_eos_id)
        self.eos_id = next((number for number in known if number is not None), None)
        self.vocab_size = metadata.vocab_size if options.vocab_size is None else options.vocab_size
        dtype = np.dtype(files[0].dtype)
        self._id_dtype = SMALL_ID_DTYPE if dtype.kind == "u" and dtype.itemsize <= 2 else ID_DTYPE
        self._id_limit = min(self.vocab_size or ID_LIMITS[self._id_dtype], ID_LIMITS[self._id_dtype])
        self._is_wide = dtype.itemsize == 8
        counts = [self._num_windows(one.num_tokens) for one in files]
        self.window_offsets = np.cumsum([0, *counts])
        self._offsets_list: list[int] = self.window_offsets.tolist()
        self.num_tokens = sum(one.num_tokens for one in files)
        self._refuse_no_window()
        if options.pack_sequences and self.eos_id is None:
            raise InvalidInputError(
                f"{options.spelled('pack_sequences')} separates the documents of {path} at their EOS, but no "
                f"EOS id is known; pass a tokenizer or {options.spelled('eos_id')}"
            )
        samples = self._samples()
        self._refuse_wrong_guess(samples)
        if options.pack_sequences:
            self._refuse_no_eos(samples)
        self._fingerprint = self._hashed(samples)
        self.warnings, self.notes = self._remarks(counts)

    def __len__(self) -> int:
        return self._offsets_list[-1]

    @property
    def pack_size(self) -> int:
        """Tokens per window."""
        return self.options.window_length

    @property
    def fingerprint(self) -> str:
        """A checksum of names, sizes, dtype, options and 64 samples of the content.

        It does not change with content between the samples as long as all sizes stay the same.
        """
        return self._fingerprint

    @property
    def num_files(self) -> int:
        """The number of files."""
        return len(self.files)

    @property
    def dtype(self) -> str:
        """NumPy's name of the files' dtype."""
        return np.dtype(self.files[0].dtype).name

    @property
    def figures(self) -> BinFigures:
        """The figures known without reading the windows; with `pack_sequences`, those of documents are unknown."""
        width, num_windows = self.pack_size, len(self)
        known: dict[str, Any] = {}
        if not self.options.pack_sequences:
            known = {
                "num_sequences": num_windows,
                "num_tokens": num_windows * width,
                "num_loss_tokens": num_windows * (width - 1),
                "max_seqs_per_bin": 1,
                "max_seq_len": width,
                "min_packed_len": width,
            }
        return BinFigures(
            num_bins=num_windows,
            pack_size=width,
            max_input_len=width - 1,
            vocab_size=self.metadata.vocab_size,
            pad_id=self.eos_id,
            tokenizer=self.metadata.tokenizer,
            **known,
        )

    def __getitem__(self, index: int) -> PackedBin:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {self.path}, which has {len(self)}")
        gathered = self.gather([index])
        length = int(gathered.lengths[0])
        starts = gathered.seq_starts
        is_empty = gathered.is_empty is not None and bool(gathered.is_empty[0])
        loss_mask = np.full(length, not is_empty, np.uint8)
        loss_mask[starts[1:] - 1] = 0
        loss_mask[-1] = 0
        return PackedBin(gathered.input_ids[:length], loss_mask, starts)

    def place(self, index: int) -> tuple[FlatFile, int]:
        """Return the file that holds a window, and the position of the window's first token in it."""
        number = bisect.bisect_right(self._offsets_list, index) - 1
        return self.files[number], (index - self._offsets_list[number]) * self.options.stride

    def window(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens of one window as int64, in an array of its own, with every id checked."""
        file, start = self.place(index)
        ids = file.tokens(start, start + self.pack_size)
        # As unsigned numbers, negative ids are huge, and one comparison covers both ends.
        if int(ids.max()) >= self._id_limit or (ids.dtype.kind == "i" and int(ids.min()) < 0):
            raise self._outside(index, int(np.argmax((ids >= self._id_limit) | (ids < 0))))
        return ids.astype(np.int64)

    def gather(self, windows: Sequence[int]) -> GatheredBins:
        """Copy windows out of their files, check every id and find the documents."""
        from megatron_packed_sft.storage.token_stream import window_kernel

        num_windows, width = len(windows), self.pack_size
        if num_windows and not 0 <= min(windows) <= max(windows) < len(self):
            raise IndexError(f"windows {list(windows)} of {self.path}, which has {len(self)}")
        ids = np.empty((num_windows, width), self._id_dtype)
        for column, index in enumerate(windows):
            file, start = self.place(index)
            if self._is_wide:
                ids[column] = self.window(index)  # a cast to 32 bits would wrap what does not fit
            else:
                ids[column] = file.tokens(start, start + width)
        lengths = np.empty(num_windows, np.int64)
        seq_offsets = np.empty(num_windows + 1, np.int64)
        eos_id = self.eos_id if self.options.pack_sequences and self.eos_id is not None else -1
        seq_starts = np.empty(num_windows if eos_id < 0 else num_windows * width, np.uint32)
        is_empty = np.empty(num_windows, np.bool_)
        window, position = window_kernel.find_documents(
            ids, eos_id, self._id_limit, lengths, seq_offsets, seq_starts, is_empty
        )
        if window >= 0:
            raise self._outside(windows[window], position)
        return GatheredBins(
            ids.reshape(-1),
            np.ones(ids.size, np.uint8),  # also at the last token of a document, which batches ignore
            seq_starts[: seq_offsets[-1]],
            np.arange(num_windows) * width,
            lengths,
            seq_offsets[:-1],
            seq_offsets[1:],
            is_empty=is_empty,
        )

    def longest_input(self) -> int:
        """Return the number of predictions per window."""
        return self.pack_size - 1

    def advise(self, windows: Iterable[int]) -> None:
        """Ask the kernel to read these windows ahead."""
        for index in windows:
            file, start = self.place(index)
            file.advise(start, start + self.pack_size)

    def __repr__(self) -> str:
        files = plural(len(self.files), "file")
        return f"TokenStream({str(self.path)!r}, {len(self):,} windows of {self.pack_size} in {files})"

    def _num_windows(self, num_tokens: int) -> int:
        width = self.options.window_length
        return (num_tokens - width) // self.options.stride + 1 if num_tokens >= width else 0

    def _outside(self, window: int, position: int) -> ShardFileError:
        file, start = self.place(window)
        value = int(file.tokens(start + position, start + position + 1)[0])
        return ShardFileError(
            f"{file.path}: the token at position {start + position:,} is {value}, not in 0..{self._id_limit - 1}; use "
            f"the tokenizer that made the stream, or pass the right {self.options.spelled('dtype')}"
        )

    def _refuse_no_window(self) -> None:
        if not len(self):
            longest = max(one.num_tokens for one in self.files)
            raise InvalidInputError(
                f"{self.path}: no file is as long as a window of {self.pack_size:,} tokens, the longest has "
                f"{longest:,}; lower {self.options.spelled('seq_length')} to at most {max(longest - 1, 1):,}, or name "
                "other files"
            )

    def _samples(self) -> list[npt.NDArray[Any]]:
        """Return a few tokens from positions across the stream, read without mapping."""
        itemsize = np.dtype(self.files[0].dtype).itemsize
        count = _SAMPLE_BYTES // itemsize
        ends = np.cumsum([one.num_tokens for one in self.files])
        places = np.unique(np.linspace(0, max(self.num_tokens - count, 0), _NUM_SAMPLES).astype(np.int64))
        samples = []
        for place, number in zip(places.tolist(), np.searchsorted(ends, places, side="right").tolist(), strict=True):
            file = self.files[number]
            inside = place - int(ends[number]) + file.num_tokens
            data = file.read(file.data_offset + inside * itemsize, min(count, file.num_tokens - inside) * itemsize)
            samples.append(np.frombuffer(data, file.dtype))
        return samples

    def _refuse_wrong_guess(self, samples: Sequence[npt.NDArray[Any]]) -> None:
        is_guess = self.files[0].path.suffix == ".bin" and self.options.dtype is None and self.metadata.dtype is None
        if not is_guess:
            return
        largest = max(int(one.max()) for one in samples)
        if largest >= GUESSED_ID_LIMIT:
            raise InvalidInputError(
                f"{self.path}: the sizes of its .bin files suggest {self.dtype}, but then one id is "
                f"{largest:,}, which no tokenizer has; set {self.options.spelled('dtype')} to uint16, or to "
                f"{self.dtype} if that is right"
            )

    def _refuse_no_eos(self, samples: Sequence[npt.NDArray[Any]]) -> None:
        if any((one == self.eos_id).any() for one in samples):
            return
        num_searched = 0
        for file in self.files:
            count = min(file.num_tokens, _NUM_TOKENS_SEARCHED - num_searched)
            if any((tokens == self.eos_id).any() for _, tokens in file.blocks(0, count)):
                return
            num_searched += count
        raise InvalidInputError(
            f"{self.path}: {self.options.spelled('pack_sequences')} is on, but the EOS id {self.eos_id} is not among "
            f"the first {num_searched:,} tokens nor in {len(samples)} samples of the rest; check the tokenizer or "
            f"{self.options.spelled('eos_id')}, or leave pack_sequences out"
        )

    def _hashed(self, samples: Sequence[npt.NDArray[Any]]) -> str:
        options = self.options
        hasher = new_hasher(DEFAULT_ALGORITHM)
        identity = (options.seq_length, options.stride, self.eos_id if options.pack_sequences else None)
        hasher.update(repr(identity).encode())
        for one in self.files:
            hasher.update(f"{one.path.name}\0{one.size}\0{one.dtype}\n".encode())
        for sample in samples:
            hasher.update(sample.tobytes())
        return hasher.hexdigest()

    def _remarks(self, counts: Sequence[int]) -> tuple[list[str], list[str]]:
        """Return warnings and notes."""
        warnings, notes = [], []
        short = [one for one, count in zip(self.files, counts, strict=True) if not count]
        if short:
            are = "is" if len(short) == 1 else "are"
            warnings.append(
                f"{self.path}: {len(short):,} of {plural(len(self.files), 'file')} {are} shorter than a window of "
                f"{self.pack_size:,} tokens and {are} skipped, such as {short[0].path.name} with "
                f"{short[0].num_tokens:,}; lower {self.options.spelled('seq_length')} to use "
                f"{'it' if len(short) == 1 else 'them'}"
            )
        num_held = sum((count - 1) * self.options.stride + self.pack_size for count in counts if count)
        num_unused = self.num_tokens - num_held
        if num_unused:
            notes.append(
                f"{self.path}: {num_unused:,} of {self.num_tokens:,} tokens "
                f"({100 * num_unused / self.num_tokens:.2g}%), after the last window of each file, are not used"
            )
        return warnings, notes
