"""Hostile and broken .idx files: one sentence each, and no size of the header is believed before the file has it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packed_sft import create_sft_dataset, open_shard, validate
from megatron_packed_sft.errors import PackedSFTError, ShardError
from tests.indexed_files import index_bytes


def save(home: Path, index: bytes, tokens: bytes | None = b"\x01\x00" * 10) -> Path:
    (home / "web.idx").write_bytes(index)
    if tokens is not None:
        (home / "web.bin").write_bytes(tokens)
    return home / "web.idx"


IN_HEADER = "in its header; it was truncated or changed"
SOUND = index_bytes([4, 6], [0, 1, 2])


def test_the_sound_one_opens(tmp_path: Path) -> None:
    assert [len(one.input_ids) for one in open_shard(save(tmp_path, SOUND))] == [4, 6]


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (SOUND[:20], "has 20 bytes instead of the 34 that its header alone takes"),
        (SOUND[:-1], IN_HEADER),
        (SOUND + b"\0", IN_HEADER),
        (SOUND + b"\0\0", "is multimodal: it has a mode for each of its 2 sequences"),
        (index_bytes([4, 6], [0, 1, 2], version=2), "has version 2 and dtype code 8; megatron-core writes version 1"),
        (index_bytes([4, 6], [0, 1, 2], code=9), "has version 1 and dtype code 9"),
        (index_bytes([4, 6], [0, 1, 2], code=7), "is the index of float32, but token ids are integers"),
        (index_bytes([4, 6], [0, 1, 2], num_sequences=2**62), IN_HEADER),
        (
            index_bytes([4, 6], [0, 1, 2], num_sequences=2**64 - 1, num_edges=2**64 - 1),
            IN_HEADER,
        ),
        (index_bytes([4, 6], [0, 1, 2], num_edges=2**60), IN_HEADER),
        (index_bytes([-4, 14], [0, 1, 2]), "is damaged: sequence 0 has the length -4"),
        (
            index_bytes([4, 6], [0, 1, 2], places=[0, 10**15]),
            "sequence 1 begins at byte 1,000,000,000,000,000, not at 8",
        ),
        (index_bytes([4, 6], [0, 1, 2], places=[0, -8]), "sequence 1 begins at byte -8, not at 8"),
        (index_bytes([4, 6], [0, 2, 1, 2]), "its documents do not rise from sequence 0 to 2"),
        (index_bytes([4, 6], [0, 1]), "its documents do not rise from sequence 0 to 2"),
        (index_bytes([4, 6], [1, 2]), "its documents do not rise from sequence 0 to 2"),
        (index_bytes([4, 6], [0, -5, 2]), "its documents do not rise from sequence 0 to 2"),
        (index_bytes([4, 6], []), "its documents do not rise from sequence 0 to 2"),
        (index_bytes([], [0]), "is the index of an empty dataset"),
        (index_bytes([0, 0], [0, 1, 2]), "is the index of an empty dataset"),
        (index_bytes([4, 7], [0, 1, 2]), "web.bin has 20 bytes instead of the 22 in web.idx"),
        (
            index_bytes([2**31 - 1, 2**31 - 1], [0, 1, 2]),
            "web.bin has 20 bytes instead of the 8,589,934,588 in web.idx",
        ),
        (b"", "is not the index of a Megatron indexed dataset"),
        (b"MMIDIDX" + SOUND, "is not the index of a Megatron indexed dataset"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "index",
)
def test_a_broken_index_is_one_sentence(index: bytes, sentence: str, tmp_path: Path) -> None:
    path = save(tmp_path, index)
    with pytest.raises(PackedSFTError) as caught:
        create_sft_dataset(path, 0, seq_length=4)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    report = validate(path)
    assert [sentence in str(finding) for finding in report.findings] == [True]


def test_a_missing_bin_is_one_sentence(tmp_path: Path) -> None:
    path = save(tmp_path, SOUND, None)
    with pytest.raises(ShardError, match=r"web\.bin is missing; web\.idx is only its index, so copy both"):
        open_shard(path)


def test_a_huge_count_allocates_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, index_bytes([4, 6], [0, 1, 2], num_sequences=2**40))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ShardError):
        open_shard(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_fifo_under_that_name_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "web.idx")
    (tmp_path / "web.bin").write_bytes(b"\0" * 20)
    with pytest.raises(PackedSFTError):
        open_shard(tmp_path / "web.idx")


@given(st.integers(0, len(SOUND) - 1), st.integers(0, 255))
@settings(deadline=None, max_examples=300)
def test_any_changed_byte_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, place: int, value: int
) -> None:
    changed = bytearray(SOUND)
    changed[place] = value
    path = save(tmp_path_factory.mktemp("changed"), bytes(changed))
    try:
        documents = [one.input_ids.tolist() for one in open_shard(path)]
    except PackedSFTError as error:
        assert "\n" not in str(error)
    else:
        assert sum(map(len, documents)) * (1 if place == 17 and value in (1, 2) else 2) == 20
