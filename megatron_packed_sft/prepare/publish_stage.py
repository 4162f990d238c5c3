"""Publish plans and token stores as a dataset directory, whole or not at all.

What is at the output already decides what happens: `refuse_other_files` refuses anything that no preparation made, and
`refuse_replacing` a dataset of other settings or files, unless the user gave --overwrite.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_packed_sft.errors import PackedSFTError, StorageIOError, TargetExistsError
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.prepare.work_directory import WorkDirectory, fingerprint_of
from megatron_packed_sft.remote.filesystem import base_name, child, is_missing
from megatron_packed_sft.remote.objects import list_objects, read_object, try_writing
from megatron_packed_sft.remote.uploads import UNFINISHED, begin_upload, refuse_existing, upload
from megatron_packed_sft.storage.dataset_directory import DATASET, MAX_DATASET_BYTES, DatasetWriter, open_dataset
from megatron_packed_sft.storage.figures import BinFigures
from megatron_packed_sft.storage.registry import storage_named
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.checksum import checksum
from megatron_packed_sft.support.paths import redacted
from megatron_packed_sft.support.processes import Executor
from megatron_packed_sft.tokens.materialize import stored_width, write_shards
from megatron_packed_sft.tokens.store import TokenStore

MADE_BY = "packed-sft prepare"
_MOST_DIFFERENCES = 5
# What decides a dataset; the rest of its provenance follows.
_DECIDING = ("tokenizer", "chat_template", "settings")
_DECIDING_OF_SOURCE = ("schema", "mapping", "weight", "split", "files")


@dataclass(frozen=True)
class PublishRequest:
    """What to publish, and where."""

    output: Path
    packed_storage: str  # the name of a storage
    shard_bytes: int
    pad_id: int
    provenance: Mapping[str, Any]
    card: str
    executor: Executor
    url: str | None = None  # to upload the output to, which is then removed here
    tokenizer_path: str = ""  # noted in the receipt, so that text of the dataset can be shown later

    @property
    def fingerprint(self) -> str:
        """Equal if the same bytes would be published."""
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
    """Return whether the output is already what a request would publish, as far as opening it tells."""
    noted = work.receipt(_receipt_name(request), request.fingerprint)
    return noted is not None and noted["published"] == _published(request)


def publish(
    request: PublishRequest,
    plans: Mapping[str, PackPlan],
    stores: Mapping[str, TokenStore],
    work: WorkDirectory,
    on_bins: Callable[[int], object],
) -> None:
    """Write the output, and call `on_bins` with the number of bins after each block.

    This replaces what an earlier preparation published there, in one step; anything else is an error.
    """
    replace = published_provenance(request.output) is not None  # all else was refused at the start
    try:
        _write(request, plans, stores, work, replace, on_bins)
    except TargetExistsError as error:
        raise TargetExistsError(
            f"another process has published {request.output} in the meantime; run the same command again to replace "
            "it, or choose another output"
        ) from error
    noted = {"published": _published(request), "tokenizer_path": request.tokenizer_path}
    if request.url is not None:
        noted["dataset"] = checksum(read_object(child(request.url, DATASET), MAX_DATASET_BYTES))
    work.write_receipt(_receipt_name(request), request.fingerprint, noted)


def num_shards(
    plan: PackPlan, packed_storage: str, shard_bytes: int, vocab_size: int | None, *, has_weights: bool = False
) -> int:
    """Return how many shards of about this size hold a plan.

    Example:
        >>> from megatron_packed_sft.packing.packer import pack
        >>> num_shards(pack([4, 4, 4], pack_size=4), "memmap_v1", shard_bytes=100, vocab_size=128_256)
        2
    """
    if storage_named(packed_storage).one_shard_per_split:
        return 1
    num_bytes = stored_bytes(plan, packed_storage, vocab_size, has_weights=has_weights)
    return min(math.ceil(num_bytes / shard_bytes), plan.num_bins)


def stored_bytes(plan: PackPlan, packed_storage: str, vocab_size: int | None, *, has_weights: bool = False) -> int:
    """Return about how many bytes the bins of a plan take on disk, all columns included.

    Example:
        >>> from megatron_packed_sft.packing.packer import pack
        >>> plan = pack([4, 3], pack_size=4)
        >>> stored_bytes(plan, "memmap_v1", vocab_size=128_256)  # 5 bytes per place, 32 per bin, 4 per sequence
        116
        >>> stored_bytes(plan, "memmap_v1", vocab_size=128_256, has_weights=True)
        164
    """
    figures = BinFigures(
        num_bins=plan.num_bins,
        pack_size=max(plan.pack_size, stored_width(plan)),
        num_sequences=len(plan.indices),
        num_tokens=plan.accounting.num_tokens_packed,
        vocab_size=vocab_size,
        has_weights=has_weights,
    )
    return storage_named(packed_storage).stored_bytes(figures)


def _receipt_name(request: PublishRequest) -> str:
    """Return the name of the output's receipt; several outputs may share a work directory."""
    name = request.output.name if request.url is None else base_name(request.url)
    return f"published/{name}-{checksum((request.url or str(request.output)).encode())[:8]}"


