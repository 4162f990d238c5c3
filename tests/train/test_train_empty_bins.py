"""A real run over bins of single ids, which predict nothing: they add nothing to the loss, and ranks stay in step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from megatron_packed_sft.storage.bins import PackedBin
from tests.packed_bins import make_bins, write_shard
from tests.train.launch import run_in_turn


def test_bins_that_predict_nothing_are_trained_over(tmp_path: Path) -> None:
    full = [one for one in make_bins(30, 48, 100, seed=5) if len(one.input_ids) > 16][:4]
    empty = PackedBin(np.array([7]), np.array([0]), np.array([0]))
    data = {"mixed": [full[0], empty, full[1], empty], "full": full[:2], "empty": [empty] * 4}
    for name, bins in data.items():
        write_shard(tmp_path / name, bins, 48, pad_id=2, vocab_size=100)

    def arguments(name: str, num_ranks: int) -> list[str]:
        return [
            f"data.path={tmp_path / name}",
            f"output={tmp_path / f'{name}_{num_ranks}'}",
            f"train.global_batch_size={len(data[name])}",
            "data.shuffle=false",
            "train.steps=2",
            "model.num_layers=1",
        ]

    run_in_turn(1, [arguments(name, 1) for name in data])
    run_in_turn(2, [arguments(name, 2) for name in ("mixed", "empty")])

    def steps(name: str, num_ranks: int) -> list[dict[str, Any]]:
        lines = (tmp_path / f"{name}_{num_ranks}" / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["event"] == "step"]

    for mixed, two_ranks, alone in zip(steps("mixed", 1), steps("mixed", 2), steps("full", 1), strict=True):
        assert math.isclose(mixed["loss"], alone["loss"], rel_tol=1e-5)
        assert math.isclose(two_ranks["loss"], mixed["loss"], rel_tol=1e-5)
    assert [one["step"] for one in steps("empty", 2)] == [1, 2]
