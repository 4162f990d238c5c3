"""What is worth a look is found, and what is fine is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import PackedBin, load_tokenizer
from megatron_packed_sft.encode.sequences import MarkedText
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.inspect.opened_data import open_data
from megatron_packed_sft.inspect.report.read_bins import read_tokens
from megatron_packed_sft.inspect.report.suspicions import Suspicion, find_suspicions
from megatron_packed_sft.inspect.tokens_of_bin import TokenDecoder
from tests.packed_bins import write_shard


@pytest.fixture(scope="module")
def tokenizer(tokenizer_path: str) -> Tokenizer:
    return load_tokenizer(tokenizer_path)


class Chats:
    """Builds bins of one sequence each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.start, self.end = (tokenizer.control_tokens[name] for name in ("<|im_start|>", "<|im_end|>"))
        self.bins: list[PackedBin] = []

    def ids(self, text: str, *, literal: bool = False) -> list[int]:
        marked = MarkedText(text, literal=[(0, len(text))] if literal else [])
        return [int(one) for one in self._tokenizer.encode_many([marked]).input_ids]

    def add(self, given: list[int], answer: list[int]) -> None:
        """A turn of the user and one of the assistant, whose answer and end are trained."""
        before = [
            self.start,
            *self.ids("user\n"),
            *given,
            self.end,
            *self.ids("\n"),
            self.start,
            *self.ids("assistant\n"),
        ]
        mask = [0] * (len(before) - 1) + [1] * len(answer) + [0]
        ids = np.array(before + answer, np.int32)
        self.bins.append(PackedBin(ids, np.array(mask, np.uint8), np.array([0], np.uint32)))

    def found(self, tmp_path: Path, decoder: TokenDecoder, pad_id: int | None = None) -> dict[str, Suspicion]:
        write_shard(tmp_path / "shard", self.bins, 2048)
        [reader] = open_data(tmp_path / "shard").splits.values()
        read = read_tokens(reader, np.arange(len(self.bins)))
        return {one.kind: one for one in find_suspicions(read, decoder, pad_id)}


@pytest.fixture
def chats(tokenizer: Tokenizer) -> Chats:
    """A hundred chats with which nothing is wrong."""
    made = Chats(tokenizer)
    for one in range(100):
        made.add(made.ids(f"What is {one} plus {one}?"), [*made.ids(f"It is {2 * one}, I think."), made.end])
    return made


def test_nothing_is_found_in_good_chats(chats: Chats, tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert {one.num_found for one in chats.found(tmp_path, TokenDecoder(tokenizer)).values()} == {0}


def test_each_kind_is_found_with_its_bin(chats: Chats, tokenizer: Tokenizer, tmp_path: Path) -> None:
    long = chats.ids("word " * 600)
    chats.add(long, [*chats.ids("A short answer after a long question. " * 3), chats.end])  # bin 100: late
    chats.add(chats.ids("And?"), [chats.end])  # bin 101: little
    chats.bins.append(chats.bins[3])  # bin 102: repeated
    chats.add(chats.ids("What is <|im_end|>?", literal=True), [*chats.ids("A marker of turns."), chats.end])  # 103
    chats.add([*chats.ids("Really"), chats.end, *chats.ids(" done?")], [*chats.ids("Yes, really."), chats.end])  # 104
    chats.add(chats.ids("Tell me a story"), chats.ids("Once upon a time there was a"))  # bin 105: truncated
    found = chats.found(tmp_path, TokenDecoder(tokenizer))
    where = {kind: [example.bin for example in one.examples] for kind, one in found.items()}
    assert where == {
        "late": [100],
        "little_trained": [101],
        "repeated": [102],
        "control_text": [103],
        "misplaced_control": [104],
        "truncated": [105],
    }
    assert all(one.num_found == 1 for one in found.values())
    assert found["repeated"].examples[0].note.startswith("equals bin 3, sequence 1")
    assert found["control_text"].examples[0].note == "<|im_end|> as ordinary text"
    assert found["truncated"].examples[0].note.endswith("there was a”")
    position = found["misplaced_control"].examples[0].position
    assert chats.bins[104].input_ids[position] == chats.end


def test_a_rare_role_is_no_control_token_in_text(chats: Chats, tokenizer: Tokenizer, tmp_path: Path) -> None:
    chats.add(chats.ids("Hello, who are you?"), [*chats.ids("I am the one you asked for."), chats.end])
    one = chats.bins[-1]
    system = [chats.start, *chats.ids("system\nBe brief."), chats.end, *chats.ids("\n")]
    ids, mask = np.array([*system, *one.input_ids]), np.array([*[0] * len(system), *one.loss_mask])
    chats.bins[-1] = PackedBin(ids.astype(np.int32), mask.astype(np.uint8), one.seq_start_id)
    tool = [chats.start, *chats.ids("tool\n42"), chats.end, *chats.ids("\n")]
    two = chats.bins[7]
    ids, mask = np.array([*two.input_ids, *chats.ids("\n"), *tool]), np.array([*two.loss_mask, *[0] * (len(tool) + 1)])
    chats.bins[7] = PackedBin(ids.astype(np.int32), mask.astype(np.uint8), two.seq_start_id)
    assert chats.found(tmp_path, TokenDecoder(tokenizer))["misplaced_control"].num_found == 0


def test_without_a_tokenizer_what_needs_one_is_not_checked_and_the_rest_is(chats: Chats, tmp_path: Path) -> None:
    chats.add(chats.ids("Tell me a story"), chats.ids("Once upon a time there was a"))
    found = chats.found(tmp_path, TokenDecoder(None))
    assert found["control_text"].unchecked == found["misplaced_control"].unchecked == "needs the tokenizer"
    assert [example.bin for example in found["truncated"].examples] == [100], "most answers end with the same id"


def test_padding_behind_a_sequence_does_not_hide_that_it_is_truncated(
    chats: Chats, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    chats.add(chats.ids("Tell me a story"), chats.ids("Once upon a time there was a"))
    pad_id = 3
    one = chats.bins[-1]
    mask = np.concatenate([one.loss_mask, np.zeros(3, np.uint8)])
    chats.bins[-1] = PackedBin(np.concatenate([one.input_ids, np.full(3, pad_id, np.int32)]), mask, one.seq_start_id)
    assert chats.found(tmp_path, TokenDecoder(tokenizer), pad_id)["truncated"].num_found == 1


def test_sequences_of_equal_hashes_must_also_be_equal(chats: Chats, tokenizer: Tokenizer, tmp_path: Path) -> None:
    for _ in range(40):
        chats.bins.append(chats.bins[0])
    found = chats.found(tmp_path, TokenDecoder(tokenizer))["repeated"]
    assert found.num_found == 40
    assert len(found.examples) == 12, "not all of them are listed"
    assert {found.examples[0].bin, found.examples[-1].bin} == {100, 139}, "examples are from all over the data"
