"""Token caches: texts and chats tokenized once into flat files of ids, and the datasets that sample from them.

    from megatron_packed_sft.caches import build_pretrain_cache, PretrainTokenStreamDataset

See docs/caches.md. Names are loaded when they are first used: building and sampling need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_packed_sft.caches.builders import Message as Message
    from megatron_packed_sft.caches.builders import build_pretrain_cache as build_pretrain_cache
    from megatron_packed_sft.caches.builders import build_sft_cache as build_sft_cache
    from megatron_packed_sft.caches.cache_folder import read_meta as read_meta
    from megatron_packed_sft.caches.cache_folder import sha256_file as sha256_file
    from megatron_packed_sft.caches.cache_folder import write_meta as write_meta
    from megatron_packed_sft.caches.datasets import PretrainTokenStreamDataset as PretrainTokenStreamDataset
    from megatron_packed_sft.caches.datasets import SFTExampleDataset as SFTExampleDataset
    from megatron_packed_sft.caches.text_encoder import SPECIAL_TOKENS as SPECIAL_TOKENS

_HOMES = {
    "SPECIAL_TOKENS": "text_encoder",
    "Message": "builders",
    "PretrainTokenStreamDataset": "datasets",
    "SFTExampleDataset": "datasets",
    "build_pretrain_cache": "builders",
    "build_sft_cache": "builders",
    "read_meta": "cache_folder",
    "sha256_file": "cache_folder",
    "write_meta": "cache_folder",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
