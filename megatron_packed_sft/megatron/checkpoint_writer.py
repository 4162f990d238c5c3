"""Write torch_dist checkpoints with Megatron-Core: sharded state dicts, and weights for Megatron-LM and Bridge.

Megatron-Core forks processes that write. One that is killed alone, such as for lack of memory, would make its rank wait
forever, and one whose rank is killed would live on; so threads write here. And torch's writer calls a full disk
"unexpected pos 704 vs 598"; here an error names the path, the reason and the bytes that are needed.

    output/latest_checkpointed_iteration.txt    "release": no optimizer, no position in the data
    output/release/.metadata, *.distcp          the weights, under the names that every parallel layout loads
    output/release/common.pt                    the arguments that Megatron-LM reads first
    output/release/run_config.yaml              the same for Megatron-Bridge
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_packed_sft.errors import NoSpaceError, PackedSFTError, StorageIOError
from megatron_packed_sft.megatron.weights.layout import LAYERS, ModelShape, Weight
from megatron_packed_sft.support.atomic import os_errors, write_file

_REMEDIES: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space or choose another output"),
    errno.EFBIG: "raise the file-size limit (ulimit -f)",
}
TRACKER: Final = "latest_checkpointed_iteration.txt"
RELEASE: Final = "release"
RUN_CONFIG: Final = "run_config.yaml"
CHECKPOINT_VERSION: Final = 3.0
# Modules that look for an entry of their own when they are loaded, and accept None; the last is Transformer Engine's.
_WITH_STATE: Final = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "self_attention.core_attention",
)
_SMALL_FILES: Final = 1 << 20  # room for .metadata and the like
# torch's messages about a file that cannot be written to the end.
_STREAM_WRITER = re.compile(r"inline_container|PytorchStreamWriter|unexpected pos")


def write_tensors(tensors: Mapping[str, Any], folder: Path, target: Path) -> None:
    """Write a sharded state dict with Megatron-Core; a collective call.

    Args:
        tensors: the sharded state dict.
        folder: to write into; it exists.
        target: its final name, for messages.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    _gather_results_in_process()
    needed = _num_bytes(tensors)
    with _write_errors(folder, target, needed):
        request = dist_checkpointing.save(tensors, str(folder), async_sharded_save=True)
        # Another function if this rank has nothing to write, or in another release of Megatron-Core.
        if getattr(request.async_fn, "func", None) is FileSystemWriterAsync.write_preloaded_data_multiproc:
            request = request._replace(async_fn=partial(_write_in_threads, *request.async_fn.args))
        request.execute_sync()


def _write_in_threads(
    transforms: list[Any], use_msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]
) -> None:
    """Write the files of this rank; replaces Megatron-Core's function that forks, whose arguments it takes.

    Args:
        transforms, use_msc: options of Megatron-Core's writer.
        rank: of this process.
        buckets: the contents of each file.
        results: receives the results by file, or the error.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    written: queue.Queue[Any] = queue.Queue()
    unfinished: queue.Queue[int] = queue.Queue()
    threads = []
    for number, bucket in enumerate(buckets):
        unfinished.put(number)
        arguments = (transforms, number, bucket, written, unfinished)
        options = {"use_fsync": True, "use_msc": use_msc}
        # Daemons, so that a second Ctrl-C does not wait for them.
        threads.append(
            threading.Thread(
                target=FileSystemWriterAsync.write_preloaded_data, args=arguments, kwargs=options, daemon=True
            )
        )
        threads[-1].start()
    for thread in threads:
        thread.join()
    outcomes = dict(written.get() for _ in range(written.qsize()))
    errors = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
    # If there are fewer outcomes than files, Megatron-Core raises an error of its own.
    results.put(errors[0] if errors else dict(sorted(outcomes.items())))


def _gather_results_in_process() -> None:
    """Keep Megatron-Core from starting a process that gathers the results of its writers.

    Only saving in the background needs it. torchrun forwards SIGTERM to all processes of a rank, so it would be gone
    when the run saves because of that signal. Megatron-Core has no public switch for this.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


