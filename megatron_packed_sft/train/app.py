"""`packed-sft train` and recipes/sft.py: from a configuration to a trained model.

check_config ─▶ open_data ─▶ find_checkpoint ─▶ schedule_steps ─▶ Megatron-Core starts ─▶ Trainer.run
└──────────── every mistake is reported here, before megatron.core is imported ───────┘
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_packed_sft.config.application import as_yaml, completions, run_application
from megatron_packed_sft.data.options import STATIC
from megatron_packed_sft.data.order.state import LoaderState
from megatron_packed_sft.errors import InvalidInputError, StateMismatchError, StorageIOError
from megatron_packed_sft.megatron.weights.layout import ModelShape
from megatron_packed_sft.remote.objects import try_writing
from megatron_packed_sft.support.atomic import os_errors, replace_file
from megatron_packed_sft.support.exits import is_speaker
from megatron_packed_sft.support.imports import require_torch
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.support.wording import plural
from megatron_packed_sft.train.config import TrainConfig
from megatron_packed_sft.train.config_checks import check_config, check_parallel
from megatron_packed_sft.train.ranks import (
    leave_with_torchrun,
    lost_ranks_explained,
    num_ranks,
    one_rank_reports,
    own_rank,
)
from megatron_packed_sft.train.step_schedule import StepSchedule, data_parallel_size, schedule_steps

if TYPE_CHECKING:
    from megatron_packed_sft.megatron.backend import Backend
    from megatron_packed_sft.megatron.weights.folder import HuggingFaceFolder
    from megatron_packed_sft.train.checkpoint import CheckpointDirectory, TrainingState
    from megatron_packed_sft.train.checkpoint_copies import CopiedRun
    from megatron_packed_sft.train.data import TrainingData

_DESCRIPTION = """Train a GPT model on packed SFT data with Megatron-Core.

