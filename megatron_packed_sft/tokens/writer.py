"""Write a token store: processes publish whole parts, and one small file lists them at the end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.bins import as_int_array, as_weights, cast_checked
from megatron_packed_sft.storage.memmap_v1.manifest import CREATED_BY
from megatron_packed_sft.support import json_document
from megatron_packed_sft.support.array_files import (
    ID_DTYPE,
    ID_LIMITS,
    MASK_DTYPE,
    WEIGHT_DTYPE,
    GrowingArrayFile,
    id_dtype_for,
)
from megatron_packed_sft.support.atomic import StagedWriter, write_file
from megatron_packed_sft.support.checksum import DEFAULT_ALGORITHM
from megatron_packed_sft.support.json_document import MANIFEST
from megatron_packed_sft.support.paths import local_path
from megatron_packed_sft.tokens import manifest as part_manifest
from megatron_packed_sft.tokens.manifest import TokenPartManifest
from megatron_packed_sft.tokens.part import checksums_of_sequences

_MANY_SEQUENCES = 4096  # of a part; with fewer, loading compiled code takes longer than it saves
_SEQUENCES_AT_ONCE = 1 << 16


class TokenPartWriter(StagedWriter):
    """Writes one part of a token store.

    As a context manager it leaves nothing behind unless `finalize` succeeds. Memory is bounded by the data of one call.
    Weights are stored only if some trained token counts other than 1.

    Args:
        output_dir: path of the part, usually `store/part_000000`.
        vocab_size: ids must be below it; up to 65,536 they are stored as `<u2`, else (or when unknown) as `<i4`.
        tokenizer: name and fingerprint of the tokenizer.
        chat_template_fingerprint: of the template that rendered the chats.
        overwrite: replace an existing part.

    Example:
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> with TokenPartWriter(f"{home}/part_000000", vocab_size=100) as writer:
        ...     writer.append([5, 6, 7], train=[0, 1, 1])
        ...     writer.finalize().num_trained_tokens
        2
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        *,
        vocab_size: int | None = None,
        tokenizer: Mapping[str, Any] | None = None,
        chat_template_fingerprint: str | None = None,
        overwrite: bool = False,
    ) -> None:
        largest = ID_LIMITS[ID_DTYPE]
        if vocab_size is not None and not 1 <= vocab_size <= largest:
            raise InvalidInputError(f"vocab_size is {vocab_size}; it must be in 1..{largest}")
        self.dtype = id_dtype_for(vocab_size)
        self.vocab_size = vocab_size
        self._id_limit = vocab_size if vocab_size is not None else largest
        self._tokenizer = tokenizer
        self._template = chat_template_fingerprint
        self._num_sequences = 0
        self._num_tokens = 0
        self._num_trained = 0
        self._max_seq_len = 0
        super().__init__(output_dir, overwrite=overwrite)
        with self._aborting_on_error():
            self._ids = self._new_file(part_manifest.IDS, self.dtype)
            self._train = self._new_file(part_manifest.TRAIN, MASK_DTYPE)
            self._offsets = self._new_file(part_manifest.OFFSETS, part_manifest.OFFSET_DTYPE)
            self._offsets.append(np.zeros(1, part_manifest.OFFSET_DTYPE))
            self._checksums = self._new_file(part_manifest.CHECKSUMS, part_manifest.CHECKSUM_DTYPE)
        self._weights: GrowingArrayFile | None = None

    def append(self, input_ids: Any, train: Any, weights: Any = None) -> None:
        """Add one sequence: its ids, whether the model should learn to produce each of them, and with what weight."""
        ids = as_int_array(input_ids, f"sequence {self._num_sequences}: input_ids")
        self.append_many(ids, train, np.array([len(ids)]), weights)

    def append_many(self, input_ids: Any, train: Any, lengths: Any, weights: Any = None) -> None:
        """Add many sequences at once.

        Args:
            input_ids: the ids of all of them, one after the other.
            train: 0 or 1 for each id.
            lengths: how many ids belong to each sequence, at least one.
            weights: how much the loss of each id counts: above 0 where `train` is 1, else 0. None: 1 where trained.
        """
        self._require_open()
        name = f"sequences from {self._num_sequences} on: "
        ids = cast_checked(as_int_array(input_ids, f"{name}input_ids"), self.dtype, self._id_limit, f"{name}input_ids")
        mask = cast_checked(as_int_array(train, f"{name}train"), MASK_DTYPE, 2, f"{name}train")
        counts: npt.NDArray[np.int64] = as_int_array(lengths, f"{name}lengths").astype(np.int64)
        if len(counts) == 0:
            return
        if counts.min() < 1:
            raise InvalidInputError(
                f"{name}lengths is {int(counts.min())} at position {int(np.argmin(counts))}; "
                "a sequence has at least one token"
            )
        if int(counts.sum()) != len(ids) or len(mask) != len(ids):
            raise InvalidInputError(
                f"{name}lengths add up to {int(counts.sum())}, but there are {len(ids)} input_ids and {len(mask)} "
                "train values; the three must agree"
            )
        given = None if weights is None else self._checked_weights(weights, mask, name)
        with self._aborting_on_error():  # the files may disagree after a failure
            own_weights = self._append_weights(given, mask)
            is_many = self._num_sequences + len(counts) >= _MANY_SEQUENCES
            starts = np.cumsum(counts) - counts
            self._checksums.append(checksums_of_sequences((ids, mask, own_weights), starts, counts, compiled=is_many))
            self._ids.append(ids)
            self._train.append(mask)
            self._offsets.append((self._num_tokens + np.cumsum(counts)).astype(part_manifest.OFFSET_DTYPE))
        self._num_sequences += len(counts)
        self._num_tokens += len(ids)
        self._num_trained += int(mask.sum(dtype=np.int64))
        self._max_seq_len = max(self._max_seq_len, int(counts.max()))

    def finalize(self) -> TokenPartManifest:
        """Make everything durable and publish by one rename."""
        self._require_open()
        files = [self._ids, self._train, self._offsets, self._checksums]
        files += [] if self._weights is None else [self._weights]
        with self._closing():
            if self._num_sequences == 0:
                raise InvalidInputError(f"{self.target} would hold no sequence; append at least one")
            manifest = TokenPartManifest(
                num_sequences=self._num_sequences,
                num_tokens=self._num_tokens,
                num_trained_tokens=self._num_trained,
                max_seq_len=self._max_seq_len,
                has_weights=self._weights is not None,
                dtype=self.dtype,
                vocab_size=self.vocab_size,
                tokenizer=self._tokenizer,
                chat_template_fingerprint=self._template,
                files={file.path.name: file.finish() for file in files},
                checksum_algorithm=DEFAULT_ALGORITHM,
                created_by=CREATED_BY,
            )
            write_file(self._staging.path / MANIFEST, json_document.render(manifest.to_json()))
            self._staging.publish()
        return manifest

    def _checked_weights(self, weights: Any, mask: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.float32] | None:
        """Return the weights as they are stored; None if they equal the mask."""
        given = as_weights(weights, f"{name}weights")
        if len(given) != len(mask):
            raise InvalidInputError(f"{name}there are {len(given)} weights for {len(mask)} input_ids; pass one per id")
        differing = np.flatnonzero((given > 0) != (mask > 0))
        if differing.size:
            place = int(differing[0])
            raise InvalidInputError(
                f"{name}weights is {given[place]} at position {place}, where train is {mask[place]}; a weight is above "
                "0 exactly where train is 1"
            )
        return None if np.array_equal(given, mask) else given

    def _append_weights(
        self, weights: npt.NDArray[np.float32] | None, mask: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.float32] | None:
        """Write the weights of more tokens and return them; the first ones also fill in all tokens before."""
        if self._weights is None:
            if weights is None:
                return None
            self._weights = self._new_file(part_manifest.WEIGHTS, WEIGHT_DTYPE)
            for before in self._train.written():
                self._weights.append(before.astype(WEIGHT_DTYPE))
            self._recompute_checksums()
        own = mask.astype(WEIGHT_DTYPE) if weights is None else weights
        self._weights.append(own)
        return own

    def _recompute_checksums(self) -> None:
        """Compute the checksums of all sequences so far again, now with their weights."""
        if self._num_sequences == 0:
            return
        assert self._weights is not None
        arrays = self._ids.mapped(), self._train.mapped(), self._weights.mapped()
        self._checksums.clear()
        for start in range(0, self._num_sequences, _SEQUENCES_AT_ONCE):
            offsets = self._offsets.mapped()[start : start + _SEQUENCES_AT_ONCE + 1].astype(np.int64)
            self._checksums.append(checksums_of_sequences(arrays, offsets[:-1], np.diff(offsets)))

    def _new_file(self, name: str, dtype: str) -> GrowingArrayFile:
        file = GrowingArrayFile(self._staging.path / name, dtype, DEFAULT_ALGORITHM)
        self._cleanup.callback(file.close)
        return file


def part_path(store: str | os.PathLike[str], number: int) -> Path:
    """Return the path of part `number` of a store.

    Example:
        >>> str(part_path("/data/store", 3))
        '/data/store/part_000003'
    """
    return local_path(store) / f"part_{number:06d}"
