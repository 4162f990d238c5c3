"""What preparing and opening very much data costs, computed from rates that are measured in the same run.

python -m benchmarks.scale_model

Every stage is taken to cost a fixed amount and an amount per unit (bytes, tokens, sequences, shards). Two small sizes
give both numbers; two larger sizes are predicted, measured, and printed side by side. Then 10 billion and 1 trillion
tokens. Seconds are CPU seconds of one core, so that a busy machine changes them little. docs/scale.md shows the tables.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import PeakOfOwnMemory, in_own_process, resident_megabytes
from benchmarks.scale_requests import NUM_LEARNED, RequestModel, request_cases

PACK_SIZE = 4096
SHARD_MEGABYTES = 256
TOKENS_PER_SEQUENCE = 1000
BYTES_PER_TOKEN = 5  # memmap_v1: an int32 id and a byte of mask
SHARDS = (20, 80, 320, 640)  # of the start-up cases: two to measure rates, two to predict
SEQUENCES = (8_000_000, 24_000_000, 48_000_000, 72_000_000)  # of the plans, likewise
SCAN_ROUNDS = 9  # likewise: it takes some hundredths of a second
PLAN_ROUNDS = 3  # the median counts: a plan takes less than a second, and pages of memory come at different prices
STAGES = {"scan": "bytes", "encode": "tokens", "plan": "sequences", "publish": "tokens"}
FUNCTIONS = {"scan": "scan", "encode": "encode_sources", "publish": "publish"}


@dataclass(frozen=True)
class Line:
    """A cost: so much once, and so much per unit."""

    fixed: float
    per_unit: float

    @classmethod
    def through(cls, one: tuple[float, float], two: tuple[float, float]) -> Line:
        """Return the line through two measured (units, cost)."""
        slope = max(0.0, (two[1] - one[1]) / (two[0] - one[0]))
        return cls(max(0.0, one[1] - slope * one[0]), slope)

    def at(self, units: float) -> float:
        """Return the cost of so many units."""
        return self.fixed + self.per_unit * units


@dataclass(frozen=True)
class LogLine:
    """A cost per unit that grows with the logarithm of the size: random access finds less and less in the caches."""

    base: float
    per_doubling: float

    @classmethod
    def through(cls, one: tuple[float, float], two: tuple[float, float]) -> LogLine:
        """Return the curve through two measured (units, cost)."""
        line = Line.through(*((math.log2(units), cost / units) for units, cost in (one, two)))
        return cls(one[1] / one[0] - line.per_unit * math.log2(one[0]), line.per_unit)

    def at(self, units: float) -> float:
        """Return the cost of so many units."""
        return units * (self.base + self.per_doubling * math.log2(units))


def median_of(cases: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of every number."""
    return {name: statistics.median(case[name] for case in cases) for name in cases[0]}


def write_chats(path: Path, num_records: int) -> None:
    """Sample chats, no two alike."""
    from megatron_packed_sft.records.samples import sample_conversations

    rows = [list(chat.messages) for chat in sample_conversations(1000, seed=1)]
    with open(path, "w") as file:
        for number in range(num_records):
            first, *others = rows[number % len(rows)]
            text = {**first, "content": f"{number} {first.get('content') or ''}"}
            file.write(json.dumps({"messages": [text, *others]}) + "\n")


def prepare_case(jsonl: str, tokenizer: str, home: str) -> dict[str, float]:
    """One preparation in one process: CPU seconds and own memory of every stage, and what it left."""
    from megatron_packed_sft import pack
    from megatron_packed_sft.encode.options import TemplateOptions
    from megatron_packed_sft.prepare import pipeline
    from megatron_packed_sft.prepare.config import ExecutorConfig, PrepareConfig, TokenizerConfig

    pack([4, 3, 2, 1], pack_size=8)  # compiled once per machine, not once per run
    measured: dict[str, float] = {}

    def watched(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = time.process_time()
            with PeakOfOwnMemory() as own:
                result = function(*arguments)
            measured[stage] = time.process_time() - start
            measured[f"{stage} megabytes"] = own.megabytes
            return result

        return run

    for stage, name in FUNCTIONS.items():
        setattr(pipeline, name, watched(stage, getattr(pipeline, name)))
    config = PrepareConfig(
        output=f"{home}/data",
        input=jsonl,
        tokenizer=TokenizerConfig(path=tokenizer),
        template=TemplateOptions("chatml"),
        executor=ExecutorConfig(num_workers=1),
        shard_megabytes=SHARD_MEGABYTES,
        quiet=True,
    )
    config.packing.pack_size = PACK_SIZE
    report = pipeline.Pipeline(config).run()
    measured["scan"] = statistics.median(_scan_seconds(jsonl) for _ in range(SCAN_ROUNDS))
    train = report.splits["train"]
    return measured | {
        "bytes": os.path.getsize(jsonl),
        "tokens": train.encoded.num_tokens,
        "sequences": train.encoded.num_sequences,
        "bins": train.plan.num_bins,
        "work files": sum(len(names) for _, _, names in os.walk(f"{home}/data.work")),
        "slices": len(list(Path(home, "data.work/tokens/receipts").glob("slice_*.json"))),
        "shard files": len(os.listdir(f"{home}/data/train/shard_000000")),
    }


def _scan_seconds(jsonl: str) -> float:
    from megatron_packed_sft.prepare.sources import Source, scan

    start = time.process_time()
    scan([Source("chats", (jsonl,))])
    return time.process_time() - start


def plan_case(num_sequences: int) -> dict[str, float]:
    """Plan so many sequences of random lengths, as prepare does: CPU seconds, and memory beyond an empty process."""
    from megatron_packed_sft import pack

    options: dict[str, Any] = {"pack_size": PACK_SIZE, "overflow": "drop", "shuffle_output": True}
    pack(np.full(100_000, 700, np.int32), **options)  # compiled once per machine, and loaded
    before = resident_megabytes()
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(TOKENS_PER_SEQUENCE) - 0.5, 1, num_sequences), 8, PACK_SIZE).astype(np.int32)
    start = os.times().user
    with PeakOfOwnMemory() as own:
        pack(lengths, **options)
    return {
        "sequences": num_sequences,
        "plan": os.times().user - start,
        "plan megabytes": own.megabytes - before,
    }


