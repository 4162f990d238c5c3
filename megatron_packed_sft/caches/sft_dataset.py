"""`SFTExampleDataset`: random examples of an SFT cache, padded or cut to one length, with assistant-only targets."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_packed_sft.caches.example_files import open_tokens, read_offsets
from megatron_packed_sft.caches.meta import META, read_meta, special_token_id
from megatron_packed_sft.errors import InvalidInputError, ShardFileError
from megatron_packed_sft.storage.token_stream.options import read_metadata
from megatron_packed_sft.support.paths import local_path

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100

Ids = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class SFTExampleDataset:
    """Random examples as (x, y, y_masked).

    Args:
        tokens_path: the ids of all examples, end to end, such as `cache/sft/dolly15k/train_tokens.bin`.
        idx_path: where each example begins, as int64.
        T: the number of predictions.
        device: where the batches go.
        eot_id: ends turns, and fills up short examples.
        asst_id: the assistant sentinel; by default what the meta.json beside the tokens says. Without a meta.json it is
            the id before `eot_id` if every example fits that (the four tokens in the order sys, usr, asst, eot).

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
        if type(T) is not int or T < 1:
            raise InvalidInputError(f"T is {T!r}; give an integer of at least 1")
        self.T, self.device = T, torch.device(device)
        tokens, index = local_path(tokens_path, "tokens_path"), local_path(idx_path, "idx_path")
        metadata = read_metadata(tokens.parent)
        self.vocab_size = metadata.vocab_size
        self._file = open_tokens(tokens, metadata.dtype)
        self._starts = read_offsets(index, self._file)
        if not len(self._starts):
            raise InvalidInputError(f"{index} lists no examples; give a split that has some")
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

        An example is cut to its first T + 1 tokens, or filled up with `eot_id`; x is all of it but the last token, and
        y all but the first. `y_masked` keeps the targets after an assistant sentinel up to and including the next eot,
        and is -100 elsewhere; what fills an example up never counts.
        """
        if type(B) is not int or B < 1:
            raise InvalidInputError(f"B is {B!r}; give an integer of at least 1")
        draws = torch.randint(len(self), (B,), generator=generator, device=generator.device).cpu().numpy()
        rows = np.full((B, self.T + 1), self.eot_id, np.int64)
        lengths = np.minimum(self._ends[draws] - self._starts[draws], self.T + 1)
        for row, (start, length) in enumerate(zip(self._starts[draws].tolist(), lengths.tolist(), strict=True)):
            rows[row, :length] = self._file.tokens(start, start + length)
        self._refuse_outside(rows, draws)
        is_trained = assistant_mask(rows, lengths, self.asst_id, self.eot_id)
        targets = np.where(is_trained, rows, IGNORE_INDEX)[:, 1:]
        tokens = torch.from_numpy(rows).to(self.device)
        y_masked = torch.from_numpy(np.ascontiguousarray(targets)).to(self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), y_masked

    def _assistant_id(self, given: int | None) -> int:
        meta_path = self._file.path.with_name(META)
        if meta_path.exists():
            meta = read_meta(meta_path)
            recorded_eot = special_token_id(meta, "eot", str(meta_path))
            if recorded_eot is not None and recorded_eot != self.eot_id:
                raise InvalidInputError(
                    f"eot_id is {self.eot_id}, but {meta_path} says {recorded_eot}; pass eot_id={recorded_eot}"
                )
            recorded = special_token_id(meta, "asst", str(meta_path))
            if given is not None and recorded is not None and given != recorded:
                raise InvalidInputError(f"asst_id is {given}, but {meta_path} says {recorded}; leave asst_id out")
            if given is None and recorded is not None:
                return recorded
        if given is not None:
            return given
        guess = self.eot_id - 1
        firsts = self._first_tokens()
        if not np.isin(firsts, (guess - 2, guess - 1, guess)).all():
            raise InvalidInputError(
                f"nothing says which id the assistant sentinel of {self._file.path} has; pass asst_id, or put the "
                "meta.json of the cache beside the tokens"
            )
        logger.info("%s: no meta.json, so the assistant sentinel is taken to be %d, before eot", self._file.path, guess)
        return guess

    def _first_tokens(self) -> npt.NDArray[Any]:
        return self._file.tokens(0, self._file.num_tokens)[self._starts]

    def _refuse_outside(self, rows: Ids, draws: Ids) -> None:
        if self.vocab_size is not None and int(rows.max()) >= self.vocab_size:
            row, column = np.argwhere(rows >= self.vocab_size)[0].tolist()
            raise ShardFileError(
                f"{self._file.path}: token {column} of example {int(draws[row]):,} is {int(rows[row, column])}, but "
                f"the vocabulary of its meta.json has {self.vocab_size:,} ids; build the cache again"
            )


def assistant_mask(rows: Ids, lengths: Ids, asst_id: int, eot_id: int) -> Bools:
    """Return which tokens lie after an assistant sentinel, up to and including the next eot.

    Args:
        rows: token ids, one example per row.
        lengths: how many tokens of each row are the example's own.
        asst_id, eot_id: the sentinels.

    Example:
        >>> assistant_mask(np.array([[1, 5, 3, 2, 6, 3, 3]]), np.array([6]), asst_id=2, eot_id=3).astype(int).tolist()
        [[0, 0, 0, 0, 1, 1, 0]]
    """
    positions = np.arange(rows.shape[1])
    # The last sentinel and the last eot before each token: the span is open if the sentinel came later.
    begun = np.maximum.accumulate(np.where(rows == asst_id, positions, -1), axis=1)[:, :-1]
    ended = np.maximum.accumulate(np.where(rows == eot_id, positions, -1), axis=1)[:, :-1]
    result = np.zeros(rows.shape, np.bool_)
    result[:, 1:] = begun > ended
    return result & (positions < lengths[:, None])
