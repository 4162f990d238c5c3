"""Token caches: texts and chats tokenized once into flat files of ids, and the datasets that sample from them.

    from megatron_packed_sft.caches import build_pretrain_cache, PretrainTokenStreamDataset

See docs/caches.md. Names are loaded when they are first used: building and sampling need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_packed_sft.caches.build_sources import build_all
    from megatron_packed_sft.caches.config import read_config
    from megatron_packed_sft.caches.meta import read_meta, sha256_file, write_meta
    from megatron_packed_sft.caches.pretrain_cache import build_pretrain_cache
    from megatron_packed_sft.caches.pretrain_dataset import PretrainTokenStreamDataset
    from megatron_packed_sft.caches.sft_cache import Message, build_sft_cache
    from megatron_packed_sft.caches.sft_dataset import SFTExampleDataset
    from megatron_packed_sft.caches.text_encoder import SPECIAL_TOKENS

_HOMES = {
    "SPECIAL_TOKENS": "text_encoder",
    "Message": "sft_cache",
    "PretrainTokenStreamDataset": "pretrain_dataset",
    "SFTExampleDataset": "sft_dataset",
    "build_all": "build_sources",
    "build_pretrain_cache": "pretrain_cache",
    "build_sft_cache": "sft_cache",
    "read_config": "config",
    "read_meta": "meta",
    "sha256_file": "meta",
    "write_meta": "meta",
}
__all__ = [
    "SPECIAL_TOKENS",
    "Message",
    "PretrainTokenStreamDataset",
    "SFTExampleDataset",
    "build_all",
    "build_pretrain_cache",
    "build_sft_cache",
    "read_config",
    "read_meta",
    "sha256_file",
    "write_meta",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
