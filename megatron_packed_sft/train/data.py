"""The recipe's data: datasets opened and checked, and the loaders that train and validate on them.

data.path          ─▶ create_sft_dataset ─▶ dataset ─┐
validation.paths   ─▶ create_sft_dataset ─▶ dataset ─┴ figures agree? ─▶ one sequence length, one vocabulary ─▶ loaders
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_packed_sft.data.batch.contracts import Batch
from megatron_packed_sft.data.bin_readers import BinReader
from megatron_packed_sft.data.datasets import PackedDataset
from megatron_packed_sft.data.factory import create_sft_dataset, shard_order
from megatron_packed_sft.data.loader import PackedLoader
from megatron_packed_sft.data.made_with import refuse_mixed, refuse_other_tokenizer
from megatron_packed_sft.data.options import AUTO, STATIC, BatchOptions, OpenOptions, StaticPacking
from megatron_packed_sft.data.order.blend import BlendedSources
from megatron_packed_sft.data.order.blend_weights import is_schedule
from megatron_packed_sft.data.order.sample_order import Order, SampleOrder
from megatron_packed_sft.data.shard_readers import shortage
from megatron_packed_sft.data.static_packs import StaticPackDataset, is_packed
from megatron_packed_sft.encode.templates.load import load_template_if_any
from megatron_packed_sft.encode.tokenizers.interface import Tokenizer, load_tokenizer
from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, ShardFileError
from megatron_packed_sft.megatron.weights.layout import ModelShape
from megatron_packed_sft.packing.parallel_layout import ParallelLayout
from megatron_packed_sft.remote.node_cache import node_cache
from megatron_packed_sft.storage.dataset_directory import has_dataset, open_dataset
from megatron_packed_sft.storage.megatron_indexed.index import indexed_path
from megatron_packed_sft.storage.megatron_indexed.storage import STORAGE as MEGATRON_INDEXED
from megatron_packed_sft.storage.token_stream.files import is_stream
from megatron_packed_sft.storage.token_stream.options import DEFAULT_SEQ_LENGTH, StreamOptions
from megatron_packed_sft.support.imports import function_named
from megatron_packed_sft.support.paths import is_url, local_path
from megatron_packed_sft.train.config import TrainConfig, ValidationConfig
from megatron_packed_sft.train.config_checks import listed_paths, named_paths
from megatron_packed_sft.train.pretrained import has_tokenizer
from megatron_packed_sft.train.ranks import num_ranks
from megatron_packed_sft.train.step_schedule import data_parallel_size

LENGTH_CACHE = "sample_lengths"  # in a run's directory

_LENGTH_MULTIPLE = 16  # at least; batches are padded to a multiple of this
_VALIDATION = "validation"  # the split to validate on, and its name in the metrics


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data of a run.

    Args:
        dataset: what to train on.
        validation: name -> what to validate on.
        sequence_length: largest number of positions in a batch.
        vocab_size: all ids are below it.
        notes: what the user should know.
        tokenizer: of data.tokenizer, or of the folder in model.path.
        blended: the sources of a blend, whose order depends on the length of the run.
        watched: the name of the data whose validation loss decides about early stopping and whose prompts are answered;
            None if neither is configured.
    """

    dataset: PackedDataset
    validation: Mapping[str, PackedDataset]
    sequence_length: int
    vocab_size: int
    notes: Sequence[str] = ()
    tokenizer: Tokenizer | None = None
    blended: BlendedSources | None = None
    watched: str | None = None

    @property
    def loss_kind(self) -> str:
        """What the training loss is a mean over: `per_token`, `weighted_per_token` or `per_conversation`."""
        options = self.dataset.options
        return "weighted_per_token" if options.weighted and options.loss == "per_token" else options.loss