def _num_bytes(tensors: Mapping[str, Any]) -> int:
    """Return the bytes that all ranks write; a collective call."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    values = (one for one in nested_values(tensors) if is_main_replica(getattr(one, "replica_id", 0)))
    own = sum(one.data.nbytes for one in values if isinstance(getattr(one, "data", None), torch.Tensor))
    shares: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(shares, own)
    return sum(shares)


@contextmanager
def _write_errors(folder: Path, target: Path, needed: int) -> Iterator[None]:
    """Say in one sentence why a checkpoint cannot be written."""
    try:
        with os_errors("write", target, needed):
            yield
    except CheckpointException as error:  # of all ranks, with the reasons on the first
        reasons = [reason for reason, _ in error.failures.values()]
    except PackedSFTError as error:
        if getattr(error, "errno", None) not in _REMEDIES:
            raise
        reasons = [error]
    except RuntimeError as error:
        if not _STREAM_WRITER.search(str(error)):
            raise
        reasons = [error]
    else:
        return
    raise _explain(reasons, folder, target, needed) from None


def _explain(reasons: list[BaseException], folder: Path, target: Path, needed: int) -> StorageIOError:
    found = [getattr(reason, "errno", None) for reason in reasons]
    number = next((one for one in found if one in _REMEDIES), None) or _probe(folder, needed)
    if number in _REMEDIES:
        return NoSpaceError(
            f"cannot write {target}: {os.strerror(number)}; it needs {needed:,} bytes; {_REMEDIES[number]}, then run "
            "the same command again"
        )
    said = "; ".join(str(reason).partition("\n")[0] for reason in reasons) or "see rank 0's output"
    return StorageIOError(
        f"cannot write {target}: {said}; free some space or choose another output, then run the same command again"
    )


def _probe(folder: Path, needed: int) -> int:
    """Return the error number with which the system refuses the bytes that are still missing, or 0."""
    probe = folder / ".probe"
    try:
        written = sum(one.stat().st_size for one in folder.iterdir())
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, max(needed - written, 0) + _SMALL_FILES)
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                probe.unlink()
    except OSError as error:
        return error.errno or 0
    return 0


def sharded_weights(
    weights: Iterable[Weight],
    read: Callable[[Weight], torch.Tensor],
    *,
    num_layers: int,
    dtype: torch.dtype,
    on_bytes: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Return all weights with their places in a checkpoint, as `dist_checkpointing.save` takes them.

    Args:
        weights: of the model.
        read: returns one of them, whole.
        num_layers: of the model; a checkpoint stacks them.
        dtype: of the checkpoint.
        on_bytes: called with the bytes of each weight.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    found: dict[str, Any] = {}
    for weight in weights:
        value = read(weight).to(dtype).contiguous()
        if weight.layer is None:
            found[weight.name] = ShardedTensor.from_rank_offsets(weight.name, value)
        else:
            place = (0, weight.layer, num_layers)
            entry = ShardedTensor.from_rank_offsets(f"{LAYERS}{weight.name}", value, place, prepend_axis_num=1)
            found[f"{LAYERS}{weight.layer}.{weight.name}"] = entry
        if on_bytes is not None:
            on_bytes(value.nbytes)
    for layer in range(num_layers):
        for module in _WITH_STATE:
            name = f"{module}._extra_state"
            found[f"{LAYERS}{layer}.{name}"] = ShardedObject(f"{LAYERS}{name}", None, (num_layers,), (layer,))
    return found


def common_state(shape: ModelShape) -> dict[str, Any]:
    """Return the state that Megatron-LM reads first: its arguments, such as the parallel sizes."""
    return {
        "args": argparse.Namespace(**dict(_arguments(shape))),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": 0,
    }


def write_descriptions(directory: Path, release: Path, shape: ModelShape) -> None:
    """Write Megatron's tracker file and Megatron-Bridge's run_config.yaml.

    Args:
        directory: the checkpoint's root.
        release: the folder with the weights in it.
        shape: of the model.
    """
    config = {
        "model": dict(_arguments(shape)),
        "checkpoint": {"save_optim": False, "save_rng": False, "fully_parallel_save": False},
    }
    write_file(release / RUN_CONFIG, (json.dumps(config, indent=2) + "\n").encode())  # JSON is YAML
    write_file(directory / TRACKER, f"{RELEASE}\n".encode())


def _arguments(shape: ModelShape) -> Iterator[tuple[str, Any]]:
    """Yield the model's arguments under the names that Megatron-LM and Megatron-Bridge share."""
    for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        yield name, getattr(shape, name)
    yield "kv_channels", shape.head_dim
    yield "vocab_size", shape.vocab_size
    yield "rotary_base", shape.rotary_base
    yield "qk_layernorm", shape.qk_layernorm
    yield "add_qkv_bias", shape.qkv_bias
    yield "add_bias_linear", False
    yield "normalization", "RMSNorm"
    yield "layernorm_epsilon", shape.layernorm_epsilon
    yield "share_embeddings_and_output_weights", shape.tie_embeddings
    yield "untie_embeddings_and_output_weights", not shape.tie_embeddings
    yield "tensor_model_parallel_size", 1
    yield "pipeline_model_parallel_size", 1
    yield "no_save_optim", True
    yield "no_save_rng", True
    yield "ckpt_fully_parallel_save", False
