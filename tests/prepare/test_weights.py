"""Weights of sequences reach the token store with their sequences, also those of repeated records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import EncodeOptions, TemplateOptions, publish_store
from megatron_packed_sft.encode.sequences import MarkedText, Sequences
from megatron_packed_sft.prepare.encode_worker import EncodeSettings, SliceEncoder, SliceTask
from megatron_packed_sft.prepare.sources import Source, SplitRule
from megatron_packed_sft.records.files import find_files
from megatron_packed_sft.records.slices import scan_slices
from tests.encode.byte_tokenizer import ByteTokenizer


class WeighingTokenizer(ByteTokenizer):
    """The first letter of a text is its weight, in tenths."""

    def encode_many(self, texts: Sequence[MarkedText]) -> Sequences:
        sequences = super().encode_many(texts)
        weights = np.repeat([int(one.text[0]) / 10 for one in texts], sequences.lengths)
        return sequences._replace(weights=(weights * sequences.train).astype(np.float32))


@pytest.mark.parametrize("copies", [1, 2])
def test_every_sequence_keeps_its_weights(tmp_path: Path, copies: int) -> None:
    texts = ["5 half", "20 is not 2.0", "9 nearly all"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = Source("texts", (str(tmp_path / "texts.jsonl"),), schema="text", weight=copies)
    [part] = scan_slices(find_files(source.paths)[0])
    settings = EncodeSettings(WeighingTokenizer(), TemplateOptions(), EncodeOptions(), SplitRule(), tmp_path / "tokens")
    SliceEncoder(settings).encode(SliceTask(0, source, part, num_bytes=1))
    store = publish_store(tmp_path / "tokens" / "train")
    assert len(store) == copies * len(texts)
    arrays = store.parts[0].arrays
    assert arrays.weights is not None
    found = [set(one.tolist()) - {0.0} for one in np.split(arrays.weights, arrays.begins[1:])]
    expected = [{float(np.float32(int(text[0]) / 10))} for text in texts for _ in range(copies)]
    assert found == expected
    assert np.array_equal(arrays.weights > 0, arrays.train > 0)
