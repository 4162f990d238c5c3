"""What every writer of files has in common: it stages, it publishes whole, or it leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_packed_sft.disk.atomic import Staging
from megatron_packed_sft.errors import WriterStateError


class StagedWriter:
    """A staging directory and the open files in it, tidied up together.

    Subclasses write into `self._staging.path`, register what must be closed with `self._cleanup.callback`, and publish
    from their `finalize`. As a context manager a writer leaves nothing behind unless it was published.

    Example:
        >>> class OneFileWriter(StagedWriter):
        ...     def finalize(self):
        ...         self._require_open()
        ...         with self._closing():
        ...             (self._staging.path / "data").write_text("whole")
        ...             self._staging.publish()
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> with OneFileWriter(f"{home}/result") as writer:
        ...     writer.finalize()
        >>> os.listdir(home)
        ['result']
    """

    def __init__(self, target: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self._staging = Staging(target, overwrite=overwrite)
        self._cleanup = contextlib.ExitStack()
        self._cleanup.callback(self._staging.discard)
        self._is_open = True

    @property
    def target(self) -> Path:
        """What the writer publishes."""
        return self._staging.target

    def abort(self) -> None:
        """Give up: nothing is published and the staging directory is removed. Harmless after `finalize`."""
        self._is_open = False
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _require_open(self) -> None:
        if not self._is_open:
            raise WriterStateError(f"the writer of {self.target} is closed; open a new one to write more")

    @contextlib.contextmanager
    def _aborting_on_error(self) -> Iterator[None]:
        """For steps that leave no clean state behind when they fail."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """For the last step: the writer is closed after it, and what was not published is gone."""
        try:
            yield
        finally:
            self.abort()
