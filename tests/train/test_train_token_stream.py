"""Training on token streams: keys of the recipe, a blend with packed chats, stopped and resumed, and bad input."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed_sft import create_sft_dataset
from megatron_packed_sft.errors import InvalidInputError, ShardFileError
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from megatron_packed_sft.train.app import main
from megatron_packed_sft.train.config import DataConfig, ParallelConfig, TrainConfig, ValidationConfig
from megatron_packed_sft.train.data import open_data, training_loader
from megatron_packed_sft.train.metrics import read_metrics
from tests.train.counting_chats import PACK_SIZE, VOCAB_SIZE, write_dataset
from tests.train.launch import run_in_turn

EOS = 2


def write_counting_stream(home: Path, num_files: int = 2, length: int = 40 * PACK_SIZE) -> Path:
    """Documents that count upwards from some number, each with an EOS behind it: easy to learn."""
    home.mkdir(parents=True)
    rng = np.random.default_rng(5)
    for number in range(num_files):
        tokens: list[int] = []
        while len(tokens) < length:
            first = int(rng.integers(4, VOCAB_SIZE - 20))
            tokens += [*range(first, first + int(rng.integers(5, 18))), EOS]
        np.save(home / f"shard_{number:05d}.npy", np.array(tokens[:length], np.uint16))
    return home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("streams")
    write_counting_stream(home / "tokens")
    write_dataset(home / "chats", 40)
    return home


def config_of(path: Any, **settings: Any) -> TrainConfig:
    config = TrainConfig(data=DataConfig(path=path, **settings))
    config.model.vocab_size = VOCAB_SIZE
    return config


def test_a_blend_of_a_stream_and_chats_is_trained_stopped_and_resumed_bit_for_bit(home: Path) -> None:
    def arguments(name: str, *more: str) -> list[str]:
        return [
            f"data.path=[{home / 'tokens'},{home / 'chats'}]",
            "data.weights=[0.75,0.25]",
            f"data.sequence_length={PACK_SIZE}",
            "data.pack_sequences=true",
            f"data.eos_id={EOS}",
            f"output={home / name}",
            "train.steps=12",
            "train.global_batch_size=4",
            "checkpoint.every=6",
            f"model.vocab_size={VOCAB_SIZE}",
            "optimizer.learning_rate=2e-3",
            *more,
        ]

    checkpoint = home / "straight" / "checkpoints" / "step_000006"
    printed = run_in_turn(2, [arguments("straight"), arguments("resumed", f"resume={checkpoint}")])
    straight = read_metrics(home / "straight" / "metrics.jsonl")
    resumed = read_metrics(home / "resumed" / "metrics.jsonl")
    assert straight[-1]["loss"] < 0.8 * straight[0]["loss"]
    assert [record["loss"] for record in resumed] == [record["loss"] for record in straight[6:]]
    assert f"token stream {home / 'tokens'}, 2 files" in printed


@pytest.mark.parametrize("packs", [False, True])
def test_the_recipe_trains_on_the_batches_of_the_dataset(packs: bool, home: Path) -> None:
    config = config_of(str(home / "tokens"), sequence_length=PACK_SIZE, pack_sequences=packs, eos_id=EOS, shuffle=False)
    data = open_data(config)
    assert (data.sequence_length, data.vocab_size) == (PACK_SIZE, VOCAB_SIZE)
    dataset = create_sft_dataset(home / "tokens", EOS, PACK_SIZE, stream=StreamOptions(pack_sequences=packs))
    batches = itertools.islice(training_loader(data, config, global_batch_size=1), 20)
    for index, batch in enumerate(batches):
        assert torch.equal(batch["tokens"], dataset.fetch_batch([index])["tokens"])
        assert torch.equal(batch["cu_seqlens_q"], dataset.fetch_batch([index])["cu_seqlens_q"])


def test_streams_may_be_validated_on_beside_packed_data(home: Path) -> None:
    config = config_of(str(home / "chats"), sequence_length=PACK_SIZE)
    config.validation = ValidationConfig(paths={"text": str(home / "tokens")})
    assert sorted(open_data(config).validation) == ["text", "validation"]
    config = config_of(str(home / "tokens"), sequence_length=PACK_SIZE, pack_sequences=True, eos_id=EOS)
    config.validation = ValidationConfig(paths={"chats": str(home / "chats"), "text": str(home / "tokens")})
    assert sorted(open_data(config).validation) == ["chats", "text"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sequence_length": None}, "is a token stream, which needs data.sequence_length, the length of its windows"),
        ({"pack_sequences": True}, "data.pack_sequences separates the documents of .* pass a tokenizer or data.eos_id"),
        ({"pack_sequences": True, "eos_id": 3}, "data.pack_sequences is on, but the EOS id 3 is not among"),
        ({"file_pattern": "*.bin"}, "has no file that matches '.*.bin'; check the pattern"),
        ({"dtype": "uint32"}, "data.dtype is 'uint32', but the header of .* says uint16; leave it out"),
        ({"dtype": "float"}, "data.dtype is 'float', which is not an integer dtype"),
        ({"sequence_length": 10**6}, "the longest has .*; lower data.sequence_length to at most"),
        ({"path": "chats", "pack_sequences": True}, "data.pack_sequences is True, but .* is not a token stream"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_in_the_words_of_the_recipe(
    settings: dict[str, Any], sentence: str, home: Path
) -> None:
    path = settings.pop("path", "tokens")
    with pytest.raises(InvalidInputError, match=sentence):
        open_data(config_of(str(home / path), **{"sequence_length": PACK_SIZE, **settings}))


def test_context_parallel_ranks_cannot_share_windows(home: Path) -> None:
    config = config_of(str(home / "tokens"), sequence_length=PACK_SIZE)
    config.parallel = ParallelConfig(context=2)
    with pytest.raises(InvalidInputError, match=r"the windows of a token stream are not; set parallel.context=1"):
        open_data(config)


def test_a_token_outside_the_models_vocabulary_ends_the_run_and_names_file_and_position(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = np.load(home / "tokens" / "shard_00000.npy")
    tokens[PACK_SIZE + 7] = VOCAB_SIZE
    np.save(tmp_path / "a.npy", tokens)
    config = config_of(str(tmp_path), sequence_length=PACK_SIZE, shuffle=False)
    batches = iter(training_loader(open_data(config), config, global_batch_size=1))
    next(batches)
    with pytest.raises(ShardFileError, match=rf"a.npy: the token at position {PACK_SIZE + 7:,} is {VOCAB_SIZE}, not"):
        next(batches)


def test_the_words_of_the_seed_lead_to_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    for given, key in (("dataset_path=x", "data.path"), ("tokenizer_path=x", "data.tokenizer")):
        assert main([given]) != 0
        assert key in capsys.readouterr().err
