"""Megatron-Bridge 0.6 and later: a dataset provider that a recipe selects by configuration alone.

    dataset:
      _target_: megatron_packed_sft.megatron.bridge.PackedSFTDatasetProvider
      path: my_dataset
      seq_length: 4096

`PackedSFTDatasetProvider` is created on first use from `PackedSFTSettings` and Bridge's own `DatasetProvider`.

Bridge only logs an error in a provider's constructor and then trains on the recipe's own dataset. So every field has a
default here, and `build_datasets`, whose errors do stop the run, reports what is missing or wrong.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import math
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from megatron_packed_sft.data.datasets import PackedDataset
from megatron_packed_sft.data.factory import create_sft_dataset
from megatron_packed_sft.data.options import options_of_bridge
from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError
from megatron_packed_sft.packing.parallel_layout import ParallelLayout
from megatron_packed_sft.storage.dataset_directory import DATASET, open_dataset

logger = logging.getLogger(__name__)

PROVIDER = "PackedSFTDatasetProvider"
_LENGTH_MULTIPLE = 16  # what Megatron-Bridge pads batches to


class BuildContext(Protocol):
    """What Megatron-Bridge passes to `build_datasets`: how many samples it will ask for, and the tokenizer."""

    train_samples: int
    valid_samples: int
    test_samples: int
    tokenizer: Any


@dataclass(kw_only=True)
class PackedSFTSettings:
    """The provider's fields, and the datasets made from them.

    Args:
        path: packed data, as `create_sft_dataset` takes it, or a list of such paths.
        weights: one per path of a list: blend the paths in this proportion for training.
        validation_path, test_path: packed data to evaluate on. By default the splits of those paths that are dataset
            directories and have them.
        train_split, validation_split, test_split: names of the splits of dataset directories.
        do_validation, do_test: False leaves that dataset out.
        packed_storage: `auto`, or the storage that `path` must have.
        seq_length: the model's sequence length.
        seed: of the order of samples.
        max_train_samples: start over after this many samples (not with `single`); by default there are always enough.
        dataloader_type: which of Bridge's samplers draws the samples: `single`, or `batch`, which mixes epochs; see
            docs/megatron_bridge.md.
        pad_to_max_length: pad every batch to `seq_length`; pipeline parallelism and CUDA graphs need it.
        pad_cu_seqlens: pad the boundaries to one shape, for CUDA graphs.
        contract: which keys batches have; `auto` chooses those of the installed Megatron-Bridge.
        dataset_kwargs: fields of `BatchOptions` and `OpenOptions`; recipes of Megatron-Bridge set some of them.

    Example:
        >>> PackedSFTSettings(path="my_dataset", seq_length=4096).validation_split
        'validation'
    """

    path: str | list[str] | None = None
    weights: list[float] | None = None
    validation_path: str | list[str] | None = None
    test_path: str | list[str] | None = None
    train_split: str = "train"
    validation_split: str = "validation"
    test_split: str = "test"
    do_validation: bool = True
    do_test: bool = True
    packed_storage: str = "auto"
    seq_length: int | None = None
    seed: int = 1234
    max_train_samples: int | None = None
    dataloader_type: str | None = "single"
    pad_to_max_length: bool = False
    pad_cu_seqlens: bool = False
    contract: str = "auto"
    dataset_kwargs: dict[str, Any] | None = None
    enable_offline_packing = True  # Bridge's checks look it up; not a field, because it cannot be changed

    @property
    def offline_packing_specs(self) -> Any:
        """Megatron-Bridge's own description of packed data, which its checks read and its recipes change."""
        specs: Any = vars(self).get("_specs")
        if specs is None:
            specs = vars(self)["_specs"] = _import("megatron.bridge.data.packing.config").PackedSequenceSpecs(
                packed_sequence_size=self.seq_length or -1, pad_cu_seqlens=self.pad_cu_seqlens
            )
            vars(self)["_asked"] = (specs.packed_sequence_size, specs.pad_cu_seqlens)
        # A field of ours that was set since then wins.
        asked = (self.seq_length or -1, self.pad_cu_seqlens)
        if asked != vars(self)["_asked"]:
            specs.packed_sequence_size, specs.pad_cu_seqlens = vars(self)["_asked"] = asked
        return specs

    def _pads_boundaries(self) -> bool:
        return bool(self.offline_packing_specs.pad_cu_seqlens) if "_specs" in vars(self) else self.pad_cu_seqlens

    def build_datasets(
        self, context: BuildContext
    ) -> tuple[PackedDataset | None, PackedDataset | None, PackedDataset | None]:
        """Return the training, validation and test datasets, as long as the run needs; None where there is no data."""
        if "_specs" in vars(self):
            self._refuse_contradicting_specs()
        if self.dataloader_type == "batch":
            logger.warning(
                "dataset.dataloader_type=batch of Megatron-Bridge shuffles the samples of all epochs together, and "
                "differently when the number of iterations changes; set dataset.dataloader_type=single to keep epochs "
                "apart"
            )
        if not self.path:
            raise InvalidInputError("dataset.path is not set; set it to the packed data to train on")
        if not self.seq_length:
            raise InvalidInputError("dataset.seq_length is not set; set it to the model's sequence length")
        if not context.train_samples and not context.valid_samples and not context.test_samples:
            # Megatron-Bridge asks for a dataset's own length like this. Ours are as long as the run needs.
            raise InvalidInputError(
                "train.num_epochs of Megatron-Bridge works with its own datasets only; set train.train_iters "
                "instead, to what megatron_packed_sft.megatron.bridge.iterations_of(path, num_epochs, "
                "global_batch_size) returns"
            )
        num_samples = self.max_train_samples or context.train_samples
        if self.dataloader_type == "single" and num_samples < context.train_samples:
            raise InvalidInputError(
                f"dataset.max_train_samples is {num_samples}, the run needs {context.train_samples} samples, and "
                "dataset.dataloader_type=single does not start over; leave max_train_samples out, or use batch"
            )
        train = self._open(_listed(self.path), self.train_split, num_samples, context, weights=self.weights)
        validation = test = None
        if self.do_validation:
            found = self._evaluation_paths(self.validation_path, self.validation_split)
            validation = self._open(found, self.validation_split, context.valid_samples, context)
        if self.do_test:
            found = self._evaluation_paths(self.test_path, self.test_split)
            test = self._open(found, self.test_split, context.test_samples, context)
        return train, validation, test

    def _evaluation_paths(self, given: str | list[str] | None, split: str) -> list[str]:
        if given:
            return _listed(given)
        # A single shard has no splits: opening it would evaluate on the training data.
        found = [path for path in _listed(self.path) if _has_split(path, split)]
        if not found:
            logger.info("no dataset of %s has a split %r; there is no evaluation on it", self.path, split)
        return found

    def _open(
        self, paths: list[str], split: str, num_samples: int, context: BuildContext, weights: list[float] | None = None
    ) -> PackedDataset | None:
        if not paths or num_samples < 1:
            return None
        assert self.seq_length is not None
        arguments = dict(self.dataset_kwargs or {})
        if not arguments.get("return_cu_seqlen", True):
            raise InvalidInputError(
                "dataset.dataset_kwargs.return_cu_seqlen is false, and Megatron-Bridge's mask, which comes instead of "
                "boundaries, lets the sequences of a bin see each other; leave the key out"
            )
        # Megatron-Bridge switches fields on where it needs them; a recipe's arguments must not switch them off again.
        arguments["pad_to_max_length"] = self.pad_to_max_length or arguments.get("pad_to_max_length", False)
        specs = vars(self).get("_specs", self)
        arguments["pad_cu_seqlens"] = bool(specs.pad_cu_seqlens) or arguments.get("pad_cu_seqlens", False)
        layout = _layout(context)
        # Sequence parallelism shares whole bins; whether it is on is not known here, and a longer padding does no harm.
        multiple = math.lcm(arguments.get("pad_seq_length_to_mult", _LENGTH_MULTIPLE), layout.bin_multiple)
        arguments["pad_seq_length_to_mult"] = multiple
        contract = contract_of(installed_version()) if self.contract == "auto" else self.contract
        batch, opening = options_of_bridge(contract, arguments)
        dataset = create_sft_dataset(
            paths if len(paths) > 1 else paths[0],
            context.tokenizer,
            self.seq_length,
            split=split,
            weights=weights,
            max_num_samples=num_samples,
            seed=self.seed,
            contract=batch,
            opening=replace(opening, storage=self.packed_storage),
        )
        needed = ParallelLayout(context=layout.context)
        needed.refuse_unpadded((part.where, part.pad_seq_to_mult) for part in dataset.source.made_with())
        return dataset

    def _refuse_contradicting_specs(self) -> None:
        """Refuse settings in the specs that have no effect, because the data is packed already."""
        specs = self.offline_packing_specs
        if self.seq_length and specs.packed_sequence_size != self.seq_length:
            raise InvalidInputError(
                f"dataset.offline_packing_specs.packed_sequence_size is {specs.packed_sequence_size}, and "
                f"dataset.seq_length is {self.seq_length}; set seq_length alone"
            )
        for name in ("packed_train_data_path", "packed_val_data_path"):
            if getattr(specs, name, None) is not None:
                raise InvalidInputError(
                    f"dataset.offline_packing_specs.{name} is {getattr(specs, name)}, which is not read; set "
                    "dataset.path and dataset.validation_path"
                )


