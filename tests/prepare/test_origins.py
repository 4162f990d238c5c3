"""Where sequences came from: the work directory knows the file and line of each, and is believed only if it fits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_packed_sft import load_tokenizer
from megatron_packed_sft.inspect.tokens_of_bin import TokenDecoder, tokens_of_bin
from megatron_packed_sft.prepare.origins import PreparedFrom
from megatron_packed_sft.storage.dataset_directory import DatasetDirectory, open_dataset
from tests.prepare.preparing import chat, prepare, write_records


@pytest.fixture
def dataset(tmp_path: Path, tokenizer_path: str) -> DatasetDirectory:
    """Two sources whose chats name their own line, some of them dropped."""
    records = {
        name: [chat(f"{name} {line}", "word " * (400 if line % 10 == 0 else line)) for line in range(1, 31)]
        for name in ("first", "second")
    }
    for name, some in records.items():
        write_records(tmp_path / f"{name}.jsonl", [*some, {"nonsense": 1}])
    done = prepare(
        *(f"+sources.{name}.path={tmp_path / name}.jsonl" for name in records),
        f"output={tmp_path / 'out'}",
        f"tokenizer.path={tokenizer_path}",
        "template=chatml",
        "packing.pack_size=256",
        "split.validation_fraction=0.2",
        "executor.num_workers=1",
        "max_drop_share=1",
        "max_errors=100",
    )
    assert done.code == 0, done.err
    return open_dataset(tmp_path / "out")


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_sequence_is_found_in_its_file_and_line(
    dataset: DatasetDirectory, split: str, tokenizer_path: str
) -> None:
    found = PreparedFrom.of(dataset)
    assert found is not None
    assert found.tokenizer_path == tokenizer_path
    origins = found.origins(split)
    assert origins is not None
    decoder = TokenDecoder(load_tokenizer(tokenizer_path))
    [shard] = dataset.open_shards(split)
    num_sequences = 0
    for number in range(len(shard)):
        for tokens, origin in zip(tokens_of_bin(shard[number], decoder), origins.of_bin(number), strict=True):
            assert origin is not None
            text = "".join(token.text for token in tokens)
            assert f"user\n{Path(origin.file).stem} {origin.line}<|im_end|>" in text
            num_sequences += 1
    assert num_sequences == dataset.figures[split].num_sequences


def test_drops_of_both_stages_name_their_records(dataset: DatasetDirectory, tmp_path: Path) -> None:
    found = PreparedFrom.of(dataset)
    assert found is not None
    examples = found.drop_examples()
    assert {"bad_row", "longer_than_pack"} <= examples.keys()
    assert all(f"{tmp_path}" in one and ", line 31:" in one for one in examples["bad_row"])
    assert any(", line 10: " in one and "at most 256 fit into a bin" in one for one in examples["longer_than_pack"])


def test_a_work_directory_of_another_dataset_is_not_believed(dataset: DatasetDirectory, tmp_path: Path) -> None:
    assert PreparedFrom.of(dataset, tmp_path / "elsewhere") is None
    shutil.copytree(tmp_path / "out.work", tmp_path / "moved.work")
    moved = PreparedFrom.of(dataset, tmp_path / "moved.work")
    assert moved is not None
    assert moved.origins("train") is not None
    (tmp_path / "moved.work" / "plans" / "train.npz").unlink()
    assert moved.origins("train") is None
    for receipt in (tmp_path / "moved.work" / "published").iterdir():
        receipt.write_bytes(receipt.read_bytes().replace(b"published", b"publishex"))
    assert PreparedFrom.of(dataset, tmp_path / "moved.work") is None
