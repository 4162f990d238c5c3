"""The page as a file: deterministic, safe, self-contained, small, and written where it may be."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_packed_sft import PackedBin, convert
from megatron_packed_sft.cli.main import main
from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect.opened_data import open_data
from megatron_packed_sft.inspect.report.dataset_page import dataset_page
from megatron_packed_sft.inspect.report.run_page import run_page
from megatron_packed_sft.inspect.report.write import assemble, embedded_json, write_report
from megatron_packed_sft.train.metrics import MetricsFile, Totals, step_record
from megatron_packed_sft.train.samples import Sample, as_text
from tests.inspect.conftest import HOSTILE, LONG_TEXT, Prepared
from tests.packed_bins import make_bins, write_shard

# As published on npm, uplot 1.6.32.
VENDORED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE.uPlot": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def numbers_of(html: bytes) -> dict[str, Any]:
    """What a page carries."""
    found = re.search(rb'<script type="application/json" id="data">(.*?)</script>', html, flags=re.DOTALL)
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


def test_the_chart_library_is_the_published_one() -> None:
    vendor = resources.files("megatron_packed_sft.inspect.report").joinpath("vendor")
    for name, expected in VENDORED.items():
        assert hashlib.sha256(vendor.joinpath(name).read_bytes()).hexdigest() == expected


def test_the_same_dataset_gives_the_same_bytes(prepared: Prepared, tmp_path: Path) -> None:
    first = write_report(prepared.path, tmp_path / "first.html")
    second = write_report(prepared.path, tmp_path / "second.html")
    assert Path(first.path).read_bytes() == Path(second.path).read_bytes()
    assert first.num_bytes == Path(first.path).stat().st_size < 5_000_000


def test_nothing_is_loaded_and_only_our_scripts_run(prepared: Prepared, tmp_path: Path) -> None:
    html = Path(write_report(prepared.path, tmp_path / "page.html").path).read_text()
    outside = re.sub(r'<script type="application/json".*?</script>', "", html, flags=re.DOTALL)
    assert not re.search(r"""(src|href)\s*=\s*["'](https?:)?//""", outside)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert len(re.findall(r"<script>", outside)) == policy[1].split("style-src")[0].count("'sha256-")
    assert " style=" not in outside


def test_no_text_of_a_chat_can_end_the_element_that_carries_it(prepared: Prepared, tmp_path: Path) -> None:
    html = Path(write_report(prepared.path, tmp_path / "page.html").path).read_bytes()
    assert b"<script>document.title" not in html
    texts = "".join(numbers_of(html)["bins"]["texts"])
    assert "<" in texts
    for hostile in ("</script>", "<!--", "\u2028", "{{scripts}}", '"\\'):
        assert "<" not in embedded_json(hostile)
        assert json.loads(embedded_json({"text": hostile}))["text"] == hostile


def test_a_title_of_markup_is_text(tmp_path: Path) -> None:
    write_shard(tmp_path / "<i>&{{data}}.shard", make_bins(3, 16), 16)
    html = assemble(dataset_page(open_data(tmp_path / "<i>&{{data}}.shard")))
    assert b"<title>&lt;i&gt;&amp;{{data}}.shard | packed-sft report</title>" in html
    assert numbers_of(html)["title"] == "<i>&{{data}}.shard"


