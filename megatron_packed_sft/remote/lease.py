"""A lock in a store: an object that names its owner, renewed while that works, and worth nothing once it is not.

Taking it is one conditional write where the store has those (S3, and whatever else knows If-None-Match). A lease that
was not renewed for two minutes is a dead owner's and is taken over; one of a process of this machine that is gone, at
once. Clocks of machines that share a lease may differ by a minute. No lock in a store is perfect: whoever loses a lease
notices when it renews it, and work must not be mixed up even then.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from typing import Any, NamedTuple, Self

from megatron_packed_sft.errors import StorageIOError
from megatron_packed_sft.remote.filesystem import is_missing
from megatron_packed_sft.remote.objects import create_object, list_objects, read_object, remove_object, write_object
from megatron_packed_sft.support.paths import redacted

RENEWED_EVERY = 20.0  # seconds
EXPIRES_AFTER = 120.0
_SETTLES_AFTER = 1.0
_MAX_BYTES = 1 << 16


class Owner(NamedTuple):
    """Who holds a lease."""

    host: str
    machine: str  # what its process numbers belong to: a start of a kernel, and a container on it
    process: int
    since: float
    renewed: float
    identity: str

    @classmethod
    def parsed(cls, data: bytes) -> Owner | None:
        """Return the owner that an object names; None if it names none."""
        try:
            document = json.loads(data)
            return cls(
                str(document["host"]),
                str(document["machine"]),
                int(document["process"]),
                float(document["since"]),
                float(document["renewed"]),
                str(document["identity"]),
            )
        except (ValueError, TypeError, KeyError):
            return None

    @property
    def is_alive(self) -> bool:
        """Whether it may still be at work."""
        if abs(time.time() - self.renewed) > EXPIRES_AFTER:
            return False
        if self.machine != _machine():
            return True
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.since))
        return f"process {self.process} on {self.host}, since {since} UTC"


class Lease:
    """A lease that this process holds; `release` gives it back.

    Example:
        >>> lease, owner = Lease.taken("memory://doc/lock.json")
        >>> other, owner = Lease.taken("memory://doc/lock.json")
        >>> other, owner.process == os.getpid()
        (None, True)
        >>> lease.release()
    """

    def __init__(self, url: str, document: dict[str, Any]) -> None:
        self.url = url
        self._document = document
        self._process = os.getpid()
        self._over = threading.Event()
        self.lost_to: Owner | None = None
        self._thread = threading.Thread(target=self._keep_renewing, daemon=True, name="packed-sft-lease")
        self._thread.start()

    @classmethod
    def taken(cls, url: str) -> tuple[Self | None, Owner | None]:
        """Take a lease, unless somebody has it; return the lease, or else its owner."""
        now = time.time()
        document: dict[str, Any] = {
            "host": socket.gethostname(),
            "machine": _machine(),
            "process": os.getpid(),
            "since": now,
            "renewed": now,
            "identity": secrets.token_hex(8),
        }
        took_over = False
        while True:
            if create_object(url, _rendered(document)):
                if not took_over:
                    break
                _wait_for_others()
            owner = owner_of(url)
            if owner is not None and owner.identity == document["identity"]:
                break
            if owner is not None and owner.is_alive:
                return None, owner
            # A dead owner's. Another process may have found it, too, and remove the lease that comes after it.
            remove_object(url)
            took_over = True
        return cls(url, document), None

    def refuse_lost(self) -> None:
        """Raise an error if another process took the lease, because this one was not heard of for too long."""
        if self.lost_to is not None:
            raise StorageIOError(
                f"{redacted(self.url)} was taken over by {self.lost_to}, since this process could not renew it for "
                f"{EXPIRES_AFTER:.0f} seconds; what is finished is kept, so run again when that one is done"
            )

    def release(self) -> None:
        """Give the lease back; harmless if it is another process's by now."""
        if os.getpid() != self._process or self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        owner = owner_of(self.url)
        if owner is not None and owner.identity == self._document["identity"]:
            remove_object(self.url)

    def _keep_renewing(self) -> None:
        while not self._over.wait(RENEWED_EVERY):
            try:
                owner = owner_of(self.url)
                if owner is not None and owner.identity != self._document["identity"]:
                    self.lost_to = owner
                    return
                self._document["renewed"] = time.time()
                write_object(self.url, _rendered(self._document))
            except StorageIOError:
                continue  # the store may be back at the next attempt; if not, the work itself fails, too


def owner_of(url: str) -> Owner | None:
    """Return who holds a lease, alive or not; None if nobody does."""
    try:
        return Owner.parsed(read_object(url, _MAX_BYTES))
    except StorageIOError as error:
        if is_missing(error):
            return None
        raise


def living_owners(url: str) -> dict[str, Owner]:
    """Return name -> owner of the leases below a URL whose owners may still be at work."""
    owners = {name: owner_of(f"{url}/{name}") for name in list_objects(url)}
    return {name: owner for name, owner in owners.items() if owner is not None and owner.is_alive}


def _wait_for_others() -> None:
    """Give processes that were about to remove a dead owner's lease the time to do it."""
    time.sleep(_SETTLES_AFTER)


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)  # unknown, so that no process is taken for one of this machine


def _rendered(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()
