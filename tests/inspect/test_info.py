"""`packed-sft info`: every kind of thing on disk, described by what it records, at any size."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft.cli.main import main
from megatron_packed_sft.encode.tokenizers.sentencepiece import train_sentencepiece
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect import info_of_training
from megatron_packed_sft.inspect.info import KINDS, describe
from megatron_packed_sft.packing.plan import PackPlan
from megatron_packed_sft.records.samples import sample_conversations
from megatron_packed_sft.storage.dataset_directory import open_dataset
from megatron_packed_sft.tokens.store import open_token_store
from tests.packed_bins import make_bins, write_shard
from tests.prepare.preparing import chat, prepare, write_records
from tests.terminal import in_pipe, modules_of, on_terminal

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared dataset with its work directory, and the same data in other storages."""
    home = tmp_path_factory.mktemp("info")
    texts = [message["content"] for one in sample_conversations(200, seed=1) for message in one.messages]
    tokenizer = train_sentencepiece([text for text in texts if text], home / "sp.model", vocab_size=600)
    good = [chat(f"What is {one}?", f"It is {one}. " + "Counting works. " * (one % 9)) for one in range(90)]
    records = write_records(home / "chats.jsonl", [*good, chat("long " * 300, "yes"), {"messages": []}])
    done = prepare(
        f"input={records}", f"output={home / 'data'}", f"tokenizer.path={tokenizer}", "template=chatml", "--quiet",
        "packing.pack_size=256", "split.validation_fraction=0.2", "executor.num_workers=1", "max_errors=100",
        "max_drop_share=1",
    )  # fmt: skip
    assert done.code == 0, done.err
    for storage in ("legacy", "parquet"):
        assert main(["convert", str(home / "data"), str(home / storage), "--to", storage, "--quiet"]) == 0
    return home


