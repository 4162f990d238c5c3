"""A directory with what the pages assume: the files that the quickstart makes, and some that readers bring along."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import load_template, open_token_store, train_sentencepiece
from megatron_packed_sft.caches import SPECIAL_TOKENS
from megatron_packed_sft.cli.main import main as packed_sft
from megatron_packed_sft.records.samples import sample_conversations
from tests.docs.pages import ROOT
from tests.encode.tiny_tokenizers import byte_level_tokenizer, save_folder

EOS_ID = 2


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once; every page gets a copy."""
    folder = tmp_path_factory.mktemp("workshop")
    run("sample-data", folder / "chats", "--rows", "120", "--tokenizer", folder / "tokenizer.model")
    prepare = ("prepare", f"input={folder}/chats/*", f"tokenizer.path={folder}/tokenizer.model", "template=chatml")
    run(*prepare, f"output={folder}/my_dataset", "packing.pack_size=2048", "split.validation_fraction=0.05")
    run("convert", folder / "my_dataset/train/shard_000000", folder / "training_2048.npy", "--to", "legacy")
    (folder / "packed").mkdir()
    for number in range(2):
        shutil.copy(folder / "training_2048.npy", folder / f"packed/part_{number}.npy")
    for name in ("chats", "web"):
        shutil.copytree(folder / "my_dataset", folder / "packed" / name)
    save_flat_tokens(folder)
    save_model(folder / "Qwen3-0.6B")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    return folder


def save_flat_tokens(folder: Path) -> None:
    """A token stream, one of Megatron's indexed datasets, and a corpus with a tokenizer of seed 002."""
    store = open_token_store(folder / "my_dataset.work/tokens/train")
    ids = np.concatenate([np.append(part.arrays.ids, EOS_ID) for part in store.parts])
    (folder / "tokens").mkdir()
    np.save(folder / "tokens/shard_00000.npy", ids.astype(np.uint16))
    run(
        "convert", folder / "my_dataset/train", folder / "web_text_document", "--to", "megatron_indexed", "--drop-masks"
    )
    texts = [message["content"] for chat in sample_conversations(200) for message in chat.messages]
    (folder / "corpus.txt").write_text("".join(f"{text}\n" for text in texts))
    (folder / "tokenizer").mkdir()
    train_sentencepiece(texts, folder / "tokenizer/spm.model", user_defined_symbols=tuple(SPECIAL_TOKENS.values()))


def save_model(folder: Path) -> None:
    """A model of the real class with random weights, and a tokenizer with a chat template."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = byte_level_tokenizer(added=["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    config = {"chat_template": load_template("chatml").source, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    save_folder(tokenizer, folder, config)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    settings = AutoConfig.for_model("qwen3", **shape, **heads, vocab_size=tokenizer.get_vocab_size())
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder)


def run(*words: object) -> None:
    assert packed_sft([str(word) for word in words]) == 0
