"""Real tokenizers, if they can be fetched: the ids of transformers, for texts and for chats, and the same masks."""

from __future__ import annotations

import gzip
import json
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft.encode.encoder import RecordEncoder
from megatron_packed_sft.encode.options import EncodeOptions
from megatron_packed_sft.encode.sequences import MarkedText
from megatron_packed_sft.encode.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer
from megatron_packed_sft.encode.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import Conversation
from tests.encode import tiny_tokenizers as tiny
from tests.real_data import DATA, IS_WHOLE, MORE_NAMES, NAMES, chat_files, sentencepiece_models, tokenizer_folder

# Which path each takes; those that are not here are refused, because their code is not run.
WITHOUT_FAST_PATH = {"claude", "command_r_plus", "llama2", "yi"}
REFUSED = ("baichuan2", "chatglm3", "internlm2")
NUM_TEXTS = 400


def lines_of(path: Path) -> list[str]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    if path.suffix == ".json":
        return [json.dumps(one, ensure_ascii=False) for one in json.loads(text)]
    return text.rstrip("\n").split("\n")


def real_texts(controls: list[str]) -> list[str]:
    """Records of every file as text, and their messages between control tokens."""
    texts = []
    for path in chat_files():
        for line in lines_of(path)[:: 1 if IS_WHOLE else 100]:
            texts.append(line)
            messages = json.loads(line).get("messages") or []
            texts += [f"{controls[0]}{one.get('role')}\n{one.get('content')}{controls[-1]}\n" for one in messages]
    return texts


@pytest.mark.parametrize("name", [*NAMES, *MORE_NAMES] if IS_WHOLE else NAMES[:1])
def test_ids_are_those_of_transformers_and_masks_do_not_depend_on_the_path(name: str) -> None:
    folder = tokenizer_folder(name)
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    fast, slow = HuggingFaceTokenizer(folder), HuggingFaceTokenizer(folder, fast=False)
    assert fast.fast_path == (None if name in WITHOUT_FAST_PATH else "gigatoken"), fast.fast_path_refusal
    controls = list(fast.control_tokens)
    given = tiny.nasty_texts(controls) + real_texts(controls)[:: 1 if not IS_WHOLE else 25]
    texts = [MarkedText(text, [(0, len(text) // 2)]) for text in given]
    one, other = fast.encode_many(texts), slow.encode_many(texts)
    assert all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))
    expected = oracle(given, add_special_tokens=False, verbose=False)["input_ids"]
    assert one.input_ids.tolist() == [number for ids in expected for number in ids]
    assert (fast.bos_id, fast.eos_id, fast.pad_id) == (oracle.bos_token_id, oracle.eos_token_id, oracle.pad_token_id)
    assert fast.vocab_size == 1 + max(oracle.get_vocab().values())


@pytest.mark.parametrize("name", [*NAMES, *MORE_NAMES] if IS_WHOLE else NAMES[:1])
def test_the_fast_path_gives_the_ids_of_the_tokenizers_library_on_all_real_chats(name: str) -> None:
    fast, slow = (HuggingFaceTokenizer(tokenizer_folder(name), fast=fast) for fast in (True, False))
    if fast.fast_path is None:
        pytest.skip(f"it has none: {fast.fast_path_refusal}")
    texts = [MarkedText(text, [(len(text) // 3, len(text))]) for text in real_texts(list(fast.control_tokens))]
    for first in range(0, len(texts), NUM_TEXTS):
        batch = texts[first : first + NUM_TEXTS]
        one, other = fast.encode_many(batch), slow.encode_many(batch)
        assert all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))


@pytest.mark.skipif(not IS_WHOLE, reason="takes minutes: every character of Unicode")
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "mistral_nemo", "deepseek_v3", "gpt2", "gemma3"])
def test_the_fast_path_knows_every_character(name: str) -> None:
    fast, slow = (HuggingFaceTokenizer(tokenizer_folder(name), fast=fast) for fast in (True, False))
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for first in range(0, len(codes), 10_000):
        few = [chr(code) for code in codes[first : first + 10_000]]
        texts = [MarkedText(f"a{one}b 1{one}2 {one}{one} '{one}s\n{one}\n A{one}B {one}a{one}1") for one in few]
        assert np.array_equal(fast.encode_many(texts).input_ids, slow.encode_many(texts).input_ids)


@pytest.mark.parametrize("name", REFUSED if IS_WHOLE else REFUSED[:1])
def test_a_class_whose_code_is_not_run_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"its tokenizer_class .* comes with code of its own"):
        HuggingFaceTokenizer(tokenizer_folder(name))


def test_sentencepiece_models_give_every_text_back() -> None:
    for path in sentencepiece_models():
        tokenizer = SentencePieceTokenizer(path)
        for text in tiny.nasty_texts(list(tokenizer.control_tokens)[:50]):
            assert tokenizer.decode(tokenizer.encode_many([MarkedText(text)]).input_ids.tolist()) == text


# Whole chats through real templates and tokenizers, with transformers as the judge.
CHAT_TOKENIZERS = ["qwen3", "qwen2_5", "llama3_1", "mistral_nemo", "gemma3"] if IS_WHOLE else ["qwen3"]
NUM_ROWS = None if IS_WHOLE else 25


@cache
def chats() -> list[dict[str, Any]]:
    return [record for path in sorted(DATA.glob("*.messages.jsonl*")) for record in islice(rows_of(path), NUM_ROWS)]


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from map(json.loads, file)


def normal(text: str) -> str:
    """Qwen's tokenizer composes accents, so a decoded text may differ from what was written in that alone."""
    return unicodedata.normalize("NFC", text)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no chats in {DATA}")
@pytest.mark.parametrize("name", CHAT_TOKENIZERS)
def test_ids_are_those_of_apply_chat_template_and_trained_text_is_the_answers(name: str) -> None:
    path = tokenizer_folder(name)
    transformers = pytest.importorskip("transformers")
    judge = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    # Some of the chats speak of control tokens; the judge would take those for control tokens.
    encoder = RecordEncoder(load_tokenizer(path), None, EncodeOptions(special_tokens_in_content="allow"))
    records = [Conversation(record["messages"], record.get("tools")) for record in chats()]
    encoded = encoder.encode_records(records)
    found = encoded.sequences
    refused = {record: reason for record, reason, _ in encoded.dropped}
    starts = dict(zip(found.record.tolist(), zip(found.ends - found.lengths, found.ends, strict=True), strict=True))
    for number, record in enumerate(records):
        try:
            expected = judge.apply_chat_template(
                list(record.messages), tools=record.tools, tokenize=True, return_dict=False
            )
        except Exception:
            assert refused.get(number, "template_error") == "template_error"  # or another form of it renders
            continue
        if refused.get(number) == "lost_text":  # the template leaves a call out
            continue
        start, end = starts[number]
        ids, train = encoded.sequences.input_ids[start:end], encoded.sequences.train[start:end] == 1
        assert ids.tolist() == expected
        trained = normal(encoder.tokenizer.decode(ids[train].tolist()))
        answers = [message for message in record.messages if message["role"] == "assistant"]
        position = 0
        for message in answers:  # every answer, in order, with an end of turn behind it
            position = trained.index(normal(message.get("content") or "").strip(), position)
        mark = encoder.marker().ends[0]
        assert trained.count(mark) == len(answers)
        assert trained.endswith(mark)
        assert all(message["content"] not in trained for message in record.messages if message["role"] == "system")
    assert len(starts) + len(refused) == len(records)
    assert len(starts) >= len(records) // 3
