"""reliability.md row 27: a damaged sequence of a token store is an error when it is first read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from megatron_packed_sft import PackedLoader, create_sft_dataset
from megatron_packed_sft.data.options import OpenOptions
from megatron_packed_sft.errors import InvalidInputError, ManifestError, ShardFileError
from megatron_packed_sft.packing.packer import pack
from megatron_packed_sft.support import checksum, json_document
from megatron_packed_sft.tokens import manifest as part_manifest
from megatron_packed_sft.tokens import materialize as materializing
from megatron_packed_sft.tokens import part as token_part
from megatron_packed_sft.tokens import writer as writing
from megatron_packed_sft.tokens.materialize import materialize_shards
from megatron_packed_sft.tokens.remote_store import GatheredSequences
from megatron_packed_sft.tokens.store import open_token_store, publish_store
from megatron_packed_sft.tokens.validate import validate_token_store
from megatron_packed_sft.tokens.writer import TokenPartWriter, part_path
from tests.packed_bins import files_of
from tests.tokens.stores import make_sequences, make_weights, write_part, write_store

SEQUENCES = make_sequences(60, longest=30, seed=1)
SEQUENCE = next(number for number, (ids, _) in enumerate(SEQUENCES) if number > 45 and len(ids) > 8)
IN_PART = SEQUENCE - 40
PLAN = pack([len(ids) for ids, _ in SEQUENCES], pack_size=64, overflow="single")
BIN = next(place for place, number in enumerate(PLAN.bin_order.tolist()) if SEQUENCE in PLAN.bin(number))
FILES = (*part_manifest.FILES, part_manifest.WEIGHTS)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two parts with weights; the damaged sequence is in the second one."""
    path = tmp_path_factory.mktemp("verified") / "store"
    weights = make_weights(SEQUENCES)
    write_part(part_path(path, 0), SEQUENCES[:40], weights[:40])
    write_part(part_path(path, 1), SEQUENCES[40:], weights[40:])
    publish_store(path)
    return path


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "store")
    return tmp_path / "store"


def flip(store: Path, name: str, sequence: int = IN_PART, part: int = 1) -> None:
    """Flip a bit of what a file says of a sequence; the result is a possible value."""
    path = part_path(store, part)
    array = np.load(path / name, mmap_mode="r+")
    index = sequence
    if name not in (part_manifest.OFFSETS, part_manifest.CHECKSUMS):
        index = int(np.load(path / part_manifest.OFFSETS)[sequence]) + 2
    array[index : index + 1].view(np.uint8)[0] ^= 1
    array.flush()


def materialized(store: Path) -> None:
    materialize_shards(PLAN, open_token_store(store), [store.parent / f"shard_{k}" for k in range(2)])


