"""block_tokenize_fn inside datasets.map: what is in the blocks, what is left out, and what is said about it."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from megatron_packed_sft import block_tokenize_fn, load_tokenizer, train_sentencepiece
from megatron_packed_sft.data import huggingface_blocks as blocks_module
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.strategies.registry import known_strategies

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what else transformers would like to be installed
    import datasets
    from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = 0, 1, 2
VOCABULARY = {"<s>": BOS, "</s>": EOS, "<pad>": PAD, **{f"w{number}": number for number in range(3, 60)}}
Documents = list[list[int]]


def bare_tokenizer(*, frames: bool = True, unknown: str = "w3") -> Tokenizer:
    """One id to each word: w7 is 7. Its post-processor frames texts, as Llama's does."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<pad>")])
    if frames:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    return tokenizer


def hf_tokenizer(**names: Any) -> PreTrainedTokenizerFast:
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "model_max_length": 8} | names
    return PreTrainedTokenizerFast(tokenizer_object=bare_tokenizer(), **names)


TOKENIZER = hf_tokenizer()


def texts_of(lengths: list[int]) -> list[str]:
    """Texts of so many words, no two alike."""
    numbers = itertools.cycle(range(3, 60))
    return [" ".join(f"w{next(numbers)}" for _ in range(length)) for length in lengths]


def batch_of(lengths: list[int]) -> dict[str, list[str]]:
    return {"text": texts_of(lengths)}


def documents_of(lengths: list[int]) -> Documents:
    return [[BOS, *(int(word[1:]) for word in text.split()), EOS] for text in texts_of(lengths)]


def parts(blocks: dict[str, list[Any]]) -> list[Documents]:
    """The documents, or chunks of them, in each block."""
    found = []
    for ids, starts in zip(blocks["input_ids"], blocks["document_starts"], strict=True):
        ends = [*list(starts)[1:], len(ids)]
        assert starts[0] == 0
        found.append([list(ids[start:end]) for start, end in zip(starts, ends, strict=True)])
    return found


def flat(found: list[Documents]) -> Documents:
    return [one for block in found for one in block]


@pytest.fixture(autouse=True)
def nothing_lost_yet() -> Iterator[None]:
    blocks_module._lost.clear()
    yield
    blocks_module._lost.clear()


def test_each_document_is_a_block_of_its_own_unless_packing_is_asked_for() -> None:
    blocks = block_tokenize_fn(batch_of([3, 0, 5]), TOKENIZER, "text", max_length=10)
    assert set(blocks) == {"input_ids", "document_starts"}
    assert parts(blocks) == [[one] for one in documents_of([3, 0, 5]) if len(one) > 2]  # nothing of an empty text
    assert all(ids.dtype == np.int32 for ids in blocks["input_ids"])


def test_without_packing_a_long_document_gives_a_block_for_each_chunk_and_the_strategy_does_not_matter() -> None:
    for strategy in ("greedy", "best_fit", "first_fit"):
        blocks = block_tokenize_fn(batch_of([4, 23, 2]), TOKENIZER, max_length=10, packing_strategy=strategy)
        first, second, third = documents_of([4, 23, 2])
        found = parts(blocks)
        assert all(len(block) == 1 for block in found)
        assert flat(found)[0] == first
        assert [*itertools.chain(*flat(found)[1:-1])] == second
        assert flat(found)[-1] == third


def test_greedy_keeps_the_order_and_starts_a_new_block_when_a_document_does_not_fit() -> None:
    blocks = block_tokenize_fn(batch_of([3, 2, 5, 1]), TOKENIZER, max_length=10, packed=True, overflow=False)
    first, second, third, fourth = documents_of([3, 2, 5, 1])
    assert parts(blocks) == [[first, second], [third, fourth]]


def test_greedy_with_overflow_splits_documents_in_order_and_fills_every_block() -> None:
    lengths = [3, 9, 30, 2, 14, 7]
    blocks = block_tokenize_fn(batch_of(lengths), TOKENIZER, max_length=10, packed=True)
    assert [*itertools.chain(*blocks["input_ids"])] == [*itertools.chain(*documents_of(lengths))]
    assert min(map(len, blocks["input_ids"][:-1])) >= 9  # a cut leaves two tokens on both sides


