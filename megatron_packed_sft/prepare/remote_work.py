"""A work directory in an object store, for Ray without a shared disk: receipts and token parts are objects.

    a worker:    ids, train, offsets, lines ─▶ manifest ─▶ receipt     of each slice, sent in this order
    the driver:  receipts, manifests and offsets ─▶ a local copy       never tokens

A slice is there when its receipt is, whichever process dies. Parts are fetched by the processes that read them. The
driver is the only coordinator: the store has no lock, so one preparation at a time may use a work directory at a URL.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.prepare.encode_worker import (
    EncodeSettings,
    SliceResult,
    SliceTask,
    encode_slice,
    receipt_of,
    start_encoder,
)
from megatron_packed_sft.prepare.work_directory import (
    WorkDirectory,
    home_of,
    record_numbers_path,
    rendered_receipt,
    slice_receipt,
)
from megatron_packed_sft.remote.downloads import fetch_files
from megatron_packed_sft.remote.filesystem import child
from megatron_packed_sft.remote.objects import (
    ObjectInfo,
    file_md5,
    list_objects,
    remove_object,
    write_object,
)
from megatron_packed_sft.remote.uploads import send_file
from megatron_packed_sft.support.json_document import MANIFEST
from megatron_packed_sft.support.paths import redacted
from megatron_packed_sft.tokens.manifest import OFFSETS, STORE
from megatron_packed_sft.tokens.part import TokenPart
from megatron_packed_sft.tokens.remote_store import RemotePart, outlined_part
from megatron_packed_sft.tokens.store import TokenStore, write_index
from megatron_packed_sft.tokens.writer import part_path

_OURS = ("encode.json", "tokens", "plans", "published")
_NUM_THREADS = 16
_NUM_THREADS_OF_A_WORKER = 4


class RemoteWorkDirectory(WorkDirectory):
    """A work directory in an object store, with a local copy of what is small.

    Args:
        url: of the directory.
        path: of the local copy, which only one preparation of this machine can use at a time.
    """

    def __init__(self, url: str, path: Path) -> None:
        self.url = url.rstrip("/")
        super().__init__(path)
        try:
            self._there = self._listed()
            self._fetch(name for name in self._there if name.endswith(".json"))
        except BaseException:
            self.close()
            raise

    @property
    def shown(self) -> str:
        """Its URL without credentials, for messages."""
        return redacted(self.url)

    def receipt(self, name: str, fingerprint: str | None) -> dict[str, Any] | None:
        """Return what a stage noted when it finished; None if it has not finished, or if the receipt is damaged."""
        return super().receipt(name, fingerprint) if self._fetch([f"{name}.json"]) else None

    def write_receipt(self, name: str, fingerprint: str, result: Mapping[str, Any]) -> None:
        """Note that work is done. Call this last: what the receipt lists must be in the store."""
        super().write_receipt(name, fingerprint, result)
        self._send(f"{name}.json")

    def load_plan(self, split: str) -> PackPlan:
        """Return the plan that was saved for a split; raise an error if it is damaged or gone."""
        self._fetch([f"plans/{split}.npz"])
        return super().load_plan(split)

    def save_plan(self, split: str, plan: PackPlan) -> None:
        """Save the plan of a split; its receipt comes after it."""
        super().save_plan(split, plan)
        self._send(f"plans/{split}.npz")

    def has_slice(self, number: int, noted: Mapping[str, Any]) -> bool:
        """Return whether the store lists every object of a slice's receipt."""
        return "objects" in noted and all(self._is_listed(name, *one) for name, one in noted["objects"].items())

    def record_numbers(self, split: str, number: int) -> Path:
        """Return the file with the line of the input that each sequence of a part came from."""
        path = super().record_numbers(split, number)
        self._fetch([os.path.relpath(path, self.path)])
        return path

    def open_stores(self, fingerprints: Mapping[str, str]) -> dict[str, TokenStore] | None:
        """Return the token stores of some splits; None unless all exist with these fingerprints."""
        numbers = {
            split: [name.split("/")[2] for name in self._there if _is_manifest_of(name, split)]
            for split in fingerprints
        }
        stores = {}
        with suppress(PackedSFTError):
            for split, names in numbers.items():
                if names:
                    stores[split] = self._store(split, sorted(names, key=lambda name: (len(name), name)))
        is_same = {split: store.fingerprint for split, store in stores.items()} == dict(fingerprints)
        return stores if is_same and self._has_tokens(stores) else None

    def publish_parts(self, parts: Mapping[str, Mapping[int, str]]) -> dict[str, TokenStore]:
        """Publish the parts of this run as token stores, and remove the parts of other runs."""
        self._there = self._listed()
        names = {split: [part_path(Path(), number).name for number in some] for split, some in parts.items()}
        wanted = {f"tokens/{split}/{name}" for split, some in names.items() for name in some}
        stores = {split: self._store(split, some) for split, some in sorted(names.items())}
        for split, store in stores.items():
            for part, fingerprint in zip(store.parts, parts[split].values(), strict=True):
                if part.fingerprint != fingerprint:
                    raise PackedSFTError(
                        f"{self.shown}/tokens/{split}/{part.path.name} was replaced by another preparation; run again, "
                        "one preparation at a time"
                    )
            write_index(store)
            self._send(f"tokens/{split}/{STORE}")
        stale = [name for name in self._there if "/part_" in name and name.rpartition("/")[0] not in wanted]
        self._remove(stale if stores else [])
        return stores

    def remove_damaged_parts(self, stores: Iterable[TokenStore], *, progress: bool) -> int:
        """Return 0: every part is checked when it is fetched."""
        return 0

    def _listed(self) -> dict[str, ObjectInfo]:
        return {name: info for name, info in list_objects(self.url).items() if name.partition("/")[0] in _OURS}

    def _fetch(self, names: Iterable[str]) -> bool:
        """Bring files of the local copy up to date; return whether the store has them all."""
        wanted = set(names)
        found = {name: self._there[name] for name in wanted & self._there.keys()}
        fetch_files(self.url, self.path, found)
        return len(found) == len(wanted)

    def _send(self, name: str) -> None:
        file = self.path / name
        send_file(file, child(self.url, name))
        self._there[name] = ObjectInfo(file.stat().st_size, md5=file_md5(file))

    def _remove(self, names: Sequence[str]) -> None:
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="packed-sft-remove") as threads:
            list(threads.map(lambda name: remove_object(child(self.url, name)), names))
        for name in names:
            self._there.pop(name, None)
            (self.path / name).unlink(missing_ok=True)

    def _store(self, split: str, names: list[str]) -> TokenStore:
        """Open the outlines of some parts; their manifests and offsets are fetched."""
        files = [f"tokens/{split}/{name}/{file}" for name in names for file in (MANIFEST, OFFSETS)]
        if not self._fetch(files):
            missing = next(name for name in files if name not in self._there)
            raise PackedSFTError(
                f"{self.shown}/{missing} was written, but is gone; run again to encode its slice again"
            )
        folder = self.tokens / split
        return TokenStore(
            folder,
            [outlined_part(folder / name, child(self.url, "tokens", split, name), self.url) for name in names],
        )

    def _has_tokens(self, stores: Mapping[str, TokenStore]) -> bool:
        """Return whether the store lists every file of every part, in its size."""
        return all(
            self._is_listed(f"tokens/{split}/{part.path.name}/{name}", record.bytes)
            for split, store in stores.items()
            for part in store.parts
            for name, record in part.manifest.files.items()
        )

    def _is_listed(self, name: str, num_bytes: int, md5: str | None = None) -> bool:
        info = self._there.get(name)
        return info is not None and info.size == num_bytes and (None in (info.md5, md5) or info.md5 == md5)


