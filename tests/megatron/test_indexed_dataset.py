"""Megatron's indexed datasets, both ways: what we write megatron-core reads, what it writes we read, id for id."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft import (
    DatasetWriter,
    PackedBin,
    PackedLoader,
    convert,
    create_sft_dataset,
    create_shard_writer,
    open_shard,
    pack,
    validate,
)
from megatron_packed_sft.cli.main import main
from megatron_packed_sft.errors import InvalidInputError, StorageIOError, TargetExistsError, UnsupportedFormatError
from megatron_packed_sft.remote.objects import read_object
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from tests.faults.injection import Injector
from tests.packed_bins import files_of, make_bins, write_shard

with warnings.catch_warnings():  # what megatron-core says when it is imported
    warnings.simplefilter("ignore")
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

EOS = 2


def build(prefix: Path, documents: list[list[list[int]]], dtype: Any = np.int32, *, multimodal: bool = False) -> Path:
    """As tools/preprocess_data.py of Megatron-LM does: documents of sequences, with megatron-core's builder."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for sequences in documents:
        for ids in sequences:
            builder.add_item(torch.tensor(ids, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def texts(num_documents: int, seed: int = 0, longest: int = 40, vocab_size: int = 200) -> list[list[list[int]]]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, num_documents).tolist()
    return [[[*rng.integers(3, vocab_size, length).tolist(), EOS]] for length in lengths]


def trained(bins: list[PackedBin]) -> list[PackedBin]:
    """The same bins with every prediction trained."""
    result = []
    for ids, _, starts in bins:
        mask = np.ones(len(ids), np.uint8)
        mask[np.append(starts[1:].astype(np.int64), len(ids)) - 1] = 0
        result.append(PackedBin(ids, mask, starts))
    return result


def sequences_of(bins: list[PackedBin]) -> list[list[int]]:
    return [part.tolist() for one in bins for part in np.split(one.input_ids, one.seq_start_id[1:].astype(np.int64))]


def read_with_megatron_core(prefix: Path) -> list[list[int]]:
    """All sequences; the dataset must outlive them, because it unmaps its file when it goes."""
    dataset = IndexedDataset(str(prefix))
    return [array.tolist() for array in dataset[:]]


@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 120), min_size=0, max_size=9), min_size=0, max_size=3), min_size=1, max_size=12
    ).filter(lambda documents: any(ids for document in documents for ids in document)),
    st.sampled_from([np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16]),
)
@settings(deadline=None, max_examples=60)
def test_documents_that_megatron_core_wrote_come_back_id_for_id(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], dtype: Any
) -> None:
    prefix = build(tmp_path_factory.mktemp("indexed") / "text_document", documents, dtype)
    theirs, ours = IndexedDataset(str(prefix)), open_shard(prefix)
    joined = [[token for ids in document for token in ids] for document in documents]
    assert [one.input_ids.tolist() for one in ours] == [ids for ids in joined if ids]
    assert [
        [token for number in range(first, last) for token in theirs[number].tolist()]
        for first, last in itertools.pairwise(theirs.document_indices.tolist())
    ] == joined
    for one in ours:
        assert (one.seq_start_id.tolist(), one.loss_mask.tolist()) == ([0], [1] * (len(one.input_ids) - 1) + [0])


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1000, np.uint16), (65_499, np.uint16), (65_500, np.int32), (128_256, np.int32)]
)
def test_megatron_core_reads_what_convert_wrote_each_sequence_a_document(
    tmp_path: Path, vocab_size: int, dtype: Any
) -> None:
    bins = trained(make_bins(30, 64, vocab_size=vocab_size, seed=1))
    write_shard(tmp_path / "shard", bins, 64, vocab_size=vocab_size)
    report = convert(tmp_path / "shard", tmp_path / "out_text_document", to="megatron_indexed")
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    expected = sequences_of(bins)
    assert read_with_megatron_core(tmp_path / "out_text_document") == expected
    assert dataset.index.dtype is dtype is DType.optimal_dtype(vocab_size)
    assert dataset.document_indices.tolist() == list(range(len(expected) + 1))
    assert dataset.sequence_lengths.tolist() == [len(ids) for ids in expected]
    assert (report.num_bins, report.num_tokens, report.num_dropped_masks) == (30, sum(map(len, expected)), 0)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == [
        "out_text_document.bin",
        "out_text_document.idx",
    ]


