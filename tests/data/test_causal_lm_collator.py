"""DataCollatorForCausalLM: the batch, and that a packed loss is the loss of the documents one by one."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megatron_packed_sft import DataCollatorForCausalLM, block_tokenize_fn, get_pos_ids_for_packed_sequence
from megatron_packed_sft.data.batch.collate import collate
from megatron_packed_sft.data.batch.contracts import CollateOptions
from megatron_packed_sft.data.batch.located_bins import locate_in_samples
from megatron_packed_sft.data.huggingface_collator import find_document_starts
from megatron_packed_sft.errors import InvalidInputError
from tests.data.test_block_tokenize import BOS, EOS, PAD, TOKENIZER, bare_tokenizer, batch_of, hf_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what else transformers would like to be installed
    import datasets
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Trainer, TrainingArguments

# Of torch's own parts about each other, while it compiles flex attention.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small steps: threads that wait for each other only cost."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def model_of(attention: str = "sdpa", config: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE) if config is None else config
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    for parameter in model.parameters():  # as small as they come, no document has much to say to another
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def blocks_of(lengths: list[int], **arguments: Any) -> list[dict[str, Any]]:
    arguments = {"max_length": 40, "packed": True, "packing_strategy": "best_fit"} | arguments
    columns = block_tokenize_fn(batch_of(lengths), TOKENIZER, **arguments)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


BLOCKS = blocks_of([5, 20, 3, 11, 1, 8, 17, 30, 2, 2, 14])


def documents_of(blocks: list[dict[str, Any]]) -> list[list[int]]:
    found = []
    for block in blocks:
        ids, starts = block["input_ids"].tolist(), block["document_starts"].tolist()
        found += [ids[start:end] for start, end in itertools.pairwise([*starts, len(ids)])]
    return found


def one_by_one(model: Any, documents: list[list[int]]) -> torch.Tensor:
    """The loss per trained token, each document in a forward pass of its own."""
    losses, num_trained = [], 0
    for document in documents:
        ids = torch.tensor([document])
        losses.append(model(input_ids=ids, labels=ids).loss * (len(document) - 1))
        num_trained += len(document) - 1
    return torch.stack(losses).sum() / num_trained


def test_a_batch_has_position_ids_doc_ids_and_labels_of_each_document() -> None:
    collator = DataCollatorForCausalLM(TOKENIZER, packed_sequences=True, padding="longest", max_length=16)
    batch = collator(
        [
            {"input_ids": [BOS, 5, EOS, BOS, 6, 7, EOS], "document_starts": [0, 3]},
            {"input_ids": [BOS, 8, 9, EOS], "document_starts": [0]},
        ]
    )
    assert batch["input_ids"].tolist() == [[BOS, 5, EOS, BOS, 6, 7, EOS], [BOS, 8, 9, EOS, PAD, PAD, PAD]]
    assert batch["labels"].tolist() == [[-100, 5, EOS, -100, 6, 7, EOS], [-100, 8, 9, EOS, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1, 2]]
    assert batch["doc_ids"].tolist() == [[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 7, 11, 14]
    assert batch["max_length_q"] == 4
    assert batch["use_cache"] is False
    assert "attention_mask" not in batch


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4),
    multiple=st.sampled_from([None, 1, 8]),
    padding=st.sampled_from(["longest", "max_length"]),
)
def test_padding_each_bin_is_flattening_bins_of_one_length(
    lengths: list[list[int]], multiple: int | None, padding: str
) -> None:
    rng = np.random.default_rng(0)
    samples = [
        {
            "input_ids": rng.integers(3, 60, sum(some)),
            "seq_boundaries": np.concatenate([[0], np.cumsum(some)]),
            "loss_mask": rng.integers(0, 2, sum(some)),
        }
        for some in lengths
    ]
    limits: dict[str, Any] = {"contract": "hf", "eos_id": PAD, "return_doc_ids": True}
    options = CollateOptions(
        max_seq_length=48,
        pad_to_max_length=padding == "max_length",
        pad_seq_length_to_mult=multiple,
        pad_each_bin=True,
        **limits,
    )
    batch = collate([locate_in_samples(samples)], len(samples), options)
    length = batch["input_ids"].shape[1]
    longest = max(map(sum, lengths))
    assert length == (48 if padding == "max_length" else -(-longest // (multiple or 1)) * (multiple or 1))
    alone = CollateOptions(max_seq_length=length, pad_to_max_length=True, **limits)
    boundaries = [0]
    for index, sample in enumerate(samples):
        expected = collate([locate_in_samples([sample])], 1, alone)
        for key in ("input_ids", "labels", "position_ids", "doc_ids"):
            assert torch.equal(batch[key][index : index + 1], expected[key]), key
        boundaries += (expected["cu_seq_lens_q"][1:] + index * length).tolist()
    assert batch["cu_seq_lens_q"].tolist() == boundaries


def test_padding_each_bin_is_for_the_hf_contract_only() -> None:
    with pytest.raises(InvalidInputError, match="the 'mcore' contract pads each bin anyway; leave pad_each_bin out"):
        CollateOptions(contract="mcore", eos_id=2, max_seq_length=8, pad_each_bin=True)


@pytest.mark.parametrize(
    ("attention", "mask"),
    [
        ("sdpa", None),
        ("eager", None),
        ("sdpa", "4d"),
        ("eager", "4d"),
        ("flex_attention", None),
        ("flex_attention", "flex"),
    ],
)
def test_the_packed_loss_is_the_loss_of_the_documents_one_by_one(attention: str, mask: str | None) -> None:
    model = model_of(attention)
    batch = DataCollatorForCausalLM(TOKENIZER, pad_to_multiple_of=8, attention_mask=mask)(BLOCKS)
    assert batch["input_ids"].shape[0] == len(BLOCKS) > 2
    assert (batch["input_ids"] == PAD).any()
    assert ("attention_mask" in batch) == (mask is not None)
    with torch.no_grad():
        packed = model(**batch).loss.item()
        assert packed == pytest.approx(one_by_one(model, documents_of(BLOCKS)).item(), rel=1e-5)
        together = model(input_ids=batch["input_ids"], labels=batch["labels"]).loss.item()
        assert abs(together - packed) > 1e-3  # the comparison can tell


@pytest.mark.parametrize("mask", [None, "4d"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_packed_gradients_are_those_of_the_documents_one_by_one(attention: str, mask: str | None) -> None:
    model = model_of(attention, dtype=torch.float64).train()
    collator = DataCollatorForCausalLM(TOKENIZER, attention_mask=mask, mask_dtype=torch.float64)
    model(**collator(BLOCKS)).loss.backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    one_by_one(model, documents_of(BLOCKS)).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(packed[name], parameter.grad, rtol=1e-5, atol=1e-8), name


def test_a_mask_works_in_half_precision() -> None:
    for attention in ("sdpa", "eager"):
        model = model_of(attention, dtype=torch.bfloat16)
        batch = DataCollatorForCausalLM(TOKENIZER, attention_mask="4d")(BLOCKS)
        with torch.no_grad():
            expected = one_by_one(model, documents_of(BLOCKS)).item()
            assert model(**batch).loss.item() == pytest.approx(expected, rel=0.02)


def test_a_mask_of_booleans_is_for_sdpa() -> None:
    model = model_of("sdpa")
    batch = DataCollatorForCausalLM(TOKENIZER, attention_mask="4d", mask_dtype=torch.bool)(BLOCKS)
    assert batch["attention_mask"].dtype == torch.bool
    with torch.no_grad():
        expected = one_by_one(model, documents_of(BLOCKS)).item()
        assert model(**batch).loss.item() == pytest.approx(expected, rel=1e-5)


def test_without_a_mask_a_sliding_window_is_kept_which_a_mask_overrides() -> None:
    model = model_of(config=MistralConfig(**SHAPE, sliding_window=4))
    plain, masked = (
        DataCollatorForCausalLM(TOKENIZER, attention_mask=attention_mask)(BLOCKS) for attention_mask in (None, "4d")
    )
    with torch.no_grad():
        expected = one_by_one(model, documents_of(BLOCKS)).item()
        assert model(**plain).loss.item() == pytest.approx(expected, rel=1e-5)
        assert abs(model(**masked).loss.item() - expected) > 1e-3


def test_overlaps_are_trained_once_and_seen_twice() -> None:
    lengths = [70, 5, 90, 12]
    for strategy in ("greedy", "best_fit"):
        blocks = blocks_of(lengths, stride=6, packing_strategy=strategy)
        batch = DataCollatorForCausalLM(TOKENIZER)(blocks)
        assert sum(len(block["input_ids"]) for block in blocks) > sum(lengths) + 2 * len(lengths)
        # Each document has BOS and EOS, and its first token is predicted by nothing.
        assert int((batch["labels"] != -100).sum()) == sum(length + 1 for length in lengths)


def test_labels_of_ones_own_say_what_is_trained() -> None:
    ids = [BOS, 5, 6, EOS, BOS, 7, EOS]
    labels = [BOS, -100, 6, EOS, BOS, -100, EOS]
    batch = DataCollatorForCausalLM(TOKENIZER)([{"input_ids": ids, "labels": labels, "document_starts": [0, 4]}])
    assert batch["labels"].tolist() == [[-100, -100, 6, EOS, -100, -100, EOS]]


@pytest.mark.parametrize("frame", [{"add_bos": False}, {"add_eos": False}, {}])
def test_without_document_starts_documents_are_found_by_bos_and_eos_and_that_is_said_once(
    frame: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    blocks = blocks_of([5, 20, 3, 11, 8], **frame)
    bare = [{"input_ids": block["input_ids"]} for block in blocks]
    collator = DataCollatorForCausalLM(TOKENIZER)
    for key, value in DataCollatorForCausalLM(TOKENIZER)(blocks).items():
        assert torch.equal(torch.as_tensor(collator(bare)[key]), torch.as_tensor(value)), key
    [said] = [record.message for record in caplog.records]
    assert said.startswith("blocks have no document_starts, so documents are found by BOS and EOS; keep that column")


def test_given_document_starts_win_over_special_tokens_inside_documents() -> None:
    block = {"input_ids": [BOS, 5, EOS, 6, EOS, BOS, 7], "document_starts": [0, 5]}
    batch = DataCollatorForCausalLM(TOKENIZER)([block])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1]]


def test_where_bos_is_eos_it_ends_documents_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = SimpleNamespace(bos_token_id=EOS, eos_token_id=EOS, pad_token_id=None)
    batch = DataCollatorForCausalLM(tokenizer)([{"input_ids": [5, 6, EOS, 7, EOS]}])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert "which are one token, taken for EOS" in caplog.text


@pytest.mark.parametrize(
    ("padding", "length"), [("longest", 6), (True, 6), ("max_length", 9), (False, None), ("do_not_pad", None)]
)
def test_padding_is_what_transformers_calls_so(padding: Any, length: int | None) -> None:
    collator = DataCollatorForCausalLM(TOKENIZER, padding=padding, max_length=9)
    blocks = [{"input_ids": [BOS, *[5] * n, EOS], "document_starts": [0]} for n in (4, 2)]
    if length is None:
        assert collator(blocks[:1])["input_ids"].shape == (1, 6)
        with pytest.raises(
            InvalidInputError, match="have 4 to 6 tokens, which padding='do_not_pad' cannot put together"
        ):
            collator(blocks)
    else:
        assert collator(blocks)["input_ids"].shape == (2, length)


def test_blocks_of_one_document_get_a_plain_mask_when_packing_is_off() -> None:
    collator = DataCollatorForCausalLM(TOKENIZER, packed_sequences=False)
    blocks = blocks_of([4, 9], packed=False)
    batch = collator(blocks)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["attention_mask"].sum(1).tolist() == [6, 11]
    with torch.no_grad():
        model = model_of()
        expected = one_by_one(model, documents_of(blocks)).item()
        assert model(**batch).loss.item() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(InvalidInputError, match="block 0 of the batch holds 2 documents, which packed_sequences=False"):
        collator([{"input_ids": [5, 6], "document_starts": [0, 1]}])


NO_IDS = SimpleNamespace(bos_token_id=None, eos_token_id=None, pad_token_id=0)
BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"padding": "shortest"}, "padding is 'shortest'; choose from longest, max_length, do_not_pad"),
    ({"padding": "max_length"}, "padding='max_length' needs to know the length; pass max_length"),
    ({"max_length": 0}, "max_length must be a positive integer, not 0"),
    ({"max_length": 10, "pad_to_multiple_of": 8}, "max_length 10 is not a multiple of pad_to_multiple_of 8"),
    ({"attention_mask": "bool"}, "attention_mask is 'bool'; choose from None, '4d', 'flex'"),
    ({"attention_mask": "4d", "packed_sequences": False}, "attention_mask='4d' needs packed_sequences=True"),
    ({"mask_dtype": torch.int64}, "mask_dtype is torch.int64; choose a floating-point type or torch.bool"),
    ({"tokenizer": object()}, "the tokenizer (object) has no padding and no EOS token to fill up a batch with"),
]
BAD_BLOCKS: list[tuple[dict[str, Any], str]] = [
    ({"ids": [5]}, "block 0 of the batch has no input_ids, but ids"),
    ({"input_ids": []}, "block 0 of the batch has no tokens"),
    ({"input_ids": [5] * 17}, "block 0 of the batch has 17 tokens, more than max_length 16"),
    ({"input_ids": [5, 6], "document_starts": [0, 2]}, "seq_boundaries of sample 0"),
    ({"input_ids": [5, 6], "document_starts": [0], "overlaps": [0, 1]}, "has 2 overlaps for 1 document_starts"),
    ({"input_ids": [5, 6], "labels": [5]}, "has 1 labels for 2 input_ids"),
    ({"input_ids": [5, 6], "labels": [6, -100]}, "the labels of block 0 of the batch are other ids than its input_ids"),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"), BAD_ARGUMENTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_bad_arguments_are_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(sentence)) as caught:
        DataCollatorForCausalLM(**({"tokenizer": TOKENIZER} | arguments))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("block", "sentence"), BAD_BLOCKS, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_blocks_are_one_sentence(block: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(sentence)) as caught:
        DataCollatorForCausalLM(TOKENIZER, max_length=16)([block])
    assert "\n" not in str(caught.value)


def test_without_anything_to_find_documents_by_a_block_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="has no document_starts, and the tokenizer has no BOS and no EOS"):
        DataCollatorForCausalLM(NO_IDS)([{"input_ids": [5]}])
    with pytest.raises(InvalidInputError, match="a batch of no blocks was asked for"):
        DataCollatorForCausalLM(TOKENIZER)([])


def test_a_dataloader_takes_the_collator_with_and_without_workers() -> None:
    texts = datasets.Dataset.from_dict(batch_of([5, 20, 3, 11, 1, 8, 17, 30, 2, 2, 14]))
    function = functools.partial(block_tokenize_fn, tokenizer=TOKENIZER, max_length=40, packed=True)
    packed = texts.map(function, batched=True, batch_size=1000, remove_columns=["text"])
    collator = DataCollatorForCausalLM(tokenizer=TOKENIZER, packed_sequences=True, padding="longest", max_length=40)
    alone, shared = (
        list(DataLoader(data, batch_size=2, collate_fn=collator, num_workers=num_workers))
        for data, num_workers in ((packed, 0), (packed.with_format("torch"), 2))
    )
    for one, other in zip(alone, shared, strict=True):
        assert torch.equal(one["labels"], other["labels"])
    flex = DataCollatorForCausalLM(TOKENIZER, attention_mask="flex")
    with pytest.raises(InvalidInputError, match="a BlockMask cannot leave a worker of a DataLoader; set num_workers=0"):
        next(iter(DataLoader(packed, batch_size=2, collate_fn=flex, num_workers=1)))


@pytest.mark.parametrize("keeps_columns", [True, False])
def test_a_trainer_evaluates_as_one_by_one(
    keeps_columns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    columns = {key: [block[key].tolist() for block in BLOCKS] for key in BLOCKS[0]}
    model = model_of()
    arguments = TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=not keeps_columns,
        per_device_eval_batch_size=len(BLOCKS),
        prediction_loss_only=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        eval_dataset=datasets.Dataset.from_dict(columns),
        data_collator=DataCollatorForCausalLM(TOKENIZER),
    )
    with torch.no_grad():
        expected = one_by_one(model.eval(), documents_of(BLOCKS)).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert ("blocks have no document_starts" in caplog.text) != keeps_columns


def test_a_trainer_takes_the_step_that_the_documents_one_by_one_would_take(tmp_path: Path) -> None:
    columns = {key: [block[key].tolist() for block in BLOCKS[:4]] for key in BLOCKS[0]}
    model, reference = model_of(), model_of().train()
    arguments = TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=1,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        optim="sgd",
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    data = datasets.Dataset.from_dict(columns)
    Trainer(model, arguments, train_dataset=data, data_collator=DataCollatorForCausalLM(TOKENIZER)).train()
    one_by_one(reference, documents_of(BLOCKS[:4])).backward()  # one step takes all blocks, in whatever order
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for trained, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(trained, expected, rtol=1e-4, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=4))
def test_position_ids_start_over_after_each_eos_for_a_whole_batch(ids: list[list[int]]) -> None:
    expected = []
    for one in ids:
        positions = [0]
        for token in one[:-1]:
            positions.append(0 if token == EOS else positions[-1] + 1)
        expected.append(positions)
    as_tensor = get_pos_ids_for_packed_sequence(torch.tensor(ids), EOS)
    assert as_tensor.tolist() == expected
    assert as_tensor.dtype == torch.int64
    assert get_pos_ids_for_packed_sequence(np.array(ids), EOS).tolist() == expected
    assert get_pos_ids_for_packed_sequence(torch.tensor(ids[0]), EOS).tolist() == expected[0]
    starts = find_document_starts(np.array(ids[0]), None, EOS)
    assert [index for index, position in enumerate(expected[0]) if position == 0] == starts.tolist()


def test_position_ids_of_what_is_no_batch_are_refused() -> None:
    assert get_pos_ids_for_packed_sequence(torch.zeros(2, 0, dtype=torch.int64), EOS).shape == (2, 0)
    with pytest.raises(InvalidInputError, match=r"must be a tensor or array \[batch, length\] or \[length\], not list"):
        get_pos_ids_for_packed_sequence([1, 2], EOS)  # type: ignore[type-var]
    with pytest.raises(InvalidInputError, match="eos_id must be a token id, not None"):
        get_pos_ids_for_packed_sequence(torch.zeros(2, 2), None)  # type: ignore[arg-type]


def test_a_bare_tokenizer_tells_its_ids_by_what_it_adds() -> None:
    batch = DataCollatorForCausalLM(bare_tokenizer())([{"input_ids": [BOS, 5, EOS, BOS, 6, EOS]}])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # of a Trainer without an accelerator
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    hf_tokenizer(model_max_length=4096).save_pretrained("my_tokenizer")
    model_of().save_pretrained("my_model")
    texts = batch_of(np.random.default_rng(0).integers(1, 60, 400).tolist())["text"]
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
    names: dict[str, Any] = {"input_ids": torch.tensor([[5, EOS, 6]])}
    for block in re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE):
        exec(block.replace("4096", "64"), names)
    assert names["trainer"].state.global_step == 2
    assert names["utilization"] > 90
    assert names["position_ids"].tolist() == [[0, 1, 0]]
