"""Packing beside the peers' own code: time, peak memory, fullness, and the distance to the lower bound.

python -m benchmarks.packing --sizes 10000 100000 1000000 10000000

Ours is the whole of `pack`: checks, plan in canonical order, fingerprint. A peer is its packing function, given lengths
in the form it takes fastest; making that form is not counted. Peers that are not installed are named and left out:
    pip install lightbinpack binpacking
    pip install --no-deps trl datasets transformers llamafactory   (and pyarrow, huggingface_hub, tokenizers, ...)
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.measure import in_own_process, print_table
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.packing.strategies.packing_problem import martello_toth_bound

Lengths = npt.NDArray[np.int64]

REAL_DATA = Path(os.environ.get("PACKED_SFT_DATA") or Path(__file__).parents[2] / "shared" / "data")
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)


def chat(count: int, rng: np.random.Generator) -> Lengths:
    """Short chats: log-normal, a median of 270 tokens."""
    return np.clip(np.exp(rng.normal(5.6, 0.9, count)), 8, 4096).astype(np.int64)


def bimodal(count: int, rng: np.random.Generator) -> Lengths:
    """Half short answers, half long ones, two of which nearly fill a bin."""
    is_short = rng.random(count) < 0.5
    return np.clip(np.where(is_short, rng.normal(300, 60, count), rng.normal(1800, 150, count)), 16, 4096).astype(
        np.int64
    )


def reasoning(count: int, rng: np.random.Generator) -> Lengths:
    """Long chains of thought: log-normal, a median of 4,400 tokens."""
    return np.clip(np.exp(rng.normal(8.4, 0.9, count)), 32, 32_768).astype(np.int64)


def thirds(count: int, rng: np.random.Generator) -> Lengths:
    """Around a third of the pack."""
    return np.clip(rng.normal(4096 / 3, 130, count), 8, 4096).astype(np.int64)


def uniform(count: int, rng: np.random.Generator) -> Lengths:
    """Every length alike."""
    return rng.integers(1, 4097, count)


def real(count: int, rng: np.random.Generator) -> Lengths:
    """Drawn from the lengths of real chats (a token per four bytes, five more per message)."""
    return np.clip(rng.choice(_real_lengths(), count), 8, 2048)


@cache
def _real_lengths() -> Lengths:
    def rows() -> Iterator[dict[str, Any]]:
        for path in sorted(REAL_DATA.glob("*.jsonl*")):
            with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
                yield from map(json.loads, file)

    def tokens(row: dict[str, Any]) -> int:
        messages = row.get("messages")
        texts = [str(m.get("content") or "") for m in messages] if messages else [str(v) for v in row.values()]
        return sum(len(text.encode()) // 4 + 5 for text in texts)

    return np.array([tokens(row) for row in rows()])


DISTRIBUTIONS: dict[str, tuple[Callable[[int, np.random.Generator], Lengths], int]] = {
    "chat": (chat, 4096),
    "bimodal": (bimodal, 4096),
    "reasoning": (reasoning, 32_768),
    "thirds": (thirds, 4096),
    "uniform": (uniform, 4096),
    "real": (real, 2048),
}


def _lightbinpack(lengths: Lengths, pack_size: int) -> Callable[[], int]:
    from lightbinpack import obfd  # type: ignore[import-not-found, unused-ignore]

    listed = lengths.tolist()
    return lambda: len(obfd(listed, pack_size))


def _binpacking(lengths: Lengths, pack_size: int) -> Callable[[], int]:
    """In groups of a thousand, as ms-swift calls it: over everything it is quadratic."""
    from binpacking import to_constant_volume  # type: ignore[import-not-found, unused-ignore]

    groups = [list(enumerate(lengths[start : start + 1000].tolist())) for start in range(0, lengths.size, 1000)]
    return lambda: sum(len(to_constant_volume(group, pack_size, weight_pos=1)) for group in groups)


def _trl(lengths: Lengths, pack_size: int) -> Callable[[], int]:
    import pyarrow as pa
    from trl.data_utils import _pack_bfd  # type: ignore[import-not-found, unused-ignore]

    offsets = np.concatenate([[0], np.cumsum(lengths)])
    # One byte per token, so that copying tokens, which it does as well, weighs little.
    tokens = pa.array(np.zeros(int(offsets[-1]), np.int8))
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), tokens)})
    return lambda: len(_pack_bfd(table, pack_size))


def _llamafactory(lengths: Lengths, pack_size: int) -> Callable[[], int]:
    # The file alone: importing the package would want torch.
    package = importlib.util.find_spec("llamafactory")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "data" / "processor" / "processor_utils.py"
    spec = importlib.util.spec_from_file_location("llamafactory_processor_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    listed = lengths.tolist()
    return lambda: len(module.greedy_knapsack(list(listed), pack_size))


def _ours(strategy: str) -> Callable[[Lengths, int], Callable[[], int]]:
    def prepare(lengths: Lengths, pack_size: int) -> Callable[[], int]:
        def run() -> int:
            plan = pack(lengths, pack_size=pack_size, strategy=strategy)
            assert plan.fingerprint
            return plan.num_bins

        return run

    return prepare


# Name -> package, most sequences it is asked to pack here, how to call it.
PACKERS: dict[str, tuple[str, int, Callable[[Lengths, int], Callable[[], int]]]] = {
    "ours: optimal": ("megatron_packed_sft", 10**9, _ours("optimal")),
    "ours: window": ("megatron_packed_sft", 10**9, _ours("window")),
    "ours: best_fit": ("megatron_packed_sft", 10**9, _ours("best_fit")),
    "lightbinpack obfd": ("lightbinpack", 10**9, _lightbinpack),
    "binpacking, by 1,000": ("binpacking", 10**5, _binpacking),
    "LLaMA-Factory knapsack": ("llamafactory", 10**5, _llamafactory),
    "TRL bfd": ("trl", 10**4, _trl),
}
REFERENCE = "lightbinpack obfd"


def is_installed(packer: str) -> bool:
    """Tell whether the packer's package can be imported."""
    return importlib.util.find_spec(PACKERS[packer][0]) is not None


