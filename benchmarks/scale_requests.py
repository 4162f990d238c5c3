"""How many requests a preparation in an object store makes, and a node that reads a dataset there: counted at a server.

Requests are a sum: so many once, so many per input file, per slice and per shard. Small runs of four sizes give these
numbers, two larger ones are predicted and counted. Bytes need no model: they are those of the files.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from benchmarks.measure import in_own_process
from tests.remote.object_store import BUCKET, FaultProxy, moto_server

if TYPE_CHECKING:
    from megatron_packed_sft.prepare.report import PrepareReport

# (files, about so many shards) of the runs: four to learn from, two to predict. How many slices prepare cuts the files
# into is counted: more than one where a file has more than a megabyte.
SIZES = ((4, 1), (12, 1), (4, 5), (8, 5), (20, 3), (8, 10))
NUM_LEARNED = 4
_UNITS = ("files", "slices", "shards")
METHODS = ("PUT", "HEAD", "GET", "LIST", "DELETE")
_LISTED_AT_ONCE = 1000  # objects per answer of S3
_TOKENS_PER_SHARD = 200_000  # of shards of 1 MB


@dataclass(frozen=True)
class RequestModel:
    """Requests by method: once, per input file, per slice and per shard."""

    by_method: dict[str, tuple[float, ...]]

    @classmethod
    def learned(cls, cases: Sequence[dict[str, float]]) -> RequestModel:
        """Return the model that counted runs give, as many as it has numbers."""
        matrix = np.array([[1, *(case[unit] for unit in _UNITS)] for case in cases])
        counts = {method: np.array([case[method] for case in cases]) for method in METHODS}
        return cls({method: tuple(np.linalg.solve(matrix, one).tolist()) for method, one in counts.items()})

    def at(self, num_files: float, num_slices: float, num_shards: float) -> dict[str, float]:
        """Return the requests of a run, by method; listings are longer than an answer when there are many objects."""
        units = (1.0, num_files, num_slices, num_shards)
        found = {method: float(np.dot(numbers, units)) for method, numbers in self.by_method.items()}
        _, per_file, per_slice, _ = self.by_method["PUT"]
        num_objects = per_file * num_files + per_slice * num_slices
        found["LIST"] += 3 * math.floor(num_objects / _LISTED_AT_ONCE)
        return {method: max(0.0, number) for method, number in found.items()}


class CountingProxy(FaultProxy):
    """Counts requests by method; a GET that lists objects is a listing."""

    def __init__(self, port: int) -> None:
        self.methods: Counter[str] = Counter()
        super().__init__(port)

    def _next_trouble(self, line: str) -> str | None:
        method, path, _ = line.split(" ", 2)
        with self._lock:
            self.methods["LIST" if method == "GET" and "list-type=" in path else method] += 1
        return None


def request_cases(home: Path, tokenizer: str) -> list[dict[str, float]]:
    """Run all sizes; return what each counted."""
    return [in_own_process(request_case, str(home / f"requests_{one}"), tokenizer, *one) for one in SIZES]


def request_case(home: str, tokenizer: str, num_files: int, num_shards: int) -> dict[str, float]:
    """Prepare to a store with a work directory there, then open every shard on a node with an empty cache."""
    from benchmarks.scale_model import write_chats

    Path(home).mkdir()
    with moto_server(Path(home, "log")) as port:
        proxy = CountingProxy(port)
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        import fsspec

        fsspec.filesystem("s3").mkdir(BUCKET)
        num_records = math.ceil(num_shards * _TOKENS_PER_SHARD / 220 / num_files)
        for number in range(num_files):
            write_chats(Path(home, f"chats_{number:03d}.jsonl"), num_records)
        proxy.methods.clear()
        report = _prepare(home, tokenizer)
        counted = {method: float(proxy.methods[method]) for method in METHODS}
        found = _units(home, report)
        proxy.methods.clear()
        _open_all(home, f"s3://{BUCKET}/data")
        return {**found, **counted, "open": float(proxy.methods.total())}


def _prepare(home: str, tokenizer: str) -> PrepareReport:
    """Prepare as Ray's tasks do, but in this process: tokens are encoded on one node and published by another."""
    from megatron_packed_sft.encode.options import TemplateOptions
    from megatron_packed_sft.prepare import pipeline
    from megatron_packed_sft.prepare.config import ExecutorConfig, PrepareConfig, TokenizerConfig
    from megatron_packed_sft.support.processes import LocalExecutor

    plan_splits = pipeline.plan_splits

    def plan_on_another_node(*arguments: Any) -> Any:
        os.environ["PACKED_SFT_CACHE_DIR"] = f"{home}/publishing"
        return plan_splits(*arguments)

    config = PrepareConfig(
        output=f"s3://{BUCKET}/data",
        work_dir=f"s3://{BUCKET}/work",
        input=f"{home}/chats_*.jsonl",
        tokenizer=TokenizerConfig(path=tokenizer),
        template=TemplateOptions("chatml"),
        executor=ExecutorConfig("ray", num_workers=1),
        shard_megabytes=1,
        quiet=True,
    )
    config.packing.pack_size = 4096
    os.environ |= {"XDG_CACHE_HOME": f"{home}/driver", "PACKED_SFT_CACHE_DIR": f"{home}/encoding"}
    with (
        mock.patch.object(pipeline, "create_executor", return_value=LocalExecutor(1)),
        mock.patch.object(pipeline, "plan_splits", plan_on_another_node),
    ):
        return pipeline.Pipeline(config).run()


def _units(home: str, report: PrepareReport) -> dict[str, float]:
    """Return of how many files, slices and shards a preparation was."""
    from megatron_packed_sft.remote.objects import list_objects

    sent = list_objects(f"s3://{BUCKET}/work/tokens/receipts")
    return {
        "files": float(len(list(Path(home).glob("chats_*.jsonl")))),
        "slices": float(sum(name.endswith(".json") for name in sent)),
        "shards": float(report.splits["train"].num_shards),
    }


def _open_all(home: str, url: str) -> None:
    from megatron_packed_sft import create_sft_dataset
    from megatron_packed_sft.data.options import OpenOptions

    data = create_sft_dataset(url, 0, opening=OpenOptions(cache_dir=f"{home}/other_node"))
    for number in range(0, len(data), 10):
        data[number]