Start it with torchrun for several processes. It uses NCCL and Transformer Engine with CUDA, gloo and the CPU without.
Run the same command again to resume from the newest checkpoint."""

_EXAMPLES = """  packed-sft train data.path=my_dataset
  torchrun --nproc-per-node 2 recipes/sft.py data.path=my_dataset output=runs/first train.steps=100
  torchrun --nproc-per-node 8 recipes/sft.py model=llama3_8b parallel=tensor_8 data.path=my_dataset
  packed-sft train model=from_pretrained model.path=Qwen3-0.6B optimizer=adam_fine_tune data.path=my_dataset
  packed-sft train data.path=training_4096.npy storage=legacy model.vocab_size=32000
  packed-sft train packing_mode=static data.path=my_dataset.work/tokens/train data.sequence_length=4096"""

_FLAGS = {"--json": "json=true"}
_LOSSES = {
    "per_token": "the mean over trained tokens (per_token)",
    "weighted_per_token": "the mean over trained tokens by their weights (per_token)",
    "per_conversation": "the mean over conversations of each one's own mean (per_conversation)",
}


class Resumption(NamedTuple):
    """The checkpoint to resume from, and its state."""

    checkpoint: Path
    state: TrainingState


def main(argv: Sequence[str] | None = None) -> int:
    """Run the training application and return its exit code.

    Args:
        argv: overrides such as `data.path=my_dataset`; by default those of the command line.
    """
    return run_application(
        train,
        name="train",
        schema=TrainConfig,
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        flags=_FLAGS,
        argv=argv,
    )


def complete(words: Sequence[str], incomplete: str) -> list[str]:
    """Return what the shell may complete the beginning of a word to."""
    return completions(words, incomplete, name="train", schema=TrainConfig, flags=_FLAGS)


def train(config: TrainConfig) -> None:
    """Train as configured; on every rank of the run."""
    require_torch("training", "megatron")
    leave_with_torchrun()
    with one_rank_reports():
        _train(config)


def _train(config: TrainConfig) -> None:
    # Mistakes are found before megatron.core is imported, which takes ten seconds.
    from megatron_packed_sft.megatron.weights.torch_dist import refuse_unreadable
    from megatron_packed_sft.train.checkpoint import CheckpointDirectory, TrainingState, find_checkpoint, refuse_damaged
    from megatron_packed_sft.train.checkpoint_copies import CopiedRun, bring_newest
    from megatron_packed_sft.train.data import open_data
    from megatron_packed_sft.train.pretrained import keep_model_files, model_shape, pretrained_shape

    check_config(config)
    output = local_path(config.output, "output")
    checkpoints = CheckpointDirectory(output / "checkpoints", keep=config.checkpoint.keep)
    copies = None if config.checkpoint.copy_to is None else CopiedRun(config.checkpoint.copy_to)
    resume, copy_notes = bring_newest(config.resume, checkpoints, copies)
    if copies is not None and checkpoints.newest() is None and is_speaker():
        try_writing(copies.url)  # otherwise a missing bucket would only show at the first checkpoint
    checkpoint = find_checkpoint(os.fspath(resume), checkpoints)
    resumption = None if checkpoint is None else Resumption(checkpoint, TrainingState.load(checkpoint))
    pretrained = pretrained_shape(config.model, None if resumption is None else resumption.state)
    data = open_data(config, pretrained)
    shape = pretrained or model_shape(config.model, data.vocab_size)
    check_parallel(shape, config.parallel)
    schedule = _schedule(
        config, data, resumption
    )  # for its errors; rank 0's choice of a checkpoint decides the real one
    if resumption is not None:
        _refuse_other_run(resumption, config, data, shape, schedule)
        refuse_damaged(resumption.checkpoint, resumption.state.checksums, rank=own_rank(), num_ranks=num_ranks())
        if own_rank() == 0:
            refuse_unreadable(resumption.checkpoint)
    if own_rank() == 0:
        with os_errors("create", output):
            output.mkdir(parents=True, exist_ok=True)
        replace_file(output / "config.yaml", as_yaml(config).encode())
        if resumption is None:
            folder, tokenizer = (path and local_path(path) for path in (config.model.path, config.data.tokenizer))
            keep_model_files(folder or None, tokenizer or None, output)

    _silence_known_warnings()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as Megatron advises for tensor parallelism
    from megatron_packed_sft.megatron.backend import choose_backend, start_distributed
    from megatron_packed_sft.train.model_and_optimizer import refuse_without_gpu

    backend = choose_backend()
    refuse_without_gpu(config, backend)
    with lost_ranks_explained():
        start_distributed(
            backend,
            tensor_parallel=config.parallel.tensor,
            pipeline_parallel=config.parallel.pipeline,
            context_parallel=config.parallel.context,
            seed=config.seed,
        )
        missing = _run(config, data, shape, checkpoints, resumption, backend, copies, copy_notes)
    if missing is not None:
        raise StorageIOError(missing)


def _run(
    config: TrainConfig,
    data: TrainingData,
    shape: ModelShape,
    checkpoints: CheckpointDirectory,
    resumption: Resumption | None,
    backend: Backend,
    copies: CopiedRun | None,
    copy_notes: Sequence[str],
) -> str | None:
    """Train; return a sentence about a copy that is missing at the end, or None."""
    import torch

    from megatron_packed_sft.megatron.backend import stop_distributed
    from megatron_packed_sft.megatron.weights.folder import HuggingFaceFolder
    from megatron_packed_sft.train.checkpoint_copies import CopySender
    from megatron_packed_sft.train.loop import Trainer
    from megatron_packed_sft.train.metrics import MetricsFile
    from megatron_packed_sft.train.model_and_optimizer import build_model_and_optimizer
    from megatron_packed_sft.train.pretrained import lora_settings, recorded_peft
    from megatron_packed_sft.train.report import NO_COPIES, ConsoleReporter, Reporter
    from megatron_packed_sft.train.trackers import TrackedRun, open_trackers

    chosen = [resumption]  # rank 0's: on a shared file system the others may see a stale listing
    torch.distributed.broadcast_object_list(chosen, src=0)
    [resumption] = chosen
    _refuse_different_data(data.dataset.fingerprint)
    schedule = _schedule(config, data, resumption)
    weights = None
    if resumption is None and config.model.path is not None:
        weights = HuggingFaceFolder.open(config.model.path)
    trained = build_model_and_optimizer(
        shape,
        config,
        schedule,
        backend=backend,
        sequence_length=data.sequence_length,
        weights=weights,
        lora=lora_settings(recorded_peft(config.peft), config.seed),
    )
    record = _record(weights, resumption, local_path(config.output))
    trainer = Trainer(config, data, schedule, trained, checkpoints, backend.device, record)
    if resumption is not None:
        trainer.resume(resumption.checkpoint, resumption.state)
    reporter = Reporter()
    notes: list[str] = []
    if own_rank() == 0:
        output = local_path(config.output)
        removed = checkpoints.remove_leftovers()
        trackers, notes = open_trackers(config.logger.names, TrackedRun(output, trainer.step, asdict(config)))
        metrics = MetricsFile(output, first_step=trainer.step, trackers=trackers)
        reporter = ConsoleReporter(metrics, first_step=trainer.step, num_steps=schedule.num_steps, as_json=config.json)
        notes += [f"removed {name}, an unfinished checkpoint of a run that was killed" for name in removed]
    opening = _opening_lines(data, schedule, backend, resumption)
    about_copies = _copy_lines(copies, copy_notes)
    for line in [*opening, *_weights_lines(config, record, resumption), *about_copies, *notes]:
        reporter.say(line)
    sender = None
    if copies is not None and own_rank() == 0:
        sender = CopySender(copies, checkpoints, keep=config.checkpoint.keep, say=reporter.say)
        if resumption is not None and resumption.checkpoint.parent == checkpoints.path:
            sender.add(resumption.checkpoint)  # its copy may be missing
    trainer.copies = sender
    missing = None
    try:
        end = trainer.run(reporter)
        stop_distributed()  # the other ranks need not wait for what is still being copied
        if sender is not None:
            missing = sender.finish(was_signalled=end is not None)
        reporter.summarize(end, NO_COPIES if sender is None else sender.summary())
    finally:
        if sender is not None:
            sender.abandon()
        reporter.close()
    return missing


def _record(weights: HuggingFaceFolder | None, resumption: Resumption | None, output: Path) -> Mapping[str, Any]:
    """Return the record of the weights that the run started from; rank 0 writes it. Collective for a new run."""
    from megatron_packed_sft.train.pretrained import record_of, write_record

    if resumption is not None:
        return resumption.state.pretrained
    record = {} if weights is None else record_of(weights)
    if record and own_rank() == 0:
        write_record(record, output)
    return record


def _copy_lines(copies: CopiedRun | None, notes: Sequence[str]) -> list[str]:
    """Return lines about the copies, with the notes of all ranks, any of which may have fetched; a collective call."""
    import torch

    found: list[Any] = [None] * num_ranks()
    torch.distributed.all_gather_object(found, notes)
    lines = [] if copies is None else [f"copies of checkpoints: {copies.shown}"]
    return [*lines, *dict.fromkeys(note for notes in found for note in notes)]


def _weights_lines(config: TrainConfig, record: Mapping[str, Any], resumption: Resumption | None) -> Iterator[str]:
    if record:
        started = "weights" if resumption is None else "this run started from"
        yield f"{started}: {record['path']} ({record['family']}, {record['dtype']}, checksum {record['checksum']})"
    if resumption is not None and config.model.path is not None:
        yield f"model.path={config.model.path} is not read, because the run resumes from a checkpoint"


def _schedule(config: TrainConfig, data: TrainingData, resumption: Resumption | None) -> StepSchedule:
    state = None if resumption is None else resumption.state
    return schedule_steps(
        config.train,
        num_bins=len(data.dataset),
        num_sequences=data.dataset.source.figures.num_sequences,
        data_parallel_size=data_parallel_size(num_ranks(), config.parallel),
        num_steps_done=0 if state is None else state.step,
        num_bins_done=0 if state is None else LoaderState.from_dict(state.data).consumed_samples,
    )


def _refuse_other_run(
    resumption: Resumption, config: TrainConfig, data: TrainingData, shape: ModelShape, schedule: StepSchedule
) -> None:
    """Refuse to resume with a different model or different data, naming the keys of the configuration."""
    from megatron_packed_sft.train.checkpoint import recorded_model, refuse_other_adapters, refuse_other_model
    from megatron_packed_sft.train.data import training_loader
    from megatron_packed_sft.train.pretrained import recorded_peft

    checkpoint, state = resumption
    refuse_other_model(checkpoint, state.model, recorded_model(shape, config))
    refuse_other_adapters(checkpoint, state.peft, recorded_peft(config.peft))
    loader = training_loader(data, config, num_bins=schedule.num_bins)
    try:
        loader.load_state_dict(dict(state.data))
    except StateMismatchError as error:  # the loader names its own argument; here it is a key
        override = f"data.allow_mismatch=[{', '.join(error.differing)}]"
        static = " (static packs are aligned to the data-parallel ranks, so their number counts, too)"
        hint = static if config.packing_mode == STATIC else ""
        raise InvalidInputError(
            f"cannot resume from {checkpoint}: {error.problem}{hint}, or set {override} to resume anyway"
        ) from None
    except InvalidInputError as error:
        raise InvalidInputError(f"cannot resume from {checkpoint}: {error}") from None


def _refuse_different_data(fingerprint: str) -> None:
    """Refuse ranks that opened different data, or planned different packs of it; a collective call."""
    import torch

    found: list[Any] = [None] * num_ranks()
    torch.distributed.all_gather_object(found, fingerprint)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise InvalidInputError(
                f"rank {rank} opened other data than rank 0 (fingerprint {other} instead of {found[0]}); give all "
                "ranks the same files, and samples that do not depend on the rank"
            )


def _silence_known_warnings() -> None:
    """Hide Megatron-Core's warnings about Apex and its own use of torch, on which a user cannot act."""
    for message in (".*Apex (is|are) not installed", "full scope is deprecated"):
        warnings.filterwarnings("ignore", message, category=UserWarning)
    for message in ("`load_state_dict` is deprecated", "Please use DTensor"):
        warnings.filterwarnings("ignore", message, category=FutureWarning)
    # A checkpoint that cannot be written is reported by our own error.
    logging.getLogger("megatron.core.dist_checkpointing.strategies.filesystem_async").setLevel(logging.CRITICAL)