def _write(
    request: PublishRequest,
    plans: Mapping[str, PackPlan],
    stores: Mapping[str, TokenStore],
    work: WorkDirectory,
    replace: bool,
    on_bins: Callable[[int], object],
) -> None:
    with DatasetWriter(request.output, storage=request.packed_storage, overwrite=replace) as dataset:
        paths = {
            split: [dataset.shard_path(split, number) for number in range(_num_shards(request, plan, stores[split]))]
            for split, plan in plans.items()
        }
        if request.url is not None:
            begin_upload(request.url, [f"{split}/{path.name}" for split, some in paths.items() for path in some])
        for split, plan in plans.items():
            written = write_shards(
                plan,
                stores[split],
                paths[split],
                storage=request.packed_storage,
                executor=request.executor,
                pad_id=request.pad_id,
                on_bins=on_bins,
                url=None if request.url is None else child(request.url, split),
                scratch=work.scratch(),
            )
            if request.url is None:
                _tidy(paths[split])
            for path, one in zip(paths[split], written, strict=True):
                dataset.record(path, one.figures, one.entry)
        dataset.finalize(provenance=request.provenance, card=request.card)
    if request.url is not None:
        sent = [f"{split}/{path.name}" for split, some in paths.items() for path in some]
        upload(request.output, request.url, overwrite=True, elsewhere=sent)  # it was decided that it may be replaced
        shutil.rmtree(request.output, ignore_errors=True)


def _num_shards(request: PublishRequest, plan: PackPlan, store: TokenStore) -> int:
    vocab_size, has_weights = store.manifest.vocab_size, store.has_weights
    return num_shards(plan, request.packed_storage, request.shard_bytes, vocab_size, has_weights=has_weights)


def _tidy(paths: Sequence[Path]) -> None:
    """Remove what killed workers left beside the shards; a shard that is on another disk is an error."""
    folder = paths[0].parent
    with os_errors("list", folder):
        found = {entry.name: entry for entry in os.scandir(folder)}
    for path in paths:
        if path.name not in found:
            raise PackedSFTError(f"{path} was written, but is not here; output must be on a disk that all nodes share")
    for name, entry in found.items():
        if name.startswith("."):
            with os_errors("remove", entry.path):
                shutil.rmtree(entry.path, ignore_errors=True) if entry.is_dir() else os.unlink(entry.path)


def _published(request: PublishRequest) -> str | None:
    """Return the fingerprint of the output, checked as far as opening it goes; None if it is not whole."""
    if request.url is not None:
        return _published_at(request.url)
    try:
        dataset = open_dataset(request.output)
    except PackedSFTError:
        return None
    return dataset.fingerprint if dataset.is_whole() else None


