"""Records of what Hugging Face `datasets` loads: by name from its hub, or from a local folder; streamed or not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from megatron_packed_sft.errors import InvalidInputError, PackedSFTError, StorageIOError
from megatron_packed_sft.support.imports import load

_SAVED = "state.json"  # in a folder that `save_to_disk` wrote


def stream_dataset(
    name: str,
    config: str | None = None,
    split: str = "train",
    *,
    streaming: bool = True,
    seed: int | None = None,
    shuffle_buffer: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the records of one split of a dataset, one after the other.

    Args:
        name: of the hub, or a local folder of data files or one that `save_to_disk` wrote.
        config: of the dataset, if it has several.
        split: such as `train`.
        streaming: read it while it is downloaded, without a copy on disk.
        seed, shuffle_buffer: shuffle a streamed dataset, as `dataset.shuffle(seed=..., buffer_size=...)` does.

    Raises:
        MissingDependencyError: `datasets` is not installed.
        StorageIOError: the dataset cannot be loaded or read: no network, no such name, damaged files.
    """
    datasets = load("datasets", "datasets", f"reading the dataset {name}")
    where = f"{name}{f' ({config})' if config else ''}"
    try:
        dataset = _opened(datasets, name, config, split, streaming)
        if streaming and seed is not None and shuffle_buffer is not None:
            dataset = dataset.shuffle(seed=seed, buffer_size=shuffle_buffer)
        yield from dataset
    except PackedSFTError:
        raise
    except Exception as error:  # datasets, file systems and the network raise many types
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise StorageIOError(
            f"cannot read the split {split} of the dataset {where}: {reason}; check the name and the network, or give "
            "a local folder"
        ) from error


def _opened(datasets: Any, name: str, config: str | None, split: str, streaming: bool) -> Any:
    if not os.path.exists(os.path.join(name, _SAVED)):
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    if config is not None:
        raise InvalidInputError(f"{name} was written by `save_to_disk` and has no config; leave config out")
    saved = datasets.load_from_disk(name)
    return saved.to_iterable_dataset() if streaming else saved