def test_what_we_write_is_what_megatron_core_would_have_written_byte_for_byte(tmp_path: Path) -> None:
    bins = trained(make_bins(12, 32, vocab_size=300, seed=4))
    write_shard(tmp_path / "shard", bins, 32, vocab_size=300)
    convert(tmp_path / "shard", tmp_path / "ours.idx", to="megatron_indexed")
    build(tmp_path / "theirs", [[ids] for ids in sequences_of(bins)], np.uint16)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()


def test_there_and_back_again_gives_the_same_documents(tmp_path: Path) -> None:
    prefix = build(tmp_path / "web.v1", texts(25))
    convert(prefix, tmp_path / "shard")
    convert(tmp_path / "shard", tmp_path / "again", to="megatron_indexed", vocab_size=70_000)
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "web.v1.bin").read_bytes()
    assert (tmp_path / "again.idx").read_bytes() == (tmp_path / "web.v1.idx").read_bytes()


@pytest.mark.parametrize("name", ["web.v1", "web.v1.idx", "web.v1.bin"])
def test_the_prefix_and_either_file_open_the_data_as_windows_that_ignore_documents(tmp_path: Path, name: str) -> None:
    documents = texts(40)
    build(tmp_path / "web.v1", documents)
    dataset = create_sft_dataset(tmp_path / name, EOS, seq_length=16)
    flat = [token for [ids] in documents for token in ids]
    assert len(dataset) == (len(flat) - 1) // 16
    item = dataset[3]
    assert item["input_ids"].tolist() == flat[48:64]
    assert item["labels"].tolist() == flat[49:65]


def test_windows_with_pack_sequences_are_those_of_the_same_tokens_in_a_flat_file(tmp_path: Path) -> None:
    documents = texts(60)
    build(tmp_path / "web", documents, np.uint16)
    flat: npt.NDArray[np.uint16] = np.concatenate([np.array(ids, np.uint16) for [ids] in documents])
    (tmp_path / "flat").mkdir()
    np.save(tmp_path / "flat" / "tokens.npy", flat)
    ours, theirs = (
        create_sft_dataset(tmp_path / name, EOS, seq_length=32, stream=StreamOptions(pack_sequences=True))
        for name in ("web", "flat")
    )
    for one, other in zip(PackedLoader(ours, shuffle=False), PackedLoader(theirs, shuffle=False), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in one.items() if isinstance(value, torch.Tensor))


def test_documents_are_samples_when_they_are_asked_for_and_can_be_packed(tmp_path: Path) -> None:
    documents = texts(30)
    prefix = build(tmp_path / "web", documents)
    dataset = create_sft_dataset(prefix, EOS, seq_length=64, stream=StreamOptions(documents=True))
    assert [dataset[index]["input_ids"].tolist() for index in range(30)] == [ids for [ids] in documents]
    batch = dataset.fetch_batch([4, 7])
    assert batch["loss_mask"].sum() == sum(len(documents[index][0]) - 1 for index in (4, 7))
    shard = open_shard(prefix)
    plan = pack(shard.lengths, pack_size=64)
    assert sum(len(one) for one in plan.bins()) == 30 if hasattr(plan, "bins") else plan.num_bins < 30


def test_a_document_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    prefix = build(tmp_path / "web", [[list(range(3, 103))]])
    with pytest.raises(InvalidInputError, match=r"seq_length is 64, but a bin of .* needs 99"):
        create_sft_dataset(prefix, EOS, seq_length=64, stream=StreamOptions(documents=True))


