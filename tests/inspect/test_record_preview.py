# ruff: noqa: RUF001 (signs that the painter writes)
"""`packed-sft preview CHATS`: what is shown is what prepare makes of the same file with the same keys."""

from __future__ import annotations

import gzip
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.encode.chat_templates import CHATML
from tests.inspect.previewing import (
    chats,
    packed_sft,
    prepared_sequences,
    preview_json,
    shown_sequences,
    tokenizer_path,
)
from tests.prepare.preparing import chat, prepare, write_records
from tests.records.chat_files import write_records as write_chat_file

__all__ = ["chats", "tokenizer_path"]

WEIGHTED: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why <|im_end|> so?"},
        {"role": "assistant", "content": "Because of this.", "weight": 0.5},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": "Then that, and more of it."},
        {"role": "user", "content": "Really?"},
        {"role": "assistant", "content": "Yes, really and truly.", "reasoning_content": "Hm."},
    ]
}
TEXTS = [{"prompt": "Two and two is ", "completion": "four."}, {"text": "Once upon a time."}]
TOKENIZED = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 0.5]}


@pytest.fixture
def keys(tokenizer_path: str) -> list[str]:
    return [f"tokenizer.path={tokenizer_path}", "template=chatml"]


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["encode.render=turns"],
        ["encode.render=turns", "encode.max_len=60"],
        ["encode.max_len=40"],
        ["encode.max_len=40", "encode.truncation=left"],
        ["encode.max_len=60", "encode.truncation=turns"],
        ["encode.max_len=60", "encode.truncation=oldest_turns"],
        ["encode.max_len=60", "encode.truncation=drop"],
        ["encode.train.reasoning=false", "encode.add_bos=true", "encode.add_eos=true"],
        ["encode.roles_to_train=[user,assistant]", "encode.special_tokens_in_content=allow"],
    ],
    ids=lambda settings: " ".join(settings) or "defaults",
)
def test_ids_and_weights_are_those_that_prepare_stores(
    keys: list[str], settings: list[str], tmp_path: Path, chats: Path
) -> None:
    lines = [json.loads(line) for line in (chats / "chats.jsonl").read_text().splitlines()[:12]]
    path = write_records(tmp_path / "chats.jsonl", [*lines, WEIGHTED, *TEXTS, TOKENIZED, chat("Hi", "Ho")])
    previews = [preview_json(path, *keys, *settings, "--row", number) for number in range(1, 18)]
    stored = prepared_sequences(tmp_path / "data", f"input={path}", *keys, *settings, "packing.pack_size=4096")
    assert shown_sequences(previews) == stored
    assert len(stored) >= 5


def test_packing_cuts_what_prepare_would_cut(keys: list[str], tmp_path: Path) -> None:
    path = write_records(tmp_path / "chats.jsonl", [chat("Why?", "Because of this. " * 20)])
    settings = [*keys, "packing.pack_size=32"]
    [whole] = preview_json(path, *keys)["sequences"]
    [cut] = preview_json(path, *settings, "packing.overflow=truncate")["sequences"]
    assert [token["id"] for token in cut["tokens"]] == [token["id"] for token in whole["tokens"]][:32]
    assert cut["cut"][0]["num_tokens"] == len(whole["tokens"]) - 32
    [split] = preview_json(path, *settings, "packing.overflow=split", "packing.stride=4")["sequences"]
    assert [one["start"] for one in split["chunks"]][:3] == [0, 28, 56]
    assert split["chunks"][1]["masked_prefix"] == 4
    shown = packed_sft("preview", path, *settings, "packing.overflow=truncate").out
    assert "by packing.pack_size=32" in shown
    assert "⟪" in shown


