"""Made the golden files in this folder, once: from docs/format.md with plain NumPy, json and xxhash, not by our writer.

    python tests/golden/make_golden.py

The files are committed and must be read the same forever (reliability.md row 23). A new format version gets a folder
of its own here; existing folders are never made again.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

HERE = Path(__file__).parent
PACK_SIZE = 8
PAD_ID = 3
BINS = [
    ([11, 12, 13, 14, 15, 21, 22, 23], [0, 1, 1, 1, 0, 1, 1, 0], [0, 5]),
    ([31], [0], [0]),
    ([41, 42, 43, 44], [0, 0, 1, 0], [0, 1, 2]),
]
SEQUENCES = [  # of the token stores: ids, train values and, in those with weights, weights
    ([11, 12, 13], [0, 1, 1], [0, 0.5, 1]),
    ([21], [0], [0]),
    ([31, 32, 33, 34], [0, 1, 0, 1], [0, 1, 0, 2.5]),
]
WEIGHTS = [[0, 0.5, 0.5, 0.5, 0, 1, 1, 0], [0], [0, 0, 2.5, 0]]  # of the weighted shard, in place of the masks


def arrays(id_dtype: str, pad_id: int) -> dict[str, np.ndarray]:
    """The five arrays, row by row."""
    ids = np.full((len(BINS), PACK_SIZE), pad_id, id_dtype)
    mask = np.zeros((len(BINS), PACK_SIZE), "|u1")
    for row, (tokens, trained, _) in enumerate(BINS):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(trained)] = trained
    return {
        "input_ids.npy": ids,
        "loss_mask.npy": mask,
        "packed_len.npy": np.array([len(tokens) for tokens, _, _ in BINS], "<u4"),
        "seq_offsets.npy": np.cumsum([0] + [len(starts) for _, _, starts in BINS]).astype("<u4"),
        "seq_starts.npy": np.array([start for _, _, starts in BINS for start in starts], "<u4"),
    }


def weights() -> np.ndarray:
    """The sixth array, of a shard with weights."""
    result = np.zeros((len(BINS), PACK_SIZE), "<f4")
    for row, values in enumerate(WEIGHTS):
        result[row, : len(values)] = values
    return result


def bin_checksums(parts: dict[str, np.ndarray]) -> np.ndarray:
    """The array of version 1.1: bin by bin, one column for each large array and one for the index."""
    result = []
    for row, length in enumerate(parts["packed_len.npy"].tolist()):
        first, last = parts["seq_offsets.npy"][row : row + 2].tolist()
        index = np.array([length, first, last, *parts["seq_starts.npy"][first:last]], "<u4")
        covered = [parts["input_ids.npy"][row, :length], parts["loss_mask.npy"][row, :length], index]
        if "loss_weights.npy" in parts:
            covered.append(parts["loss_weights.npy"][row, :length])
        result.append([xxhash.xxh3_64_intdigest(one.tobytes()) for one in covered])
    return np.array(result, "<u8")


def shard(path: Path, id_dtype: str, *, weighted: bool = False) -> None:
    """As docs/format.md describes it: padded headers, checksums, all keys."""
    path.mkdir()
    files = {}
    parts = {**arrays(id_dtype, PAD_ID), **({"loss_weights.npy": weights()} if weighted else {})}
    parts["bin_checksums.npy"] = bin_checksums(parts)
    for name, array in parts.items():
        size = 4096 if array.ndim == 2 and name != "bin_checksums.npy" else 128
        files[name] = write_array(path / name, array, size)
    manifest: dict[str, object] = {
        "version": "1.1",
        "format": "memmap_padded_v1",
        "num_bins": len(BINS),
        "pack_size": PACK_SIZE,
        "dtype": id_dtype,
        "loss_mask_dtype": "|u1",
        "index_dtype": "<u4",
        "bins_written": len(BINS),
        "files": files,
        "checksum_algorithm": "xxh3_128",
        "num_sequences": 6,
        "num_tokens": 13,
        "num_loss_tokens": 6,
        "max_seqs_per_bin": 3,
        "max_seq_len": 5,
        "min_packed_len": 1,
        "pad_id": PAD_ID,
        "vocab_size": 100 if id_dtype == "<u2" else 100_000,
        "tokenizer": {"name": "golden", "fingerprint": "0123"},
        "chat_template_fingerprint": "4567",
        "plan_fingerprint": "89ab",
        "pad_seq_to_mult": 1,
        "created_by": "make_golden.py",
        "bin_checksum_algorithm": "xxh3_64",
    }
    if weighted:
        manifest |= {"loss_weights_dtype": "<f4", "sum_loss_weights": 6.0}
    (path / "manifest.json").write_bytes(sealed(manifest))


def write_array(path: Path, array: np.ndarray, header_size: int) -> dict[str, object]:
    """Write an .npy with a padded header; return its entry in a manifest."""
    text = f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': {array.shape}, }}"
    header = b"\x93NUMPY\x01\x00" + (header_size - 10).to_bytes(2, "little")
    data = header + text.ljust(header_size - 11).encode() + b"\n" + array.tobytes()
    path.write_bytes(data)
    return {"bytes": len(data), "checksum": xxhash.xxh3_128(data).hexdigest()}


def sealed(document: dict[str, object]) -> bytes:
    """Render a document with its own checksum."""

    def rendered() -> bytes:
        lines = [f"{json.dumps(key)}: {json.dumps(document[key], sort_keys=True)}" for key in sorted(document)]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    document["self_checksum"] = xxhash.xxh3_128(rendered()).hexdigest()
    return rendered()


def sequence_checksum(arrays: list[np.ndarray]) -> int:
    """The entry of checksums.npy for one sequence: its ids, train values and, if there are any, weights."""
    numbers = np.array([len(arrays[0]), *(xxhash.xxh3_64_intdigest(one.tobytes()) for one in arrays)], "<u8")
    return xxhash.xxh3_64_intdigest(numbers.tobytes()) % 2**32


def token_store(path: Path, id_dtype: str, *, weighted: bool = False) -> None:
    """A token store of one part, as docs/format.md describes it."""
    part = path / "part_000000"
    part.mkdir(parents=True)
    sequences = [[np.array(ids, id_dtype), np.array(train, "|u1")] for ids, train, _ in SEQUENCES]
    for arrays, (_, _, own_weights) in zip(sequences, SEQUENCES, strict=True):
        arrays += [np.array(own_weights, "<f4")] if weighted else []
    names = ["ids.npy", "train.npy", *(["weights.npy"] if weighted else [])]
    parts = {name: np.concatenate([one[k] for one in sequences]) for k, name in enumerate(names)}
    parts["offsets.npy"] = np.cumsum([0] + [len(ids) for ids, _, _ in SEQUENCES]).astype("<u8")
    manifest: dict[str, object] = {
        "format": "token_store_v1",
        "version": "1.2",
        "num_sequences": 3,
        "num_tokens": 8,
        "num_trained_tokens": 4,
        "max_seq_len": 4,
        "dtype": id_dtype,
        "vocab_size": 100 if id_dtype == "<u2" else 100_000,
        "tokenizer": {"name": "golden", "fingerprint": "0123"},
        "chat_template_fingerprint": "4567",
        "checksum_algorithm": "xxh3_128",
        "created_by": "make_golden.py",
    }
    if weighted:
        manifest["weights_dtype"] = "<f4"
    parts["checksums.npy"] = np.array([sequence_checksum(one) for one in sequences], "<u4")
    manifest["sequence_checksum_algorithm"] = "xxh3_64_low32"
    manifest["files"] = {name: write_array(part / name, array, 128) for name, array in parts.items()}
    data = sealed(manifest)
    (part / "manifest.json").write_bytes(data)
    listed = {"name": part.name, "manifest_checksum": xxhash.xxh3_128(data).hexdigest(), "num_sequences": 3}
    index: dict[str, object] = {
        "format": "token_store_index_v1",
        "version": "1.0",
        "parts": [listed],
        "num_sequences": 3,
        "num_tokens": 8,
        "created_by": "make_golden.py",
    }
    (path / "store.json").write_bytes(sealed(index))


if __name__ == "__main__":
    for name, make in {
        "memmap_1_1_checksums": partial(shard, id_dtype="<i4"),
        "memmap_1_1_weighted_checksums": partial(shard, id_dtype="<u2", weighted=True),
        "token_store_1_2": partial(token_store, id_dtype="<u2"),
        "token_store_1_2_weighted": partial(token_store, id_dtype="<i4", weighted=True),
    }.items():
        if not (HERE / name).exists():
            make(HERE / name)
