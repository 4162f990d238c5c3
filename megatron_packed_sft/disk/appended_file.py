"""A raw binary file that grows at its end and is checksummed as it is written: memory stays constant."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.disk.atomic import os_errors, write_at
from megatron_packed_sft.disk.checksum import new_hasher
from megatron_packed_sft.disk.json_document import FileRecord


class AppendedFile:
    """Writes one file without a header, such as a shard of token ids.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "tokens.bin"
        >>> file = AppendedFile(path, "xxh3_128")
        >>> file.append(np.array([1, 2], "<u2")); file.append(np.array([3], "<u2"))
        >>> file.finish().bytes, np.fromfile(path, "<u2").tolist()
        (6, [1, 2, 3])
    """

    def __init__(self, path: Path, algorithm: str) -> None:
        self.path = path
        self.size = 0
        self._hasher = new_hasher(algorithm)
        with os_errors("write", path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def append(self, values: npt.NDArray[Any]) -> None:
        """Write more values, in the dtype that they have."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        with os_errors("write", self.path, self.size + len(data)):
            write_at(self._fd, data, self.size)
        self._hasher.update(data)
        self.size += len(data)

    def finish(self) -> FileRecord:
        """Make the file durable, close it and return its size and checksum."""
        with os_errors("write", self.path, self.size):
            os.fsync(self._fd)
        self.close()
        return FileRecord(self.size, self._hasher.hexdigest())

    def close(self) -> None:
        """Close the file as it is; harmless when called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
