"""What collate refuses, and in which words; and that no damaged index makes it read foreign memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_packed_sft import create_sft_dataset, open_shard
from megatron_packed_sft.data.batch import collate_kernel
from megatron_packed_sft.data.batch.collate import collate
from megatron_packed_sft.data.batch.contracts import CONTRACTS, CollateOptions
from megatron_packed_sft.data.batch.located_bins import (
    OK,
    STARTS,
    BinsInArrays,
    locate,
    locate_in_arrays,
    locate_in_samples,
    locate_in_shard,
)
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, ShardFileError
from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
from tests.packed_bins import make_bins, write_shard

SAMPLE: dict[str, Any] = {"input_ids": [5, 6, 7, 8], "seq_boundaries": [0, 2, 4], "loss_mask": [1, 0, 1, 0]}


def options(contract: str = "mcore", **arguments: Any) -> CollateOptions:
    return CollateOptions(**{"contract": contract, "eos_id": 3, "max_seq_length": 64, **arguments})


@pytest.fixture
def shard(tmp_path: Path) -> MemmapShard:
    write_shard(tmp_path / "shard", make_bins(6, 64, seed=1), 64)
    opened = open_shard(tmp_path / "shard")
    assert isinstance(opened, MemmapShard)
    return opened


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_bin_that_is_too_long_is_named_with_its_shard_and_the_remedy(shard: MemmapShard, contract: str) -> None:
    longest = int(shard.arrays.packed_len.argmax())
    count = len(shard[longest].seq_start_id)
    needed = int(shard.arrays.packed_len[longest]) - (0 if contract == "hf" else count)
    located = [locate_in_shard(shard, [0, longest] if longest else [1, longest])]
    with pytest.raises(InvalidInputError) as caught:
        collate(located, 2, options(contract, max_seq_length=needed - 1))
    message = str(caught.value)
    assert str(shard.path) in message
    assert f"bin {longest} " in message
    assert f"set max_seq_length to at least {needed}" in message
    collate(located, 2, options(contract, max_seq_length=needed))


def test_starts_that_somebody_changes_while_a_batch_is_made_lead_nowhere() -> None:
    located = locate_in_samples([{"input_ids": [1] * 6, "seq_boundaries": [0, 4, 5, 6], "loss_mask": [0] * 6}])
    ids = np.zeros((3, 1, 8), np.int32)
    ids[0, 0, :3] = 0, 4, 5  # the starts, in a place that the first tokens overwrite
    located.table[STARTS, 0] = ids.ctypes.data
    boundaries = np.empty((2, 1, 5), np.int32)
    nothing = np.empty((0, 0), np.bool_), np.empty((0, 0), np.int32)
    buffers = ids, np.empty((1, 8), np.uint8), np.empty(0), boundaries, np.empty((1, 1), np.int32), *nothing
    code, _ = collate_kernel.fill(0, located.table, np.empty((2, 0), np.int64), *buffers, 2, True, False, False, False)
    assert code == OK
    assert boundaries[0, 0].tolist() == [0, 3, 3, 3, 8]


def test_an_empty_batch_is_refused_in_one_sentence(shard: MemmapShard) -> None:
    dataset = create_sft_dataset(shard.path, 2)
    with pytest.raises(InvalidInputError, match="a batch of 0 got 0 bins; give one for each batch index"):
        dataset.fetch_batch([])


def test_every_batch_index_is_filled_exactly_once(shard: MemmapShard) -> None:
    with pytest.raises(InvalidInputError, match=r"bin 4 has batch index 1, which is taken"):
        collate([locate_in_shard(shard, [3], [1]), locate_in_shard(shard, [4], [1])], 2, options())
    with pytest.raises(InvalidInputError, match=r"bin 3 has batch index 2"):
        collate([locate_in_shard(shard, [0, 3], [0, 2])], 2, options())
    with pytest.raises(InvalidInputError, match=r"bin 3 has batch index -1"):
        collate([locate_in_shard(shard, [3], [-1])], 1, options())
    with pytest.raises(InvalidInputError, match=r"a batch of 2 got 1 bins"):
        collate([locate_in_shard(shard, [3])], 2, options())
    with pytest.raises(InvalidInputError, match=r"a batch of 0 got 0 bins"):
        collate([], 0, options())
    with pytest.raises(InvalidInputError, match=r"2 bins have 1 batch indices and 2 is_padding flags"):
        locate_in_shard(shard, [0, 1], [0])


def test_a_bin_number_outside_the_shard_is_an_index_error(shard: MemmapShard) -> None:
    for number in (6, -1):
        with pytest.raises(IndexError, match=rf"bin {number} of 6"):
            locate_in_shard(shard, [0, number])
    flat = (np.zeros(4, np.int32), np.zeros(4, np.uint8), np.array([0, 4]), np.zeros(1, np.uint32), np.array([0, 1]))
    for number in (1, -1):
        with pytest.raises(IndexError, match=rf"the bins: bins \[{number}\] of 1"):
            locate_in_arrays(*flat, [number])


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("packed_len.npy", 2, 65, "packed_len.npy is damaged at bin 2"),
        ("packed_len.npy", 2, 0, "packed_len.npy is damaged at bin 2"),
        ("seq_offsets.npy", 3, 10_000, "seq_offsets.npy is damaged at bin 2"),
        ("seq_offsets.npy", 3, 0, "seq_offsets.npy is damaged at bin 2"),
    ],
)
def test_a_damaged_index_is_an_error_that_names_the_file(
    shard: MemmapShard, name: str, index: int, value: int, message: str
) -> None:
    overwrite(shard, name, index, value)
    with pytest.raises(ShardFileError, match=message):
        locate_in_shard(shard, [2])


@pytest.mark.parametrize("contract", CONTRACTS)
def test_damaged_sequence_starts_are_an_error_that_names_the_bin(shard: MemmapShard, contract: str) -> None:
    number = next(number for number in range(6) if len(shard[number].seq_start_id) > 1)
    first = int(shard.arrays.seq_offsets[number])
    for index, value in ((first, 1), (first + 1, 0), (first + 1, 2**32 - 1)):
        whole = int(shard.arrays.seq_starts[index])
        overwrite(shard, "seq_starts.npy", index, value)
        with pytest.raises(ShardFileError, match=rf"bin {number} is damaged: its sequence starts do not rise from 0"):
            collate([locate_in_shard(shard, [number])], 1, options(contract))
        overwrite(shard, "seq_starts.npy", index, whole)
    collate([locate_in_shard(shard, [number])], 1, options(contract))


def overwrite(shard: MemmapShard, name: str, index: int, value: int) -> None:
    """Change a number of an array file behind the reader's back."""
    assert len(shard.arrays.packed_len) == 6  # mapped
    array = np.load(shard.path / name, mmap_mode="r+")
    array[index] = value
    array.flush()