def test_reasons_and_details_of_drops_are_those_of_the_rejects_file(keys: list[str], tmp_path: Path) -> None:
    records = [
        chat("Why?", "Because."),
        "{broken",
        {"messages": [{"role": "user", "content": "Hello?"}]},
        {"messages": []},
        chat("Why?", "Because. " * 60),
        {"messages": [{"role": "user", "content": 7}, {"role": "assistant", "content": "Yes."}]},
        {"something": "else"},
        chat("Question. " * 30, "Yes."),
    ]
    path = write_records(tmp_path / "chats.jsonl", records)
    settings = [*keys, "packing.pack_size=64", "max_errors=100", "encode.max_len=100"]
    rejects = tmp_path / "rejects.jsonl"
    done = prepare(f"input={path}", f"output={tmp_path}/data", f"rejects={rejects}", "max_drop_share=1", *settings)
    assert done.code == 0, done.err
    expected = [json.loads(line) for line in rejects.read_text().splitlines()]
    found = []
    for number in range(1, len(records) + 1):
        preview = preview_json(path, *settings, "--row", number)
        found += [(number, one["reason"], one["detail"]) for one in preview["dropped"]]
    assert found == [(one["line"], one["reason"], one["detail"]) for one in expected]
    assert {"bad_row", "longer_than_pack", "answer_cut_away", "nothing_to_train"} <= {one[1] for one in found}


def test_a_row_that_stops_prepare_says_so_and_is_no_error(keys: list[str], tmp_path: Path) -> None:
    path = write_records(tmp_path / "chats.jsonl", ["{broken"])
    done = packed_sft("preview", path, *keys)
    assert done.code == 0
    assert "dropped, bad_row: the record is not valid JSON" in done.out
    assert "prepare stops here; set max_errors=100 to drop and count up to 100 such records" in done.out


@pytest.mark.parametrize("suffix", ["jsonl", "json", "jsonl.gz", "jsonl.zst", "parquet"])
def test_every_input_format_shows_the_same_record(keys: list[str], tmp_path: Path, suffix: str) -> None:
    records = [chat(f"{number}?", f"It is {number}.") for number in range(1, 9)]
    plain = write_records(tmp_path / "plain.jsonl", records)
    path = write_chat_file(tmp_path / f"chats.{suffix}", records)
    expected = preview_json(plain, *keys, "--row", 5)["sequences"]
    assert preview_json(path, *keys, "--row", 5)["sequences"] == expected
    drawn = preview_json(path, *keys, "--random", 3, "--seed", 1)
    assert [one["line"] for one in drawn] == [
        one["line"] for one in preview_json(plain, *keys, "--random", 3, "--seed", 1)
    ]


def test_a_saved_dataset_of_hugging_face_is_shown(keys: list[str], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    records = [chat(f"{number}?", f"It is {number}.") for number in range(1, 9)]
    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "saved")
    plain = write_records(tmp_path / "plain.jsonl", records)
    expected = preview_json(plain, *keys, "--row", 5)["sequences"]
    assert preview_json(tmp_path / "saved", *keys, "--row", 5)["sequences"] == expected
    assert packed_sft("preview", tmp_path / "saved", *keys, "--row", 9).code == 2


def test_schemas_mappings_and_preference_data_take_the_keys_of_prepare(keys: list[str], tmp_path: Path) -> None:
    talks = [{"talk": [{"who": "user", "said": "Why?"}, {"who": "assistant", "said": "Because."}]}]
    mapped = write_records(tmp_path / "talks.jsonl", talks)
    mapping = "sources.input.mapping={messages: talk, role: who, content: said}"
    [sequence] = preview_json(mapped, *keys, mapping)["sequences"]
    assert [turn["role"] for turn in sequence["turns"]] == ["user", "assistant"]
    pairs = write_records(tmp_path / "pairs.jsonl", [{"prompt": "Why?", "chosen": "Because.", "rejected": "No."}])
    assert preview_json(pairs, *keys)["dropped"][0]["reason"] == "bad_row"
    [taken] = preview_json(pairs, *keys, "sources.input.take=chosen")["sequences"]
    assert "Because." in "".join(token["text"] for token in taken["tokens"])


