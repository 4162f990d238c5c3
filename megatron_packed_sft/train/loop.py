"""The training loop: steps, metrics, checkpoints and validations, until the last step or a signal.

loader ─▶ micro batches ─▶ pipeline schedule ─▶ gradients ─▶ optimizer, scheduler     one step
                                └─ losses ─▶ meter ─▶ record ─▶ reporter              every log_every steps
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_packed_sft.data.batch.contracts import Batch
from megatron_packed_sft.data.order.blend import BlendOrder, SourceProgress
from megatron_packed_sft.errors import PackedSFTError, StorageIOError
from megatron_packed_sft.megatron.backend import seed_random_numbers
from megatron_packed_sft.megatron.forward_step import forward_step
from megatron_packed_sft.support.atomic import os_errors, replace_file
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.train.checkpoint import CheckpointDirectory, TrainingState, recorded_model
from megatron_packed_sft.train.checkpoint_copies import CopySender
from megatron_packed_sft.train.config import TrainConfig
from megatron_packed_sft.train.data import CountedBatches, TrainingData, training_loader, validation_loader
from megatron_packed_sft.train.metrics import StepMeter, step_record
from megatron_packed_sft.train.model_and_optimizer import ModelAndOptimizer
from megatron_packed_sft.train.pretrained import recorded_peft
from megatron_packed_sft.train.ranks import StopRequest
from megatron_packed_sft.train.report import EarlyEnd, Reporter
from megatron_packed_sft.train.samples import answer_greedily, as_text, choose_samples
from megatron_packed_sft.train.step_schedule import StepSchedule

_LOSS, _TRAINED = "lm loss", "trained tokens"  # the keys of `forward_step`'s report
_SEEDS_PER_STEP = 1_000_003  # far apart, because pipeline stages and tensor-parallel ranks add to a seed


class Trainer:
    """A run in progress.

    Args:
        config: the run's configuration.
        data: what `open_data` returned.
        schedule: what a step is, and how many there are.
        trained: model, optimizer and scheduler.
        checkpoints: where checkpoints go.
        device: where this rank computes.
        pretrained: what checkpoints record of the weights that the run started from.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        schedule: StepSchedule,
        trained: ModelAndOptimizer,
        checkpoints: CheckpointDirectory,
        device: torch.device,
        pretrained: Mapping[str, Any] | None = None,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._config = config
        self._data = data
        self._schedule = schedule
        self._trained = trained
        self._checkpoints = checkpoints
        self._device = device
        self._pretrained = pretrained or {}
        # Only the last stage has losses, and its tensor-parallel ranks have the same ones: count one of them.
        is_last_stage = parallel_state.is_pipeline_last_stage()
        self._is_counted = is_last_stage and parallel_state.get_tensor_model_parallel_rank() == 0
        # Context-parallel ranks have parts of the losses, but read the same tokens.
        self._reads_for_others = parallel_state.get_context_parallel_rank() == 0
        self._ranks = {
            "data_parallel_rank": parallel_state.get_data_parallel_rank(),
            "data_parallel_size": parallel_state.get_data_parallel_world_size(),
        }
        self._loader = training_loader(
            data, config, num_bins=schedule.num_bins, global_batch_size=schedule.bins_per_step, **self._ranks
        )
        self._forward_backward: Callable[..., list[dict[str, torch.Tensor]]] = get_forward_backward_func()
        self._stopping: EarlyStopping | None = None
        self._saved_step = -1
        self.copies: CopySender | None = None  # only the first rank has one
        self.step = 0

    def resume(self, checkpoint: Path, state: TrainingState) -> None:
        """Continue from a checkpoint; a collective call."""
        self._loader.load_state_dict(dict(state.data))
        self._trained.load(checkpoint, state.scheduler)
        self.step = self._saved_step = state.step

    def run(self, reporter: Reporter) -> EarlyEnd | None:
        """Train to the last step, or save and return why the run ends before: a signal, or early stopping."""
        config = self._config
        meter = self._meter()
        self._data.dataset.fetch_batch([0])  # loads or compiles the kernels before the first step is timed
        batches = CountedBatches(iter(self._loader), vocab_size=self._data.vocab_size, source=self._data.dataset.source)
        self._stopping = self._early_stopping(reporter)
        with StopRequest() as stop:
            self._validate(self._owed_validations(reporter), reporter, stop)
            while self.step < self._schedule.num_steps:
                if self._stopping is not None and self._stopping.is_due:
                    return self._end_early(reporter)
                learning_rate, grad_norm = self._train_step(batches, meter)
                is_last = self.step == self._schedule.num_steps
                stopped_by = stop.received_by_any_rank(self._device)
                if is_last or stopped_by or _is_due(self.step, config.train.log_every):
                    self._record(meter, learning_rate, grad_norm, reporter)
                if is_last or stopped_by or _is_due(self.step, config.checkpoint.every):
                    self._save(reporter)
                if stopped_by and not is_last:
                    return EarlyEnd(stopped_by.name, "to resume: run the same command again")
                if is_last or _is_due(self.step, config.validation.every):
                    self._validate(self._data.validation, reporter, stop)
        return None

    def _early_stopping(self, reporter: Reporter) -> EarlyStopping | None:
        settings, watched = self._config.validation, self._data.watched
        if settings.patience is None or watched is None:
            return None
        shared = [reporter.validation_losses(watched)]
        torch.distributed.broadcast_object_list(shared, src=0)
        return EarlyStopping(patience=settings.patience, losses=shared[0])

    def _end_early(self, reporter: Reporter) -> EarlyEnd:
        assert self._stopping is not None
        if self._saved_step != self.step:
            self._save(reporter)
        return EarlyEnd(
            "early stopping",
            f"the loss on {self._data.watched} has not fallen below {self._stopping.best:.4f} for "
            f"{self._config.validation.patience} validations; raise validation.patience to train on",
        )

    def _train_step(self, batches: CountedBatches, meter: StepMeter) -> tuple[float, float]:
        """Do one optimizer step; return its learning rate and gradient norm."""
        start, waited_before = time.perf_counter(), self._loader.wait_seconds
        model, optimizer, scheduler = self._trained.model, self._trained.optimizer, self._trained.scheduler
        if self._config.model.dropout:
            # By the step, so that a resumed run drops what it would have dropped.
            seed_random_numbers(self._config.seed + _SEEDS_PER_STEP * (self.step + 1))
        model.zero_grad_buffer()
        optimizer.zero_grad()
        meter.add_losses(self._pass(batches, self._schedule.num_microbatches, forward_only=False))
        learning_rate: float = optimizer.param_groups[0]["lr"]  # all groups follow the same schedule
        _, norm, _ = optimizer.step()
        grad_norm = math.nan if norm is None else float(norm)  # None: clipping is off, so the norm was not computed
        self.step += 1
        if norm is not None and not math.isfinite(grad_norm):
            raise PackedSFTError(
                f"the gradients of step {self.step} are not finite (norm {grad_norm}); resume from the last "
                "checkpoint with a lower optimizer.learning_rate, and check the data of that step"
            )
        scheduler.step(increment=self._schedule.bins_per_step)
        num_tokens, num_positions = batches.take_counts() if self._reads_for_others else (0, 0)
        meter.add_step(
            num_tokens=num_tokens,
            num_positions=num_positions,
            seconds=time.perf_counter() - start,
            data_seconds=self._loader.wait_seconds - waited_before,
        )
        return learning_rate, grad_norm

    def _pass(self, batches: Iterator[Batch], num_microbatches: int, *, forward_only: bool) -> list[torch.Tensor]:
        """Run micro batches through the pipeline; return what `StepMeter` adds of each, on the last stage."""
        reports = self._run_schedule(forward_step, batches, num_microbatches, forward_only=forward_only)
        return [torch.cat([report[_LOSS], report[_TRAINED].reshape(1)]) for report in reports]

    def _run_schedule(
        self, step: Callable[..., Any], batches: Iterator[Batch], num_microbatches: int, *, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        with torch.set_grad_enabled(not forward_only):
            return self._forward_backward(
                forward_step_func=step,
                data_iterator=batches,
                model=[self._trained.model],
                num_microbatches=num_microbatches,
                seq_length=self._data.sequence_length,
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _record(self, meter: StepMeter, learning_rate: float, grad_norm: float, reporter: Reporter) -> None:
        totals = meter.take()
        record = step_record(
            totals,
            step=self.step,
            loss_kind=self._data.loss_kind,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            consumed_samples=self._loader.consumed_samples,
            num_samples=len(self._data.dataset),
            sources=self._sources(),
        )
        reporter.on_steps(record, totals)

    def _sources(self) -> dict[str, SourceProgress]:
        """Return the realised mixture of a blend."""
        order = self._loader.batch_sampler.order
        return order.progress(self._loader.consumed_samples) if isinstance(order, BlendOrder) else {}

    def _save(self, reporter: Reporter) -> None:
        state = TrainingState(
            step=self.step,
            data=self._loader.state_dict(),
            scheduler=self._trained.scheduler.state_dict(),
            model={**recorded_model(self._trained.shape, self._config), "sequence_length": self._data.sequence_length},
            pretrained=self._pretrained,
            peft=recorded_peft(self._config.peft),
        )
        checkpoint = self._checkpoints.save(self._trained.sharded_state(), state)
        reporter.on_checkpoint(checkpoint)
        if self.copies is not None:
            self.copies.add(checkpoint)
        self._saved_step = self.step

    def _owed_validations(self, reporter: Reporter) -> list[str]:
        """Return what to validate on before the first step: all data at step 0, later what the last run missed."""
        owed = []
        if self.step in (0, self._schedule.num_steps) or _is_due(self.step, self._config.validation.every):
            owed = [name for name in self._data.validation if not reporter.was_validated(name, self.step)]
        shared = [owed]
        torch.distributed.broadcast_object_list(shared, src=0)
        return shared[0]

    def _validate(self, names: Iterable[str], reporter: Reporter, stop: StopRequest) -> None:
        names = list(names)
        self._trained.model.eval()
        for name in names:
            loader = validation_loader(self._data.validation[name], self._config, **self._ranks)
            batches = CountedBatches(
                iter(loader), vocab_size=self._data.vocab_size, source=self._data.validation[name].source
            )
            num_left = len(loader)
            if self._config.validation.steps is not None:
                num_left = min(num_left, self._config.validation.steps * self._schedule.num_microbatches)
            meter = self._meter()
            reporter.on_validation_start(name, self.step, num_left * self._ranks["data_parallel_size"])
            while num_left and stop.received_by_any_rank(self._device) is None:
                num_microbatches = min(num_left, self._schedule.num_microbatches)
                meter.add_losses(self._pass(batches, num_microbatches, forward_only=True))
                num_left -= num_microbatches
                reporter.on_validation_progress(num_microbatches * self._ranks["data_parallel_size"])
            if num_left:  # stopped by a signal; the run that resumes this one validates
                break
            totals = meter.take()
            reporter.on_validation_end(name, self.step, totals.loss, totals.num_trained)
            if self._stopping is not None and name == self._data.watched:
                self._stopping.add(totals.loss)
            if name == self._data.watched and self._config.validation.num_samples:
                self._write_samples(name, reporter, stop)
        self._trained.model.train()

    def _write_samples(self, name: str, reporter: Reporter, stop: StopRequest) -> None:
        """Write the model's answers to a few prompts into a file."""
        settings, dataset = self._config.validation, self._data.validation[name]
        samples, ends = choose_samples(dataset, settings.num_samples, settings.sample_tokens)
        if not samples:
            reporter.say(
                f"warning: no prompt of {name} leaves room for validation.sample_tokens={settings.sample_tokens} in "
                f"{self._data.sequence_length} positions, so there are no samples; lower it"
            )
            return
        is_complete = answer_greedily(
            samples,
            partial(self._run_schedule, forward_only=True),
            dataset=dataset,
            ends=ends,
            num_tokens=settings.sample_tokens,
            vocab_size=self._data.vocab_size,
            is_speaker=self._is_counted and self._ranks["data_parallel_rank"] == 0,
            device=self._device,
            is_stopped=lambda: stop.received_by_any_rank(self._device) is not None,
        )
        if is_complete and torch.distributed.get_rank() == 0:
            file = local_path(self._config.output) / "samples" / f"step_{self.step:06d}.txt"
            text = as_text(samples, step=self.step, name=name, tokenizer=self._data.tokenizer)
            try:
                with os_errors("write", file):
                    file.parent.mkdir(exist_ok=True)
                replace_file(file, text.encode())
            except StorageIOError as error:
                reporter.say(f"warning: {error}; training goes on")
            else:
                reporter.on_samples(file)

    def _meter(self) -> StepMeter:
        return StepMeter(self._device, is_counted=self._is_counted)


class EarlyStopping:
    """Counts validations in a row whose loss was not lower than the lowest before.

    It is made from the recorded losses, so a resumed run continues its count.

    Args:
        patience: how many of them end the run.
        losses: those that were recorded before.

    Example:
        >>> stopping = EarlyStopping(patience=2, losses=[3.0, 2.0])
        >>> for loss in (2.05, 2.1):
        ...     stopping.add(loss)
        >>> stopping.is_due, stopping.best
        (True, 2.0)
    """

    def __init__(self, *, patience: int, losses: Iterable[float] = ()) -> None:
        self._patience = patience
        self._num_worse = 0
        self.best = math.inf
        for loss in losses:
            self.add(loss)

    def add(self, loss: float) -> None:
        """Count a validation."""
        if loss < self.best:
            self.best, self._num_worse = loss, 0
        else:  # also NaN
            self._num_worse += 1

    @property
    def is_due(self) -> bool:
        """Whether the run should end now."""
        return self._num_worse >= self._patience


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
