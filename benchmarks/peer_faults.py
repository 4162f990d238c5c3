"""Damage, full disks and kills, and what happens to packed data, here and in the formats of the peers.

python -m benchmarks.peer_faults --flips 300        prints the tables of docs/reliability.md

Each attempt runs in a child process, because some of them end it by a signal.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pickle
import resource
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import print_table
from benchmarks.storage import part, rows
from megatron_packed_sft import create_sft_dataset
from megatron_packed_sft.storage.bins import BinBlock
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter

NUM_BINS = 256
PACK_SIZE = 1024
_EQUAL, _WRONG, _ERROR = 0, 1, 2
_NAMES = {_EQUAL: "same rows", _WRONG: "wrong rows", _ERROR: "error"}
Rows = list[Any]


@dataclass(frozen=True)
class Format:
    """A way to keep packed data: how it is written, opened, and read row by row."""

    write: Callable[[Path, BinBlock], None]
    open: Callable[[Path], Any]
    read: Callable[[Any], Rows]


def samples(block: BinBlock) -> Iterator[dict[str, list[int]]]:
    """The rows as the dictionaries that the peers keep."""
    for row in range(len(block.packed_len)):
        length = int(block.packed_len[row])
        starts = block.seq_starts[block.seq_offsets[row] : block.seq_offsets[row + 1]]
        yield {
            "input_ids": block.input_ids[row, :length].tolist(),
            "loss_mask": block.loss_mask[row, :length].tolist(),
            "seq_start_id": starts.tolist(),
        }


def write_memmap(target: Path, block: BinBlock) -> None:
    """Our shard."""
    with MemmapShardWriter(target / "shard", NUM_BINS, PACK_SIZE) as writer:
        writer.write_block(0, block)
        writer.finalize()


def write_legacy(target: Path, block: BinBlock) -> None:
    """A pickled .npy, as NeMo and Megatron-Bridge write it."""
    np.save(target / "packed.npy", list(samples(block)))  # type: ignore[arg-type]


def write_parquet(target: Path, block: BinBlock) -> None:
    """Packed Parquet, as Megatron-Bridge writes it."""
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(list(samples(block)))
    parquet.write_table(table, target / "packed.parquet", compression="zstd", row_group_size=1000)


def write_datasets(target: Path, block: BinBlock) -> None:
    """A data set of Hugging Face's datasets, on disk."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(list(samples(block))).save_to_disk(str(target / "arrow"))


def write_indexed(target: Path, block: BinBlock) -> None:
    """megatron-core's indexed dataset: ids only, because it cannot hold masks."""
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(target / "packed.bin"), dtype=DType.dtype_from_code(4))
    for sample in samples(block):
        builder.add_item(torch.tensor(sample["input_ids"]))
        builder.end_document()
    builder.finalize(str(target / "packed.idx"))


def open_datasets(target: Path) -> Any:
    """What save_to_disk wrote."""
    import datasets

    return datasets.load_from_disk(str(target / "arrow"))


def open_indexed(target: Path) -> Any:
    """megatron-core's reader."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(str(target / "packed"))


def open_parquet(target: Path) -> Any:
    """The reader of pyarrow."""
    from pyarrow import parquet

    return parquet.ParquetFile(target / "packed.parquet", memory_map=True)


def read_memmap(opened: Any) -> Rows:
    """The samples of the map-style dataset, as the trainer reads them."""
    return [
        (opened[row]["input_ids"].tolist(), opened[row]["loss_mask"].tolist(), opened[row]["seq_boundaries"])
        for row in range(len(opened))
    ]


def open_memmap(target: Path) -> Any:
    """Our dataset."""
    return create_sft_dataset(target / "shard", tokenizer=0)


FORMATS = {
    "memmap_v1": Format(write_memmap, open_memmap, read_memmap),
    "legacy pickled .npy": Format(
        write_legacy, lambda target: np.load(target / "packed.npy", allow_pickle=True), lambda opened: list(opened)
    ),
    "packed Parquet (zstd)": Format(write_parquet, open_parquet, lambda opened: opened.read().to_pylist()),
    "IndexedDataset": Format(
        write_indexed, open_indexed, lambda opened: [opened[row].tolist() for row in range(len(opened))]
    ),
    "datasets (Arrow)": Format(write_datasets, open_datasets, lambda opened: opened.to_list()),
}


def in_child(attempt: Callable[[], int]) -> str:
    """Run an attempt in a forked child; return how it ended."""
    child = os.fork()
    if child == 0:
        code = _ERROR
        with contextlib.suppress(BaseException), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            code = attempt()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return _NAMES[os.WEXITSTATUS(status)]


def files_of(folder: Path) -> list[Path]:
    """The files of a folder that hold something, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def compared(form: Format, folder: Path, expected: Rows) -> int:
    """Open and read everything."""
    return _EQUAL if form.read(form.open(folder)) == expected else _WRONG


def flipped_bits(form: Format, folder: Path, expected: Rows, num_flips: int) -> Counter[str]:
    """Flip one bit of all bytes at a time, read everything, flip it back."""
    rng = np.random.default_rng(1)
    files = files_of(folder)
    ends = np.cumsum([path.stat().st_size for path in files])
    outcomes: Counter[str] = Counter()
    for position in rng.integers(0, ends[-1], num_flips):
        number = int(np.searchsorted(ends, position, side="right"))
        offset = int(position - (ends[number - 1] if number else 0))
        with open(files[number], "r+b", buffering=0) as file:
            before = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([before[0] ^ 1 << int(rng.integers(8))]), offset)
            outcomes[in_child(lambda: compared(form, folder, expected))] += 1
            os.pwrite(file.fileno(), before, offset)
    return outcomes


