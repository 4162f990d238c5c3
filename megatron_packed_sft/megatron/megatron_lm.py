"""Megatron-LM: packed data as a `MegatronDataset`, so that its blending, samplers and `--sft` step work with it.

    --data-path 0.3 code 0.7 chat                 BlendedMegatronDatasetBuilder
                                                  └─ BlendedDataset             asks each dataset for 0, 1, 2, ...
                                                     ├─ PackedSFTMegatronDataset(code)   shuffles, epoch after epoch
                                                     └─ PackedSFTMegatronDataset(chat)

Samples have the keys of Megatron-LM's own SFT dataset; a micro batch is one sample. See docs/megatron_lm.md.
"""

from __future__ import annotations

import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch

from megatron_packed_sft.data.datasets import PackedDataset
from megatron_packed_sft.data.factory import create_sft_dataset
from megatron_packed_sft.data.made_with import refuse_mixed
from megatron_packed_sft.data.options import BatchOptions, OpenOptions, Tolerance
from megatron_packed_sft.data.order.sample_order import Int64Array, SampleOrder
from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at import time Megatron-Core warns about what else is not installed
        from megatron.core.datasets.megatron_dataset import MegatronDataset
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        f"PackedSFTMegatronDataset needs Megatron-Core ({error}); install megatron-packed-sft[megatron]"
    ) from error

if TYPE_CHECKING:
    from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
    from megatron.core.datasets.utils import Split

_PARTS = "packed_sft_parts"  # attribute of the configuration: tokenizers and templates of the paths opened so far
_LOCK = threading.Lock()


class PackedSFTMegatronDataset(MegatronDataset):  # type: ignore[misc]  # Megatron-Core has no types
    """Packed bins of one path, reshuffled every epoch; index i depends only on the data and the seed.

    Args:
        dataset: the bins, as `build_low_level_dataset` opened them.
        dataset_path: where they are.
        indices: the bins of this split, a contiguous range; None for all.
        num_samples: length of the dataset; None for every bin once.
        index_split: train, valid or test.
        config: gives the tokenizer (its end-of-document id is the padding), `sequence_length` and `random_seed`.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        dataset_path: str | None,
        indices: Int64Array | None,
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self._first_bin = 0 if indices is None or not len(indices) else int(indices[0])
        num_bins = len(dataset) if indices is None else len(indices)
        if num_bins == 0:
            raise InvalidInputError(
                f"split {config.split!r} leaves no bin of {dataset_path} ({len(dataset)} bins) for {index_split.name}; "
                "give it a larger share, or its own data (--valid-data-path)"
            )
        # No samples requested (no evaluation) means one epoch: Megatron-Core's samplers refuse empty datasets.
        self._num_samples = num_samples or num_bins
        self._order = SampleOrder(num_bins, seed=config.random_seed, fingerprint=dataset.fingerprint)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: BlendedMegatronDatasetConfig) -> PackedDataset:
        """Open anything that `create_sft_dataset` takes; of a dataset directory the training split.

        Paths made with different tokenizers or templates are refused, unless the configuration has an attribute
        `allow_tokenizer_mismatch` or `allow_template_mismatch` that is true.
        """
        tolerance = Tolerance(
            tokenizer=getattr(config, "allow_tokenizer_mismatch", False),
            template=getattr(config, "allow_template_mismatch", False),
            spelling="config.{argument} = True",
        )
        dataset = create_sft_dataset(
            dataset_path,
            config.tokenizer,
            config.sequence_length,
            # Ranks without a data loader receive a bin into a buffer of this size.
            contract=BatchOptions("mcore", pad_to_max_length=True),
            opening=OpenOptions(
                allow_tokenizer_mismatch=tolerance.tokenizer, allow_template_mismatch=tolerance.template
            ),
        )
        # The paths of a blend are opened one by one, or by threads; only the configuration is shared by all of them.
        with _LOCK:
            before = getattr(config, _PARTS, [])
            known = {part.where for part in before}
            parts = [part for part in dataset.source.made_with() if part.where not in known]
            if before and parts:
                refuse_mixed([*before, *parts], tolerance)
            setattr(config, _PARTS, [*before, *parts])
        if dataset.source.figures.has_weights:
            raise InvalidInputError(
                f"{dataset_path} has weights of the loss, and Megatron-LM casts the sum of the loss mask to an "
                "integer; train it with packed-sft train, or prepare the data without weights"
            )
        return dataset

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: PackedDataset) -> int:
        """Return the number of bins, which `--split` divides."""
        return len(low_level_dataset)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        # Not the tokenizer: few of them can be written as JSON, and no index depends on it.
        return ["random_seed", "sequence_length", "split", "split_matrix"]

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one bin: tokens, labels, loss_mask, position_ids [sequence_length], cu_seqlens [K], max_seqlen []."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} ({self.dataset_path})")
        batch: dict[str, Any] = self.dataset.fetch_batch([self._first_bin + self._order[index]])
        # Megatron-LM expects boundaries that include the padding for context parallelism.
        boundaries = batch["cu_seqlens_q_padded"] if "cu_seqlens_q_padded" in batch else batch["cu_seqlens_q"]
        return {
            "tokens": batch["tokens"][0],
            "labels": batch["labels"][0],
            "loss_mask": batch["loss_mask"][0].float(),
            "position_ids": batch["position_ids"][0],
            "cu_seqlens": boundaries[0],
            "max_seqlen": batch["max_seqlen_q"][0, 0],
        }
