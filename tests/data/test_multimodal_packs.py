"""Static packs of images and text (seed 003), with the real processor and model of LLaVA-NeXT, made small here."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_packed_sft import create_sft_dataset
from megatron_packed_sft.data.static_packs import StaticPackDataset
from tests.dataset_options import grouped
from tests.train.launch import ROOT, environment

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what else transformers would like to be installed
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        LlavaNextProcessor,
        PreTrainedTokenizerFast,
    )
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

TILE, PATCH = 16, 4
GRIDS = [[16, 16], [16, 32], [32, 16], [32, 32]]
SPECIAL = ["<pad>", "</s>", "[INST]", "[/INST]", "<image>"]
QUESTIONS = ["what is in this picture?", "which colour is it?", "is that a cat or a dog?"]
ANSWERS = ["a red square on a blue ground", "red", "neither of them, it is a square"]
PACK = 192
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@cache
def processor() -> Any:
    """A tokenizer trained on a few lines, and an image processor that cuts a picture into tiles of 16 x 16."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*QUESTIONS, *ANSWERS] * 5, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": TILE}, crop_size={"height": TILE, "width": TILE}, image_grid_pinpoints=GRIDS
    )
    return LlavaNextProcessor(
        image_processor=images,
        tokenizer=fast,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


class PictureChats:
    """Questions about pictures of many sizes, which take as many positions as their tiles; every fifth is text only."""

    fingerprint = "picture chats 1"

    def __init__(self, count: int = 24) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        has_picture = index % 5 != 0
        question, answer = QUESTIONS[index % 3], ANSWERS[(index + 1) % 3]
        prompt, text = f"[INST]{question} {'<image>' if has_picture else ''}[/INST]", f"{answer}</s>"
        pixels = rng.integers(0, 255, (*rng.integers(8, 60, 2), 3), dtype=np.uint8)
        encoded = processor()(
            text=[prompt + text], images=[Image.fromarray(pixels)] if has_picture else None, return_tensors="pt"
        )
        ids = encoded.pop("input_ids")[0]
        num_answer = len(processor().tokenizer(text)["input_ids"])
        labels = torch.full_like(ids, -100)
        labels[-num_answer:] = ids[-num_answer:]
        media = {name: value for name, value in encoded.items() if name in ("pixel_values", "image_sizes")}
        return {"input_ids": ids, "labels": labels, "attention_mask": encoded["attention_mask"][0], **media}


def opened(**arguments: Any) -> StaticPackDataset:
    dataset = create_sft_dataset(
        PictureChats(), processor().tokenizer, PACK, **grouped(packing_mode="static", contract="hf", **arguments)
    )
    assert isinstance(dataset, StaticPackDataset)
    return dataset


def plan_of(dataset: StaticPackDataset) -> list[Any]:
    aligned = dataset.static_plan.aligned
    bins = [aligned.plan.bin(number).tolist() for number in aligned.bins.tolist()]
    return [aligned.plan.item_lengths.tolist(), bins, aligned.fingerprint]


def test_multimodal_samples_have_deterministic_planning_lengths_that_are_the_encoded_ones() -> None:
    """GIVEN images under the active template, a planned length is that of the encoded ids, and packs are kept by it."""
    dataset, samples = opened(), PictureChats()
    lengths = dataset.static_plan.aligned.plan.item_lengths.tolist()
    assert lengths == [len(samples[index]["input_ids"]) for index in range(len(samples))]
    assert len(set(lengths)) > 10  # the size of a picture decides
    assert plan_of(opened()) == plan_of(dataset)
    for index in range(len(dataset)):
        pack = dataset[index]
        assert sum(len(sample["input_ids"]) for sample in pack) <= PACK
        boundaries = dataset.fetch_batch([index])["cu_seq_lens_q"].tolist()
        assert [end - start for start, end in itertools.pairwise(boundaries)] == [len(s["input_ids"]) for s in pack]


def test_the_multimodal_plan_is_identical_over_ranks_and_runs(tmp_path: Path) -> None:
    script = (
        "import json, os; from tests.data.test_multimodal_packs import opened, plan_of; "
        f"print(json.dumps(plan_of(opened(world_size=2, length_cache={str(tmp_path / 'lengths')!r}))))"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    ranks = [
        subprocess.Popen(command, env={**environment(), "RANK": str(rank)}, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=200)[0] for rank in ranks]
    again = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True).stdout
    assert json.loads(printed[0]) == json.loads(printed[1]) == json.loads(again) == plan_of(opened(world_size=2))


def test_fields_of_images_pass_through_in_the_order_of_the_samples() -> None:
    dataset = opened()
    batch = dataset.fetch_batch([0, 1])
    samples = [sample for index in (0, 1) for sample in dataset[index]]
    assert len(batch["pixel_values"]) == len(batch["image_sizes"]) == len(samples)
    for value, sample in zip(batch["pixel_values"], samples, strict=True):
        assert value is None if "pixel_values" not in sample else torch.equal(value, sample["pixel_values"])
    assert None in batch["pixel_values"]


def model_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as LLaVA-NeXT takes it: all pictures in one tensor, with as many tiles as the largest has."""
    pictures = [one for one in batch["pixel_values"] if one is not None]
    num_tiles = max(one.shape[1] for one in pictures)
    padded = [torch.nn.functional.pad(one, (0,) * 7 + (num_tiles - one.shape[1],)) for one in pictures]
    sizes = torch.cat([one for one in batch["image_sizes"] if one is not None])
    return {**batch, "pixel_values": torch.cat(padded), "image_sizes": sizes}


def test_a_vision_language_model_sees_in_a_pack_what_it_sees_in_each_sample_alone() -> None:
    tokenizer = processor().tokenizer
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=TILE,
        patch_size=PATCH,
    )
    torch.manual_seed(0)
    model = LlavaNextForConditionalGeneration(
        LlavaNextConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            image_grid_pinpoints=GRIDS,
            vision_feature_layer=-1,
        )
    ).eval()
    for parameter in model.parameters():  # as small as they come, no sample has much to say to another
        torch.nn.init.normal_(parameter, std=0.2)
    dataset = opened()
    with torch.no_grad():
        packed = model(**model_inputs(dataset.fetch_batch([0]))).logits[0]
        alone = []
        for sample in dataset[0]:
            media = {name: value for name, value in sample.items() if name in ("pixel_values", "image_sizes")}
            alone.append(model(input_ids=sample["input_ids"][None], use_cache=False, **media).logits[0])
    assert len(alone) > 1
    assert torch.allclose(packed, torch.cat(alone), atol=1e-5)
    assert packed.std() > 0.1