@pytest.mark.parametrize("strategy", ["best_fit", "first_fit"])
def test_the_decreasing_strategies_put_long_documents_first_and_need_fewer_blocks(strategy: str) -> None:
    lengths = [1, 6, 1, 6, 1, 6]  # with BOS and EOS 3, 8, 3, 8, ...
    arguments = {"max_length": 11, "packed": True, "overflow": False}
    greedy = block_tokenize_fn(batch_of([6, 6, 6, 1, 1, 1]), TOKENIZER, **arguments)
    blocks = block_tokenize_fn(batch_of(lengths), TOKENIZER, packing_strategy=strategy, **arguments)
    assert [len(ids) for ids in blocks["input_ids"]] == [11, 11, 11]
    assert len(greedy["input_ids"]) > 3
    assert sorted(flat(parts(blocks))) == sorted(documents_of(lengths))


@pytest.mark.parametrize("strategy", ["greedy", "best_fit", "first_fit"])
@pytest.mark.parametrize("stride", [0, 3])
def test_overflow_splits_with_an_overlap_of_stride_tokens(strategy: str, stride: int) -> None:
    [document] = documents_of([40])
    blocks = block_tokenize_fn(
        batch_of([40]), TOKENIZER, max_length=12, packed=True, packing_strategy=strategy, stride=stride
    )
    chunks = flat(parts(blocks))
    assert len(chunks) > 3
    assert all(before[len(before) - stride :] == after[:stride] for before, after in itertools.pairwise(chunks))
    assert [*chunks[0], *itertools.chain(*(chunk[stride:] for chunk in chunks[1:]))] == document
    if stride:
        assert [*itertools.chain(*blocks["overlaps"])] == [0, *[stride] * (len(chunks) - 1)]
    else:
        assert "overlaps" not in blocks


def test_without_overflow_long_documents_are_truncated_and_the_tokens_counted(caplog: pytest.LogCaptureFixture) -> None:
    blocks = block_tokenize_fn(batch_of([40, 3]), TOKENIZER, max_length=12, overflow=False)
    long, short = documents_of([40, 3])
    assert flat(parts(blocks)) == [long[:12], short]
    [said] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert said.message == (
        "block_tokenize_fn has left out 30 tokens so far in this process (truncated: 30); of the 2 documents of this "
        "batch, 0 are dropped and 1 truncated"
    )


def test_min_len_and_max_len_drop_documents_and_say_how_many(caplog: pytest.LogCaptureFixture) -> None:
    lengths = [1, 4, 30, 2, 5]
    blocks = block_tokenize_fn(batch_of(lengths), TOKENIZER, max_length=64, packed=True, min_len=6, max_len=20)
    assert flat(parts(blocks)) == [one for one in documents_of(lengths) if 6 <= len(one) <= 20]
    assert "left out 39 tokens so far in this process (above_max_len: 32, below_min_len: 7)" in caplog.text
    assert "of the 5 documents of this batch, 3 are dropped and 0 truncated" in caplog.text


def test_a_batch_of_which_nothing_is_left_gives_no_blocks(caplog: pytest.LogCaptureFixture) -> None:
    blocks = block_tokenize_fn(batch_of([1, 2]), TOKENIZER, max_length=64, min_len=32, stride=1)
    assert blocks == {"input_ids": [], "document_starts": [], "overlaps": []}
    assert "2 are dropped" in caplog.text
    assert block_tokenize_fn({"text": []}, TOKENIZER) == {"input_ids": [], "document_starts": []}


def test_losses_are_announced_again_at_each_power_of_ten_and_not_for_each_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(60):
        block_tokenize_fn(batch_of([10]), TOKENIZER, max_length=10, overflow=False)  # two tokens each
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [re.findall(r"left out (\S+) tokens", one) for one in said] == [["2"], ["10"], ["100"]]


