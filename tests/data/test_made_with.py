"""What may be trained on together: one tokenizer and one template, or a sentence that says why not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft import (
    DatasetWriter,
    PackedBin,
    TokenPartWriter,
    convert,
    create_sft_dataset,
    pack,
    publish_store,
)
from megatron_packed_sft.data.datasets import GPTSFTPackedMultiShardDataset
from megatron_packed_sft.data.options import OpenOptions
from megatron_packed_sft.errors import InvalidInputError
from tests.packed_bins import make_bins, write_shard

EOS = 2
PACK_SIZE = 16
BLENDED = pytest.mark.parametrize("weights", [None, [0.5, 0.5]], ids=["list", "blend"])


def write_data(path: Path, largest_id: int = 90, **provenance: Any) -> Path:
    """A dataset directory of four bins, and the largest id in one of them."""
    bins = [*make_bins(3, PACK_SIZE, vocab_size=90), PackedBin(np.array([5, largest_id]), np.array([1, 0]), [0])]
    with DatasetWriter(path) as dataset:
        options = {"num_bins": 4, "pack_size": PACK_SIZE, "pad_id": EOS, **provenance}
        with dataset.shard_writer("train", 0, **options) as writer:
            for number, one in enumerate(bins):
                writer.write_bin(number, *one)
            writer.finalize()
        dataset.finalize()
    return path


def made_with(tokenizer: str | None, template: str | None = None, vocab_size: int = 100) -> dict[str, Any]:
    recorded = {"tokenizer": {"name": tokenizer, "fingerprint": f"{tokenizer}_print"}} if tokenizer else {}
    return {**recorded, "chat_template_fingerprint": template, "vocab_size": vocab_size}


def bare_file(path: Path, largest_id: int) -> Path:
    """A legacy file, which records nothing."""
    write_data(path.with_name(f"{path.name}_data"), largest_id, vocab_size=largest_id + 1)
    convert(path.with_name(f"{path.name}_data") / "train" / "shard_000000", path, to="legacy")
    return path


@BLENDED
def test_different_tokenizers_are_refused_with_the_override_named(weights: list[float] | None, tmp_path: Path) -> None:
    gpt2 = write_data(tmp_path / "code", **made_with("gpt2"))
    qwen3 = write_data(tmp_path / "chat", 151_644, **made_with("qwen3", vocab_size=151_645))
    sentence = (
        r"chat, 1 memmap_v1 shard was made with another tokenizer, 'qwen3' \(qwen3_print\), than .*code, .* 'gpt2' "
        r"\(gpt2_print\), so the same ids mean other texts; .* or set allow_tokenizer_mismatch=True if"
    )
    with pytest.raises(InvalidInputError, match=sentence):
        create_sft_dataset([gpt2, qwen3], EOS, weights=weights)
    assert (
        len(create_sft_dataset([gpt2, qwen3], EOS, weights=weights, opening=OpenOptions(allow_tokenizer_mismatch=True)))
        == 8
    )
    with pytest.raises(InvalidInputError, match="another tokenizer"):  # not what this one allows
        create_sft_dataset([gpt2, qwen3], EOS, weights=weights, opening=OpenOptions(allow_template_mismatch=True))


@BLENDED
def test_different_templates_are_refused_with_the_override_named(weights: list[float] | None, tmp_path: Path) -> None:
    old = write_data(tmp_path / "old", **made_with("gpt2", "aaaa"))
    new = write_data(tmp_path / "new", **made_with("gpt2", "bbbb"))
    text = write_data(tmp_path / "text", **made_with("gpt2"))  # documents have no template
    with pytest.raises(InvalidInputError, match=r"another chat template \(bbbb\) than .* allow_template_mismatch=True"):
        create_sft_dataset([old, new], EOS, weights=weights)
    assert (
        len(create_sft_dataset([old, new], EOS, weights=weights, opening=OpenOptions(allow_template_mismatch=True)))
        == 8
    )
    assert len(create_sft_dataset([old, text], EOS, weights=weights)) == 8


@BLENDED
def test_the_same_tokenizer_and_template_go_together_without_a_word(
    weights: list[float] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [write_data(tmp_path / name, **made_with("gpt2", "aaaa")) for name in ("one", "two")]
    with caplog.at_level(logging.WARNING):
        assert len(create_sft_dataset(paths, EOS, weights=weights)) == 8
    assert caplog.messages == []


def test_shards_of_one_storage_are_compared_like_datasets(tmp_path: Path) -> None:
    for name in ("gpt2", "qwen3"):
        write_shard(tmp_path / name, make_bins(2, PACK_SIZE), PACK_SIZE, **made_with(name, name, 1000))
    paths = [tmp_path / "gpt2", tmp_path / "qwen3"]
    for opened in (create_sft_dataset, GPTSFTPackedMultiShardDataset):
        with pytest.raises(InvalidInputError, match=r"qwen3 was made with another tokenizer.*allow_tokenizer_mismatch"):
            opened(paths, EOS)
        with pytest.raises(InvalidInputError, match=r"another chat template.*allow_template_mismatch=True"):
            opened(paths, EOS, opening=OpenOptions(allow_tokenizer_mismatch=True))
        accepted = OpenOptions(allow_tokenizer_mismatch=True, allow_template_mismatch=True)
        assert len(opened(paths, EOS, opening=accepted)) == 4
    with pytest.raises(InvalidInputError, match="another tokenizer"):
        create_sft_dataset(tmp_path, EOS)  # the folder of both


@BLENDED
def test_ids_of_data_that_records_nothing_are_compared_with_the_vocabulary_of_the_rest(
    weights: list[float] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = write_data(tmp_path / "known", **made_with("gpt2", vocab_size=100))
    sentence = r"large.npy records no tokenizer and has the id 150, but .*known.* 'gpt2' .* ends at 99; .* or set"
    with pytest.raises(InvalidInputError, match=sentence):
        create_sft_dataset([known, bare_file(tmp_path / "large.npy", 150)], EOS, weights=weights)
    small = bare_file(tmp_path / "small.npy", 99)
    assert len(create_sft_dataset([small, known], EOS, weights=weights)) == 8
    [message] = caplog.messages
    assert "small.npy records no tokenizer; the ids found are below its 100; make sure that it was that of" in message
    caplog.clear()
    unsized = write_data(tmp_path / "unsized", **{**made_with("gpt2"), "vocab_size": None})
    assert len(create_sft_dataset([unsized, small], EOS, weights=weights)) == 8
    assert "the ids could not be checked either" in caplog.text
    # A recorded vocabulary may be a model's, which is larger than its tokenizer's: only ids count.
    padded = write_data(tmp_path / "padded", 99, **made_with(None, vocab_size=128))
    assert len(create_sft_dataset([known, padded], EOS, weights=weights)) == 8


def test_data_that_records_nothing_at_all_is_announced_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [bare_file(tmp_path / "one.npy", 99), bare_file(tmp_path / "two.npy", 99)]
    assert len(create_sft_dataset(paths, EOS)) == 8
    [message] = caplog.messages
    assert "one.npy and 1 more record no tokenizer, so it cannot be checked" in message
    caplog.clear()
    assert len(create_sft_dataset(paths[0], EOS)) == 4
    assert caplog.messages == []


class Words:
    """A tokenizer as Hugging Face has them: vocab_size leaves out added tokens, and ids may have gaps."""

    eos_token_id = EOS
    vocab_size = 80

    def __init__(self, num_tokens: int, largest_id: int) -> None:
        self.num_tokens, self.largest_id = num_tokens, largest_id

    def __len__(self) -> int:
        return self.num_tokens

    def get_vocab(self) -> dict[str, int]:
        return {"a": 5, "b": self.largest_id}


def test_a_tokenizer_with_too_small_a_vocabulary_is_refused(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", 99, **made_with("gpt2", vocab_size=100))
    bare = bare_file(tmp_path / "bare.npy", 99)
    for path in (data, bare, [data, bare]):
        with pytest.raises(
            InvalidInputError, match=r"has the id 99, but the vocabulary of this tokenizer \(Words\) ends at 94"
        ):
            create_sft_dataset(path, Words(95, 90))
        create_sft_dataset(path, Words(95, 90), opening=OpenOptions(allow_tokenizer_mismatch=True))
        create_sft_dataset(path, Words(100, 90))
        create_sft_dataset(path, Words(95, 99))


def test_every_part_of_a_list_is_compared_with_the_tokenizer(tmp_path: Path) -> None:
    class Tokenizer:
        eos_id, fingerprint = EOS, "another"

    known = write_data(tmp_path / "known", **made_with("gpt2"))
    with pytest.raises(
        InvalidInputError, match=r"known.* was made with tokenizer 'gpt2' \(gpt2_print\), not with this"
    ):
        create_sft_dataset([bare_file(tmp_path / "bare.npy", 99), known], Tokenizer())


def test_a_token_store_with_a_plan_knows_what_made_it(tmp_path: Path) -> None:
    with TokenPartWriter(tmp_path / "store" / "part_000000", **made_with("gpt2")) as writer:
        writer.append([5, 6, 99], train=[0, 1, 1])
        writer.finalize()
    store = publish_store(tmp_path / "store")
    plan = pack(store.lengths, pack_size=8)
    with pytest.raises(
        InvalidInputError, match=r"has the id 99, but the vocabulary of this tokenizer \(Words\) ends at 89"
    ):
        create_sft_dataset(tmp_path / "store", Words(90, 7), plan=plan)
