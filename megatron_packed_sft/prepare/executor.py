"""What does the work: processes of this machine, or tasks of a Ray cluster.

A driver keeps receipts, lengths and plans; tokens go from Ray's workers to a disk that all nodes share, or to an object
store. A task whose worker or node died is done again, which is harmless: every part and every shard appears by one
rename or by its last object, with the same bytes.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, redirect_stdout
from typing import Any, TypeVar

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError
from megatron_packed_sft.prepare.config import ExecutorConfig
from megatron_packed_sft.support.imports import load
from megatron_packed_sft.support.processes import Executor, LocalExecutor

Task = TypeVar("Task")
Result = TypeVar("Result")

_MAX_RETRIES = 5  # of a task whose worker or node died; our own errors are final
_HOST_AND_PORT = re.compile(r"(ray://)?\[?(?P<host>[^/]+?)\]?:(?P<port>\d+)")
_SECONDS_TO_ANSWER = 10
# The keys that only one kind has.
_KEYS: dict[str, tuple[str, ...]] = {"local": (), "array": ("index", "count"), "ray": ("address", "num_cpus")}


def create_executor(config: ExecutorConfig) -> Executor:
    """Return the executor of a configuration.

    Example:
        >>> create_executor(ExecutorConfig(num_workers=2)).num_workers
        2
    """
    if config.kind not in _KEYS:
        raise InvalidInputError(f"executor.kind is {config.kind!r}; choose {', '.join(_KEYS)}")
    for kind, keys in _KEYS.items():
        for key in keys:
            if kind != config.kind and getattr(config, key) is not None:
                raise InvalidInputError(f"executor.{key} is for executor={kind}; add that, or leave the key out")
    if config.kind == "ray":
        return RayExecutor(config.address, config.num_workers, config.num_cpus)
    return LocalExecutor(config.num_workers)  # a call of an array encodes its share with processes


class RayExecutor:
    """Runs tasks on a Ray cluster, at most two per worker at a time.

    Args:
        address: of the cluster; None starts one on this machine, for as long as it is needed.
        num_workers: tasks at a time; None for as many as the cluster has room for when it is first asked.
        num_cpus: CPUs that each task asks for.
    """

    def __init__(
        self, address: str | None = None, num_workers: int | None = None, num_cpus: float | None = None
    ) -> None:
        for name, value in (("num_workers", num_workers), ("num_cpus", num_cpus)):
            if value is not None and value <= 0:
                raise InvalidInputError(f"executor.{name} is {value:g}; it must be more than 0")
        self._ray = load("ray", "ray", "executor=ray")
        self._address, self._num_cpus = address, num_cpus or 1
        self._wanted = num_workers
        self._open = ExitStack()  # what close() ends; nothing if this process was connected already
        self.num_workers = num_workers or 1

    def fitting(self, num_bytes: int) -> RayExecutor:
        """Return this executor, connected: it asks the cluster how much room it has, not the input how large it is."""
        self._connect()
        return self

    def run(
        self, function: Callable[[Task], Result], tasks: Iterable[Task], setup: Callable[..., None], *arguments: Any
    ) -> Iterator[Result]:
        """Yield results as they come; at most two tasks per worker are waiting, so memory stays bounded."""
        self._connect()
        ray = self._ray
        work = [ray.put((function, setup, arguments))]  # in a list: a worker fetches it once, not with every task
        key = uuid.uuid4().hex
        remote = ray.remote(_do_task).options(
            name=function.__name__,
            num_cpus=self._num_cpus,
            max_retries=_MAX_RETRIES,
            retry_exceptions=False,
            scheduling_strategy="SPREAD",
        )
        waiting: list[Any] = []
        try:
            for task in tasks:
                waiting.append(remote.remote(key, work, task))
                if len(waiting) >= 2 * self.num_workers:
                    done, waiting = ray.wait(waiting, num_returns=1)
                    yield from map(self._result, done)
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=1)
                yield from map(self._result, done)
        except BaseException:
            for reference in waiting:
                ray.cancel(reference, force=True)
            raise

    def close(self) -> None:
        """Leave the cluster, and stop it if this executor started it."""
        self._open.close()

    def _connect(self) -> None:
        if not self._ray.is_initialized():
            options: dict[str, Any] = {"address": self._address}
            if self._address is None:
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no statistics of a cluster that we start
                num_cpus = (self._wanted or len(os.sched_getaffinity(0))) * self._num_cpus
                options = {"address": "local", "num_cpus": max(1, round(num_cpus)), "include_dashboard": False}
            try:
                _refuse_silent(self._address)
                self._ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
            except (OSError, RuntimeError, ValueError) as error:
                raise _unreachable(self._address, error) from error
            self._open.callback(self._ray.shutdown)
            # Ray prints what happens to its workers on stdout, where our summary belongs.
            self._open.enter_context(redirect_stdout(sys.stderr))
        num_cpus = self._ray.cluster_resources().get("CPU", 0)
        if self._wanted is None and num_cpus < self._num_cpus:
            raise InvalidInputError(
                f"the Ray cluster has {num_cpus:g} CPUs and a task asks for {self._num_cpus:g}; lower "
                "executor.num_cpus, or give executor.num_workers to a cluster that grows"
            )
        self.num_workers = self._wanted or int(num_cpus / self._num_cpus)

    def _result(self, reference: Any) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except exceptions.RayTaskError as error:
            raise error.cause from None  # ours, without Ray's account of where it happened
        except exceptions.RayError as error:
            raise PackedSFTError(
                f"a Ray task failed {_MAX_RETRIES + 1} times ({_first_line(error)}); run the same command again to "
                "resume, with a larger executor.num_cpus if memory was short"
            ) from error


_ready: list[Any] = []  # in a worker process: the work that it is set up for, and its function


def _do_task(key: str, work: list[Any], task: Any) -> Any:
    """Do one task in a worker process, after the set-up of the whole work, which runs once."""
    if not _ready or _ready[0] != key:
        function, setup, arguments = load("ray", "ray", "executor=ray").get(work[0])
        setup(*arguments)
        _ready[:] = [key, function]
    return _ready[1](task)


def _unreachable(address: str | None, error: Exception) -> InvalidInputError:
    if address is None:
        return InvalidInputError(
            f"a Ray cluster cannot be started here ({_first_line(error)}); use executor=local, or give executor.address"
        )
    return InvalidInputError(
        f"there is no Ray cluster at executor.address={address} ({_first_line(error)}); check the address, or leave it "
        "out to start a cluster here"
    )


def _refuse_silent(address: str | None) -> None:
    """Raise an OSError if nothing listens at an address: Ray would wait for minutes, or forever."""
    if (found := _HOST_AND_PORT.fullmatch(address or "")) is not None:
        socket.create_connection((found["host"], int(found["port"])), _SECONDS_TO_ANSWER).close()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")[:200]
