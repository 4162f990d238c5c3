"""Sources: their files, and how work is shared out for progress."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare import sources
from megatron_packed_sft.prepare.sources import Source, scan
from tests.records.chat_files import FORMATS, chats, write_records


@pytest.mark.parametrize("suffix", FORMATS)
def test_slices_share_the_bytes_of_their_file_to_within_a_block_and_together_exactly(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"{number} {(number * 7919) ** 40}"} for number in range(20_000)]  # so that it compresses badly
    path = write_records(tmp_path / f"a.{suffix}", rows)
    monkeypatch.setattr(sources, "_SMALLEST_SLICE", 1 << 17)
    [scanned] = scan([Source("one", (str(path),))])
    shares = [share for file in scanned.files for _, share in scanned.slices_of(file)]
    assert sum(shares) == scanned.num_bytes
    assert len(shares) >= 8
    evenly = np.arange(1, len(shares) + 1) / len(shares)
    assert np.abs(np.cumsum(shares) / scanned.num_bytes - evenly).max() < 0.2  # files are read in blocks of 1 MB


def test_a_file_in_two_sources_is_refused(tmp_path: Path) -> None:
    path = str(write_records(tmp_path / "a.jsonl", chats(1)))
    with pytest.raises(InvalidInputError, match=r"a\.jsonl belongs to the sources one and two; name it in one of them"):
        scan([Source("one", (path,)), Source("two", (path,))])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "../x"}, "the name of a source may have letters"),
        ({"weight": 0.0}, "sources.one.weight is 0.0; it must be above 0"),
        ({"weight": float("nan")}, "sources.one.weight is nan"),
        ({"split": "dev"}, "sources.one.split is 'dev'; choose one of train, validation, test"),
    ],
)
def test_impossible_sources_are_refused(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        Source(**{"name": "one", "paths": ("a.jsonl",), **arguments})  # type: ignore[arg-type]
