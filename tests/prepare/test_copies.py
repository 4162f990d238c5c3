"""A weight above 1 repeats a sequence, and its copies stay out of each other's bins."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.tokens.store import open_token_store
from tests.prepare.preparing import chat, prepare, write_records


@pytest.mark.parametrize("weight", [2, 3])
def test_copies_of_a_record_do_not_share_a_bin(weight: int, tokenizer_path: str, tmp_path: Path) -> None:
    rows = [chat(f"Question {number}?", "Yes. " * (number % 9 + 1)) for number in range(150)]
    write_records(tmp_path / "rows.jsonl", rows)
    done = prepare(
        f"sources.one.path={tmp_path}/rows.jsonl", f"+sources.one.weight={weight}", f"output={tmp_path}/data",
        f"tokenizer.path={tokenizer_path}", "template=chatml", "packing.pack_size=256", "executor.num_workers=1",
    )  # fmt: skip
    assert done.code == 0, done.err
    store = open_token_store(tmp_path / "data.work/tokens/train")
    plan = PackPlan.load(tmp_path / "data.work/plans/train.npz")
    assert len(store) == weight * 150
    assert plan.accounting.num_copies_together == 0
    for number in range(plan.num_bins):
        texts = [store[int(item)][0].tobytes() for item in plan.bin(number)]
        assert len(set(texts)) == len(texts)
