"""Wrong input: one sentence each, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft import create_shard_writer
from megatron_packed_sft.errors import InvalidInputError, StorageIOError, TargetExistsError, WriterStateError
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter
from tests.packed_bins import block_of, make_bins, write_shard

GOOD = {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1, 0], "seq_start_id": [0, 2]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"input_ids": [[5, 6]]}, r"bin 1: input_ids has shape \(1, 2\) .* 1-dimensional array of integers"),
        ({"input_ids": [0.5, 1.0]}, "bin 1: input_ids has shape .* type float64"),
        ({"input_ids": [[1], [2, 3]]}, "bin 1: input_ids is not an array of integers"),
        ({"input_ids": []}, "bin 1: input_ids holds 0 tokens, a bin holds 1 to 8"),
        ({"input_ids": list(range(9))}, "bin 1: input_ids holds 9 tokens, a bin holds 1 to 8"),
        ({"input_ids": [5, -1, 7, 8]}, r"bin 1: input_ids is -1 at position 1, not in 0\.\.99"),
        ({"input_ids": [5, 6, 100, 8]}, r"bin 1: input_ids is 100 at position 2, not in 0\.\.99"),
        ({"input_ids": [5, 6, 2**40, 8]}, "bin 1: input_ids is 1099511627776 at position 2"),
        ({"loss_mask": [1, 0, 2, 0]}, r"bin 1: loss_mask is 2 at position 2, not in 0\.\.1"),
        ({"loss_mask": [256, 0, 0, 0]}, "bin 1: loss_mask is 256 at position 0"),
        ({"loss_mask": [1, 0]}, "bin 1: loss_mask has 2 values for 4 input_ids"),
        ({"loss_mask": [1, 1, 1, 0]}, "bin 1: loss_mask is 1 at position 1, the last token of a sequence"),
        ({"loss_mask": [1, 0, 1, 1]}, "bin 1: loss_mask is 1 at position 3, the last token of a sequence"),
        ({"seq_start_id": []}, "bin 1: seq_offsets give it 0 sequences"),
        ({"seq_start_id": [1, 2]}, "bin 1: seq_starts begin with 1, not 0"),
        ({"seq_start_id": [0, 2, 2]}, "bin 1: seq_starts do not increase at entry 2"),
        ({"seq_start_id": [0, 3, 1]}, "bin 1: seq_starts do not increase at entry 2"),
        ({"seq_start_id": [0, 4]}, "bin 1: seq_starts entry 1 is not below its length 4"),
        ({"seq_start_id": [0, -2]}, "bin 1: seq_start_id is -2 at position 1"),
        ({"bin_id": 2}, r"bin_id is 2; it must be an integer in 0\.\.1"),
        ({"bin_id": -1}, "bin_id is -1"),
    ],
)
def test_a_wrong_bin_is_refused_in_one_sentence(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with MemmapShardWriter(tmp_path / "shard", 2, 8, vocab_size=100) as writer:
        with pytest.raises(InvalidInputError, match=sentence) as caught:
            writer.write_bin(**{"bin_id": 1, **GOOD, **change})
        assert "\n" not in str(caught.value)
        # A refused bin is not written: the right one can still follow.
        writer.write_bin(1, **GOOD)
        writer.write_bin(0, **GOOD)
        writer.finalize()


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("input_ids", np.zeros((2, 7), np.int32), r"input_ids has shape \(2, 7\), not \(2, 8\)"),
        ("loss_mask", np.zeros((3, 8), np.uint8), r"loss_mask has shape \(3, 8\), not \(2, 8\)"),
        ("loss_mask", np.full((2, 8), 3, np.int64), "loss_mask is 3 at position 0, 0"),
        ("seq_offsets", np.array([0, 1], np.uint32), r"seq_offsets has shape \(2,\), not \(3,\)"),
        ("seq_starts", np.zeros(40, np.uint32), "seq_offsets span .* but seq_starts has 40"),
        ("packed_len", np.array([0, 3], np.uint32), r"packed_len is 0, not in 1\.\.8"),
        ("packed_len", np.array([9, 9], np.uint32), r"packed_len is 9, not in 1\.\.8"),
    ],
)
def test_a_wrong_block_is_refused_in_one_sentence(field: str, value: Any, sentence: str, tmp_path: Path) -> None:
    block = block_of(make_bins(2, 8), 8)
    parts = {name: getattr(block, name) for name in block.__dataclass_fields__} | {field: value}
    with MemmapShardWriter(tmp_path / "shard", 2, 8) as writer, pytest.raises(InvalidInputError, match=sentence):
        writer.write_block(0, type(block)(**parts))
    assert os.listdir(tmp_path) == []


def test_dirty_padding_is_refused(tmp_path: Path) -> None:
    rows = [row for row in make_bins(20, 8) if len(row.input_ids) < 8][:2]
    for field in ("input_ids", "loss_mask"):
        block = block_of(rows, 8)
        getattr(block, field)[1, 7] = 1
        with MemmapShardWriter(tmp_path / field, 2, 8) as writer, pytest.raises(InvalidInputError, match="padding"):
            writer.write_block(0, block)


def test_a_bin_twice_a_missing_bin_and_a_write_after_the_end_are_refused(tmp_path: Path) -> None:
    writer = MemmapShardWriter(tmp_path / "shard", 3, 8)
    writer.write_bin(1, **GOOD)
    with pytest.raises(WriterStateError, match="bin 1 was written already"):
        writer.write_bin(1, **GOOD)
    with pytest.raises(WriterStateError, match="2 of 3 bins were never written, the first is bin 0"):
        writer.finalize()
    with pytest.raises(WriterStateError, match="is closed"):
        writer.write_bin(0, **GOOD)
    assert os.listdir(tmp_path) == []


def test_total_seq_starts_is_a_capacity(tmp_path: Path) -> None:
    writer = MemmapShardWriter(tmp_path / "narrow", 1, 8, 1)
    writer.write_bin(0, **GOOD)
    with pytest.raises(WriterStateError, match="total_seq_starts is 1, but 2 sequences were written; raise it"):
        writer.finalize()
    with MemmapShardWriter(tmp_path / "roomy", 1, 8, 3) as writer:
        writer.write_bin(0, **GOOD)
        assert writer.finalize().num_sequences == 2


def test_an_existing_target_is_refused_and_an_empty_directory_is_not(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", make_bins(1, 8), 8)
    with pytest.raises(TargetExistsError, match="shard exists already; choose another name"):
        MemmapShardWriter(tmp_path / "shard", 1, 8)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TargetExistsError):
        MemmapShardWriter(tmp_path / "file", 1, 8)
    (tmp_path / "empty").mkdir()
    write_shard(tmp_path / "empty", make_bins(1, 8), 8)
    assert (tmp_path / "empty" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_bins": 0}, "num_bins is 0; it must be an integer in 1"),
        ({"pack_size": -1}, "pack_size is -1"),
        ({"pack_size": 2.5}, "pack_size is 2.5"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": 10, "pad_id": 10}, r"pad_id is 10; it must be an integer in 0\.\.9"),
        ({"checksum_algorithm": "crc32"}, "checksum algorithm 'crc32' is unknown; use one of xxh3_128, sha256"),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_created(
    arguments: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        MemmapShardWriter(tmp_path / "shard", **{"num_bins": 1, "pack_size": 8, **arguments})
    assert os.listdir(tmp_path) == []


def test_an_unknown_storage_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="storage 'zarr' is unknown; use one of memmap_v1, legacy, parquet"):
        create_shard_writer("zarr", tmp_path / "x", num_bins=1, pack_size=8)


def test_a_directory_without_permission_is_one_sentence(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from megatron_packed_sft import PackedSFTError\n"
        "from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "try: MemmapShardWriter(sys.argv[1], 1, 8)\n"
        "except PackedSFTError as error: print(error)\n"
    )
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent.owner() == "root" or os.getuid() != 0:
            os.chmod(parent, 0o755)
    done = subprocess.run([sys.executable, "-c", script, str(locked / "shard")], capture_output=True, text=True)
    assert done.stdout.startswith("cannot create a directory for"), done.stderr
    assert "Permission denied; check who owns it" in done.stdout


def test_a_target_below_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageIOError, match=r"cannot create a directory for .*file/shard"):
        MemmapShardWriter(tmp_path / "file" / "shard", 1, 8)


MEASURE = """
import resource, sys
import numpy as np
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter
ids, mask = np.arange(4096, dtype=np.int32), np.zeros(4096, np.uint8)
def write(name, num_bins):
    with MemmapShardWriter(f"{sys.argv[1]}/{name}", num_bins, 4096) as writer:
        for index in range(num_bins):
            writer.write_bin(index, ids, mask, [0])
        writer.finalize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
few = write("few", 60)
print(write("many", 6000) - few)
"""


def test_a_hundred_times_the_bins_take_no_more_memory(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 * 1024  # kilobytes, for 123 MB written
