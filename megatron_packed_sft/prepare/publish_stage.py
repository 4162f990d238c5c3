"""Plans and token stores to what training reads: shards or legacy files, published whole or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_packed_sft.disk import json_document
from megatron_packed_sft.disk.atomic import Staging, write_file
from megatron_packed_sft.disk.checksum import checksum
from megatron_packed_sft.disk.npy import MASK_DTYPE, id_dtype_for
from megatron_packed_sft.errors import PackedSFTError, TargetExistsError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.prepare.executor import worker_died
from megatron_packed_sft.prepare.work_directory import WorkDirectory, fingerprint_of
from megatron_packed_sft.storage.dataset_directory import DATASET, DatasetWriter, open_dataset
from megatron_packed_sft.storage.writers import LEGACY, MEMMAP_V1, create_shard_writer
from megatron_packed_sft.tokens.materialize import materialize, materialize_shards, stored_width
from megatron_packed_sft.tokens.store import TokenStore

MADE_BY = "packed-sft prepare"
LEGACY_NOTE = "prepare.json"  # what dataset.json is to shards
_LARGEST_SHORT_VOCABULARY = 1 << 16  # pickled ids below it take three bytes, others five; a mask entry takes two


@dataclass(frozen=True)
class PublishRequest:
    """What to publish, and where."""

    output: Path
    packed_storage: str  # canonical name
    shard_bytes: int
    pad_id: int
    provenance: Mapping[str, Any]
    card: str
    num_workers: int

    @property
    def fingerprint(self) -> str:
        """Equal when the same bytes would be published."""
        return fingerprint_of(
            {
                "stage": "publish",
                "packed_storage": self.packed_storage,
                "shard_bytes": self.shard_bytes,
                "pad_id": self.pad_id,
                "provenance": dict(self.provenance),
                "card": self.card,
            }
        )


def is_published(request: PublishRequest, work: WorkDirectory) -> bool:
    """Whether the output is what a request would make of it, as far as opening it tells."""
    noted = work.receipt(_receipt_name(request), request.fingerprint)
    return noted is not None and noted["published"] == _published(request)


def publish(
    request: PublishRequest,
    plans: Mapping[str, PackPlan],
    stores: Mapping[str, TokenStore],
    work: WorkDirectory,
    on_bins: Callable[[int], object],
) -> None:
    """Write the output, and tell `on_bins` how many bins were written, again and again.

    What an earlier preparation published there is replaced in one step; anything else is left alone, with an error.
    """
    replace = published_provenance(request.output) is not None  # anything else was refused at the start
    write = _write_shards if request.packed_storage == MEMMAP_V1 else _write_legacy
    try:
        write(request, plans, stores, replace, on_bins)
    except BrokenProcessPool:
        raise worker_died() from None
    except TargetExistsError as error:
        raise TargetExistsError(
            f"{request.output} was published by somebody else meanwhile and is left as it is; run the same command "
            "again to replace it, or choose another output"
        ) from error
    work.write_receipt(_receipt_name(request), request.fingerprint, {"published": _published(request)})


def num_shards(plan: PackPlan, shard_bytes: int, vocab_size: int | None) -> int:
    """How many shards of about this size hold a plan.

    Example:
        >>> from megatron_packed_sft.packing.packer import pack
        >>> num_shards(pack([4, 4, 4], pack_size=4), shard_bytes=40, vocab_size=128_256)
        2
    """
    return min(math.ceil(stored_bytes(plan, MEMMAP_V1, vocab_size) / shard_bytes), plan.num_bins)


def stored_bytes(plan: PackPlan, packed_storage: str, vocab_size: int | None) -> int:
    """What the rows of a plan take on disk, all but: shards are padded, legacy files are not.

    Example:
        >>> from megatron_packed_sft.packing.packer import pack
        >>> stored_bytes(pack([4, 3], pack_size=4), MEMMAP_V1, vocab_size=128_256)  # an int32 id and a byte of mask
        40
    """
    if packed_storage == MEMMAP_V1:
        bytes_per_token = np.dtype(id_dtype_for(vocab_size)).itemsize + np.dtype(MASK_DTYPE).itemsize
        return plan.num_bins * _width(plan) * bytes_per_token
    is_short = vocab_size is not None and vocab_size <= _LARGEST_SHORT_VOCABULARY
    return plan.accounting.num_tokens_packed * (5 if is_short else 7)


def _width(plan: PackPlan) -> int:
    return max(plan.pack_size, stored_width(plan))


def _receipt_name(request: PublishRequest) -> str:
    """One receipt per output: several may share a work directory, one for each pack size, say."""
    return f"published/{request.output.name}-{checksum(str(request.output).encode())[:8]}"


def _write_shards(
    request: PublishRequest,
    plans: Mapping[str, PackPlan],
    stores: Mapping[str, TokenStore],
    replace: bool,
    on_bins: Callable[[int], object],
) -> None:
    with DatasetWriter(request.output, overwrite=replace) as dataset:
        for split, plan in plans.items():
            num_files = num_shards(plan, request.shard_bytes, stores[split].manifest.vocab_size)
            paths = [dataset.shard_path(split, number) for number in range(num_files)]
            materialize_shards(
                plan,
                stores[split],
                paths,
                num_workers=request.num_workers,
                pad_id=request.pad_id,
                on_bins=on_bins,
            )
        dataset.finalize(provenance=request.provenance, card=request.card)


def _write_legacy(
    request: PublishRequest,
    plans: Mapping[str, PackPlan],
    stores: Mapping[str, TokenStore],
    replace: bool,
    on_bins: Callable[[int], object],
) -> None:
    with Staging(request.output, overwrite=replace) as staging:
        sizes: dict[str, int] = {}
        for split, plan in plans.items():
            width = _width(plan)
            file = staging.path / f"{split}.npy"
            with create_shard_writer(
                LEGACY,
                file,
                num_bins=plan.num_bins,
                pack_size=width,
                vocab_size=stores[split].manifest.vocab_size,
                pad_id=request.pad_id,
            ) as writer:
                materialize(plan, stores[split], writer, width=width, pad_id=request.pad_id, on_bins=on_bins)
                writer.finalize()
            metadata = json.dumps([_pack_metadata(plan)], indent=2) + "\n"
            write_file(staging.path / f"{split}_metadata.json", metadata.encode())
            sizes[file.name] = file.stat().st_size
        write_file(staging.path / "README.md", request.card.encode())
        note = {"provenance": dict(request.provenance), "sizes": sizes}
        write_file(staging.path / LEGACY_NOTE, json_document.render(note))
        staging.publish()


def _pack_metadata(plan: PackPlan) -> dict[str, Any]:
    """What Megatron-Bridge keeps beside a packed file, for `pack_metadata_file_path`."""
    stats = plan.stats()
    return {
        "dataset_max_seqlen": stats.longest_item,
        "max_samples_per_bin": stats.max_items_per_bin,
        "packing_factor": round(stats.mean_items_per_bin, 2),
        "packing_efficiency": round(100 * stats.utilization, 2),
        "pack_size": plan.pack_size,
        "min_packed_seqlen": int(plan.bin_tokens.min()),
    }


def _published(request: PublishRequest) -> str | None:
    """The fingerprint of what lies at the output, checked as far as opening goes; None when it is not whole."""
    try:
        if request.packed_storage == MEMMAP_V1:
            dataset = open_dataset(request.output)
            for split in dataset.splits:
                dataset.open_shards(split)
            return dataset.fingerprint
        note = (request.output / LEGACY_NOTE).read_bytes()
        sizes = json_document.parse(note, LEGACY_NOTE)["sizes"]
        whole = all((request.output / name).stat().st_size == size for name, size in sizes.items())
        return checksum(note) if whole else None
    except (PackedSFTError, OSError, KeyError):
        return None


def published_provenance(output: Path) -> Mapping[str, Any] | None:
    """Return the provenance of what an earlier preparation published; None when there is no such thing."""
    for name in (DATASET, LEGACY_NOTE):
        try:
            document = json.loads((output / name).read_bytes())
        except (OSError, ValueError):
            continue
        provenance = document.get("provenance") if isinstance(document, dict) else None
        if isinstance(provenance, dict) and provenance.get("made_by") == MADE_BY:
            return provenance
    return None
