"""The directory a preparation works in: one at a time, and a receipt for each stage that is whole.

OUTPUT.work/
  lock                             held while a preparation runs
  tokens/train/part_000000 ...     the token store of a split
  tokens/receipts/unit_000000.json what became of each unit of work; its parts have the same number
  encode.json                      the receipt for all of them
  plans/train.npz, train.json      the plan of a split, and its receipt
  published/OUTPUT-1a2b3c4d.json   the receipt of each output that was made from here
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from megatron_packed_sft._version import __version__
from megatron_packed_sft.disk import json_document
from megatron_packed_sft.disk.atomic import os_errors, replace_file
from megatron_packed_sft.disk.checksum import checksum
from megatron_packed_sft.errors import InvalidInputError, ManifestError


def fingerprint_of(document: Mapping[str, Any]) -> str:
    """A checksum of plain settings, equal for equal settings; every fingerprint depends on our version, too.

    Example:
        >>> fingerprint_of({"pack_size": 8}) == fingerprint_of({"pack_size": 9})
        False
    """
    return checksum(json_document.render({**document, "version_of_prepare": __version__}))


class WorkDirectory:
    """An opened and locked work directory; a context manager.

    Example:
        >>> import tempfile
        >>> with WorkDirectory(tempfile.mkdtemp() + "/data.work") as work:
        ...     work.write_receipt("plan", "ab12", {"num_bins": 3})
        ...     work.receipt("plan", "ab12")["num_bins"]
        3
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        with os_errors("create", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not (self.path / "lock").exists() and any(self.path.iterdir()):
                raise InvalidInputError(
                    f"{self.path} holds files that no preparation made; choose a new or an empty directory as work_dir"
                )
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise InvalidInputError(
                f"another preparation is working in {self.path}; wait for it, or choose another output or work_dir"
            ) from None
        except OSError:
            pass  # a file system without locks; publication is still whole or absent

    @property
    def tokens(self) -> Path:
        """Where the token stores lie, one per split."""
        return self.path / "tokens"

    def plan(self, split: str) -> Path:
        """Where the plan of a split lies."""
        return self.path / "plans" / f"{split}.npz"

    def receipt(self, name: str, fingerprint: str) -> dict[str, Any] | None:
        """What a stage noted when it was done with these inputs; None when it was not, or the note is damaged."""
        file = self.path / f"{name}.json"
        try:
            document = json_document.parse(file.read_bytes(), str(file))
        except (OSError, ManifestError):
            return None
        result = document.get("result")
        return result if document.get("fingerprint") == fingerprint and isinstance(result, dict) else None

    def write_receipt(self, name: str, fingerprint: str, result: Mapping[str, Any]) -> None:
        """Note that a stage is whole. Comes last: what it vouches for must be durable."""
        file = self.path / f"{name}.json"
        with os_errors("create", file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json_document.render({"fingerprint": fingerprint, "result": dict(result)}))

    def forget(self) -> None:
        """Remove everything that earlier runs left, and nothing else: somebody may keep other things here."""
        with os_errors("clear", self.path):
            (self.path / "encode.json").unlink(missing_ok=True)
            for name in ("tokens", "plans", "published"):
                shutil.rmtree(self.path / name, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)
