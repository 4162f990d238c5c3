"""A work directory in an object store: receipts and token parts are objects, and locks are leases.

Every slice is sent by the process that encoded it, its receipt last (`sent_slices.py`). Here is the side that plans: it
fetches receipts, manifests and offsets into a local copy, never tokens. Parts are fetched by whoever reads them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, StorageIOError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.prepare.work_directory import WorkDirectory, parsed_receipt
from megatron_packed_sft.remote.filesystem import child, is_missing, missing_error
from megatron_packed_sft.remote.lease import EXPIRES_AFTER, Lease, Owner, living_owners, owner_of
from megatron_packed_sft.remote.objects import ObjectInfo, list_objects, object_info, read_object, remove_object
from megatron_packed_sft.remote.trees import fetch_files
from megatron_packed_sft.remote.uploads import send_file
from megatron_packed_sft.support.json_document import MANIFEST
from megatron_packed_sft.support.paths import redacted
from megatron_packed_sft.tokens.manifest import OFFSETS, STORE
from megatron_packed_sft.tokens.remote_store import outlined_part
from megatron_packed_sft.tokens.store import TokenStore, write_index
from megatron_packed_sft.tokens.writer import part_path

_LOCK = "lock.json"
_CALLS = "calls"
_MAX_RECEIPT_BYTES = 64 << 20
_OURS = ("encode.json", "array.json", "tokens", "plans", "published", "scan")
_NUM_THREADS = 16


class RemoteWorkDirectory(WorkDirectory):
    """A work directory in an object store, with a local copy of what is small.

    Args:
        url: of the directory.
        path: of the local copy.
        shared: several may work here at once, each on slices of its own.
    """

    def __init__(self, url: str, path: Path, *, shared: bool = False) -> None:
        self.url = url.rstrip("/")
        self._leases: list[Lease] = []
        if shared:
            self._refuse_lock()
        else:
            self._take(_LOCK)
        try:
            if not shared:
                self._refuse_calls()
            super().__init__(path, shared=shared)
            self._there = {name: info for name, info in list_objects(self.url).items() if _is_ours(name)}
            if not shared:
                receipts = {name: one for name, one in self._there.items() if name.endswith(".json")}
                fetch_files(self.url, self.path, receipts)
        except BaseException:
            self._give_back()
            raise

    @property
    def place(self) -> str:
        """What the user calls it, for messages."""
        return redacted(self.url)

    def receipt(self, name: str, fingerprint: str | None) -> dict[str, Any] | None:
        """Return what was noted when this work was done; None when it was not, or the receipt is damaged."""
        try:
            return parsed_receipt(self._read(f"{name}.json"), fingerprint)
        except StorageIOError as error:
            if is_missing(error):
                return None
            raise

    def _read(self, name: str) -> bytes:
        """Return a receipt: those of slices as they were when this run began, others as they are now."""
        info = self._there.get(name)
        if not name.startswith(("tokens/", "scan/")):
            return read_object(child(self.url, name), _MAX_RECEIPT_BYTES)
        if info is None:
            raise missing_error(f"{redacted(child(self.url, name))} does not exist")
        fetch_files(self.url, self.path, {name: info})
        return (self.path / name).read_bytes()

    def write_receipt(self, name: str, fingerprint: str, result: Mapping[str, Any]) -> None:
        """Note that work is done. Call it last: what the receipt vouches for must be there."""
        for lease in self._leases:
            lease.refuse_lost()
        super().write_receipt(name, fingerprint, result)
        self._send(f"{name}.json")

    def load_plan(self, split: str) -> PackPlan:
        """Return the plan that was saved for a split; an error if it is damaged or gone."""
        name = f"plans/{split}.npz"
        if (info := object_info(child(self.url, name))) is not None:
            fetch_files(self.url, self.path, {name: info})
        return super().load_plan(split)

    def save_plan(self, split: str, plan: PackPlan) -> None:
        """Save the plan of a split; its receipt comes after it."""
        super().save_plan(split, plan)
        self._send(f"plans/{split}.npz")

    def has_slice(self, number: int, noted: Mapping[str, Any]) -> bool:
        """Return whether every object that the receipt of a slice vouches for is there, as far as the store tells."""
        objects = noted.get("objects")
        return objects is not None and all(_is_as_noted(self._there.get(name), one) for name, one in objects.items())

    def record_numbers(self, split: str, number: int) -> Path:
        """Return the file that says from which line of the input each sequence of a part came."""
        path = super().record_numbers(split, number)
        name = os.path.relpath(path, self.path)
        if (info := self._there.get(name)) is not None:
            fetch_files(self.url, self.path, {name: info})
        return path

    def fetch_record_numbers(self) -> None:
        """Make sure that the files of `record_numbers` are here, for a page that names lines."""
        lines = {name: one for name, one in self._there.items() if name.startswith("tokens/receipts/")}
        fetch_files(self.url, self.path, lines)

    def open_stores(self, fingerprints: Mapping[str, str]) -> dict[str, TokenStore] | None:
        """Return the token stores of some splits, if all are there with these fingerprints."""
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
        """List the parts of this run as token stores, and remove those that other runs left."""
        self._there = {name: info for name, info in list_objects(self.url).items() if _is_ours(name)}
        names = {split: [part_path(Path(), number).name for number in some] for split, some in parts.items()}
        wanted = {f"tokens/{split}/{name}" for split, some in names.items() for name in some}
        stores = {split: self._store(split, some) for split, some in sorted(names.items())}
        for split, store in stores.items():
            for part, fingerprint in zip(store.parts, parts[split].values(), strict=True):
                if part.fingerprint != fingerprint:
                    raise PackedSFTError(
                        f"{self.place}/tokens/{split}/{part.path.name} was replaced by another preparation; run again"
                    )
            write_index(store)
            self._send(f"tokens/{split}/{STORE}")
        stale = [name for name in self._there if "/part_" in name and name.rpartition("/")[0] not in wanted]
        self._remove(stale if stores else [])
        return stores

    def remove_damaged_parts(self, stores: Iterable[TokenStore], *, progress: bool) -> int:
        """Return 0: every part is checked when it is fetched."""
        return 0

    def is_alone(self) -> bool:
        """Whether no other call of an array works here."""
        ours = {lease.url.rpartition("/")[2] for lease in self._leases}
        return not living_owners(child(self.url, _CALLS)).keys() - ours

    def share(self) -> None:
        """Nothing: leases of calls do not keep each other out."""

    def hold(self, name: str) -> bool:
        """Take a lease of one's own until the directory is closed; False if another process has it."""
        lease, _ = Lease.taken(child(self.url, f"{name}.json"))
        if lease is not None:
            self._leases.append(lease)
            self._refuse_lock()  # the other way round than whoever takes the lock, so that one of two sees the other
        return lease is not None

    @contextmanager
    def one_at_a_time(self, name: str) -> Iterator[None]:
        """Wait for every other process that is inside this block."""
        lease, _ = Lease.taken(child(self.url, f"{name}.lock.json"))
        while lease is None:
            time.sleep(0.2)
            lease, _ = Lease.taken(child(self.url, f"{name}.lock.json"))
        try:
            yield
        finally:
            lease.release()

    def forget(self) -> None:
        """Remove what earlier runs left, and nothing else: the user may keep other things here."""
        super().forget()
        self._remove(sorted(self._there, key=lambda name: not name.endswith(".json")))  # receipts first

    def close(self) -> None:
        """Release all locks."""
        super().close()
        self._give_back()

    def _give_back(self) -> None:
        while self._leases:
            self._leases.pop().release()

    def _take(self, name: str) -> None:
        lease, owner = Lease.taken(child(self.url, name))
        if lease is None:
            assert owner is not None
            raise self._busy(owner)
        self._leases.append(lease)

    def _refuse_lock(self) -> None:
        owner = owner_of(child(self.url, _LOCK))
        if owner is not None and owner.is_alive:
            self._give_back()
            raise self._busy(owner)

    def _refuse_calls(self) -> None:
        for owner in living_owners(child(self.url, _CALLS)).values():
            raise self._busy(owner)

    def _busy(self, owner: Owner) -> InvalidInputError:
        return InvalidInputError(
            f"another preparation is working in {self.place}: {owner}; wait for it, choose another work_dir, or, if it "
            f"was killed, run again {EXPIRES_AFTER / 60:.0f} minutes after it was"
        )

    def _send(self, name: str) -> None:
        send_file(self.path / name, child(self.url, name))

    def _remove(self, names: Sequence[str]) -> None:
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="packed-sft-remove") as threads:
            list(threads.map(lambda name: remove_object(child(self.url, name)), names))
        for name in names:
            self._there.pop(name, None)
            (self.path / name).unlink(missing_ok=True)

    def _store(self, split: str, names: list[str]) -> TokenStore:
        """Open the outlines of some parts; their manifests and offsets are fetched."""
        files = [f"tokens/{split}/{name}/{file}" for name in names for file in (MANIFEST, OFFSETS)]
        missing = next((name for name in files if name not in self._there), None)
        if missing is not None:
            raise PackedSFTError(f"{self.place}/{missing} was written, but is not there; run again to encode it again")
        fetch_files(self.url, self.path, {name: self._there[name] for name in files})
        folder = self.tokens / split
        parts = [outlined_part(folder / name, child(self.url, "tokens", split, name), self.url) for name in names]
        return TokenStore(folder, parts)

    def _has_tokens(self, stores: Mapping[str, TokenStore]) -> bool:
        """Return whether the store lists every file of every part, in its size."""
        return all(
            (info := self._there.get(f"tokens/{split}/{part.path.name}/{name}")) is not None
            and info.size == record.bytes
            for split, store in stores.items()
            for part in store.parts
            for name, record in part.manifest.files.items()
        )


def _is_ours(name: str) -> bool:
    return name.partition("/")[0] in _OURS


def _is_manifest_of(name: str, split: str) -> bool:
    return name.startswith(f"tokens/{split}/part_") and name.endswith(f"/{MANIFEST}")


def _is_as_noted(info: ObjectInfo | None, noted: Any) -> bool:
    size, md5 = noted
    return info is not None and info.size == size and (info.md5 is None or info.md5 == md5)