def test_a_file_of_a_configuration_gets_the_settings_of_its_source(keys: list[str], tmp_path: Path) -> None:
    path = write_records(tmp_path / "pairs.jsonl", [{"prompt": "Why?", "chosen": "Because.", "rejected": "No."}])
    other = write_records(tmp_path / "other.jsonl", [chat("Hi", "Ho")])
    (tmp_path / "mine.yaml").write_text(
        "defaults: [prepare, _self_]\n"
        f"sources:\n  pairs: {{path: {path}, take: chosen, split: validation}}\n  other: {{path: {other}}}\n"
    )
    settings = [*keys, "--config-name", "mine", "--config-dir", tmp_path]
    shown = preview_json(path, *settings)
    assert (shown["source"], shown["split"], len(shown["sequences"])) == ("pairs", "validation", 1)
    assert packed_sft("preview", *settings, "--row", 1).code == 2  # two files: which one?
    assert preview_json(*settings)["source"] == "pairs"


def test_turns_say_where_they_are_what_is_trained_and_with_which_weight(keys: list[str], tmp_path: Path) -> None:
    path = write_records(tmp_path / "chats.jsonl", [WEIGHTED])
    [sequence] = preview_json(path, *keys)["sequences"]
    turns = sequence["turns"]
    assert [turn["role"] for turn in turns] == [message["role"] for message in WEIGHTED["messages"]]
    assert [turn["begins_with"] for turn in turns[:3]] == [
        "<|im_start|>system\n",
        "<|im_start|>user\n",
        "<|im_start|>assistant\n",
    ]
    assert {turn["ends_with"] for turn in turns} == {"<|im_end|>\n"}
    assert turns[0]["start"] == 0
    assert all(one["end"] == two["start"] for one, two in pairwise(turns))
    assert turns[2]["weights"] == [0.5]
    assert set(turns[6]["kinds"]) == {"reasoning", "answer", "end of turn"}
    texts = ["".join(token["text"] for token in sequence["tokens"][turn["start"] : turn["end"]]) for turn in turns]
    assert texts[4] == "<|im_start|>assistant\nThen that, and more of it.<|im_end|>\n"
    assert sequence["escaped"] == [{"text": "<|im_end|>", "message": 1}]
    assert turns[1]["num_trained"] == 0


def test_what_is_lost_escaped_and_weighted_is_said_in_words(keys: list[str], tmp_path: Path) -> None:
    lost = chat("Why?", "Because.")
    lost["messages"][1]["reasoning_content"] = "Hm."
    path = write_records(tmp_path / "chats.jsonl", [WEIGHTED, lost])
    shown = packed_sft("preview", path, *keys).out
    assert "escaped: <|im_end|> in message 1 is text, not the control token" in shown
    assert "‹text:<|im_end|>›" in shown
    assert "⟦×0.5 Because of this.<|im_end|>⟧⏎" in shown
    (tmp_path / "plain.jinja").write_text(CHATML)
    plain = packed_sft("preview", path, keys[0], f"template.name={tmp_path}/plain.jinja", "--row", 2).out
    assert "lost: the template omits the reasoning of message 1" in plain


def test_rows_are_counted_as_in_the_rejects_file_and_blank_ones_are_none(keys: list[str], tmp_path: Path) -> None:
    path = write_records(tmp_path / "chats.jsonl", ["", chat("1?", "One."), "", chat("2?", "Two.")])
    assert preview_json(path, *keys)["line"] == 2
    assert preview_json(path, *keys, "--row", 4)["line"] == 4
    for row, problem in ((3, "line 3 is blank"), (9, "it has 4 lines"), (0, "counted from 1")):
        done = packed_sft("preview", path, *keys, "--row", row)
        assert done.code == 2
        assert problem in done.err
        assert done.err.count("\n") == 1
    drawn = preview_json(path, *keys, "--random", 5)
    assert [one["line"] for one in drawn] == [2, 4]


