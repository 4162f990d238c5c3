"""Datasets over caches: random windows of texts, and random examples of chats with assistant-only targets.

Files are mapped, never read into memory.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megatron_packed_sft.caches.cache_folder import META, read_meta
from megatron_packed_sft.errors import InvalidInputError, ShardFileError
from megatron_packed_sft.storage.token_stream.files import FlatFile, find_files
from megatron_packed_sft.storage.token_stream.options import StreamOptions, read_metadata
from megatron_packed_sft.storage.token_stream.validate import RecordedFiles
from megatron_packed_sft.support.array_files import MAX_HEADER, parse_npy_header
from megatron_packed_sft.support.atomic import os_errors
from megatron_packed_sft.support.json_document import Fields
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.support.truncated_files import truncated_file
from megatron_packed_sft.support.wording import plural

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100
_PATTERN = "shard_*.bin"
_DTYPE = "<u2"  # of the tokens, unless a meta.json says otherwise
_OFFSETS_DTYPE = "<i8"

Ids = npt.NDArray[np.int64]


class PretrainTokenStreamDataset:
    """Random windows of T + 1 tokens, each within one shard.

    A shard is chosen by its number of windows, so that every window of the split is equally likely. Shards are mapped,
    not read. Shards of at most T tokens have no window; a warning counts their tokens.

    Args:
        shards_dir: a folder of `shard_*.bin`, such as `cache/pretrain/wikitext/train`. The meta.json in it or above it
            gives their dtype; without one it is uint16.
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
        _check_positive("T", T)
        self.path = local_path(shards_dir, "shards_dir")
        if not self.path.is_dir():
            raise InvalidInputError(f"shards_dir {self.path} is not a folder; give one that holds {_PATTERN}")
        self.T, self.device = T, torch.device(device)
        metadata = read_metadata(self.path)
        self.vocab_size = metadata.vocab_size
        options = StreamOptions(file_pattern=_PATTERN, dtype=None if metadata.dtype else "uint16")
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
        """Draw B windows; return their first T tokens and the token after each of these, both (B, T) int64.

        A generator in the same state gives the same batch.
        """
        _check_positive("B", B)
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
                "%s: %s shorter than a window of %s tokens, so %s are never drawn; lower T to reach them",
                self.path,
                f"{plural(len(short), 'shard')} {'is' if len(short) == 1 else 'are'}",
                f"{self.T + 1:,}",
                plural(sum(file.num_tokens for file in short), "token"),
            )


