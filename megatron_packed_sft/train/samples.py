"""Greedy answers of the model to prompts of the validation data, as a text file to read during training.

    sequence of a bin    [prompt ............][answer .....] [more turns]
    loss mask (shifted)   0 0 0 0 0 0 0 0 0 1  1 1 1 1 1 0    ...
                          └─ the model reads ─┘└ the data says ┘

Answers grow token by token, by whole forward passes through the pipeline schedule, so they work for every layout of
tensor-, pipeline- and data-parallel ranks. Data-parallel ranks do the same work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from megatron_packed_sft.data.batch.contracts import Batch
from megatron_packed_sft.data.datasets import PackedDataset
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer
from megatron_packed_sft.megatron.forward_step import packed_seq_params, to_device
from megatron_packed_sft.storage.bins import PackedBin

_NUM_BINS_READ: Final = 64
_TOKEN: Final = "next token"


@dataclass(kw_only=True)
class Sample:
    """A prompt, the answer in the data, and the model's answer.

    Args:
        prompt: ids up to the first trained token of a sequence.
        expected: ids of the first trained stretch.
        said: ids of the model's answer.
        bin: where the prompt is from.
    """

    prompt: list[int]
    expected: list[int]
    said: list[int] = field(default_factory=list)
    bin: int


def first_lessons(packed: PackedBin) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (prompt, answer) of each sequence of a bin that has a trained token.

    Example:
        >>> bin = PackedBin(np.array([7, 8, 9, 5, 6, 4]), np.array([0, 1, 1, 0, 1, 0]), np.array([0, 4]))
        >>> list(first_lessons(bin))
        [([7, 8], [9, 5]), ([6], [4])]
    """
    ends = [*packed.seq_start_id[1:].tolist(), len(packed.input_ids)]
    for start, end in zip(packed.seq_start_id.tolist(), ends, strict=True):
        ids, is_trained = packed.input_ids[start:end].tolist(), np.asarray(packed.loss_mask[start:end]) > 0
        if is_trained.any():
            first = int(is_trained.argmax()) + 1  # the mask is that of the prediction, one before its token
            length = int(np.append(is_trained[first - 1 :], False).argmin())
            yield ids[:first], ids[first : first + length]


def choose_samples(dataset: PackedDataset, num_samples: int, num_tokens: int) -> tuple[list[Sample], set[int]]:
    """Return prompts spread over a dataset, always the same, and the ids that end an answer.

    Args:
        dataset: where the prompts are from; prompt and answer fit into its `max_seq_length`.
        num_samples: how many.
        num_tokens: the most tokens of an answer.
    """
    source = dataset.source
    chosen: list[Sample] = []
    last_ids: Counter[int] = Counter()
    numbers = np.unique(np.linspace(0, len(source) - 1, min(len(source), max(num_samples, _NUM_BINS_READ))).astype(int))
    lessons = {number: list(first_lessons(source.bin(number))) for number in numbers.tolist()}
    for answers in lessons.values():
        last_ids.update(answer[-1] for _, answer in answers)
    ordered = [(number, *one) for turn in range(8) for number, some in lessons.items() for one in some[turn : turn + 1]]
    fitting = [one for one in ordered if len(one[1]) + num_tokens <= dataset.options.max_seq_length]
    for index in np.unique(np.linspace(0, len(fitting) - 1, min(num_samples, len(fitting))).astype(int)).tolist():
        number, prompt, answer = fitting[index]
        chosen.append(Sample(prompt=prompt, expected=answer, bin=number))
    # The id that ends most answers is the template's end of turn.
    [(most_common, count)] = last_ids.most_common(1) or [(-1, 0)]
    ends = {dataset.options.eos_id} | ({most_common} if 2 * count > last_ids.total() else set())
    return chosen, ends