@pytest.mark.parametrize("min_len", [2, 5])
@pytest.mark.parametrize("strategy", ["greedy", "best_fit", "first_fit"])
def test_no_block_is_shorter_than_min_len_or_longer_than_max_length(strategy: str, min_len: int) -> None:
    rng = np.random.default_rng(0)
    for overflow, packed in itertools.product([True, False], [True, False]):
        blocks = block_tokenize_fn(
            batch_of(rng.integers(0, 60, 200).tolist()),
            TOKENIZER,
            max_length=16,
            overflow=overflow,
            packed=packed,
            packing_strategy=strategy,
            min_len=min_len,
        )
        assert all(min_len <= len(ids) <= 16 for ids in blocks["input_ids"])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    strategy=st.sampled_from(sorted(known_strategies())),
    packed=st.booleans(),
    stride=st.integers(0, 4),
    shuffle=st.booleans(),
)
def test_every_token_is_in_a_block_once_besides_overlaps(
    lengths: list[int], strategy: str, packed: bool, stride: int, shuffle: bool
) -> None:
    if strategy not in ("optimal", "window", "greedy", "best_fit", "first_fit", "first_fit_shuffle"):
        return  # registered by another test
    blocks = block_tokenize_fn(
        batch_of(lengths),
        TOKENIZER,
        max_length=13,
        packed=packed,
        packing_strategy=strategy,
        stride=stride,
        shuffle_output=shuffle,
    )
    overlaps = blocks.get("overlaps") or [np.zeros(len(starts), int) for starts in blocks["document_starts"]]
    fresh = [
        chunk[overlap:]
        for block, some in zip(parts(blocks), overlaps, strict=True)
        for chunk, overlap in zip(block, some, strict=True)
    ]
    expected = np.bincount([*itertools.chain(*documents_of(lengths))], minlength=60)
    assert np.bincount([*itertools.chain(*fresh)], minlength=60).tolist() == expected.tolist()


def test_shuffle_output_shuffles_blocks_by_the_seed_and_changes_none() -> None:
    def blocks(**arguments: Any) -> list[Documents]:
        return parts(
            block_tokenize_fn(
                batch_of([5] * 30), TOKENIZER, max_length=16, packed=True, packing_strategy="best_fit", **arguments
            )
        )

    plain, shuffled = blocks(), blocks(shuffle_output=True)
    assert shuffled != plain
    assert sorted(shuffled) == sorted(plain)
    assert shuffled == blocks(shuffle_output=True, seed=42)  # the default
    assert shuffled != blocks(shuffle_output=True, seed=43)


def test_a_seed_of_none_is_drawn_recorded_and_enough_to_make_the_blocks_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    arguments: dict[str, Any] = {"max_length": 16, "packed": True, "shuffle_output": True}
    first, second = (block_tokenize_fn(batch_of([5] * 40), TOKENIZER, seed=None, **arguments) for _ in range(2))
    [seed] = set(first["packing_seed"])
    assert len(first["packing_seed"]) == len(first["input_ids"])
    assert f"drew packing seed {seed} for a batch of 40 texts" in caplog.text
    assert seed not in second["packing_seed"]
    assert parts(block_tokenize_fn(batch_of([5] * 40), TOKENIZER, seed=seed, **arguments)) == parts(first)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_bos_and_eos_are_there_once_as_asked_whatever_the_tokenizer_adds(add_bos: bool, add_eos: bool) -> None:
    assert TOKENIZER("w7")["input_ids"] == [BOS, 7, EOS]
    for tokenizer in (TOKENIZER, bare_tokenizer()):
        blocks = block_tokenize_fn({"text": ["w7 w8", "<s> w9 </s>"]}, tokenizer, add_bos=add_bos, add_eos=add_eos)
        frame = [BOS][:add_bos], [EOS][:add_eos]
        assert [ids.tolist() for ids in blocks["input_ids"]] == [[*frame[0], 7, 8, *frame[1]], [BOS, 9, EOS]]


def test_all_kinds_of_tokenizers_are_taken(tmp_path: Path) -> None:
    expected = [ids.tolist() for ids in block_tokenize_fn(batch_of([3, 9]), TOKENIZER)["input_ids"]]
    TOKENIZER.save_pretrained(tmp_path / "folder")
    ours = load_tokenizer(tmp_path / "folder")
    for tokenizer in (bare_tokenizer(), bare_tokenizer(unknown="<s>"), ours):
        assert block_tokenize_fn({"text": []}, tokenizer)["input_ids"] == []
        assert [ids.tolist() for ids in block_tokenize_fn(batch_of([3, 9]), tokenizer)["input_ids"]] == expected
    train_sentencepiece(texts_of([200] * 30), tmp_path / "sp.model", vocab_size=300)
    sentencepiece = load_tokenizer(tmp_path / "sp.model")
    [ids] = block_tokenize_fn({"text": ["w7 w8"]}, sentencepiece)["input_ids"]
    assert (ids[0], ids[-1]) == (sentencepiece.bos_id, sentencepiece.eos_id)
    assert sentencepiece.decode(ids[1:-1].tolist()) == "w7 w8"


