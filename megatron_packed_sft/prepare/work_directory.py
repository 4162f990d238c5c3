"""Where a preparation works and writes: one run at a time, and a receipt for each finished piece of work.

OUTPUT.work/
  lock                                    held while a preparation runs; the calls of an array share it
  tokens/train/part_000000 ...            the token store of a split, one part per slice of the input
  scan/0123456789abcdef.json              checksum and cuts of a file, from the call of an array that read it
  tokens/receipts/slice_000000.json       what became of each slice; its parts have the same number
  tokens/receipts/slice_000000.train.npy  line of each of its sequences in the input file
  encode.json                             the receipt of all slices
  array.json, array.lock, calls/          how many calls of an array share the slices, and which are running
  plans/train.npz, train.json             the plan of a split, and its receipt
  published/OUTPUT-1a2b3c4d.json          the receipt of each output that was made from here
  scratch/                                files on their way to an object store

`places_of` decides where it is, on a local disk. `remote_work` keeps its content in an object store.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatron_packed_sft._version import __version__
from megatron_packed_sft.errors import InvalidInputError, ManifestError, PackedSFTError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.prepare.sources import SPLITS
from megatron_packed_sft.remote.filesystem import base_name, is_of_one_process, refuse_read_only
from megatron_packed_sft.remote.node_cache import default_directory
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.atomic import os_errors, replace_file
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.paths import is_url, local_path, redacted
from megatron_packed_sft.tokens.part import TokenPart
from megatron_packed_sft.tokens.store import TokenStore, open_token_store, publish_store
from megatron_packed_sft.tokens.validate import validate_token_store
from megatron_packed_sft.tokens.writer import part_path

_LAYOUT = 5  # of the directory, token stores included; work in another layout is done again


@dataclass(frozen=True)
class Places:
    """The output and the work directory of a run.

    Args:
        output: the directory to write; if the output is a URL, one inside the work directory, until it is uploaded.
        work_dir: on a local disk.
        url: to upload the output to, or None.
        work_url: that keeps the work directory between runs, or None.
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
        """The target without credentials, for messages."""
        return redacted(str(self.target))


