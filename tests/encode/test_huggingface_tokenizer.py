"""Hugging Face folders: the ids of `tokenizers`, fast or not, with exact masks."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

from megatron_packed_sft.encode.sequences import MarkedText, Sequences
from megatron_packed_sft.encode.tokenizers.gigatoken_path import GigatokenPath
from megatron_packed_sft.encode.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError
from tests.encode import tiny_tokenizers as tiny


@pytest.fixture(scope="session")
def qwen_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers") / "qwen_like"
    return tiny.save_folder(tiny.byte_level_tokenizer(normalizer=normalizers.NFC()), folder)


@pytest.fixture(scope="session")
def gemma_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers") / "gemma_like"
    return tiny.save_folder(tiny.metaspace_tokenizer(), folder, {"bos_token": "<s>", "eos_token": "</s>"})


def records(encoded: Sequences) -> Iterator[tuple[list[int], list[int]]]:
    stops = np.cumsum(encoded.lengths)
    for stop, length in zip(stops.tolist(), encoded.lengths.tolist(), strict=True):
        yield encoded.input_ids[stop - length : stop].tolist(), encoded.train[stop - length : stop].tolist()


def thirds(text: str) -> list[tuple[int, int]]:
    size = len(text)
    return [(size // 5, size // 3), (size // 2, size)] if size > 6 else [(0, size)]


def train_by_hand(encoding: Any, trained: list[tuple[int, int]]) -> list[int]:
    """The definition itself: a token is trained when one of its characters is."""
    characters = {position for begin, end in trained for position in range(begin, end)}
    return [int(any(position in characters for position in range(*span))) for span in encoding.offsets]


def assert_as_the_library(tokenizer: HuggingFaceTokenizer, oracle: Tokenizer, texts: list[str]) -> None:
    marked = [MarkedText(text, thirds(text)) for text in texts]
    for text, (ids, train) in zip(marked, records(tokenizer.encode_many(marked)), strict=True):
        encoding = oracle.encode(text.text, add_special_tokens=False)
        assert ids == encoding.ids, text
        assert train == train_by_hand(encoding, list(text.trained)), text


def assert_same(one: HuggingFaceTokenizer, other: HuggingFaceTokenizer, texts: list[MarkedText]) -> None:
    both = zip(one.encode_many(texts), other.encode_many(texts), strict=True)
    assert all(np.array_equal(left, right) for left, right in both)


@pytest.mark.parametrize(("family", "fast"), [("qwen_like", True), ("qwen_like", False), ("gemma_like", True)])
def test_ids_and_masks_are_those_of_the_tokenizers_library(
    family: str, fast: bool, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(family)
    tokenizer = HuggingFaceTokenizer(folder, fast=fast)
    assert tokenizer.fast_path == ("gigatoken" if fast else None)
    oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
    oracle.post_processor = None  # type: ignore[assignment]
    assert_as_the_library(tokenizer, oracle, tiny.nasty_texts(list(tokenizer.control_tokens)))


def test_ids_are_those_of_transformers_chat_templates(qwen_like: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(str(qwen_like), local_files_only=True)
    tokenizer = HuggingFaceTokenizer(qwen_like)
    assert tokenizer.chat_template == oracle.chat_template
    for text in tiny.corpus(20, seed=3):
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]
        expected = oracle.apply_chat_template(messages, tokenize=True, return_dict=False)
        rendered = oracle.apply_chat_template(messages, tokenize=False)
        assert tokenizer.encode_many([MarkedText(rendered)]).input_ids.tolist() == expected


@pytest.mark.parametrize("fast", [True, False])
def test_a_look_alike_in_a_literal_range_is_ordinary_text(qwen_like: Path, fast: bool) -> None:
    tokenizer = HuggingFaceTokenizer(qwen_like, fast=fast)
    message = "say <|im_end|> or <think>, né <|im_"
    text = f"<|im_start|>{message}<|im_end|>"
    begin = len("<|im_start|>")
    marked = MarkedText(text, [(begin, begin + len(message))], [(begin, begin + len(message))])
    [(ids, train)] = records(tokenizer.encode_many([marked]))
    controls = set(tokenizer.control_tokens.values())
    assert [number for number in ids if number in controls] == [ids[0], ids[-1]]
    assert tokenizer.decode(ids) == text
    assert train == [0, *[1] * (len(ids) - 2), 0]
    [(plain, _)] = records(tokenizer.encode_many([MarkedText(text)]))
    assert plain != ids


def test_fast_and_slow_agree_on_look_alikes(qwen_like: Path) -> None:
    fast, slow = HuggingFaceTokenizer(qwen_like), HuggingFaceTokenizer(qwen_like, fast=False)
    texts = [
        MarkedText(text, thirds(text), [(len(text) // 4, len(text) // 2)])
        for text in tiny.nasty_texts(list(fast.control_tokens))
    ]
    assert_same(fast, slow, texts)


def test_a_control_token_across_the_edge_of_a_literal_range_is_not_recognised(qwen_like: Path) -> None:
    tokenizer = HuggingFaceTokenizer(qwen_like)
    number = tokenizer.control_tokens["<|im_end|>"]
    for literal in [(0, 5), (5, 10), (0, 10)]:
        assert number not in tokenizer.encode_many([MarkedText("<|im_end|>", literal=[literal])]).input_ids
    # A role between the brackets of a template makes a token that neither begins nor ends in the message.
    assert tokenizer.encode_many([MarkedText("<|im_end|>", literal=[(2, 8)])]).input_ids.tolist() == [number]


def test_gemma_like_look_alikes_are_text_but_white_space_and_html_keep_their_tokens(gemma_like: Path) -> None:
    tokenizer = HuggingFaceTokenizer(gemma_like)
    assert set(tokenizer.control_tokens) == {"<unk>", "<s>", "</s>", "<turn>"}
    text = "<turn>the\n\nfox</td> </s><turn>"
    marked = MarkedText(text, literal=[(6, len(text) - 6)])
    ids = tokenizer.encode_many([marked]).input_ids.tolist()
    oracle = Tokenizer.from_file(str(gemma_like / "tokenizer.json"))
    assert {oracle.token_to_id("\n\n"), oracle.token_to_id("</td>")} <= set(ids)
    assert oracle.token_to_id("</s>") not in ids
    assert ids.count(tokenizer.control_tokens["<turn>"]) == 2
    assert tokenizer.decode(ids) == text


def test_straddling_tokens_are_trained_and_counted(qwen_like: Path) -> None:
    for fast in (True, False):
        tokenizer = HuggingFaceTokenizer(qwen_like, fast=fast)
        text = " jumps 👍🏽"
        whole = tokenizer.encode_many([MarkedText(text, [(0, len(text))])])
        assert whole.num_straddling == 0
        assert whole.train.all()
        first = tokenizer.encode_many([MarkedText(" jumps", [(3, 4)])])
        assert (first.train.tolist(), first.num_straddling) == ([1], 1)
        # Tokens that hold parts of one character hold it; that is no straddling.
        rare = tokenizer.encode_many([MarkedText("a\U0001d518b", [(1, 2)])])
        assert (rare.train.tolist(), rare.num_straddling) == ([0, 1, 1, 1, 1, 0], 0)


def test_an_empty_batch_and_empty_texts_have_no_tokens(qwen_like: Path) -> None:
    for fast in (True, False):
        tokenizer = HuggingFaceTokenizer(qwen_like, fast=fast)
        assert tokenizer.encode_many([]).lengths.tolist() == []
        encoded = tokenizer.encode_many([MarkedText(""), MarkedText("fox", [(0, 3)]), MarkedText("", [(0, 0)])])
        assert encoded.lengths.tolist()[0::2] == [0, 0]
        assert encoded.train.all()
        assert encoded.input_ids.flags.writeable
        assert (encoded.input_ids.dtype, encoded.train.dtype, encoded.lengths.dtype) == (np.int32, np.uint8, np.int64)


def test_text_that_the_fast_path_leaves_out_comes_back_in_its_place(
    qwen_like: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = HuggingFaceTokenizer(qwen_like), HuggingFaceTokenizer(qwen_like, fast=False)
    # Composed across an edge, or with a control token; a character without a meaning; a control token's text.
    left_out = [MarkedText("cafe\u0301", [(0, 4)]), MarkedText("e\u0301 <think>\u0338"), MarkedText("a\U0003ffff1")]
    left_out.append(MarkedText("<think>", literal=[(0, 7)]))
    texts = [MarkedText("the fox"), *left_out, MarkedText("over <think>"), MarkedText("jumps", [(0, 3)])]
    assert_same(fast, slow, texts)
    seen: list[str] = []
    encode = fast._gigatoken.encode  # type: ignore[union-attr]
    monkeypatch.setattr(fast._gigatoken, "encode", lambda given: (seen.extend(given), encode(given))[1])
    fast.encode_many(texts)
    assert seen == ["the fox", "over <think>", "jumps"]


def test_texts_are_composed_before_the_fast_path_sees_them(qwen_like: Path) -> None:
    fast, slow = HuggingFaceTokenizer(qwen_like), HuggingFaceTokenizer(qwen_like, fast=False)
    texts = [MarkedText("cafe\u0301 <think>e\u0301 fox", [(6, 15), (17, 19)]), MarkedText("fox", [(1, 2)])]
    assert_same(fast, slow, texts)


def test_what_gigatoken_remembers_is_dropped_after_a_while(qwen_like: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = HuggingFaceTokenizer(qwen_like)
    path = tokenizer._gigatoken
    assert path is not None
    first = path._encode
    monkeypatch.setattr("megatron_packed_sft.encode.tokenizers.gigatoken_path._RENEW_AFTER", 100)
    texts = [MarkedText(text) for text in tiny.corpus(30)]
    expected = HuggingFaceTokenizer(qwen_like, fast=False).encode_many(texts).input_ids
    for _ in range(3):
        assert np.array_equal(tokenizer.encode_many(texts).input_ids, expected)
    assert path._encode is not first


def test_a_million_spaces_are_encoded(qwen_like: Path) -> None:
    fast = HuggingFaceTokenizer(qwen_like)
    encoded = fast.encode_many([MarkedText("x" + " " * 1_000_000 + "y", [(0, 1)])])
    assert int(encoded.train.sum()) == 1


def test_half_a_surrogate_pair_is_refused_by_name(qwen_like: Path) -> None:
    for fast in (True, False):
        with pytest.raises(InvalidInputError, match="text 1 of the batch holds half a surrogate pair at character 2"):
            HuggingFaceTokenizer(qwen_like, fast=fast).encode_many([MarkedText("fine"), MarkedText("ab\ud800")])


def test_ranges_outside_the_text_are_refused(qwen_like: Path) -> None:
    tokenizer = HuggingFaceTokenizer(qwen_like)
    for trained in ([(0, 4)], [(2, 1)], [(1, 3), (2, 3)], [(-1, 2)]):
        with pytest.raises(InvalidInputError, match="text 0 of the batch has the trained range"):
            tokenizer.encode_many([MarkedText("fox", trained)])


def test_names_ids_and_template_come_from_the_folder(qwen_like: Path) -> None:
    tokenizer = HuggingFaceTokenizer(qwen_like / "tokenizer.json")
    assert (tokenizer.name, tokenizer.path) == ("qwen_like", str(qwen_like))
    assert tokenizer.bos_id is None
    assert tokenizer.eos_id == tokenizer.control_tokens["<|im_end|>"]
    assert tokenizer.pad_id == tokenizer.control_tokens["<|endoftext|>"]
    assert tokenizer.vocab_size == 1 + max(tokenizer.control_tokens.values())
    assert tokenizer.template_variables["additional_special_tokens"] == ["<|im_start|>", "<|im_end|>"]
    assert "bos_token" not in tokenizer.template_variables


def test_a_template_file_is_preferred(tmp_path: Path) -> None:
    folder = tiny.save_folder(tiny.byte_level_tokenizer(), tmp_path / "with_file")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert HuggingFaceTokenizer(folder).chat_template == "{{ messages }}"


def test_the_fingerprint_is_that_of_the_content(qwen_like: Path, tmp_path: Path) -> None:
    original = HuggingFaceTokenizer(qwen_like).fingerprint
    document = json.loads((qwen_like / "tokenizer.json").read_text())
    rewritten = dict(reversed(document.items()))
    rewritten["model"] = dict(document["model"], merges=[" ".join(merge) for merge in document["model"]["merges"]])
    rewritten["model"]["vocab"] = dict(reversed(document["model"]["vocab"].items()))
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(rewritten, indent=1))
    assert HuggingFaceTokenizer(folder).fingerprint == original
    document["added_tokens"][-1]["lstrip"] = True
    (folder / "tokenizer.json").write_text(json.dumps(document))
    assert HuggingFaceTokenizer(folder).fingerprint != original


def test_it_travels_to_other_processes_and_refuses_changed_files(tmp_path: Path) -> None:
    folder = tiny.save_folder(tiny.byte_level_tokenizer(), tmp_path / "travels")
    tokenizer = HuggingFaceTokenizer(folder)
    packed = pickle.dumps(tokenizer)
    assert len(packed) < 1000
    again = pickle.loads(packed)
    texts = [MarkedText(text, thirds(text)) for text in tiny.corpus(30)]
    assert np.array_equal(again.encode_many(texts).input_ids, tokenizer.encode_many(texts).input_ids)
    assert again.fast_path == "gigatoken"
    assert "_backend" not in vars(again)  # what one process has checked, the next need not load
    tiny.byte_level_tokenizer(vocab_size=400).save(str(folder / "tokenizer.json"))
    with pytest.raises(InvalidInputError, match="changed while it was in use"):
        pickle.loads(packed)


def test_a_process_with_another_gigatoken_checks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.save_folder(tiny.byte_level_tokenizer(), tmp_path / "travels")
    packed = pickle.dumps(HuggingFaceTokenizer(folder))
    monkeypatch.setattr("megatron_packed_sft.encode.tokenizers.huggingface.checked_by", lambda: "gigatoken 99")
    monkeypatch.setattr(
        "megatron_packed_sft.encode.tokenizers.gigatoken_path.GigatokenPath.difference", lambda *_: "a text"
    )
    assert pickle.loads(packed).fast_path_refusal == "gigatoken gives other ids for 'a text'"


def test_ids_that_do_not_fill_their_text_are_placed_by_offsets(tmp_path: Path) -> None:
    # An added token that takes the blanks around it is longer than its text.
    added = [AddedToken("<mask>", lstrip=True, rstrip=True)]
    folder = tiny.save_folder(tiny.byte_level_tokenizer(added=added), tmp_path / "strips")
    tokenizer = HuggingFaceTokenizer(folder)
    text = MarkedText("the fox  <mask>  jumps", [(0, 7), (17, 22)])
    [(ids, train)] = records(tokenizer.encode_many([text]))
    encoding = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text.text, add_special_tokens=False)
    assert ids == encoding.ids
    assert train == train_by_hand(encoding, list(text.trained))
    assert 0 in train


def test_added_tokens_of_the_config_count(tmp_path: Path) -> None:
    tokenizer = tiny.byte_level_tokenizer()
    number = tokenizer.get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "normalized": True, "single_word": False, "special": False}
    config = tiny.CONFIG | {"added_tokens_decoder": {str(number): {"content": "<extra>", **flags}}}
    loaded = HuggingFaceTokenizer(tiny.save_folder(tokenizer, tmp_path / "extra", config))
    assert loaded.fast_path == "gigatoken"
    assert loaded.encode_many([MarkedText("<extra>")]).input_ids.tolist() == [number]


def test_an_added_token_with_an_impossible_id_is_refused(tmp_path: Path) -> None:
    config = tiny.CONFIG | {"added_tokens_decoder": {"99999": {"content": "<extra>"}}}
    with pytest.raises(InvalidInputError, match="declares id 99999 for '<extra>'"):
        HuggingFaceTokenizer(tiny.save_folder(tiny.byte_level_tokenizer(), tmp_path / "gap", config))


@pytest.mark.parametrize(
    ("token", "is_fast"),
    [
        (AddedToken("<mask>", lstrip=True), True),
        (AddedToken("<mask>", lstrip=True, rstrip=True), True),
        (AddedToken("word", single_word=True), False),
        (AddedToken("\n\n", normalized=False), True),
        (AddedToken("end|><x>", normalized=True), True),
        (AddedToken("<\u00e9>", normalized=True), True),
    ],
)
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC()])
def test_added_tokens_of_any_kind_get_the_ids_of_the_tokenizers_library(
    tmp_path: Path, token: AddedToken, is_fast: bool, normalizer: Any
) -> None:
    made = tiny.byte_level_tokenizer(added=[token], normalizer=normalizer)
    tokenizer = HuggingFaceTokenizer(tiny.save_folder(made, tmp_path / "flags"))
    assert (tokenizer.fast_path == "gigatoken") == is_fast, tokenizer.fast_path_refusal
    assert_as_the_library(tokenizer, made, tiny.nasty_texts([*tokenizer.control_tokens, token.content]))


def change_document(folder: Path, change: Any) -> HuggingFaceTokenizer:
    document = json.loads((folder / "tokenizer.json").read_text())
    change(document)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return HuggingFaceTokenizer(folder)


def swap_two_merges(document: Any) -> None:
    merges = document["model"]["merges"]
    merges[3], merges[4] = merges[4], merges[3]


def add_token_without_merge(document: Any) -> None:
    # Ids go on behind the vocabulary; the added tokens make room.
    vocabulary = document["model"]["vocab"]
    vocabulary["qxz"] = len(vocabulary)
    for token in document["added_tokens"]:
        token["id"] += 1


def take_a_byte_away(document: Any) -> None:
    vocabulary = document["model"]["vocab"]
    number = vocabulary.pop("Ā")
    vocabulary["ĀĀĀ"] = number


@pytest.mark.parametrize("change", [swap_two_merges, add_token_without_merge])
def test_merges_in_any_order_get_the_ids_of_the_tokenizers_library(tmp_path: Path, change: Any) -> None:
    folder = tiny.save_folder(tiny.byte_level_tokenizer(), tmp_path / "changed")
    tokenizer = change_document(folder, change)
    assert tokenizer.fast_path == "gigatoken"
    oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert_as_the_library(tokenizer, oracle, [*tiny.nasty_texts(list(tokenizer.control_tokens)), "qxz aqxz qxzqxz"])


def another_pattern(pattern: str) -> Any:
    def change(document: Any) -> None:
        document["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern

    return change


def remove_what_the_pattern_finds(document: Any) -> None:
    document["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (take_a_byte_away, "gigatoken does not take it"),
        (another_pattern(tiny.WORDS.replace(r"|\p{N}|", "|")), "gigatoken does not take it"),
        (another_pattern("[^Ж]+"), "gigatoken does not take it"),
        (remove_what_the_pattern_finds, "gigatoken gives other ids"),
        (lambda document: document.update(normalizer={"type": "NFKC"}), "do not spell the text"),
        (lambda document: document["model"].update(dropout=0.1), "its model sets dropout"),
        (lambda document: document.update(pre_tokenizer={"type": "Whitespace"}), "do not spell the text"),
    ],
)
def test_other_models_are_left_to_tokenizers(tmp_path: Path, change: Any, reason: str) -> None:
    folder = tiny.save_folder(tiny.byte_level_tokenizer(), tmp_path / "changed")
    tokenizer = change_document(folder, change)
    assert tokenizer.fast_path is None
    assert reason in str(tokenizer.fast_path_refusal)


@pytest.mark.parametrize("scheme", ["first", "never", "always"])
def test_masks_do_not_depend_on_a_space_that_is_put_in_front(tmp_path: Path, scheme: str) -> None:
    folder = tiny.save_folder(tiny.metaspace_tokenizer(), tmp_path / "llama_like", {"eos_token": "</s>"})
    mark = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    tokenizer = change_document(folder, lambda document: document.update(normalizer=None, pre_tokenizer=mark))
    assert (tokenizer.fast_path is None) == (scheme == "always"), tokenizer.fast_path_refusal
    oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [*tiny.nasty_texts(list(tokenizer.control_tokens)), "fox", " fox", "▁fox", "日", "<turn>fox", "\nfox"]
    assert_as_the_library(tokenizer, oracle, texts)


def test_without_gigatoken_the_slow_path_is_taken(qwen_like: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert HuggingFaceTokenizer(qwen_like).fast_path_refusal == "gigatoken is not installed"


def test_what_passed_the_self_check_is_remembered_for_these_versions_and_this_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tiny.save_folder(tiny.byte_level_tokenizer(), tmp_path / "checked")
    asked: list[str] = []
    check = GigatokenPath.difference
    monkeypatch.setattr(
        GigatokenPath, "difference", lambda path, backend: (asked.append("once"), check(path, backend))[1]
    )
    texts = [MarkedText(text, thirds(text)) for text in tiny.corpus(30)]
    expected = HuggingFaceTokenizer(folder).encode_many(texts)
    again = HuggingFaceTokenizer(folder)
    assert asked == ["once"]
    assert "_backend" not in vars(again)
    assert all(np.array_equal(one, other) for one, other in zip(again.encode_many(texts), expected, strict=True))
    with monkeypatch.context() as patch:
        patch.setattr("megatron_packed_sft.encode.tokenizers.gigatoken_path._CHECKS", 99)
        HuggingFaceTokenizer(folder)
    assert len(asked) == 2
    tiny.byte_level_tokenizer(vocab_size=400).save(str(folder / "tokenizer.json"))
    HuggingFaceTokenizer(folder)
    assert len(asked) == 3
    # Where nothing can be written, everything is checked every time.
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "tokenizer.json"))
    assert HuggingFaceTokenizer(folder).fast_path == HuggingFaceTokenizer(folder).fast_path == "gigatoken"
    assert len(asked) == 5


def test_without_tokenizers_the_extra_is_named(
    qwen_like: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'megatron-packed-sft\[hf\]'"):
        HuggingFaceTokenizer(qwen_like)


def test_without_tokenizer_json_and_transformers_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'megatron-packed-sft\[hf\]'"):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {"type": "BPE"}}'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidInputError, match=r"tokenizer\.json"):
        HuggingFaceTokenizer(tmp_path)
