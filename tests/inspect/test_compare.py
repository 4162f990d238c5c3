"""`packed-sft compare`: equal in any storage, or what differs and which sequences moved."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft.cli.main import main
from megatron_packed_sft.encode.tokenizers.sentencepiece import train_sentencepiece
from megatron_packed_sft.errors import InvalidInputError, ShardError
from megatron_packed_sft.inspect import compare_bins
from megatron_packed_sft.inspect.compare import compare
from megatron_packed_sft.records.samples import sample_conversations
from megatron_packed_sft.storage.bins import PackedBin
from megatron_packed_sft.storage.dataset_directory import DatasetWriter
from megatron_packed_sft.storage.registry import create_shard_writer
from tests.packed_bins import make_bins, write_shard
from tests.prepare.preparing import chat, prepare, write_records
from tests.terminal import in_pipe, on_terminal

SAME = {"in_same_bin", "in_other_bin", "other_mask", "only_in_a", "only_in_b"}


def write(path: Path, bins: list[PackedBin], storage: str = "memmap_v1", pack_size: int = 32) -> Path:
    with create_shard_writer(storage, path, num_bins=len(bins), pack_size=pack_size) as writer:
        for number, one in enumerate(bins):
            writer.write_bin(number, *one)
        writer.finalize()
    return path


def packed(*sequences: list[int], trained: int = 1) -> PackedBin:
    """A bin of sequences whose first predictions are trained."""
    masks = [[int(place < min(trained, len(one) - 1)) for place in range(len(one))] for one in sequences]
    starts = np.cumsum([0, *(len(one) for one in sequences[:-1])])
    return PackedBin(np.concatenate(sequences), np.concatenate(masks), starts)


def moves_of(facts: dict[str, Any]) -> dict[str, int]:
    return {name: facts["sequences"][name] for name in SAME}


BINS = [packed([5, 6, 7], [8, 9]), packed([1, 2, 3, 4]), packed([10, 11], [12, 13, 14])]


@pytest.mark.parametrize("storage", ["memmap_v1", "legacy", "parquet"])
def test_the_same_bins_are_equal_in_any_storage(
    tmp_path: Path, storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bins = make_bins(300, 32, seed=5)
    a = write(tmp_path / "a", bins)
    name = {"memmap_v1": "b", "legacy": "b.npy", "parquet": "b.idx.parquet"}[storage]
    b = write(tmp_path / name, bins, storage, pack_size=64)
    assert main(["compare", str(a), str(b)]) == 0
    num_tokens = sum(len(one.input_ids) for one in bins)
    assert f"equal: 300 bins, {sum(one.num_sequences for one in bins):,} sequences, {num_tokens:,} tokens" in (
        capsys.readouterr().out
    )


def test_a_token_stream_is_compared_by_its_windows(tmp_path: Path) -> None:
    for name, last in (("a", 9), ("b", 9), ("c", 8)):
        tokens = np.arange(5_000, dtype=np.uint16) % 500
        tokens[3_000] = last
        np.save(tmp_path / f"{name}.npy", tokens)
    assert compare(tmp_path / "a.npy", tmp_path / "b.npy")["equal"]
    [found] = compare(tmp_path / "a.npy", tmp_path / "c.npy")["differences"]
    assert (found["bin"], found["position"], found["a"]["id"], found["b"]["id"]) == (1, 3_000 - 2_048, 9, 8)


def test_equal_sides_may_be_cut_into_other_shards(tmp_path: Path) -> None:
    bins = make_bins(20, 32, seed=6)
    for name, cuts in (("a", (7, 13)), ("b", (15,))):
        (tmp_path / name).mkdir()
        for number, some in enumerate(np.split(np.arange(20), cuts)):
            write(tmp_path / name / f"shard_{number}", [bins[one] for one in some])
    assert compare(tmp_path / "a", tmp_path / "b")["equal"]
    assert compare(tmp_path / "a", write(tmp_path / "one", bins))["equal"]


@pytest.mark.parametrize(
    ("change", "field", "position", "fields"),
    [
        (packed([1, 2, 99, 4]), "input_ids", 2, ["input_ids"]),
        (packed([1, 2, 3, 4], trained=3), "loss_mask", 1, ["loss_mask"]),
        (packed([1, 2], [3, 4], trained=1), "loss_mask", 2, ["loss_mask", "seq_start_id"]),
        (packed([1, 2, 3, 4])._replace(seq_start_id=np.array([0, 2])), "seq_start_id", 2, ["seq_start_id"]),
        (packed([1, 2, 3, 4, 5]), "length", 4, ["length"]),
        (packed([1, 2, 3]), "length", 3, ["length"]),
    ],
)  # fmt: skip
def test_a_difference_names_bin_field_and_position(
    tmp_path: Path, change: PackedBin, field: str, position: int, fields: list[str]
) -> None:
    a = write(tmp_path / "a", BINS)
    b = write(tmp_path / "b", [BINS[0], change, BINS[2]])
    facts = compare(a, b)
    assert not facts["equal"]
    assert facts["num_differing_bins"] == 1
    [found] = facts["differences"]
    assert (found["split"], found["bin"], found["field"], found["position"]) == ("train", 1, field, position)
    assert found["fields"] == fields
    back = compare(b, a)["differences"][0]
    assert (back["field"], back["position"], back["fields"]) == (field, position, fields)


def test_weights_are_compared_and_the_mask_of_a_last_token_is_not(tmp_path: Path) -> None:
    weighted = [one._replace(loss_mask=one.loss_mask * np.float32(0.5)) for one in BINS]
    a, b = write(tmp_path / "a", BINS), write(tmp_path / "b", weighted)
    facts = compare(a, b)
    assert facts["num_differing_bins"] == 3
    assert facts["differences"][0]["b"]["loss_mask"] == 0.5
    assert moves_of(facts) == dict.fromkeys(SAME, 0) | {"other_mask": 5}
    rows = [{"input_ids": one.input_ids.tolist(), "loss_mask": one.loss_mask.tolist(),
             "seq_start_id": one.seq_start_id.tolist()} for one in BINS]  # fmt: skip
    rows[1]["loss_mask"][-1] = 1  # as Megatron-Bridge writes it for texts
    np.save(tmp_path / "bridge.npy", np.array(rows, object), allow_pickle=True)
    facts = compare(a, tmp_path / "bridge.npy")
    assert facts["equal"]
    assert facts["notes"] == [
        f"{tmp_path / 'bridge.npy'}: ignored 1 loss mask at the last token of a sequence, which predicts nothing"
    ]


def test_the_same_sequences_in_other_bins_are_said_to_have_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a", BINS)
    b = write(tmp_path / "b", [packed([5, 6, 7], [10, 11]), BINS[1], packed([8, 9], [12, 13, 14])])
    facts = compare(a, b)
    assert moves_of(facts) == dict.fromkeys(SAME, 0) | {"in_same_bin": 3, "in_other_bin": 2}
    [first, second] = facts["examples"]["in_other_bin"]
    assert (first["bin"], first["sequence"], first["in_b"]["bin"], first["ids"]) == (0, 1, 2, [8, 9])
    assert (second["bin"], second["in_b"]["bin"]) == (2, 0)
    assert main(["compare", str(a), str(b)]) == 1
    shown = capsys.readouterr().out
    assert "different: 2 bins of 3" in shown
    assert "in another bin: train, bin 0, sequence 1 is in B train, bin 2, sequence 0 (2 tokens): 8 9" in shown


def test_sequences_of_one_side_and_other_masks_are_counted(tmp_path: Path) -> None:
    a = write(tmp_path / "a", BINS)
    b = write(
        tmp_path / "b", [packed([5, 6, 7], [8, 9]), packed([1, 2, 3, 4], trained=2), packed([77, 78], [12, 13, 14])]
    )
    facts = compare(a, b)
    assert moves_of(facts) == {"in_same_bin": 3, "in_other_bin": 0, "other_mask": 1, "only_in_a": 1, "only_in_b": 1}
    assert facts["examples"]["only_in_a"][0]["ids"] == [10, 11]
    assert facts["examples"]["only_in_b"][0]["ids"] == [77, 78]
    assert facts["examples"]["other_mask"][0]["in_b"] == {"split": "train", "bin": 1, "sequence": 0}


def test_of_equal_sequences_as_many_are_matched_as_both_sides_have(tmp_path: Path) -> None:
    a = write(tmp_path / "a", [packed([5, 6]), packed([5, 6]), packed([7, 8])])
    b = write(tmp_path / "b", [packed([7, 8]), packed([5, 6])])
    facts = compare(a, b)
    assert moves_of(facts) == {"in_same_bin": 1, "in_other_bin": 1, "other_mask": 0, "only_in_a": 1, "only_in_b": 0}
    assert facts["splits"]["train"] == {"num_bins_a": 3, "num_bins_b": 2, "num_differing": 2}


sequence = st.lists(st.integers(0, 2), min_size=2, max_size=3)
side = st.lists(st.lists(sequence, min_size=1, max_size=3), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(side, side, st.integers(1, 5))
def test_the_counts_are_those_of_plain_counting(
    tmp_path_factory: pytest.TempPathFactory, bins_a: list[Any], bins_b: list[Any], at_once: int
) -> None:
    home = tmp_path_factory.mktemp("counting")
    paths = [write(home / name, [packed(*one) for one in some]) for name, some in (("a", bins_a), ("b", bins_b))]
    before = compare_bins.SEQUENCES_AT_ONCE
    compare_bins.SEQUENCES_AT_ONCE = at_once  # the hashes go through several files
    try:
        facts = compare(*paths, max_differences=100)
    finally:
        compare_bins.SEQUENCES_AT_ONCE = before
    assert facts["equal"] == (bins_a == bins_b)
    if facts["equal"]:
        return
    in_bins = [
        Counter((number, tuple(one)) for number, some in enumerate(bins) for one in some) for bins in (bins_a, bins_b)
    ]
    alone = [Counter(tuple(one) for some in bins for one in some) for bins in (bins_a, bins_b)]
    stayed, matched = (in_bins[0] & in_bins[1]).total(), (alone[0] & alone[1]).total()
    assert moves_of(facts) == {
        "in_same_bin": stayed,
        "in_other_bin": matched - stayed,
        "other_mask": 0,
        "only_in_a": (alone[0] - alone[1]).total(),
        "only_in_b": (alone[1] - alone[0]).total(),
    }
    num_common = min(len(bins_a), len(bins_b))
    differing = [number for number in range(num_common) if bins_a[number] != bins_b[number]]
    assert [one["bin"] for one in facts["differences"]] == differing


def test_splits_are_compared_by_name_and_one_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, splits in (("a", ("train", "validation")), ("b", ("train",))):
        with DatasetWriter(tmp_path / name) as dataset:
            for split in splits:
                with dataset.shard_writer(split, 0, num_bins=len(BINS), pack_size=32) as writer:
                    for number, one in enumerate(BINS):
                        writer.write_bin(number, *one)
                    writer.finalize()
            dataset.finalize()
    facts = compare(tmp_path / "a", tmp_path / "b")
    assert not facts["equal"]
    assert facts["splits"]["validation"] == {"num_bins_a": 3, "num_bins_b": 0, "num_differing": 3}
    assert facts["sequences"]["only_in_a"] == 5
    assert compare(tmp_path / "a", tmp_path / "b", split="train")["equal"]
    assert compare(tmp_path / "a", write(tmp_path / "file.npy", BINS, "legacy"), split="validation")["equal"]
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--split", "test"]) == 2
    assert "has no split 'test'; choose one of train, validation" in capsys.readouterr().err


def test_max_differences_limits_what_is_described_and_not_what_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path / "a", [packed([number, 1, 2]) for number in range(40)])
    b = write(tmp_path / "b", [packed([number, 1, 3]) for number in range(40)])
    assert main(["compare", str(a), str(b), "--json", "--max-differences", "3"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert [one["bin"] for one in facts["differences"]] == [0, 1, 2]
    assert facts["num_differing_bins"] == 40
    assert len(facts["examples"]["only_in_a"]) == 3
    assert facts["sequences"]["only_in_b"] == 40
    assert main(["compare", str(a), str(b), "--max-differences", "3"]) == 1
    assert "... and 37 more differing bins" in capsys.readouterr().out
    assert main(["compare", str(a), str(b), "--max-differences", "-1"]) == 2


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets whose only difference is one word of one chat."""
    home = tmp_path_factory.mktemp("compare")
    texts = [message["content"] for one in sample_conversations(200, seed=1) for message in one.messages]
    tokenizer = train_sentencepiece([text for text in texts if text], home / "sp.model", vocab_size=600)
    for name, word in (("a", "green"), ("b", "yellow")):
        chats = [chat(f"What is {one}?", f"A number, and {word if one == 7 else 'nothing'}.") for one in range(20)]
        records = write_records(home / f"{name}.jsonl", chats)
        done = prepare(
            f"input={records}", f"output={home / name}", f"tokenizer.path={tokenizer}", "template=chatml", "--quiet",
            "packing.pack_size=64", "packing.strategy=greedy", "packing.shuffle_output=false", "executor.num_workers=1",
        )  # fmt: skip
        assert done.code == 0, done.err
    return home


