"""`PretrainTokenStreamDataset`: random windows of the flat shards of one split of a cache."""

from __future__ import annotations

import logging
import os

import numpy as np
import torch

from megatron_packed_sft.caches.meta import META
from megatron_packed_sft.errors import InvalidInputError, ShardFileError
from megatron_packed_sft.storage.token_stream.files import FlatFile, find_files
from megatron_packed_sft.storage.token_stream.options import StreamOptions, read_metadata
from megatron_packed_sft.storage.token_stream.validate import RecordedFiles
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.support.wording import plural

logger = logging.getLogger(__name__)

_PATTERN = "shard_*.bin"
_DTYPE = "uint16"  # what the shards hold unless a meta.json says otherwise


class PretrainTokenStreamDataset:
    """Random windows of T + 1 tokens, each within one shard.

    A shard is chosen by its number of windows, so that every window of the split is equally likely. Shards are mapped,
    not read. Shards of at most T tokens have no window; how many tokens that leaves out is logged.

    Args:
        shards_dir: a folder of `shard_*.bin`, such as `cache/pretrain/wikitext/train`; the meta.json in it or above it
            says their dtype, which is uint16 without one.
        T: the number of predictions of a window.
        device: where the batches go.

    Example:
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> np.arange(100, dtype="<u2").tofile(f"{home}/shard_00000.bin")
        >>> dataset = PretrainTokenStreamDataset(home, T=8, device="cpu")
        >>> x, y = dataset.get_batch(B=4, generator=torch.Generator().manual_seed(0))
        >>> x.shape, bool((y[:, :-1] == x[:, 1:]).all())
        (torch.Size([4, 8]), True)
    """

    def __init__(self, shards_dir: str | os.PathLike[str], *, T: int, device: str | torch.device) -> None:  # noqa: N803
        if type(T) is not int or T < 1:
            raise InvalidInputError(f"T is {T!r}; give an integer of at least 1")
        self.path = local_path(shards_dir, "shards_dir")
        if not self.path.is_dir():
            raise InvalidInputError(f"shards_dir {self.path} is not a folder; give one that holds {_PATTERN}")
        self.T, self.device = T, torch.device(device)
        metadata = read_metadata(self.path)
        self.vocab_size = metadata.vocab_size
        options = StreamOptions(file_pattern=_PATTERN, dtype=None if metadata.dtype else _DTYPE)
        self._files: list[FlatFile] = find_files(self.path, options, metadata)
        self._refuse_other_sizes()
        num_windows = np.maximum(np.array([one.num_tokens for one in self._files], np.int64) - T, 0)
        self._ends = np.cumsum(num_windows)
        self._announce_short(num_windows)

    @property
    def num_windows(self) -> int:
        """How many different windows there are."""
        return int(self._ends[-1])

    def get_batch(self, *, B: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: N803
        """Draw B windows; return their first T tokens and the tokens that follow each of these, (B, T) int64.

        The generator alone decides: one in the same state gives the same batch.
        """
        if type(B) is not int or B < 1:
            raise InvalidInputError(f"B is {B!r}; give an integer of at least 1")
        draws = torch.randint(self.num_windows, (B,), generator=generator, device=generator.device).cpu().numpy()
        shards = np.searchsorted(self._ends, draws, side="right")
        rows = np.empty((B, self.T + 1), np.int64)
        for row, (number, draw) in enumerate(zip(shards.tolist(), draws.tolist(), strict=True)):
            file = self._files[number]
            start = draw - int(self._ends[number]) + file.num_tokens - self.T
            rows[row] = file.tokens(start, start + self.T + 1)
            self._refuse_outside(file, start, rows[row])
        windows = torch.from_numpy(rows).to(self.device)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _refuse_other_sizes(self) -> None:
        """Compare the shards with the meta.json of their cache, which lists them as `train/shard_00000.bin`."""
        sizes = {file.path: file.size for file in self._files}
        for path, record in RecordedFiles(self.path.parent / META).inside(self.path).items():
            if sizes.get(path) != record.bytes:
                found = f"has {sizes[path]:,} bytes" if path in sizes else "is missing"
                raise ShardFileError(
                    f"{path} {found}, but the meta.json of its cache says {record.bytes:,} bytes; copy it again"
                )

    def _refuse_outside(self, file: FlatFile, start: int, ids: np.ndarray) -> None:
        if self.vocab_size is not None and int(ids.max()) >= self.vocab_size:
            position = int((ids >= self.vocab_size).argmax())
            raise ShardFileError(
                f"{file.path}: the token at position {start + position:,} is {int(ids[position])}, but the vocabulary "
                f"of its meta.json has {self.vocab_size:,} ids; build the cache again"
            )

    def _announce_short(self, num_windows: np.ndarray) -> None:
        short = [file for file, count in zip(self._files, num_windows.tolist(), strict=True) if not count]
        if len(short) == len(self._files):
            longest = max(file.num_tokens for file in self._files)
            raise InvalidInputError(
                f"{self.path}: a window takes T + 1 = {self.T + 1:,} tokens, but the longest shard has {longest:,}; "
                f"lower T to at most {max(longest - 1, 0):,}, or build the cache with larger shards"
            )
        if short:
            logger.warning(
                "%s: %s shorter than a window of %s tokens; %s never drawn, lower T to reach them",
                self.path,
                f"{plural(len(short), 'shard')} {'is' if len(short) == 1 else 'are'}",
                f"{self.T + 1:,}",
                f"{plural(sum(file.num_tokens for file in short), 'token')} are",
            )
