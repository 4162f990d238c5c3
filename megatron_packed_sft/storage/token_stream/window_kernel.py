"""The compiled core of token streams: where the documents of windows begin, and whether every id may be there.

Imported lazily (numba costs 0.2 s).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.support.compiled import kernel

IGNORED_LABEL = -100  # what torch's cross entropy skips


@kernel
def find_documents(
    windows: npt.NDArray[np.integer],
    eos_id: int,
    id_limit: int,
    lengths: npt.NDArray[np.int64],
    seq_offsets: npt.NDArray[np.int64],
    seq_starts: npt.NDArray[np.uint32],
    is_empty: npt.NDArray[np.bool_],
) -> tuple[int, int]:
    """Find the documents of each window; return the place of an id outside 0..id_limit-1, or (-1, -1).

    A document ends with its EOS. A window's last token predicts nothing, so where it would be a document of its own,
    the window ends before it. A window of nothing but EOS predicts nothing: it is one sequence without any loss, so
    that it has places in a batch.

    Args:
        windows: [N, W] ids.
        eos_id: ends a document; -1 takes each window for one document.
        id_limit: ids must be below it.
        lengths: [N], filled: how many tokens of each window belong to the bin.
        seq_offsets: [N + 1], filled: the documents of window n are seq_starts[seq_offsets[n] : seq_offsets[n + 1]].
        seq_starts: [at least N * W with documents, else N], filled.
        is_empty: [N], filled: which windows predict nothing.
    """
    num_windows, width = windows.shape
    seq_offsets[0] = 0
    num_starts = 0
    for n in range(num_windows):
        window = windows[n]
        lowest = np.int64(window[0])
        highest = lowest
        for j in range(width):
            lowest = min(lowest, np.int64(window[j]))
            highest = max(highest, np.int64(window[j]))
        if lowest < 0 or highest >= id_limit:
            for j in range(width):
                if window[j] < 0 or np.int64(window[j]) >= id_limit:
                    return n, j
        first_start = num_starts
        seq_starts[num_starts] = 0
        num_starts += 1
        lengths[n] = width
        if eos_id >= 0:
            for j in range(width - 2):
                if np.int64(window[j]) == eos_id:
                    seq_starts[num_starts] = j + 1
                    num_starts += 1
            if width > 1 and np.int64(window[width - 2]) == eos_id:
                lengths[n] = width - 1
        is_empty[n] = num_starts - first_start == lengths[n]
        if is_empty[n]:
            num_starts = first_start + 1
        seq_offsets[n + 1] = num_starts
    return -1, -1


@kernel
def fill_documents(
    window: npt.NDArray[np.int64], eos_id: int, labels: npt.NDArray[np.int64], doc_ids: npt.NDArray[np.int64]
) -> None:
    """Fill the labels and the document of each input of one window of W tokens; both have W - 1 places."""
    document = 0
    for j in range(window.size - 1):
        doc_ids[j] = document
        if window[j] == eos_id:
            document += 1
            labels[j] = IGNORED_LABEL
        else:
            labels[j] = window[j + 1]


@kernel
def scan_tokens(tokens: npt.NDArray[np.integer], eos_id: int, id_limit: int) -> tuple[int, int, int, int]:
    """Return how often EOS (-1: none) comes, the largest id, the first one outside 0..id_limit-1, and how many are."""
    num_eos = 0
    num_outside = 0
    first_outside = -1
    largest = np.int64(-1)
    for j in range(tokens.size):
        value = np.int64(tokens[j])
        num_eos += value == eos_id
        largest = max(largest, value)
        if value < 0 or value >= id_limit:
            num_outside += 1
            if first_outside < 0:
                first_outside = j
    return num_eos, int(largest), first_outside, num_outside
