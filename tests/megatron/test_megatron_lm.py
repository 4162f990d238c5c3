"""Packed data in Megatron-Core's own dataset builder: blends, splits, epochs, and samples as `--sft` wants them.

The blend over two ranks runs in two processes; this file is also the program that they run.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_packed_sft import DatasetWriter, PackedBin, create_sft_dataset
from megatron_packed_sft.data.options import BatchOptions
from megatron_packed_sft.errors import InvalidInputError
from tests.packed_bins import make_bins, write_shard
from tests.real_data import megatron_core_release

ROOT = Path(__file__).parents[2]
START_SCRIPT = ROOT / "recipes" / "megatron_lm" / "pretrain_packed.py"
EOS = 2
PACK_SIZE = 32
VOCAB_SIZE = 1000
TOKENIZER = SimpleNamespace(eod=EOS, vocab_size=VOCAB_SIZE)
BLEND = {"small": 0.3, "large": 0.7}
NUM_ROWS = {"small": 7, "large": 40}
NUM_SAMPLES = 1000


def write_source(directory: Path, name: str) -> Path:
    """Rows whose ids tell which source they are of: odd ones for the small source, even ones for the large."""
    rows = [
        PackedBin(row.input_ids // 2 * 2 + (name == "small"), row.loss_mask, row.seq_start_id)
        for row in make_bins(NUM_ROWS[name], PACK_SIZE, vocab_size=VOCAB_SIZE - 2, seed=len(name))
    ]
    write_shard(directory / name, rows, PACK_SIZE, pad_id=EOS)
    return directory / name


def build(sizes: Sequence[int | None], **blend: Any) -> list[Any]:
    """Megatron-Core's builder over our class."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    from megatron_packed_sft.megatron.megatron_lm import PackedSFTMegatronDataset

    config = GPTDatasetConfig(
        random_seed=5,
        sequence_length=PACK_SIZE,
        tokenizer=TOKENIZER,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **blend,
    )
    return list(BlendedMegatronDatasetBuilder(PackedSFTMegatronDataset, sizes, lambda: True, config).build())


def row_names(path: Path) -> dict[bytes, int]:
    """Tokens of a stored row, as they come in a sample -> number of the row; one name for each row."""
    rows = create_sft_dataset(path, EOS, PACK_SIZE, contract=BatchOptions(pad_to_max_length=True))
    names = {rows.fetch_batch([row])["tokens"].numpy().tobytes(): row for row in range(len(rows))}
    assert len(names) == len(rows)
    return names


def rows_of(dataset: Any, names: dict[bytes, int]) -> list[int]:
    return [names[dataset[index]["tokens"].numpy().tobytes()] for index in range(len(dataset))]


@pytest.fixture(scope="module", autouse=True)
def _megatron_core() -> None:
    # Imported once, by the module that keeps its import-time warnings to itself.
    import megatron_packed_sft.megatron.megatron_lm  # noqa: F401


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path, "large")


