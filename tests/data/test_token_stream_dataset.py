"""Token streams as datasets: the seed's items, and the same predictions in the batches of every contract."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed_sft import PackedLoader, create_sft_dataset
from megatron_packed_sft.data.batch.model_helpers import doc_ids_from_boundaries
from megatron_packed_sft.data.datasets import PackedDataset
from megatron_packed_sft.data.options import BatchOptions, OpenOptions
from megatron_packed_sft.data.token_streams import MemoryMappedDataset, TokenStreamDataset
from megatron_packed_sft.errors import InvalidInputError, ShardFileError, StateMismatchError
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from tests.data.test_datasets import assert_same_batch
from tests.dataset_options import grouped
from tests.packed_bins import make_bins, write_shard
from tests.storage.test_token_stream import write_stream

EOS = 2
VOCAB = 50
SEQ_LENGTH = 24
CONTRACTS = ("mcore", "bridge_0_6", "bridge_main", "hf")


class Tokenizer:
    eos_id = EOS
    vocab_size = VOCAB


def plain_item(window: Any, *, packs: bool) -> dict[str, list[int]]:
    """An item as the seed describes it, one token at a time."""
    tokens = [int(token) for token in window]
    item = {"input_ids": tokens[:-1], "labels": tokens[1:]}
    if not packs:
        return item
    documents, document = [], 0
    for token in tokens:
        documents.append(document)
        document += token == EOS  # an EOS belongs to the document that it ends
    crossing = [left != right for left, right in itertools.pairwise(documents)]
    labels = [-100 if other else label for label, other in zip(item["labels"], crossing, strict=True)]
    return {"input_ids": tokens[:-1], "labels": labels, "doc_ids": documents[:-1]}


def make_stream(home: Path) -> list[Any]:
    """Two files; some windows begin with EOS, end with EOS, end just behind one, or hold several in a row."""
    files = write_stream(home, [24 * 20 + 5, 24 * 30 + 1], vocab=VOCAB)
    files[0][[0, 23, 24, 25, 47, 71, 72, 24 * 9]] = EOS
    files[1][24 * 5 : 24 * 6] = EOS
    for number, tokens in enumerate(files):
        np.save(home / f"shard_{number:05d}.npy", tokens)
    return files


def windows_of(files: list[Any]) -> list[Any]:
    return [tokens[24 * n : 24 * n + 25] for tokens in files for n in range((len(tokens) - 1) // 24)]


@pytest.mark.parametrize("packs", [False, True])
def test_items_are_exactly_those_of_the_seed(packs: bool, tmp_path: Path) -> None:
    windows = windows_of(make_stream(tmp_path))
    dataset = create_sft_dataset(
        tmp_path, Tokenizer(), seq_length=SEQ_LENGTH, stream=StreamOptions(pack_sequences=packs)
    )
    assert isinstance(dataset, TokenStreamDataset)
    assert len(dataset) == len(windows) == 50
    for index, window in enumerate(windows):
        item, expected = dataset[index], plain_item(window, packs=packs)
        assert list(item) == list(expected)
        for key, value in expected.items():
            assert item[key].tolist() == value
            assert (item[key].dtype, item[key].shape) == (torch.int64, (SEQ_LENGTH,))
    item["input_ids"][0] = 7  # memory of its own, that may be written to
    with pytest.raises(IndexError):
        dataset[len(dataset)]


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("packs", [False, True])
def test_items_and_the_compiled_path_give_the_same_batches(contract: str, packs: bool, tmp_path: Path) -> None:
    make_stream(tmp_path)
    dataset = create_sft_dataset(
        tmp_path,
        Tokenizer(),
        seq_length=SEQ_LENGTH,
        contract=BatchOptions(contract, return_doc_ids=True),
        stream=StreamOptions(pack_sequences=packs),
    )
    for indices in ([0, 1, 2, 3, 9, 20, -1, 25, 26, 49], [-2], [25], range(50)):
        batch = dataset.fetch_batch(indices)
        assert_same_batch(batch, dataset.collate_fn([dataset[index] for index in indices]))
        assert_same_batch(batch, dataset.collate_fn(dataset.__getitems__(indices)))


def predictions_of(batch: dict[str, Any], contract: str) -> list[tuple[int, int, int, int]]:
    """(document of the batch, position, token, label) of every prediction that counts, in the order of the batch."""
    if contract == "hf":
        tokens, labels = batch["input_ids"][0, :-1], batch["labels"][0, 1:]
        counts, positions = labels != -100, batch["position_ids"][0, :-1]
        documents = batch["doc_ids"][0, :-1]
    else:
        tokens, labels, positions = (batch[key].reshape(-1) for key in ("tokens", "labels", "position_ids"))
        counts, documents = batch["loss_mask"].reshape(-1) != 0, batch["doc_ids"].reshape(-1)
        length = batch["tokens"].shape[1]
        documents = documents + 1000 * (torch.arange(len(documents)) // length)
    numbers = torch.unique_consecutive(documents[counts], return_inverse=True)[1]
    return list(
        zip(*(values.tolist() for values in (numbers, positions[counts], tokens[counts], labels[counts])), strict=True)
    )


def predictions_of_items(items: list[dict[str, list[int]]], *, drops_eos: bool) -> list[tuple[int, int, int, int]]:
    found, number = [], -1
    for item in items:
        documents = item.get("doc_ids", [0] * SEQ_LENGTH)
        last = None
        for place, (token, label, document) in enumerate(
            zip(item["input_ids"], item["labels"], documents, strict=True)
        ):
            start = documents.index(document)
            if label == -100 or (drops_eos and token == EOS):
                continue
            number += (document != last) or last is None
            last = document
            found.append((number, place - start, token, label))
    return found


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("packs", [False, True])
def test_every_contract_trains_what_the_items_train_at_the_same_positions(
    contract: str, packs: bool, tmp_path: Path
) -> None:
    windows = windows_of(make_stream(tmp_path))
    dataset = create_sft_dataset(
        tmp_path,
        Tokenizer(),
        seq_length=SEQ_LENGTH,
        contract=BatchOptions(contract, return_doc_ids=True),
        stream=StreamOptions(pack_sequences=packs),
    )
    # Megatron-Bridge before its main branch drops the loss where the input is EOS: with documents there is none.
    drops_eos = contract == "bridge_0_6"
    items = [plain_item(window, packs=packs) for window in windows]
    batch = dataset.fetch_batch(range(len(windows)))
    assert predictions_of(batch, contract) == predictions_of_items(items, drops_eos=drops_eos)


def test_without_documents_a_batch_is_the_items_stacked(tmp_path: Path) -> None:
    make_stream(tmp_path)
    dataset = create_sft_dataset(
        tmp_path, Tokenizer(), seq_length=SEQ_LENGTH, contract=BatchOptions(pad_to_max_length=True)
    )
    batch = dataset.fetch_batch(range(50))
    for key, name in (("tokens", "input_ids"), ("labels", "labels")):
        assert torch.equal(batch[key], torch.stack([dataset[index][name] for index in range(50)]))
    assert bool((batch["loss_mask"] == 1).all())
    assert batch["position_ids"].tolist() == [list(range(SEQ_LENGTH))] * 50
    assert batch["cu_seqlens_q"].tolist() == [[0, SEQ_LENGTH]] * 50


def test_documents_are_sequences_with_boundaries_and_positions_of_their_own(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([5, 9, 1, EOS, 7, 3, EOS, 8, 4], np.uint16))
    dataset = create_sft_dataset(
        tmp_path,
        EOS,
        seq_length=8,
        contract=BatchOptions(pad_seq_length_to_mult=1, return_doc_ids=True),
        stream=StreamOptions(pack_sequences=True),
    )
    batch = dataset.fetch_batch([0])
    assert batch["tokens"].tolist() == [[5, 9, 1, 7, 3, 8]]
    assert batch["labels"].tolist() == [[9, 1, EOS, 3, EOS, 4]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert batch["cu_seqlens_q"].tolist() == [[0, 3, 5, 6]]
    assert batch["doc_ids"].tolist() == [[0, 0, 0, 1, 1, 2]]
    assert doc_ids_from_boundaries(batch["cu_seqlens_q"], 6).tolist() == [[0, 0, 0, 1, 1, 2]]
    flattened = create_sft_dataset(
        tmp_path, EOS, seq_length=8, contract="hf", stream=StreamOptions(pack_sequences=True)
    ).fetch_batch([0])
    assert flattened["input_ids"].tolist() == [[5, 9, 1, EOS, 7, 3, EOS, 8, 4]]
    assert flattened["labels"].tolist() == [[-100, 9, 1, EOS, -100, 3, EOS, -100, 4]]


def test_a_window_of_nothing_but_eos_trains_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full(33, EOS, np.uint16))
    for answer_only_loss in (True, False):
        dataset = create_sft_dataset(
            tmp_path,
            EOS,
            seq_length=8,
            contract=BatchOptions(answer_only_loss=answer_only_loss),
            stream=StreamOptions(pack_sequences=True),
        )
        assert set(dataset[0]["labels"].tolist()) == {-100}
        for batch in (dataset.fetch_batch([0, 1]), dataset.collate_fn([dataset[0], dataset[1]])):
            assert not batch["loss_mask"].any()
            assert batch["tokens"].shape == (2, 8)
            assert batch["cu_seqlens_q"].tolist() == [[0, 7, 8]] * 2  # a model can run on it


def test_padding_samples_train_nothing(tmp_path: Path) -> None:
    make_stream(tmp_path)
    for arguments in ({}, {"answer_only_loss": False}, {"pack_sequences": True}):
        dataset = create_sft_dataset(tmp_path, EOS, seq_length=SEQ_LENGTH, **grouped(**arguments))
        padding = dataset[-1]
        assert padding["input_ids"].tolist() == dataset[49]["input_ids"].tolist()
        assert set(padding["labels"].tolist()) == {-100}
        for batch in (dataset.fetch_batch([3, -1]), dataset.collate_fn([dataset[3], dataset[-1]])):
            assert batch["loss_mask"][0].any()
            assert not batch["loss_mask"][1].any()


def test_the_state_is_that_of_the_seed(tmp_path: Path) -> None:
    make_stream(tmp_path)
    dataset = create_sft_dataset(tmp_path, EOS, seq_length=SEQ_LENGTH)
    assert isinstance(dataset, TokenStreamDataset)
    assert dataset.state_dict() == {"epoch": 0, "total_samples": 50}
    dataset.load_state_dict({"epoch": 3, "total_samples": 50})
    assert dataset.state_dict()["epoch"] == 3
    with pytest.raises(InvalidInputError, match=r"the state is of 49 samples, but .* has 50; open the data"):
        dataset.load_state_dict({"epoch": 3, "total_samples": 49})


@pytest.mark.parametrize("packs", [False, True])
def test_memory_mapped_dataset_cuts_as_the_seed_does(packs: bool, tmp_path: Path) -> None:
    files = make_stream(tmp_path)
    dataset = MemoryMappedDataset(str(tmp_path), 25, "*.npy", packs, EOS if packs else None)
    windows = [tokens[25 * n : 25 * n + 25] for tokens in files for n in range(len(tokens) // 25)]
    assert len(dataset) == len(windows) == sum(len(tokens) // 25 for tokens in files)
    for index, window in enumerate(windows):
        for key, value in plain_item(window, packs=packs).items():
            assert dataset[index][key].tolist() == value


def test_streams_are_opened_without_a_tokenizer_where_no_loss_depends_on_its_eos(tmp_path: Path) -> None:
    make_stream(tmp_path)
    for contract in ("mcore", "hf"):
        assert create_sft_dataset(tmp_path, seq_length=SEQ_LENGTH, contract=contract).fetch_batch([0])
    with pytest.raises(InvalidInputError, match="does not record a padding id; pass a tokenizer, or its EOS id"):
        create_sft_dataset(tmp_path, seq_length=SEQ_LENGTH, contract="bridge_0_6")
    with pytest.raises(InvalidInputError, match="no EOS id is known; pass a tokenizer or eos_id"):
        create_sft_dataset(tmp_path, seq_length=SEQ_LENGTH, stream=StreamOptions(pack_sequences=True))
    dataset = create_sft_dataset(
        tmp_path, Tokenizer(), seq_length=SEQ_LENGTH, stream=StreamOptions(pack_sequences=True, eos_id=7)
    )
    assert [stream.eos_id for stream in dataset.streams] == [
        7
    ]  # documents may end with another id than the tokenizer's


def test_without_a_length_windows_have_2048_predictions(tmp_path: Path) -> None:
    write_stream(tmp_path, [5000])
    dataset = create_sft_dataset(tmp_path, EOS)
    assert (len(dataset), dataset.max_seq_length) == (2, 2048)
    assert dataset.fetch_batch([0])["tokens"].shape == (1, 2048)


@pytest.mark.parametrize("contract", ["mcore", "bridge_0_6", "hf"])
def test_streams_and_packed_chats_are_blended_by_weight(contract: str, tmp_path: Path) -> None:
    make_stream(tmp_path / "tokens")
    chats = make_bins(40, SEQ_LENGTH, vocab_size=VOCAB, seed=3)
    write_shard(tmp_path / "chats", chats, SEQ_LENGTH, vocab_size=VOCAB)
    paths = [tmp_path / "tokens", tmp_path / "chats"]
    padded = BatchOptions(contract, pad_to_max_length=True)
    blend = create_sft_dataset(
        paths,
        EOS,
        weights=[0.75, 0.25],
        max_num_samples=200,
        stream=StreamOptions(pack_sequences=True),
        seq_length=SEQ_LENGTH,
        contract=contract,
    )
    assert type(blend) is PackedDataset
    order = blend.sampling_order
    assert order is not None
    drawn = order.at(np.arange(200))
    assert abs(int((drawn < 50).sum()) - 150) <= 1
    stream = create_sft_dataset(
        paths[0],
        EOS,
        contract=padded,
        stream=StreamOptions(pack_sequences=True),
        seq_length=SEQ_LENGTH,
    )
    packed = create_sft_dataset(paths[1], EOS, contract=padded, seq_length=SEQ_LENGTH)
    whole = create_sft_dataset(
        paths,
        EOS,
        weights=[0.75, 0.25],
        max_num_samples=200,
        contract=padded,
        stream=StreamOptions(pack_sequences=True),
        seq_length=SEQ_LENGTH,
    )
    for index, number in enumerate(drawn[:40].tolist()):
        if contract == "hf" and number >= 50:
            continue  # the blend's rows have the place of the longest window, one more than the chats' own
        alone = stream.fetch_batch([number]) if number < 50 else packed.fetch_batch([number - 50])
        assert_same_batch(whole.fetch_batch([index]), alone)
    batch = blend.fetch_batch(range(12))
    assert_same_batch(batch, blend.collate_fn([blend[index] for index in range(12)]))


def test_streams_of_several_directories_are_laid_end_to_end(tmp_path: Path) -> None:
    make_stream(tmp_path / "a")
    write_stream(tmp_path / "b", [100], vocab=VOCAB)
    both = create_sft_dataset([tmp_path / "a", tmp_path / "b"], EOS, seq_length=SEQ_LENGTH)
    assert len(both) == 54
    last = create_sft_dataset(tmp_path / "b", EOS, seq_length=SEQ_LENGTH)
    assert both[53]["input_ids"].tolist() == last[3]["input_ids"].tolist()


def test_files_that_a_glob_finds_are_one_stream(tmp_path: Path) -> None:
    write_stream(tmp_path, [101, 3, 100], suffix=".bin", vocab=VOCAB)  # by its own size alone, the last is uint32
    dataset = create_sft_dataset(str(tmp_path / "*.bin"), EOS, seq_length=SEQ_LENGTH)
    assert len(dataset) == 4 + 0 + 4
    [stream] = dataset.streams
    assert (stream.dtype, len(stream.files)) == ("uint16", 3)
    again = create_sft_dataset(tmp_path, EOS, seq_length=SEQ_LENGTH)
    assert again.fingerprint == dataset.fingerprint
    assert (
        len(create_sft_dataset([tmp_path / "shard_00002.bin"], EOS, SEQ_LENGTH, stream=StreamOptions(dtype="uint16")))
        == 4
    )


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_loaders_and_workers_give_the_same_batches(context: str, tmp_path: Path) -> None:
    make_stream(tmp_path)
    dataset = create_sft_dataset(tmp_path, EOS, seq_length=SEQ_LENGTH, stream=StreamOptions(pack_sequences=True))
    loader = PackedLoader(dataset, shuffle=False, micro_batch_size=5, global_batch_size=5)
    workers = torch.utils.data.DataLoader(
        dataset, batch_size=5, num_workers=2, collate_fn=dataset.collate_fn, multiprocessing_context=context
    )
    for left, right in zip(loader, workers, strict=True):
        assert_same_batch(left, right)


def test_a_run_is_resumed_at_any_sample_and_other_windows_are_refused(tmp_path: Path) -> None:
    make_stream(tmp_path)

    def loader(**options: Any) -> PackedLoader:
        arguments = {"seq_length": SEQ_LENGTH, "pack_sequences": True, **options}
        dataset = create_sft_dataset(tmp_path, EOS, **grouped(**arguments))
        return PackedLoader(dataset, shuffle=True, global_batch_size=4, num_epochs=None)

    first = loader()
    batches = iter(first)
    for _ in range(7):
        next(batches)
    state = copy.deepcopy(first.state_dict())
    rest = [next(batches) for _ in range(10)]
    resumed = loader()
    resumed.load_state_dict(state)
    for left, right in zip(rest, iter(resumed), strict=False):
        assert_same_batch(left, right)
    with pytest.raises(StateMismatchError):
        loader(seq_length=SEQ_LENGTH - 1).load_state_dict(state)
    with pytest.raises(StateMismatchError):
        loader(pack_sequences=False).load_state_dict(state)


def test_a_token_outside_the_tokenizers_vocabulary_is_never_silent(tmp_path: Path) -> None:
    files = make_stream(tmp_path)
    files[1][317] = VOCAB
    np.save(tmp_path / "shard_00001.npy", files[1])
    dataset = create_sft_dataset(tmp_path, Tokenizer(), seq_length=SEQ_LENGTH)
    number = 20 + 317 // 24
    for read in (lambda: dataset[number], lambda: dataset.fetch_batch([0, number])):
        with pytest.raises(ShardFileError, match=r"shard_00001.npy: the token at position 317 is 50, not in 0..49"):
            read()
    assert dataset.fetch_batch([0])
    tolerant = create_sft_dataset(
        tmp_path, Tokenizer(), seq_length=SEQ_LENGTH, opening=OpenOptions(allow_tokenizer_mismatch=True)
    )
    assert int(tolerant.fetch_batch([number])["tokens"].max()) == VOCAB


def test_what_concerns_streams_is_refused_where_there_is_none(tmp_path: Path) -> None:
    write_shard(tmp_path / "chats", make_bins(4, 24, seed=3), 24)
    for arguments in ({"pack_sequences": True}, {"file_pattern": "*.npy"}, {"dtype": "uint16"}):
        with pytest.raises(InvalidInputError, match=r"is not a token stream; leave it out, packed data knows its own"):
            create_sft_dataset(tmp_path / "chats", EOS, **grouped(**arguments))


def test_an_empty_directory_and_a_forced_storage_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="is an empty directory; check the path"):
        create_sft_dataset(tmp_path, EOS)
    with pytest.raises(InvalidInputError, match=r"is an empty directory; pass one that holds .npy or .bin files"):
        create_sft_dataset(tmp_path, EOS, opening=OpenOptions(storage="token_stream"))
    write_stream(tmp_path, [40])
    with pytest.raises(InvalidInputError, match="is token_stream, but storage asks for 'memmap_v1'"):
        create_sft_dataset(tmp_path, EOS, opening=OpenOptions(storage="memmap_v1"))
    assert len(create_sft_dataset(tmp_path, EOS, 8, opening=OpenOptions(storage="token_stream"))) == 4


def test_what_is_skipped_and_unused_is_announced_once_and_not_by_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_stream(tmp_path, [100, 5], vocab=VOCAB)
    dataset = create_sft_dataset(tmp_path, EOS, seq_length=SEQ_LENGTH)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["1 of 2 files is shorter than a window" in record.getMessage() for record in warnings] == [True]
    assert "8 of 105 tokens (7.6%), after the last window of each file, are not used" in caplog.text
    caplog.clear()
    again = pickle.loads(pickle.dumps(dataset))
    assert_same_batch(again.fetch_batch([0, 3]), dataset.fetch_batch([0, 3]))
    assert not caplog.records
