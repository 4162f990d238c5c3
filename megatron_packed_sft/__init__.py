"""Packed SFT data for Megatron-style training.

    chat files ─ records ─▶ encode ─▶ tokens ─▶ packing ─▶ storage ─▶ data ─▶ megatron ─▶ a training step
                 read        ids+mask  stored    a plan     shards     batches  model

The folders are the data flow. `prepare` runs the left half offline, `train` the right half under torchrun. Public names
are loaded when they are first used: importing this package imports neither torch nor megatron.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_packed_sft._version import __version__

if TYPE_CHECKING:
    from megatron_packed_sft.data.batch.collate import widen
    from megatron_packed_sft.data.batch.model_helpers import (
        doc_ids_from_boundaries,
        document_mask_mod,
        require_separate_sequences,
        visible_mask,
        weighted_loss,
    )
    from megatron_packed_sft.data.datasets import (
        GPTSFTPackedDataset,
        GPTSFTPackedMemmapDataset,
        GPTSFTPackedMultiShardDataset,
        GPTSFTPlannedDataset,
        PackedDataset,
    )
    from megatron_packed_sft.data.factory import create_sft_dataset
    from megatron_packed_sft.data.huggingface.blocks import block_tokenize_fn
    from megatron_packed_sft.data.huggingface.collator import DataCollatorForCausalLM, get_pos_ids_for_packed_sequence
    from megatron_packed_sft.data.loader import PackedLoader
    from megatron_packed_sft.data.order.blend import Blend
    from megatron_packed_sft.data.order.blend_weights import AnnealedWeights
    from megatron_packed_sft.data.order.sample_order import SampleOrder
    from megatron_packed_sft.data.order.samplers import GlobalBatchSampler, IndexSampler, MicroBatchSampler
    from megatron_packed_sft.data.sample_packs import SamplePackDataset
    from megatron_packed_sft.data.static_packs import StaticPackDataset
    from megatron_packed_sft.data.token_streams import MemoryMappedDataset, TokenStreamDataset
    from megatron_packed_sft.encode.encoder import RecordEncoder
    from megatron_packed_sft.encode.options import EncodeOptions, TemplateOptions
    from megatron_packed_sft.encode.templates.load import ChatTemplate, load_template
    from megatron_packed_sft.encode.tokenizers.load import load_tokenizer
    from megatron_packed_sft.encode.tokenizers.sentencepiece import train_sentencepiece
    from megatron_packed_sft.errors import PackedSFTError
    from megatron_packed_sft.megatron.weights.families import Family, register_family
    from megatron_packed_sft.packing.options import PackOptions, Steps
    from megatron_packed_sft.packing.packer import pack
    from megatron_packed_sft.packing.parallel_layout import effective_batch
    from megatron_packed_sft.packing.plan import PackPlan
    from megatron_packed_sft.packing.strategies.registry import known_strategies, register_strategy
    from megatron_packed_sft.records.record import Conversation, RecordError, TextRecord, TokenizedRecord
    from megatron_packed_sft.records.samples.sample_chats import sample_conversations, write_sample_data
    from megatron_packed_sft.records.schemas.registry import Schema, register_schema
    from megatron_packed_sft.storage.bins import BinBlock, BinFigures, PackedBin
    from megatron_packed_sft.storage.convert import ConversionReport, convert, convert_legacy_to_memmap
    from megatron_packed_sft.storage.dataset_directory import DatasetDirectory, DatasetWriter, open_dataset
    from megatron_packed_sft.storage.flat_files import OrderedShardWriter
    from megatron_packed_sft.storage.interface import PackedShard, PackedShardWriter, Storage
    from megatron_packed_sft.storage.legacy.reader import LegacyShard
    from megatron_packed_sft.storage.legacy.writer import LegacyPickleWriter
    from megatron_packed_sft.storage.memmap_v1.manifest import ShardManifest
    from megatron_packed_sft.storage.memmap_v1.reader import MemmapShard
    from megatron_packed_sft.storage.memmap_v1.writer import MemmapShardWriter
    from megatron_packed_sft.storage.parquet import ParquetShard, ParquetShardWriter
    from megatron_packed_sft.storage.registry import create_shard_writer, open_shard, register_storage, storage_names
    from megatron_packed_sft.storage.remote_shard import write_memmap_to_cloud
    from megatron_packed_sft.storage.token_stream.options import StreamOptions
    from megatron_packed_sft.storage.token_stream.reader import TokenStream, open_token_stream
    from megatron_packed_sft.storage.validate import Finding, ValidationReport, validate
    from megatron_packed_sft.tokens.materialize import materialize, materialize_shards
    from megatron_packed_sft.tokens.store import TokenStore, open_token_store, publish_store
    from megatron_packed_sft.tokens.writer import TokenPartWriter

# Public name -> the module that defines it.
_HOMES = {
    "AnnealedWeights": "data.order.blend_weights",
    "BinBlock": "storage.bins",
    "BinFigures": "storage.bins",
    "Blend": "data.order.blend",
    "ChatTemplate": "encode.templates.load",
    "Conversation": "records.record",
    "ConversionReport": "storage.convert",
    "DataCollatorForCausalLM": "data.huggingface.collator",
    "DatasetDirectory": "storage.dataset_directory",
    "DatasetWriter": "storage.dataset_directory",
    "EncodeOptions": "encode.options",
    "Family": "megatron.weights.families",
    "Finding": "storage.validate",
    "GPTSFTPackedDataset": "data.datasets",
    "GPTSFTPackedMemmapDataset": "data.datasets",
    "GPTSFTPackedMultiShardDataset": "data.datasets",
    "GPTSFTPlannedDataset": "data.datasets",
    "GlobalBatchSampler": "data.order.samplers",
    "IndexSampler": "data.order.samplers",
    "LegacyPickleWriter": "storage.legacy.writer",
    "LegacyShard": "storage.legacy.reader",
    "MemmapShard": "storage.memmap_v1.reader",
    "MemmapShardWriter": "storage.memmap_v1.writer",
    "MemoryMappedDataset": "data.token_streams",
    "MicroBatchSampler": "data.order.samplers",
    "OrderedShardWriter": "storage.flat_files",
    "PackOptions": "packing.options",
    "PackPlan": "packing.plan",
    "PackedBin": "storage.bins",
    "PackedDataset": "data.datasets",
    "PackedLoader": "data.loader",
    "PackedSFTError": "errors",
    "PackedShard": "storage.interface",
    "PackedShardWriter": "storage.interface",
    "ParquetShard": "storage.parquet",
    "ParquetShardWriter": "storage.parquet",
    "RecordEncoder": "encode.encoder",
    "RecordError": "records.record",
    "SampleOrder": "data.order.sample_order",
    "SamplePackDataset": "data.sample_packs",
    "Schema": "records.schemas.registry",
    "ShardManifest": "storage.memmap_v1.manifest",
    "StaticPackDataset": "data.static_packs",
    "Steps": "packing.options",
    "Storage": "storage.interface",
    "StreamOptions": "storage.token_stream.options",
    "TemplateOptions": "encode.options",
    "TextRecord": "records.record",
    "TokenPartWriter": "tokens.writer",
    "TokenStore": "tokens.store",
    "TokenStream": "storage.token_stream.reader",
    "TokenStreamDataset": "data.token_streams",
    "TokenizedRecord": "records.record",
    "ValidationReport": "storage.validate",
    "block_tokenize_fn": "data.huggingface.blocks",
    "convert": "storage.convert",
    "convert_legacy_to_memmap": "storage.convert",
    "create_sft_dataset": "data.factory",
    "create_shard_writer": "storage.registry",
    "doc_ids_from_boundaries": "data.batch.model_helpers",
    "document_mask_mod": "data.batch.model_helpers",
    "effective_batch": "packing.parallel_layout",
    "get_pos_ids_for_packed_sequence": "data.huggingface.collator",
    "known_strategies": "packing.strategies.registry",
    "load_template": "encode.templates.load",
    "load_tokenizer": "encode.tokenizers.load",
    "materialize": "tokens.materialize",
    "materialize_shards": "tokens.materialize",
    "open_dataset": "storage.dataset_directory",
    "open_shard": "storage.registry",
    "open_token_store": "tokens.store",
    "open_token_stream": "storage.token_stream.reader",
    "pack": "packing.packer",
    "publish_store": "tokens.store",
    "register_family": "megatron.weights.families",
    "register_schema": "records.schemas.registry",
    "register_storage": "storage.registry",
    "register_strategy": "packing.strategies.registry",
    "require_separate_sequences": "data.batch.model_helpers",
    "sample_conversations": "records.samples.sample_chats",
    "storage_names": "storage.registry",
    "train_sentencepiece": "encode.tokenizers.sentencepiece",
    "validate": "storage.validate",
    "visible_mask": "data.batch.model_helpers",
    "weighted_loss": "data.batch.model_helpers",
    "widen": "data.batch.collate",
    "write_memmap_to_cloud": "storage.remote_shard",
    "write_sample_data": "records.samples.sample_chats",
}

__all__ = [
    "AnnealedWeights",
    "BinBlock",
    "BinFigures",
    "Blend",
    "ChatTemplate",
    "Conversation",
    "ConversionReport",
    "DataCollatorForCausalLM",
    "DatasetDirectory",
    "DatasetWriter",
    "EncodeOptions",
    "Family",
    "Finding",
    "GPTSFTPackedDataset",
    "GPTSFTPackedMemmapDataset",
    "GPTSFTPackedMultiShardDataset",
    "GPTSFTPlannedDataset",
    "GlobalBatchSampler",
    "IndexSampler",
    "LegacyPickleWriter",
    "LegacyShard",
    "MemmapShard",
    "MemmapShardWriter",
    "MemoryMappedDataset",
    "MicroBatchSampler",
    "OrderedShardWriter",
    "PackOptions",
    "PackPlan",
    "PackedBin",
    "PackedDataset",
    "PackedLoader",
    "PackedSFTError",
    "PackedShard",
    "PackedShardWriter",
    "ParquetShard",
    "ParquetShardWriter",
    "RecordEncoder",
    "RecordError",
    "SampleOrder",
    "SamplePackDataset",
    "Schema",
    "ShardManifest",
    "StaticPackDataset",
    "Steps",
    "Storage",
    "StreamOptions",
    "TemplateOptions",
    "TextRecord",
    "TokenPartWriter",
    "TokenStore",
    "TokenStream",
    "TokenStreamDataset",
    "TokenizedRecord",
    "ValidationReport",
    "__version__",
    "block_tokenize_fn",
    "convert",
    "convert_legacy_to_memmap",
    "create_sft_dataset",
    "create_shard_writer",
    "doc_ids_from_boundaries",
    "document_mask_mod",
    "effective_batch",
    "get_pos_ids_for_packed_sequence",
    "known_strategies",
    "load_template",
    "load_tokenizer",
    "materialize",
    "materialize_shards",
    "open_dataset",
    "open_shard",
    "open_token_store",
    "open_token_stream",
    "pack",
    "publish_store",
    "register_family",
    "register_schema",
    "register_storage",
    "register_strategy",
    "require_separate_sequences",
    "sample_conversations",
    "storage_names",
    "train_sentencepiece",
    "validate",
    "visible_mask",
    "weighted_loss",
    "widen",
    "write_memmap_to_cloud",
    "write_sample_data",
]


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
    return sorted(__all__)