def make_lengths(distribution: str, count: int) -> tuple[Lengths, int]:
    """Return lengths and the pack size; the same lengths in every process."""
    make, pack_size = DISTRIBUTIONS[distribution]
    return make(count, np.random.default_rng(0)), pack_size


def _reset_peak() -> float:
    """Forget the most memory this process has had, and return what it has now, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> float:
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["VmHWM"].split()[0]) / 1024


def measure_packer(packer: str, distribution: str, count: int, repeats: int) -> dict[str, float]:
    """Pack in this process: best time, memory on top of the lengths, number of bins."""
    logging.getLogger("megatron_packed_sft").setLevel(logging.ERROR)  # `window` warns when it falls back
    prepare = PACKERS[packer][2]
    for small in DISTRIBUTIONS if packer.startswith("ours") else [distribution]:
        if small != "real" or REAL_DATA.is_dir():
            prepare(*make_lengths(small, 5000))()  # compiled code comes from disk, not counted
    lengths, pack_size = make_lengths(distribution, count)
    run = prepare(lengths, pack_size)
    before = _reset_peak()
    seconds = []
    num_bins = 0
    for _ in range(repeats):
        start = time.perf_counter()
        num_bins = run()
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds), "megabytes": _peak() - before, "bins": num_bins}


def compare(count: int, repeats: int, distributions: Sequence[str]) -> None:
    """Print one table: every packer that is installed, every distribution, `count` sequences."""
    rows = []
    for distribution in distributions:
        if distribution == "real" and not REAL_DATA.is_dir():
            rows.append([f"{distribution}: no data in {REAL_DATA}", *[""] * 7])
            continue
        lengths, pack_size = make_lengths(distribution, count)
        histogram = np.bincount(lengths, minlength=pack_size + 1)
        bound = int(martello_toth_bound(histogram, pack_size))
        measured = {
            packer: in_own_process(measure_packer, packer, distribution, count, repeats)
            for packer in PACKERS
            if is_installed(packer) and count <= PACKERS[packer][1]
        }
        for packer, found in measured.items():
            ratio = "-"
            if REFERENCE in measured:
                ratio = f"{measured[REFERENCE]['seconds'] / found['seconds']:.1f}x"
            rows.append(
                [
                    distribution,
                    packer,
                    f"{1000 * found['seconds']:,.1f}",
                    ratio,
                    f"{found['megabytes']:,.0f}",
                    f"{found['bins']:,.0f}",
                    f"{lengths.sum() / pack_size / found['bins']:.5f}",
                    f"{100 * (found['bins'] / bound - 1):.4f}",
                ]
            )
    header = ["lengths", "packer", "ms", f"vs {REFERENCE}", "peak MB", "bins", "fullness", "above bound %"]
    print_table(f"{count:,} sequences, best of {repeats}; bound = max(ceil(sum / pack), L2)", header, rows)


def composition(count: int) -> None:
    """Print how bins are composed, and what steps of even cost gain."""
    rows = []
    for distribution in ("chat", "reasoning", "real"):
        if distribution == "real" and not REAL_DATA.is_dir():
            continue
        lengths, pack_size = make_lengths(distribution, count)
        for strategy in ("best_fit", "first_fit_shuffle", "optimal", "window"):
            plan = pack(lengths, pack_size=pack_size, strategy=strategy, shuffle_output=True, steps={"global_batch": 8})
            even = pack(
                lengths,
                pack_size=pack_size,
                strategy=strategy,
                steps={"global_batch": 8, "balance": "attention", "whole_batches": True},
            )
            members = np.diff(plan.bin_offsets)
            between = (members * (plan.bin_tokens / members - lengths.mean()) ** 2).sum()
            spans = plan.indices[plan.bin_offsets[1:] - 1] - plan.indices[plan.bin_offsets[:-1]]
            stats = plan.stats()
            rows.append(
                [
                    distribution,
                    strategy,
                    f"{100 * stats.gap:.3f}",
                    f"{stats.max_items_per_bin}",
                    f"{between / ((lengths - lengths.mean()) ** 2).sum():.2f}",
                    f"{np.median(spans):,.0f}",
                    f"{stats.step_imbalance:.2f}",
                    f"{even.stats().step_imbalance:.3f}",
                    f"{even.stats().utilization:.5f}",
                ]
            )
    header = ["lengths", "strategy", "gap %", "most in a bin", "variance between bins", "median span"]
    header += ["slowest of 8, shuffled", "slowest of 8, balanced", "fullness, whole batches"]
    print_table(f"Composition, {count:,} sequences", header, rows)


def compilation() -> None:
    """Print the time of the first call ever, and of the first call of a later process."""
    script = (
        "import time; start = time.perf_counter();"
        "from benchmarks.packing import make_lengths, pack;"
        "lengths, size = make_lengths('{name}', 20000); pack(lengths, pack_size=size);"
        "print(time.perf_counter() - start)"
    )
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name, stages in (("uniform", "best fit only"), ("bimodal", "all three searches")):
            seconds = [
                float(
                    subprocess.run(
                        [sys.executable, "-c", script.format(name=name)],
                        env={**os.environ, "NUMBA_CACHE_DIR": f"{directory}/{name}"},
                        capture_output=True,
                        text=True,
                        check=True,
                    ).stdout
                )
                for _ in range(2)
            ]
            rows.append([f"{name} ({stages})", f"{seconds[0]:.1f}", f"{seconds[1]:.2f}"])
    print_table("First call of a process, imports included", ["", "compiling, s", "compiled before, s"], rows)


def main(argv: Sequence[str]) -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of sequences")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--distributions", nargs="+", choices=DISTRIBUTIONS, default=list(DISTRIBUTIONS))
    parser.add_argument("--skip-compilation", action="store_true", help="do not measure compiling from scratch")
    arguments = parser.parse_args(argv)
    logging.getLogger("megatron_packed_sft").setLevel(logging.ERROR)
    print(f"# Packing (default strategy: {'optimal'})")
    for packer in PACKERS:
        if not is_installed(packer):
            print(f"{packer}: not installed")
    for count in arguments.sizes:
        compare(count, arguments.repeats, arguments.distributions)
    composition(min(100_000, max(arguments.sizes)))
    if not arguments.skip_compilation:
        compilation()


if __name__ == "__main__":
    main(sys.argv[1:])
