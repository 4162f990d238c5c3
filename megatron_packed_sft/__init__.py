"""Packed SFT data for Megatron-style training.

    chat files ─ records ─▶ encode ─▶ tokens ─▶ packing ─▶ storage ─▶ data ─▶ megatron ─▶ a training step
                 read rows   ids+mask  stored    a plan     shards     samples  model glue
                                       once      (pure)     (files)    batches

The folders are the data flow. This release has `storage`; the others follow. Importing this package imports neither
torch nor megatron: public names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_packed_sft._version import __version__

if TYPE_CHECKING:
    from megatron_packed_sft.errors import PackedSFTError
    from megatron_packed_sft.storage.bins import BinBlock, PackedBin
    from megatron_packed_sft.storage.convert import ConversionReport, convert
    from megatron_packed_sft.storage.dataset_directory import DatasetDirectory, DatasetWriter, open_dataset
    from megatron_packed_sft.storage.legacy_reader import LegacyShard
    from megatron_packed_sft.storage.legacy_writer import LegacyPickleWriter
    from megatron_packed_sft.storage.manifest import ShardManifest
    from megatron_packed_sft.storage.memmap_reader import MemmapShard
    from megatron_packed_sft.storage.memmap_writer import MemmapShardWriter
    from megatron_packed_sft.storage.readers import PackedShard, open_shard
    from megatron_packed_sft.storage.report import Finding, ValidationReport
    from megatron_packed_sft.storage.validate import validate
    from megatron_packed_sft.storage.writers import PackedShardWriter, create_shard_writer

# Public name -> the module that defines it.
_HOMES = {
    "BinBlock": "storage.bins",
    "ConversionReport": "storage.convert",
    "DatasetDirectory": "storage.dataset_directory",
    "DatasetWriter": "storage.dataset_directory",
    "Finding": "storage.report",
    "LegacyPickleWriter": "storage.legacy_writer",
    "LegacyShard": "storage.legacy_reader",
    "MemmapShard": "storage.memmap_reader",
    "MemmapShardWriter": "storage.memmap_writer",
    "PackedBin": "storage.bins",
    "PackedSFTError": "errors",
    "PackedShard": "storage.readers",
    "PackedShardWriter": "storage.writers",
    "ShardManifest": "storage.manifest",
    "ValidationReport": "storage.report",
    "convert": "storage.convert",
    "create_shard_writer": "storage.writers",
    "open_dataset": "storage.dataset_directory",
    "open_shard": "storage.readers",
    "validate": "storage.validate",
}

__all__ = [
    "BinBlock",
    "ConversionReport",
    "DatasetDirectory",
    "DatasetWriter",
    "Finding",
    "LegacyPickleWriter",
    "LegacyShard",
    "MemmapShard",
    "MemmapShardWriter",
    "PackedBin",
    "PackedSFTError",
    "PackedShard",
    "PackedShardWriter",
    "ShardManifest",
    "ValidationReport",
    "__version__",
    "convert",
    "create_shard_writer",
    "open_dataset",
    "open_shard",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
