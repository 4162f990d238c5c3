"""Where a preparation writes: local paths, and the URLs that their content goes to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_packed_sft.disk.checksum import checksum
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.remote.filesystem import base_name
from megatron_packed_sft.remote.node_cache import default_directory
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

    def refuse_unshared(self, work_dir: str | None, executor: str) -> None:
        """Refuse a work directory that other nodes cannot see.

        Args:
            work_dir: as the user gave it.
            executor: the kind that needs it.
        """
        if self.work_url is not None or (self.url is not None and work_dir is None):
            found = "work_dir is a URL" if self.work_url is not None else "output is a URL and no work_dir is given"
            raise InvalidInputError(
                f"executor={executor} works on several nodes at once, but {found}; set work_dir to a path on a disk "
                "that all nodes share"
            )


def places_of(output: str, work_dir: str | None) -> Places:
    """Return the places of a run; a work directory that the user does not name is beside a local output.

    Example:
        >>> places_of("/data/my_dataset", None).work_dir
        PosixPath('/data/my_dataset.work')
    """
    work_url = work_dir if work_dir and is_url(work_dir) else None
    local_work = local_path(work_dir, "work_dir") if work_dir and work_url is None else None
    if work_url is not None:
        local_work = _home_of(work_url)
    if is_url(output):
        name = base_name(output)
        if not name:
            raise InvalidInputError(f"output is {redacted(output)}; name a dataset below the bucket")
        home = local_work or _home_of(output)
        return Places(home / "upload" / f"{name}-{checksum(output.encode())[:8]}", home, output.rstrip("/"), work_url)
    local = local_path(output, "output")
    if not local.name:
        raise InvalidInputError(f"output is {output}; name a directory for prepare to create")
    home = local_work or local.with_name(f"{local.name}.work")
    if home == local:
        raise InvalidInputError(f"work_dir and output are both {local}; choose two directories")
    return Places(local, home, None, work_url)


def _home_of(url: str) -> Path:
    """Return where the work for a URL is done: in the user's cache, so that the next run finds it."""
    return default_directory() / "work" / f"{base_name(url)}-{checksum(url.rstrip('/').encode())[:8]}"
