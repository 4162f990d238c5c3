"""Greedy answers: where prompts are cut, where answers end, and that each token is the model's best."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed_sft import PackedBin, create_sft_dataset
from megatron_packed_sft.train.samples import Sample, answer_greedily, as_text, choose_samples, first_lessons
from tests.megatron.tiny_gpt import EOS_ID, VOCAB_SIZE, WARNINGS, build, run_of_one
from tests.packed_bins import write_shard

pytestmark = [pytest.mark.filterwarnings(warning) for warning in WARNINGS]
END_OF_TURN = 99
PACK_SIZE = 64


def chat_bin(rng: np.random.Generator) -> PackedBin:
    """Three chats of two turns each: prompts of ids from 100, answers of ids below 90 and the end of a turn."""
    ids: list[int] = []
    mask: list[int] = []
    starts: list[int] = []
    for _ in range(3):
        chat: list[int] = []
        train: list[int] = []
        for _ in range(2):
            prompt, answer = rng.integers(100, 200, 4).tolist(), [*rng.integers(3, 90, 3).tolist(), END_OF_TURN]
            chat += prompt + answer
            train += [0] * len(prompt) + [1] * len(answer)
        starts.append(len(ids))
        ids += chat
        mask += [*train[1:], 0]
    return PackedBin(np.array(ids, np.int32), np.array(mask, np.uint8), np.array(starts, np.uint32))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "shard"
    write_shard(path, [chat_bin(rng) for _ in range(9)], PACK_SIZE, pad_id=EOS_ID, vocab_size=VOCAB_SIZE)
    return create_sft_dataset(path, EOS_ID, PACK_SIZE, contract="mcore")


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with run_of_one():
        yield


def test_a_prompt_ends_before_the_first_trained_token_and_its_answer_with_the_turn() -> None:
    lessons = list(first_lessons(chat_bin(np.random.default_rng(0))))
    assert len(lessons) == 3
    for prompt, answer in lessons:
        assert len(prompt) == 4
        assert min(prompt) >= 100
        assert len(answer) == 4
        assert answer[-1] == END_OF_TURN
    nothing_trained = PackedBin(np.arange(5), np.zeros(5, np.uint8), np.array([0]))
    assert list(first_lessons(nothing_trained)) == []


def test_prompts_come_from_all_over_the_data_and_the_end_of_a_turn_is_found(dataset: Any) -> None:
    samples, ends = choose_samples(dataset, 3, 8)
    assert len({sample.bin for sample in samples}) == 3
    assert ends == {EOS_ID, END_OF_TURN}
    assert samples == choose_samples(dataset, 3, 8)[0]
    assert choose_samples(dataset, 3, PACK_SIZE)[0] == []  # no room for such answers


def best_of(model: Any, ids: list[int]) -> int:
    """The best next token by a plain forward pass over these ids alone, neither packed nor padded."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        scores = model(tokens, torch.arange(len(ids))[None], None)
    return int(scores[0, -1, :VOCAB_SIZE].argmax())


def answers(model: Any, dataset: Any, samples: list[Sample], ends: set[int]) -> bool:
    from functools import partial

    from megatron.core.pipeline_parallel import get_forward_backward_func

    def run_pass(step: Any, batches: Any, number: int) -> Any:
        run = partial(get_forward_backward_func(), model=[model], seq_length=PACK_SIZE, micro_batch_size=1)
        return run(forward_step_func=step, data_iterator=batches, num_microbatches=number, forward_only=True)

    return answer_greedily(
        samples, run_pass, dataset=dataset, ends=ends, num_tokens=5, vocab_size=VOCAB_SIZE, is_speaker=True,
        device=torch.device("cpu"), is_stopped=lambda: False,
    )  # fmt: skip


def test_every_token_is_the_best_one_after_those_before_it_and_an_end_ends_the_answer(dataset: Any) -> None:
    model = build().eval()
    samples, _ = choose_samples(dataset, 3, 5)
    assert answers(model, dataset, samples, set())
    for sample in samples:
        assert len(sample.said) == 5
        for length in range(5):
            assert sample.said[length] == best_of(model, sample.prompt + sample.said[:length])
    again, _ = choose_samples(dataset, 3, 5)
    assert answers(model, dataset, again, {samples[0].said[1]})
    assert again[0].said == samples[0].said[:2]


def test_a_person_reads_prompt_answer_and_data() -> None:
    class Letters:
        """Ids as letters."""

        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    sample = Sample(prompt=[72, 105], expected=[111, 107], said=[110, 111], bin=4)
    tokenizer: Any = Letters()
    text = as_text([sample], step=7, name="maths", tokenizer=tokenizer)
    assert text == (
        "step 7: maths, greedy answers\n\n===== prompt 1 (bin 4)\nHi\n----- the model says\nno\n"
        "----- the data says\nok\n"
    )
