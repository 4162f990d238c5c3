"""The packed datasets: the same rows and batches wherever they come from."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed_sft import (
    DatasetWriter,
    PackedBin,
    PackedLoader,
    convert,
    create_shard_writer,
    open_shard,
    open_token_stream,
    train_sentencepiece,
)
from megatron_packed_sft.data.datasets import (
    GPTSFTPackedDataset,
    GPTSFTPackedMemmapDataset,
    GPTSFTPackedMultiShardDataset,
    GPTSFTPlannedDataset,
    PackedDataset,
)
from megatron_packed_sft.data.factory import create_sft_dataset
from megatron_packed_sft.data.options import BatchOptions, OpenOptions, options_of_bridge
from megatron_packed_sft.data.token_streams import TokenStreamDataset
from megatron_packed_sft.errors import InvalidInputError, ShardError
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.records.samples import write_sample_data
from megatron_packed_sft.storage.figures import PackMetadata
from megatron_packed_sft.storage.interface import WriterOptions
from megatron_packed_sft.storage.legacy.storage import LegacyShard
from megatron_packed_sft.storage.legacy.writer import LegacyPickleWriter
from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter
from megatron_packed_sft.storage.parquet import ParquetShard
from megatron_packed_sft.tokens.materialize import materialize_shards
from megatron_packed_sft.tokens.store import open_token_store, publish_store
from megatron_packed_sft.tokens.writer import TokenPartWriter, part_path
from tests.dataset_options import grouped
from tests.packed_bins import make_bins, write_shard
from tests.tokens.stores import make_sequences, write_store

ROWS = make_bins(10, 24, seed=3)
EOS = 2


class Tokenizer:
    eos_id = EOS
    fingerprint = "right"


def write_everything(home: Path) -> dict[str, Any]:
    """The same rows as one shard, two shards, a dataset directory and a legacy file; how to open each."""
    write_shard(home / "one", ROWS, 24, vocab_size=1000)
    write_shard(home / "many" / "shard_0", ROWS[:4], 24, vocab_size=1000)
    write_shard(home / "many" / "shard_1", ROWS[4:], 24, vocab_size=1000)
    with DatasetWriter(home / "dataset") as dataset:
        for number, rows in enumerate((ROWS[:7], ROWS[7:])):
            with dataset.shard_writer("train", number, num_bins=len(rows), pack_size=24) as writer:
                for index, row in enumerate(rows):
                    writer.write_bin(index, *row)
                writer.finalize()
        dataset.finalize()
    with LegacyPickleWriter(home / "legacy.npy", WriterOptions(num_bins=10)) as writer:
        for index, row in enumerate(ROWS):
            writer.write_bin(index, *row)
        writer.finalize()
    return {
        "shard": home / "one",
        "directory of shards": home / "many",
        "dataset directory": home / "dataset",
        "glob": str(home / "many" / "shard_*"),
        "list": [home / "many" / "shard_0", str(home / "many" / "shard_1")],
        "legacy": home / "legacy.npy",
    }


def assert_same_batch(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for key in left:
        if isinstance(left[key], torch.Tensor):
            assert torch.equal(left[key], right[key]), key
        else:
            assert left[key] == right[key], key


def test_all_storages_give_the_same_rows_and_batches(tmp_path: Path) -> None:
    paths = write_everything(tmp_path)
    reference = create_sft_dataset(paths["shard"], EOS, seq_length=24)
    for path in paths.values():
        dataset = create_sft_dataset(path, Tokenizer(), seq_length=24)
        assert len(dataset) == 10
        for index, row in enumerate(ROWS):
            got = dataset[index]
            assert got["input_ids"].tolist() == row.input_ids.tolist()
            assert got["loss_mask"].tolist() == row.loss_mask.tolist()
            assert got["seq_boundaries"] == [*row.seq_start_id.tolist(), len(row.input_ids)]
        indices = [3, 9, 0, -1, 5]
        batch = dataset.fetch_batch(indices)
        assert_same_batch(batch, reference.fetch_batch(indices))
        assert_same_batch(batch, dataset.collate_fn(dataset.__getitems__(indices)))
        assert_same_batch(batch, dataset.collate_fn([dataset[index] for index in indices]))


def test_classes_named_as_bridge_users_know_them_open_their_kind(tmp_path: Path) -> None:
    paths = write_everything(tmp_path)
    one = GPTSFTPackedMemmapDataset(str(paths["shard"]), Tokenizer(), max_seq_length=24)
    many = GPTSFTPackedMultiShardDataset(paths["list"], Tokenizer(), max_seq_length=24)
    legacy = GPTSFTPackedDataset(str(paths["legacy"]), Tokenizer(), max_seq_length=24)
    for dataset in (many, legacy):
        assert_same_batch(dataset.fetch_batch(range(10)), one.fetch_batch(range(10)))
    with pytest.raises(InvalidInputError, match="shard_dirs is empty"):
        GPTSFTPackedMultiShardDataset([], Tokenizer())


@pytest.mark.parametrize("mult", [1, 4])
def test_a_token_store_with_a_plan_gives_what_its_shards_give(mult: int, tmp_path: Path) -> None:
    write_store(tmp_path / "store", [make_sequences(40, seed=1), make_sequences(30, seed=2)], vocab_size=1000)
    store = open_token_store(tmp_path / "store")
    plan = pack(store.lengths, pack_size=64, shuffle_output=True, seed=5, pad_seq_to_mult=mult)
    plan.save(tmp_path / "plan.npz")
    materialize_shards(plan, store, [tmp_path / "shards" / "a", tmp_path / "shards" / "b"], pad_id=EOS)
    shards = create_sft_dataset(tmp_path / "shards", EOS, seq_length=64, contract="bridge_0_6")
    planned = create_sft_dataset(
        tmp_path / "store", EOS, seq_length=64, plan=tmp_path / "plan.npz", contract="bridge_0_6"
    )
    direct = GPTSFTPlannedDataset(store, plan, EOS, max_seq_length=64, contract="bridge_0_6")
    assert len(planned) == len(shards) == plan.num_bins
    indices = [*range(0, plan.num_bins, 2), -1]
    for dataset in (planned, direct):
        assert_same_batch(dataset.fetch_batch(indices), shards.fetch_batch(indices))
        for index in indices:
            for key, value in dataset[index].items():
                assert np.array_equal(value, shards[index][key])


def test_negative_indices_are_padding_samples_and_indices_beyond_are_errors(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", ROWS, 24)
    for arguments in ({}, {"max_num_samples": 7}, {"answer_only_loss": False}):
        dataset = create_sft_dataset(tmp_path / "shard", EOS, seq_length=24, **grouped(**arguments))
        last, padding = dataset[len(dataset) - 1], dataset[-1]
        assert padding["input_ids"].tolist() == last["input_ids"].tolist()
        assert padding["seq_boundaries"] == last["seq_boundaries"]
        assert not padding["loss_mask"].any()
        trained = next(index for index in range(len(dataset)) if dataset[index]["loss_mask"].any())
        for batch in (dataset.fetch_batch([trained, -1]), dataset.collate_fn([dataset[trained], dataset[-1]])):
            assert not batch["loss_mask"][1].any()
            assert batch["loss_mask"][0].any()
        for index in (len(dataset), -len(dataset) - 1):
            with pytest.raises(IndexError, match=f"sample {index} of {len(dataset)}"):
                dataset[index]
            with pytest.raises(IndexError):
                dataset.fetch_batch([0, index])


def test_max_num_samples_shuffles_epoch_after_epoch_without_replacement(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", ROWS, 24)
    state = np.random.get_state()[1].tolist()  # noqa: NPY002 - it must not be touched

    def order(**arguments: Any) -> list[list[int]]:
        dataset = create_sft_dataset(tmp_path / "shard", EOS, seq_length=24, **arguments)
        return [dataset[index]["input_ids"].tolist() for index in range(len(dataset))]

    stored = [row.input_ids.tolist() for row in ROWS]
    assert order() == stored
    shuffled = order(max_num_samples=25)
    assert len(shuffled) == 25
    assert sorted(shuffled[:10]) == sorted(shuffled[10:20]) == sorted(stored)
    assert shuffled[:10] not in (stored, shuffled[10:20])
    assert order(max_num_samples=25) == shuffled
    assert order(max_num_samples=25, seed=9) != shuffled
    assert len(order(max_num_samples=1)) == 1  # Megatron-Bridge raises IndexError for one row with one sample
    assert np.random.get_state()[1].tolist() == state  # noqa: NPY002


def test_a_dataset_of_one_row_with_one_sample_works(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", ROWS[:1], 24)
    dataset = create_sft_dataset(tmp_path / "shard", EOS, seq_length=24, max_num_samples=1)
    assert dataset[0]["input_ids"].tolist() == ROWS[0].input_ids.tolist()


def test_a_blend_keeps_its_weights_at_every_prefix_and_shuffles_each_source(tmp_path: Path) -> None:
    for name, count, first in (("a", 6, 100), ("b", 4, 500)):
        rows = [PackedBin(np.array([first + i, 1]), np.array([1, 0]), np.array([0])) for i in range(count)]
        write_shard(tmp_path / name, rows, 24)
    dataset = create_sft_dataset(
        [tmp_path / "a", tmp_path / "b"], EOS, seq_length=24, weights=[0.3, 0.7], max_num_samples=100
    )
    firsts = np.array([int(dataset[index]["input_ids"][0]) for index in range(100)])
    from_b = np.cumsum(firsts >= 500)
    assert np.all(np.abs(from_b - 0.7 * np.arange(1, 101)) <= 1)
    assert sorted(firsts[firsts >= 500][:4].tolist()) == [500, 501, 502, 503]
    assert sorted(firsts[firsts < 500][:6].tolist()) == [100, 101, 102, 103, 104, 105]
    assert len(create_sft_dataset([tmp_path / "a", tmp_path / "b"], EOS, weights=[1, 1])) == 10

    loader = PackedLoader(dataset, micro_batch_size=1, num_epochs=None)
    batches = iter(loader)
    assert [int(next(batches)["tokens"][0, 0]) for _ in range(40)] == firsts[:40].tolist()
    blend = loader.state_dict()["blend"]
    assert blend["weights"] == [3, 7]
    assert blend["counts"] == [40 - int(from_b[39]), int(from_b[39])]
    resumed = PackedLoader(dataset, micro_batch_size=1, num_epochs=None)
    resumed.load_state_dict(loader.state_dict())
    batches = iter(resumed)
    assert [int(next(batches)["tokens"][0, 0]) for _ in range(20)] == firsts[40:60].tolist()
    with pytest.raises(InvalidInputError, match="3 weights were given for 2 paths"):
        create_sft_dataset([tmp_path / "a", tmp_path / "b"], EOS, weights=[1, 1, 1])


def test_the_figures_for_pad_cu_seqlens_come_from_the_manifest(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", ROWS, 24)
    batch = BatchOptions("bridge_0_6", pad_to_max_length=True, pad_cu_seqlens=True)
    own = create_sft_dataset(tmp_path / "shard", EOS, seq_length=24, contract=batch)
    own.write_pack_metadata(tmp_path / "meta.json")
    written = json.loads((tmp_path / "meta.json").read_text())
    assert written[0]["max_samples_per_bin"] == max(row.num_sequences for row in ROWS)
    assert written[0]["min_packed_seqlen"] == min(len(row.input_ids) for row in ROWS)
    numbers = {name: getattr(own.options, name) for name in ("max_samples_per_bin", "min_packed_seqlen")}
    assert numbers == {name: written[0][name] for name in numbers}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_num_samples": 0}, "max_num_samples is 0"),
        ({"storage": "legacy"}, "is memmap_v1, but storage asks for 'legacy'"),
        ({"storage": "zarr"}, "storage 'zarr' is unknown; use one of memmap_v1, legacy, parquet"),
        ({"split": "test", "path": "dataset"}, "has no split 'test'; choose one of train"),
        ({"path": "nothing"}, "does not exist and matches nothing"),
        ({"path": "memory://bucket/data"}, "memory://bucket/data is not a dataset, shard or file; check the URL"),
        ({"path": "store"}, "is a token store; name a plan to read bins"),
        ({"path": "empty"}, "is an empty directory"),
        ({"tokenizer": object()}, "has no eos_id, eod or eos_token_id"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(
    arguments: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_everything(tmp_path)
    write_store(tmp_path / "store", [make_sequences(3)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInputError, match=sentence):
        create_sft_dataset(**grouped(**{"path": "one", "tokenizer": EOS, **arguments}))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"add_bos": True}, "add_bos=True has no meaning for packed data: the data is already tokenized"),
        ({"tokens_to_generate": 5}, "tokens_to_generate=5 has no meaning"),
        ({"virtual_tokens": 3}, "virtual_tokens=3 has no meaning"),
        ({"packing_length": 5}, "packing_length is not an argument of a packed dataset"),
        ({"verify": "sometimes"}, "verify is 'sometimes'; choose from first_read, always, never"),
    ],
)
def test_arguments_of_bridges_datasets_are_taken_or_refused_and_never_ignored(
    arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        options_of_bridge("bridge_0_6", arguments)
    batch, opening = options_of_bridge("bridge_0_6", {"add_bos": False, "compact": True, "verify": "never"})
    assert batch == BatchOptions("bridge_0_6", compact=True)
    assert opening == OpenOptions(verify="never")


def test_another_tokenizer_than_the_datas_is_refused_with_the_override_named(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", ROWS, 24, tokenizer={"name": "llama", "fingerprint": "wrong"})
    with pytest.raises(InvalidInputError, match=r"made with tokenizer 'llama' .*allow_tokenizer_mismatch=True"):
        create_sft_dataset(tmp_path / "shard", Tokenizer(), seq_length=24)
    create_sft_dataset(
        tmp_path / "shard", Tokenizer(), seq_length=24, opening=OpenOptions(allow_tokenizer_mismatch=True)
    )
    write_shard(tmp_path / "right", ROWS, 24, tokenizer={"name": "llama", "fingerprint": "right"})
    assert create_sft_dataset(tmp_path / "right", Tokenizer()).tokenizer_fingerprint == "right"
    with pytest.raises(InvalidInputError, match="was made with another tokenizer"):
        GPTSFTPackedMultiShardDataset([tmp_path / "shard", tmp_path / "right"], EOS)


def test_a_sequence_length_below_what_the_bins_need_is_refused_when_a_dataset_is_opened(tmp_path: Path) -> None:
    paths = write_everything(tmp_path)
    needed = max(len(row.input_ids) - row.num_sequences for row in ROWS)
    for path in paths.values():
        with pytest.raises(
            InvalidInputError, match=rf"seq_length is {needed - 1}, .* needs {needed}; set seq_length to"
        ):
            create_sft_dataset(path, EOS, seq_length=needed - 1)
        assert create_sft_dataset(path, EOS, seq_length=needed).fetch_batch(range(10))["tokens"].shape[1] <= needed
    with pytest.raises(InvalidInputError, match=r"max_seq_length is 4, .*; set max_seq_length to 24"):
        GPTSFTPackedMemmapDataset(paths["shard"], EOS, max_seq_length=4)
    write_shard(tmp_path / "long", make_bins(3, 4096), 4096)
    assert create_sft_dataset(tmp_path / "long", EOS).max_seq_length == 4096
    assert GPTSFTPackedMemmapDataset(tmp_path / "long", EOS).max_seq_length == 4096


def test_a_swapped_shard_is_refused_when_its_rows_are_needed(tmp_path: Path) -> None:
    write_everything(tmp_path)
    train = tmp_path / "dataset" / "train"
    dataset = create_sft_dataset(tmp_path / "dataset", EOS, seq_length=24)
    (train / "shard_000000").rename(train / "x")
    (train / "shard_000001").rename(train / "shard_000000")
    (train / "x").rename(train / "shard_000001")
    with pytest.raises(ShardError, match=r"is not the shard that its dataset\.json lists"):
        dataset[0]


def test_the_factory_says_what_it_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_everything(tmp_path)
    with caplog.at_level(logging.INFO, "megatron_packed_sft"):
        create_sft_dataset(tmp_path / "dataset", EOS)
    assert "split 'train' of" in caplog.text
    assert "10 bins of up to 24 tokens, 10 samples" in caplog.text


@pytest.mark.parametrize("storage", ["memmap_v1", "legacy", "parquet"])
@pytest.mark.parametrize("named", ["shard", "dataset directory"])
def test_a_pickled_dataset_carries_no_bins_and_opens_its_shards_again(storage: str, named: str, tmp_path: Path) -> None:
    bins = make_bins(200, 256)
    with DatasetWriter(tmp_path / "data", storage=storage) as writer:
        with writer.shard_writer("train", 0, num_bins=200, pack_size=256) as shard:
            for index, one in enumerate(bins):
                shard.write_bin(index, *one)
            shard.finalize()
        published = writer.finalize()
    path = (
        tmp_path / "data"
        if named == "dataset directory"
        else published.shard_path("train", published.entries("train")[0])
    )
    dataset = create_sft_dataset(path, EOS, seq_length=256)
    dataset.fetch_batch([0, 1])
    data = pickle.dumps(dataset)
    assert len(data) < 8192
    received = pickle.loads(data)
    assert received.fingerprint == dataset.fingerprint
    assert_same_batch(received.fetch_batch([7, 3]), dataset.fetch_batch([7, 3]))
    if named == "shard" and storage != "memmap_v1":
        received = pickle.loads(data)
        with create_shard_writer(storage, path, num_bins=1, pack_size=256, overwrite=True) as writer:
            writer.write_bin(0, *bins[0])
            writer.finalize()
        with pytest.raises(ShardError, match="was changed after its dataset was opened"):
            received.fetch_batch([0])


def test_the_factory_returns_the_classes_that_its_users_expect(tmp_path: Path) -> None:
    paths = write_everything(tmp_path)
    convert(tmp_path / "one", tmp_path / "bins.idx.parquet", to="parquet")
    write_store(tmp_path / "store", [make_sequences(20)], vocab_size=1000)
    plan = pack(open_token_store(tmp_path / "store").lengths, pack_size=64)
    expected = {
        "shard": GPTSFTPackedMemmapDataset,
        "legacy": GPTSFTPackedDataset,
        **dict.fromkeys(("directory of shards", "dataset directory", "glob", "list"), GPTSFTPackedMultiShardDataset),
    }
    opened = {name: create_sft_dataset(paths[name], EOS) for name in expected}
    for name, kind in expected.items():
        assert type(opened[name]) is kind, name
        assert isinstance(opened[name], PackedDataset)
    assert type(create_sft_dataset(tmp_path / "bins.idx.parquet", EOS)) is PackedDataset
    assert type(create_sft_dataset(tmp_path / "store", EOS, plan=plan)) is GPTSFTPlannedDataset
    shard, listed = opened["shard"], opened["dataset directory"]
    assert isinstance(shard, GPTSFTPackedMemmapDataset)
    assert shard.manifest["num_bins"] == 10
    assert isinstance(listed, GPTSFTPackedMultiShardDataset)
    assert listed.shard_offsets.tolist() == [0, 7, 10]
    assert [len(one) for one in listed.shards] == [7, 3]


URL = "s3://bucket/x"


@pytest.mark.parametrize(
    "call",
    [
        lambda: GPTSFTPackedMemmapDataset(URL, EOS),
        lambda: GPTSFTPackedMultiShardDataset([URL], EOS),
        lambda: GPTSFTPackedDataset(URL, EOS),
        lambda: MemmapShardWriter(URL, 1, 8),
        lambda: LegacyPickleWriter(URL),
        lambda: create_shard_writer("parquet", URL, num_bins=1, pack_size=8),
        lambda: DatasetWriter(URL),
        lambda: open_shard(URL),
        lambda: publish_store(URL),
        lambda: TokenPartWriter(part_path(URL, 0), vocab_size=10),
        lambda: LegacyShard(URL),
        lambda: ParquetShard(URL),
        lambda: open_token_stream(URL),
        lambda: TokenStreamDataset(URL),
        lambda: PackMetadata.load(URL),
        lambda: train_sentencepiece(["a"], URL),
        lambda: write_sample_data(URL),
        lambda: materialize_shards(pack([3, 4], pack_size=8), open_token_store("store"), [URL]),
    ],
)
def test_a_url_that_cannot_be_taken_is_refused_and_never_becomes_a_local_directory(
    call: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_everything(tmp_path)
    write_store(tmp_path / "store", [[([1, 2, 3], [0, 1, 1]), ([4, 5, 6, 7], [0, 1, 1, 1])]])
    (tmp_path / "a").mkdir()
    with pytest.raises(InvalidInputError, match="s3://bucket/x is a URL"):
        call()
    assert not (tmp_path / "s3:").exists()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_torchs_loader_with_workers_gives_the_same_batches(method: str, tmp_path: Path) -> None:
    paths = write_everything(tmp_path)
    dataset = create_sft_dataset(paths["directory of shards"], EOS, seq_length=24)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=4, num_workers=2, collate_fn=dataset.collate_fn, multiprocessing_context=method
    )
    for number, batch in enumerate(loader):
        assert_same_batch(batch, dataset.fetch_batch(range(number * 4, min(number * 4 + 4, 10))))


def test_advising_rows_is_harmless(tmp_path: Path) -> None:
    for path in write_everything(tmp_path).values():
        dataset = create_sft_dataset(path, EOS, seq_length=24)
        dataset.advise([0, 9, -1])
        assert isinstance(dataset, PackedDataset)
        assert "10 samples" in repr(dataset)


def test_the_fingerprint_tells_orders_apart(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", ROWS, 24)
    arguments: list[dict[str, Any]] = [
        {},
        {"max_num_samples": 5},
        {"max_num_samples": 6},
        {"max_num_samples": 5, "seed": 1},
    ]
    fingerprints = {create_sft_dataset(tmp_path / "shard", EOS, **one).fingerprint for one in arguments}
    assert len(fingerprints) == 4
    same = create_sft_dataset(str(tmp_path / "shard"), EOS, seq_length=99).fingerprint
    assert same in fingerprints
