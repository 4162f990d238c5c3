"""Packed SFT data for Megatron-style training.

    chat files ─ records ─▶ encode ─▶ tokens ─▶ packing ─▶ storage ─▶ data ─▶ megatron ─▶ a training step
                 read        ids+mask  stored    a plan     shards     batches  model

The folders are the data flow. `prepare` runs the left half offline, `train` the right half under torchrun. docs/api.md
lists the public names by task. A name is imported when it is first used: importing this package imports neither torch
nor megatron.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any, cast

from megatron_packed_sft._version import __version__ as __version__

# The public names, listed once: type checkers read these lines as they are, and `_HOMES` below is made of them.
if TYPE_CHECKING:
    # isort: off
    # Open: packed data as samples and batches.
    from megatron_packed_sft.data.factory import create_sft_dataset as create_sft_dataset
    from megatron_packed_sft.data.options import BatchOptions as BatchOptions
    from megatron_packed_sft.data.options import OpenOptions as OpenOptions
    from megatron_packed_sft.data.options import StaticPacking as StaticPacking
    from megatron_packed_sft.storage.token_stream.options import StreamOptions as StreamOptions

    # Loop: batches for a training loop, and what a model needs beside them.
    from megatron_packed_sft.data.loader import PackedLoader as PackedLoader
    from megatron_packed_sft.data.order.samplers import GlobalBatchSampler as GlobalBatchSampler
    from megatron_packed_sft.data.order.samplers import MicroBatchSampler as MicroBatchSampler
    from megatron_packed_sft.data.batch.collate import widen as widen
    from megatron_packed_sft.data.batch.model_helpers import require_separate_sequences as require_separate_sequences
    from megatron_packed_sft.data.batch.model_helpers import weighted_loss as weighted_loss

    # Hugging Face: packing inside datasets.map, and a collator for Trainer.
    from megatron_packed_sft.data.huggingface_blocks import block_tokenize_fn as block_tokenize_fn
    from megatron_packed_sft.data.huggingface_collator import DataCollatorForCausalLM as DataCollatorForCausalLM
    from megatron_packed_sft.data.huggingface_collator import (
        get_pos_ids_for_packed_sequence as get_pos_ids_for_packed_sequence,
    )

    # Encode: from text and chats to token ids and train masks.
    from megatron_packed_sft.encode.encoder import RecordEncoder as RecordEncoder
    from megatron_packed_sft.encode.options import EncodeOptions as EncodeOptions
    from megatron_packed_sft.encode.options import TemplateOptions as TemplateOptions
    from megatron_packed_sft.encode.templates.load import load_template as load_template
    from megatron_packed_sft.encode.tokenizers.interface import load_tokenizer as load_tokenizer
    from megatron_packed_sft.encode.tokenizers.sentencepiece import train_sentencepiece as train_sentencepiece
    from megatron_packed_sft.records.record import Conversation as Conversation

    # Pack: from lengths to a plan.
    from megatron_packed_sft.packing.packer import pack as pack
    from megatron_packed_sft.packing.options import PackOptions as PackOptions
    from megatron_packed_sft.packing.plan import PackPlan as PackPlan
    from megatron_packed_sft.packing.parallel_layout import effective_batch as effective_batch

    # Write: sequences to a token store, a plan to shards.
    from megatron_packed_sft.tokens.writer import TokenPartWriter as TokenPartWriter
    from megatron_packed_sft.tokens.store import publish_store as publish_store
    from megatron_packed_sft.tokens.store import open_token_store as open_token_store
    from megatron_packed_sft.tokens.materialize import materialize_shards as materialize_shards
    from megatron_packed_sft.storage.dataset_directory import DatasetWriter as DatasetWriter
    from megatron_packed_sft.storage.registry import create_shard_writer as create_shard_writer

    # Convert and inspect: shards from one storage to another, and a look at what they hold; without torch.
    from megatron_packed_sft.storage.convert import convert as convert
    from megatron_packed_sft.storage.validate import validate as validate
    from megatron_packed_sft.storage.registry import open_shard as open_shard
    from megatron_packed_sft.storage.dataset_directory import open_dataset as open_dataset
    from megatron_packed_sft.storage.token_stream.reader import open_token_stream as open_token_stream

    # Extend: storages, strategies, schemas and model families of your own.
    from megatron_packed_sft.storage.interface import Storage as Storage
    from megatron_packed_sft.storage.bins import PackedBin as PackedBin
    from megatron_packed_sft.storage.registry import register_storage as register_storage
    from megatron_packed_sft.packing.strategies.registry import register_strategy as register_strategy
    from megatron_packed_sft.records.schemas.registry import Schema as Schema
    from megatron_packed_sft.records.schemas.registry import register_schema as register_schema
    from megatron_packed_sft.megatron.weights.families import register_family as register_family

    # Errors: whatever this package raises.
    from megatron_packed_sft.errors import PackedSFTError as PackedSFTError

_SOURCE = cast("Any", __spec__).loader.get_source(__name__)
# Public name -> the module that defines it.
_HOMES: dict[str, str] = {
    name: module for module, name in re.findall(r"from megatron_packed_sft\.([\w.]+) import \(?\s*(\w+) as \2", _SOURCE)
}
del _HOMES["__version__"]

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from megatron_packed_sft.support.imports import torch_is_missing

        raise torch_is_missing(name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
