"""Which files are found, what they are taken for, and what is refused."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import xxhash
from fsspec.implementations.memory import MemoryFileSystem

from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError, PackedSFTError, StorageIOError
from megatron_packed_sft.records.files import find_files
from megatron_packed_sft.support.imports import load
from tests.records.chat_files import chats, values, write_records


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.jsonl", "c.jsonl.gz", "deep/d.ndjson"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_records(tmp_path / name, [{"text": name}]) if "ndjson" not in name else (tmp_path / name).write_text("{}")
    return tmp_path


def names(files: object) -> list[str]:
    return [Path(file.path).name for file in find_files(files)]  # type: ignore[arg-type]


def test_a_glob_gives_its_matches_sorted_and_a_list_keeps_its_order(folder: Path) -> None:
    assert names(f"{folder}/*.jsonl*") == ["a.jsonl", "b.jsonl", "c.jsonl.gz"]
    assert names([f"{folder}/c*", folder / "a.jsonl"]) == ["c.jsonl.gz", "a.jsonl"]
    assert names(f"{folder}/**/*.ndjson") == ["d.ndjson"]
    assert names(f"file://{folder}/b.jsonl") == ["b.jsonl"]


def test_a_file_carries_its_size_and_the_checksum_of_its_stored_bytes(folder: Path) -> None:
    stored = (folder / "c.jsonl.gz").read_bytes()
    [file] = find_files(folder / "c.jsonl.gz")
    assert (file.format, file.compression, file.size) == ("jsonl", "gzip", len(stored))
    assert file.checksum == xxhash.xxh3_128_hexdigest(stored)


@pytest.mark.parametrize(
    ("content", "format"),
    [
        ("[{}]", "json"),
        ("\ufeff \n [{}]", "json"),
        ('{"a": 1}\n{"a": 2}', "jsonl"),
        ("\ufeff{}", "jsonl"),
        ("", "jsonl"),
    ],
)
@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_a_json_file_is_an_array_or_lines_by_its_first_character(
    tmp_path: Path, content: str, format: str, suffix: str
) -> None:
    data = content.encode()
    (tmp_path / f"a.{suffix}").write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    [file] = find_files(tmp_path / f"a.{suffix}")
    assert file.format == format


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("{}/nothing-*.jsonl", "does not exist and matches no file"),
        ("{}/readme.txt", r"no known format; rename it to one of .jsonl .ndjson .json .parquet.*\.gz or \.zst"),
        ("{}/x.parquet.gz", "no known format"),
        ("{}", r"is a folder that `datasets.save_to_disk` did not write; give its files"),
        ("memory://nowhere/a.jsonl", "matches no file"),
        ("nonsense://a.jsonl", "check the part before ://"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, pattern: str, message: str) -> None:
    for name in ("readme.txt", "x.parquet.gz"):
        (tmp_path / name).write_text("x")
    with pytest.raises(InvalidInputError, match=message):
        find_files(pattern.format(tmp_path))


def test_suffixes_may_be_in_capitals(tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl.gz", chats(3)).rename(tmp_path / "A.JSONL.GZ")
    assert values(tmp_path / "A.JSONL.GZ") == chats(3)


def test_naming_no_file_or_one_file_twice_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match="at least one path"):
        find_files([])
    with pytest.raises(InvalidInputError, match=r"a\.jsonl is listed 2 times"):
        find_files([f"{folder}/a.jsonl", f"{folder}/*.jsonl"])


def test_a_recursive_glob_finds_files_and_not_the_folders_on_the_way(folder: Path) -> None:
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "z.jsonl").write_text('{"text": "deep"}')
    assert [Path(file.path).name for file in find_files(f"{folder}/deep/**")] == ["d.ndjson", "z.jsonl"]


def test_a_name_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/caf\xe9.jsonl", "w") as file:
        file.write('{"text": "one"}')
    with pytest.raises(InvalidInputError, match=r"caf.udce9.jsonl' is not valid UTF-8"):
        find_files(f"{tmp_path}/*.jsonl")


def test_a_file_that_is_written_to_after_it_was_found_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}')
    num_read: list[int] = []
    [file] = find_files(path, num_read.append)
    assert sum(num_read) == file.size
    file.refuse_changed()
    path.write_text('{"text": "two"}')
    os.utime(path, ns=(0, 0))
    with pytest.raises(InvalidInputError, match=r"a\.jsonl changed while it was being read; run again"):
        file.refuse_changed()


def test_a_dangling_link_is_our_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(StorageIOError, match=r"cannot read .*a\.jsonl: No such file or directory; check the path"):
        find_files(tmp_path / "a.jsonl")


def test_a_saved_dataset_dictionary_asks_for_one_split(tmp_path: Path) -> None:
    import datasets

    records = chats(3)
    data = datasets.Dataset.from_list(records)
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(InvalidInputError, match="holds the splits train, test; give one of them"):
        find_files(tmp_path / "saved")
    assert [record["id"] for record in values(tmp_path / "saved" / "train")] == [record["id"] for record in records]


@pytest.mark.parametrize(
    "state",
    [
        "{", "[]", "{}", '{"_data_files": 5}', '{"_data_files": [{}]}', '{"_data_files": [{"filename": 5}]}',
        '{"_data_files": [{"filename": "gone.arrow"}]}',
    ],
)  # fmt: skip
def test_a_damaged_saved_dataset_is_our_error(tmp_path: Path, state: str) -> None:
    folder = write_records(tmp_path / "saved.hf_dataset", chats(3))
    (folder / "state.json").write_text(state)
    with pytest.raises(PackedSFTError, match=r"saved\.hf_dataset"):
        find_files(folder)


def test_urls_are_found_and_read_through_fsspec() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/chats/b.jsonl", b'{"text": "two"}\n')
    memory.pipe("/chats/a.jsonl", b'{"text": "one"}\n{"text": "more"}')
    try:
        files = find_files("memory://chats/*.jsonl")
        assert [file.path for file in files] == ["memory:///chats/a.jsonl", "memory:///chats/b.jsonl"]
        assert values("memory://chats/*.jsonl", slice_bytes=1) == [{"text": "one"}, {"text": "more"}, {"text": "two"}]
        with pytest.raises(InvalidInputError, match="is a folder"):
            find_files("memory://chats")
    finally:
        memory.rm("/chats", recursive=True)


class LockedStore(MemoryFileSystem):  # type: ignore[misc]
    """A file system whose errors are of its own kind, as those of buckets are."""

    protocol = "locked"

    def exists(self, path: str, **_: object) -> bool:
        raise RuntimeError("no credentials\nfor this bucket")


def test_an_error_of_a_remote_file_system_is_one_sentence_with_the_url() -> None:
    fsspec.register_implementation("locked", LockedStore, clobber=True)
    with pytest.raises(StorageIOError) as caught:
        find_files("locked://bucket/a.jsonl")
    assert str(caught.value) == (
        "cannot read locked://bucket/a.jsonl: no credentials for this bucket; "
        "check the network and the store, then run again"
    )


def test_a_missing_package_names_the_extra_that_brings_it() -> None:
    with pytest.raises(MissingDependencyError, match=r"needs the package not_there; .*megatron-packed-sft\[zstd\]"):
        load("not_there.inner", "zstd", "reading .zst files")


def test_plain_lines_load_no_heavy_package(folder: Path) -> None:
    script = (
        "import sys; from megatron_packed_sft.records import files, slices; "
        "from megatron_packed_sft.records.schemas import registry; "
        f"[file] = files.find_files({str(folder / 'a.jsonl')!r}); "
        "[part] = slices.scan_slices(file); [record] = slices.read_slice(part); registry.adapter()(record.value); "
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"pyarrow", "datasets", "numba", "fsspec", "zstandard", "torch"} & set(done.stdout.split())


def test_a_quick_look_reads_no_file_and_finds_the_same_ones(folder: Path) -> None:
    pattern = f"{folder}/**"
    looked, found = find_files(pattern, with_checksums=False), find_files(pattern)
    assert [(file.path, file.format, file.compression) for file in looked] == [
        (file.path, file.format, file.compression) for file in found
    ]
    assert {file.checksum for file in looked} == {""}
