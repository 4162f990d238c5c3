"""Cached kernels: a change in any file they are made of gives new code, and old caches do not pile up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from megatron_packed_sft.support import compiled

SOURCES = {
    "__init__.py": "",
    "support/__init__.py": "",
    "constants.py": "STEP = 10\n",
    "inner_kernel.py": """
from tiny.constants import STEP
from tiny.support.compiled import kernel


@kernel
def inner(value):
    return value + STEP
""",
    "outer_kernel.py": """
from tiny.inner_kernel import inner
from tiny.support.compiled import kernel


@kernel
def outer(value):
    return 2 * inner(value)
""",
}


def make_package(home: Path) -> Path:
    """A package of two kernel files, with our own decorator."""
    package = home / "tiny"
    (package / "support").mkdir(parents=True)
    for name, source in SOURCES.items():
        (package / name).write_text(source)
    shutil.copy(compiled.__file__, package / "support/compiled.py")
    return package


def run(home: Path) -> int:
    """What the compiled function gives in a new process."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    script = "from tiny.outer_kernel import outer; print(outer(1))"
    environment |= {"PYTHONPATH": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


def caches(package: Path) -> list[Path]:
    return sorted((package / "__pycache__").glob("tiny-kernels-*"))


def test_a_changed_kernel_or_constant_of_another_file_is_never_run_from_an_old_cache(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    assert run(tmp_path) == 22
    [first] = caches(package)
    assert list(first.rglob("*.nbc"))
    inner = package / "inner_kernel.py"
    inner.write_text(inner.read_text().replace("value + STEP", "value - STEP"))
    assert run(tmp_path) == -18
    (package / "constants.py").write_text("STEP = 3\n")
    assert run(tmp_path) == -4
    assert len(caches(package)) == 3


def test_caches_that_nobody_used_for_a_month_are_removed_and_nothing_else(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    names = ["tiny-kernels-0123456789abcdef", "tiny-kernels-fedcba9876543210", "tiny-kernels-mine", "other"]
    for name in names:
        (package / "__pycache__" / name).mkdir(parents=True)
    for name in (names[0], names[2], names[3]):
        os.utime(package / "__pycache__" / name, (0, time.time() - 31 * 24 * 3600))
    assert run(tmp_path) == 22
    left = {entry.name for entry in (package / "__pycache__").iterdir()}
    assert names[0] not in left
    assert set(names[1:]) < left
