"""How bins are read: whether they are verified, and whether files are mapped."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_packed_sft.errors import InvalidInputError

FIRST_READ = "first_read"
ALWAYS = "always"
NEVER = "never"
VERIFY = (FIRST_READ, ALWAYS, NEVER)
MMAP = "mmap"
PREAD = "pread"
ACCESS = (MMAP, PREAD)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How the bins of shards are read.

    Args:
        verify: compare a bin with its checksum at the `first_read` by a process, `always` or `never`.
        access: `mmap` maps the files; `pread` reads each bin into memory of its own, so that a file which is cut
            meanwhile is an error and never the end of the process (SIGBUS).

    Example:
        >>> ReadOptions(verify="always").access
        'mmap'
    """

    verify: str = FIRST_READ
    access: str = MMAP

    def __post_init__(self) -> None:
        for name, value, known in (("verify", self.verify, VERIFY), ("access", self.access, ACCESS)):
            if value not in known:
                raise InvalidInputError(f"{name} is {value!r}; choose from {', '.join(known)}")