def open_data(config: TrainConfig, pretrained: ModelShape | None = None) -> TrainingData:
    """Open all data of a run, and refuse what cannot be trained on.

    Args:
        config: the run's configuration.
        pretrained: the shape of the model in `model.path`, if that is set.
    """
    tokenizers = _tokenizers(config)
    tokenizer = next(iter(tokenizers.values()), None)
    layout = parallel_layout(config)
    multiple = math.lcm(_LENGTH_MULTIPLE, layout.bin_multiple)
    opener = _Opener(config, tokenizer, pretrained, layout, multiple)
    trained = opener.open_trained()
    held_out = {name: opener.open_held_out(path) for name, path in _validation_paths(config).items()}
    datasets = [trained, *held_out.values()]
    sources = [dataset.source for dataset in datasets]
    for source in sources[1:]:  # a loss over ids of another tokenizer says nothing
        refuse_mixed([*trained.source.made_with()[:1], *source.made_with()], opener.opening.tolerance)
    for source in sources:
        for key, one in tokenizers.items():
            refuse_other_tokenizer(one, source.made_with(), opener.opening.tolerance, name=f"that of {key}")
    _refuse_shared_windows(layout, sources)
    layout.refuse_unpadded((part.where, part.pad_seq_to_mult) for source in sources for part in source.made_with())
    length = _sequence_length(config, sources, multiple)
    if pretrained is None:
        vocab_size = _vocab_size(config.model.vocab_size, tokenizer, sources)
    else:
        vocab_size = pretrained.vocab_size
        _refuse_larger_vocabulary(config, vocab_size, tokenizers, sources)
    eos_id = max(dataset.eos_id for dataset in datasets)
    if eos_id >= vocab_size:
        raise InvalidInputError(f"data.eos_id is {eos_id}, but the vocabulary ends at {vocab_size - 1}")
    static_lines = trained.static_plan.lines if isinstance(trained, StaticPackDataset) else []
    return TrainingData(
        # The loaders bring the order of the whole run, whose length is not known yet.
        dataset=trained.in_stored_order().with_max_seq_length(length),
        validation={name: dataset.with_max_seq_length(length) for name, dataset in held_out.items()},
        sequence_length=length,
        vocab_size=vocab_size,
        notes=[
            *(f"static packs: {line}" for line in static_lines),
            *_template_notes(tokenizers, sources),
            *_cache_notes(config, trained.source),
        ],
        tokenizer=tokenizer,
        blended=trained.blended,
        watched=_watched(config.validation, list(held_out)),
    )


class _Opener:
    """Opens the datasets of a run, all with the same options."""

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: Tokenizer | None,
        pretrained: ModelShape | None,
        layout: ParallelLayout,
        multiple: int,
    ) -> None:
        data = config.data
        self._config = config
        self._layout = layout
        self._eos_id = data.eos_id if tokenizer is None else tokenizer.eos_id
        self._stream = _stream_options(config, tokenizer, pretrained)
        self._batch = BatchOptions(
            "mcore",
            loss=config.train.loss,
            pad_seq_length_to_mult=multiple,
            pad_to_max_length=config.parallel.pipeline > 1,
        )
        self.opening = OpenOptions(
            storage=config.packed_storage if data.plan is None else AUTO,
            verify=data.verify,
            allow_tokenizer_mismatch="tokenizer" in data.allow_mismatch,
            allow_template_mismatch="chat_template" in data.allow_mismatch,
            cache_dir=data.cache_dir,
            cache_size=data.cache_size,
            spelling="key",
        )

    def open_trained(self) -> PackedDataset:
        """Open what to train on."""
        data = self._config.data
        if self._config.packing_mode == STATIC:
            ranks = data_parallel_size(num_ranks(), self._config.parallel)
            return self._open_raw_samples(data.path, world_size=ranks)
        return create_sft_dataset(
            data.path,
            self._eos_id,
            plan=data.plan,
            weights=data.weights,
            # Weights that change need a length; any will do, because the loader makes the order of the whole run.
            max_num_samples=1 if is_schedule(data.weights) else None,
            seed=self._config.seed,
            contract=self._batch,
            stream=self._stream,
            opening=self.opening,
        )

    def open_held_out(self, path: str) -> PackedDataset:
        """Open validation data: bins, or with packing_mode=static raw samples like those that are trained on."""
        if self._config.packing_mode == STATIC and not is_packed(path):
            return self._open_raw_samples(path, world_size=1)  # the loader fills up the last batch itself
        return create_sft_dataset(
            path,
            self._eos_id,
            split=_VALIDATION,
            contract=self._batch,
            stream=_stream_options_for(path, self._stream),
            opening=replace(self.opening, storage=AUTO),
        )

    def _open_raw_samples(self, path: str, *, world_size: int) -> PackedDataset:
        """Open a token store, or what the user's function returns for the path, as static packs."""
        config, data = self._config, self._config.data
        samples: Any = path
        cache = None
        if data.samples is not None:
            samples = function_named(data.samples, "data.samples")(path)
            if not isinstance(getattr(samples, "fingerprint", None), str):
                raise InvalidInputError(
                    f"what data.samples={data.samples} returned ({type(samples).__name__}) has no fingerprint; give it "
                    "one, a string that changes with the samples, their template and their settings: ranks share the "
                    "lengths under it, and a resumed run compares it"
                )
            cache = local_path(config.output) / LENGTH_CACHE
        packing = StaticPacking(
            dataloader_drop_last=config.dataloader_drop_last,
            packing_allow_single_long=config.packing_allow_single_long,
            packing_full_is_oversized=config.packing_full_is_oversized,
            world_size=world_size,
            pad_seq_to_mult=self._layout.sequence_multiple,
            length_cache=cache,
            progress=sys.stderr.isatty(),
            text_only=True,
        )
        opening = replace(self.opening, storage=AUTO)
        return create_sft_dataset(
            samples, self._eos_id, data.sequence_length, contract=self._batch, opening=opening, packing_mode=packing
        )


