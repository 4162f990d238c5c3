"""A plan and a token store become shards: the same tokens, the right masks, the same bytes for any worker count."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft import create_shard_writer, open_shard, validate
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.options import PackOptions
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.tokens.materialize import materialize, materialize_shards, stored_width
from megatron_packed_sft.tokens.store import TokenStore, open_token_store
from tests.packed_bins import files_of
from tests.tokens.stores import Sequences, make_sequences, write_store


def expected_rows(plan: PackPlan, sequences: Sequences, pad_id: int) -> list[tuple[list[int], list[int], list[int]]]:
    """The rows of a plan, made the slow and obvious way."""
    rows = []
    for number in plan.bin_order.tolist():
        row_ids: list[int] = []
        row_mask: list[int] = []
        starts = []
        for unit in plan.bin(number).tolist():
            sequence, start, overlap = unit, 0, 0
            if plan.chunks is not None:
                sequence = int(plan.chunks.sequence[unit])
                start = int(plan.chunks.start[unit])
                overlap = int(plan.chunks.masked_prefix[unit])
            end = start + int(plan.item_lengths[unit])
            ids, train = sequences[sequence][0][start:end], list(sequences[sequence][1][start:end])
            train[:overlap] = [0] * overlap
            starts.append(len(row_ids))
            row_ids += ids
            row_mask += [*train[1:], 0]
            while (len(row_ids) - starts[-1] - 1) % plan.pad_seq_to_mult:
                row_ids.append(pad_id)
                row_mask.append(0)
        rows.append((row_ids, row_mask, starts))
    return rows


def read_rows(path: Path) -> list[tuple[list[int], list[int], list[int]]]:
    return [tuple(field.tolist() for field in row) for row in open_shard(path)]  # type: ignore[misc]


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    parts=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=12), min_size=1, max_size=3),
    overflow=st.sampled_from(["drop", "truncate", "split"]),
    mult=st.sampled_from([1, 4]),
    strategy=st.sampled_from(["greedy", "best_fit"]),
)
def test_every_row_is_what_the_plan_says_with_aligned_masks(data, parts, overflow, mult, strategy) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    split = [[(rng.integers(0, 900, n).tolist(), rng.integers(0, 2, n).tolist()) for n in part] for part in parts]
    sequences = [sequence for part in split for sequence in part]
    options = {"stride": data.draw(st.integers(0, 3))} if overflow == "split" else {}
    pack_size = 20
    with tempfile.TemporaryDirectory() as home:
        write_store(Path(home, "store"), split, vocab_size=1000)
        store = open_token_store(f"{home}/store")
        try:
            plan = pack(
                store.lengths,
                pack_size=pack_size,
                strategy=strategy,
                overflow=overflow,
                pad_seq_to_mult=mult,
                shuffle_output=True,
                seed=3,
                **options,
            )
        except InvalidInputError:
            return  # everything was dropped
        assert stored_width(plan) <= pack_size
        with create_shard_writer(
            "memmap_v1", f"{home}/shard", num_bins=plan.num_bins, pack_size=pack_size, vocab_size=1000, pad_id=9
        ) as writer:
            num_tokens = materialize(plan, store, writer, pad_id=9)
            writer.finalize()
        rows = expected_rows(plan, sequences, pad_id=9)
        assert read_rows(Path(home, "shard")) == rows
        assert num_tokens == sum(len(ids) for ids, _, _ in rows)
        assert validate(f"{home}/shard").ok


def make_store(path: Path, count: int = 300) -> TokenStore:
    sequences = make_sequences(count, seed=7, longest=60)
    write_store(path, [sequences[: count // 3], sequences[count // 3 :]], vocab_size=1000)
    return open_token_store(path)


def test_shards_are_byte_identical_for_any_number_of_workers(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    plan = pack(store.lengths, pack_size=64, shuffle_output=True, seed=1)
    for num_workers in (1, 2):
        paths = [tmp_path / f"workers_{num_workers}" / f"shard_{n:06d}" for n in range(3)]
        figures = materialize_shards(plan, store, paths, num_workers=num_workers)
        assert sum(one.num_bins for one in figures) == plan.num_bins
        manifests = [json.loads((path / "manifest.json").read_text()) for path in paths]
        assert {manifest["plan_fingerprint"] for manifest in manifests} == {plan.order_fingerprint}
    assert files_of(tmp_path / "workers_1") == files_of(tmp_path / "workers_2")
    rows = [row for n in range(3) for row in read_rows(tmp_path / "workers_1" / f"shard_{n:06d}")]
    assert rows == expected_rows(plan, make_sequences(300, seed=7, longest=60), pad_id=0)


def test_the_legacy_writer_takes_the_same_blocks(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    plan = pack(store.lengths, pack_size=64)
    for storage, name in (("memmap_v1", "shard"), ("legacy", "x.npy")):
        with create_shard_writer(storage, tmp_path / name, num_bins=plan.num_bins, pack_size=64) as writer:
            materialize(plan, store, writer)
            writer.finalize()
    assert read_rows(tmp_path / "shard") == read_rows(tmp_path / "x.npy")


def test_a_plan_by_inputs_needs_wider_rows_and_says_how_wide(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    plan = pack(store.lengths, PackOptions(pack_size=64, measure="inputs"))
    needed = stored_width(plan)
    assert needed > 64
    with (
        create_shard_writer("memmap_v1", tmp_path / "narrow", num_bins=plan.num_bins, pack_size=64) as writer,
        pytest.raises(InvalidInputError, match=f"stores {needed} tokens, but the pack size is 64; use {needed}"),
    ):
        materialize(plan, store, writer)
    [manifest] = materialize_shards(plan, store, [tmp_path / "wide"])
    assert manifest.pack_size == needed


def test_a_plan_of_another_store_and_wrong_numbers_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    plan = pack(store.lengths[:-1], pack_size=64)
    with pytest.raises(InvalidInputError, match=r"the plan was not made from .*store: their lengths differ"):
        materialize_shards(plan, store, [tmp_path / "x"])
    plan = pack(store.lengths, pack_size=64)
    with pytest.raises(InvalidInputError, match="0 shards cannot share"):
        materialize_shards(plan, store, [])
    with pytest.raises(InvalidInputError, match="num_workers is 0"):
        materialize_shards(plan, store, [tmp_path / "x"], num_workers=0)
