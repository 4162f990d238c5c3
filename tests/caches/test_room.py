"""The room as a whole: light to import, exact names, torch's random numbers alone."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import megatron_packed_sft
from megatron_packed_sft import caches

ROOM = Path(megatron_packed_sft.__file__).parent / "caches"


def test_every_name_loads_from_the_documented_module() -> None:
    assert dir(caches) == sorted(caches._HOMES)
    for name, home in caches._HOMES.items():
        module = importlib.import_module(f"megatron_packed_sft.caches.{home}")
        assert getattr(caches, name) is getattr(module, name)


def test_importing_the_room_and_its_meta_waits_for_no_torch() -> None:
    script = (
        "import sys; from megatron_packed_sft.caches import read_meta, write_meta, sha256_file; "
        "print('torch' in sys.modules)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOM.parents[1])},
    )
    assert shown.stdout.strip() == "False"


def test_random_numbers_are_torchs_alone() -> None:
    for path in sorted(ROOM.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not any(name.partition(".")[0] in ("random", "secrets") for name in names), path.name
            assert not (isinstance(node, ast.Attribute) and node.attr == "random"), path.name