def _stream_options(config: TrainConfig, tokenizer: Tokenizer | None, pretrained: ModelShape | None) -> StreamOptions:
    """Return how the token streams among the paths are read."""
    data = config.data
    paths = [*listed_paths(data.path), *named_paths(config.validation.paths).values()]
    streams = [path for path in paths if is_stream(Path(path)) or _is_indexed(path)]
    if data.sequence_length is None and streams:
        raise InvalidInputError(
            f"{streams[0]} is a token stream, which needs data.sequence_length, the length of its windows; set it, "
            f"such as data.sequence_length={DEFAULT_SEQ_LENGTH}"
        )
    vocab_size = config.model.vocab_size if pretrained is None else pretrained.vocab_size
    if tokenizer is not None and "tokenizer" not in data.allow_mismatch:
        vocab_size = tokenizer.vocab_size
    return StreamOptions(
        seq_length=data.sequence_length or DEFAULT_SEQ_LENGTH,
        pack_sequences=data.pack_sequences,
        eos_id=data.eos_id,
        file_pattern=data.file_pattern,
        dtype=data.dtype,
        vocab_size=vocab_size,
        spelling="key",
    )


def _stream_options_for(path: str, stream: StreamOptions) -> StreamOptions:
    """Return those of the options that mean something for validation data at a path."""
    if is_stream(Path(path)):
        return stream
    if _is_indexed(path):
        return replace(stream, file_pattern=None, dtype=None)
    return replace(stream, pack_sequences=False, file_pattern=None, dtype=None)


def _refuse_shared_windows(layout: ParallelLayout, sources: list[BinReader]) -> None:
    streams = [source for source in sources if source.figures.max_input_len is not None]
    if layout.context > 1 and streams:
        raise InvalidInputError(
            f"{streams[0].description}: context-parallel ranks share sequences that were padded for them, and the "
            "windows of a token stream are not; set parallel.context=1, or train on packed data alone"
        )


def _is_indexed(path: str) -> bool:
    """Return whether a path is one of Megatron's indexed datasets."""
    return MEGATRON_INDEXED.recognises(indexed_path(Path(path)))


def parallel_layout(config: TrainConfig) -> ParallelLayout:
    """Return how the ranks of a run share a bin."""
    parallel = config.parallel
    return ParallelLayout(
        tensor=parallel.tensor,
        context=parallel.context,
        sequence_parallel=parallel.sequence_parallel,
        fp8=config.optimizer.fp8,
    )


def training_loader(
    data: TrainingData,
    config: TrainConfig,
    *,
    num_bins: int | None = None,
    global_batch_size: int | None = None,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
) -> PackedLoader:
    """Return the endless stream of training batches; its state goes into checkpoints.

    Args:
        data: what `open_data` returned.
        config: gives the seed and what may differ on resume.
        num_bins: bins of the whole run; a blend whose weights change needs it.
        global_batch_size: bins per step.
        data_parallel_rank: this rank's share of them.
        data_parallel_size: number of ranks that share them.
    """
    dataset = data.dataset
    order: Order
    if data.blended is not None:
        order = data.blended.order(num_bins)
    elif config.data.shard_window is not None:
        order = shard_order(dataset.source, config.data.shard_window, config.seed)
    else:
        # Not keyed by the fingerprint, so that the same bins come in the same order from any storage. The state still
        # records the dataset's fingerprint.
        order = SampleOrder(len(dataset), config.seed, "", config.data.shuffle)
    return PackedLoader(
        dataset,
        global_batch_size=global_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        num_epochs=None,
        order=order,
        allow_mismatch=tuple(config.data.allow_mismatch),
    )


