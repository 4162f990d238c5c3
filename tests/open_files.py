"""What this process holds open of a folder. A count of all its descriptors would depend on other tests."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_files(folder: Path) -> list[str]:
    """The files below `folder` that have a descriptor in this process, once for each descriptor."""
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own, or one that another thread has closed since
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(target for target in targets if target.startswith(f"{folder.resolve()}/"))


def mapped_files(folder: Path) -> list[str]:
    """The files below `folder` that this process has mapped, once for each map."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted(line.split(maxsplit=5)[5] for line in lines if f" {folder.resolve()}/" in line)
