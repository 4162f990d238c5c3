"""Real chats with real tokenizers: what is shown is what prepare stores, and every turn is placed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inspect.previewing import prepared_sequences, preview_json, shown_sequences
from tests.prepare.preparing import prepare
from tests.real_data import IS_WHOLE, chat_files, tokenizer_folder

NUM_RECORDS = 6 if IS_WHOLE else 3


@pytest.mark.parametrize("name", ["qwen3", *(["llama3_1", "mistral_nemo", "gemma3"] if IS_WHOLE else [])])
@pytest.mark.parametrize("path", chat_files(), ids=lambda path: path.name)
def test_ids_and_weights_of_real_chats_are_those_that_prepare_stores(path: Path, name: str, tmp_path: Path) -> None:
    settings = [
        f"tokenizer.path={tokenizer_folder(name)}",
        "encode.render=auto",
        "encode.max_len=700",
        "max_errors=100",
    ]
    previews = [preview_json(path, *settings, "--row", number) for number in range(1, NUM_RECORDS + 1)]
    given = [f"input={path}", *settings, f"limit={NUM_RECORDS}", "packing.pack_size=65536"]
    if not shown_sequences(previews):  # a template that takes no tools
        assert f"all {NUM_RECORDS} records were dropped" in prepare(*given, f"output={tmp_path}/data").err
        return
    assert shown_sequences(previews) == prepared_sequences(tmp_path / "data", *given)
    for preview in previews:
        for sequence in preview["sequences"]:
            assert all(turn["start"] is not None for turn in sequence["turns"])
            counted = sum(turn["num_trained"] for turn in sequence["turns"] if not turn["is_inside"])
            assert counted == sum(token["trained"] for token in sequence["tokens"][1:])