def validation_loader(
    dataset: PackedDataset, config: TrainConfig, *, data_parallel_rank: int = 0, data_parallel_size: int = 1
) -> PackedLoader:
    """Return one pass over a dataset in stored order; bins without loss fill up the last batch."""
    return PackedLoader(
        dataset,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        drop_last=False,
        shuffle=False,
    )


class CountedBatches(Iterator[Batch]):
    """Batches on their way to the model, with a count of the tokens that passed since the last `take_counts`.

    Args:
        batches: the batches of a loader.
        vocab_size: a larger id is an error: the model would crash on it, or silently learn nonsense.
        source: where the batches come from; says whether such an id can be meant.
    """

    def __init__(self, batches: Iterator[Batch], *, vocab_size: int, source: BinReader) -> None:
        self._batches = batches
        self._vocab_size = vocab_size
        self._source = source
        self._num_tokens = 0
        self._num_positions = 0

    def __next__(self) -> Batch:
        batch = next(self._batches)
        for key in ("tokens", "labels"):
            smallest, largest = batch[key].aminmax()
            if smallest < 0 or largest >= self._vocab_size:
                raise self._wrong_id(int(smallest if smallest < 0 else largest))
        num_positions = batch["tokens"].numel()
        self._num_positions += num_positions
        # Not `token_count`, which includes the padding between sequences.
        self._num_tokens += num_positions - int(batch["padding_mask"].sum())
        return batch

    def _wrong_id(self, found: int) -> PackedSFTError:
        source = self._source
        recorded = [one.vocab_size for one in getattr(source, "sources", (source,))]
        known = [size for size in recorded if size is not None]
        if found < 0 or (len(known) == len(recorded) and found >= max(known)):
            limit = "no id is negative" if found < 0 else f"its manifest says that all ids are below {max(known)}"
            return ShardFileError(
                f"{source.description} has the token id {found}, and {limit}, so a file of it is damaged; "
                "packed-sft validate names the file; restore it, or prepare the data again"
            )
        return InvalidInputError(
            f"the data has the token id {found}, but the model's vocabulary ends at {self._vocab_size - 1}; set "
            f"model.vocab_size to the tokenizer's, at least {found + 1}"
        )

    def take_counts(self) -> tuple[int, int]:
        """Return (tokens, positions) since the last call; positions without a token are padding."""
        counts = self._num_tokens, self._num_positions
        self._num_tokens = self._num_positions = 0
        return counts


def _validation_paths(config: TrainConfig) -> dict[str, str]:
    """Return name -> path of the validation data: the dataset's own split, if it has one, and validation.paths."""
    given = config.data.path
    own = {_VALIDATION: given} if isinstance(given, str) else named_paths(given)
    cache = None
    if any(map(is_url, own.values())):
        cache = node_cache(config.data.cache_dir, config.data.cache_size)
    splits = {path: open_dataset(path, cache).splits for path in own.values() if has_dataset(path, cache)}
    further = named_paths(config.validation.paths)
    own = {name: path for name, path in own.items() if _VALIDATION in splits.get(path, ())}
    for name in further.keys() & own.keys():
        if further[name] != own[name]:
            raise InvalidInputError(
                f"the name {name!r} is that of {further[name]} in validation.paths and of {own[name]} in data.path, "
                "which has a validation split of its own; give one of them another name"
            )
    return {**further, **own}


def _tokenizers(config: TrainConfig) -> dict[str, Tokenizer]:
    """Return the tokenizers that must agree with the data, by the setting that names each."""
    found = {}
    if config.data.tokenizer is not None:
        found[f"data.tokenizer={config.data.tokenizer}"] = load_tokenizer(config.data.tokenizer)
    folder = config.model.path
    if folder is not None and has_tokenizer(Path(folder)):
        found[f"model.path={folder}"] = load_tokenizer(folder)
    return found


