"""Static packs (seed 003): raw samples packed when they are opened, with a fixed number of packs, and their batches."""

from __future__ import annotations

import itertools
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from megatron_packed_sft import PackedLoader, TokenPartWriter, create_sft_dataset, pack, publish_store
from megatron_packed_sft.data.datasets import PackedDataset
from megatron_packed_sft.data.static_packs import StaticPackDataset
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.tokens.store import TokenStore
from tests.dataset_options import grouped
from tests.packed_bins import make_bins, write_shard

EOS = 2
LENGTH = 32


def sample_of(length: int, number: int = 0, **more: Any) -> dict[str, Any]:
    """A chat of this length: the first third is the prompt."""
    ids = np.random.default_rng([length, number]).integers(3, 90, length)
    return {"input_ids": ids, "labels": np.where(np.arange(length) < length // 3, -100, ids), **more}


def samples_of(lengths: list[int]) -> list[dict[str, Any]]:
    return [sample_of(length, number) for number, length in enumerate(lengths)]


LENGTHS = np.random.default_rng(1).integers(2, 30, 50).tolist()


def static(data: Any, seq_length: int | None = LENGTH, **arguments: Any) -> StaticPackDataset:
    options = grouped(packing_mode="static", **arguments)
    dataset = create_sft_dataset(data, options.pop("tokenizer", EOS), seq_length, **options)
    assert isinstance(dataset, StaticPackDataset)
    return dataset


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """The same samples in a token store."""
    path = tmp_path_factory.mktemp("data") / "store"
    with TokenPartWriter(path / "part_000000", vocab_size=100) as writer:
        for sample in samples_of(LENGTHS):
            writer.append(sample["input_ids"], train=sample["labels"] != -100)
        writer.finalize()
    return publish_store(path)


# Requirement: a countable packed dataset


def test_static_packing_produces_a_fixed_length_pack_dataset_for_an_epoch() -> None:
    """GIVEN packing_mode=static, len is the number of packs, and each item is a pack that fits or one long sample."""
    samples = samples_of([*LENGTHS, 40, 32, 100])
    dataset = static(samples, packing_allow_single_long=True)
    assert len(dataset) == dataset.static_plan.aligned.plan.num_bins
    seen = []
    for epoch in range(2):
        loader = PackedLoader(dataset, shuffle=True, seed=epoch)
        assert len(list(loader)) == len(dataset)
    for index in range(len(dataset)):
        one = dataset[index]
        assert isinstance(one, list)
        total = sum(len(sample["input_ids"]) for sample in one)
        assert total <= LENGTH or (len(one) == 1 and total >= LENGTH)
        seen += [next(n for n, raw in enumerate(samples) if raw is sample) for sample in one]
    assert sorted(seen) == list(range(len(samples)))  # whole, each once: nothing split, nothing truncated


def test_oversized_samples_are_single_packs_or_dropped_and_logged_by_index(caplog: pytest.LogCaptureFixture) -> None:
    samples = samples_of([10, 33, 20, 32, 50])
    with caplog.at_level(logging.INFO):
        allowed = static(samples, packing_allow_single_long=True)
        assert "2 of 5 samples are longer than a pack of 32 (index 1, 4): packed alone" in caplog.text
        dropped = static(samples, packing_allow_single_long=False)
        [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert warning == "2 of 5 samples are longer than a pack of 32 (index 1, 4): left out"
    assert [numbers_of(allowed, n) for n in range(len(allowed))] == [[0, 2], [1], [3], [4]]
    assert [numbers_of(dropped, n) for n in range(len(dropped))] == [[0, 2], [3]]
    batch = allowed.fetch_batch([3])
    assert int(batch["cu_seqlens_q"][0, 1]) == 49  # the inputs of the long sample, whole
    assert allowed.max_seq_length == 50
    many = static(samples_of([40] * 30 + [4]))
    [line] = [line for line in many.static_plan.lines if "longer" in line]
    assert "30 of 31 samples" in line
    assert line.endswith("18, 19, and 10 more): packed alone")


def test_a_sample_that_fills_a_pack_is_oversized_only_if_asked() -> None:
    """The seed's rule is length >= packing_length; ours is that what fits is packed."""
    samples = samples_of([10, 32, 33])
    ours = static(samples, packing_allow_single_long=False)
    seeds = static(samples, packing_allow_single_long=False, packing_full_is_oversized=True)
    assert [numbers_of(ours, n) for n in range(len(ours))] == [[0], [1]]
    assert [numbers_of(seeds, n) for n in range(len(seeds))] == [[0]]
    assert "2 of 3 samples are of length 32 or more (index 1, 2): left out" in seeds.static_plan.lines
    alone = static(samples, packing_full_is_oversized=True)
    assert [numbers_of(alone, n) for n in range(len(alone))] == [[0], [1], [2]]
    assert alone.static_plan.oversized.tolist() == [1, 2]


def numbers_of(dataset: StaticPackDataset, index: int) -> list[int]:
    aligned = dataset.static_plan.aligned
    numbers: list[int] = aligned.plan.bin(int(aligned.bins[index])).tolist()
    return numbers


def test_the_length_of_packs_is_derived_and_cannot_be_set_twice() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'packing_length'"):
        static(samples_of([3]), packing_length=32)
    with pytest.raises(InvalidInputError, match="packing_mode='static' needs seq_length"):
        static(samples_of([3]), None)


# Requirement: deterministic and epoch-invariant

_SCRIPT = """
import numpy as np
from tests.data.test_static_packs import LENGTHS, samples_of, static
for drop_last in (False, True):
    aligned = static(samples_of(LENGTHS), world_size=4, dataloader_drop_last=drop_last).static_plan.aligned
    print(aligned.plan.fingerprint, aligned.fingerprint, [aligned.plan.bin(b).tolist() for b in aligned.bins.tolist()])
"""


def test_identical_inputs_produce_identical_pack_plans() -> None:
    """GIVEN the same dataset, seed and knobs, two runs of the program emit the same packs in the same order."""
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first == second
    assert first.count("\n") == 2


def test_indices_ascend_inside_a_pack_and_packs_are_ordered_by_their_smallest_index() -> None:
    dataset = static(samples_of(np.random.default_rng(5).integers(1, 30, 500).tolist()))
    packs = [numbers_of(dataset, n) for n in range(len(dataset))]
    assert all(numbers == sorted(numbers) for numbers in packs)
    assert packs == sorted(packs)  # lexicographic, which the smallest index alone decides: no sample is in two packs
    assert sorted(itertools.chain(*packs)) == list(range(500))


@pytest.mark.parametrize("argument", [{"shuffle_output": True}, {"steps": {"global_batch": 2, "balance": "attention"}}])
def test_whatever_reorders_packs_is_left_to_the_sampler(argument: dict[str, Any]) -> None:
    from megatron_packed_sft.data.sample_packs import SamplePackDataset

    with pytest.raises(InvalidInputError, match="changes the order of packs, and a static plan keeps that of the data"):
        SamplePackDataset([[1], [2]], len, pack_size=4, **argument)


def test_samplers_shuffle_packs_and_never_the_plan() -> None:
    dataset = static(samples_of(LENGTHS), contract="hf")
    fingerprint = dataset.fingerprint
    loaders = [PackedLoader(dataset, shuffle=True, seed=seed) for seed in (1, 2)]
    first, second = ([batch["input_ids"].tolist() for batch in loader] for loader in loaders)
    assert first != second
    assert sorted(first) == sorted(second)
    assert dataset.fingerprint == fingerprint


class Resampling(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return sample_of(4)

    def set_epoch(self, epoch: int) -> None:
        raise AssertionError


def test_datasets_that_resample_are_refused_also_when_they_are_wrapped() -> None:
    for dataset in (Resampling(), Subset(Resampling(), [0, 1]), ConcatDataset([Resampling(), Resampling()])):
        with pytest.raises(InvalidInputError, match=r"Resampling.* has set_epoch, so its samples may change"):
            static(dataset)


def test_iterable_datasets_get_a_clear_refusal() -> None:
    import datasets as hugging_face

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield sample_of(4)

        def __len__(self) -> int:
            return 1

    refusal = "is not map-style, and a static plan names samples by their index"
    for dataset in (Stream(), iter([sample_of(4)]), DataLoader([sample_of(4)])):
        with pytest.raises(InvalidInputError, match=refusal):
            static(dataset)
    plain = [{"input_ids": [5, 6], "labels": [-100, 6]}]
    table = hugging_face.Dataset.from_list(plain)
    with pytest.raises(InvalidInputError, match=refusal):
        static(table.to_iterable_dataset())
    assert len(static(table)) == 1


# Requirement: remainder semantics


def test_without_drop_last_packs_are_repeated_deterministically() -> None:
    """GIVEN N_raw_packs % world_size != 0, the plan is padded with the first packs, in order."""
    dataset = static(samples_of([32] * 10), world_size=4, dataloader_drop_last=False)
    assert len(dataset) == 12
    assert dataset.static_plan.aligned.bins.tolist() == [*range(10), 0, 1]
    lines = dataset.static_plan.lines
    assert lines[0].startswith("N_raw_packs=10 N_aligned_packs=12 world_size=4 drop_last=False raw_plan=")
    assert lines[1] == "pad_needed=2 repeated_packs=[0, 1]"
    assert dataset.static_plan.aligned.fingerprint in lines[0]
    assert dataset.static_plan.aligned.plan.fingerprint in lines[0]
    assert [sample["input_ids"].tolist() for sample in dataset[10]] == [s["input_ids"].tolist() for s in dataset[0]]


def test_with_drop_last_a_deterministic_remainder_is_dropped() -> None:
    """GIVEN N_raw_packs % world_size != 0, the last packs of the plan are in no epoch."""
    dataset = static(samples_of([32] * 10), world_size=4, dataloader_drop_last=True)
    assert dataset.static_plan.aligned.bins.tolist() == list(range(8))
    assert "dropped_packs=[8, 9]" in dataset.static_plan.lines
    ranks = []
    for rank in range(4):
        loader = PackedLoader(dataset, shuffle=True, data_parallel_rank=rank, data_parallel_size=4)
        ranks.append([len(list(loader)) for _ in range(2)])
    assert ranks == [[2, 2]] * 4  # every rank has as many steps, in every epoch


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_token_store_is_aligned_as_its_samples_are(drop_last: bool, store: TokenStore) -> None:
    world_size = 7
    raw = static(samples_of(LENGTHS), world_size=world_size, dataloader_drop_last=drop_last)
    stored = static(store.path, world_size=world_size, dataloader_drop_last=drop_last)
    num_raw = stored.static_plan.aligned.plan.num_bins
    assert num_raw % world_size
    assert len(stored) == len(raw) == (num_raw // world_size + (not drop_last)) * world_size
    for index in range(len(raw)):
        assert torch.equal(raw.fetch_batch([index])["tokens"], stored.fetch_batch([index])["tokens"])


def test_a_plan_without_packs_fails_fast() -> None:
    with pytest.raises(InvalidInputError, match="static packing produced no packs: all 3 samples are oversized"):
        static(samples_of([40, 50, 60]), packing_allow_single_long=False)
    with pytest.raises(InvalidInputError, match="drop_last leaves no packs: the plan has 2 packs for 4 ranks"):
        static(samples_of([30, 30]), world_size=4, dataloader_drop_last=True)
    with pytest.raises(InvalidInputError, match="the dataset has 0 samples"):
        static([])


# The padding-free collator


def test_a_pack_is_one_row_with_boundaries_and_positions_that_start_over() -> None:
    samples = samples_of([5, 7, 4])
    dataset = static(samples, contract="hf")
    [batch] = DataLoader(dataset, batch_size=1, collate_fn=dataset.collate_fn)  # type: ignore[arg-type]
    assert batch["input_ids"].tolist() == [np.concatenate([one["input_ids"] for one in samples]).tolist()]
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 12, 16]
    assert batch["position_ids"].tolist() == [[*range(5), *range(7), *range(4)]]
    labels = [one["labels"].copy() for one in samples]
    for one in labels:
        one[0] = -100  # nothing predicts the first token of a sample
    assert batch["labels"].tolist() == [np.concatenate(labels).tolist()]


@pytest.mark.parametrize("contract", ["mcore", "hf", "bridge_main"])
def test_every_way_to_a_batch_gives_the_same_one(contract: str, store: TokenStore) -> None:
    """By index, by collate_fn, out of a token store, and out of the plan file that prepare would write."""
    raw = static(samples_of(LENGTHS), contract=contract)
    stored = static(store.path, contract=contract)
    plan = pack(store.lengths, pack_size=LENGTH, overflow="single")
    planned = create_sft_dataset(store.path, EOS, LENGTH, plan=plan, contract=contract)
    for indices in ([0], [1, 4], [2, -1]):  # the last one is a padding sample
        expected = planned.fetch_batch(indices)
        for dataset in (raw, stored):
            for batch in (dataset.fetch_batch(indices), dataset.collate_fn(dataset.__getitems__(indices))):
                assert batch.keys() == expected.keys()
                for key, value in expected.items():
                    assert torch.equal(batch[key], value) if torch.is_tensor(value) else batch[key] == value
    assert not bool((raw.fetch_batch([-1]).get("loss_mask", torch.zeros(1)) != 0).any())


def test_masks_of_all_three_kinds_say_the_same() -> None:
    ids = [5, 6, 7, 8]
    given: list[dict[str, Any]] = [
        {"labels": [-100, -100, 7, 8]},
        {"train_mask": [0, 0, 1, 1]},
        {"loss_mask": [0, 1, 1, 0]},
        {"labels": torch.tensor([-100, -100, 7, 8]), "attention_mask": torch.ones(4)},
    ]
    masks = [static([{"input_ids": ids, **one}]).fetch_batch([0])["loss_mask"].tolist() for one in given]
    assert masks == [[[0, 1, 1] + [0] * 13]] * 4


def test_a_loss_mask_of_floats_makes_every_batch_weighted() -> None:
    weighted = [{"input_ids": [5, 6, 7], "loss_mask": [0.5, 2.0, 0.0]}, {"input_ids": [8, 9], "loss_mask": [1.0, 0.0]}]
    batch = static(weighted).fetch_batch([0])
    assert batch["loss_mask"][0, :3].tolist() == [0.5, 2.0, 1.0]
    assert batch["loss_denominator"].tolist() == [3.5]
    mixed = [{"input_ids": [8, 9], "loss_mask": [1, 0]}, weighted[0]]
    with pytest.raises(InvalidInputError, match="has a loss_mask of weights, and that of sample 0 has none"):
        static(mixed).fetch_batch([0])


def test_other_fields_are_passed_on_as_lists_and_announced(caplog: pytest.LogCaptureFixture) -> None:
    samples = samples_of([20, 20, 10])
    samples[0] |= {"pixel_values": torch.ones(4, 3), "image_grid_thw": [[1, 2, 2]], "id": "a"}
    samples[2] |= {"pixel_values": torch.zeros(2, 3), "image_grid_thw": [[1, 1, 2]]}
    dataset = static(samples)
    with caplog.at_level(logging.INFO):
        batch = dataset.fetch_batch([0, 1])
        dataset.fetch_batch([0])
    assert caplog.text.count("batches pass pixel_values, image_grid_thw, id on as lists") == 1
    assert [numbers_of(dataset, n) for n in range(2)] == [[0, 2], [1]]
    assert [None if one is None else one.shape[0] for one in batch["pixel_values"]] == [4, 2, None]
    assert batch["image_grid_thw"] == [[[1, 2, 2]], [[1, 1, 2]], None]
    assert batch["id"] == ["a", None, None]


def test_sequences_are_aligned_for_context_parallelism_as_those_of_a_store(store: TokenStore) -> None:
    raw = static(samples_of(LENGTHS), 64, pad_seq_to_mult=4)
    stored = static(store, 64, pad_seq_to_mult=4)
    assert raw.static_plan.aligned.fingerprint == stored.static_plan.aligned.fingerprint
    for index in range(len(raw)):
        one, other = raw.fetch_batch([index]), stored.fetch_batch([index])
        assert torch.equal(one["tokens"], other["tokens"])
        assert torch.equal(one["cu_seqlens_q_padded"], other["cu_seqlens_q_padded"])


def test_workers_of_a_torch_loader_make_the_same_batches() -> None:
    dataset = static(samples_of(LENGTHS), contract="hf")
    loader = DataLoader(dataset, batch_size=2, collate_fn=dataset.collate_fn, num_workers=2)  # type: ignore[arg-type]
    for start, batch in zip(range(0, len(dataset), 2), loader, strict=True):
        indices = list(range(start, min(start + 2, len(dataset))))
        assert torch.equal(batch["input_ids"], dataset.fetch_batch(indices)["input_ids"])
    assert pickle.loads(pickle.dumps(dataset)).fingerprint == dataset.fingerprint


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"input_ids": [5, 6]}, "sample 0 has none of labels, train_mask, loss_mask, so it is unknown which"),
        ({"input_ids": [5, 6], "labels": [6, -100]}, "labels of sample 0 is 6 at position 0, where the id is 5"),
        ({"input_ids": [5, 6], "labels": [5]}, "labels of sample 0 has 1 values for 2 input_ids"),
        ({"input_ids": [5, 6], "loss_mask": [0, 1]}, "counts a prediction at the last position.*as train_mask"),
        ({"input_ids": [5, 6], "labels": [5, 6], "attention_mask": [1, 0]}, "sample 0 has padding"),
        ({"input_ids": [5, 6], "labels": [5, 6], "train_mask": [0, 0]}, "labels and train_mask train different tokens"),
        ({"input_ids": [5, -6], "labels": [5, -6]}, "input_ids of sample 0 is -6 at position 1"),
        ({"input_ids": [5, 6], "labels": [5, 6], "position_ids": [0, 1]}, "samples have position_ids, which the batch"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_named(sample: dict[str, Any], message: str) -> None:
    dataset = static([sample])
    with pytest.raises(InvalidInputError, match=message):
        dataset.fetch_batch([0])


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"input_ids": torch.ones(1, 5)}, r"sample 1: input_ids have shape \(1, 5\).*take \[0\]"),
        ({"text": "hello"}, r"sample 1: an encoded sample is a mapping with input_ids.* \(it has text\)"),
        ("hello", r"sample 1: an encoded sample is a mapping with input_ids, and this one is not \(str\)"),
    ],
)
def test_what_is_not_an_encoded_sample_is_refused_when_it_is_measured(sample: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        static([sample_of(3), sample])


def test_a_sample_that_the_datasets_own_code_cannot_read_is_named() -> None:
    class Torn(Resampling):
        set_epoch = None  # type: ignore[assignment]

        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 2:
                raise OSError("image file is truncated")
            return super().__getitem__(index)

    with pytest.raises(InvalidInputError, match=r"sample 2 of Torn cannot be read \(OSError: image file is"):
        static(Torn())


def test_a_length_that_is_not_that_of_the_ids_is_refused() -> None:
    dataset = static(samples_of([5]), length_of=lambda sample: 7)
    with pytest.raises(InvalidInputError, match="sample 0 was planned with length 7, but has 5 input_ids"):
        dataset.fetch_batch([0])


# What can be given


def test_what_static_packs_cannot_be_made_of_is_refused_with_the_way_out(tmp_path: Path, store: TokenStore) -> None:
    write_shard(tmp_path / "shard", make_bins(3, 16, vocab_size=50), 16, vocab_size=50)
    (tmp_path / "chats.jsonl").write_text("{}\n")
    for path, message in {
        store.path.parent: "holds token stores; name one of them, such as .*store$",
        tmp_path / "shard": "holds packed bins, and static packs are made of raw samples",
        tmp_path / "chats.jsonl": "packed-sft prepare input=.*chats.jsonl output=OUTPUT encodes chat files into one",
        tmp_path / "nothing": "does not exist",
    }.items():
        with pytest.raises(InvalidInputError, match=message):
            static(path)
    with pytest.raises(InvalidInputError, match="holds packed bins"):
        static(create_sft_dataset(tmp_path / "shard", EOS))
    with pytest.raises(InvalidInputError, match="not a list of paths"):
        static([str(store.path), str(store.path)])
    with pytest.raises(InvalidInputError, match="plan goes with prepared bins"):
        static(store.path, plan="plan.npz")
    with pytest.raises(InvalidInputError, match="storage goes with prepared bins"):
        static(store.path, storage="memmap_v1")
    with pytest.raises(InvalidInputError, match="choose from prepared, static: packs are planned before training"):
        create_sft_dataset(store.path, EOS, LENGTH, packing_mode="dynamic")
    with pytest.raises(InvalidInputError, match="to pack its samples now, set packing_mode='static'"):
        create_sft_dataset(samples_of([3]), EOS, LENGTH)


def test_a_token_store_brings_its_vocabulary_and_needs_no_tokenizer(store: TokenStore) -> None:
    dataset = static(store.path, tokenizer=None)
    assert isinstance(dataset, PackedDataset)
    assert dataset.source.vocab_size == 100
    assert [sorted(sample) for sample in dataset[0]] == [["input_ids", "loss_mask"]] * len(dataset[0])
    with pytest.raises(InvalidInputError, match="pass a tokenizer, or its EOS id as an integer"):
        static(samples_of([3]), tokenizer=None, contract="bridge_0_6")


def test_text_only_consumers_refuse_images_and_announce_what_they_leave_out(caplog: pytest.LogCaptureFixture) -> None:
    samples = [sample_of(4, pixel_values=torch.ones(2))]
    source = static(samples).source
    with pytest.raises(InvalidInputError, match="sample 0 has pixel_values, and this consumer reads text only"):
        PackedDataset(source, EOS).fetch_batch([0])
    with caplog.at_level(logging.INFO):
        PackedDataset(static([sample_of(4, origin="forum")]).source, EOS).fetch_batch([0])
    assert "samples have origin, which text-only batches leave out" in caplog.text