@settings(max_examples=300, deadline=None)
@given(
    table=st.lists(st.one_of(st.integers(-2, 12), st.integers(-(2**63), 2**63 - 1)), min_size=7, max_size=7),
    starts=st.lists(st.one_of(st.integers(0, 10), st.integers(0, 2**32 - 1)), min_size=1, max_size=4),
    contract=st.sampled_from(sorted(CONTRACTS)),
)
@example(table=[2**63 - 1, 5, 0, 1, 0, 0, 0], starts=[0], contract="mcore")  # the end overflows
@example(table=[0, 2**63 - 1, -(2**62), 2**62, 0, 0, 0], starts=[0], contract="mcore")
@example(table=[0, 2**63 - 1, 0, 1, 0, 0, 0], starts=[0], contract="hf")
@example(table=[2, 8, 0, 2, 0, 0, 0], starts=[0, 3], contract="hf")  # a sound one
def test_no_table_of_bins_reads_outside_its_arrays(table: list[int], starts: list[int], contract: str) -> None:
    # Only our errors, never a crash: the kernel must check each number before it uses it.
    ids, mask = np.arange(10, dtype=np.int32), np.ones(10, np.uint8)
    found = BinsInArrays(*np.array(table, np.int64)[:, None])
    try:
        located = locate(found, ids, mask, np.array(starts, np.uint32), "hostile")
        batch = collate([located], 1, options(contract))
    except PackedSFTError:
        return
    tokens = batch["input_ids" if contract == "hf" else "tokens"].flatten().tolist()
    assert all(0 <= token < 10 for token in tokens)


def test_options_that_make_no_sense_are_refused() -> None:
    for arguments, message in (
        ({"contract": "bridge_0_4"}, r"contract 'bridge_0_4' is unknown; choose from bridge_0_6, bridge_main"),
        ({"eos_id": -1}, r"eos_id is -1; it must be a token id"),
        ({"max_seq_length": 0}, r"max_seq_length is 0; it must be at least 1"),
        ({"pad_seq_length_to_mult": 0}, r"pad_seq_length_to_mult is 0"),
        ({"pad_seq_to_mult": 0}, r"pad_seq_to_mult is 0"),
        ({"pad_cu_seqlens": True}, r"set pad_to_max_length=True"),
        ({"pad_cu_seqlens": True, "pad_to_max_length": True}, r"pad_cu_seqlens needs dataset_max_seqlen"),
        ({"contract": "hf", "return_cu_seqlen": False}, r"leave return_cu_seqlen on"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            options(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [5, 6, 7]}, r"sample 1 of the batch has 3 input_ids but 4 loss_mask values"),
        ({"seq_boundaries": [0, 2]}, r"seq_boundaries of sample 1 of the batch must rise from 0 to its 4 tokens"),
        ({"seq_boundaries": [0, 2, 2, 4]}, r"seq_boundaries of sample 1 of the batch must rise"),
        ({"seq_boundaries": [1, 4]}, r"seq_boundaries of sample 1 of the batch must rise"),
        ({"seq_boundaries": [4]}, r"seq_boundaries of sample 1 of the batch must rise"),
        ({"loss_mask": [0, 2, 0, 0]}, r"loss_mask of sample 1 of the batch is 2 at position 1"),
        ({"input_ids": [0, -5, 0, 0]}, r"input_ids of sample 1 of the batch is -5 at position 1"),
        ({"input_ids": [0, 2**31, 0, 0]}, r"input_ids of sample 1 of the batch is 2147483648 at position 1"),
        ({"input_ids": [0.5, 0.5, 0.5, 0.5]}, r"input_ids of sample 1 of the batch has shape \(4,\) and type float64"),
    ],
)
def test_a_malformed_sample_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        locate_in_samples([SAMPLE, {**SAMPLE, **change}])


def test_a_sample_without_a_field_and_an_empty_batch_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"sample 0 of the batch has no loss_mask"):
        locate_in_samples([{"input_ids": [5], "seq_boundaries": [0, 1]}])
    with pytest.raises(InvalidInputError, match=r"the batch is empty"):
        locate_in_samples([])
