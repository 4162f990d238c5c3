"""Batches of the `hf` contract in models of transformers: packed is one by one, or it is refused."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed_sft import PackedBin, PackedLoader, create_sft_dataset, require_separate_sequences
from megatron_packed_sft.data.batch import model_helpers
from megatron_packed_sft.data.datasets import PackedDataset
from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError
from tests.dataset_options import grouped
from tests.packed_bins import write_shard

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what else transformers would like to be installed
    import transformers
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

# Of torch's own parts about each other, while it compiles flex attention.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

VOCAB_SIZE = 64
PACK_SIZE = 48
EOS = 2
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
GPT2_SHAPE = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "loss_type": None}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": EOS}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=16),
    "mistral, window of 6": transformers.MistralConfig(**SHAPE, sliding_window=6),
    "gemma3, window of 6": transformers.Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=6),
    "gpt2": transformers.GPT2Config(**GPT2_SHAPE, **NO_DROPOUT),
}
ON_CPU = [
    *itertools.product(CONFIGS, ["sdpa", "eager"]),
    # Compiled for each model; on a CPU flex attention has no backward pass, and says so.
    ("llama", "flex_attention"),
    ("mistral, window of 6", "flex_attention"),
]


def model_of(name: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention, dtype=dtype)
    for parameter in model.parameters():  # as small as they come, no sequence has much to say to another
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small steps: threads that wait for each other only cost."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bins of a few sequences, of one token up; the first quarter of each is the prompt."""
    rng = np.random.default_rng(0)
    bins = []
    for _ in range(6):
        ids, mask, starts = [], [], []
        for length in (int(rng.integers(8, 20)), 1, int(rng.integers(2, 14)), int(rng.integers(2, 12))):
            starts.append(sum(map(len, ids)))
            ids.append(rng.integers(3, VOCAB_SIZE, length))
            mask.append(np.append(np.arange(1, length) >= length // 4, False))
        bins.append(PackedBin(np.concatenate(ids), np.concatenate(mask).astype(np.uint8), np.array(starts)))
    path = tmp_path_factory.mktemp("data") / "shard"
    write_shard(path, bins, PACK_SIZE, pad_id=EOS, vocab_size=VOCAB_SIZE)
    return path


def opened(shard: Path, **arguments: Any) -> PackedDataset:
    return create_sft_dataset(shard, EOS, PACK_SIZE, **grouped(contract="hf", **arguments))


def one_by_one(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The loss per trained token over the sequences of a batch, each of them in a forward pass of its own."""
    losses, num_trained = [], 0
    for start, end in itertools.pairwise(batch["cu_seq_lens_q"].tolist()):
        labels = batch["labels"][:, start:end]
        assert int(labels[0, 0]) == -100  # nothing predicts it but the sequence before
        if (labels != -100).any():
            count = int((labels != -100).sum())
            losses.append(model(input_ids=batch["input_ids"][:, start:end], labels=labels).loss * count)
            num_trained += count
    assert len(losses) > 3
    return torch.stack(losses).sum() / num_trained


def as_one_text(model: Any, batch: dict[str, Any]) -> float:
    """What the batch gave before it said that there is no cache."""
    leaking = model(**{key: value for key, value in batch.items() if key != "use_cache"}).loss
    assert isinstance(leaking, torch.Tensor)
    return leaking.item()


@pytest.mark.parametrize("is_training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(("name", "attention"), ON_CPU, ids=str)
def test_the_loss_of_a_batch_is_that_of_its_sequences_one_by_one(
    name: str, attention: str, is_training: bool, shard: Path
) -> None:
    model = model_of(name, attention).train(is_training)
    batch = opened(shard, pad_seq_length_to_mult=16).fetch_batch([0, 1])  # two bins, and padding behind them
    assert batch["input_ids"].shape[0] == 1
    assert batch["cu_seq_lens_q"].tolist()[-2] < batch["input_ids"].shape[1]
    with torch.no_grad():
        packed = model(**batch).loss.item()
        assert packed == pytest.approx(one_by_one(model, batch).item(), rel=1e-5)
        assert abs(as_one_text(model, batch) - packed) > 1e-3  # the comparison can tell


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral, window of 6"])
def test_the_gradients_of_a_batch_are_those_of_its_sequences_one_by_one(name: str, attention: str, shard: Path) -> None:
    model = model_of(name, attention, torch.float64).train()
    batch = opened(shard).fetch_batch([2, 3, 4])
    model(**batch).loss.backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    one_by_one(model, batch).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(packed[name], parameter.grad, rtol=1e-5, atol=1e-8), name


def test_gradient_checkpointing_changes_nothing(shard: Path) -> None:
    model, batch = model_of("llama").train(), opened(shard).fetch_batch([0])
    plain = model(**batch).loss.item()
    model.gradient_checkpointing_enable()
    loss = model(**batch).loss
    loss.backward()
    assert loss.item() == pytest.approx(plain, rel=1e-6)


def trainer_of(model: Any, dataset: PackedDataset, output: Path, **settings: Any) -> Trainer:
    """transformers' own trainer, which removes unused columns, draws the samples and averages."""
    # Older ones leave the model's cache on, as use_cache does here.
    arguments = TrainingArguments(
        output_dir=str(output), use_cpu=True, use_cache=True, report_to=[], disable_tqdm=True, **settings
    )
    return Trainer(
        model=model, args=arguments, train_dataset=dataset, eval_dataset=dataset, data_collator=dataset.collate_fn
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_a_trainer_evaluates_and_predicts_as_one_by_one(attention: str, shard: Path, tmp_path: Path) -> None:
    model, dataset = model_of("llama", attention), opened(shard)
    trainer = trainer_of(model, dataset, tmp_path, per_device_eval_batch_size=len(dataset))
    batch = dataset.fetch_batch(range(len(dataset)))
    with torch.no_grad():
        expected = one_by_one(model.eval(), batch).item()
        assert abs(as_one_text(model, batch) - expected) > 1e-3
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    predicted = trainer.predict(dataset)  # gathers the logits, too
    assert predicted.metrics["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert predicted.predictions.shape == (*batch["input_ids"].shape, VOCAB_SIZE)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "gradient checkpointing"])
def test_a_trainer_takes_the_step_that_the_sequences_one_by_one_would_take(
    checkpointing: bool, shard: Path, tmp_path: Path
) -> None:
    dataset, settings = opened(shard), {"learning_rate": 0.1, "max_grad_norm": 0.0, "optim": "sgd"}
    model, reference = model_of("llama"), model_of("llama").train()
    trainer = trainer_of(
        model,
        dataset,
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        lr_scheduler_type="constant",
        gradient_checkpointing=checkpointing,
        **settings,
    )
    trainer.train()
    loss = one_by_one(reference, dataset.fetch_batch(range(6)))  # one step takes all bins, in whatever order
    loss.backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    for trained, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(trained, expected, rtol=1e-4, atol=1e-6)


def test_a_plain_loop_over_a_loader_needs_no_other_argument(shard: Path) -> None:
    model = model_of("qwen2")
    for batch in PackedLoader(opened(shard), micro_batch_size=2, shuffle=True):
        with torch.no_grad():
            assert model(**batch).loss.item() == pytest.approx(one_by_one(model, batch).item(), rel=1e-5)


@pytest.mark.parametrize(("name", "attention"), ON_CPU[:-2], ids=str)
def test_a_model_that_keeps_sequences_apart_passes_and_stays_as_it_was(name: str, attention: str) -> None:
    model = model_of(name, attention).train()
    model.get_input_embeddings().eval()
    random_state = torch.get_rng_state()
    require_separate_sequences(model)
    assert [not module.training for module in model.modules()].count(True) == 1
    assert torch.equal(torch.get_rng_state(), random_state)
    require_separate_sequences(model.to(torch.bfloat16))


LEAKING = {
    "opt": transformers.OPTConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=64,
    ),
    "bloom": transformers.BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4),
    "mamba": transformers.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, state_size=8),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAKING)
def test_a_model_that_lets_sequences_see_each_other_is_refused(name: str) -> None:
    model = AutoModelForCausalLM.from_config(LEAKING[name])
    sentence = rf"{type(model).__name__} with .* lets packed sequences see each other: its logits are .* off"
    with pytest.raises(InvalidInputError, match=sentence):
        require_separate_sequences(model)


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="Linear has no token embeddings"):
        require_separate_sequences(torch.nn.Linear(2, 2))


def test_a_transformers_that_cannot_keep_sequences_apart_is_refused(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tuple(int(number) for number in transformers.__version__.split(".")[:2])
    assert installed >= model_helpers.OLDEST[:2]
    monkeypatch.setattr(model_helpers, "OLDEST", (99, 0, 0))
    model_helpers.refuse_old_transformers.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"see each other; install 99\.0\.0 or later"):
        opened(shard).fetch_batch([0])
    monkeypatch.undo()
    opened(shard).fetch_batch([0])
