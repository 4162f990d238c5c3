"""A real package, installed into a venv of its own, adds a storage, a strategy and a schema without any import."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from megatron_packed_sft import open_shard
from megatron_packed_sft.encode.tokenizers.sentencepiece import train_sentencepiece
from megatron_packed_sft.errors import InvalidInputError, MissingDependencyError
from megatron_packed_sft.plugins import Plugin, Registry, installed_plugins
from tests.packed_bins import assert_same_bins, make_bins, write_shard

ROOT = Path(__file__).parents[1]
QUESTIONS = [{"q": f"What is {n} plus {n}?", "a": f"It is {2 * n}."} for n in range(40)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh venv that shares our packages and has tests/plugin_package installed."""
    home = tmp_path_factory.mktemp("plugins")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(home)]
    subprocess.run(build, cwd=ROOT / "tests" / "plugin_package", check=True, capture_output=True)
    [wheel] = home.glob("*.whl")
    venv.create(home / "venv", with_pip=False, symlinks=True)
    python = home / "venv" / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    Path(packages, "shared.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    return python


def run(python: Path, *arguments: str, code: int = 0) -> str:
    """Run packed-sft in the venv and return what it prints."""
    done = subprocess.run([python, "-m", "megatron_packed_sft", *arguments], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_env_lists_plugins_with_their_package_and_names_the_broken_one(python: Path) -> None:
    report = json.loads(run(python, "env", "--json", code=1))["registered"]
    found = {one["name"]: one for group in report.values() for one in group if "acme" in one["name"]}
    assert {one["origin"] for one in found.values()} == {"acme-packed-sft 1.2"}
    sound = {name for name, one in found.items() if one["error"] is None}
    assert sound == {"acme_json", "acme_pairs", "acme_qa", "acme_llama"}
    assert "plugin 'acme_broken' of acme-packed-sft 1.2 cannot be loaded" in found["acme_broken"]["error"]
    assert "No module named 'acme_packed_sft.missing'" in run(python, "env", code=1)


def test_help_lists_the_plugins(python: Path) -> None:
    assert "acme_json" in run(python, "convert", "--help")
    text = run(python, "prepare", "--help")
    assert "acme_qa (acme-packed-sft)" in text
    [storages] = [line for line in text.splitlines() if line.startswith("  storage ")]
    [strategies] = [line for line in text.splitlines() if line.startswith("  packing ")]
    assert "acme_json" in storages
    assert "acme_pairs" in strategies


def test_a_broken_plugin_breaks_nothing_but_its_own_use(python: Path, tmp_path: Path) -> None:
    bins = make_bins(5, 16, seed=1)
    write_shard(tmp_path / "shard", bins, 16)
    run(python, "validate", str(tmp_path / "shard"))
    run(python, "convert", str(tmp_path / "shard"), str(tmp_path / "a.npy"), "--to", "legacy")
    run(python, "convert", str(tmp_path / "a.npy"), str(tmp_path / "b"), "--to", "memmap_v1")
    (tmp_path / "nothing.txt").write_text("not packed data")
    assert "cannot be loaded" not in run(python, "validate", str(tmp_path / "nothing.txt"), code=2)
    said = run(python, "convert", str(tmp_path / "shard"), str(tmp_path / "c"), "--to", "acme_broken", code=1)
    assert said.count("\n") == 1
    assert said.endswith("fix or uninstall that package\n")


def test_convert_and_the_factory_use_the_storage(python: Path, tmp_path: Path) -> None:
    bins = make_bins(5, 16, seed=1)
    write_shard(tmp_path / "shard", bins, 16)
    run(python, "convert", str(tmp_path / "shard"), str(tmp_path / "a.acme.json"), "--to", "acme_json")
    run(python, "validate", str(tmp_path / "a.acme.json"))
    run(python, "convert", str(tmp_path / "a.acme.json"), str(tmp_path / "back"))
    assert_same_bins(open_shard(tmp_path / "back"), bins)
    script = (
        "from megatron_packed_sft import create_sft_dataset, pack\n"
        f"dataset = create_sft_dataset({str(tmp_path / 'a.acme.json')!r}, 2, seq_length=16)\n"
        "plan = pack([3, 4, 5], pack_size=8, strategy='acme_pairs')\n"
        "print(len(dataset), dataset[0]['input_ids'][:3].tolist(), plan.num_bins)"
    )
    done = subprocess.run([python, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == f"5 {bins[0].input_ids[:3].tolist()} 2", done.stderr


def test_prepare_uses_all_three(python: Path, tmp_path: Path) -> None:
    records = tmp_path / "questions.jsonl"
    records.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    train_sentencepiece([one["q"] + one["a"] for one in QUESTIONS], tmp_path / "sp.model", vocab_size=300)
    settings = [
        f"sources.qa.path={records}",
        "sources.qa.schema=acme_qa",
        f"tokenizer.path={tmp_path / 'sp.model'}",
        "template=plain",
        "packing=acme_pairs",
        "packing.pack_size=512",
        "storage=acme_json",
        "executor.num_workers=1",
    ]
    run(python, "prepare", f"output={tmp_path / 'out'}", *settings)
    run(python, "validate", str(tmp_path / "out"))
    [shard] = (tmp_path / "out" / "train").glob("*.acme.json")
    assert len(json.loads(shard.read_text())["bins"]) == 20
    assert "acme_q" in run(python, "prepare", f"output={tmp_path / 'x'}", *settings, "sources.qa.schema=acme_q", code=2)


def test_two_packages_with_one_name_are_an_error_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = Plugin("strategies", "twice", "builtins:len", "first", "1", ("second",))
    monkeypatch.setattr("megatron_packed_sft.plugins.installed_plugins", lambda group: {"twice": twice})
    registry: Registry[object] = Registry("strategies", "strategy", {"length": "builtins:len"})
    assert registry.names() == ("length", "twice")
    assert list(registry.usable()) == [len]
    with pytest.raises(MissingDependencyError, match="first and second all offer 'twice'"):
        _ = registry["twice"]


def test_a_plugin_never_hides_a_built_in_name(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = Plugin("strategies", "length", "builtins:sum", "other", "1")
    monkeypatch.setattr("megatron_packed_sft.plugins.installed_plugins", lambda group: {"length": plugin})
    registry: Registry[object] = Registry("strategies", "strategy", {"length": "builtins:len"})
    assert registry["length"] is len
    assert registry.broken() == {"length": "plugin 'length' of other 1 is ignored: the name is built in"}


def test_an_unknown_name_gets_the_nearest_one() -> None:
    registry: Registry[object] = Registry("strategies", "strategy", {"length": "builtins:len"})
    with pytest.raises(InvalidInputError, match="strategy 'lenght' is unknown; did you mean 'length'"):
        _ = registry["lenght"]
    with pytest.raises(InvalidInputError, match="choose another name, or pass replace=True"):
        registry.register("length", sum)


def test_without_plugins_there_are_none() -> None:
    assert installed_plugins("nothing") == {}


def test_the_storage_of_the_plugin_passes_the_checks_of_ours(python: Path, tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from tests.storage.storage_checks import CHECKS
for check in CHECKS:
    home = Path(sys.argv[1], check.__name__)
    home.mkdir()
    check("acme_json", home)
"""
    subprocess.run([python, "-c", program, tmp_path], cwd=ROOT, check=True, capture_output=True, text=True)