def cut_while_open(form: Format, folder: Path, expected: Rows) -> str:
    """Open, read, cut the largest file to a quarter in place, read again."""

    def attempt() -> int:
        opened = form.open(folder)
        form.read(opened)
        largest = max(files_of(folder), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 4)
        return _EQUAL if form.read(opened) == expected else _WRONG

    return in_child(attempt)


def left_behind(form: Format, folder: Path, expected: Rows) -> str:
    """Return what a broken writer leaves: nothing, a whole result, or a part under its final name."""
    if in_child(lambda: compared(form, folder, expected)) == _NAMES[_EQUAL]:
        return "whole"
    visible = [
        path for path in files_of(folder) if not any(name.startswith(".") for name in path.parts[len(folder.parts) :])
    ]
    return "part of it under its name" if visible else "nothing"


def full_disk(form: Format, block: BinBlock, folder: Path, size: int, expected: Rows) -> str:
    """Write while no file may grow beyond half of the largest one, as a full disk would do it."""

    def attempt() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, resource.RLIM_INFINITY))
        form.write(folder, block)
        return _EQUAL

    return f"{in_child(attempt)}, left: {left_behind(form, folder, expected)}"


def killed(form: Format, block: BinBlock, parent: Path, expected: Rows, num_kills: int) -> Counter[str]:
    """Kill the writer at even distances over the time that it takes."""
    found: Counter[str] = Counter()
    started = time.perf_counter()
    (parent / "timed").mkdir()
    in_child(lambda: form.write(parent / "timed", block) or _EQUAL)
    seconds = time.perf_counter() - started
    for number in range(num_kills):
        folder = parent / str(number)
        folder.mkdir()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                form.write(folder, block)
            os._exit(0)
        time.sleep(seconds * (number + 1) / num_kills)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found[left_behind(form, folder, expected)] += 1
    return found


class MakesAFile:
    """What a hostile pickle does when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def runs_code(load: Callable[[Path], Any], folder: Path) -> str:
    """Does loading run what a file says?"""
    proof = folder / "proof"
    shutil.rmtree(proof, ignore_errors=True)
    in_child(lambda: load(proof) or _EQUAL)
    return "runs it" if proof.exists() else "refuses it"


def hostile_files(folder: Path) -> list[list[str]]:
    """Return which readers run code that a file contains."""
    from torch.distributed.checkpoint import FileSystemReader

    from megatron_packed_sft import open_shard
    from megatron_packed_sft.megatron.weights.torch_dist import TorchDistCheckpoint

    def pickled(name: str, proof: Path) -> Path:
        path = folder / name
        content = io.BytesIO()
        if name.endswith(".npy"):
            np.save(content, np.array([MakesAFile(proof)], dtype=object), allow_pickle=True)
        else:
            pickle.dump(MakesAFile(proof), content)
        path.write_bytes(content.getvalue())
        return path

    def checkpoint(reader: Callable[[Path], Any]) -> Callable[[Path], Any]:
        return lambda proof: reader(pickled(".metadata", proof).parent)

    return [
        ["a pickled .npy: numpy.load, as the peers call it", runs_code(numpy_load(pickled), folder)],
        ["a pickled .npy: here", runs_code(lambda proof: open_shard(pickled("ours.npy", proof)), folder)],
        [
            "a checkpoint's .metadata: torch.distributed.checkpoint, as Megatron-Core calls it",
            runs_code(checkpoint(lambda path: FileSystemReader(path).read_metadata()), folder),
        ],
        ["a checkpoint's .metadata: here", runs_code(checkpoint(TorchDistCheckpoint), folder)],
    ]


def numpy_load(pickled: Callable[[str, Path], Path]) -> Callable[[Path], Any]:
    """NumPy with pickles allowed."""
    return lambda proof: np.load(pickled("packed.npy", proof), allow_pickle=True)


def told(counts: Counter[str]) -> str:
    """Counts, the most frequent first."""
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def attacked(name: str, block: BinBlock, scratch: Path, num_flips: int, num_kills: int) -> list[str]:
    """All faults of one format, as a row."""
    form = FORMATS[name]
    folder = scratch / "sound"
    folder.mkdir()
    in_child(lambda: form.write(folder, block) or _EQUAL)
    expected = form.read(form.open(folder))
    size = max(path.stat().st_size for path in files_of(folder))
    flips = flipped_bits(form, folder, expected, num_flips)
    (scratch / "full").mkdir()
    (scratch / "kills").mkdir()
    full = full_disk(form, block, scratch / "full", size, expected)
    kills = killed(form, block, scratch / "kills", expected, num_kills)
    return [name, told(flips), cut_while_open(form, folder, expected), full, told(kills)]


def main(arguments: Sequence[str]) -> None:
    """Print what each format does."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--flips", type=int, default=300, help="bits that are flipped, one at a time")
    parser.add_argument("--kills", type=int, default=12, help="writers that are killed")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    block = part(rows(PACK_SIZE), 0, NUM_BINS)
    header = ["format", f"{options.flips} flipped bits", "cut while open", "disk full", f"{options.kills} kills: left"]
    table = []
    for name in FORMATS:
        with tempfile.TemporaryDirectory() as scratch:
            table.append(attacked(name, block, Path(scratch), options.flips, options.kills))
    print_table("Faults", header, table)
    with tempfile.TemporaryDirectory() as scratch:
        print_table("A file that holds code", ["file and reader", "what happens"], hostile_files(Path(scratch)))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
