"""Megatron-Bridge 0.6.2 as released, with as much of its own code as a CPU can import, for the tests of the provider.

Real: DatasetProvider, PackedSequenceSpecs, the allow-list, YAML overrides, dispatch, loaders and samplers. Its config
module needs `megatron.training`, which no wheel has, so ConfigContainer and its checks are absent, and the module that
instantiates targets is taken from 0.3.1, where it comes from, with an allow-list of prefixes added.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_packed_sft import create_sft_dataset
from megatron_packed_sft.megatron import bridge
from tests.megatron.test_bridge import EOS, PACK_SIZE
from tests.oracle.bridge import CONTRACT_OF, bare_module, fetch

TARGET = "megatron_packed_sft.megatron.bridge.PackedSFTDatasetProvider"
YAML = """
dataset:
  _target_: {target}
  path: {path}
"""
GLOBAL_BATCH = 4
NUM_STEPS = 5
_BARE = {
    "0.6.2": "data data.builders data.datasets data.megatron_mimo data.packing models models.megatron_mimo training "
    "training.tokenizers training.utils utils",
}


@contextlib.contextmanager
def installed(version: str) -> Iterator[None]:
    """That release in `sys.modules` and on the path, so that its version is found, too; Megatron-Core stays real."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Megatron-Core and Megatron-Bridge, about what is not installed
        importlib.import_module("megatron.core.optimizer")
        release = fetch(version)
        sys.path.insert(0, str(release))
        try:
            home = release / "megatron" / "bridge"
            _stand_in("megatron.bridge", [str(home)])
            for package in _BARE[version].split():
                _stand_in(f"megatron.bridge.{package}", [str(home.joinpath(*package.split(".")))])
            _stand_in("megatron.bridge.training.state", TrainState=type("TrainState", (), {}))
            tokenizer = {"MegatronTokenizer": object, "_HuggingFaceTokenizer": object}
            _stand_in("megatron.bridge.training.tokenizers.tokenizer", **tokenizer)
            _prepare_0_6()
            yield
        finally:
            sys.path.remove(str(release))
            for name in [name for name in sys.modules if name.startswith(("megatron.bridge", "megatron.training"))]:
                del sys.modules[name]
            for name in ("bridge", "training"):
                vars(sys.modules["megatron"]).pop(name, None)
            vars(bridge).pop(bridge.PROVIDER, None)


def _prepare_0_6() -> None:
    _stand_in("megatron.training", [])
    _stand_in("megatron.training.config", [])
    name = "megatron.training.config.instantiate_utils"
    path = fetch("0.3.1") / "megatron" / "bridge" / "utils" / "instantiate_utils.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    instantiation = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(instantiation)
    instantiation.target_allowlist = Prefixes()  # type: ignore[attr-defined]
    sys.modules[name] = instantiation
    sys.modules["megatron.training.config"].instantiate_utils = instantiation  # type: ignore[attr-defined]

    helpers = {"print_rank_0": lambda text: None, "get_world_size_safe": lambda: 1}
    _stand_in("megatron.bridge.utils.common_utils", **helpers)
    for module, names in {
        "training.config": "ConfigContainer GPTDatasetConfig GPTFIMDatasetConfig MockGPTDatasetConfig",
        "data.builders": "GPTSFTDatasetConfig",
        "data.builders.gpt_sft": "GPTSFTDatasetConfig gpt_sft_train_valid_test_datasets_provider",
        "data.builders.direct_hf_sft": "DirectHFSFTDatasetConfig direct_hf_sft_train_valid_test_datasets_provider",
        "data.builders.energon": "EnergonDatasetConfig energon_train_valid_test_datasets_provider",
        "data.builders.mock_vlm_sft": "MockVLMSFTDatasetConfig mock_vlm_sft_train_valid_test_datasets_provider",
        "data.datasets.fim_dataset": "GPTFIMDataset",
        "data.megatron_mimo.base_provider": "MegatronMIMODatasetProvider",
        "models.megatron_mimo.megatron_mimo_provider": "MegatronMIMOProvider",
    }.items():
        _stand_in(f"megatron.bridge.{module}", [], **{name: type(name, (), {}) for name in names.split()})


class Prefixes:
    """An allow-list of target prefixes, as `megatron.training` has one."""

    def __init__(self) -> None:
        self.allowed_prefixes: set[str] = set()

    def add_prefix(self, prefix: str) -> None:
        self.allowed_prefixes.add(prefix)

    def is_allowed(self, target: str) -> bool:
        return target.startswith(tuple(self.allowed_prefixes))


def _stand_in(name: str, path: list[str] | None = None, **names: Any) -> None:
    bare_module(name, path, **names)
    parent, _, leaf = name.rpartition(".")
    setattr(sys.modules[parent], leaf, sys.modules[name])


def load(name: str) -> Any:
    return importlib.import_module(f"megatron.bridge.{name}")


@contextlib.contextmanager
def group_of_one(directory: Path) -> Iterator[Any]:
    """A process group with this process alone; the rendezvous is a file in the directory."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
    try:
        yield torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()


class TorchOnCpu:
    """The loaders end by sharing three flags over CUDA tensors; here they are on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, values: Any, dtype: Any, device: str) -> torch.Tensor:
        assert device == "cuda"
        return torch.tensor(values, dtype=dtype)


def switched(recipe: Any, path: Path, tmp_path: Path, overrides: list[str] | None = None) -> Any:
    """The recipe with our provider, by nothing but YAML and command-line overrides."""
    file = tmp_path / "override.yaml"
    file.write_text(YAML.format(target=TARGET, path=path))
    return load("training.utils.omegaconf_utils").process_config_with_overrides(recipe, str(file), overrides)


def iterators_of(config: Any, group: Any, consumed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    """Bridge's data iterators, from its dispatch over its loaders to its samplers."""
    loaders = load("data.loaders")
    monkeypatch.setattr(loaders, "torch", TorchOnCpu())
    provide = load("data.utils").get_dataset_provider(config.dataset)

    def provider(num_samples: list[int], dataset_config: Any) -> Any:
        return provide(num_samples, dataset_config, tokenizer=SimpleNamespace(eos_id=EOS))

    state = SimpleNamespace(consumed_train_samples=consumed, consumed_valid_samples=0)
    result = loaders.build_train_valid_test_data_iterators(config, state, provider, group)
    assert (state.do_train, state.do_valid, state.do_test) == (1, 1, 0)
    return tuple(result)  # type: ignore[return-value]


def expected_rows(path: Path, version: str, split: str = "train", num_samples: int = GLOBAL_BATCH * NUM_STEPS) -> Any:
    return create_sft_dataset(
        path, EOS, PACK_SIZE, split=split, max_num_samples=num_samples, seed=77, contract=CONTRACT_OF[version]
    )


def assert_same_batch(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(actual[name], value), name
        else:
            assert actual[name] == value, name