def test_documents_beyond_the_tokenizers_own_length_are_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    [ids] = block_tokenize_fn(batch_of([100]), TOKENIZER, max_length=200)["input_ids"]
    assert len(ids) == 102 > TOKENIZER.model_max_length
    assert caplog.records == []


BAD = [
    ({"tokenizer": hf_tokenizer(eos_token=None)}, "has no EOS token to add; set add_eos=False, or set one on"),
    ({"tokenizer": hf_tokenizer(bos_token=None)}, "has no BOS token to add; set add_bos=False, or set one on"),
    (
        {"tokenizer": bare_tokenizer(frames=False)},
        "no BOS token to add; set add_bos=False, or wrap it in transformers'",
    ),
    ({"tokenizer": object()}, r"has no BOS token"),
    ({"tokenizer": object(), "add_bos": False, "add_eos": False}, "tokenizer is object; pass one of transformers"),
    ({"max_length": 8, "stride": 8}, "stride is 8; it must be below the 8 tokens that a chunk can have"),
    ({"max_length": 8, "min_len": 9}, "min_len 9 leaves nothing to pack: at most 8 tokens are allowed"),
    ({"min_len": 9, "max_len": 8}, "min_len 9 leaves nothing to pack"),
    ({"min_len": 0}, "min_len must be a positive integer, not 0"),
    ({"max_length": 0}, "max_length must be a positive integer, not 0"),
    ({"feature": "body"}, "the batch has no column 'body', but text; pass feature=NAME"),
    ({"packed": True, "packing_strategy": "best_fitt"}, "'best_fitt' is unknown; did you mean 'best_fit'"),
    ({"packed": True, "packing_strategy": "my.packer"}, "'my.packer' is the path of a function; pass the function"),
    ({"packed": True, "packing_strategy": 3}, "packing_strategy must be a name or a function, not 3"),
    ({"overflow": "truncate"}, "overflow must be True or False, not 'truncate'"),
    ({"seed": -1}, "seed must be an integer that is not negative"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=lambda value: "" if isinstance(value, dict) else value)
def test_bad_input_is_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(sentence).replace(r"\.\*", ".*")) as caught:
        block_tokenize_fn(batch_of([3]), **({"tokenizer": TOKENIZER} | arguments))
    assert "\n" not in str(caught.value)


def test_what_is_no_batch_of_texts_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"text 1 of the batch \('text'\) is NoneType, not a text"):
        block_tokenize_fn({"text": ["w7", None]}, TOKENIZER)
    with pytest.raises(InvalidInputError, match="is one text, not a batch of them; call map with batched=True"):
        block_tokenize_fn({"text": "w7"}, TOKENIZER)


@pytest.mark.parametrize("change", ["enable_truncation", "enable_padding"])
def test_a_tokenizer_that_would_change_documents_is_refused(change: str) -> None:
    tokenizer = bare_tokenizer()
    getattr(tokenizer, change)(**({"max_length": 2} if change == "enable_truncation" else {}))
    with pytest.raises(InvalidInputError, match=r"call tokenizer\.no_(truncation|padding)\(\) first"):
        block_tokenize_fn(batch_of([3]), tokenizer)


def test_a_function_of_ones_own_packs_and_is_checked() -> None:
    def last_first(lengths: np.ndarray[Any, Any], capacity: int) -> list[list[int]]:
        return [[index] for index in reversed(range(len(lengths)))]

    blocks = block_tokenize_fn(batch_of([3, 4]), TOKENIZER, max_length=16, packed=True, packing_strategy=last_first)
    assert len(blocks["input_ids"]) == 2
    with pytest.raises(
        InvalidInputError, match=r"strategy '.*<lambda>' left out sequence 1; every sequence needs a bin"
    ):
        block_tokenize_fn(
            batch_of([3, 4]), TOKENIZER, max_length=16, packed=True, packing_strategy=lambda lengths, capacity: [[0]]
        )


