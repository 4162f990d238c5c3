"""The arrays of an open part of a token store, and the comparison of its sequences with their checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.storage.bins import NO_WEIGHTS
from megatron_packed_sft.storage.interface import ALWAYS, NEVER
from megatron_packed_sft.support.checksum import hash_function
from megatron_packed_sft.tokens.manifest import CHECKSUM_DTYPE
from megatron_packed_sft.tokens.sequence_checksums import checksum_of_sequence, checksums_of_sequences

_NO_CHECKSUMS = np.empty(0, CHECKSUM_DTYPE)
_NO_CHECKSUMS.flags.writeable = False  # as maps are; numba would compile again for an array that can be written

Numbers = npt.NDArray[np.int64]
KernelArguments = tuple[
    int,
    npt.NDArray[Any],
    npt.NDArray[np.uint8],
    npt.NDArray[np.float32],
    Numbers,
    Numbers,
    npt.NDArray[np.uint32],
    npt.NDArray[np.uint8],
    bool,
]


class PartArrays(NamedTuple):
    """The mapped arrays of one part, read-only."""

    ids: npt.NDArray[Any]
    train: npt.NDArray[np.uint8]
    begins: Numbers  # of the sequences, inside the arrays
    ends: Numbers
    weights: npt.NDArray[np.float32] | None  # None: every trained token counts 1
    checksums: npt.NDArray[np.uint32] | None  # None: not recorded
    verified: npt.NDArray[np.uint8]  # 1: this process has compared the sequence with its checksum
    path: Path  # of the files

    def kernel_weights(self) -> npt.NDArray[np.float32]:
        """Return the weights as kernels take them: an empty array when there are none."""
        return NO_WEIGHTS if self.weights is None else self.weights

    def for_kernels(self, verify: str) -> KernelArguments:
        """Return the first arguments of kernels that compare sequences when `verify` says so."""
        function = hash_function()
        checksums = self.checksums if function and verify != NEVER else None
        return (
            function,
            self.ids,
            self.train,
            self.kernel_weights(),
            self.begins,
            self.ends,
            _NO_CHECKSUMS if checksums is None else checksums,
            self.verified,
            verify == ALWAYS,
        )

    def find_unsound(self, sequences: Numbers, verify: str) -> int | None:
        """Compare sequences with their checksums, if that is due; return the first one that differs.

        Args:
            sequences: their numbers in the part; they lie inside the arrays.
            verify: one of `VERIFY`: when it is due.
        """
        if self.checksums is None or verify == NEVER:
            return None
        if len(sequences) == 1:  # without compiled code, which takes longer to load than to look at one
            return self._find_unsound_of_one(int(sequences[0]), verify)
        if not hash_function():  # an xxhash that does not export its functions
            due = sequences[(self.verified[sequences] == 0) | (verify == ALWAYS)]
            starts, lengths = self.begins[due], self.ends[due] - self.begins[due]
            wrong = checksums_of_sequences((self.ids, self.train, self.weights), starts, lengths) != self.checksums[due]
            if wrong.any():
                return int(due[wrong.argmax()])
            self.verified[sequences] = 1
            return None
        from megatron_packed_sft.tokens import gather_kernel

        place = gather_kernel.find_unsound(*self.for_kernels(verify), sequences)
        return None if place < 0 else int(sequences[place])

    def _find_unsound_of_one(self, sequence: int, verify: str) -> int | None:
        assert self.checksums is not None
        if verify == ALWAYS or not self.verified[sequence]:
            inside = slice(int(self.begins[sequence]), int(self.ends[sequence]))
            weights = None if self.weights is None else self.weights[inside]
            if checksum_of_sequence(self.ids[inside], self.train[inside], weights) != self.checksums[sequence]:
                return sequence
            self.verified[sequence] = 1
        return None
