"""Plain text files as documents, datasets by name, and messages that name their parents."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError, StorageIOError
from megatron_packed_sft.records import text_files
from megatron_packed_sft.records.hub_datasets import stream_dataset
from megatron_packed_sft.records.message_trees import conversations_in_trees
from megatron_packed_sft.records.record import RecordError
from megatron_packed_sft.records.text_files import find_text_files, read_text_file


def test_documents_are_files_lines_or_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffOne\r\ntwo ü\n\n \nThree".encode())
    assert list(read_text_file(str(path))) == ["One\r\ntwo ü\n\n \nThree"]
    assert list(read_text_file(str(path), "line")) == ["One", "two ü", "Three"]
    assert list(read_text_file(str(path), "paragraph")) == ["One\ntwo ü", "Three"]
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        file.write(path.read_bytes())
    for how in ("file", "line", "paragraph"):
        assert [*read_text_file(str(path), how)] == [*read_text_file(f"{path}.gz", how)]
    (tmp_path / "blank.txt").write_text(" \n\n")
    for how in ("file", "line", "paragraph"):
        assert list(read_text_file(str(tmp_path / "blank.txt"), how)) == []


def test_lines_that_cross_blocks_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_packed_sft.records.streams.BLOCK_BYTES", 7)
    lines = [f"line {number} ü" for number in range(50)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    assert list(read_text_file(str(tmp_path / "a.txt"), "line")) == lines


def test_text_files_that_cannot_be_read_get_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin.txt").write_bytes("ü".encode("latin-1"))
    for how in ("file", "line"):
        with pytest.raises(InvalidInputError, match=r"latin\.txt is not UTF-8 \(0xFC\)"):
            list(read_text_file(str(tmp_path / "latin.txt"), how))
    monkeypatch.setattr(text_files, "LARGEST_DOCUMENT", 100)
    (tmp_path / "large.txt").write_text("a" * 101)
    with pytest.raises(InvalidInputError, match="too many for one document; read it with documents: line"):
        list(read_text_file(str(tmp_path / "large.txt")))
    with pytest.raises(InvalidInputError, match="has a line of more than 100 bytes"):
        list(read_text_file(str(tmp_path / "large.txt"), "line"))
    with pytest.raises(InvalidInputError, match=r"is a folder; give its files, such as .*/\*\*/\*\.md"):
        find_text_files([tmp_path])
    with pytest.raises(InvalidInputError, match="matches no file; check the path"):
        find_text_files([tmp_path / "none*.md"])
    found = find_text_files([tmp_path / "*.txt", tmp_path / "latin.txt"])
    assert [Path(file.path).name for file in found] == ["large.txt", "latin.txt"]


def test_a_dataset_that_cannot_be_loaded_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        StorageIOError, match=r"cannot read the split train of the dataset .*nothing \(small\): .*; check"
    ):
        next(stream_dataset(str(tmp_path / "nothing"), "small"))
    import datasets

    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(InvalidInputError, match="written by `save_to_disk` and has no config"):
        next(stream_dataset(str(tmp_path / "saved"), "small"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"needs the package datasets; .*megatron-packed-sft\[datasets\]"):
        next(stream_dataset("name"))


def test_a_tree_follows_the_best_replies_and_ends_with_an_answer() -> None:
    def message(number: str, parent: str | None, role: str, **more: Any) -> dict[str, Any]:
        return {"message_id": number, "parent_id": parent, "role": role, "text": f"text {number}", **more}

    records = [
        message("d", "c", "prompter"),
        message("e", "d", "assistant", deleted=True),
        message("b", "a", "assistant"),
        message("c", "a", "assistant", rank=0),
        message("a", None, "prompter"),
        message("x", None, "prompter"),
        message("y", "x", "assistant", rank=None),
        message("z", "x", "assistant", rank=None),
        message("lost", "nobody", "assistant"),
    ]
    found = [[one["content"] for one in chat] for chat in conversations_in_trees(records)]
    assert found == [["text a", "text c"], ["text x", "text y"]]
    with pytest.raises(RecordError, match="role of message 1 is 'bot'; use prompter or assistant"):
        list(conversations_in_trees([message("a", None, "bot")]))
    with pytest.raises(RecordError, match="text of message 1 is a number; give a string"):
        list(conversations_in_trees([message("a", None, "assistant") | {"text": 5}]))
