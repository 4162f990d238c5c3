"""`create_sft_dataset`: one call opens whatever packed data lies there."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_packed_sft.data._tokenizer_ids import eos_id_of
from megatron_packed_sft.data.bin_readers import (
    BinReader,
    JoinedBinReader,
    LegacyBinReader,
    PlanBinReader,
    ShardBinReader,
)
from megatron_packed_sft.data.datasets import PackedDataset
from megatron_packed_sft.data.order.blend import Blend, BlendOrder
from megatron_packed_sft.data.order.sample_order import SampleOrder
from megatron_packed_sft.disk.json_document import MANIFEST
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.storage.dataset_directory import DATASET, open_dataset
from megatron_packed_sft.storage.memmap_v1.reader import open_memmap_shard
from megatron_packed_sft.storage.writers import LEGACY, MEMMAP_V1, PACKED_STORAGE
from megatron_packed_sft.tokens.store import open_token_store
from megatron_packed_sft.tokens.validate import is_token_store

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]


class Storage(NamedTuple):
    """A kind of storage: how to tell that a path is one, and how to open it (path, split) -> rows."""

    recognises: Callable[[Path], bool]
    open: Callable[[Path, str], BinReader]


def _open_memmap(path: Path, split: str) -> BinReader:
    if (path / DATASET).exists():
        return ShardBinReader.of_dataset(open_dataset(path), split)
    if (path / MANIFEST).exists():
        return ShardBinReader.of_shards([open_memmap_shard(path)])
    return ShardBinReader.of_shards([open_memmap_shard(found.parent) for found in sorted(path.glob(f"*/{MANIFEST}"))])


def _is_memmap(path: Path) -> bool:
    return path.is_dir() and (
        (path / DATASET).exists() or (path / MANIFEST).exists() or next(path.glob(f"*/{MANIFEST}"), None) is not None
    )


_STORAGES: dict[str, Storage] = {
    MEMMAP_V1: Storage(_is_memmap, _open_memmap),
    LEGACY: Storage(lambda path: path.suffix == ".npy" and path.is_file(), lambda path, split: LegacyBinReader(path)),
}


def register_storage(
    name: str, *, recognises: Callable[[Path], bool], open: Callable[[Path, str], BinReader], replace: bool = False
) -> None:
    """Teach `create_sft_dataset` another storage.

    Args:
        name: what `packed_storage` calls it.
        recognises: whether a path is of that kind; asked in the order of registration, built-in ones first.
        open: (path, split) -> a `BinReader`.
        replace: allow to replace a storage of that name.

    Example:
        >>> register_storage("mine", recognises=lambda path: path.suffix == ".mine", open=open_mine)  # doctest: +SKIP
    """
    if not replace and (name in _STORAGES or name in PACKED_STORAGE):
        raise InvalidInputError(f"storage {name!r} is registered already; choose another name, or replace=True")
    _STORAGES[name] = Storage(recognises, open)


def create_sft_dataset(
    path: PathLike | Sequence[PathLike],
    tokenizer: Any,
    seq_length: int = 2048,
    *,
    split: str = "train",
    packed_storage: str = "auto",
    plan: PathLike | PackPlan | None = None,
    weights: Sequence[float] | None = None,
    max_num_samples: int | None = None,
    seed: int = 1234,
    **arguments: Any,
) -> PackedDataset:
    """Open packed data as a dataset.

    Args:
        path: a shard, a directory of shards, a dataset directory, a legacy .npy, a glob, a token store (with `plan`),
            or a list of these.
        tokenizer: gives the EOS id; an int will do.
        seq_length: positions of a batch's rows.
        split: of dataset directories.
        packed_storage: `auto`, or a name that what is found must match: `memmap_v1`, `legacy`, or a registered one.
        plan: a plan or its file; the path is a token store then.
        weights: one per path of a list: a blend in that proportion. Without weights the list is laid end to end.
        max_num_samples: length of the dataset; see `PackedDataset`. Blends are shuffled by source; without it they have
            as many samples as all sources together.
        seed: of the shuffle.
        arguments: further ones of `PackedDataset`.

    Example:
        >>> dataset = create_sft_dataset("my_dataset", tokenizer, seq_length=4096)  # doctest: +SKIP
        >>> dataset.fetch_batch(range(8))["tokens"].shape  # doctest: +SKIP
        torch.Size([8, 4096])
    """
    given = [path] if isinstance(path, str | os.PathLike) else list(path)
    paths = [found for item in given for found in _expand(item)]
    if weights is not None and len(weights) != len(paths):
        raise InvalidInputError(f"{len(weights)} weights were given for {len(paths)} paths; give one each")
    if plan is not None:
        if len(paths) != 1 or packed_storage not in ("auto", "token_store"):
            raise InvalidInputError("plan goes with the path of one token store; leave packed_storage at 'auto'")
        loaded = plan if isinstance(plan, PackPlan) else PackPlan.load(plan)
        sources: list[BinReader] = [PlanBinReader(open_token_store(paths[0]), loaded, pad_id=eos_id_of(tokenizer))]
    else:
        sources = [_open(one, split, packed_storage) for one in paths]
    source = sources[0] if len(sources) == 1 else JoinedBinReader(sources)
    order = None
    if weights is not None:
        blend = Blend(weights, [len(one) for one in sources])
        order = BlendOrder(blend, [SampleOrder(len(one), seed=seed, fingerprint=one.fingerprint) for one in sources])
        max_num_samples = len(source) if max_num_samples is None else max_num_samples
    dataset = PackedDataset(
        source,
        tokenizer,
        max_seq_length=seq_length,
        max_num_samples=max_num_samples,
        seed=seed,
        order=order,
        **arguments,
    )
    logger.info(
        "%s: %s rows of up to %s tokens, %s samples",
        source.description,
        f"{len(source):,}",
        f"{source.figures.pack_size:,}",
        f"{len(dataset):,}",
    )
    return dataset


def _open(path: Path, split: str, packed_storage: str) -> BinReader:
    wanted = PACKED_STORAGE.get(packed_storage, packed_storage)
    if wanted != "auto" and wanted not in _STORAGES:
        known = ", ".join(sorted({"auto", *_STORAGES, *PACKED_STORAGE}))
        raise InvalidInputError(f"packed_storage {packed_storage!r} is unknown; use one of {known}")
    if is_token_store(path):
        raise InvalidInputError(
            f"{path} is a token store; name a plan to read packs out of it, or materialize it first"
        )
    for name, storage in _STORAGES.items():
        if storage.recognises(path):
            if wanted not in ("auto", name):
                raise InvalidInputError(
                    f"{path} is {name}, but packed_storage asks for {packed_storage!r}; set packed_storage to {name}"
                )
            return storage.open(path, split)
    if path.suffix in (".parquet", ".pq"):
        raise InvalidInputError(
            f"{path} is Parquet, which has no random access; turn it into shards: packed-sft convert"
        )
    raise InvalidInputError(f"{path} holds no packed data of a known kind ({', '.join(_STORAGES)}); check the path")


def _expand(path: PathLike) -> list[Path]:
    text = os.fspath(path)
    if "://" in text:
        raise InvalidInputError(
            f"{text} is remote; this release reads local paths, so copy the dataset to a disk first"
        )
    location = Path(os.path.abspath(text))
    if os.path.lexists(location):
        return [location]
    found = [Path(name) for name in sorted(glob.glob(str(location)))]
    if not found:
        raise InvalidInputError(f"{text} does not exist and matches nothing; check the path")
    return found
