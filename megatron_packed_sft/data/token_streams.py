"""Token streams as datasets: items for plain training loops, and our batches.

window      5  9  1  E  7  3
input_ids   5  9  1  E  7             item: what a plain loop takes
labels      9  1  E  .  3             . is -100: E would predict the next document
doc_ids     0  0  0  0  1
tokens      5  9  1  7                batch: E's place, which trains nothing, is left out
labels      9  1  E  3                positions 0 1 2 | 0, cu_seqlens 0 3 4
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, cast

import numpy as np

from megatron_packed_sft.data.datasets import DatasetArguments, PackedDataset
from megatron_packed_sft.data.made_with import eos_id_of, id_limit_of
from megatron_packed_sft.data.options import OpenOptions
from megatron_packed_sft.data.shard_readers import ShardBinReader
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.storage.token_stream.options import StreamOptions
from megatron_packed_sft.storage.token_stream.reader import TokenStream
from megatron_packed_sft.storage.token_stream.storage import TokenStreamStorage
from megatron_packed_sft.support.paths import local_path

_ITEM_FIELDS = ("input_ids", "labels")


class TokenStreamDataset(PackedDataset):
    """Windows of a directory of flat .npy or .bin files of token ids.

    An item is `{"input_ids", "labels"}`, int64 tensors of `seq_length`; with `pack_sequences` there is also `doc_ids`,
    and labels are -100 where the next token belongs to another document. `collate_fn` and `fetch_batch` make batches
    of any contract. A padding sample (a negative index) has all labels -100, and says so in `is_padding`.

    Args:
        data_dir: the directory, or one file.
        tokenizer: gives the EOS id and the vocabulary; an int, the EOS id, will do. None reads the stream without.
        stream: how long windows are, where documents end, which files are read.

    The other arguments are those of `PackedDataset`.

    Example:
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> np.save(f"{home}/shard_0.npy", np.array([5, 9, 1, 0, 7, 3], np.uint16))
        >>> dataset = TokenStreamDataset(home, stream=StreamOptions(seq_length=5, pack_sequences=True, eos_id=0))
        >>> dataset[0]["labels"].tolist(), dataset[0]["doc_ids"].tolist()
        ([9, 1, 0, -100, 3], [0, 0, 0, 0, 1])
    """

    epoch: int = 0

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        tokenizer: Any = None,
        stream: StreamOptions | None = None,
        **arguments: Unpack[DatasetArguments],
    ) -> None:
        stream = stream or StreamOptions()
        trusts_tokenizer = not arguments.get("opening", OpenOptions()).allow_tokenizer_mismatch
        if tokenizer is not None:
            stream = replace(stream, tokenizer_eos_id=eos_id_of(tokenizer))
        if stream.vocab_size is None and trusts_tokenizer:
            stream = replace(stream, vocab_size=id_limit_of(tokenizer))
        source = ShardBinReader.of_shards(TokenStreamStorage(stream), [local_path(data_dir)])
        arguments.setdefault("max_seq_length", stream.seq_length)
        super().__init__(source, tokenizer, **arguments)

    @property
    def streams(self) -> list[TokenStream]:
        """The streams, opened; several directories make one each."""
        assert isinstance(self.source, ShardBinReader)
        opened = [self.source.shard(number) for number in range(len(self.source.entries))]
        return cast("list[TokenStream]", opened)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return one item."""
        if self._order is None and 0 <= index < self._num_samples:  # arrays for one number would take half of the time
            return self._item(index, is_padding=False)
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Mapping[str, Any]]:
        """Return many items."""
        windows, is_padding = self._locate(indices)
        return [self._item(*one) for one in zip(windows.tolist(), is_padding.tolist(), strict=True)]

    def collate_fn(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Make a batch of items that `__getitem__` returned."""
        return super().collate_fn([_packed_sample(item, number) for number, item in enumerate(samples)])

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of samples; where an epoch stands is the state of a loader or sampler."""
        return {"epoch": self.epoch, "total_samples": len(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the epoch; a state of another number of samples belongs to other data and is refused."""
        total = state.get("total_samples", len(self))
        if total != len(self):
            raise InvalidInputError(
                f"the state is of {total:,} samples, but {self.source.description} has {len(self):,}; open the data "
                "that it was saved with, with the same seq_length"
            )
        self.epoch = int(state.get("epoch", 0))

    def _item(self, index: int, is_padding: bool) -> Mapping[str, Any]:
        import torch

        assert isinstance(self.source, ShardBinReader)
        shard, inside = self.source.place(index)
        stream = cast("TokenStream", shard)
        window = stream.window(inside)
        whole = torch.from_numpy(window)
        item: dict[str, Any] = {"input_ids": whole[:-1], "labels": whole[1:]}
        if stream.options.pack_sequences:
            from megatron_packed_sft.storage.token_stream import window_kernel

            assert stream.eos_id is not None
            labels, doc_ids = np.empty((2, window.size - 1), np.int64)
            window_kernel.fill_documents(window, stream.eos_id, labels, doc_ids)
            item |= {"labels": torch.from_numpy(labels), "doc_ids": torch.from_numpy(doc_ids)}
        if is_padding:
            item |= {"hidden_labels": item["labels"], "labels": torch.full_like(item["labels"], -100)}
            item["is_padding"] = True
        return self._for_trainer(item)


class MemoryMappedDataset(TokenStreamDataset):
    """KempnerForge's dataset of that name: `seq_len` counts the window's tokens, and windows do not overlap.

    An item has seq_len - 1 inputs, and a file gives len // seq_len of them. `TokenStreamDataset` is the same with
    windows that overlap by one token, so that no prediction is lost between two of them.

    Args:
        data_dir: the directory.
        seq_len: tokens of a window.
        file_pattern: which files.
        pack_sequences: tell the documents of a window apart.
        eos_token_id: ends a document.
        tokenizer: as in `TokenStreamDataset`.

    Example:
        >>> import tempfile; home = tempfile.mkdtemp()
        >>> np.save(f"{home}/shard_0.npy", np.arange(10, dtype=np.uint16))
        >>> dataset = MemoryMappedDataset(home, 5)
        >>> len(dataset), dataset[1]["input_ids"].tolist()
        (2, [5, 6, 7, 8])
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        seq_len: int,
        file_pattern: str = "*.npy",
        pack_sequences: bool = False,
        eos_token_id: int | None = None,
        tokenizer: Any = None,
        **arguments: Unpack[DatasetArguments],
    ) -> None:
        stream = StreamOptions(
            seq_length=seq_len - 1,
            file_pattern=file_pattern,
            pack_sequences=pack_sequences,
            eos_id=eos_token_id,
            overlap=False,
        )
        super().__init__(data_dir, tokenizer, stream, **arguments)


def _packed_sample(item: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the packed sample of an item: its window, the starts of its documents and a loss mask."""
    if missing := [field for field in _ITEM_FIELDS if field not in item]:
        raise InvalidInputError(f"item {number} of the batch has no {missing[0]}; pass items of this dataset")
    inputs = np.asarray(item["input_ids"])
    last = np.asarray(item.get("hidden_labels", item["labels"]))[-1:]
    # Where the last label is -100, the last token is a document of its own, which no batch holds.
    ids = inputs if last[0] < 0 else np.concatenate([inputs, last])
    starts = [0]
    if "doc_ids" in item:
        starts += (np.flatnonzero(np.diff(np.asarray(item["doc_ids"]))) + 1).tolist()
    is_empty = len(starts) == len(ids)  # nothing but EOS: one sequence without any loss, as in `find_documents`
    starts = [0] if is_empty else starts
    sample = {"input_ids": ids, "seq_boundaries": [*starts, len(ids)], "loss_mask": np.ones(len(ids), np.uint8)}
    if is_empty or item.get("is_padding", False):
        sample |= {"is_padding": True, "loss_mask": np.zeros(len(ids), np.uint8)}
    return sample