def start_case(tokenizer: str, store: str, plan: str, home: str, num_shards: int) -> dict[str, float]:
    """What a rank does before its first batch: opens a dataset of so many shards."""
    from megatron_packed_sft import DatasetWriter, create_sft_dataset, load_tokenizer, materialize_shards
    from megatron_packed_sft.packing.plan import PackPlan
    from megatron_packed_sft.tokens.store import open_token_store

    opened = open_token_store(store)
    with DatasetWriter(f"{home}/shards_{num_shards}") as dataset:
        paths = [dataset.shard_path("train", number) for number in range(num_shards)]
        materialize_shards(PackPlan.load(plan), opened, paths)
        dataset.finalize()
    loaded = load_tokenizer(tokenizer)
    create_sft_dataset(f"{home}/shards_{num_shards}", loaded, seq_length=PACK_SIZE)  # imports
    opens = 0

    def count(event: str, _: Any) -> None:
        nonlocal opens
        opens += event == "open"

    sys.addaudithook(count)
    start = time.process_time()
    with PeakOfOwnMemory() as own:
        data = create_sft_dataset(f"{home}/shards_{num_shards}", loaded, seq_length=PACK_SIZE)
        seconds = time.process_time() - start
        assert len(data) >= num_shards
        num_opens = opens
        for number in range(num_shards):  # one bin of every shard
            data[number * len(data) // num_shards]
        every = {"seconds of every shard": time.process_time() - start, "opens of every shard": opens}
        time.sleep(0.03)  # long enough for one look at the memory
    return {"seconds": seconds, "opens": num_opens, "megabytes": own.megabytes, **every}


class Model:
    """The lines of every stage and of start-up, from two measured sizes each."""

    def __init__(
        self,
        cases: Sequence[dict[str, float]],
        plans: Sequence[dict[str, float]],
        starts: Sequence[dict[str, float]],
        requests: Sequence[dict[str, float]],
    ) -> None:
        self.requests = RequestModel.learned(requests)
        self.requests_to_open = Line.through(*((requests[at]["shards"], requests[at]["open"]) for at in (0, 2)))
        small, large = ({**case, **plan} for case, plan in zip(cases, plans, strict=True))
        self.seconds: dict[str, Line | LogLine] = {
            stage: (LogLine if stage == "plan" else Line).through(
                (small[unit], small[stage]), (large[unit], large[stage])
            )
            for stage, unit in STAGES.items()
        }
        self.plan_megabytes = Line.through(
            (small["sequences"], small["plan megabytes"]), (large["sequences"], large["plan megabytes"])
        )
        self.encode_megabytes = large["encode megabytes"]
        self.work_files = Line.through((small["slices"], small["work files"]), (large["slices"], large["work files"]))
        self.shard_files = large["shard files"]
        self.bytes_per_token = large["bytes"] / large["tokens"]
        self.start = {
            name: Line.through((SHARDS[0], starts[0][name]), (SHARDS[1], starts[1][name])) for name in starts[0]
        }

    def core_seconds(self, units: dict[str, float]) -> dict[str, float]:
        """Return the CPU seconds of each stage for so many bytes, tokens and sequences."""
        return {stage: self.seconds[stage].at(units[unit]) for stage, unit in STAGES.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, predict, check, project."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--records", type=int, default=10_000, help="of the smallest size; the others have 3, 6 and 12 times as many"
    )
    arguments = parser.parse_args(argv)
    from benchmarks.scale_tables import check, project
    from megatron_packed_sft.encode.tokenizers.sentencepiece import train_sentencepiece
    from megatron_packed_sft.records.samples import sample_conversations

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        chats = sample_conversations(300, seed=1)
        texts = [message["content"] for chat in chats for message in chat.messages if message.get("content")]
        tokenizer = str(train_sentencepiece(texts, home / "sp.model", vocab_size=1000))
        cases = []
        for times in (1, 3, 6, 12):
            place = home / f"times_{times}"
            place.mkdir()
            write_chats(place / "chats.jsonl", times * arguments.records)
            cases.append(in_own_process(prepare_case, str(place / "chats.jsonl"), tokenizer, str(place)))
        work = home / "times_6" / "data.work"
        made = [str(work / "tokens/train"), str(work / "plans/train.npz")]
        starts = [in_own_process(start_case, tokenizer, *made, folder, num_shards) for num_shards in SHARDS]
        requests = request_cases(home, tokenizer)
    plans = [median_of([in_own_process(plan_case, number) for _ in range(PLAN_ROUNDS)]) for number in SEQUENCES]
    model = Model(cases[:2], plans[:2], starts[:2], requests[:NUM_LEARNED])
    check(model, cases[2:], plans[2:], starts[2:], requests[NUM_LEARNED:])
    project(model)


if __name__ == "__main__":
    main()
