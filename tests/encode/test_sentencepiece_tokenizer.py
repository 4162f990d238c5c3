"""SentencePiece models: made here, control symbols, positions and the way back to the text."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from megatron_packed_sft.encode.sequences import MarkedText
from megatron_packed_sft.encode.tokenizers.sentencepiece import SentencePieceTokenizer, train_sentencepiece
from megatron_packed_sft.errors import InvalidInputError
from tests.encode import tiny_tokenizers as tiny


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_sentencepiece(tiny.corpus(), tmp_path_factory.mktemp("models") / "plain.model", vocab_size=400)


@pytest.fixture(scope="session")
def llama_like_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a dummy prefix, as Llama 2 and Mistral have it."""
    return train_with(tmp_path_factory, "llama_like", normalization_rule_name="identity", byte_fallback=True)


@pytest.fixture(scope="session")
def t5_like_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It changes text before cutting it (NFKC, runs of space), and has no bytes to fall back on."""
    return train_with(
        tmp_path_factory,
        "t5_like",
        normalization_rule_name="nmt_nfkc",
        remove_extra_whitespaces=True,
        character_coverage=0.98,
    )


def train_with(tmp_path_factory: pytest.TempPathFactory, name: str, **options: object) -> Path:
    folder = tmp_path_factory.mktemp("models")
    lines = [line for text in tiny.corpus() for line in text.splitlines() if line.strip()]
    settings = {"remove_extra_whitespaces": False, "model_type": "bpe", "vocab_size": 400, "minloglevel": 2} | options
    with open(folder / f"{name}.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=file,
            user_defined_symbols=["<|im_start|>", "<|im_end|>", "</td>"],
            hard_vocab_limit=False,
            **settings,
        )
    return folder / f"{name}.model"


def marked(tokenizer: SentencePieceTokenizer) -> list[MarkedText]:
    return [
        MarkedText(text, [(len(text) // 4, len(text) // 2)] if len(text) > 3 else [])
        for text in tiny.nasty_texts(list(tokenizer.control_tokens))
    ]


@pytest.mark.parametrize("model", ["plain_model", "llama_like_model"])
def test_every_text_comes_back_as_it_was(model: str, request: pytest.FixtureRequest) -> None:
    tokenizer = SentencePieceTokenizer(request.getfixturevalue(model))
    for text in marked(tokenizer):
        assert tokenizer.decode(tokenizer.encode_many([text]).input_ids.tolist()) == text.text


@pytest.mark.parametrize("model", ["plain_model", "llama_like_model", "t5_like_model"])
def test_text_without_control_symbols_has_the_ids_of_the_library(model: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    tokenizer = SentencePieceTokenizer(path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text in tiny.corpus(100, seed=5):
        # Without a dummy prefix symbols change nothing; with one, this package puts it at the start of the text only.
        if model == "plain_model" or "<|im_end|>" not in text:
            assert tokenizer.encode_many([MarkedText(text)]).input_ids.tolist() == processor.encode(text)


def test_a_dummy_prefix_stands_at_the_start_only(llama_like_model: Path) -> None:
    tokenizer = SentencePieceTokenizer(llama_like_model)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(llama_like_model))
    ids = tokenizer.encode_many([MarkedText("fox<s>fox")]).input_ids.tolist()
    middle = ids.index(tokenizer.control_tokens["<s>"])
    assert ids[:middle] == processor.encode("fox")
    assert processor.id_to_piece(ids[0]).startswith("▁")
    assert "▁" not in "".join(processor.id_to_piece(ids[middle + 1 :]))


@pytest.mark.parametrize("model", ["plain_model", "llama_like_model", "t5_like_model"])
def test_masks_are_those_of_the_offsets_that_sentencepiece_reports(model: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    tokenizer = SentencePieceTokenizer(path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    texts = [text.replace("|>", "") for text in tiny.corpus(60, seed=6)]  # no symbol, so the library sees it whole
    for text in [*texts, "the Жж fox  ﬁ ½ Ж"]:
        begin, end = len(text) // 4, len(text) // 2
        found = tokenizer.encode_many([MarkedText(text, [(begin, end)] if begin < end else [])])
        reported = processor.encode(text, return_type="offset_mapping")
        pieces, offsets = reported["pieces"], reported["offsets"]
        # Where bytes spell one character, SentencePiece gives it to the last of them.
        for index in range(len(offsets) - 2, -1, -1):
            if pieces[index].startswith("<0x") and offsets[index][0] == offsets[index][1]:
                offsets[index] = offsets[index + 1]
        expected = [int(start < end and stop > begin and start < stop) for start, stop in offsets]
        assert found.train.tolist() == expected, text


def test_symbols_are_one_token_each_and_masks_follow_them(plain_model: Path) -> None:
    tokenizer = SentencePieceTokenizer(plain_model)
    text = "<|im_start|>the fox né<|im_end|>"
    begin = len("<|im_start|>")
    found = tokenizer.encode_many([MarkedText("日本"), MarkedText(text, [(begin, len(text))])])
    ids = found.input_ids[found.lengths[0] :].tolist()
    assert (ids[0], ids[-1]) == (tokenizer.control_tokens["<|im_start|>"], tokenizer.control_tokens["<|im_end|>"])
    assert found.train.tolist() == [0] * int(found.lengths[0]) + [0] + [1] * (len(ids) - 1)
    assert found.num_straddling == 0


@pytest.mark.parametrize("model", ["plain_model", "llama_like_model"])
def test_a_look_alike_in_a_literal_range_is_ordinary_text(model: str, request: pytest.FixtureRequest) -> None:
    tokenizer = SentencePieceTokenizer(request.getfixturevalue(model))
    message = " the <|im_end|> and <s></s> fox"
    text = f"<s>{message}<|im_end|>"
    ids = tokenizer.encode_many([MarkedText(text, literal=[(3, 3 + len(message))])]).input_ids.tolist()
    controls = set(tokenizer.control_tokens.values())
    assert [number for number in ids if number in controls] == [ids[0], ids[-1]]
    assert tokenizer.decode(ids) == text


def test_html_symbols_are_text_also_in_messages(llama_like_model: Path) -> None:
    tokenizer = SentencePieceTokenizer(llama_like_model)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(llama_like_model))
    assert "</td>" not in tokenizer.control_tokens
    text = "fox</td> <s>"
    ids = tokenizer.encode_many([MarkedText(text, literal=[(0, len(text))])]).input_ids.tolist()
    assert processor.piece_to_id("</td>") in ids


def test_ids_and_names_of_special_tokens_are_those_of_the_model(plain_model: Path, llama_like_model: Path) -> None:
    tokenizer = SentencePieceTokenizer(plain_model)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 3)
    assert tokenizer.template_variables == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    assert set(tokenizer.control_tokens) == {"<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"}
    assert tokenizer.chat_template is None
    assert tokenizer.name == "plain.model"
    processor = sentencepiece.SentencePieceProcessor(model_file=str(plain_model))
    assert tokenizer.vocab_size == processor.get_piece_size()
    assert SentencePieceTokenizer(llama_like_model).pad_id is None


def test_it_travels_to_other_processes(plain_model: Path) -> None:
    tokenizer = SentencePieceTokenizer(plain_model)
    packed = pickle.dumps(tokenizer)
    assert len(packed) < 1000
    again = pickle.loads(packed)
    texts = marked(tokenizer)
    for one, other in zip(again.encode_many(texts), tokenizer.encode_many(texts), strict=True):
        assert np.array_equal(one, other)


def test_it_refuses_to_travel_when_the_file_changed(tmp_path: Path) -> None:
    path = train_sentencepiece(tiny.corpus(50), tmp_path / "changing.model", vocab_size=350)
    packed = pickle.dumps(SentencePieceTokenizer(path))
    train_sentencepiece(tiny.corpus(50, seed=9), path, vocab_size=350)
    with pytest.raises(InvalidInputError, match="changed while it was in use"):
        pickle.loads(packed)


def test_training_gives_the_same_file_every_time_and_another_for_other_text(tmp_path: Path) -> None:
    one = train_sentencepiece(tiny.corpus(), tmp_path / "one.model", vocab_size=350).read_bytes()
    two = train_sentencepiece(iter(tiny.corpus()), tmp_path / "two.model", vocab_size=350).read_bytes()
    other = train_sentencepiece(tiny.corpus(seed=7), tmp_path / "other.model", vocab_size=350).read_bytes()
    assert one == two
    assert one != other
    assert (
        SentencePieceTokenizer(tmp_path / "one.model").fingerprint
        != SentencePieceTokenizer(tmp_path / "other.model").fingerprint
    )


def test_training_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="vocab_size is 100; use more than 262"):
        train_sentencepiece(tiny.corpus(), tmp_path / "small.model", vocab_size=100)
    with pytest.raises(InvalidInputError, match="the texts are blank"):
        train_sentencepiece(["", " \n"], tmp_path / "empty.model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x0a\xff", b"\x0a\x03\x0a\x01\xff"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.model"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"broken\.model is not a SentencePiece model"):
        SentencePieceTokenizer(path)
