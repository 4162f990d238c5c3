"""Folders whose `tokenizer_class` transformers builds anew: its ids, or a refusal."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from megatron_packed_sft.encode.sequences import MarkedText
from megatron_packed_sft.encode.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed_sft.encode.tokenizers.huggingface_folder import read_tokenizer_folder
from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError
from tests.encode import tiny_tokenizers as tiny

transformers = pytest.importorskip("transformers")
REBUILT = (
    "GPT2Tokenizer",
    "Qwen2Tokenizer",
    "CohereTokenizer",
    "GemmaTokenizer",
    "LlamaTokenizer",
    "CodeLlamaTokenizer",
)
OTHERS = ("GPTNeoXTokenizer", "PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend", "NoSuchTokenizer")


def folder_of(
    made: Tokenizer, folder: Path, tokenizer_class: str | None, model_type: str | None = None, **config: Any
) -> Path:
    tiny.save_folder(made, folder, {"tokenizer_class": tokenizer_class, "eos_token": made.id_to_token(3), **config})
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def assert_ids_of_transformers(folder: Path) -> HuggingFaceTokenizer:
    oracle = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    tokenizer = HuggingFaceTokenizer(folder)
    texts = [*tiny.nasty_texts(list(tokenizer.control_tokens)), "<mask> <pad><s> </s><unk><CLS>", " fox", "12 345"]
    expected = oracle(texts, add_special_tokens=False, verbose=False)["input_ids"]
    for one in (tokenizer, HuggingFaceTokenizer(folder, fast=False), pickle.loads(pickle.dumps(tokenizer))):
        encoded = one.encode_many([MarkedText(text) for text in texts])
        found = np.split(encoded.input_ids, np.cumsum(encoded.lengths)[:-1])
        for text, ids, wanted in zip(texts, found, expected, strict=True):
            assert ids.tolist() == wanted, text
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert tokenizer.template_variables.get(name) == getattr(oracle, name), name
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (
        oracle.bos_token_id,
        oracle.eos_token_id,
        oracle.pad_token_id,
    )
    return tokenizer


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize("name", [*REBUILT, *OTHERS])
def test_a_file_that_is_not_what_its_class_builds_gets_the_ids_of_transformers(
    kind: str, name: str, tmp_path: Path
) -> None:
    if kind == "byte_level" and name in ("GemmaTokenizer", "CodeLlamaTokenizer"):
        pytest.skip("transformers loads it, but cannot encode with it: there is no <unk>")
    made = tiny.byte_level_tokenizer() if kind == "byte_level" else tiny.metaspace_tokenizer()
    folder = folder_of(made, tmp_path / "one", name)
    assert_ids_of_transformers(folder)
    assert_ids_of_transformers(folder_of(made, tmp_path / "fast", f"{name}Fast", pad_token="<pad>"))


@pytest.mark.parametrize("model_type", ["qwen2", "llama", "mistral", "gpt2", "phi3", "no_such_model"])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "GPT2Tokenizer", "LlamaTokenizerFast", None])
def test_the_model_beside_the_tokenizer_counts(model_type: str, name: str | None, tmp_path: Path) -> None:
    folder = folder_of(tiny.byte_level_tokenizer(), tmp_path / "model", name, model_type)
    try:
        transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception:
        with pytest.raises(InvalidInputError, match="transformers cannot load"):
            HuggingFaceTokenizer(folder)
    else:
        assert_ids_of_transformers(folder)


@pytest.mark.parametrize("config", [{"tokenizer_class": "PreTrainedTokenizerFast"}, {"tokenizer_class": None}])
def test_a_generic_class_is_read_without_transformers(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tiny.byte_level_tokenizer(), tmp_path / "generic", **config, eos_token="<|im_end|>")
    assert_ids_of_transformers(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert read_tokenizer_folder(folder).reason is None


@pytest.mark.parametrize("model_type", [None, "qwen2"])
def test_another_class_and_a_model_beside_it_need_transformers(
    model_type: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "GPT2Tokenizer" if model_type is None else "PreTrainedTokenizerFast"
    folder = folder_of(tiny.byte_level_tokenizer(), tmp_path / "built", name, model_type)
    reason = "builds its tokenizer_class GPT2Tokenizer in its own way" if model_type is None else "its model_type qwen2"
    assert reason in str(read_tokenizer_folder(folder).reason)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=f"{reason}, so reading .* needs transformers; install it with"):
        HuggingFaceTokenizer(folder)


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer", "GemmaTokenizer"])
def test_a_file_that_is_what_its_class_builds_needs_transformers_once_on_a_machine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny.metaspace_tokenizer() if name == "GemmaTokenizer" else tiny.byte_level_tokenizer()
    first = folder_of(made, tmp_path / "first", name)
    transformers.AutoTokenizer.from_pretrained(str(first), local_files_only=True).save_pretrained(str(tmp_path / "one"))
    tokenizer = assert_ids_of_transformers(tmp_path / "one")
    expected = read_tokenizer_folder(tmp_path / "one")
    assert expected.document == json.loads((tmp_path / "one" / "tokenizer.json").read_text())
    assert len(pickle.dumps(tokenizer)) < 2000
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert read_tokenizer_folder(tmp_path / "one") == expected
    with monkeypatch.context() as patch:
        patch.setattr("megatron_packed_sft.encode.tokenizers.huggingface_folder.version", lambda _: "99")
        with pytest.raises(MissingDependencyError, match="needs transformers"):
            read_tokenizer_folder(tmp_path / "one")
    document = json.loads((tmp_path / "one" / "tokenizer.json").read_text())
    document["model"]["ignore_merges"] = True
    (tmp_path / "one" / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(MissingDependencyError, match="needs transformers"):
        read_tokenizer_folder(tmp_path / "one")


def test_transformers_is_asked_without_torch(tmp_path: Path) -> None:
    folder = folder_of(tiny.byte_level_tokenizer(), tmp_path / "no_torch", "Qwen2Tokenizer")
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from megatron_packed_sft import RecordEncoder, load_tokenizer\n"
        f"tokenizer = load_tokenizer({str(folder)!r})\n"
        "chat = [{'role': 'user', 'content': 'the fox'}, {'role': 'assistant', 'content': 'jumps'}]\n"
        "from megatron_packed_sft.records.record import Conversation\n"
        "print(tokenizer.fingerprint, RecordEncoder(tokenizer, 'chatml').mark(Conversation(chat)).trained)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert found.split(maxsplit=1) == [HuggingFaceTokenizer(folder).fingerprint, "((57, 72),)\n"]


def test_what_transformers_said_travels_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tiny.byte_level_tokenizer(), tmp_path / "travels", "GPT2Tokenizer")
    tokenizer = HuggingFaceTokenizer(folder)
    packed = pickle.dumps(tokenizer)
    monkeypatch.setitem(sys.modules, "transformers", None)
    again = pickle.loads(packed)
    assert again.fingerprint == tokenizer.fingerprint
    text = [MarkedText("the fox's 12 345")]
    assert again.encode_many(text).input_ids.tolist() == tokenizer.encode_many(text).input_ids.tolist()
    # Without it, a tokenizer of such a class is not read at all.
    with pytest.raises(MissingDependencyError, match="GPT2Tokenizer"):
        HuggingFaceTokenizer(folder)


def test_a_class_with_code_of_its_own_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = folder_of(
        tiny.byte_level_tokenizer(),
        tmp_path / "own",
        "OwnTokenizer",
        auto_map={"AutoTokenizer": ["own.OwnTokenizer", None]},
    )
    with pytest.raises(InvalidInputError) as caught:
        HuggingFaceTokenizer(folder)
    assert "its tokenizer_class OwnTokenizer comes with code of its own" in str(caught.value)
    assert "set tokenizer_class to PreTrainedTokenizerFast in its tokenizer_config.json" in str(caught.value)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert_ids_of_transformers(folder)


def test_control_tokens_that_a_folder_wants_to_be_text_are_refused(tmp_path: Path) -> None:
    folder = folder_of(
        tiny.byte_level_tokenizer(), tmp_path / "split", "PreTrainedTokenizerFast", split_special_tokens=True
    )
    with pytest.raises(InvalidInputError, match=r"tokenizer_config\.json sets split_special_tokens"):
        HuggingFaceTokenizer(folder)


def test_files_of_older_versions_count(tmp_path: Path) -> None:
    folder = folder_of(tiny.byte_level_tokenizer(), tmp_path / "old", "PreTrainedTokenizerFast")
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<|new_pad|>"}')
    tokenizer = assert_ids_of_transformers(folder)
    assert tokenizer.pad_id == tokenizer.vocab_size - 1
