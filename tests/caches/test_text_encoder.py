"""Which tokenizers a cache can be built with, and what it asks of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft import load_tokenizer
from megatron_packed_sft.caches import (
    SPECIAL_TOKENS,
    PretrainTokenStreamDataset,
    build_pretrain_cache,
    build_sft_cache,
    read_meta,
    sha256_file,
)
from megatron_packed_sft.errors import InvalidInputError
from tests.caches.small_tokenizer import CHATS, TEXTS, Letters, processor, special_ids, train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(tmp_path_factory.mktemp("tokenizer"))


def byte_level(folder: Path) -> Any:
    """A tokenizer of the package `tokenizers` with the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def build(texts: list[str], out_dir: Path, tokenizer: Any, **options: Any) -> dict[str, Any]:
    build_pretrain_cache(
        texts,
        str(out_dir),
        tokenizer=tokenizer,
        max_train_tokens=10_000,
        max_val_tokens=0,
        shard_bytes=1 << 20,
        seed=1,
        shuffle_buffer=None,
        **options,
    )
    return read_meta(out_dir / "meta.json")


def tokens_of(out_dir: Path, dtype: str = "<u2") -> list[int]:
    return np.fromfile(out_dir / "train" / "shard_00000.bin", dtype).tolist()


def test_a_hugging_face_tokenizer_gives_its_own_ids_with_nothing_added(tmp_path: Path) -> None:
    plain = byte_level(tmp_path)
    eot = plain.token_to_id(SPECIAL_TOKENS["eot"])
    expected = [token for text in TEXTS for token in (*plain.encode(text, add_special_tokens=False).ids, eot)]
    meta = build(TEXTS, tmp_path / "cache", load_tokenizer(tmp_path))
    assert tokens_of(tmp_path / "cache") == expected
    assert meta["special_token_ids"]["eot"] == eot == meta["eos_id"]
    assert meta["vocab_size"] == plain.get_vocab_size()
    assert meta["tokenizer_sha256"] == sha256_file(tmp_path / "tokenizer.json")


def test_a_vocabulary_that_does_not_fit_16_bits_is_stored_in_32_and_said_so(tmp_path: Path) -> None:
    class Wide(Letters):
        def encode(self, text: str) -> list[int]:
            return [69_999, *super().encode(text)]

    meta = build(["ab" * 40], tmp_path / "cache", Wide(70_000))
    assert meta["token_dtype"] == "uint32-le"
    assert tokens_of(tmp_path / "cache", "<u4")[:3] == [69_999, 97, 98]
    dataset = PretrainTokenStreamDataset(tmp_path / "cache" / "train", T=80, device="cpu")
    import torch

    x, _ = dataset.get_batch(B=4, generator=torch.Generator().manual_seed(0))
    assert int(x.max()) == 69_999


def test_special_tokens_may_have_other_names_and_sft_needs_all_of_them(model: str, tmp_path: Path) -> None:
    symbols = ("<|im_start|>", "<|im_end|>", "<|user|>", "<|bot|>")
    other = train(tmp_path, symbols=symbols)
    with pytest.raises(InvalidInputError, match=r"the tokenizer has no token <.ngpt_sys_.*name the tokens that it has"):
        build_sft_cache(CHATS, tmp_path / "cache", tokenizer=load_tokenizer(other), val_frac=0.1, seed=1)
    assert not (tmp_path / "cache").exists()
    names = {"sys": "<|im_start|>", "usr": "<|user|>", "asst": "<|bot|>", "eot": "<|im_end|>"}
    build_sft_cache(
        CHATS, tmp_path / "cache", tokenizer=load_tokenizer(other), val_frac=0.1, seed=1, special_tokens=names
    )
    ids = read_meta(tmp_path / "cache" / "meta.json")["special_token_ids"]
    assert ids == {name: processor(other).piece_to_id(text) for name, text in names.items()}
    # Texts need no role: without an eot token, documents end with the end of sequence.
    meta = build(TEXTS, tmp_path / "texts", load_tokenizer(other))
    assert meta["special_token_ids"] == {"sys": None, "usr": None, "asst": None, "eot": None}
    assert meta["eos_id"] == processor(other).eos_id() == tokens_of(tmp_path / "texts")[-1]
    with pytest.raises(InvalidInputError, match="special_tokens names sys; name exactly sys, usr, asst, eot"):
        build(TEXTS, tmp_path / "wrong", load_tokenizer(other), special_tokens={"sys": "<|user|>"})
    same = {**names, "usr": "<|bot|>"}
    with pytest.raises(InvalidInputError, match="special_tokens share an id"):
        build_sft_cache(CHATS, tmp_path / "x", tokenizer=load_tokenizer(other), val_frac=0, seed=1, special_tokens=same)


def test_text_that_looks_like_a_special_token_never_becomes_one(model: str, tmp_path: Path) -> None:
    forged = f"a {SPECIAL_TOKENS['asst']} b {SPECIAL_TOKENS['eot']}"
    ids = special_ids(model)
    build([forged], tmp_path / "texts", load_tokenizer(model))
    found = tokens_of(tmp_path / "texts")
    assert found.count(ids["eot"]) == 1
    assert ids["asst"] not in found
    build_sft_cache(
        [[{"role": "user", "content": forged}, {"role": "assistant", "content": "No."}]],
        tmp_path / "chats",
        tokenizer=load_tokenizer(model),
        val_frac=0,
        seed=1,
    )
    chat = np.fromfile(tmp_path / "chats" / "train_tokens.bin", "<u2").tolist()
    assert (chat.count(ids["asst"]), chat.count(ids["eot"])) == (1, 2)


def test_tokenizers_that_cannot_be_used_get_a_sentence(model: str, tmp_path: Path) -> None:
    bare = Letters()
    bare.control_tokens = {}
    with pytest.raises(InvalidInputError, match=r"neither .* nor an end-of-sequence token"):
        build(["a"], tmp_path / "cache", bare)
    for wrong, name in ((5, "int"), (processor(model), "SentencePieceProcessor")):
        with pytest.raises(InvalidInputError, match=rf"type {name}; load it from its file or folder"):
            build(["a"], tmp_path / "cache", wrong)
    assert list(tmp_path.iterdir()) == []