def said(*arguments: object, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["info", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_dataset_tells_splits_sources_drops_and_how_to_train(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = describe(home / "data")
    dataset = open_dataset(home / "data")
    assert (facts["kind"], facts["storage"]) == ("dataset directory", "memmap_v1")
    assert list(facts["splits"]) == ["train", "validation"]
    for split, one in facts["splits"].items():
        figures = dataset.figures[split]
        assert (one["num_bins"], one["num_tokens"]) == (figures.num_bins, figures.num_tokens)
        assert one["num_trained_tokens"] == figures.num_loss_tokens
        assert one["fullness"] == pytest.approx(one["num_tokens"] / (one["num_bins"] * 256))
        assert one["trained_share"] == pytest.approx(one["num_trained_tokens"] / one["num_tokens"])
    assert facts["total"]["num_bins"] == sum(one["num_bins"] for one in facts["splits"].values())
    assert facts["sources"]["input"]["num_records"] == 92
    assert facts["sources"]["input"]["num_sequences"] == 90  # those in bins
    assert facts["sources"]["input"]["dropped"] == {"longer_than_pack": 1, "bad_row": 1}
    assert facts["fingerprint"] == dataset.fingerprint
    assert facts["tokenizer"]["name"] == "sp.model"
    assert facts["chat_template"]["name"] == "chatml"
    stored = sum(path.stat().st_size for path in (home / "data").rglob("shard_*/*"))
    assert facts["num_bytes"] == stored
    shown = said(home / "data", capsys=capsys)
    for wanted in (
        "split ",
        "train ",
        "validation ",
        "longer_than_pack",
        "chatml (",
        "Train on it:",
        facts["fingerprint"],
    ):
        assert wanted in shown
    assert f'load_tokenizer("{home / "sp.model"}")' in shown  # found in the work directory


def test_json_prints_the_facts_that_the_text_is_made_of(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (
        home / "data",
        home / "legacy" / "train" / "shard_000000.npy",
        home / "data.work" / "tokens" / "train",
    ):
        assert json.loads(said(path, "--json", capsys=capsys)) == json.loads(json.dumps(describe(path)))


def test_no_array_is_opened_for_what_the_manifests_tell(home: Path, tmp_path: Path) -> None:
    """A large dataset's arrays may be anywhere; here they are not even there."""
    script = """
import sys
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
from megatron_packed_sft.cli.main import main
for path in sys.argv[1:]:
    assert main(["info", path]) == 0
data = [name for name in opened if name.endswith((".npy", ".npz", ".parquet")) and "site-packages" not in name]
assert data == [], data
assert not {"torch", "numba", "hydra", "pyarrow", "tokenizers"} & set(sys.modules), sys.modules.keys()
"""
    paths = [home / "data", home / "data" / "train" / "shard_000000", home / "legacy", home / "parquet"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, paths)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_the_size_of_very_many_shards_is_estimated_and_said_to_be(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = describe(home / "data")["num_bytes"]
    monkeypatch.setattr("megatron_packed_sft.inspect.info_of_data._MOST_SHARDS_MEASURED", 1)
    facts = describe(home / "data")
    assert facts["num_bytes_is_estimated"]
    assert facts["num_bytes"] == pytest.approx(whole, rel=0.2)
    assert ", about " in said(home / "data", capsys=capsys)


def test_a_shard_that_is_missing_is_named(home: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(home / "data", tmp_path / "copy"))
    shutil.rmtree(copied / "validation" / "shard_000000")
    [note] = describe(copied)["notes"]
    assert note == f"{copied / 'validation' / 'shard_000000'} is missing; copy the dataset again"


def test_a_shard_a_packed_file_and_parquet_tell_what_they_record(home: Path) -> None:
    truth = describe(home / "data")["splits"]["train"]
    shard = describe(home / "data" / "train" / "shard_000000")
    assert shard["kind"] == "shard"
    assert {name: shard["total"][name] for name in ("num_bins", "num_tokens", "fullness")} == {
        name: truth[name] for name in ("num_bins", "num_tokens", "fullness")
    }
    legacy = describe(home / "legacy" / "train" / "shard_000000.npy")
    assert legacy["total"]["num_bins"] == truth["num_bins"]
    assert legacy["total"]["max_seq_len"] == truth["max_seq_len"]  # of Megatron-Bridge's metadata.json beside it
    assert "num_tokens" not in legacy["total"]
    assert legacy["notes"] == ["a legacy file records little about itself; `packed-sft report` reads the data"]
    parquet = describe(home / "parquet" / "train" / "shard_000000.idx.parquet")
    assert parquet["total"]["num_tokens"] == truth["num_tokens"]  # of the footer
    assert parquet["total"]["num_sequences"] == truth["num_sequences"]


def test_a_shards_directory_is_described_as_one(tmp_path: Path) -> None:
    for number in range(3):
        write_shard(tmp_path / f"shard_{number}", make_bins(4, 16, seed=number), 16)
    facts = describe(tmp_path)
    assert (facts["kind"], facts["num_shards"], facts["total"]["num_bins"]) == ("directory of shards", 3, 12)


def test_a_token_stream_tells_its_files_its_windows_and_what_they_leave_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        np.save(tmp_path / f"shard_{number}.npy", np.arange(10_000, dtype=np.uint16))
    facts = describe(tmp_path)
    assert (facts["kind"], facts["dtype"]) == ("token stream", "uint16")
    assert facts["how_to_use"][1].endswith(" data.sequence_length=2048")
    assert (facts["total"]["num_files"], facts["total"]["num_tokens_in_files"]) == (3, 30_000)
    assert facts["total"]["num_bins"] == 12  # windows of 2,049 tokens that do not cross files
    assert facts["notes"]
    assert "seq_length=2048)" in said(tmp_path, capsys=capsys)


def test_a_token_store_and_one_of_its_parts_are_described(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / "data.work" / "tokens" / "train"
    store = open_token_store(path)
    facts = describe(path)
    assert (facts["kind"], facts["total"]["num_sequences"]) == ("token store", len(store))
    assert facts["total"]["num_tokens"] == store.num_tokens
    assert facts["fingerprint"] == store.fingerprint
    assert describe(store.parts[0].path)["total"]["num_sequences"] == len(store.parts[0])
    assert facts["sequence_checksum_algorithm"] == "xxh3_64_low32"
    assert not facts["notes"]


def test_a_plan_is_described_by_its_header(home: Path) -> None:
    path = home / "data.work" / "plans" / "train.npz"
    plan, facts = PackPlan.load(path), describe(path)
    stats = plan.stats()
    assert facts["kind"] == "plan"
    assert facts["total"]["num_bins"] == plan.num_bins
    assert facts["total"]["num_items"] == stats.num_items
    assert facts["total"]["fullness"] == pytest.approx(stats.utilization)
    assert (facts["fingerprint"], facts["order_fingerprint"]) == (plan.fingerprint, plan.order_fingerprint)
    assert facts["accounting"]["dropped_sequences"] == plan.accounting.dropped_sequences


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a run leaves, written by the code that writes it."""
    from megatron_packed_sft.train.checkpoint import TrainingState
    from megatron_packed_sft.train.metrics import MetricsFile, StepRecord

    with MetricsFile(tmp_path, first_step=0) as metrics:
        metrics.write_validation("validation", 0, 6.0, 100)
        for step in range(1, 7001):
            metrics.write_step(
                StepRecord(
                    step=step, loss=5.0 / step, learning_rate=1e-4, grad_norm=1.0, tokens_per_second=100.0,
                    trained_tokens_per_second=50.0, padding_share=0.01, data_share=0.02, step_seconds=1.0,
                    epoch=step / 10_000, consumed_samples=8 * step,
                )
            )  # fmt: skip
        metrics.write_validation("validation", 7000, 2.0, 100)
    for step in (100, 7000):
        checkpoint = tmp_path / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "common.pt").write_bytes(b"x" * 1000)
        state = TrainingState(
            step=step,
            data={"consumed_samples": 8 * step, "num_samples": 80_000, "fingerprint": "ab12", "seed": 1},
            scheduler={},
            model={"num_layers": 2, "hidden_size": 64},
            files={"common.pt": 1000},
        )
        (checkpoint / "training_state.json").write_bytes(state.to_bytes())
    return tmp_path


def test_a_run_tells_its_losses_speed_and_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (run / "metrics.jsonl").stat().st_size > 2 << 20  # so that its middle is not read
    facts = describe(run)
    assert (facts["kind"], facts["total"]["step"]) == ("run", 7000)
    assert (facts["total"]["first_loss"], facts["total"]["loss"]) == (5.0, 5.0 / 7000)
    assert facts["validation"]["validation"]["loss"] == 2.0  # the last one
    assert [one["step"] for one in facts["checkpoints"]] == [100, 7000]
    shown = said(run, capsys=capsys)
    assert "step_007000" in shown
    assert ["first", "loss", "5.0000"] in [line.split() for line in shown.splitlines()]
    assert "packed-sft export" in shown


@pytest.mark.parametrize("record", ['{"event": "step", "step": [1], "loss": {"a": 1}, "epoch": "x"}', "[" * 100_000])
def test_metrics_that_no_run_writes_are_left_out(
    tmp_path: Path, record: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"event": "step", "step": 3, "loss": 2.5}}\n{record}\n')
    assert describe(tmp_path)["total"]["first_loss"] == 2.5
    assert "2.5000" in said(tmp_path, capsys=capsys)


def test_a_checkpoint_tells_its_step_model_and_whether_it_is_whole(run: Path) -> None:
    path = run / "checkpoints" / "step_000100"
    facts = describe(path)
    assert (facts["kind"], facts["total"]["step"], facts["total"]["epoch"]) == ("checkpoint", 100, 0.01)
    assert facts["model"]["num_layers"] == 2
    assert facts["is_complete"]
    (path / "common.pt").write_bytes(b"cut")
    facts = describe(path)
    assert not facts["is_complete"]
    assert facts["notes"] == ["common.pt is missing or has another size; the checkpoint cannot be loaded"]


def test_a_checkpoint_of_megatron_is_told_from_ours(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / "common.pt").write_bytes(b"x")
    facts = describe(tmp_path)
    assert (facts["kind"], facts["format"]) == ("Megatron checkpoint", "torch_dist")


def test_the_names_of_trainings_files_are_those_that_training_writes() -> None:
    from megatron_packed_sft.train import checkpoint, metrics, pretrained

    assert info_of_training.TRAINING_STATE == checkpoint.STATE
    assert info_of_training.METRICS == metrics.METRICS
    assert info_of_training.PRETRAINED == pretrained.RECORD


def test_what_is_none_of_these_is_one_sentence(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tokenizer.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("nothing")
    kinds = [kind.name for kind in KINDS]
    cases: dict[Any, str] = {
        tmp_path / "nothing": "does not exist; check the path",
        tmp_path / "empty": "is an empty directory; check the path",
        tmp_path / "folder": "is the folder of a model or a tokenizer, not data; use it as tokenizer.path or "
        "model.path",
        tmp_path / "notes.txt": f"is not a {', '.join(kinds[:-1])} or {kinds[-1]}; check the path",
        home / "sp.model": "is the model of a tokenizer, not data; use it as tokenizer.path",
        home / "chats.jsonl": "is a file of records; `packed-sft prepare` turns it into a dataset",
        home / "data.work": "is the work directory of a preparation; describe a part of it, such as "
        f"{home / 'data.work' / 'tokens' / 'train'} or {home / 'data.work' / 'plans' / 'train.npz'}",
    }
    for path, sentence in cases.items():
        with pytest.raises(InvalidInputError):
            describe(path)
        assert main(["info", str(path)]) == 2
        assert capsys.readouterr().err == f"packed-sft: error: {path} {sentence}\n"


def test_a_damaged_plan_or_dataset_is_an_error_and_no_traceback(home: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.npz").write_bytes(b"PK nothing")
    (tmp_path / "dataset.json").write_text("{}")
    for path in (tmp_path / "plan.npz", tmp_path):
        shown = in_pipe("info", path)
        assert shown.code == 1
        assert shown.err.startswith("packed-sft: error: ")
        assert len(shown.err.splitlines()) == 1


def test_a_terminal_gets_colours_and_a_pipe_none(home: Path) -> None:
    assert "\x1b[32m" in on_terminal("info", home / "data").text  # the trained share
    assert "\x1b" not in in_pipe("info", home / "data").out


def test_info_of_a_dataset_imports_nothing_heavy(home: Path) -> None:
    loaded = {name.partition(".")[0] for name in modules_of("info", home / "data")}
    assert not loaded & {"torch", "numba", "hydra", "jinja2", "pyarrow", "tokenizers", "sentencepiece"}
