"""The tables of `scale_model`: predictions beside measurements, and what 10 billion and 1 trillion tokens cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.measure import print_table
from benchmarks.scale_model import (
    BYTES_PER_TOKEN,
    FUNCTIONS,
    SHARD_MEGABYTES,
    SHARDS,
    STAGES,
    TOKENS_PER_SEQUENCE,
    Model,
)

LARGEST_SLICE = 32 << 20
FILE_BYTES = 2 << 30  # of an input file: from that size on, slices are the largest
RANKS_PER_NODE = 8
CORES_PER_NODE = 64
NODES = (1, 64, 4096)
SIZES = {"10 billion": 10**10, "1 trillion": 10**12}
_KINDS = {"requests that write": ("PUT", "DELETE"), "requests that read": ("GET", "HEAD", "LIST")}
FILES_OF_A_PART = 5  # manifest, ids, train, offsets, checksums


def check(
    model: Model,
    cases: Sequence[dict[str, float]],
    plans: Sequence[dict[str, float]],
    starts: Sequence[dict[str, float]],
    requests: Sequence[dict[str, float]],
) -> None:
    """Print predictions beside measurements of sizes that the model has not seen."""
    rows = []
    for case in cases:
        size = f"{case['tokens'] / 1e6:.1f} M tokens"
        for stage in FUNCTIONS:
            rows.append(
                _compared(f"{size}: {stage}", "CPU s", model.seconds[stage].at(case[STAGES[stage]]), case[stage])
            )
        files = model.work_files.at(case["slices"])
        rows.append(_compared(f"{size}: files of the work directory", "", files, case["work files"]))
    for plan in plans:
        size = f"{plan['sequences'] / 1e6:.0f} M sequences"
        rows.append(_compared(f"{size}: plan", "CPU s", model.seconds["plan"].at(plan["sequences"]), plan["plan"]))
        memory = model.plan_megabytes.at(plan["sequences"])
        rows.append(_compared(f"{size}: memory of the plan", "MB", memory, plan["plan megabytes"]))
    for num_shards, start in zip(SHARDS[2:], starts, strict=True):
        for name, what, unit in (
            ("seconds of every shard", "open all", "CPU s"),
            ("opens of every shard", "files opened", ""),
        ):
            rows.append(_compared(f"{num_shards} shards: {what}", unit, model.start[name].at(num_shards), start[name]))
    for case in requests:
        size = f"{case['files']:.0f} files, {case['slices']:.0f} slices, {case['shards']:.0f} shards in a store"
        predicted = model.requests.at(case["files"], case["slices"], case["shards"])
        for what, methods in _KINDS.items():
            rows.append(
                _compared(
                    f"{size}: {what}", "", sum(predicted[one] for one in methods), sum(case[one] for one in methods)
                )
            )
        rows.append(_compared(f"{size}: to open all", "", model.requests_to_open.at(case["shards"]), case["open"]))
    print_table("Predicted and measured", ["", "predicted", "measured", "measured / predicted"], rows)


def _compared(what: str, unit: str, predicted: float, measured: float) -> list[str]:
    shown = [f"{value:,.0f}" if not unit else f"{value:,.2f} {unit}" for value in (predicted, measured)]
    return [what, *shown, f"{measured / predicted:.2f}" if predicted else "-"]


def project(model: Model) -> None:
    """Print the two large sizes."""
    many = 1e9  # so that what a stage costs once does not count
    taken = {stage: line.at(many) - line.at(1) for stage, line in model.seconds.items()}
    rates = [[stage, f"{many / one / 1e6:,.1f} M" if one else "-", STAGES[stage]] for stage, one in taken.items()]
    print_table("Rates of one core, measured here", ["stage", "per second", "unit"], rates)
    columns = [_prepare_column(model, num_tokens) for num_tokens in SIZES.values()]
    print_table("Prepare", ["", *SIZES], [[name, *(one[name] for one in columns)] for name in columns[0]])
    rows = []
    for name, num_tokens in SIZES.items():
        num_shards = math.ceil(num_tokens * BYTES_PER_TOKEN / (SHARD_MEGABYTES << 20))
        at = {key: line.at(num_shards) for key, line in model.start.items()}
        for nodes in NODES:
            ranks = nodes * RANKS_PER_NODE
            rows.append(
                [
                    f"{name}, {nodes:,} {'node' if nodes == 1 else 'nodes'}",
                    f"{at['seconds']:,.2f} s",
                    f"{at['opens']:,.0f}",
                    f"{at['opens'] * ranks:,.0f}",
                    f"{at['seconds of every shard']:,.1f} s",
                    f"{at['opens of every shard']:,.0f}",
                    f"{at['opens of every shard'] * ranks:,.0f}",
                    f"{at['megabytes']:,.0f} MB",
                    f"{ranks * at['seconds of every shard'] / 3600:,.2f}",
                ]
            )
    header = [
        "",
        "start",
        "files",
        "by all ranks",
        "every shard",
        "files",
        "by all ranks",
        "memory",
        "core hours of all",
    ]
    print_table(f"Training from a shared disk: one rank, and all, with {RANKS_PER_NODE} ranks per node", header, rows)
    _project_stores(model)


def _project_stores(model: Model) -> None:
    """Print requests and bytes with everything in an object store, for 1, 64 and 4,096 nodes."""
    prepare, training = [], []
    for name, num_tokens in SIZES.items():
        num_slices = math.ceil(num_tokens * model.bytes_per_token / LARGEST_SLICE)
        num_shards = math.ceil(num_tokens * BYTES_PER_TOKEN / (SHARD_MEGABYTES << 20))
        num_files = math.ceil(num_tokens * model.bytes_per_token / FILE_BYTES)
        requests = model.requests.at(num_files, num_slices, num_shards)
        stored = num_tokens * BYTES_PER_TOKEN / 1e12
        for nodes in NODES:
            label = f"{name}, {nodes:,} {'node' if nodes == 1 else 'nodes'}"
            again = FILES_OF_A_PART * num_slices * (nodes - 1)
            prepare.append(
                [
                    label,
                    f"{_wall(model.core_seconds(_units(model, num_tokens)), nodes * CORES_PER_NODE) / 3600:,.2f}",
                    f"{sum(requests[one] for one in _KINDS['requests that write']):,.0f}",
                    f"{sum(requests[one] for one in _KINDS['requests that read']) + again:,.0f}",
                    f"{2 * stored:,.2f} TB",
                    f"{stored * nodes:,.2f} TB",
                    f"{8e-9 * num_tokens / TOKENS_PER_SEQUENCE:,.2f} GB",
                ]
            )
            to_open = model.requests_to_open.at(num_shards)
            start = model.requests_to_open.at(0)
            training.append(
                [
                    label,
                    f"{start * nodes:,.0f}",
                    f"{to_open:,.0f}",
                    f"{to_open * nodes:,.0f}",
                    f"{stored:,.2f} TB",
                    f"{stored * nodes:,.2f} TB",
                ]
            )
    print_table(
        f"Prepare in an object store, on nodes of {CORES_PER_NODE} cores that all encode and publish",
        ["", "hours", "writing requests", "reading requests", "sent", "fetched to publish", "fetched to plan"],
        prepare,
    )
    print_table(
        "Training from an object store, through the cache of each node",
        ["", "requests to start", "a node, every shard", "all nodes", "fetched by a node", "by all nodes"],
        training,
    )


def _units(model: Model, num_tokens: int) -> dict[str, float]:
    return {
        "bytes": num_tokens * model.bytes_per_token,
        "tokens": float(num_tokens),
        "sequences": num_tokens / TOKENS_PER_SEQUENCE,
    }


def _prepare_column(model: Model, num_tokens: int) -> dict[str, str]:
    units = _units(model, num_tokens)
    seconds = model.core_seconds(units)
    num_slices = math.ceil(units["bytes"] / LARGEST_SLICE)
    num_shards = math.ceil(num_tokens * BYTES_PER_TOKEN / (SHARD_MEGABYTES << 20))
    work_files, shard_files = model.work_files.at(num_slices), num_shards * model.shard_files
    return {
        "input": f"{units['bytes'] / 1e12:,.2f} TB, {num_slices:,} slices",
        **{f"{stage}, core hours": f"{value / 3600:,.2f}" for stage, value in seconds.items()},
        "all, core hours": f"{sum(seconds.values()) / 3600:,.1f}",
        "hours on 64 cores": f"{_wall(seconds, 64) / 3600:,.2f}",
        "hours on 1,024 cores": f"{_wall(seconds, 1024) / 3600:,.2f}",
        "memory of a worker": f"{model.encode_megabytes:,.0f} MB",
        "memory of the driver (plan)": f"{model.plan_megabytes.at(units['sequences']) / 1024:,.1f} GB",
        "disk: token store and shards": f"{2 * num_tokens * BYTES_PER_TOKEN / 1e12:,.2f} TB",
        "files of the work directory": f"{work_files:,.0f}",
        "files of the dataset": f"{shard_files:,.0f} in {num_shards:,} shards",
        # Input: checksum, cut, read. Work: written, and read by publish.
        "requests": f"{3 * num_slices + 2 * work_files + shard_files:,.0f}",
    }


def _wall(seconds: dict[str, float], num_cores: int) -> float:
    """Encode and publish are shared out; scan and plan run in one process."""
    return seconds["scan"] + seconds["plan"] + (seconds["encode"] + seconds["publish"]) / num_cores