def test_differences_are_shown_as_text_where_the_tokenizer_is_found(prepared: Path, tmp_path: Path) -> None:
    facts = compare(prepared / "a", prepared / "b")
    first = facts["differences"][0]
    assert "A number, and" in "".join(first["a"]["texts"])
    assert "".join(first["a"]["texts"][first["a"]["at"] :]).lstrip().startswith("g")
    assert "".join(first["b"]["texts"][first["b"]["at"] :]).lstrip().startswith("y")
    assert any("What is 7?" in one["text"] for one in facts["examples"]["only_in_a"])
    shown = in_pipe("compare", prepared / "a", prepared / "b")
    assert shown.code == 1
    assert "A number, and" in shown.out
    assert "\x1b" not in shown.out
    seen = on_terminal("compare", prepared / "a", prepared / "b")
    assert "\x1b[1;7;31m" in seen.text  # the token itself, in A


def test_without_a_tokenizer_ids_are_shown_and_it_is_said_why(prepared: Path) -> None:
    shards = [prepared / name / "train" / "shard_000000" for name in ("a", "b")]
    facts = compare(*shards)
    assert facts["differences"][0]["a"]["texts"] is None
    assert any("was not found; give its path with --tokenizer" in note for note in facts["notes"])
    assert compare(*shards, tokenizer=str(prepared / "sp.model"))["differences"][0]["a"]["texts"] is not None


