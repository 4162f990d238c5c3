"""Real chats, where they are at hand: every row of every file is packed or counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_packed_sft import open_dataset, validate
from tests.prepare.preparing import prepare
from tests.real_data import DATA
from tests.records.test_real_data import NUM_ROWS


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no chats in {DATA}")
def test_every_row_of_the_real_data_is_accounted_for(tokenizer_path: str, tmp_path: Path) -> None:
    files = {name.split(".")[0]: DATA / name for name in sorted(NUM_ROWS)}
    sources = ", ".join(f"{name}: {{path: {path}}}" for name, path in files.items())
    done = prepare(
        f"+sources={{{sources}}}", f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", "template=chatml",
        "packing.pack_size=2048", "max_drop_share=0.6",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert validate(tmp_path / "data").ok
    dataset = open_dataset(tmp_path / "data")
    sources, accounting = dataset.provenance["sources"], dataset.provenance["splits"]["train"]["accounting"]
    assert {name: source["num_rows"] for name, source in sources.items()} == {
        name.split(".")[0]: num_rows for name, num_rows in NUM_ROWS.items()
    }
    for source in sources.values():
        assert source["dropped"] == {}
        assert source["num_rows"] == source["splits"]["train"]["num_sequences"]
        assert 0 < source["splits"]["train"]["num_trained_tokens"] < source["splits"]["train"]["num_tokens"]
    assert set(accounting["dropped_sequences"]) == {"longer_than_pack"}
    num_dropped, num_dropped_tokens = (
        accounting[name]["longer_than_pack"] for name in ("dropped_sequences", "dropped_tokens")
    )
    assert dataset.figures["train"]["num_sequences"] == sum(NUM_ROWS.values()) - num_dropped
    num_tokens = sum(source["splits"]["train"]["num_tokens"] for source in sources.values())
    assert dataset.figures["train"]["num_tokens"] == num_tokens - num_dropped_tokens
