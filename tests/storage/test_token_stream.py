"""Token streams: which files they are made of, how windows are cut, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft import (
    StreamOptions,
    convert,
    create_sft_dataset,
    create_shard_writer,
    open_shard,
    open_token_stream,
    validate,
)
from megatron_packed_sft.errors import (
    InvalidInputError,
    ManifestError,
    PackedSFTError,
    ShardChangedError,
    ShardFileError,
    UnsupportedFormatError,
)
from megatron_packed_sft.storage.bins import block_of, find_violations
from megatron_packed_sft.storage.registry import storage_names, storage_of
from megatron_packed_sft.storage.token_stream.options import parse_dtype
from tests.open_files import open_files
from tests.packed_bins import make_bins, write_shard
from tests.tokens.stores import make_sequences, write_store

EOS = 2


def write_stream(
    home: Path, lengths: list[int], *, suffix: str = ".npy", dtype: str = "uint16", vocab: int = 50
) -> Any:
    """Files of random tokens in `home`; return the tokens of each."""
    home.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(len(lengths))
    files = [rng.integers(0, vocab, length).astype(dtype) for length in lengths]
    for number, tokens in enumerate(files):
        path = home / f"shard_{number:05d}{suffix}"
        if suffix == ".npy":
            np.save(path, tokens)
        else:
            path.write_bytes(tokens.tobytes())
    return files


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64", "uint8", ">u2", ">u4"])
def test_windows_are_slices_of_the_files_in_the_order_of_their_names(suffix: str, dtype: str, tmp_path: Path) -> None:
    files = write_stream(tmp_path, [41, 9, 8, 100], suffix=suffix, dtype=dtype)
    asked = dtype if suffix == ".bin" else None
    stream = open_token_stream(tmp_path, StreamOptions(seq_length=8, dtype=asked))
    assert len(stream) == 5 + 1 + 0 + 12
    expected = [tokens[8 * n : 8 * n + 9] for tokens in files for n in range((len(tokens) - 1) // 8)]
    for index, window in enumerate(expected):
        assert stream.window(index).tolist() == window.tolist()
        assert stream[index].input_ids.tolist() == window.tolist()
    gathered = stream.gather(list(range(len(stream)))[::-1])
    assert gathered.input_ids.tolist() == np.concatenate(expected[::-1]).tolist()


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(lambda lengths: max(lengths) > 1),
    seq_length=st.integers(1, 9),
)
def test_every_token_but_the_first_of_a_file_and_its_rest_is_predicted_once(
    lengths: list[int], seq_length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("stream")
    numbers = np.arange(sum(lengths), dtype=np.uint16)
    offsets = np.cumsum([0, *lengths])
    for number in range(len(lengths)):
        np.save(home / f"{number}.npy", numbers[offsets[number] : offsets[number + 1]])
    if max(lengths) <= seq_length:
        with pytest.raises(InvalidInputError, match="no file is as long as a window"):
            open_token_stream(home, StreamOptions(seq_length=seq_length))
        return
    stream = open_token_stream(home, StreamOptions(seq_length=seq_length))
    predicted = [token for index in range(len(stream)) for token in stream.window(index)[1:].tolist()]
    expected = []
    for length, start in zip(lengths, offsets.tolist(), strict=False):
        count = (length - 1) // seq_length if length else 0
        expected += range(start + 1, start + 1 + count * seq_length)
    assert predicted == expected
    num_unused = sum(lengths) - len(expected) - sum(length > seq_length for length in lengths)
    assert ("not used" in " ".join(stream.notes)) == (num_unused > 0)
    if num_unused:
        assert f": {num_unused:,} of {sum(lengths):,} tokens" in stream.notes[0]


@settings(deadline=None)  # kernels are compiled at the first call
@given(tokens=st.lists(st.integers(0, 3), min_size=2, max_size=60), seq_length=st.integers(1, 12))
def test_documents_end_with_their_eos_and_the_bins_are_sound(
    tokens: list[int], seq_length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("stream")
    tokens[0] = EOS  # so that there is one
    np.save(home / "a.npy", np.array(tokens, np.uint16))
    seq_length = min(seq_length, len(tokens) - 1)
    stream = open_token_stream(home, StreamOptions(seq_length=seq_length, pack_sequences=True, eos_id=EOS))
    for index in range(len(stream)):
        window = tokens[index * seq_length : (index + 1) * seq_length + 1]
        if window[-2] == EOS:
            window = window[:-1]  # the last token would be a document of its own, without a prediction
        one = stream[index]
        assert one.input_ids.tolist() == window
        starts = [0, *(k + 1 for k in range(len(window) - 1) if window[k] == EOS)]
        if len(starts) == len(window):  # nothing but EOS: one sequence, so that it has places in a batch
            assert not one.loss_mask.any()
            starts, window = [0], window[:1]
        assert one.seq_start_id.tolist() == starts
        violations, _ = find_violations(block_of([one], stream.pack_size), vocab_size=4, pad_id=None)
        assert not violations
        assert int(one.loss_mask.sum()) == len(window) - one.num_sequences


def test_windows_without_overlap_share_no_token(tmp_path: Path) -> None:
    [tokens] = write_stream(tmp_path, [20])
    stream = open_token_stream(tmp_path, StreamOptions(seq_length=4, overlap=False))
    assert len(stream) == 20 // 5
    assert [stream.window(index).tolist() for index in range(4)] == tokens.reshape(4, 5).tolist()


@pytest.mark.parametrize(
    ("spelling", "code"),
    [
        ("uint16", "<u2"),
        ("uint16-le", "<u2"),
        ("uint32_le", "<u4"),
        ("UInt16", "<u2"),
        ("np.uint32", "<u4"),
        ("numpy.int64", "<i8"),
        ("<u2", "<u2"),
        ("u4", "<u4"),
        (">u2", ">u2"),
        ("uint16-be", ">u2"),
        ("|u1", "<u1"),
    ],
)
def test_a_dtype_may_be_spelled_as_people_spell_it(spelling: str, code: str) -> None:
    assert parse_dtype(spelling, "dtype") == code


@pytest.mark.parametrize("spelling", ["float32", "uint24", "O", "object", "", "<f4", "bool"])
def test_a_dtype_that_is_no_integer_is_refused(spelling: str) -> None:
    with pytest.raises(InvalidInputError, match="which is not an integer dtype; write uint16 or uint32"):
        parse_dtype(spelling, "dtype")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.yaml", "name: corpus\ntokenized_info:\n  dtype: uint16\n  file_extension: bin\n  vocab_size: 50\n"),
        ("metadata.json", '{"name": "corpus", "tokenized_info": {"dtype": "uint16", "vocab_size": 50}}'),
        ("meta.json", '{"token_dtype": "uint16-le", "vocab_size": 50, "special_token_ids": {"eot": 2}}'),
        ("../meta.json", '{"token_dtype": "uint16-le", "vocab_size": 50}'),
    ],
)
def test_the_dtype_of_bin_files_comes_from_what_lies_beside_them(name: str, content: str, tmp_path: Path) -> None:
    home = tmp_path / "tokens"
    files = write_stream(home, [40, 80], suffix=".bin")
    (home / name).write_text(content)
    stream = open_token_stream(home, StreamOptions(seq_length=8))
    assert (stream.dtype, stream.vocab_size) == ("uint16", 50)
    assert stream.window(0).tolist() == files[0][:9].tolist()
    assert stream.eos_id == (2 if "special_token_ids" in content else None)
    explicit = open_token_stream(home, StreamOptions(seq_length=8, dtype="uint8"))
    assert explicit.dtype == "uint8"  # what the user says wins


def test_without_a_word_the_sizes_of_bin_files_decide_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_stream(tmp_path / "wide", [40, 41], suffix=".bin", dtype="uint32")
    write_stream(tmp_path / "narrow", [41, 40], suffix=".bin", dtype="uint16")
    assert open_token_stream(tmp_path / "wide", StreamOptions(seq_length=8)).dtype == "uint32"
    assert "the dtype of these 2 .bin files is not recorded; their sizes suggest uint32" in caplog.text
    # The second file alone would be uint32 by its size; the first cannot be, and one program wrote both.
    narrow = open_token_stream(tmp_path / "narrow", StreamOptions(seq_length=8))
    assert (narrow.dtype, narrow.files[1].num_tokens) == ("uint16", 40)


def test_uint16_that_looks_like_uint32_by_its_size_is_not_read_wrongly(tmp_path: Path) -> None:
    write_stream(tmp_path, [40, 80], suffix=".bin", vocab=5000)
    with pytest.raises(InvalidInputError, match="which no tokenizer has; set dtype to uint16, or to uint32 if"):
        open_token_stream(tmp_path, StreamOptions(seq_length=8))
    assert len(open_token_stream(tmp_path, StreamOptions(seq_length=8, dtype="uint16"))) == 4 + 9


def test_file_pattern_chooses_files(tmp_path: Path) -> None:
    files = write_stream(tmp_path, [20, 30])
    (tmp_path / "a.bin").write_bytes(files[1].tobytes())
    (tmp_path / "notes.txt").write_text("not tokens")
    assert len(open_token_stream(tmp_path, StreamOptions(seq_length=4, file_pattern="*_00001.npy"))) == 7
    assert open_token_stream(tmp_path, StreamOptions(seq_length=4, file_pattern="*.bin", dtype="u2")).num_tokens == 30
    with pytest.raises(InvalidInputError, match=r"has no file that matches '\*.arrow'; check the pattern"):
        open_token_stream(tmp_path, StreamOptions(file_pattern="*.arrow"))
    with pytest.raises(
        InvalidInputError, match=r"notes.txt is not a .npy or .bin file; choose a pattern for token files"
    ):
        open_token_stream(tmp_path, StreamOptions(file_pattern="*.txt"))
    with pytest.raises(InvalidInputError, match=r"file_pattern is '\*\*/x'; it must match file names"):
        StreamOptions(file_pattern="**/x")


def test_what_is_no_stream_is_refused_in_one_sentence(tmp_path: Path) -> None:
    def refused(kind: type[PackedSFTError], sentence: str, **options: Any) -> None:
        with pytest.raises(kind, match=sentence) as caught:
            open_token_stream(home, StreamOptions(seq_length=4, **options))
        assert "\n" not in str(caught.value)

    home = tmp_path / "empty"
    home.mkdir()
    refused(InvalidInputError, "empty is an empty directory; pass one that holds .npy or .bin files")
    home = tmp_path / "absent"
    refused(PackedSFTError, "absent does not exist; check the path")
    home = tmp_path / "both"
    write_stream(home, [20])
    write_stream(home, [20], suffix=".bin")
    refused(InvalidInputError, "holds .bin and .npy files, but a stream has one kind; choose with file_pattern")
    home = tmp_path / "dtypes"
    write_stream(home, [20])
    np.save(home / "z.npy", np.arange(20, dtype=np.uint32))
    refused(UnsupportedFormatError, "z.npy holds uint32, but .*shard_00000.npy holds uint16; a stream has one dtype")
    home = tmp_path / "odd"
    home.mkdir()
    (home / "a.bin").write_bytes(bytes(41))
    refused(ShardFileError, "a.bin has 41 bytes, which is not a multiple of the 2 bytes of a uint16 token")
    (home / "a.bin").write_bytes(bytes(42))
    refused(
        ShardFileError, "a.bin has 42 bytes, which is not a multiple of the 4 bytes of a uint32 token", dtype="uint32"
    )
    home = tmp_path / "matrix"
    home.mkdir()
    np.save(home / "a.npy", np.zeros((4, 5), np.uint16))
    refused(UnsupportedFormatError, r"a.npy holds uint16 of shape \(4, 5\), but a stream consists of one-dimensional")
    np.save(home / "a.npy", np.zeros(20, np.float32))
    refused(UnsupportedFormatError, r"a.npy holds float32 of shape \(20,\)")
    np.save(home / "a.npy", np.array([{}, {}], object), allow_pickle=True)
    refused(UnsupportedFormatError, r"a.npy holds Python objects \(a pickle\)")
    (home / "a.npy").write_bytes(b"\x93NUMPY no header")
    refused(ShardFileError, "a.npy has .npy version|a.npy has a damaged .npy header")
    home = tmp_path / "cut"
    write_stream(home, [20])
    os.truncate(home / "shard_00000.npy", 150)
    refused(ShardFileError, "has 150 bytes instead of the 168 in its header; it was truncated or changed")
    home = tmp_path / "dtype"
    write_stream(home, [20])
    refused(InvalidInputError, "dtype is 'uint32', but the header of .* says uint16; leave it out", dtype="uint32")
    refused(InvalidInputError, "pack_sequences separates .* no EOS id is known; pass", pack_sequences=True)
    for text in ("{", "[1,"):
        (home / "metadata.yaml").write_text(text)
        refused(ManifestError, "metadata.yaml is not valid YAML .*; repair it or move it away")
    (home / "metadata.yaml").unlink()
    (home / "meta.json").write_text('{"token_dtype": "float32"}')
    refused(InvalidInputError, "meta.json: the dtype is 'float32', which is not an integer dtype")
    (home / "meta.json").write_text('{"vocab_size": "many"}')
    refused(ManifestError, "meta.json: vocab_size is 'many', not a whole number")


def test_a_named_pipe_or_a_directory_named_like_tokens_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npy")
    assert storage_of(tmp_path) is None
    with pytest.raises(ShardFileError, match=r"a.npy is not a regular file"):
        open_token_stream(tmp_path)
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / "a.bin")
    with pytest.raises(ShardFileError, match=r"a.bin is not a regular file"):
        open_token_stream(tmp_path / "b")


def test_short_files_are_skipped_and_counted_and_only_short_ones_are_refused(tmp_path: Path) -> None:
    write_stream(tmp_path, [40, 3, 8, 0])
    stream = open_token_stream(tmp_path, StreamOptions(seq_length=8))
    assert len(stream) == 4
    assert stream.warnings == [
        f"{tmp_path}: 3 of 4 files are shorter than a window of 9 tokens and are skipped, such as shard_00001.npy "
        "with 3; lower seq_length to use them"
    ]
    with pytest.raises(InvalidInputError, match="a window of 100 tokens, the longest has 40; lower seq_length to at"):
        open_token_stream(tmp_path, StreamOptions(seq_length=99))


def test_a_missing_eos_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full(200_000, 7, np.uint16))
    with pytest.raises(InvalidInputError, match="the EOS id 2 is not among the first 200,000 tokens nor in 64 samples"):
        open_token_stream(tmp_path, StreamOptions(seq_length=8, pack_sequences=True, eos_id=EOS))
    tokens = np.full(200_000, 7, np.uint16)
    tokens[131_313] = EOS  # one is enough, wherever it is
    np.save(tmp_path / "a.npy", tokens)
    assert open_token_stream(tmp_path, StreamOptions(seq_length=8, pack_sequences=True, eos_id=EOS))


@pytest.mark.parametrize(("dtype", "value"), [("uint16", 50), ("uint32", 2**31), ("int64", 2**32 + 5), ("int32", -7)])
def test_a_token_outside_the_vocabulary_is_an_error_that_names_file_and_position(
    dtype: str, value: int, tmp_path: Path
) -> None:
    write_stream(tmp_path, [40, 40], dtype=dtype)
    tokens = np.load(tmp_path / "shard_00001.npy")
    tokens[21] = value
    np.save(tmp_path / "shard_00001.npy", tokens)
    stream = open_token_stream(tmp_path, StreamOptions(seq_length=8, vocab_size=50))
    sentence = f"shard_00001.npy: the token at position 21 is {value}, not in 0..49; use the tokenizer that made"
    for read in (lambda: stream.window(6), lambda: stream[6], lambda: stream.gather([0, 6])):
        with pytest.raises(ShardFileError, match=sentence):
            read()
    assert stream[4].input_ids.tolist() == tokens[:9].tolist()  # the others are read
    report = validate(tmp_path, stream=StreamOptions(seq_length=8, vocab_size=50))
    assert [str(finding) for finding in report.findings] == [
        f"{tmp_path / 'shard_00001.npy'}: the token at position 21 is {value}, not in 0..49"
    ]


def test_an_id_that_32_bits_cannot_hold_is_an_error_without_a_vocabulary(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 2**32 + 5, 4], np.int64))
    stream = open_token_stream(tmp_path, StreamOptions(seq_length=3))
    for read in (lambda: stream.window(0), lambda: stream.gather([0])):
        with pytest.raises(ShardFileError, match="the token at position 2 is 4294967301"):
            read()


def test_a_file_that_was_cut_or_removed_before_it_is_mapped_is_one_sentence(tmp_path: Path) -> None:
    write_stream(tmp_path, [40_000, 40_000])
    stream = open_token_stream(tmp_path, StreamOptions(seq_length=8))
    os.truncate(tmp_path / "shard_00000.npy", 5000)
    with pytest.raises(ShardChangedError, match=r"has 5,000 bytes instead of the 80,128 when it was opened"):
        stream.window(0)
    os.remove(tmp_path / "shard_00001.npy")
    with pytest.raises(ShardFileError, match=r"shard_00001.npy is missing, but existed when its stream"):
        stream.window(5000)


def test_a_mapped_file_that_is_removed_or_replaced_is_read_on(tmp_path: Path) -> None:
    [tokens] = write_stream(tmp_path, [400])
    stream = open_token_stream(tmp_path, StreamOptions(seq_length=8))
    stream.window(0)
    path = tmp_path / "shard_00000.npy"
    np.save(tmp_path / "other.npy", np.zeros(10, np.uint16))
    os.replace(tmp_path / "other.npy", path)
    assert stream.window(3).tolist() == tokens[24:33].tolist()
    path.unlink()
    assert stream.window(3).tolist() == tokens[24:33].tolist()
    stream.files[0].unmap()
    with pytest.raises(ShardFileError, match="is missing"):
        stream.window(3)


def test_the_fingerprint_tells_names_sizes_dtypes_windows_and_content(tmp_path: Path) -> None:
    def fingerprint(**options: Any) -> str:
        return open_token_stream(tmp_path, StreamOptions(**{"seq_length": 8, **options})).fingerprint

    write_stream(tmp_path, [4000, 4000])
    seen = {fingerprint(), fingerprint(seq_length=9), fingerprint(overlap=False)}
    seen |= {fingerprint(pack_sequences=True, eos_id=3), fingerprint(pack_sequences=True, eos_id=4)}
    assert len(seen) == 5
    assert fingerprint(eos_id=3, vocab_size=50) == fingerprint()  # what changes no window does not count
    before = fingerprint()
    os.rename(tmp_path / "shard_00001.npy", tmp_path / "shard_00002.npy")
    assert fingerprint() not in seen
    os.rename(tmp_path / "shard_00002.npy", tmp_path / "shard_00001.npy")
    assert fingerprint() == before
    tokens = np.load(tmp_path / "shard_00001.npy")
    np.save(tmp_path / "shard_00001.npy", tokens[::-1].copy())
    assert fingerprint() != before
    np.save(tmp_path / "shard_00001.npy", tokens[:-1])
    assert fingerprint() not in {*seen, before}


def test_thousands_of_files_are_opened_without_mapping_one_and_without_holding_descriptors(tmp_path: Path) -> None:
    write_stream(tmp_path, [100])
    for number in range(1, 3000):
        os.link(tmp_path / "shard_00000.npy", tmp_path / f"shard_{number:05d}.npy")
    stream = open_token_stream(tmp_path, StreamOptions(seq_length=8))
    assert len(stream) == 3000 * 12
    assert all(file._arrays is None for file in stream.files)
    stream.gather(list(range(0, 36_000, 12)))
    assert open_files(tmp_path) == []
    assert sum(file._arrays is not None for file in stream.files) <= 1024


def test_streams_are_recognised_and_packed_data_is_never_taken_for_one(tmp_path: Path) -> None:
    def storage_at(path: Path) -> str | None:
        storage = storage_of(path)
        return None if storage is None else storage.name

    write_stream(tmp_path / "npy", [20])
    write_stream(tmp_path / "bin", [20], suffix=".bin")
    for path in (tmp_path / "npy", tmp_path / "bin", tmp_path / "npy" / "shard_00000.npy"):
        assert storage_at(path) == "token_stream"
    write_shard(tmp_path / "shards" / "one", make_bins(4, 24, seed=3), 24)
    assert storage_at(tmp_path / "shards") is None
    assert storage_at(tmp_path / "shards" / "one") == "memmap_v1"
    write_store(tmp_path / "store", [make_sequences(5)])
    assert storage_at(tmp_path / "store") != "token_stream"
    with create_shard_writer("legacy", tmp_path / "pickles" / "a.npy", num_bins=1, pack_size=4) as writer:
        writer.write_bin(0, [1, 2], [1, 0], [0])
        writer.finalize()
    assert storage_at(tmp_path / "pickles") is None
    assert storage_at(tmp_path / "pickles" / "a.npy") == "legacy"
    write_stream(tmp_path / "dataset", [20])
    (tmp_path / "dataset" / "dataset.json").write_text("{}")
    assert storage_at(tmp_path / "dataset") is None
    write_stream(tmp_path / "indexed", [20], suffix=".bin")
    (tmp_path / "indexed" / "shard_00000.idx").write_bytes(b"MMIDIDX")
    assert storage_at(tmp_path / "indexed") is None
    (tmp_path / "model").mkdir()
    torch.save({"weight": torch.zeros(3)}, tmp_path / "model" / "pytorch_model.bin")
    assert storage_at(tmp_path / "model") is None
    write_stream(tmp_path / "cache" / "train", [20], suffix=".bin")
    with pytest.raises(InvalidInputError, match="cache holds token streams in directories of their own, such as train"):
        create_sft_dataset(tmp_path / "cache", EOS)


def test_it_is_a_storage_to_read_from_and_not_to_write_to(tmp_path: Path) -> None:
    assert "token_stream" in storage_names()
    write_stream(tmp_path / "tokens", [5000])
    shard = open_shard(tmp_path / "tokens")
    assert (len(shard), shard.pack_size) == (2, 2049)
    convert(tmp_path / "tokens", tmp_path / "packed", to="memmap_v1")
    [packed] = [path for path in (tmp_path / "packed").iterdir() if path.is_dir()] or [tmp_path / "packed"]
    copied = open_shard(packed)
    for one, other in zip(shard, copied, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.loss_mask.tolist() == other.loss_mask.tolist()
    with pytest.raises(InvalidInputError, match="storage 'token_stream' is read-only; choose another one to write"):
        create_shard_writer("token_stream", tmp_path / "new", num_bins=1, pack_size=4)


def test_a_stream_survives_pickling_without_its_maps(tmp_path: Path) -> None:
    write_stream(tmp_path, [40, 40])
    stream = open_token_stream(tmp_path, StreamOptions(seq_length=8))
    stream.window(0)
    again = pickle.loads(pickle.dumps(stream))
    assert again.files[0]._arrays is None
    assert again.window(7).tolist() == stream.window(7).tolist()
    assert again.fingerprint == stream.fingerprint


def test_validate_prints_lines_that_train_on_the_stream(tmp_path: Path) -> None:
    files = write_stream(tmp_path, [400, 300])
    options = StreamOptions(seq_length=16, eos_id=EOS, vocab_size=50)
    report = validate(tmp_path, stream=options)
    assert report.ok
    assert (report.num_tokens, report.num_bins, report.num_shards) == (700, 24 + 18, 1)
    num_inputs = 24 * 16, 18 * 16
    num_eos = sum(int((tokens[:count] == EOS).sum()) for tokens, count in zip(files, num_inputs, strict=True))
    assert report.num_loss_tokens == sum(num_inputs) - num_eos
    notes = "\n".join(report.notes)
    assert f"train: packed-sft train data.path={tmp_path} data.sequence_length=16 data.pack_sequences=true" in notes
    assert "data.eos_id=2 model.vocab_size=50" in notes
    [call] = [note for note in report.notes if note.startswith("python: ")]
    assert (
        call
        == f"python: create_sft_dataset({str(tmp_path)!r}, 2, seq_length=16, stream=StreamOptions(pack_sequences=True))"
    )
    dataset = eval(
        call.removeprefix("python: "), {"create_sft_dataset": create_sft_dataset, "StreamOptions": StreamOptions}
    )
    assert len(dataset) == report.num_bins
    json.dumps(report.to_json())


@pytest.mark.parametrize("name", ["tokens", "a folder", "it's, {odd}=1"])
def test_the_printed_lines_are_taken_by_a_shell_the_recipe_and_python(name: str, tmp_path: Path) -> None:
    home = tmp_path / name
    write_stream(home, [41, 30], suffix=".bin")
    options = StreamOptions(seq_length=8, eos_id=EOS, vocab_size=50, file_pattern="shard_*.bin", spelling="flag")
    notes = validate(home, stream=options).notes
    [line] = [note.removeprefix("train: packed-sft ") for note in notes if note.startswith("train: ")]
    script = f"{shlex.quote(sys.executable)} -m megatron_packed_sft {line} --cfg job"
    done = subprocess.run(script, shell=True, capture_output=True, text=True, check=True)
    settings = yaml.safe_load(done.stdout)
    assert settings["data"]["path"] == str(home)
    assert settings["data"]["file_pattern"] == "shard_*.bin"
    assert (settings["data"]["dtype"], settings["data"]["pack_sequences"]) == ("uint16", True)
    assert (settings["data"]["eos_id"], settings["model"]["vocab_size"]) == (EOS, 50)
    [call] = [note.removeprefix("python: ") for note in notes if note.startswith("python: ")]
    assert len(eval(call, {"create_sft_dataset": create_sft_dataset, "StreamOptions": StreamOptions})) == 5 + 3


def test_validate_says_what_nobody_knows(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full(300, 7, np.uint16))
    notes = "\n".join(validate(tmp_path).notes)
    assert "the largest id is 7; the size of the vocabulary is unknown: pass --vocab-size or --tokenizer" in notes
    assert "the EOS id is unknown" in notes
    assert "data.sequence_length=299 model.vocab_size=8" in notes
    report = validate(tmp_path, stream=StreamOptions(eos_id=EOS))
    assert report.ok
    assert "the EOS id 2 does not occur, so documents cannot be told apart" in "\n".join(report.notes)
    assert "pack_sequences=true" not in "\n".join(report.notes)
    assert "largest" not in "\n".join(validate(tmp_path, level="structure").notes)


def test_validate_finds_what_opening_refuses(tmp_path: Path) -> None:
    write_stream(tmp_path, [20, 20])
    os.truncate(tmp_path / "shard_00001.npy", 150)
    report = validate(tmp_path)
    assert not report.ok
    assert "shard_00001.npy has 150 bytes instead of the 168 in its header" in str(report.findings[0])


def test_opening_a_stream_imports_neither_torch_nor_numba(tmp_path: Path) -> None:
    write_stream(tmp_path, [400])
    script = (
        "import sys; from megatron_packed_sft import open_token_stream, StreamOptions; "
        f"open_token_stream({str(tmp_path)!r}, StreamOptions(seq_length=8)).window(3); "
        "print([name for name in ('torch', 'numba') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