class SFTExampleDataset:
    """Random examples as (x, y, y_masked).

    Args:
        tokens_path: the ids of all examples, end to end, such as `cache/sft/dolly15k/train_tokens.bin`.
        idx_path: where each example begins, as int64.
        T: the number of predictions.
        device: where the batches go.
        eot_id: the token that ends turns and pads short examples.
        asst_id: the assistant token; by default that of the meta.json beside the tokens. Without a meta.json it is the
            id before `eot_id` if every example agrees with the order sys, usr, asst, eot.

    Example:
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> np.array([101, 7, 103, 102, 8, 9, 103], "<u2").tofile(f"{home}/tokens.bin")
        >>> np.save(f"{home}/idx.npy", np.array([0], np.int64))
        >>> paths = f"{home}/tokens.bin", f"{home}/idx.npy"
        >>> dataset = SFTExampleDataset(*paths, T=8, device="cpu", eot_id=103, asst_id=102)
        >>> x, y, y_masked = dataset.get_batch(B=1, generator=torch.Generator().manual_seed(0))
        >>> y_masked.tolist()
        [[-100, -100, -100, 8, 9, 103, -100, -100]]
    """

    def __init__(
        self,
        tokens_path: str | os.PathLike[str],
        idx_path: str | os.PathLike[str],
        *,
        T: int,  # noqa: N803
        device: str | torch.device,
        eot_id: int,
        asst_id: int | None = None,
    ) -> None:
        _check_positive("T", T)
        self.T, self.device = T, torch.device(device)
        tokens, index = local_path(tokens_path, "tokens_path"), local_path(idx_path, "idx_path")
        metadata = read_metadata(tokens.parent)
        self.vocab_size = metadata.vocab_size
        self._file = _open_tokens(tokens, metadata.dtype)
        self._starts = _read_offsets(index, self._file)
        if not len(self._starts):
            raise InvalidInputError(f"{index} lists no examples; choose the other split")
        self._ends = np.append(self._starts[1:], self._file.num_tokens)
        self.eot_id = eot_id
        self.asst_id = self._assistant_id(asst_id)

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._starts)

    def get_batch(
        self,
        *,
        B: int,  # noqa: N803
        generator: torch.Generator,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw B examples, with replacement; return x, y and y_masked, each (B, T) int64.

        An example is cut to its first T + 1 tokens, or padded with `eot_id`; x is all of it but the last token, and y
        all but the first. `y_masked` keeps the targets after an assistant token up to and including the next eot, and
        is -100 elsewhere; padding never counts.
        """
        _check_positive("B", B)
        draws = torch.randint(len(self), (B,), generator=generator, device=generator.device).cpu().numpy()
        rows = np.full((B, self.T + 1), self.eot_id, np.int64)
        lengths = np.minimum(self._ends[draws] - self._starts[draws], self.T + 1)
        for row, (start, length) in enumerate(zip(self._starts[draws].tolist(), lengths.tolist(), strict=True)):
            rows[row, :length] = self._file.tokens(start, start + length)
        self._refuse_outside(rows, draws)
        is_trained = _assistant_mask(rows, lengths, self.asst_id, self.eot_id)
        targets = np.where(is_trained, rows, IGNORE_INDEX)[:, 1:]
        tokens = torch.from_numpy(rows).to(self.device)
        y_masked = torch.from_numpy(np.ascontiguousarray(targets)).to(self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), y_masked

    def _assistant_id(self, given: int | None) -> int:
        meta_path = self._file.path.with_name(META)
        if meta_path.exists():
            ids = Fields(read_meta(meta_path), str(meta_path)).optional_object("special_token_ids") or {}
            eot, asst = (Fields(ids, str(meta_path)).optional_integer(one, 0, (1 << 32) - 1) for one in ("eot", "asst"))
            if eot is not None and eot != self.eot_id:
                raise InvalidInputError(f"eot_id is {self.eot_id}, but {meta_path} says {eot}; pass eot_id={eot}")
            if given is not None and asst is not None and given != asst:
                raise InvalidInputError(f"asst_id is {given}, but {meta_path} says {asst}; leave asst_id out")
            given = asst if given is None else given
        if given is not None:
            return given
        guess = self.eot_id - 1
        firsts = self._file.tokens(0, self._file.num_tokens)[self._starts]
        if not np.isin(firsts, (guess - 2, guess - 1, guess)).all():
            raise InvalidInputError(
                f"the id of the assistant token of {self._file.path} is unknown; pass asst_id, or put the meta.json of "
                "the cache beside the tokens"
            )
        logger.info("%s: no meta.json; the assistant token is taken to be %d, before eot", self._file.path, guess)
        return guess

    def _refuse_outside(self, rows: Ids, draws: Ids) -> None:
        if self.vocab_size is not None and int(rows.max()) >= self.vocab_size:
            row, column = np.argwhere(rows >= self.vocab_size)[0].tolist()
            raise ShardFileError(
                f"{self._file.path}: token {column} of example {int(draws[row]):,} is {int(rows[row, column])}, but "
                f"the vocabulary of its meta.json has {self.vocab_size:,} ids; build the cache again"
            )


def _assistant_mask(rows: Ids, lengths: Ids, asst_id: int, eot_id: int) -> npt.NDArray[np.bool_]:
    """Return which tokens lie after an assistant token, up to and including the next eot.

    Args:
        rows: token ids, one example per row.
        lengths: how many tokens of each row are the example's own.
        asst_id, eot_id: the tokens.

    Example:
        >>> _assistant_mask(np.array([[1, 5, 3, 2, 6, 3, 3]]), np.array([6]), asst_id=2, eot_id=3).astype(int).tolist()
        [[0, 0, 0, 0, 1, 1, 0]]
    """
    positions = np.arange(rows.shape[1])
    # The last assistant token and the last eot before each token: the span is open if the former came later.
    begun = np.maximum.accumulate(np.where(rows == asst_id, positions, -1), axis=1)[:, :-1]
    ended = np.maximum.accumulate(np.where(rows == eot_id, positions, -1), axis=1)[:, :-1]
    result = np.zeros(rows.shape, np.bool_)
    result[:, 1:] = begun > ended
    return result & (positions < lengths[:, None])


def _check_positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise InvalidInputError(f"{name} is {value!r}; give an integer of at least 1")


def _open_tokens(path: Path, dtype: str | None) -> FlatFile:
    """Open the tokens of all examples, without mapping them yet."""
    dtype = dtype or _DTYPE
    with os_errors("open", path):
        size = path.stat().st_size
    itemsize = np.dtype(dtype).itemsize
    if size % itemsize:
        raise ShardFileError(
            f"{path} has {size:,} bytes, not a multiple of the {itemsize} bytes of a token; it was truncated: "
            "copy it again"
        )
    recorded = RecordedFiles(path.with_name(META)).files.get(path)
    if recorded is not None and recorded.bytes != size:
        raise truncated_file(path, size, recorded.bytes, "in its meta.json")
    return FlatFile(path, dtype, size // itemsize, 0, size)


def _read_offsets(path: Path, tokens: FlatFile) -> Ids:
    """Read the offsets whole (8 bytes per example) and check that each example has tokens of its own."""
    with os_errors("read", path), open(path, "rb") as file:
        data = file.read()
    header = parse_npy_header(data[:MAX_HEADER], str(path))
    if header.dtype != _OFFSETS_DTYPE or len(header.shape) != 1:
        raise ShardFileError(
            f"{path} holds {header.dtype} of shape {header.shape}, not a list of int64 offsets; build the cache again"
        )
    if len(data) != (expected := header.data_offset + header.shape[0] * 8):
        raise truncated_file(path, len(data), expected, "in its header")
    offsets = np.frombuffer(data, _OFFSETS_DTYPE, header.shape[0], header.data_offset)
    lengths = np.diff(np.append(offsets, tokens.num_tokens))
    if not len(offsets):
        if tokens.num_tokens:
            raise ShardFileError(f"{path} lists no examples, but {tokens.path.name} has tokens; copy both again")
    elif offsets[0] != 0 or (lengths < 1).any():
        wrong = 0 if offsets[0] != 0 else int((lengths < 1).argmax())
        raise ShardFileError(
            f"{path}: example {wrong:,} begins at {int(offsets[wrong]):,} and has {int(lengths[wrong]):,} of the "
            f"{tokens.num_tokens:,} tokens of {tokens.path.name}; the files do not match: copy both again"
        )
    return offsets.astype(np.int64)