LENGTHS = [int(length) for length in np.random.default_rng(1).integers(1, 30, 300)]
ARGUMENTS: dict[str, Any] = {
    "tokenizer": TOKENIZER,
    "feature": "text",
    "max_length": 32,
    "overflow": False,
    "packed": True,
    "packing_strategy": "best_fit",
    "shuffle_output": True,
    "seed": 42,
    "min_len": 4,
    "add_bos": True,
    "add_eos": True,
}


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(batch_of(LENGTHS)).save_to_disk(str(tmp_path / "texts"))
    return datasets.load_from_disk(str(tmp_path / "texts"))  # on disk, as it is cached when it is mapped


def test_both_ways_to_bind_the_arguments_work_in_map_and_with_processes(
    dataset: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs = {"batched": True, "batch_size": 100, "remove_columns": ["text"]}
    by_lambda = dataset.map(lambda features: block_tokenize_fn(features, **ARGUMENTS), **kwargs)
    by_partial = dataset.map(functools.partial(block_tokenize_fn, **ARGUMENTS), num_proc=2, **kwargs)
    expected = [
        ids.tolist()
        for start in range(0, 300, 100)
        for ids in block_tokenize_fn(dataset[start : start + 100], **ARGUMENTS)["input_ids"]
    ]
    assert [list(ids) for ids in by_lambda["input_ids"]] == expected
    assert by_lambda.column_names == by_partial.column_names == ["input_ids", "document_starts"]
    # Two processes cut the data at 150, so the batches differ; nothing is lost.
    assert sorted(flat(parts(by_partial[:]))) == sorted(flat(parts(by_lambda[:])))
    assert str(by_lambda.features["input_ids"].feature.dtype) == "int32"
    assert [record.message for record in caplog.records if "hash" in record.message] == []


def test_a_second_map_is_read_from_the_cache(dataset: Any) -> None:
    function = functools.partial(block_tokenize_fn, **(ARGUMENTS | {"tokenizer": hf_tokenizer()}))
    kwargs = {"batched": True, "remove_columns": ["text"]}
    first = dataset.map(function, **kwargs)
    assert first._fingerprint == dataset.map(function, **kwargs)._fingerprint
    assert first.cache_files == dataset.map(function, **kwargs).cache_files


def test_a_first_batch_of_which_nothing_is_left_does_not_stop_map() -> None:
    texts = datasets.Dataset.from_dict(batch_of([1] * 10 + [20] * 10))
    function = functools.partial(block_tokenize_fn, tokenizer=TOKENIZER, max_length=64, min_len=8)
    mapped = texts.map(function, batched=True, batch_size=10, remove_columns=["text"])
    assert [len(ids) for ids in mapped["input_ids"]] == [22] * 10


def test_streaming_datasets_are_mapped_alike(dataset: Any) -> None:
    function = functools.partial(block_tokenize_fn, **ARGUMENTS)
    kwargs = {"batched": True, "batch_size": 100, "remove_columns": ["text"]}
    streamed = list(dataset.to_iterable_dataset().map(function, **kwargs))
    assert [list(one["input_ids"]) for one in streamed] == [
        list(ids) for ids in dataset.map(function, **kwargs)["input_ids"]
    ]


def test_a_configuration_can_bind_the_arguments() -> None:
    """What Forgather writes as !partial:forgather.ml.datasets:block_tokenize_fn."""
    from hydra.utils import instantiate

    function = instantiate(
        {"_target_": "megatron_packed_sft.block_tokenize_fn", "_partial_": True, "max_length": 16, "packed": True}
    )
    assert parts(function(batch_of([3, 4]), tokenizer=TOKENIZER)) == [documents_of([3, 4])]


def test_importing_the_function_loads_no_torch() -> None:
    """Workers of map would wait for it."""
    script = "import sys; from megatron_packed_sft import block_tokenize_fn; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def real_like_lengths() -> list[int]:
    """As in web text: many short documents, a long tail."""
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(4.5, 1.0, 1000), 4, 2000).astype(int).tolist()


