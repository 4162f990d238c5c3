"""docs/seeds.md keeps its word: every test that it names exists, and every name of the seeds is on it."""

from __future__ import annotations

import re

import pytest

from tests.named_tests import REFERENCE, ROOT, functions_of, table_cells

PAGE = (ROOT / "docs" / "seeds.md").read_text()
HEADER = ["What the seed names", "Ours", "Test", "Difference"]
# What each seed calls its interfaces, options and files.
NAMES = {
    "000": """input_ids.npy loss_mask.npy packed_len.npy seq_offsets.npy seq_starts.npy manifest.json memmap_padded_v1
        bins_written loss_mask_dtype index_dtype PackedShardWriter MemmapShardWriter total_seq_starts write_bin finalize
        LegacyPickleWriter materialize_bin_arrays SequenceSpoolReader BinAssignment packed_storage legacy_npy_pickle
        memmap_v1 process_chat_sft_pack_from_spool_core GPTSFTPackedMemmapDataset samples_mapping seq_boundaries
        ChatSftOutputConfig GPTSFTPackedDataset
        __getstate__ GPTSFTPackedMultiShardDataset shard_offsets create_sft_dataset write_memmap_to_cloud
        convert_legacy_to_memmap test_memmap_writer_roundtrip test_memmap_writer_memory_efficiency
        test_dataloader_multiworker""",
    "001": "MemoryMappedDataset metadata.yaml .npy .bin file_pattern seq_len pack_sequences doc_ids state_dict",
    "002": """build_pretrain_cache build_sft_cache PretrainTokenStreamDataset SFTExampleDataset write_meta read_meta
        sha256_file get_batch test_cache_determinism test_pretrain_window_sampling test_sft_masking
        test_sft_cache_roundtrip""",
    "003": "packing_length dataloader_drop_last raw_plan aligned_plan effective_batch_size set_epoch pad_needed",
    "004": """block_tokenize_fn feature max_length overflow stride packed packing_strategy greedy best_fit first_fit
        shuffle_output seed min_len max_len add_bos add_eos batch_size num_proc document_starts DataCollatorForCausalLM
        packed_sequences padding get_pos_ids_for_packed_sequence Document Bin pack_sequences_optimized
        my_custom_packer""",
}
seeds = pytest.mark.parametrize("number", NAMES)


def section(number: str) -> str:
    found = re.search(rf"^## Seed {number}: .*?\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, f"docs/seeds.md has no section about seed {number}"
    return found[1]


@pytest.mark.parametrize(("path", "name"), sorted(set(REFERENCE.findall(PAGE))), ids="::".join)
def test_every_named_test_exists(path: str, name: str) -> None:
    assert name in functions_of(path)
    assert name.startswith("test_")


@seeds
def test_every_section_has_a_table_whose_lines_name_a_test_or_an_issue(number: str) -> None:
    header, _, *lines = table_cells(section(number))
    assert header == HEADER
    assert len(lines) > 5
    for line in lines:
        assert len(line) == len(HEADER), line
        assert line[0], line
        assert REFERENCE.search(line[2]) or re.search(r"planned: issue \d+", line[2]), line


@seeds
def test_every_name_of_a_seed_is_in_its_section(number: str) -> None:
    text = section(number)
    missing = [name for name in NAMES[number].split() if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
    assert missing == []


def test_the_page_has_the_five_seeds_and_nothing_else() -> None:
    assert re.findall(r"^## Seed (\d+):", PAGE, flags=re.MULTILINE) == list(NAMES)
    lines = "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))
    assert not re.search(r"tests/", REFERENCE.sub("", lines)), "write tests as `tests/file.py::test_name`"