def test_what_cannot_be_compared_is_one_sentence(tmp_path: Path, prepared: Path) -> None:
    a = write(tmp_path / "a", BINS)
    with pytest.raises(InvalidInputError, match="does not exist"):
        compare(a, tmp_path / "nothing")
    with pytest.raises(InvalidInputError, match="has no packed bins; give a dataset directory"):
        compare(prepared / "a.work", a)


def test_damaged_indices_are_an_error_and_not_a_difference(tmp_path: Path) -> None:
    a = write(tmp_path / "a", BINS)
    b = write(tmp_path / "b", BINS)
    lengths = np.load(b / "packed_len.npy")
    lengths[1] = 1000
    np.save(b / "packed_len.npy", lengths)
    with pytest.raises(ShardError):
        compare(a, b)


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    peaks = []
    for number, num_bins in enumerate((1_500, 6_000)):
        bins = make_bins(50, 1024, seed=number)
        for name, shift in (("a", 0), ("b", 1)):
            write_shard(tmp_path / f"{name}{number}", (bins * (num_bins // 50))[shift:], 1024)
        compare(tmp_path / f"a{number}", tmp_path / f"b{number}")  # compile what is compiled
        tracemalloc.start()
        compare(tmp_path / f"a{number}", tmp_path / f"b{number}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