def utilization_of(lengths: list[int], max_length: int, **arguments: Any) -> tuple[float, int]:
    """The seed's own way to monitor it."""
    texts = datasets.Dataset.from_dict(batch_of(lengths))
    function = functools.partial(block_tokenize_fn, tokenizer=TOKENIZER, max_length=max_length, **arguments)
    dataset = texts.map(function, batched=True, batch_size=1000, remove_columns=["text"])
    lengths = [len(seq) for seq in dataset["input_ids"]]
    avg_length = sum(lengths) / len(lengths)
    return avg_length / max_length * 100, len(lengths)


def test_utilization_grows_from_greedy_over_first_fit_to_best_fit_when_documents_are_truncated() -> None:
    measured = {
        strategy: utilization_of(real_like_lengths(), 512, overflow=False, packed=True, packing_strategy=strategy)
        for strategy in ("greedy", "first_fit", "best_fit")
    }
    greedy, first_fit, best_fit = measured.values()
    assert greedy[0] < first_fit[0] <= best_fit[0]
    assert greedy[1] > first_fit[1] >= best_fit[1]
    assert first_fit[0] > 96
    assert best_fit[0] > 98
    # Forgather's greedy gives each truncated document a block of its own; against that, half the blocks is little.
    assert best_fit[1] < utilization_of(real_like_lengths(), 512, overflow=False)[1] / 2


def test_greedy_with_overflow_is_more_than_95_percent_full() -> None:
    for strategy in ("greedy", "first_fit", "best_fit"):
        assert utilization_of(real_like_lengths(), 512, packed=True, packing_strategy=strategy)[0] > 95


USE_CASES: dict[str, dict[str, Any]] = {
    "web text": {
        "max_length": 4096, "overflow": False, "packing_strategy": "best_fit", "shuffle_output": True, "min_len": 64
    },
    "structured data": {"max_length": 2048, "overflow": True, "packing_strategy": "greedy", "min_len": 32},
    "instructions": {
        "max_length": 4096, "overflow": True, "packing_strategy": "first_fit", "shuffle_output": True, "stride": 64,
        "min_len": 32,
    },
    "long context": {"max_length": 32768, "overflow": True, "packing_strategy": "greedy", "min_len": 8192},
}  # fmt: skip


@pytest.mark.parametrize("name", USE_CASES)
def test_the_use_cases_of_the_seed_run_as_they_are_written(name: str, caplog: pytest.LogCaptureFixture) -> None:
    case = USE_CASES[name]
    rng = np.random.default_rng(0)
    most = 40_000 if name == "long context" else 10_000
    lengths = np.clip(rng.lognormal(np.log(most / 12), 1.0, 150), 10, most).astype(int).tolist()
    blocks = block_tokenize_fn(batch_of(lengths), TOKENIZER, packed=True, add_bos=True, add_eos=True, **case)
    full = sum(map(len, blocks["input_ids"])) / len(blocks["input_ids"]) / case["max_length"]
    # The seed asks for 90 %. Where a cut may not leave less than a quarter of a block, less is possible.
    assert full > (0.85 if name == "long context" else 0.9)
    kept = [length + 2 for length in lengths if length + 2 >= case["min_len"]]
    overlap = sum(int(some.sum()) for some in blocks.get("overlaps", []))
    found = sum(map(len, blocks["input_ids"])) - overlap
    expected = sum(kept) if case["overflow"] else sum(min(length, case["max_length"]) for length in kept)
    lost = sum(count for reason, count in blocks_module._lost.items() if reason == "short_tail")
    assert found == expected - lost
    assert ("has left out" in caplog.text) == (found < sum(lengths) + 2 * len(lengths))


def test_small_batches_of_map_waste_room_at_their_ends() -> None:
    lengths = real_like_lengths()
    texts = datasets.Dataset.from_dict(batch_of(lengths))
    function = functools.partial(block_tokenize_fn, tokenizer=TOKENIZER, max_length=512, packed=True)
    large, small = (
        len(texts.map(function, batched=True, batch_size=size, remove_columns=["text"])) for size in (1000, 10)
    )
    assert large < small * 0.9
