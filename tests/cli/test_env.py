"""`packed-sft env`: everything a bug report needs, without importing what is heavy."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megatron_packed_sft import __version__
from megatron_packed_sft.cli import env
from megatron_packed_sft.cli.main import main
from megatron_packed_sft.support.compiled import cache_directory


def test_env_prints_versions_machine_and_registered_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["megatron-packed-sft", __version__] in lines
    assert ["python", platform.python_version()] in lines
    assert ["numba", metadata.version("numba")] in lines
    for name in ("memmap_v1", "optimal", "sharegpt"):
        assert [name, "built", "in"] in lines


def test_env_as_json_has_the_same_and_the_kernel_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == metadata.version("torch")
    assert report["versions"]["megatron-core"] == metadata.version("megatron-core")
    assert report["machine"]["kernel cache"] == cache_directory()
    assert {"name": "legacy", "origin": "built in", "error": None} in report["registered"]["storages"]
    assert list(report["registered"]) == ["storages", "strategies", "schemas", "families"]


def test_env_says_what_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_PACKAGES", ("nothing-by-this-name",))
    assert main(["env"]) == 0
    assert ["nothing-by-this-name", "not", "installed"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]


def test_env_says_which_path_a_tokenizer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.environment()["machine"]["tokenizer path"] == "gigatoken where it gives the same ids, else tokenizers"
    monkeypatch.setattr(env, "_version", lambda package: None if package == "gigatoken" else "1")
    assert "gigatoken is many times faster, but not installed" in env.environment()["machine"]["tokenizer path"]


def test_the_cuda_version_is_that_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    said = env.environment()["machine"]["cuda of torch"]
    assert said == (torch.version.cuda or "none: a build without CUDA")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("cuda: Optional[str] = '12.8'", "12.8"),
        ('cuda = "11.8"', "11.8"),
        ("cuda: Optional[str] = None", "none: a build without CUDA"),
        ("nothing = 1", "unknown"),
    ],
)
def test_the_cuda_version_is_read_from_torchs_version_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('env must not import torch')")
    (tmp_path / "torch" / "version.py").write_text(f"debug = False\n{line}\nhip: Optional[str] = None\n")
    script = "from megatron_packed_sft.cli.env import environment; print(environment()['machine']['cuda of torch'])"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {script}"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == said, done.stderr


def test_env_imports_nothing_heavy() -> None:
    script = (
        "import sys; from megatron_packed_sft.cli.main import main; main(['env']); "
        "print(*({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"torch", "megatron", "numba", "hydra", "transformers", "tokenizers", "pyarrow"}
