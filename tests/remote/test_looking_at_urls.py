"""preview, compare, report, info and validate by URL, and what they fetch, counted at the server."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_packed_sft import (
    PackPlan,
    TokenPartWriter,
    create_sft_dataset,
    load_template,
    load_tokenizer,
    materialize_shards,
    open_token_store,
    pack,
    publish_store,
    validate,
)
from megatron_packed_sft.cli.main import main
from megatron_packed_sft.errors import InvalidInputError, ShardFileError
from megatron_packed_sft.inspect.compare import compare
from megatron_packed_sft.inspect.info import describe
from megatron_packed_sft.remote.objects import list_objects, read_object, write_object
from megatron_packed_sft.remote.uploads import send_shard, upload
from megatron_packed_sft.support import json_document
from tests.prepare.preparing import chat, write_records
from tests.remote.object_store import FaultProxy
from tests.remote.test_dataset_urls import write_dataset

URL = "s3://bucket/sets/my_dataset"
TOKENS = "s3://bucket/tokens"
GOLDEN = Path(__file__).parents[1] / "golden"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.parametrize("place", ["", "/train/shard_000000"], ids=["dataset", "shard"])
def test_a_preview_of_a_bin_fetches_its_shard_once_and_no_other(
    store: FaultProxy, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    local = write_dataset(tmp_path / "my_dataset")
    upload(local, URL)
    store.reset()
    words = ("--bin", "2", "--json")
    there = json.loads(shown(capsys, "preview", f"{URL}{place}", *words))
    here = json.loads(shown(capsys, "preview", f"{local}{place}", *words))
    assert there["sequences"] == here["sequences"]
    assert there["path"] == f"{URL}{place}"
    assert [name for name in store.fetched() if "shard_000000/input_ids" in name]
    assert not [name for name in store.fetched() if "shard_000001/input_ids" in name]
    store.reset()
    shown(capsys, "preview", f"{URL}{place}", *words)
    assert not [name for name in store.fetched() if name.endswith(".npy")], "the shard is in the cache"


def test_a_preview_of_a_shard_that_was_changed_is_refused(
    store: FaultProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(write_dataset(tmp_path / "my_dataset"), URL)
    other = write_dataset(tmp_path / "other", seed=50)
    manifest = "train/shard_000000/manifest.json"
    write_object(f"{URL}/{manifest}", (other / manifest).read_bytes())
    assert main(["preview", URL, "--bin", "0"]) == 1
    said = capsys.readouterr().err
    assert f"{URL}/train/shard_000000" in said
    assert "packed-sft-upload" not in said


def test_a_preview_of_a_damaged_shard_names_the_object(
    store: FaultProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = write_dataset(tmp_path / "my_dataset") / "train/shard_000000/input_ids.npy"
    upload(tmp_path / "my_dataset", URL)
    data = bytearray(ids.read_bytes())
    data[-1] ^= 1
    write_object(f"{URL}/train/shard_000000/input_ids.npy", bytes(data))
    assert main(["preview", URL, "--bin", "0"]) == 1
    assert f"{URL}/train/shard_000000/input_ids.npy" in capsys.readouterr().err


def test_a_preview_of_chats_fetches_their_beginning(
    store: FaultProxy, tmp_path: Path, tokenizer_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [chat(f"Say {number}.", f"It is {number}. " + "And so on. " * 100) for number in range(9000)]
    path = write_records(tmp_path / "chats.jsonl", rows)
    write_object("s3://bucket/raw/chats.jsonl", path.read_bytes())
    store.reset()
    settings = (f"tokenizer.path={tokenizer_path}", "template=chatml")
    assert "It is 0." in shown(capsys, "preview", "s3://bucket/raw/chats.jsonl", *settings)
    assert store.num_bytes < path.stat().st_size / 2
    store.reset()
    assert "It is 99." in shown(capsys, "preview", "s3://bucket/raw/*.jsonl", *settings, "--row", "100")
    assert store.num_bytes < path.stat().st_size / 2


def test_tokenizers_and_templates_come_from_urls_without_the_weights_beside_them(
    store: FaultProxy, tokenizer_path: str, tmp_path: Path
) -> None:
    write_object("s3://bucket/model/sp.model", Path(tokenizer_path).read_bytes())
    write_object("s3://bucket/model/weights.safetensors", b"x" * 1000)
    write_object("s3://bucket/model/../sly.json", b"{}")
    write_object("s3://bucket/mine.jinja", b"{{ messages[0].content }}")
    found = load_tokenizer("s3://bucket/model")
    assert found.fingerprint == load_tokenizer(tokenizer_path).fingerprint
    assert found.name == "sp.model"
    assert "model/weights.safetensors" not in store.fetched()
    assert load_template("s3://bucket/mine.jinja").name == "mine.jinja"
    store.requests.clear()
    load_tokenizer("s3://bucket/model")
    assert not [name for name in store.fetched() if name.endswith(".model")], "the second one is in the cache"


def test_compare_takes_a_url_on_either_side(store: FaultProxy, tmp_path: Path) -> None:
    local = write_dataset(tmp_path / "my_dataset")
    upload(local, URL)
    assert compare(URL, local)["equal"]
    facts = compare(write_dataset(tmp_path / "other", seed=50), URL)
    assert not facts["equal"]
    assert facts["b"]["path"] == URL
    assert facts["differences"]


def test_a_report_is_made_of_a_url_and_written_to_one(
    store: FaultProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    local = write_dataset(tmp_path / "my_dataset")
    upload(local, URL)
    monkeypatch.chdir(tmp_path)
    shown(capsys, "report", str(local), "-o", str(tmp_path / "here.html"))
    assert "my_dataset.report.html" in shown(capsys, "report", URL)
    shown(capsys, "report", URL, "-o", "s3://bucket/page.html")
    shown(capsys, "report", URL, "-o", "s3://bucket/page.html")  # an earlier page is replaced
    page = (tmp_path / "here.html").read_bytes()
    assert (tmp_path / "my_dataset.report.html").read_bytes() == page == read_object("s3://bucket/page.html", 1 << 23)
    assert b"not-to-be-told" not in page
    write_object("s3://bucket/page.html", b"mine")
    assert main(["report", URL, "-o", "s3://bucket/page.html"]) == 2
    assert "is not a page of `packed-sft report`" in capsys.readouterr().err


@pytest.fixture
def token_store(tmp_path: Path) -> Path:
    home = tmp_path / "tokens"
    generator = np.random.default_rng(0)
    for number in range(2):
        with TokenPartWriter(home / f"part_{number:06d}", vocab_size=100) as writer:
            for length in generator.integers(3, 30, 20).tolist():
                ids = generator.integers(0, 100, length)
                writer.append(ids, np.ones(length, np.uint8))
            writer.finalize()
    publish_store(home)
    return home


def test_plans_and_token_stores_by_url_are_those_on_disk(
    store: FaultProxy, token_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    send_shard(token_store, TOKENS)
    here, there = open_token_store(token_store), open_token_store(TOKENS)
    assert there.fingerprint == here.fingerprint
    plan = pack(there.lengths, pack_size=32)
    plan.save("s3://bucket/plan.npz")
    assert PackPlan.load("s3://bucket/plan.npz").fingerprint == plan.fingerprint
    materialize_shards(plan, there, [tmp_path / "shard"])
    planned = create_sft_dataset(TOKENS, 0, plan="s3://bucket/plan.npz")
    for one, other in zip(planned, create_sft_dataset(tmp_path / "shard", 0), strict=True):
        assert np.array_equal(one["input_ids"], other["input_ids"])
    static = create_sft_dataset(TOKENS, 0, packing_mode="static", seq_length=32)
    assert len(static) == len(planned)
    assert describe("s3://bucket/plan.npz") == {**describe_saved(plan, tmp_path), "path": "s3://bucket/plan.npz"}
    assert describe(TOKENS)["total"] == describe(token_store)["total"]
    for place in ("", "/part_000001"):
        words = ("--sequence", "19", "--json")
        seen = [json.loads(shown(capsys, "preview", f"{one}{place}", *words)) for one in (TOKENS, token_store)]
        assert seen[0]["sequences"] == seen[1]["sequences"]
    assert "sound" in shown(capsys, "validate", TOKENS)
    store.reset()
    assert contents_of(open_token_store(TOKENS)) == contents_of(here)
    assert not store.fetched(), "it is in the cache"


def describe_saved(plan: PackPlan, tmp_path: Path) -> dict[str, object]:
    plan.save(tmp_path / "plan.npz")
    return describe(tmp_path / "plan.npz")


def contents_of(found: object) -> list[bytes]:
    return [found[number][0].tobytes() for number in range(len(found))]  # type: ignore[index,arg-type]


def test_a_damaged_token_store_is_found_by_url(
    store: FaultProxy, token_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    send_shard(token_store, TOKENS)
    place = "s3://bucket/tokens/part_000001/ids.npy"
    damaged = bytearray((token_store / "part_000001/ids.npy").read_bytes())
    damaged[-1] ^= 1
    write_object(place, bytes(damaged))
    with pytest.raises(ShardFileError, match=r"part_000001/ids.npy does not have the checksum"):
        open_token_store(TOKENS)
    assert main(["validate", TOKENS]) == 1
    assert f"{place}: its content does not match its checksum" in capsys.readouterr().out
    write_object(place, bytes(damaged) + b"more")
    with pytest.raises(ShardFileError, match="is longer than the"):
        open_token_store(TOKENS)


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("token_store*")))
def test_golden_token_stores_are_read_by_url(store: FaultProxy, name: str) -> None:
    send_shard(GOLDEN / name, TOKENS)
    here, found = open_token_store(GOLDEN / name), open_token_store(TOKENS)
    for number in range(len(here)):
        for ours, theirs in zip(found.weighted(number), here.weighted(number), strict=True):
            assert ours.tolist() == theirs.tolist()


def test_a_token_store_whose_part_is_a_path_is_refused(store: FaultProxy, token_store: Path) -> None:
    document = json_document.parse((token_store / "store.json").read_bytes(), "store.json")
    document["parts"][0]["name"] = "../../secret"
    write_object("s3://bucket/sly/store.json", json_document.render(document))
    with pytest.raises(Exception, match="is malformed"):
        open_token_store("s3://bucket/sly")


def test_objects_whose_names_lead_elsewhere_are_refused(store: FaultProxy, tmp_path: Path) -> None:
    write_object("s3://bucket/sly//../../tokenizer.json", b"{}")
    assert any(".." in name for name in list_objects("s3://bucket/sly"))
    with pytest.raises(InvalidInputError, match="would lead elsewhere"):
        describe("s3://bucket/sly")


def test_a_single_shard_and_a_packed_file_by_url_are_validated_whole(store: FaultProxy, tmp_path: Path) -> None:
    local = write_dataset(tmp_path / "my_dataset", num_shards=1)
    upload(local, URL)
    assert validate(f"{URL}/train/shard_000000").ok
    legacy = next((write_dataset(tmp_path / "old", storage="legacy", num_shards=1) / "train").glob("*.npy"))
    write_object("s3://bucket/packed.npy", legacy.read_bytes())
    assert validate("s3://bucket/packed.npy", level="structure").num_bins == 6
    assert describe("s3://bucket/packed.npy")["kind"] == "shard"