def _published_at(url: str) -> str | None:
    """Return a checksum of a dataset in a store: of its dataset.json, and of the sizes and tags of all objects.

    The tag of an object changes when it is replaced by one of the same size.
    """
    there = list_objects(url)
    if DATASET not in there or UNFINISHED in there:
        return None
    listed = "".join(f"{name}\0{info.size}\0{info.tag}\n" for name, info in sorted(there.items()))
    return checksum(read_object(child(url, DATASET), MAX_DATASET_BYTES) + listed.encode())


def published_provenance(output: Path | str) -> Mapping[str, Any] | None:
    """Return the provenance of what an earlier preparation published; None if there is no such dataset.

    Args:
        output: a path, or a URL.
    """
    try:
        if isinstance(output, str):
            document = json.loads(read_object(child(output, DATASET), MAX_DATASET_BYTES))
        else:
            document = json.loads((output / DATASET).read_bytes())
    except ValueError:
        return None
    except OSError as error:
        if isinstance(output, str) and isinstance(error, StorageIOError) and not is_missing(error):
            raise  # what is there is unknown
        return None
    provenance = document.get("provenance") if isinstance(document, dict) else None
    is_ours = isinstance(provenance, dict) and provenance.get("made_by") == MADE_BY
    return provenance if is_ours else None


def refuse_other_files(output: Path | str) -> None:
    """Refuse an output, a path or a URL, that holds anything but a preparation's dataset, or that is not writable."""
    if published_provenance(output) is not None:
        return
    if isinstance(output, str):
        refuse_existing(output)
        try_writing(output)
        return
    if not output.exists():
        return
    if not output.is_dir():
        raise TargetExistsError(f"output {output} is a file; choose another output")
    names = sorted(entry.name for entry in output.iterdir())
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise TargetExistsError(f"output {output} holds other files ({shown}); choose another output")


def refuse_replacing(
    output: Path | str, provenance: Mapping[str, Any], *, overwrite: bool, by_size: bool = False
) -> None:
    """Refuse to replace a dataset of other settings or inputs, unless the user asked for it, and say what differs.

    Args:
        output: a path or a URL.
        provenance: what would be published.
        overwrite: whether the user asked for it.
        by_size: compare names and sizes of files, since their checksums are unknown.
    """
    published = published_provenance(output)
    if published is None or overwrite:
        return
    differences = list(_differences(_deciding(published, by_size), _deciding(provenance, by_size), ""))
    if not differences:
        return
    shown = ", ".join(differences[:_MOST_DIFFERENCES])
    if len(differences) > _MOST_DIFFERENCES:
        shown += f" and {len(differences) - _MOST_DIFFERENCES} more"
    raise TargetExistsError(
        f"output {redacted(str(output))} holds a dataset that was made differently: {shown}; add --overwrite to "
        "replace it, or choose another output"
    )


def _deciding(provenance: Mapping[str, Any], by_size: bool) -> dict[str, Any]:
    sources = provenance.get("sources") or {}
    if by_size:
        sources = {
            name: {**one, "files": [{**file, "checksum": None} for file in one.get("files") or ()]}
            for name, one in sources.items()
        }
    return {
        **{name: provenance.get(name) for name in _DECIDING},
        "sources": {
            name: {key: source.get(key) for key in _DECIDING_OF_SOURCE}
            for name, source in sources.items()
            if isinstance(source, Mapping)
        },
    }


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    """Yield what differs, such as `packing.pack_size 1024 -> 512`; keys that only one of the two has are left out."""
    if old == new:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            inner = f"{path}.{key}" if path else key
            if key in old and key in new:
                yield from _differences(old[key], new[key], inner.removeprefix("settings."))
            elif path == "sources":
                yield f"source {key} is {'gone' if key in old else 'new'}"
        return
    if path.endswith(".files"):
        yield f"{path} changed ({', '.join(sorted(_changed_files(old, new)))})"
        return
    yield f"{path} {_shown(old)} -> {_shown(new)}"


def _changed_files(old: Any, new: Any) -> set[str]:
    known = [{json.dumps(file, sort_keys=True) for file in files or []} for files in (old, new)]
    changed = known[0] ^ known[1]
    return {str(json.loads(file).get("name")) for file in changed} or {"their order"}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