READS: dict[str, Callable[[Path], Any]] = {
    "one bin": lambda path: create_sft_dataset(path, 2, plan=PLAN)[BIN],
    "a batch": lambda path: create_sft_dataset(path, 2, plan=PLAN).fetch_batch([0, BIN, 1, 2]),
    "one sequence": lambda path: open_token_store(path)[SEQUENCE],
    "weights of a sequence": lambda path: open_token_store(path).weighted(SEQUENCE),
    "shards": materialized,
    "gathered": lambda path: GatheredSequences(open_token_store(path), np.array([3, SEQUENCE]), path.parent),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_an_error_that_names_part_sequence_and_file(store: Path, name: str, read: str) -> None:
    flip(store, name)
    with pytest.raises(ShardFileError) as caught:
        READS[read](store)
    message = str(caught.value)
    assert f"{part_path(store, 1) / name} is damaged at sequence" in message
    if name != part_manifest.OFFSETS:  # an offset ends the sequence before, too
        assert f"is damaged at sequence {IN_PART}, which does not match the checksum" in message
    assert not (store.parent / "shard_1").exists()


@pytest.mark.parametrize("change", [1, -1, 3])
def test_a_wrong_offset_that_is_possible_is_an_error(store: Path, change: int) -> None:
    offsets = np.load(part_path(store, 1) / part_manifest.OFFSETS, mmap_mode="r+")
    offsets.view(np.int64)[IN_PART + 1] += change
    offsets.flush()
    # Also with a plan of the wrong lengths, which a plan made now would have.
    damaged = pack(open_token_store(store).lengths, pack_size=64, overflow="single")
    for plan in (PLAN, damaged):
        dataset = create_sft_dataset(store, 2, plan=plan)
        bad = 0
        for index in range(len(dataset)):
            try:
                dataset.fetch_batch([index])
            except ShardFileError as error:
                bad += 1
                assert f"{part_path(store, 1) / part_manifest.OFFSETS} is damaged at sequence" in str(error)
        assert bad in (1, 2)  # the bins of the two sequences that the offset parts


def test_chunks_of_a_split_sequence_are_verified_as_a_whole(store: Path) -> None:
    flip(store, part_manifest.IDS)
    plan = pack([len(ids) for ids, _ in SEQUENCES], pack_size=8, overflow="split", stride=2)
    assert plan.chunks is not None
    chunks = np.flatnonzero(plan.chunks.sequence == SEQUENCE)
    assert len(chunks) > 1
    dataset = create_sft_dataset(store, 2, plan=plan)
    for index, number in enumerate(plan.bin_order.tolist()):
        if np.isin(plan.bin(number), chunks).any():
            with pytest.raises(ShardFileError, match=rf"ids\.npy is damaged at sequence {IN_PART}"):
                dataset.fetch_batch([index])
        else:
            dataset.fetch_batch([index])


def test_other_sequences_of_a_damaged_store_are_read(store: Path) -> None:
    flip(store, part_manifest.IDS)
    opened = open_token_store(store)
    for index, (ids, train) in enumerate(SEQUENCES):
        if index != SEQUENCE:
            assert [one.tolist() for one in opened[index]] == [ids, train]
    others = [index for index in range(PLAN.num_bins) if index != BIN]
    assert len(create_sft_dataset(store, 2, plan=PLAN).fetch_batch(others)["tokens"]) == len(others)


def test_when_a_sequence_is_verified(store: Path) -> None:
    first, always, never = (
        create_sft_dataset(store, 2, plan=PLAN, opening=OpenOptions(verify=verify))
        for verify in ("first_read", "always", "never")
    )
    for one in (first, always, never):
        one.fetch_batch([BIN, 0])
    parts = first.source._store.parts
    compared = np.concatenate([part.arrays.verified for part in parts])
    expected = np.concatenate([PLAN.bin(int(PLAN.bin_order[index])) for index in (BIN, 0)])
    assert set(np.flatnonzero(compared)) == set(expected.tolist())
    flip(store, part_manifest.TRAIN)
    first.fetch_batch([BIN])
    never.fetch_batch([BIN])
    with pytest.raises(ShardFileError, match=r"train\.npy is damaged"):
        always.fetch_batch([BIN])
    parts[1].unmap()  # what is mapped again is read again
    with pytest.raises(ShardFileError, match=r"train\.npy is damaged"):
        first.fetch_batch([BIN])


def test_the_loader_stops_at_the_damaged_sequence_in_the_first_epoch(store: Path) -> None:
    flip(store, part_manifest.IDS)
    loader = PackedLoader(create_sft_dataset(store, 2, plan=PLAN), micro_batch_size=2, num_epochs=3, shuffle=True)
    with pytest.raises(ShardFileError, match=rf"ids\.npy is damaged at sequence {IN_PART}"):
        list(loader)


def test_damage_that_no_file_has_is_told_from_the_damage_of_files(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = open_token_store(store).parts[1]
    arrays = part.arrays
    ids = arrays.ids.copy()
    ids[int(arrays.begins[IN_PART])] ^= 1
    part._arrays = arrays._replace(ids=ids)  # as if memory had gone bad
    with pytest.raises(ShardFileError, match=r"but its files match their checksums: check the memory"):
        part.spans(np.array([IN_PART]))


def test_a_copy_that_is_damaged_on_its_way_into_a_shard_is_an_error(store: Path, tmp_path: Path) -> None:
    opened = open_token_store(store)
    (tmp_path / "scratch").mkdir()
    gathered = GatheredSequences(opened, np.arange(len(opened)), tmp_path / "scratch", first_part=1)
    block = materializing.plan_block(PLAN, gathered, PLAN.bin_order.astype(np.int64), 64)  # type: ignore[arg-type]
    direct = materializing.plan_block(PLAN, opened, PLAN.bin_order.astype(np.int64), 64)
    assert block.input_ids.tolist() == direct.input_ids.tolist()
    gathered.arrays.verified[:] = 0
    place = int(gathered.arrays.begins[SEQUENCE])
    ids = np.memmap(tmp_path / "scratch" / "ids", gathered.arrays.ids.dtype, "r+")
    ids[place] ^= 1
    with pytest.raises(ShardFileError, match=rf"the copy of sequence {SEQUENCE} of .* does not match"):
        materializing.plan_block(PLAN, gathered, PLAN.bin_order.astype(np.int64), 64)  # type: ignore[arg-type]


def test_an_xxhash_that_exports_nothing_gives_the_same_files_and_errors(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (checksum, token_part, materializing):
        monkeypatch.setattr(module, "hash_function", lambda: 0)
    monkeypatch.setattr(writing, "_MANY_SEQUENCES", 0)
    weights = make_weights(SEQUENCES)
    write_part(part_path(tmp_path / "store", 0), SEQUENCES[:40], weights[:40])
    write_part(part_path(tmp_path / "store", 1), SEQUENCES[40:], weights[40:])
    publish_store(tmp_path / "store")
    assert files_of(tmp_path / "store") == files_of(sound)
    dataset = create_sft_dataset(tmp_path / "store", 2, plan=PLAN)
    dataset.fetch_batch([0, 1])
    flip(tmp_path / "store", part_manifest.WEIGHTS)
    with pytest.raises(ShardFileError, match=rf"weights\.npy is damaged at sequence {IN_PART}"):
        dataset.fetch_batch(list(range(2, PLAN.num_bins)))


@pytest.mark.parametrize("many", [0, 20, 10**6])
@pytest.mark.parametrize("plain", [0, 1, 33, 60])
def test_the_checksums_are_those_that_the_format_describes(
    many: int, plain: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_MANY_SEQUENCES", many)  # compiled code from the start, from the middle, or never
    monkeypatch.setattr(writing, "_SEQUENCES_AT_ONCE", 7)
    write_part(tmp_path / "part", SEQUENCES, make_weights(SEQUENCES), plain=plain)
    names = ["ids", "train", *(["weights"] if plain < 60 else [])]
    arrays = [np.load(tmp_path / "part" / f"{name}.npy") for name in names]
    offsets = np.load(tmp_path / "part/offsets.npy").astype(int)
    for number, recorded in enumerate(np.load(tmp_path / "part/checksums.npy").tolist()):
        covered = [array[offsets[number] : offsets[number + 1]] for array in arrays]
        hashes = [xxhash.xxh3_64_intdigest(one.tobytes()) for one in covered]
        numbers = np.array([len(covered[0]), *hashes], "<u8")
        assert recorded == xxhash.xxh3_64_intdigest(numbers.tobytes()) % 2**32
    assert validate_token_store(tmp_path / "part").ok


def test_validate_names_the_sequence_and_the_file(store: Path) -> None:
    flip(store, part_manifest.IDS)
    findings = validate_token_store(store).findings
    assert {one.file for one in findings} == {str(part_path(store, 1) / part_manifest.IDS)}
    assert any(one.message == f"sequence {IN_PART} does not match its checksum" for one in findings)


def resealed(part: Path, **changes: Any) -> None:
    document = json.loads((part / "manifest.json").read_text())
    document = {key: value for key, value in {**document, **changes}.items() if value is not None}
    del document["self_checksum"]
    (part / "manifest.json").write_bytes(json_document.render(document))


def test_validate_finds_checksums_that_are_wrong_from_the_start(store: Path) -> None:
    flip(store, part_manifest.CHECKSUMS)
    part = part_path(store, 1)
    files = json.loads((part / "manifest.json").read_text())["files"]
    data = (part / part_manifest.CHECKSUMS).read_bytes()
    files[part_manifest.CHECKSUMS]["checksum"] = xxhash.xxh3_128(data).hexdigest()
    resealed(part, files=files)
    [finding] = validate_token_store(part).findings
    assert finding.file == str(part / part_manifest.CHECKSUMS)
    assert finding.message == f"sequence {IN_PART} does not match its checksum"


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence_checksum_algorithm": None},
        {"sequence_checksum_algorithm": "crc32"},
        {"weights_dtype": "<f8"},
        {"weights_dtype": None},
    ],
)
def test_manifests_that_contradict_themselves_are_refused(store: Path, changes: dict[str, Any]) -> None:
    resealed(part_path(store, 1), **changes)
    with pytest.raises(ManifestError, match=r"manifest\.json"):
        open_token_store(part_path(store, 1))


def test_gathered_copies_with_filled_in_weights_are_not_compared(store: Path, tmp_path: Path) -> None:
    write_store(tmp_path / "plain", [SEQUENCES[:5]], vocab_size=1000)
    shutil.copytree(part_path(tmp_path / "plain", 0), part_path(store, 2))  # a part without weights
    opened = publish_store(store)
    (tmp_path / "scratch").mkdir()
    gathered = GatheredSequences(opened, np.arange(len(opened)), tmp_path / "scratch")
    assert gathered.arrays.verified.tolist() == [0] * 60 + [1] * 5
    gathered.spans(np.arange(len(opened)))


def test_a_plan_of_other_sequences_is_refused_when_its_bins_are_read(store: Path) -> None:
    lengths = np.array([len(ids) for ids, _ in SEQUENCES])
    for other in (lengths + 1, np.maximum(1, lengths - 1)):
        dataset = create_sft_dataset(store, 2, plan=pack(other, pack_size=64, overflow="single"))
        with pytest.raises(InvalidInputError, match=r"the plan was not made from .*store: their lengths differ"):
            dataset.fetch_batch(list(range(4)))


def test_a_part_of_many_sequences_has_the_checksums_of_few(tmp_path: Path) -> None:
    ids = np.arange(5000) % 7
    for name, calls in (("once", 1), ("often", 50)):
        with TokenPartWriter(tmp_path / name, vocab_size=10) as writer:
            for some in np.array_split(ids, calls):
                writer.append_many(some, some % 2, np.ones(len(some), np.int64))
            writer.finalize()
    assert files_of(tmp_path / "once") == files_of(tmp_path / "often")