def test_several_indexed_datasets_and_directories_of_them_are_laid_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    first, second = texts(20, seed=1), texts(20, seed=2)
    build(tmp_path / "many" / "a", first)
    build(tmp_path / "many" / "b", second)
    of_directory = create_sft_dataset(tmp_path / "many", EOS, seq_length=64, stream=StreamOptions(documents=True))
    of_list = create_sft_dataset(
        [tmp_path / "many" / "a", tmp_path / "many" / "b"], EOS, seq_length=64, stream=StreamOptions(documents=True)
    )
    for dataset in (of_directory, of_list):
        assert [dataset[index]["input_ids"].tolist() for index in range(40)] == [ids for [ids] in first + second]
    windows = create_sft_dataset(tmp_path / "many", EOS, seq_length=16)
    assert windows[0]["input_ids"].tolist() == [token for [ids] in first for token in ids][:16]
    blended = create_sft_dataset(
        {"a": tmp_path / "many" / "a", "b": tmp_path / "many" / "b"}, EOS, seq_length=16, weights={"a": 1, "b": 3}
    )
    assert blended.sampling_order is not None
    assert blended.sampling_order.blend.counts(8) == (2, 6)


def test_masks_are_refused_with_a_count_unless_they_may_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bins = make_bins(9, 32, seed=5)
    write_shard(tmp_path / "shard", bins, 32)
    num_predictions = sum(len(one.input_ids) - one.num_sequences for one in bins)
    num_untrained = num_predictions - sum(int(one.loss_mask.sum()) for one in bins)
    command = ["convert", str(tmp_path / "shard"), str(tmp_path / "out"), "--to", "megatron_indexed"]
    assert main(command) == 2
    message = capsys.readouterr().err
    assert (
        f"{num_untrained:,} of {num_predictions:,} predictions are not trained, and megatron_indexed keeps no"
        in message
    )
    assert "add --drop-masks" in message
    assert not list(tmp_path.glob("out*"))
    assert main([*command, "--drop-masks"]) == 0
    assert f"readers will train on {num_untrained:,} predictions" in capsys.readouterr().out
    assert read_with_megatron_core(tmp_path / "out") == sequences_of(bins)
    with pytest.raises(InvalidInputError, match="memmap_v1 keeps loss masks; remove --drop-masks"):
        convert(tmp_path / "out", tmp_path / "back", drop_masks=True)


