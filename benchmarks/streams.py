"""Windows of a token stream: against plain NumPy slices of the same map, and against megatron-core's GPTDataset.

    python -m benchmarks.streams --tokens 50000000 --seq-length 4096

Plain slicing is what a careful loop does by hand: slice the map, cast to int64, wrap. GPTDataset reads the same tokens
and the same documents from megatron-core's own .bin/.idx files; it is built before the clock starts.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.measure import in_own_process, print_table, timed
from megatron_packed_sft import create_sft_dataset
from megatron_packed_sft.storage.token_stream.options import StreamOptions

EOS = 0
VOCAB_SIZE = 50_000
MEAN_DOCUMENT = 600
NUM_FILES = 8
BATCH = 8
NUM_READS = 4_000
ROUNDS = 5


def make_tokens(num_tokens: int) -> np.ndarray[Any, Any]:
    """Random documents of about 600 tokens with an EOS behind each."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(1, VOCAB_SIZE, num_tokens).astype(np.uint16)
    tokens[np.cumsum(rng.geometric(1 / MEAN_DOCUMENT, num_tokens // MEAN_DOCUMENT)) % num_tokens] = EOS
    tokens[-1] = EOS
    return tokens


def write_files(home: Path, tokens: np.ndarray[Any, Any]) -> None:
    """The stream, in a few .npy files."""
    home.mkdir()
    for number, part in enumerate(np.array_split(tokens, NUM_FILES)):
        np.save(home / f"shard_{number:05d}.npy", part)


def order_of(num_windows: int) -> list[int]:
    """Random window numbers."""
    return np.random.default_rng(1).integers(0, num_windows, NUM_READS).tolist()


def best_of_both(first: Callable[[], Any], second: Callable[[], Any]) -> dict[str, float]:
    """Rates of two ways, taken in turn so that a busy machine hits both; the best round of each counts."""
    first(), second()
    times = [(timed(first), timed(second)) for _ in range(ROUNDS)]
    return {"ours": NUM_READS / min(one for one, _ in times), "other": NUM_READS / min(other for _, other in times)}


def plain_windows(path: str, seq_length: int) -> Callable[[int], np.ndarray[Any, Any]]:
    """Windows by hand: maps, a cumulative count and a slice."""
    maps = [np.load(file, mmap_mode="r") for file in sorted(Path(path).glob("*.npy"))]
    offsets = np.cumsum([0, *((len(one) - 1) // seq_length for one in maps)])

    def window(index: int) -> np.ndarray[Any, Any]:
        number = int(np.searchsorted(offsets, index, side="right")) - 1
        start = (index - int(offsets[number])) * seq_length
        return maps[number][start : start + seq_length + 1]

    return window


def items_case(path: str, seq_length: int, packs: bool) -> dict[str, float]:
    """dataset[i] against the same item made by hand."""
    import torch

    dataset = create_sft_dataset(path, EOS, seq_length=seq_length, stream=StreamOptions(pack_sequences=packs))
    order, window = order_of(len(dataset)), plain_windows(path, seq_length)

    def by_hand() -> None:
        for index in order:
            tokens = torch.from_numpy(window(index).astype(np.int64))
            item = {"input_ids": tokens[:-1], "labels": tokens[1:]}
            if packs:
                documents = (tokens == EOS).cumsum(0)
                documents[1:] = documents[:-1].clone()
                documents[0] = 0
                item["labels"] = torch.where(documents[:-1] != documents[1:], -100, tokens[1:])
                item["doc_ids"] = documents[:-1]

    def ours() -> None:
        for index in order:
            dataset[index]

    return best_of_both(ours, by_hand)


def batches_case(path: str, seq_length: int, packs: bool) -> dict[str, float]:
    """fetch_batch (tokens, labels, positions, loss mask, boundaries) against slices that are only stacked."""
    import torch

    dataset = create_sft_dataset(path, EOS, seq_length=seq_length, stream=StreamOptions(pack_sequences=packs))
    order, window = order_of(len(dataset)), plain_windows(path, seq_length)

    def by_hand() -> None:
        for start in range(0, NUM_READS, BATCH):
            tokens = np.stack([window(index) for index in order[start : start + BATCH]]).astype(np.int64)
            whole = torch.from_numpy(tokens)
            _ = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    def ours() -> None:
        for start in range(0, NUM_READS, BATCH):
            dataset.fetch_batch(order[start : start + BATCH])

    return best_of_both(ours, by_hand)


def gpt_case(path: str, seq_length: int, packs: bool) -> dict[str, float]:
    """fetch_batch against megatron-core's GPTDataset with torch's default collate, on the same documents."""
    warnings.simplefilter("ignore")  # megatron-core's, about Apex
    try:
        dataset = gpt_dataset(path, seq_length, packs)
    except ImportError:
        return {"ours": float("nan"), "other": float("nan")}
    from torch.utils.data import default_collate

    stream = create_sft_dataset(path, EOS, seq_length=seq_length, stream=StreamOptions(pack_sequences=packs))
    order = order_of(min(len(dataset), len(stream)))

    def theirs() -> None:
        for start in range(0, NUM_READS, BATCH):
            default_collate([dataset[index] for index in order[start : start + BATCH]])

    def ours() -> None:
        for start in range(0, NUM_READS, BATCH):
            stream.fetch_batch(order[start : start + BATCH])

    return best_of_both(ours, theirs)


def gpt_dataset(path: str, seq_length: int, packs: bool) -> Any:
    """megatron-core's own dataset over the same tokens; positions and masks restart at EOS when documents count."""
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
    from megatron.core.datasets.utils import Split

    tokens = np.concatenate([np.load(file) for file in sorted(Path(path).glob("*.npy"))])
    ends = np.flatnonzero(tokens == EOS) + 1
    prefix = f"{path}_indexed_{int(packs)}"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in np.split(tokens, ends[:-1]):
        builder.add_item(torch.from_numpy(document.astype(np.int32)))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    indexed = IndexedDataset(prefix)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq_length,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=_Tokenizer(),
        reset_position_ids=packs,
        reset_attention_mask=False,
        eod_mask_loss=packs,
        create_attention_mask=False,
        path_to_cache=f"{prefix}_cache",
        mid_level_dataset_surplus=0.005,
    )
    numbers = np.arange(len(indexed.sequence_lengths), dtype=np.int32)
    return GPTDataset(indexed, prefix, numbers, None, Split.train, config)


class _Tokenizer:
    """What GPTDataset asks of a tokenizer."""

    eod = EOS
    pad = VOCAB_SIZE
    vocab_size = VOCAB_SIZE
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "benchmark"}


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--seq-length", type=int, default=4_096)
    arguments = parser.parse_args(argv)
    seq_length = arguments.seq_length
    cases = {
        "items, against plain NumPy slices": items_case,
        f"batches of {BATCH}, against plain NumPy slices": batches_case,
        f"batches of {BATCH}, against megatron-core's GPTDataset": gpt_case,
    }
    lines = []
    with tempfile.TemporaryDirectory(prefix="packed_sft_bench_") as home:
        write_files(Path(home) / "tokens", make_tokens(arguments.tokens))
        for packs in (False, True):
            for name, case in cases.items():
                rates = in_own_process(case, f"{home}/tokens", seq_length, packs)
                title = f"{name}{', documents apart' if packs else ''}"
                if np.isnan(rates["other"]):
                    lines.append((title, "", "", "not installed"))
                    continue
                ratio = f"{rates['ours'] / rates['other']:.2f}"
                lines.append((title, f"{rates['ours']:,.0f}", f"{rates['other']:,.0f}", ratio))
    print_table(
        f"Windows of {seq_length:,} predictions, shuffled, warm ({arguments.tokens:,} uint16 tokens)",
        ("", "ours, windows/s", "other, windows/s", "ours / other"),
        lines,
    )


if __name__ == "__main__":
    main()
