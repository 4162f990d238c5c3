"""Write a sharded state dict with Megatron-Core, whose errors do not say what is wrong.

Megatron-Core forks processes that write, and torch's writer calls a full disk "unexpected pos 704 vs 598". Here such
an error names the path, the reason and the bytes that are needed, and no writer outlives its rank.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_packed_sft.disk.atomic import os_errors
from megatron_packed_sft.errors import NoSpaceError, PackedSFTError, StorageIOError
from megatron_packed_sft.support.processes import forks_die_with_this_process

_REMEDIES: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space or choose another output"),
    errno.EFBIG: "raise the file-size limit (ulimit -f)",
}
_SMALL_FILES: Final = 1 << 20  # room for .metadata and the like
# What torch says when a file takes less than it writes.
_STREAM_WRITER = re.compile(r"inline_container|PytorchStreamWriter|unexpected pos")


def write_tensors(tensors: Mapping[str, Any], folder: Path, target: Path) -> None:
    """Write a sharded state dict with Megatron-Core; a collective call.

    Args:
        tensors: the sharded state dict.
        folder: an existing one, where to.
        target: what the folder will be called, for messages.
    """
    from megatron.core import dist_checkpointing

    _gather_results_in_process()
    needed = _num_bytes(tensors)
    # Megatron-Core forks its writers. One that outlived its rank would keep its memory and the staging lock.
    with _write_errors(folder, target, needed), forks_die_with_this_process():
        dist_checkpointing.save(tensors, str(folder))


def _gather_results_in_process() -> None:
    """Keep Megatron-Core from starting a helper process to gather the results of its writers.

    Only saving in the background needs one. torchrun forwards SIGTERM to all processes of a rank, so the helper would
    be gone just when the run saves because of that signal. Megatron-Core has no public switch for this.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


def _num_bytes(tensors: Mapping[str, Any]) -> int:
    """Return the bytes of what all ranks write; a collective call."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    values = (one for one in nested_values(tensors) if is_main_replica(getattr(one, "replica_id", 0)))
    own = sum(one.data.nbytes for one in values if isinstance(getattr(one, "data", None), torch.Tensor))
    shares: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(shares, own)
    return sum(shares)


@contextmanager
def _write_errors(folder: Path, target: Path, needed: int) -> Iterator[None]:
    """Turn whatever comes of a file that cannot be written into one sentence."""
    try:
        with os_errors("write", target, needed):
            yield
    except CheckpointException as error:  # of all ranks, with the reasons on the first
        reasons = [reason for reason, _ in error.failures.values()]
    except PackedSFTError as error:
        if getattr(error, "errno", None) not in _REMEDIES:
            raise
        reasons = [error]
    except RuntimeError as error:
        if not _STREAM_WRITER.search(str(error)):
            raise
        reasons = [error]
    else:
        return
    raise _explained(reasons, folder, target, needed) from None


def _explained(reasons: list[BaseException], folder: Path, target: Path, needed: int) -> StorageIOError:
    found = [getattr(reason, "errno", None) for reason in reasons]
    number = next((one for one in found if one in _REMEDIES), None) or _probed(folder, needed)
    if number in _REMEDIES:
        return NoSpaceError(
            f"cannot write {target}: {os.strerror(number)}; it needs {needed:,} bytes; {_REMEDIES[number]}, then run "
            "the same command again"
        )
    said = "; ".join(str(reason).partition("\n")[0] for reason in reasons) or "see rank 0's output"
    return StorageIOError(
        f"cannot write {target}: {said}; free some space or choose another output, then run the same command again"
    )


def _probed(folder: Path, needed: int) -> int:
    """Return why the system refuses the bytes that are still missing in a folder; 0 if it does not."""
    probe = folder / ".probe"
    try:
        written = sum(one.stat().st_size for one in folder.iterdir())
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, max(needed - written, 0) + _SMALL_FILES)
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                probe.unlink()
    except OSError as error:
        return error.errno or 0
    return 0
