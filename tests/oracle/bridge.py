"""Megatron-Bridge as released, on a CPU: its packed dataset classes, run on bins we also collate.

Importing `megatron.bridge` needs Transformer Engine and Megatron-Core. The dataset modules alone do not: their
packages are stood in for by bare modules that only have a `__path__`, so that no `__init__` runs, and the few names
they import from elsewhere (a rank helper, the tokenizer's type, the storage client switch) are stubs. None of these
takes part in what the tests compare. All versions live under one name, so each is loaded with `sys.modules` set up
for it alone, and what was there before is put back.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import importlib.machinery
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

CONTRACT_OF = {"0.6.2": "bridge_0_6"}
VERSIONS = tuple(CONTRACT_OF)

_BARE_PACKAGES = (
    "data", "data.datasets", "data.packing", "training", "training.tokenizers", "training.utils", "utils",
)  # fmt: skip


class Oracle(NamedTuple):
    """The classes of one release."""

    version: str
    dataset: Any
    parquet_dataset: Any
    write_parquet: Any


@functools.cache
def load(version: str) -> Oracle:
    """The packed dataset classes of a release; it is fetched once and kept in the user's cache."""
    with _only_modules_of(fetch(version)):
        module = importlib.import_module("megatron.bridge.data.packing.gpt_sft")
        parquet = importlib.import_module("megatron.bridge.data.packing.parquet")
        return Oracle(
            version, module.GPTSFTPackedDataset, parquet.GPTSFTPackedParquetDataset, parquet.write_packed_parquet
        )


def fetch(version: str) -> Path:
    """The unpacked release, from the cache or with pip; two processes do not fetch it twice."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_packed_sft" / "oracle"
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / f"megatron-bridge-{version}"
    with open(cache / f"{version}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=cache) as directory:
                release = os.path.join(directory, "release")
                command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
                command += ["--ignore-requires-python", "--target", release, f"megatron-bridge=={version}"]
                done = subprocess.run(command, capture_output=True, text=True)
                assert done.returncode == 0, f"pip could not fetch the oracle:\n{done.stdout}{done.stderr}"
                os.rename(release, target)
    return target


@contextlib.contextmanager
def _only_modules_of(release: Path) -> Iterator[None]:
    """`sys.modules` with this release's modules and our stand-ins, and without any other Megatron."""
    mine = ("megatron", "datasets")
    saved = {name: module for name, module in sys.modules.items() if name.split(".")[0] in mine}
    for name in saved:
        del sys.modules[name]
    try:
        bare_module("megatron", [])
        bare_module("megatron.bridge", [str(release / "megatron" / "bridge")])
        for name in _BARE_PACKAGES:
            bare_module(f"megatron.bridge.{name}", [str(release.joinpath("megatron", "bridge", *name.split(".")))])
        bare_module("megatron.core", [])
        switch = SimpleNamespace(is_enabled=lambda: False)
        bare_module("megatron.core.msc_utils", MultiStorageClientFeature=switch)
        bare_module("megatron.core.tokenizers", MegatronTokenizer=object)
        bare_module("megatron.bridge.training.tokenizers.tokenizer", MegatronTokenizer=object)
        bare_module("megatron.bridge.utils.common_utils", get_rank_safe=lambda: 0, get_local_rank_preinit=lambda: 0)
        bare_module("datasets", builder=SimpleNamespace(), load_dataset=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in mine]:
            del sys.modules[name]
        sys.modules.update(saved)


def bare_module(name: str, path: list[str] | None = None, **names: Any) -> None:
    """Put a module into `sys.modules` that holds just these names; with a path it is a package."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=path is not None)
    if path is not None:
        module.__path__ = path
    vars(module).update(names)
    sys.modules[name] = module


def open_dataset(
    oracle: Oracle,
    directory: Path,
    bins: Sequence[Mapping[str, list[int]]],
    eos_id: int,
    *,
    parquet: bool = False,
    metadata: Mapping[str, int] | None = None,
    **options: Any,
) -> Any:
    """Write bins as Bridge's own preparation does and open them with its class.

    Args:
        bins: dicts of lists: input_ids, loss_mask, seq_start_id.
        metadata: what the packing's metadata file says; a file is written and passed when it is given.
        options: arguments of the class.
    """
    if parquet:
        path = directory / "bins.idx.parquet"
        oracle.write_parquet(list(bins), path)
    else:
        path = directory / "bins.npy"
        np.save(path, np.array(list(bins), dtype=object), allow_pickle=True)
    if metadata is not None:
        options["pack_metadata_file_path"] = str(directory / "metadata.json")
        Path(options["pack_metadata_file_path"]).write_text(json.dumps([dict(metadata)]))
    with own_random_state():
        return (oracle.parquet_dataset if parquet else oracle.dataset)(
            file_path=str(path),
            tokenizer=SimpleNamespace(eos_id=eos_id),
            prompt_template="{input} {output}",
            label_key="output",
            truncation_field="input",
            **options,
        )


@contextlib.contextmanager
def own_random_state() -> Iterator[None]:
    # Its constructor seeds NumPy's global generator.
    state = np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(state)  # noqa: NPY002