def _is_manifest_of(name: str, split: str) -> bool:
    return name.startswith(f"tokens/{split}/part_") and name.endswith(f"/{MANIFEST}")


_places: list[tuple[str, Path]] = []  # in a worker process: the URL of the work directory, and its copy on this node


def start_sending_encoder(settings: EncodeSettings, url: str) -> None:
    """Prepare a process for `encode_slice_and_send`."""
    home = home_of(url)
    _places[:] = [(url, home)]
    start_encoder(replace(settings, tokens=home / "tokens"))


def encode_slice_and_send(task: SliceTask) -> SliceResult:
    """Encode a slice; send its parts, and then its receipt."""
    result = encode_slice(task)
    url, home = _places[0]
    tokens = home / "tokens"
    parts = {split: TokenPart.open(part_path(tokens / split, task.number)) for split in result.parts}
    files = [path for part in parts.values() for path in part.path.iterdir()]
    files += [record_numbers_path(tokens, split, task.number) for split in parts]
    objects = {os.path.relpath(path, home): [path.stat().st_size, file_md5(path)] for path in files}
    _send_files(home, url, [name for name in objects if not name.endswith(MANIFEST)])
    _send_files(home, url, [name for name in objects if name.endswith(MANIFEST)])
    task.slice.file.refuse_changed()  # or its receipt would be about other records
    noted = {**receipt_of(result, task.slice.file.shown), "objects": objects}
    write_object(child(url, f"{slice_receipt(task.number)}.json"), rendered_receipt(task.fingerprint, noted))
    _let_go(url, parts, [record_numbers_path(tokens, split, task.number) for split in parts])
    return result._replace(drops=())


def _send_files(home: Path, url: str, names: list[str]) -> None:
    with ThreadPoolExecutor(_NUM_THREADS_OF_A_WORKER, thread_name_prefix="packed-sft-send") as threads:
        list(threads.map(lambda name: send_file(home / name, child(url, name)), names))


def _let_go(url: str, parts: Mapping[str, TokenPart], files: list[Path]) -> None:
    """Move parts that were sent into the cache of the node, where publishing tasks find them, or remove them."""
    for split, part in parts.items():
        part.unmap()
        RemotePart(child(url, "tokens", split, part.path.name), part.fingerprint, url).adopt(part)
        shutil.rmtree(part.path, ignore_errors=True)
    for path in files:
        path.unlink(missing_ok=True)