def test_sources_drops_and_their_records_are_shown(prepared: Prepared) -> None:
    page = dataset_page(open_data(prepared.path))
    good, odd = page["sources"]
    assert (good["name"], good["num_records"], good["num_sequences"], good["dropped"]) == ("good", 120, 120, {})
    assert (odd["name"], odd["num_records"], sum(odd["dropped"].values())) == ("odd", 11, 3)
    assert odd["num_sequences"] == 8, "those in bins"
    totals = page["splits"]["train"]["totals"]
    assert good["num_tokens"] + odd["num_tokens"] == totals["num_tokens"]
    assert good["num_trained_tokens"] + odd["num_trained_tokens"] == totals["num_trained"]
    table = page["source_table"]
    assert [one["title"] for one in table["columns"]][:4] == ["source", "share of tokens", "records", "dropped"]
    assert [row[0] for row in table["rows"]] == ["good", "odd"]
    drops = {one["reason"]: one for one in page["drops"]}
    assert {reason: one["num_records"] for reason, one in drops.items()} == {
        "bad_row": 1,
        "longer_than_pack": 1,
        "nothing_to_train": 1,
    }
    assert drops["bad_row"]["sources"] == {"odd": 1}
    assert [one["record"] for one in drops["bad_row"]["examples"]] == ['{"nonsense": "<i>not</i> a chat"}']
    assert drops["longer_than_pack"]["examples"][0]["where"].startswith(f"{prepared.odd}, line 10: ")
    assert drops["longer_than_pack"]["stage"] == "packing"
    assert drops["longer_than_pack"]["num_tokens"] > 131_072


def test_findings_point_at_the_bins_that_have_them(prepared: Prepared) -> None:
    page = dataset_page(open_data(prepared.path))
    shown = {one["number"]: one for one in page["bins"]["splits"]["train"]}
    suspicions = {one["kind"]: one for one in page["splits"]["train"]["suspicions"]}
    lines = {}
    for kind, one in suspicions.items():
        for example in one["examples"]:
            origin = shown[example["bin"]]["origins"][example["sequence"]]
            lines.setdefault(kind, []).append((Path(page["bins"]["files"][origin[0]]).name, origin[1]))
    assert lines == {
        "little_trained": [("odd.jsonl", 7)],
        "late": [("odd.jsonl", 7)],
        "repeated": lines["repeated"],  # the copy or what it is a copy of, whichever comes later in the bins
        "control_text": [("odd.jsonl", 5)],
    }
    assert lines["repeated"] in ([("good.jsonl", 8)], [("odd.jsonl", 6)])


def test_without_its_tokenizer_and_work_directory_a_page_shows_ids(prepared: Prepared, tmp_path: Path) -> None:
    shutil.copytree(prepared.path, tmp_path / "alone")
    page = dataset_page(open_data(tmp_path / "alone"))
    assert page["bins"]["has_text"] is False
    assert "was not found; give its path with --tokenizer" in page["tokenizer_note"]
    assert page["bins"]["texts"][0] == f"{page['bins']['ids'][0]} "
    assert "origins" not in page["bins"]["splits"]["train"][0]
    assert page["has_provenance"]
    again = dataset_page(open_data(tmp_path / "alone"), tokenizer=prepared.tokenizer)
    assert again["bins"]["has_text"] is True
    with_work = dataset_page(open_data(tmp_path / "alone", work_dir=f"{prepared.path}.work"))
    assert "origins" in with_work["bins"]["splits"]["train"][0]


@pytest.mark.parametrize("storage", ["legacy", "parquet"])
def test_other_storages_show_the_same_bins(prepared: Prepared, tmp_path: Path, storage: str) -> None:
    convert(prepared.path, tmp_path / "other", to=storage)
    other = dataset_page(open_data(tmp_path / "other"), tokenizer=prepared.tokenizer)
    same = dataset_page(open_data(prepared.path))
    assert other["storage"] == storage
    for mine, others in zip(same["bins"]["splits"]["train"], other["bins"]["splits"]["train"], strict=True):
        assert {**mine, "origins": None} == {**others, "origins": None}
    assert other["splits"]["train"]["attention"] == same["splits"]["train"]["attention"]


def test_a_token_stream_is_shown_as_its_windows(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "stream").mkdir()
    np.save(tmp_path / "stream" / "tokens.npy", np.random.default_rng(0).integers(300, 900, 9_000).astype(np.uint16))
    page = dataset_page(open_data(tmp_path / "stream"), tokenizer=prepared.tokenizer)
    assert page["storage"] == "token_stream"
    assert page["splits"]["train"]["totals"]["num_tokens"] >= 8_000
    [truncated] = [one for one in page["splits"]["train"]["suspicions"] if one["kind"] == "truncated"]
    assert "end anywhere" in truncated["unchecked"]


