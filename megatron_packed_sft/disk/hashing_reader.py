"""Reading a file from front to back, and its checksum on the way."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from megatron_packed_sft.disk.atomic import os_errors
from megatron_packed_sft.disk.checked_files import CheckedFile
from megatron_packed_sft.disk.checksum import Hasher, new_hasher
from megatron_packed_sft.errors import ShardError


class HashingReader:
    """Reads a file from front to back into the caller's buffers and hashes what it reads."""

    def __init__(self, file: CheckedFile, algorithm: str, bar: tqdm[Any]) -> None:
        self._path = file.path
        self._fd = file.fd
        self._bar = bar
        self._hasher: Hasher = new_hasher(algorithm)
        self._position = 0
        self.remaining = file.size
        self.read_into(np.empty(file.header.data_offset, np.uint8))

    def read_into(self, array: npt.NDArray[Any]) -> None:
        """Fill `array` with the file's next bytes."""
        view = array.reshape(-1).view(np.uint8).data
        filled = 0
        while filled < len(view):
            with os_errors("read", self._path):
                count = os.preadv(self._fd, [view[filled:]], self._position)
            if count == 0:
                raise ShardError(f"{self._path} became shorter while it was read; stop whoever writes to it")
            filled += count
            self._position += count
        self._hasher.update(view)
        self.remaining -= filled
        self._bar.update(filled)

    def hexdigest(self) -> str:
        """The checksum of everything read so far."""
        return self._hasher.hexdigest()