def _template_notes(tokenizers: Mapping[str, Tokenizer], sources: list[BinReader]) -> Iterator[str]:
    """Yield a warning for data whose chat template is not the one that an exported model would carry."""
    for key, tokenizer in tokenizers.items():
        template = load_template_if_any(None, tokenizer)
        if template is None and not key.startswith("model."):
            continue  # a bare tokenizer, such as a SentencePiece file, never has one
        for source in sources:
            recorded = source.figures.chat_template_fingerprint
            if recorded is not None and (template is None or template.fingerprint != recorded):
                yield (
                    f"warning: {source.description} was written with another chat template than that of {key}, which "
                    "an exported model would carry; put the template of the data into the exported folder"
                )
                break  # once for all data


def _cache_notes(config: TrainConfig, source: BinReader) -> Iterator[str]:
    if config.data.shuffle and (found := shortage(source, config.data.shard_window, "data.{}")) is not None:
        yield f"warning: {found}"


def _refuse_larger_vocabulary(
    config: TrainConfig, vocab_size: int, tokenizers: Mapping[str, Tokenizer], sources: list[BinReader]
) -> None:
    """Refuse data or a tokenizer with ids that pretrained weights do not have."""
    sizes = {source.description: source.vocab_size for source in sources}
    sizes |= {key: tokenizer.vocab_size for key, tokenizer in tokenizers.items()}
    for name, size in sizes.items():
        if size is not None and size > vocab_size and "tokenizer" not in config.data.allow_mismatch:
            raise InvalidInputError(
                f"{name} has a vocabulary of {size:,}, but the weights of model.path={config.model.path} have "
                f"{vocab_size:,}; prepare the data with the model's own tokenizer, or set "
                "data.allow_mismatch=[tokenizer] if no larger id occurs"
            )


def _watched(settings: ValidationConfig, names: list[str]) -> str | None:
    """Return the name of the validation data that early stopping and samples look at."""
    if settings.patience is None and not settings.num_samples:
        return None
    key = "patience" if settings.patience is not None else "num_samples"
    if not names:
        raise InvalidInputError(
            f"validation.{key} needs validation data; prepare with split.validation_fraction, or set validation.paths"
        )
    return _VALIDATION if _VALIDATION in names else names[0]


def _sequence_length(config: TrainConfig, sources: list[BinReader], multiple: int) -> int:
    data = config.data
    longest = max(sources, key=lambda source: source.figures.num_positions)
    pack_size = longest.figures.num_positions
    # Batches are padded to this multiple, unless this limit is lower. A legacy file's pack size is its longest bin;
    # rounded up, its batches have the same shapes as those of shards, and the same losses.
    rounded = -(-pack_size // multiple) * multiple
    if data.sequence_length is None:
        return rounded
    if config.packing_mode == STATIC:  # a pack of one long sample may exceed it
        return max(rounded, -(-data.sequence_length // multiple) * multiple)
    if data.sequence_length < pack_size:
        raise InvalidInputError(
            f"data.sequence_length is {data.sequence_length}, but bins of {longest.description} have up to "
            f"{pack_size} tokens; leave the key out to use {pack_size}, or pack the data again for "
            f"{data.sequence_length}"
        )
    if multiple > _LENGTH_MULTIPLE and data.sequence_length % multiple:
        raise InvalidInputError(
            f"data.sequence_length is {data.sequence_length}, and the ranks of this layout share bins of a multiple of "
            f"{multiple}; leave the key out"
        )
    return data.sequence_length


def _vocab_size(asked: int | None, tokenizer: Tokenizer | None, sources: list[BinReader]) -> int:
    recorded = [source.vocab_size for source in sources] + [None if tokenizer is None else tokenizer.vocab_size]
    known = max((size for size in recorded if size is not None), default=None)
    if asked is None and known is None:
        raise InvalidInputError(
            f"{sources[0].description} does not record its vocabulary size; set model.vocab_size or data.tokenizer"
        )
    if asked is not None and known is not None and asked < known:
        raise InvalidInputError(
            f"model.vocab_size is {asked}, but the data has ids up to {known - 1}; leave the key out to use {known}"
        )
    return asked or known or 0
