"""A pretrained model on a bin of real chats: what a leak costs, and that there is none."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packed_sft import create_sft_dataset, require_separate_sequences
from tests.prepare.preparing import prepare
from tests.real_data import DATA, IS_WHOLE, model_file

CHATS = DATA / "gsm8k_test.messages.jsonl"


@pytest.mark.skipif(not IS_WHOLE or not CHATS.exists(), reason="make test-real runs a real model")
def test_a_real_model_has_the_loss_of_the_chats_one_by_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = model_file()
    AutoTokenizer.from_pretrained(found.parent, gguf_file=found.name).save_pretrained(tmp_path / "tokenizer")
    settings = [f"tokenizer.path={tmp_path}/tokenizer", "packing.pack_size=768"]
    done = prepare(f"input={CHATS}", f"output={tmp_path}/data", *settings)
    assert done.code == 0, done.err
    model: Any = AutoModelForCausalLM.from_pretrained(found.parent, gguf_file=found.name, dtype=torch.float32).eval()
    require_separate_sequences(model)
    batch = create_sft_dataset(tmp_path / "data", contract="hf").fetch_batch([0])
    total, num_trained = 0.0, 0
    with torch.no_grad():
        packed = model(**batch).loss.item()
        as_one_text = model(**{**batch, "use_cache": True}).loss.item()
        for start, end in itertools.pairwise(batch["cu_seq_lens_q"].tolist()):
            labels = batch["labels"][:, start:end]
            if count := int((labels != -100).sum()):
                total += model(input_ids=batch["input_ids"][:, start:end], labels=labels).loss.item() * count
                num_trained += count
    assert packed == pytest.approx(total / num_trained, rel=1e-4)
    assert 1 < packed < 2.5  # it knows what it reads
    assert as_one_text > packed + 0.5
