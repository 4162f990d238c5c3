"""Whether the cache of the node has room for what a shuffled order visits; if not, it is said at the start."""

from __future__ import annotations

from megatron_packed_sft.data.readers.interface import BinReader, JoinedBinReader
from megatron_packed_sft.data.readers.shards import ShardBinReader
from megatron_packed_sft.errors import PackedSFTError
from megatron_packed_sft.support.wording import byte_count, plural

_TOLD: set[tuple[str, str, int | None]] = set()
_WINDOWS_AT_ONCE = 2  # where one ends, the next has begun to be fetched
_BESIDE_BINS = 10_000  # bytes: headers and manifest of a memmap_v1 shard, which matter only if it is tiny


def shortage(source: BinReader, window: int | None, key: str = "{}") -> str | None:
    """Return one sentence, once in a process, if a shuffled pass fetches shards that it has had and lost.

    Args:
        source: what is read.
        window: how many shards are mixed at a time; None for a full shuffle.
        key: how the user spells settings, such as data.{}.
    """
    parts = source.sources if isinstance(source, JoinedBinReader) else (source,)
    remote = [part for part in parts if isinstance(part, ShardBinReader) and part.remote]
    if not remote or not remote[0].remote:
        return None
    cache = remote[0].remote[0].cache
    told = (source.description, str(cache.directory), cache.asked_size)
    if told in _TOLD:
        return None
    _TOLD.add(told)
    room, num_shards = cache.size, sum(len(part.entries) for part in remote)
    for look in (_estimated, _measured):  # a request only where the estimate does not fit
        sizes = [look(part) for part in remote]
        num_bytes = sum(sizes)
        shard = max((size / len(part.entries) for size, part in zip(sizes, remote, strict=True) if size), default=1.0)
        needed = num_bytes if window is None else int(min(_WINDOWS_AT_ONCE * window, num_shards) * shard)
        if needed <= room:
            return None
    fitting = max(int(room / shard / _WINDOWS_AT_ONCE), 1)
    smaller = f"set {key.format('shard_window')}={fitting} to visit few shards at a time, or "
    if not isinstance(source, ShardBinReader) or (window is not None and window <= fitting):
        smaller = ""  # a list or a blend has no windows
    what = "a full shuffle visits all of it at any time"
    if window is not None:
        what = f"{key.format('shard_window')}={window} visits {byte_count(needed)} of it at a time"
    return (
        f"{source.description} has about {byte_count(num_bytes)}, and {what}, but the cache {cache.directory} holds "
        f"{byte_count(room)} (about {plural(int(room / shard), 'shard')} of {num_shards:,}), so shards will be "
        f"fetched repeatedly; {smaller}raise {key.format('cache_size')} to {byte_count(int(needed * 1.05))}"
    )


def _measured(part: ShardBinReader) -> int:
    """Return about the size of the shards, by the manifest of the first: no other document tells how wide ids are."""
    if part.remote is None or part.entries[0].num_bytes is not None:
        return _estimated(part)
    try:
        return part.remote[0].contents.num_bytes * len(part) // part.entries[0].num_bins
    except PackedSFTError:  # whoever reads the shard says what is wrong
        return _estimated(part)


def _estimated(part: ShardBinReader) -> int:
    """Return the size of the shards: as dataset.json lists it, or what their bins take at most."""
    listed = [entry.num_bytes for entry in part.entries]
    known = [size for size in listed if size is not None]
    if len(known) == len(listed):
        return sum(known)
    return len(part.entries) * _BESIDE_BINS + part.storage.stored_bytes(part.figures)
