"""Real chats, where they are at hand: every row of every file is packed or counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_packed_sft import open_dataset, validate
from tests.prepare.preparing import prepare
from tests.real_data import DATA


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no chats in {DATA}")
def test_every_row_of_the_real_data_is_accounted_for(tokenizer_path: str, tmp_path: Path) -> None:
    files = {path.name.split(".")[0]: path for path in sorted(DATA.glob("*.json*"))}
    sources = ", ".join(f"{name}: {{path: {path}}}" for name, path in files.items())
    done = prepare(
        f"+sources={{{sources}}}", f"output={tmp_path}/data", f"tokenizer.path={tokenizer_path}", "template=chatml",
        "limit=250", "packing.pack_size=2048", "deduplicate=true", "executor.num_workers=1",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert validate(tmp_path / "data").ok
    provenance = open_dataset(tmp_path / "data").provenance
    for name, source in provenance["sources"].items():
        assert source["num_rows"] == (50 if name == "reason_tool_use" else 250)
        kept = source["splits"]["train"]["num_sequences"]
        assert source["num_rows"] == kept + sum(source["dropped"].values())
        assert set(source["dropped"]) <= {"duplicate"}
        assert 0 < source["splits"]["train"]["num_trained_tokens"] < source["splits"]["train"]["num_tokens"]
