"""What a report reads: the length of every sequence, and the tokens of all bins or of an even sample of them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.data.bin_readers import BinReader, JoinedBinReader
from megatron_packed_sft.data.shard_readers import ShardBinReader
from megatron_packed_sft.inspect.tokens_of_bin import trained_weights
from megatron_packed_sft.prepare.audit import TrainedTokens

Int64 = npt.NDArray[np.int64]

_MOST_TOKENS = 12_000_000
_MOST_BINS = 20_000


class BinLengths:
    """The lengths of all sequences, bin after bin.

    Args:
        lengths: tokens of each sequence.
        offsets: the sequences of bin b are lengths[offsets[b] : offsets[b + 1]].

    Example:
        >>> lengths = BinLengths(np.array([3, 1, 2]), np.array([0, 2, 3]))
        >>> lengths.bin_tokens.tolist(), lengths.attention_costs.tolist()
        ([4, 2], [10, 4])
    """

    def __init__(self, lengths: Int64, offsets: Int64) -> None:
        self.lengths = lengths
        self.offsets = offsets

    @property
    def num_bins(self) -> int:
        """Number of bins."""
        return len(self.offsets) - 1

    @cached_property
    def bin_tokens(self) -> Int64:
        """Tokens of each bin."""
        return np.add.reduceat(self.lengths, self.offsets[:-1])

    @cached_property
    def attention_costs(self) -> Int64:
        """Sum of the squared sequence lengths of each bin, which its attention costs."""
        return np.add.reduceat(self.lengths**2, self.offsets[:-1])

    @property
    def sequences_per_bin(self) -> Int64:
        """Number of sequences in each bin."""
        return np.diff(self.offsets)


class TokensRead(TrainedTokens):
    """The tokens of some bins, end to end.

    Args:
        bins: the numbers of the bins, ascending.
        ids: of all tokens.
        is_trained: of all tokens, at the token's own position.
        starts: where each sequence begins among the tokens.
        bin_of: the bin of each sequence.
        sequence_of: the number of each sequence in its bin.
    """

    def __init__(
        self,
        bins: Int64,
        ids: npt.NDArray[np.int32],
        is_trained: npt.NDArray[np.bool_],
        starts: Int64,
        bin_of: Int64,
        sequence_of: Int64,
    ) -> None:
        super().__init__(is_trained, starts)
        self.bins = bins
        self.ids = ids
        self.bin_of = bin_of
        self.sequence_of = sequence_of

    @cached_property
    def is_last(self) -> npt.NDArray[np.bool_]:
        """Whether each token is the last of its sequence."""
        last = np.zeros(len(self.ids), np.bool_)
        last[self.ends - 1] = True
        return last

    def sequence_at(self, tokens: Int64) -> Int64:
        """Return the sequences that some tokens are in."""
        return np.searchsorted(self.starts, tokens, side="right") - 1


def bin_lengths(reader: BinReader) -> BinLengths:
    """Return the lengths of all sequences of some bins; of memory-mapped shards only the indices are read."""
    parts = _lengths_of(reader)
    counts = np.concatenate([counts for _, counts in parts])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return BinLengths(np.concatenate([lengths for lengths, _ in parts]), offsets)


def spread(num_bins: int, count: int) -> Int64:
    """Return about `count` bins, evenly spread, including the first and the last.

    Example:
        >>> spread(100, 5).tolist(), spread(3, 5).tolist()
        ([0, 24, 49, 74, 99], [0, 1, 2])
    """
    return np.unique(np.linspace(0, num_bins - 1, max(1, min(num_bins, count))).astype(np.int64))


def bins_to_read(lengths: BinLengths, also: Int64) -> Int64:
    """Return the bins to read: all, or an even sample that takes seconds, and the bins in `also`."""
    mean = max(1, int(lengths.bin_tokens.mean()))
    chosen = spread(lengths.num_bins, min(_MOST_BINS, max(1, _MOST_TOKENS // mean)))
    return np.union1d(chosen, also)


def read_tokens(reader: BinReader, bins: Int64) -> TokensRead:
    """Read some bins."""
    ids, trained, starts, counts = [], [], [], []
    num_tokens = 0
    for number in bins.tolist():
        one = reader.bin(number)
        ids.append(np.asarray(one.input_ids, np.int32))
        trained.append(trained_weights(one) > 0)
        starts.append(np.asarray(one.seq_start_id, np.int64) + num_tokens)
        counts.append(one.num_sequences)
        num_tokens += len(one.input_ids)
    return TokensRead(
        bins,
        np.concatenate(ids),
        np.concatenate(trained),
        np.concatenate(starts),
        np.repeat(bins, counts),
        np.concatenate([np.arange(count) for count in counts]),
    )


def _lengths_of(reader: BinReader) -> list[tuple[Int64, Int64]]:
    """Return (length of each sequence, sequences of each bin) of each part."""
    if isinstance(reader, JoinedBinReader):
        return [one for source in reader.sources for one in _lengths_of(source)]
    if isinstance(reader, ShardBinReader):
        return [reader.shard(number).sequence_lengths() for number in range(len(reader.paths))]
    found = [reader.bin(number) for number in range(len(reader))]
    lengths = [np.diff([*one.seq_start_id.tolist(), len(one.input_ids)]) for one in found]
    return [(np.concatenate(lengths).astype(np.int64), np.array([len(one) for one in lengths], np.int64))]