def iterations_of(path: str | list[str], num_epochs: float, global_batch_size: int, split: str = "train") -> int:
    """Return the `train.train_iters` for a number of epochs, rounded up; Bridge's `train.num_epochs` refuses providers.

    Args:
        path: packed data, as the provider takes it.
        num_epochs: passes over it.
        global_batch_size: bins per iteration.
        split: of dataset directories.
    """
    if num_epochs <= 0 or global_batch_size < 1:
        raise InvalidInputError(
            f"num_epochs {num_epochs} must be above 0, and global_batch_size {global_batch_size} at least 1"
        )
    paths = _listed(path)
    source = create_sft_dataset(paths if len(paths) > 1 else paths[0], 0, split=split).source
    return math.ceil(num_epochs * len(source) / global_batch_size)


def installed_version() -> str:
    """Return the version of the installed Megatron-Bridge, such as 0.6.2."""
    try:
        return importlib.metadata.version("megatron-bridge")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependencyError(
            f"{PROVIDER} needs Megatron-Bridge, which is not installed; install megatron-bridge 0.6 or later"
        ) from error


def contract_of(version: str) -> str:
    """Return the batch contract of a Megatron-Bridge version.

    Example:
        >>> [contract_of(version) for version in ("0.6.2", "0.7.0rc0")]
        ['bridge_0_6', 'bridge_main']
    """
    parts = re.match(r"(\d+)\.(\d+)", version)
    numbers = (int(parts[1]), int(parts[2])) if parts else (0, 0)
    if numbers < (0, 6):
        raise MissingDependencyError(f"Megatron-Bridge {version} is too old for {PROVIDER}; install 0.6 or later")
    return "bridge_0_6" if numbers == (0, 6) else "bridge_main"


