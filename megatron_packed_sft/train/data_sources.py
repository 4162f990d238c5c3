"""Where the recipe's bins come from: packed before, or with packing_mode=static raw samples that are packed now.

every rank   token store, or data.samples(data.path) ─ lengths: one rank computes, all read ─▶ the same plan
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_packed_sft.data.factory import AUTO, OpenedBins, open_bins
from megatron_packed_sft.data.made_with import Tolerance
from megatron_packed_sft.data.packing_modes import STATIC
from megatron_packed_sft.data.sample_packs import StaticPlan
from megatron_packed_sft.data.static_packs import Source, StaticPacking, is_packed, open_static_packs
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.parallel_layout import ParallelLayout
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from megatron_packed_sft.support.imports import function_named
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.train.config import TrainConfig
from megatron_packed_sft.train.ranks import num_ranks
from megatron_packed_sft.train.step_schedule import data_parallel_size

LENGTH_CACHE = "sample_lengths"  # in a run's directory


def open_trained(
    config: TrainConfig, pad_id: int, layout: ParallelLayout, tolerance: Tolerance, stream: StreamOptions
) -> tuple[OpenedBins, list[str]]:
    """Open what to train on; for static packs also return what their plan says of itself."""
    data = config.data
    if config.packing_mode == STATIC:
        source, plan = _open_raw_samples(
            config,
            data.path,
            pad_id=pad_id,
            world_size=data_parallel_size(num_ranks(), config.parallel),
            pad_seq_to_mult=layout.sequence_multiple,
        )
        return OpenedBins(source, None), plan.lines
    opened = open_bins(
        data.path,
        split=data.split,
        packed_storage=config.packed_storage if data.plan is None else AUTO,
        plan=data.plan,
        weights=data.weights,
        blend=data.blend,
        seed=config.seed,
        pad_id=pad_id,
        tolerance=tolerance,
        stream=stream,
        cache_dir=data.cache_dir,
        cache_size=data.cache_size,
    )
    return opened, []


def open_held_out(
    config: TrainConfig, path: str, pad_id: int, layout: ParallelLayout, tolerance: Tolerance, stream: StreamOptions
) -> OpenedBins:
    """Open validation data: bins, or with packing_mode=static raw samples like those that are trained on."""
    if config.packing_mode == STATIC and not is_packed(path):
        source, _ = _open_raw_samples(
            config, path, pad_id=pad_id, world_size=1, pad_seq_to_mult=layout.sequence_multiple
        )
        return OpenedBins(source, None)
    return open_bins(
        path,
        split=config.validation.split,
        tolerance=tolerance,
        stream=stream,
        cache_dir=config.data.cache_dir,
        cache_size=config.data.cache_size,
    )


def _open_raw_samples(
    config: TrainConfig, path: str, *, pad_id: int, world_size: int, pad_seq_to_mult: int = 1
) -> tuple[Source, StaticPlan]:
    """Open raw samples as static packs.

    Args:
        config: the run's configuration, checked.
        path: of a token store, or what the user's function gets.
        pad_id: aligns sequences, where a multiple is asked for.
        world_size: data-parallel ranks; 1 for validation, whose loader fills up the last batch itself.
        pad_seq_to_mult: the multiple of inputs that every sequence takes.
    """
    assert config.data.sequence_length is not None
    packing = StaticPacking(
        pack_size=config.data.sequence_length,
        drop_last=config.dataloader_drop_last,
        allow_single_long=config.packing_allow_single_long,
        full_is_oversized=config.packing_full_is_oversized,
        world_size=world_size,
        pad_seq_to_mult=pad_seq_to_mult,
    )
    samples: Any = path
    cache = None
    if config.data.samples is not None:
        samples = function_named(config.data.samples, "data.samples")(path)
        if not isinstance(getattr(samples, "fingerprint", None), str):
            raise InvalidInputError(
                f"what data.samples={config.data.samples} returned ({type(samples).__name__}) has no fingerprint; give "
                "it one, a string that changes with the samples, their template and their settings: ranks share the "
                "lengths under it, and a resumed run compares it"
            )
        cache = local_path(config.output) / LENGTH_CACHE
    return open_static_packs(samples, packing, pad_id=pad_id, length_cache=cache, progress=sys.stderr.isatty())