def test_a_draw_of_a_large_compressed_file_finds_every_line_it_drew(keys: list[str], tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl.gz"
    records = [chat(f"{number}?", "x" * 400) for number in range(1, 3001)]
    path.write_bytes(gzip.compress("".join(f"{json.dumps(one)}\n" for one in records).encode()))
    drawn = preview_json(path, *keys, "--random", 4, "--seed", 3)
    assert len(drawn) == 4
    for one in drawn:
        text = "".join(token["text"] for token in one["sequences"][0]["tokens"])
        assert f"user\n{one['line']}?" in text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["chats.jsonl"], "no tokenizer was given; add tokenizer.path=PATH"),
        (["chats.jsonl", "tokenizer.path=nowhere"], "nowhere does not exist"),
        (["chats.jsonl", "other.jsonl"], "are two paths"),
        (["nothing.jsonl", "tokenizer.path=nowhere"], "does not exist and matches no file"),
        (["chats.jsonl", "max_len=3"], "did you mean encode.max_len?"),
        (["chats.jsonl", "TOKENIZER", "--bin", "2"], "--bin is for packed data, but "),
        (["chats.jsonl", "TOKENIZER", "--row", "1", "--random", "2"], "exclude each other"),
        (["chats.jsonl", "TOKENIZER", "--seed", "1"], "--seed needs --random"),
        (["chats.jsonl", "TOKENIZER", "--random", "0"], "it must be at least 1"),
        (["chats.jsonl", "TOKENIZER"], "has no chat template; set template.name"),
        ([], "name a file of chats or packed data"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(
    words: list[str], problem: str, tokenizer_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path / "chats.jsonl", [chat("Hi", "Ho")])
    write_records(tmp_path / "other.jsonl", [chat("Hi", "Ho")])
    done = packed_sft("preview", *(f"tokenizer.path={tokenizer_path}" if one == "TOKENIZER" else one for one in words))
    assert (done.code, done.out) == (2, "")
    assert problem in done.err
    assert done.err.count("\n") == 1


def test_turns_that_a_limit_cuts_say_so(keys: list[str], tmp_path: Path) -> None:
    path = write_records(tmp_path / "chats.jsonl", [WEIGHTED])
    whole = preview_json(path, *keys)["sequences"][0]["turns"]
    limit = whole[4]["start"] + 6
    [cut] = preview_json(path, *keys, f"encode.max_len={limit}")["sequences"]
    assert [turn["is_cut"] for turn in cut["turns"]] == [False] * 4 + [True] * 3
    assert [turn["end"] for turn in cut["turns"]] == [*(turn["end"] for turn in whole[:4]), limit, limit, limit]
    shown = packed_sft("preview", path, *keys, f"encode.max_len={limit}").out
    assert re.search(r"^6 +assistant +cut ", shown, flags=re.MULTILINE)
    assert f"at the end, by encode.max_len={limit}" in shown
    for truncation, gone in (("oldest_turns", [3, 4, 5, 6]), ("turns", [1, 2])):
        limit = whole[4]["start"] + 6 if truncation == "oldest_turns" else whole[6]["end"] - whole[1]["start"]
        settings = [f"encode.max_len={limit}", f"encode.truncation={truncation}"]
        [left] = preview_json(path, *keys, *settings)["sequences"]
        assert left["left_out_messages"] == gone
        assert [turn["message"] for turn in left["turns"]] == [number for number in range(7) if number not in gone]
        assert left["cut"] == []


def test_a_very_long_record_is_shown_whole(keys: list[str], tmp_path: Path) -> None:
    path = write_records(tmp_path / "chats.jsonl", [chat("word " * 20_000, "Yes, <|im_end|> " * 2_000)])
    shown = packed_sft("preview", path, *keys, "packing.pack_size=1000000")
    assert shown.code == 0
    assert shown.out.count("word") == 20_000
    assert shown.out.count("‹text:<|im_end|>›") == 2_000
    assert "escaped: <|im_end|> in message 1, 2,000 times, is text" in shown.out