def allow_as_target() -> None:
    """Add this package to the `_target_` allow-list of Megatron-Bridge; call it before the configuration is read."""
    installed_version()
    _import("megatron.bridge.utils.instantiate_utils").register_allowed_target_prefix("megatron_packed_sft.")


def __getattr__(name: str) -> Any:
    """Create the provider on first use, so that this module can be imported without Megatron-Bridge."""
    if name != PROVIDER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    provider = globals()[PROVIDER] = _make_provider()
    return provider


def _make_provider() -> type:
    contract_of(installed_version())  # refuses releases that are too old
    bases = (PackedSFTSettings, _import("megatron.bridge.data.base").DatasetProvider)
    # Bridge writes the class's name into checkpoints and looks it up by that.
    names = {"__module__": __name__, "__doc__": PackedSFTSettings.__doc__}
    return dataclass(kw_only=True)(type(PROVIDER, bases, names))


def _layout(context: BuildContext) -> ParallelLayout:
    """Return how the ranks of this run share a bin, as far as it has begun; sequence parallelism is assumed."""
    groups = getattr(context, "pg_collection", None)
    state = sys.modules.get("megatron.core.parallel_state")  # a run that has begun has imported it
    has_begun = state is not None and state.model_parallel_is_initialized()
    sizes = {}
    for name, group, size_of in (("context", "cp", "context"), ("tensor", "tp", "tensor_model")):
        if (found := getattr(groups, group, None)) is not None:
            sizes[name] = int(found.size())
        else:
            sizes[name] = getattr(state, f"get_{size_of}_parallel_world_size")() if has_begun else 1
    return ParallelLayout(context=sizes["context"], tensor=sizes["tensor"], sequence_parallel=True)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"Megatron-Bridge {installed_version()} is installed, but {name} cannot be imported ({error}); "
            "install what is missing"
        ) from error


def _listed(path: str | list[str] | None) -> list[str]:
    return [str(one) for one in path] if isinstance(path, list | tuple) else [str(path)]


def _has_split(path: str, split: str) -> bool:
    return (Path(path) / DATASET).is_file() and split in open_dataset(path).splits