def test_a_url_takes_the_same_options_and_gets_both_files(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", make_bins(6, 16, seed=1), 16)
    url = f"memory://indexed/{tmp_path.name}/docs"
    with pytest.raises(InvalidInputError, match="predictions are not trained"):
        convert(tmp_path / "shard", url, to="megatron_indexed")
    report = convert(tmp_path / "shard", url, to="megatron_indexed", drop_masks=True)
    convert(tmp_path / "shard", tmp_path / "docs", to="megatron_indexed", drop_masks=True)
    assert report.target == url
    assert report.num_dropped_masks
    for suffix in (".bin", ".idx"):
        assert read_object(url + suffix, 1 << 20) == (tmp_path / f"docs{suffix}").read_bytes()


def test_the_writer_itself_refuses_masks_and_publishes_nothing_then(tmp_path: Path) -> None:
    with create_shard_writer("megatron_indexed", tmp_path / "out", num_bins=2, pack_size=8) as writer:
        writer.write_bin(0, [8, 9], [1, 0], [0])
        writer.write_bin(1, [5, 6, 7], [0, 1, 0], [0])
        with pytest.raises(InvalidInputError, match="1 of 3 predictions are not trained"):
            writer.finalize()
    assert list(tmp_path.iterdir()) == []


def test_legacy_masks_at_the_ends_of_sequences_do_not_count_as_trained(tmp_path: Path) -> None:
    rows = [{"input_ids": [4, 5, 6, 7], "loss_mask": [1, 1, 1, 1], "seq_start_id": [0, 2]}]
    np.save(tmp_path / "data.npy", np.array(rows, dtype=object), allow_pickle=True)
    report = convert(tmp_path / "data.npy", tmp_path / "out", to="megatron_indexed")
    assert (report.num_cleared_masks, report.num_dropped_masks) == (2, 0)
    assert read_with_megatron_core(tmp_path / "out") == [[4, 5], [6, 7]]


def test_a_dataset_directory_becomes_one_pair_of_files_per_split(tmp_path: Path) -> None:
    parts = {
        "train": [trained(make_bins(5, 32, seed=n)) for n in (1, 2)],
        "validation": [trained(make_bins(3, 32, seed=3))],
    }
    with DatasetWriter(tmp_path / "data") as writer:
        for split, shards in parts.items():
            for number, bins in enumerate(shards):
                with writer.shard_writer(split, number, num_bins=len(bins), pack_size=32, vocab_size=1000) as shard:
                    for index, one in enumerate(bins):
                        shard.write_bin(index, *one)
                    shard.finalize()
        writer.finalize()
    report = convert(tmp_path / "data", tmp_path / "texts", to="megatron_indexed")
    assert report.target == f"{tmp_path}/texts_train, {tmp_path}/texts_validation"
    for split, shards in parts.items():
        expected = [ids for bins in shards for ids in sequences_of(bins)]
        assert read_with_megatron_core(tmp_path / f"texts_{split}") == expected


def test_published_files_are_replaced_only_on_request(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard", trained(make_bins(3, 16, seed=1)), 16)
    (tmp_path / "out.bin").write_bytes(b"somebody's")
    with pytest.raises(TargetExistsError, match=r"out\.bin exists already; choose another name"):
        convert(tmp_path / "shard", tmp_path / "out", to="megatron_indexed")
    convert(tmp_path / "shard", tmp_path / "out", to="megatron_indexed", overwrite=True)
    before = (tmp_path / "out.bin").read_bytes()
    write_shard(tmp_path / "other", trained(make_bins(4, 16, seed=2)), 16)
    with pytest.raises(TargetExistsError):
        convert(tmp_path / "other", tmp_path / "out", to="megatron_indexed")
    assert (tmp_path / "out.bin").read_bytes() == before
    convert(tmp_path / "other", tmp_path / "out", to="megatron_indexed", overwrite=True)
    assert len(IndexedDataset(str(tmp_path / "out"))) == sum(one.num_sequences for one in make_bins(4, 16, seed=2))


@pytest.mark.parametrize("replaces", [False, True])
def test_an_error_at_any_step_is_ours_and_leaves_all_as_it_was_or_as_it_should_be(
    tmp_path: Path, replaces: bool
) -> None:
    write_shard(tmp_path / "shard", trained(make_bins(3, 16, seed=1)), 16)
    write_shard(tmp_path / "before", trained(make_bins(2, 16, seed=2)), 16)

    def place(name: str) -> Path:
        (tmp_path / name).mkdir()
        if replaces:
            convert(tmp_path / "before", tmp_path / name / "out", to="megatron_indexed")
        return tmp_path / name

    def write(home: Path) -> None:
        convert(tmp_path / "shard", home / "out", to="megatron_indexed", overwrite=replaces)

    reference = place("reference")
    before = files_of(reference)
    with Injector() as counter:
        write(reference)
    for step in range(len(counter.calls)):
        home = place(str(step))
        error = None
        try:
            with Injector(step, error=errno.EIO):
                write(home)
        except StorageIOError as caught:
            error = caught
            assert str(home) in str(error)
            assert len(os.listdir(home)) == len(files_of(home))  # nothing hidden is left
        left = {name: data for name, data in files_of(home).items() if not name.startswith(".")}
        assert left in (before, files_of(reference)), (step, counter.calls[step], error)
        if error is None:  # only tidying up after the publication may fail without a word
            assert (counter.calls[step], left) == ("unlink", files_of(reference))


def test_padding_for_parallel_ranks_does_not_become_text(tmp_path: Path) -> None:
    bins = [PackedBin(np.array([5, 6, 0, 0]), np.array([1, 0, 0, 0], np.uint8), np.array([0], np.uint32))]
    with create_shard_writer(
        "memmap_v1", tmp_path / "shard", num_bins=1, pack_size=4, provenance={"pad_seq_to_mult": 4}
    ) as writer:
        writer.write_bin(0, *bins[0])
        writer.finalize()
    with pytest.raises(InvalidInputError, match="padded to multiples of 4 for parallel ranks"):
        convert(tmp_path / "shard", tmp_path / "out", to="megatron_indexed", drop_masks=True)


def test_multimodal_indexes_are_refused(tmp_path: Path) -> None:
    prefix = build(tmp_path / "images", [[[1, 2, 3], [4, 5]]], multimodal=True)
    with pytest.raises(UnsupportedFormatError, match=r"is multimodal: it has a mode for each of its 2 sequences"):
        create_sft_dataset(prefix, EOS)


def test_validate_counts_documents_and_says_how_to_train(tmp_path: Path) -> None:
    documents = [*texts(10), [[]]]
    build(tmp_path / "web", documents)
    report = validate(tmp_path / "web")
    num_tokens = sum(len(ids) for [ids] in documents)
    assert (report.ok, report.num_bins, report.num_tokens) == (True, 1, num_tokens)
    shown = "\n".join(report.notes)
    assert "10 documents of up to" in shown
    assert "1 empty document left out" in shown
    lengths = []
    for start in ("python: ", "python, by document: "):
        [call] = [note.removeprefix(start) for note in report.notes if note.startswith(start)]
        lengths.append(
            len(
                eval(call, {"create_sft_dataset": create_sft_dataset, "StreamOptions": StreamOptions, "tokenizer": EOS})
            )
        )
    assert lengths == [1, 10]


def test_validate_checks_the_vocabulary_and_counts_documents_by_their_eos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(tmp_path / "web", texts(10, vocab_size=200))
    command = ["validate", str(tmp_path / "web"), "--eos-id", str(EOS), "--seq-length", "16"]
    assert main([*command, "--vocab-size", "200"]) == 0
    printed = capsys.readouterr().out
    assert "the EOS id 2 ends 10 documents" in printed
    assert (
        f"train: packed-sft train data.path={tmp_path}/web.idx data.sequence_length=16 data.pack_sequences=true"
        in printed
    )
    assert main([*command, "--vocab-size", "50"]) == 1
    assert "not in 0..49" in capsys.readouterr().out
    assert main([*command, "--dtype", "uint16"]) == 2
    assert "--dtype does not apply to" in capsys.readouterr().err


def test_validate_finds_a_token_that_is_no_id(tmp_path: Path) -> None:
    build(tmp_path / "web", [[[1, 2, 3]], [[4, -7, 6]]])
    report = validate(tmp_path / "web.idx")
    assert [str(finding) for finding in report.findings] == [
        f"{tmp_path}/web.bin: the token at position 4 is -7, not in 0..2147483647"
    ]


def test_prepare_and_datasets_say_that_this_storage_has_no_masks(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInputError, match="keeps no loss masks, so a dataset directory cannot use it; write memmap"
    ):
        DatasetWriter(tmp_path / "data", storage="megatron_indexed")


def test_reading_imports_neither_torch_nor_megatron_core(tmp_path: Path) -> None:
    build(tmp_path / "web", texts(5))
    script = (
        "import sys; from megatron_packed_sft import open_shard, validate; "
        f"print(len(open_shard({str(tmp_path / 'web')!r})), validate({str(tmp_path / 'web')!r}).ok); "
        "assert 'torch' not in sys.modules and 'megatron.core' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5", "True"]
