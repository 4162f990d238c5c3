"""The wheel: what a user installs holds the configuration and the command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

from omegaconf import OmegaConf
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_packed_sft import __version__
from megatron_packed_sft.storage.registry import storage_named, storage_names
from tests.constraints import FILE, dependencies

ROOT = Path(__file__).parents[1]
REPORT = "megatron_packed_sft/inspect/report"


def test_the_wheel_ships_conf_the_type_marker_and_the_command(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    [wheel] = tmp_path.glob("*.whl")
    assert __version__ in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata] = [name for name in names if name.endswith("METADATA")]
        requires = re.findall("^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
        needed = [Requirement(one) for one in requires]
        [entry_points] = [name for name in names if name.endswith("entry_points.txt")]
        assert "packed-sft = megatron_packed_sft.cli.main:main" in archive.read(entry_points).decode()
    without_extras = {one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})}
    assert "numba" in without_extras
    assert not without_extras & {"torch", "megatron-core", "transformers"}
    for extra in ("torch", "megatron", "trainer"):
        assert "torch" in dependencies(extra), extra
    assert "torch" not in dependencies("hf")
    assert "megatron_packed_sft/py.typed" in names
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert f"megatron_packed_sft/conf/{path.relative_to(ROOT / 'conf')}" in names
    files = [
        *(ROOT / "megatron_packed_sft").rglob("*.jinja"),
        *(path for folder in ("static", "vendor") for path in (ROOT / REPORT / folder).iterdir()),
    ]
    assert {path.suffix for path in files} >= {".jinja", ".html", ".css", ".js", ".uPlot"}
    for path in files:
        assert str(path.relative_to(ROOT)) in names
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)

    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = "import sys; from megatron_packed_sft.prepare.app import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, "output=x", "storage=legacy", "--cfg", "job"],
        cwd=tmp_path / "site",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "packed_storage: legacy" in done.stdout


def test_constraints_pin_what_dev_needs_and_nothing_else() -> None:
    pinned = {line.partition("==")[0] for line in FILE.read_text().splitlines() if not line.startswith("#")}
    installed = {canonicalize_name(one.metadata["Name"]) for one in distributions()}
    # On another platform some of them are not installed.
    assert pinned & installed == set(dependencies("dev")), "run `make constraints`"


def test_every_storage_group_names_a_storage_that_exists() -> None:
    files = sorted((ROOT / "conf" / "storage").glob("*.yaml"))
    assert {path.stem for path in files} == set(storage_names())
    for path in files:
        assert storage_named(OmegaConf.load(path).packed_storage).name == path.stem