def test_a_blend_has_exactly_the_shares_of_its_weights_and_the_same_samples_on_both_ranks(tmp_path: Path) -> None:
    for name in BLEND:
        write_source(tmp_path, name)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.megatron.test_megatron_lm", str(tmp_path), str(rank)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert len(first) == NUM_SAMPLES
    counts = Counter(source for source, _ in first)
    assert counts == {name: round(NUM_SAMPLES * weight) for name, weight in BLEND.items()}
    for name, num_rows in NUM_ROWS.items():
        drawn = [row for source, row in first if source == name]
        whole_epochs = len(drawn) // num_rows
        for epoch in range(whole_epochs):
            assert sorted(drawn[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_epochs_hold_every_row_once_in_orders_of_their_own(source: Path) -> None:
    names, num_rows = row_names(source), NUM_ROWS["large"]
    train, _, _ = build([3 * num_rows, 0, 0], blend=([str(source)], None), split="100,0,0")
    rows = rows_of(train, names)
    epochs = [rows[start : start + num_rows] for start in range(0, len(rows), num_rows)]
    assert len(epochs) == 3
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    longer, _, _ = build([5 * num_rows, 0, 0], blend=([str(source)], None), split="100,0,0")
    assert rows_of(longer, names)[: len(rows)] == rows  # a longer run begins with the same samples
    with pytest.raises(IndexError, match=f"sample {len(train)} of {len(train)}"):
        train[len(train)]


def test_a_blend_made_with_different_tokenizers_is_refused(tmp_path: Path) -> None:
    for name, size in (("gpt2", 1), ("qwen3", 2)):
        rows = make_bins(8, PACK_SIZE, vocab_size=VOCAB_SIZE - 2, seed=size)
        tokenizer = {"name": name, "fingerprint": name}
        write_shard(tmp_path / name, rows, PACK_SIZE, pad_id=EOS, vocab_size=VOCAB_SIZE, tokenizer=tokenizer)
    paths = [str(tmp_path / name) for name in ("gpt2", "qwen3")]
    with pytest.raises(InvalidInputError, match=r"qwen3 was made with another tokenizer.*config\.allow_tokenizer_mis"):
        build([8, 0, 0], blend=(paths, [0.5, 0.5]), split="100,0,0")
    train, _, _ = build([8, 0, 0], blend=([paths[0], paths[0]], [0.5, 0.5]), split="100,0,0")
    assert len(train) == 8


def test_a_sample_is_what_megatron_core_makes_packed_sequence_parameters_of(source: Path) -> None:
    from megatron.core.utils import get_thd_batch_on_this_cp_rank

    names = row_names(source)
    stored = create_sft_dataset(source, EOS, PACK_SIZE, contract=BatchOptions(pad_to_max_length=True))
    train, _, _ = build([None, None, None], blend=([str(source)], None), split="100,0,0")
    loader = torch.utils.data.DataLoader(train, batch_size=1)
    assert len(loader) == len(stored)
    for batch, row in zip(loader, rows_of(train, names), strict=True):
        expected = stored.fetch_batch([row])
        for name in ("tokens", "labels", "position_ids"):
            assert batch[name].dtype == torch.int64
            assert torch.equal(batch[name], expected[name])
        assert batch["loss_mask"].dtype == torch.float32
        assert torch.equal(batch["loss_mask"], expected["loss_mask"].float())
        _, parameters = get_thd_batch_on_this_cp_rank(
            batch, batch["cu_seqlens"][0], None, batch["max_seqlen"], cp_size=1, cp_rank=0
        )
        boundaries = parameters.cu_seqlens_q
        assert boundaries.dtype == torch.int32
        assert boundaries[0] == 0
        assert boundaries[-1] == PACK_SIZE
        assert parameters.max_seqlen_q == int(boundaries.diff().max())


def test_boundaries_include_the_padding_of_context_parallelism(tmp_path: Path) -> None:
    # Sequences of 4 and 8 tokens; the last ones of each pad it. The last id of each is a label only.
    ids = np.array([5, 6, EOS, EOS, EOS, 7, 8, 9, 10, 11, EOS, EOS, EOS, EOS])
    mask = np.array([1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0])
    write_shard(tmp_path / "shard", [PackedBin(ids, mask, np.array([0, 5]))], PACK_SIZE, pad_id=EOS, pad_seq_to_mult=4)
    train, _, _ = build([None, None, None], blend=([str(tmp_path / "shard")], None), split="1,0,0")
    assert train[0]["cu_seqlens"].tolist() == [0, 4, 12, PACK_SIZE]


def test_the_split_divides_the_rows(source: Path) -> None:
    names = row_names(source)
    parts = build([64, 8, None], blend=([str(source)], None), split="80,10,10")
    train, valid, test = (set(rows_of(part, names)) for part in parts)
    assert [len(part) for part in parts] == [64, 8, 4]
    assert (train, valid, test) == (set(range(32)), set(range(32, 36)), set(range(36, 40)))


def test_splits_of_a_dataset_directory_have_paths_of_their_own(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "dataset") as writer:
        for seed, split in enumerate(("train", "validation")):
            write_shard(writer.shard_path(split, 0), make_bins(6, PACK_SIZE, seed=seed), PACK_SIZE, pad_id=EOS)
        writer.finalize()
    paths = [str(tmp_path / "dataset"), str(tmp_path / "dataset" / "validation")]
    train, valid, test = build([6, 6, 0], blend_per_split=[([paths[0]], None), ([paths[1]], None), None])
    assert sorted(rows_of(train, row_names(tmp_path / "dataset" / "train"))) == list(range(6))
    assert sorted(rows_of(valid, row_names(tmp_path / "dataset" / "validation"))) == list(range(6))
    assert test is None


def test_no_evaluation_still_gives_a_dataset_that_samplers_accept(source: Path) -> None:
    _, valid, _ = build([8, 0, 0], blend=([str(source)], None), split="90,10,0")
    assert len(valid) == 4


def test_a_split_without_rows_is_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path, "small")
    with pytest.raises(InvalidInputError, match=r"'98,1,1' leaves no bin of .*small \(7 bins\) for valid; give it"):
        build([8, 8, 8], blend=([str(source)], None), split="98,1,1")


def give_megatron_lm_an_sft_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that the start script changes; the wheel of 0.16 does not have it."""
    sft_dataset = ModuleType("megatron.training.datasets.sft_dataset")
    sft_dataset.SFTDataset = None  # type: ignore[attr-defined]
    datasets = ModuleType("megatron.training.datasets")
    datasets.sft_dataset = sft_dataset  # type: ignore[attr-defined]
    for module in (ModuleType("megatron.training"), datasets, sft_dataset):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_the_start_script_gives_megatron_lm_our_class_and_flat_boundaries(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    monkeypatch.setattr(PackedSeqParams, "__init__", PackedSeqParams.__init__)  # put back later
    give_megatron_lm_an_sft_dataset(monkeypatch)
    train, _, _ = build([None, None, None], blend=([str(source)], None), split="100,0,0")
    torch.save(next(iter(torch.utils.data.DataLoader(train))), tmp_path / "batch.pt")
    # The two names that Megatron-LM's file imports in 0.16, used as it does.
    (tmp_path / "pretrain_gpt.py").write_text(
        "import torch\n"
        "from megatron.core.utils import get_thd_batch_on_this_cp_rank\n"
        "from megatron.training.datasets.sft_dataset import SFTDataset\n"
        "batch = torch.load('batch.pt')\n"
        "boundaries, longest = batch.pop('cu_seqlens'), batch.pop('max_seqlen')\n"
        "_, parameters = get_thd_batch_on_this_cp_rank(batch, boundaries, None, longest, cp_size=1, cp_rank=0)\n"
        "torch.save((SFTDataset.__name__, parameters.cu_seqlens_q), 'seen.pt')\n"
    )
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(START_SCRIPT), run_name="__main__")
    name, boundaries = torch.load("seen.pt")
    assert name == "PackedSFTMegatronDataset"
    assert torch.equal(boundaries, train[0]["cu_seqlens"])


@pytest.mark.parametrize("version", ["0.17.0", "0.18.0", "0.19.0"])
def test_the_start_script_and_our_samples_fit_later_releases(
    version: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = megatron_core_release(version)
    spec = importlib.util.spec_from_file_location(
        "megatron.core.packed_seq_params", release / "core" / "packed_seq_params.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    give_megatron_lm_an_sft_dataset(monkeypatch)
    runpy.run_path(str(START_SCRIPT), run_name="start_script")

    boundaries = torch.tensor([[0, 5, PACK_SIZE]], dtype=torch.int32)  # with the batch's dimension
    parameters = module.PackedSeqParams(qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_q_padded=None)
    assert parameters.cu_seqlens_q.tolist() == [0, 5, PACK_SIZE]
    assert parameters.cu_seqlens_q_padded is None

    train, _, _ = build([None, None, None], blend=([str(source)], None), split="100,0,0")
    tree = ast.parse((release / "training" / "datasets" / "sft_dataset.py").read_text())
    [stock] = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "SFTDataset"]
    samples = [node.value for node in ast.walk(stock) if isinstance(node, ast.Return)]
    keys = [
        {key.value for key in sample.keys if isinstance(key, ast.Constant)}
        for sample in samples
        if isinstance(sample, ast.Dict)
    ]
    assert keys == [set(train[0])]


def main(directory: Path, rank: int) -> None:
    """Build the blend as one of two ranks, and write down where each sample came from."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    paths = [str(directory / name) for name in BLEND]
    train, _, _ = build([NUM_SAMPLES, 0, 0], blend=(paths, list(BLEND.values())), split="100,0,0")
    names = {tokens: (name, row) for name in BLEND for tokens, row in row_names(directory / name).items()}
    drawn = [names[train[index]["tokens"].numpy().tobytes()] for index in range(len(train))]
    (directory / f"rank_{rank}.json").write_text(json.dumps(drawn))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
