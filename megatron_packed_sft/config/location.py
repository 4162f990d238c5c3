"""Where the configuration files lie: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

from megatron_packed_sft.errors import MissingDependencyError


def config_directory() -> Path:
    """The directory that holds prepare.yaml, train.yaml and their groups.

    Example:
        >>> (config_directory() / "storage" / "memmap_v1.yaml").exists()
        True
    """
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "storage").is_dir():
            return candidate
    raise MissingDependencyError(
        f"{package} came without its configuration files; install megatron-packed-sft again, from a wheel or a checkout"
    )