def places_of(output: str, work_dir: str | None, executor: str = "local") -> Places:
    """Return where a run works and writes.

    The default work directory is beside the output. If the output is a URL and one machine does the work, it is in the
    user's cache.

    Args:
        output: as the user gave it.
        work_dir: as the user gave it, or None.
        executor: its kind.

    Example:
        >>> places_of("/data/my_dataset", None).work_dir
        PosixPath('/data/my_dataset.work')
    """
    if executor == "array" and (is_url(work_dir) if work_dir else is_url(output)):
        raise InvalidInputError(
            f"executor=array needs a work directory on a disk that all calls share, and {redacted(work_dir or output)} "
            "is a URL; set work_dir to a path on such a disk, or use executor=ray, which needs none"
        )
    if work_dir is None and is_url(output) and executor == "ray":
        work_dir = f"{output.rstrip('/')}.work"
    work_url = work_dir if work_dir and is_url(work_dir) else None
    if work_url is not None and executor == "ray" and is_of_one_process(work_url):
        raise InvalidInputError(
            f"executor=ray works on several nodes, which cannot see {redacted(work_url)}; set work_dir to a path on a "
            "disk that all nodes share, or to the URL of an object store"
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
    """Return the local directory for work on a URL: in the user's cache, so that the next run finds it."""
    return default_directory() / "work" / f"{base_name(url)}-{checksum(url.rstrip('/').encode())[:8]}"


def fingerprint_of(document: Mapping[str, Any]) -> str:
    """Return a checksum of plain settings; it also depends on our version and on the layout of the work directory.

    Example:
        >>> fingerprint_of({"pack_size": 8}) == fingerprint_of({"pack_size": 9})
        False
    """
    return checksum(json_document.render({**document, "version_of_prepare": __version__, "layout": _LAYOUT}))


class WorkDirectory:
    """An opened and locked work directory; a context manager.

    Args:
        path: created if it does not exist.
        shared: several processes may work here at once, each on slices of its own.

    Example:
        >>> import tempfile
        >>> with WorkDirectory(tempfile.mkdtemp() + "/data.work") as work:
        ...     work.write_receipt("plan", "ab12", {"num_bins": 3})
        ...     work.receipt("plan", "ab12")["num_bins"]
        3
    """

    def __init__(self, path: str | os.PathLike[str], *, shared: bool = False) -> None:
        self.path = Path(os.path.abspath(path))
        self._held: list[int] = []
        with os_errors("create", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            # In this order, because another call of an array may be creating it at this moment.
            if any(self.path.iterdir()) and not (self.path / "lock").exists():
                raise InvalidInputError(f"work_dir {self.path} holds other files; choose a new or empty directory")
        self._lock = self._open("lock")
        if not _try_lock(self._lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            self.close()
            raise InvalidInputError(
                f"another preparation is working in {self.path}; wait for it, or choose another output or work_dir"
            )
        if not shared:
            shutil.rmtree(self.path / "scratch", ignore_errors=True)  # of a run that was killed

    @property
    def shown(self) -> str:
        """Its path or URL without credentials, for messages."""
        return str(self.path)

    def scratch(self) -> Path:
        """Return a directory for files on their way to a store; it is emptied when a run begins."""
        with os_errors("create", self.path / "scratch"):
            (self.path / "scratch").mkdir(exist_ok=True)
        return self.path / "scratch"

    @property
    def tokens(self) -> Path:
        """The directory of the token stores, one per split."""
        return self.path / "tokens"

    def load_plan(self, split: str) -> PackPlan:
        """Return the plan that was saved for a split; raise an error if it is damaged or gone."""
        return PackPlan.load(self._plan_file(split))

    def save_plan(self, split: str, plan: PackPlan) -> None:
        """Save the plan of a split; its receipt comes after it."""
        file = self._plan_file(split)
        with os_errors("create", file.parent):
            file.parent.mkdir(exist_ok=True)
        plan.save(file)

    def _plan_file(self, split: str) -> Path:
        return self.path / "plans" / f"{split}.npz"

    def has_slice(self, number: int, noted: Mapping[str, Any]) -> bool:
        """Return whether everything that the receipt of a slice lists is there, as far as opening it tells."""
        for split, fingerprint in noted["parts"].items():
            try:
                if TokenPart.open(part_path(self.tokens / split, number)).fingerprint != fingerprint:
                    return False
            except PackedSFTError:
                return False
            if not record_numbers_path(self.tokens, split, number).exists():
                return False
        return True

    def record_numbers(self, split: str, number: int) -> Path:
        """Return the file with the line of the input that each sequence of a part came from."""
        return record_numbers_path(self.tokens, split, number)

    def open_stores(self, fingerprints: Mapping[str, str]) -> dict[str, TokenStore] | None:
        """Return the token stores of some splits; None unless all exist with these fingerprints."""
        stores = {}
        for split, fingerprint in fingerprints.items():
            with suppress(PackedSFTError):
                store = open_token_store(self.tokens / split)
                if store.fingerprint == fingerprint:
                    stores[split] = store
        return stores if len(stores) == len(fingerprints) else None

    def publish_parts(self, parts: Mapping[str, Mapping[int, str]]) -> dict[str, TokenStore]:
        """Publish the parts of this run as token stores, and remove the parts of other runs.

        Args:
            parts: split -> number of a part -> its fingerprint.
        """
        stores = {split: _publish_parts(self.tokens / split, list(some)) for split, some in sorted(parts.items())}
        for split in SPLITS if stores else ():
            if split not in stores:
                shutil.rmtree(self.tokens / split, ignore_errors=True)
        return stores

    def remove_damaged_parts(self, stores: Iterable[TokenStore], *, progress: bool) -> int:
        """Check every byte of every part, remove the damaged ones and return how many there were.

        Opening a store checks sizes only. Without this, a flipped bit would get a new, matching checksum in a shard.
        """
        num_removed = 0
        for store in stores:
            if validate_token_store(store.path, progress=progress).ok:
                continue
            for part in store.parts:
                if not validate_token_store(part.path).ok:
                    num_removed += 1
                    with os_errors("remove", part.path):
                        shutil.rmtree(part.path)
        return num_removed

    def receipt(self, name: str, fingerprint: str | None) -> dict[str, Any] | None:
        """Return what a stage noted when it finished; None if it has not finished, or if the receipt is damaged.

        Args:
            name: of the receipt.
            fingerprint: of everything that decides the result; None accepts any.
        """
        try:
            return parsed_receipt((self.path / f"{name}.json").read_bytes(), fingerprint)
        except OSError:
            return None

    def write_receipt(self, name: str, fingerprint: str, result: Mapping[str, Any]) -> None:
        """Note that work is done. Call this last: what the receipt lists must be durable."""
        file = self.path / f"{name}.json"
        with os_errors("create", file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, rendered_receipt(fingerprint, result))

    def exclude_others(self) -> bool:
        """Keep other calls of an array out until `admit_others`; return False if one is working here."""
        return _try_lock(self._lock, fcntl.LOCK_EX)

    def admit_others(self) -> None:
        """Let other calls of an array work here again."""
        _try_lock(self._lock, fcntl.LOCK_SH)

    def hold_lock(self, name: str) -> bool:
        """Take a named lock until the directory is closed; return False if another process has it."""
        return _try_lock(self._open(f"{name}.lock"), fcntl.LOCK_EX)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold a named lock during the block; wait for the process that has it."""
        lock = self._open(f"{name}.lock")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._held.remove(lock)
            os.close(lock)

    def _open(self, name: str) -> int:
        path = self.path / name
        with os_errors("create", path):
            path.parent.mkdir(exist_ok=True)
            self._held.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        return self._held[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all locks."""
        while self._held:
            os.close(self._held.pop())


def _try_lock(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks; what is published is still whole or absent
    return True


def parsed_receipt(data: bytes, fingerprint: str | None) -> dict[str, Any] | None:
    """Return what a receipt notes; None if it is damaged, or of another fingerprint (None accepts any)."""
    try:
        document = json_document.parse(data, "the receipt")
    except ManifestError:
        return None
    result = document.get("result")
    matches = fingerprint is None or document.get("fingerprint") == fingerprint
    return result if matches and isinstance(result, dict) else None


def rendered_receipt(fingerprint: str, result: Mapping[str, Any]) -> bytes:
    """Return the bytes of a receipt.

    Example:
        >>> parsed_receipt(rendered_receipt("ab12", {"num_bins": 3}), "ab12")
        {'num_bins': 3}
    """
    return json_document.render({"fingerprint": fingerprint, "result": dict(result)})


def slice_receipt(number: int) -> str:
    """Return the name of a slice's receipt.

    Example:
        >>> slice_receipt(3)
        'tokens/receipts/slice_000003'
    """
    return f"tokens/receipts/slice_{number:06d}"


def record_numbers_path(tokens: Path, split: str, number: int) -> Path:
    """Return the file with the line of the input that each sequence of a part came from."""
    return tokens / "receipts" / f"slice_{number:06d}.{split}.npy"


def part_number(part: TokenPart) -> int:
    """Return the number of the slice that a part was made from."""
    return int(part.path.name.removeprefix("part_"))


def _publish_parts(store: Path, numbers: Sequence[int]) -> TokenStore:
    """List the parts of this run in store.json, and remove the parts of other runs."""
    wanted = {part_path(store, number).name for number in numbers}
    with os_errors("clear", store):
        missing = sorted(wanted - {entry.name for entry in os.scandir(store)})
        if missing:
            raise PackedSFTError(
                f"{store / missing[0]} was written, but is not here; work_dir must be on a disk that all nodes share"
            )
        for entry in os.scandir(store):
            if entry.name.lstrip(".").startswith("part_") and entry.name not in wanted:  # with a dot: unfinished
                shutil.rmtree(entry.path)
    return publish_store(store)