def test_weights_of_tokens_are_shown(tmp_path: Path) -> None:
    mask = np.array([0, 0.5, 0.5, 2, 0], np.float32)
    write_shard(tmp_path / "shard", [PackedBin(np.arange(5, 10), mask, np.array([0]))], 8)
    page = dataset_page(open_data(tmp_path / "shard"))
    [shown] = page["bins"]["splits"]["train"]
    assert shown["runs"] == [2, 0, 2, 0.5, 1, 2], "of the tokens, one behind the positions that predict them"
    assert page["splits"]["train"]["totals"]["sum_weights"] == 3


def test_an_earlier_page_is_replaced_and_anything_else_is_not(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "notes.html").write_text("<p>mine")
    with pytest.raises(InvalidInputError, match=r"notes\.html exists and is not a page"):
        write_report(prepared.path, tmp_path / "notes.html")
    with pytest.raises(InvalidInputError, match="is not a page"):
        write_report(prepared.path, tmp_path)
    write_report(prepared.path, tmp_path / "new" / "page.html")
    write_report(prepared.path, tmp_path / "new" / "page.html")
    assert (tmp_path / "notes.html").read_text() == "<p>mine"


def test_a_page_stays_below_5_megabytes_whatever_is_in_the_bins(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    bins = []
    for _ in range(600):  # no id repeats itself, and no run of the mask is longer than it must be
        mask = np.resize(np.array([0, 1], np.uint8), 1024)
        mask[-1] = 0
        bins.append(PackedBin(rng.integers(0, 150_000, 1024).astype(np.int32), mask, np.array([0], np.uint32)))
    write_shard(tmp_path / "shard", bins, 1024)
    written = write_report(tmp_path / "shard", tmp_path / "page.html")
    assert 1_500_000 < written.num_bytes <= 5_000_000
    assert written.num_bins_shown is not None
    assert 100 < written.num_bins_shown < 600


def test_the_verb_says_what_it_wrote(
    prepared: Prepared, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(prepared.path)]) == 0
    assert re.fullmatch(
        rf"{tmp_path}/my_dataset\.report\.html: [\d.]+ kB, \d+ of \d+ bins, 4 suspicious sequences\n",
        capsys.readouterr().out,
    )
    assert (
        main(["report", str(prepared.path), "-o", "page.html", "--json", "--ranks", "2", "--global-batch-size", "4"])
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["path"] == str(tmp_path / "page.html")
    assert document["num_suspicious"]["repeated"] == 1
    attention = numbers_of((tmp_path / "page.html").read_bytes())["splits"]["train"]["attention"]
    assert (attention["global_batch"], attention["ranks"]) == (4, 2)
    assert main(["report", str(prepared.path), "--bin", "123456"]) == 2
    assert main(["report", str(tmp_path / "nothing")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "bin 123456 is not in split 'train'" in errors[0]


def write_run(path: Path, num_steps: int = 20) -> Path:
    """The output directory of a run, as `packed-sft train` leaves it."""
    (path / "samples").mkdir(parents=True)
    records: list[dict[str, Any]] = []
    for step in range(1, num_steps + 1):
        shares = {"chats": {"weight": 0.7, "share": 0.75, "num_samples": 3 * step, "epochs": 0.1 * step}}
        shares["web"] = {"weight": 0.3, "share": 0.25, "num_samples": step, "epochs": 0.01 * step}
        loss = None if step == 3 else 5.0 / step
        numbers = {"loss": loss, "learning_rate": 1e-4, "grad_norm": 1.5, "tokens_per_second": 1e4}
        shares_of_time = {"trained_tokens_per_second": 4e3, "padding_share": 0.02, "data_share": 0.001}
        counts = {"step_seconds": 0.5, "epoch": 0.05 * step, "consumed_samples": 4 * step, "loss_kind": "per_token"}
        records.append({"event": "step", "step": step, **numbers, **shares_of_time, **counts, "sources": shares})
        if step % 10 == 0:
            for name in ("validation", "maths"):
                records.append(
                    {"event": "validation", "step": step, "name": name, "loss": 6.0 / step, "num_trained": 9}
                )
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records) + '{"event": "st')
    (path / "config.yaml").write_text("output: runs/first\n")
    for step in (10, 20):
        (path / "samples" / f"step_{step:06d}.txt").write_text(
            f"step {step}: validation, greedy answers\n\n===== prompt 1 (bin 3)\n{HOSTILE['script']}\n"
            f"----- the model says\n{HOSTILE['right_to_left']}\n----- the data says\n{LONG_TEXT}\n"
        )
    return path


def test_a_run_is_shown_from_its_files(tmp_path: Path) -> None:
    page = run_page(write_run(tmp_path / "first"))
    assert page["curves"]["step"] == list(range(1, 21))
    assert page["curves"]["loss"][:4] == [5.0, 2.5, None, 1.25]
    assert page["validation"]["loss"] == {"validation": [0.6, 0.3], "maths": [0.6, 0.3]}
    assert page["mixture"]["share"]["chats"] == [0.75] * 20
    assert page["last"]["step"] == 20, "half a line at the end is left by a killed run"
    [newest, oldest] = page["samples"]
    assert (newest["title"], oldest["title"]) == (
        "step 20: validation, greedy answers",
        "step 10: validation, greedy answers",
    )
    [prompt] = newest["prompts"]
    assert prompt["prompt"] == HOSTILE["script"]
    assert "\\u202e" in prompt["said"]
    assert prompt["expected"].endswith("… (80,000 more characters)")
    assert assemble(page) == assemble(run_page(tmp_path / "first"))


def test_what_training_writes_is_what_the_page_reads(tmp_path: Path) -> None:
    totals = Totals(num_steps=2, loss_sum=6, num_trained=3, num_tokens=8, num_positions=16, seconds=2, data_seconds=0.1)
    with MetricsFile(tmp_path, first_step=0) as metrics:
        for step in (2, 4):
            numbers = {"learning_rate": 1e-4, "grad_norm": 1.0, "consumed_samples": 4 * step, "num_samples": 8}
            metrics.write_step(step_record(totals, step=step, **numbers))  # type: ignore[arg-type]
        metrics.write_validation("maths", 4, 1.25, 99)
    (tmp_path / "samples").mkdir()
    samples = [
        Sample(prompt=[5, 6], expected=[7], said=[8, 9], bin=3),
        Sample(prompt=[1], expected=[2], said=[], bin=4),
    ]
    text = as_text(samples, step=4, name="maths", tokenizer=None)
    (tmp_path / "samples" / "step_000004.txt").write_text(text)
    page = run_page(tmp_path)
    assert page["curves"]["loss"] == [2.0, 2.0]
    assert page["curves"]["padding_share"] == [0.5, 0.5]
    assert page["curves"]["data_share"] == [0.05, 0.05]
    assert page["validation"]["loss"] == {"maths": [1.25]}
    assert page["samples"][0]["prompts"] == [
        {"bin": 3, "prompt": "5 6", "said": "8 9", "expected": "7"},
        {"bin": 4, "prompt": "1", "said": "", "expected": "2"},
    ]


def test_many_steps_are_drawn_as_means_of_groups(tmp_path: Path) -> None:
    page = run_page(write_run(tmp_path / "long", num_steps=4_000))
    assert len(page["curves"]["step"]) == 800
    assert page["curves"]["per_point"] == 5
    assert page["curves"]["step"][0] == 5
    assert page["curves"]["loss"][0] == pytest.approx((5 + 2.5 + 1.25 + 1) / 4), "null is no number"
    assert page["curves"]["step"][-1] == 4_000


def test_a_metrics_file_that_is_none_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first")
    (run / "metrics.jsonl").write_text('{"event": "step", "step": 1}\nnonsense\n')
    with pytest.raises(InvalidInputError, match=r"metrics\.jsonl, line 2 is not a metrics record"):
        write_report(run, tmp_path / "page.html")
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(InvalidInputError, match="has no record yet"):
        write_report(run, tmp_path / "page.html")