def answer_greedily(
    samples: Sequence[Sample],
    run_pass: Callable[..., Sequence[Mapping[str, Any]]],
    *,
    dataset: PackedDataset,
    ends: set[int],
    num_tokens: int,
    vocab_size: int,
    is_speaker: bool,
    device: torch.device,
    is_stopped: Callable[[], bool],
) -> bool:
    """Fill in the model's answers; a collective call.

    Args:
        samples: their `said` is filled.
        run_pass: runs a forward step function over micro batches and returns the last stage's reports.
        dataset: makes batches of the shapes that the model knows.
        ends: ids that end an answer.
        num_tokens: the most tokens of an answer.
        vocab_size: ids beyond it are padding of the vocabulary.
        is_speaker: whether this rank's tokens are broadcast to the others: one rank of the last stage.
        device: where this rank computes.
        is_stopped: asked before each token.

    Returns:
        Whether the answers are complete.
    """
    open_samples = list(samples)
    for _ in range(num_tokens):
        if not open_samples:
            break
        if is_stopped():
            return False
        batches = [_batch_of(dataset, one.prompt + one.said) for one in open_samples]
        lengths = iter([len(one.prompt + one.said) for one in open_samples])
        step = partial(_next_token_step, vocab_size=vocab_size, lengths=lengths)
        reports = run_pass(step, iter(batches), len(batches))
        said = torch.full((len(open_samples),), -1, dtype=torch.int64, device=device)
        if is_speaker:
            said = torch.stack([report[_TOKEN] for report in reports]).to(device)
        torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MAX)
        for one, token in zip(open_samples, said.tolist(), strict=True):
            one.said.append(token)
        open_samples = [one for one in open_samples if one.said[-1] not in ends]
    return True


def as_text(samples: Sequence[Sample], *, step: int, name: str, tokenizer: Tokenizer | None) -> str:
    """Return the samples as text: prompt, the model's answer, the answer in the data.

    Example:
        >>> sample = Sample(prompt=[5], expected=[6], said=[7], bin=0)
        >>> as_text([sample], step=3, name="validation", tokenizer=None).splitlines()[0]
        'step 3: validation, greedy answers (as ids; set data.tokenizer to read text)'
    """

    def shown(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)

    note = " (as ids; set data.tokenizer to read text)" if tokenizer is None else ""
    parts = [f"step {step}: {name}, greedy answers{note}"]
    for number, one in enumerate(samples, start=1):
        parts.append(
            f"===== prompt {number} (bin {one.bin})\n{shown(one.prompt)}\n----- the model says\n{shown(one.said)}\n"
            f"----- the data says\n{shown(one.expected)}"
        )
    return "\n\n".join(parts) + "\n"


def _batch_of(dataset: PackedDataset, ids: list[int]) -> Batch:
    """Return a batch of one sequence; one id is added, because the inputs of a batch leave out the last."""
    padded = np.array([*ids, dataset.options.eos_id], np.int32)
    sample = {"input_ids": padded, "seq_boundaries": [0, len(padded)], "loss_mask": np.zeros(len(padded), np.uint8)}
    return PackedDataset.collate_fn(dataset, [sample])  # a bin, whatever the items of the dataset are


def _next_token_step(
    data_iterator: Iterator[Batch], model: torch.nn.Module, *, vocab_size: int, lengths: Iterator[int]
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    """Run the model on the next batch without labels: the last stage has scores instead of losses."""
    batch = next(data_iterator)
    device = next(model.parameters()).device
    own = to_device({key: batch[key] for key in ("tokens", "position_ids")}, device)
    boundaries = packed_seq_params(batch, device=device)
    output = model(own["tokens"], own["position_ids"], None, labels=None, packed_seq_params=boundaries)
    return output, partial(_best_token, vocab_size=vocab_size, length=next(lengths))


def _best_token(output: Tensor, *, vocab_size: int, length: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    scores = gather_from_tensor_model_parallel_region(output[:, length - 1].contiguous())  # each rank has some ids'
    best = scores[0, :vocab_size].float().argmax()
    return scores.new_zeros(()), torch.zeros((), dtype=torch.int, device=scores.device), {_TOKEN: best}
