"""Where a preparation writes: local paths, and the URLs that their content goes to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.remote.filesystem import base_name, is_of_one_process, refuse_read_only
from megatron_packed_sft.remote.node_cache import default_directory
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.paths import is_url, local_path, redacted


@dataclass(frozen=True)
class Places:
    """The output and the work directory of a run.

    Args:
        output: the directory that is written; of a URL it is inside the work directory until it was uploaded.
        work_dir: on a local disk.
        url: where the output is uploaded to, or None.
        work_url: where the work directory is kept between runs, or None.
    """

    output: Path
    work_dir: Path
    url: str | None = None
    work_url: str | None = None

    @property
    def target(self) -> Path | str:
        """What the user called the output: a path, or a URL."""
        return self.output if self.url is None else self.url

    @property
    def shown(self) -> str:
        """The target, for people."""
        return redacted(str(self.target))


def places_of(output: str, work_dir: str | None, executor: str = "local") -> Places:
    """Return the places of a run; a work directory that the user does not name is beside the output.

    Only of an output in a store, made on one machine, it is in the user's cache instead: nobody else needs it.

    Args:
        output: as the user gave it.
        work_dir: as the user gave it, or None.
        executor: its kind.

    Example:
        >>> places_of("/data/my_dataset", None).work_dir
        PosixPath('/data/my_dataset.work')
    """
    if work_dir is None and is_url(output) and executor != "local":
        work_dir = f"{output.rstrip('/')}.work"
    work_url = work_dir if work_dir and is_url(work_dir) else None
    if work_url is not None and executor != "local" and is_of_one_process(work_url):
        raise InvalidInputError(
            f"executor={executor} works on several nodes at once, which cannot see {redacted(work_url)}; set work_dir "
            "to a path on a disk that all nodes share, or to the URL of a store"
        )
    local_work = local_path(work_dir, "work_dir") if work_dir and work_url is None else None
    if work_url is not None:
        refuse_read_only(work_url, "work_dir")
        local_work = home_of(work_url)
    if is_url(output):
        refuse_read_only(output)
        name = base_name(output)
        if not name:
            raise InvalidInputError(f"output is {redacted(output)}; name a dataset below the bucket")
        home = local_work or home_of(output)
        return Places(home / "upload" / f"{name}-{checksum(output.encode())[:8]}", home, output.rstrip("/"), work_url)
    local = local_path(output, "output")
    if not local.name:
        raise InvalidInputError(f"output is {output}; name a directory for prepare to create")
    home = local_work or local.with_name(f"{local.name}.work")
    if home == local:
        raise InvalidInputError(f"work_dir and output are both {local}; choose two directories")
    return Places(local, home, None, work_url)


def home_of(url: str) -> Path:
    """Return where the work for a URL is done: in the user's cache, so that the next run finds it."""
    return default_directory() / "work" / f"{base_name(url)}-{checksum(url.rstrip('/').encode())[:8]}"