def _blend_lines(data: TrainingData, schedule: StepSchedule) -> Iterator[str]:
    if data.blended is None:
        return
    blend = data.blended.order(schedule.num_bins).blend
    start, end = ([weight / blend.stages.total for weight in blend.stages.weights[edge]] for edge in (0, -1))
    if blend.annealing is None:
        shares = zip(data.blended.names, start, strict=True)
        yield f"blend: {', '.join(f'{name} {share:.2%}' for name, share in shares)}"
        return
    moves = (
        f"{name} {before:.2%} to {after:.2%}"
        for name, before, after in zip(data.blended.names, start, end, strict=True)
    )
    first, last = blend.annealing.first, blend.annealing.last
    yield f"blend: {', '.join(moves)}, from bin {first:,} to bin {last:,} of {schedule.num_bins:,}"


def _opening_lines(
    data: TrainingData, schedule: StepSchedule, backend: Backend, resumption: Resumption | None
) -> Iterator[str]:
    source = data.dataset.source
    num_bins = plural(len(data.dataset), "bin")
    yield f"data: {source.description}, {num_bins} of up to {source.figures.pack_size:,} tokens"
    for name, dataset in data.validation.items():
        yield f"validation: {name}, {plural(len(dataset), 'bin')}"
    yield (
        f"steps: {schedule.num_steps:,}, bins per step: {schedule.bins_per_step:,}, forward passes per step and rank: "
        f"{schedule.num_microbatches:,}, ranks: {num_ranks():,} ({backend.device_type}, {backend.distributed_backend})"
    )
    yield f"loss: {_LOSSES[data.loss_kind]}"
    yield from _blend_lines(data, schedule)
    yield from schedule.notes
    yield from data.notes
    if resumption is not None:
        yield f"resumed from {resumption.checkpoint}"
