"""The files of a checkpoint: known again by size and checksum. The ranks share the reading out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_packed_sft.disk.atomic import os_errors
from megatron_packed_sft.disk.checksum import DEFAULT_ALGORITHM, new_hasher
from megatron_packed_sft.errors import ShardFileError

_PIECE_BYTES = 1 << 22


def file_sizes(directory: Path) -> dict[str, int]:
    """Name -> bytes of all files below a directory, sorted.

    Example:
        >>> file_sizes(Path("runs/sft/checkpoints/step_000020"))  # doctest: +SKIP
        {'.metadata': 10721, '__0_0.distcp': 2301184, 'common.pt': 2146, 'metadata.json': 88}
    """
    with os_errors("list", directory):
        files = sorted(path for path in directory.rglob("*") if path.is_file())
        return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def make_durable(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Have these files on the disk for good; returns name -> checksum of what is in them.

    Example:
        >>> make_durable(staging, ["__0_0.distcp"])  # doctest: +SKIP
        {'__0_0.distcp': '06b05ab6733a618578af5f94892f3950'}
    """
    found = {}
    for name in names:
        with os_errors("write", directory / name), open(directory / name, "rb") as file:
            os.fsync(file.fileno())
        found[name] = _checksum(directory / name)
    return found


def refuse_missing(checkpoint: Path, sizes: Mapping[str, int]) -> None:
    """Refuse a checkpoint with a file that is missing, or has another size than was written.

    Example:
        >>> refuse_missing(Path("/no/checkpoint"), {})
    """
    found = file_sizes(checkpoint)
    for name, size in sizes.items():
        if found.get(name) != size:
            state = f"has {found[name]} bytes" if name in found else "is missing"
            raise ShardFileError(f"{checkpoint / name} {state}, and {size} were written; {_remedy(checkpoint)}")


def refuse_damaged(checkpoint: Path, checksums: Mapping[str, str], *, rank: int = 0, num_ranks: int = 1) -> None:
    """Refuse a checkpoint with a changed byte in one of the files that are this rank's to read.

    Example:
        >>> refuse_damaged(Path("/no/checkpoint"), {}, rank=1, num_ranks=2)
    """
    for name in sorted(checksums)[rank::num_ranks]:
        if _checksum(checkpoint / name) != checksums[name]:
            raise ShardFileError(f"{checkpoint / name} was damaged: its checksum differs; {_remedy(checkpoint)}")


def _remedy(checkpoint: Path) -> str:
    return f"restore it, or remove {checkpoint.name} to go on from the checkpoint before"


def _checksum(path: Path) -> str:
    hasher = new_hasher(DEFAULT_ALGORITHM)
    with os_errors("read", path), open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()
