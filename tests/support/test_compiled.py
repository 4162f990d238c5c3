"""Cached kernels: never stale, never somebody else's, and a cache that cannot be kept costs time and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_packed_sft.support import compiled
from megatron_packed_sft.support.own_directories import own_directory, user_cache
from tests.other_users import as_user, needs_other_users

ROOT = Path(__file__).parents[1]
VARIABLES = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR", "HOME")  # of which the place of the cache depends
USER, ATTACKER = 12345, 54321
SAID = "no directory can hold compiled kernels"

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


def run(home: Path, before: str = "", **environment: str) -> int:
    """What the compiled function gives in a new process."""
    done = start(home, before, **environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def start(home: Path, before: str = "", *, user: int | None = None, **given: str) -> subprocess.CompletedProcess[str]:
    """Call the compiled function in a new process, after a statement."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    script = f"{before}\nfrom tiny.outer_kernel import outer; print(outer(1))"
    environment |= {"PYTHONPATH": f"{home}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1", **given}
    command = [*(as_user(user) if user else []), sys.executable, "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


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


def read_only(package: Path) -> None:
    for path in (package, *package.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)


def test_a_cache_that_a_crash_or_a_full_disk_has_cut_short_is_made_again(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    assert run(tmp_path) == 22
    [cache] = caches(package)
    for pattern, size in (("*.nbi", 0), ("*.nbc", 40), ("*.nbi", 30)):
        files = list(cache.rglob(pattern))
        assert files
        for path in files:
            os.truncate(path, size)
        assert run(tmp_path) == 22
    assert all(path.stat().st_size > 40 for path in cache.rglob("*.nb?"))


def test_a_cache_that_cannot_be_written_any_more_costs_time_and_is_said_once(tmp_path: Path) -> None:
    make_package(tmp_path)
    done = start(tmp_path, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))")
    assert (done.returncode, done.stdout) == (0, "22\n"), done.stderr
    assert done.stderr.count("(File too large); they are compiled again next time") == 1


@pytest.mark.parametrize(
    ("mode", "is_used"), [(0o700, True), (0o755, True), (0o1777, True), (0o777, False)], ids=lambda value: f"{value:o}"
)
def test_a_place_where_everybody_can_rename_is_no_place_for_a_cache(mode: int, is_used: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    base.chmod(mode)
    below = base / "below"
    below.mkdir()
    for place in (base, below):
        directory = own_directory(place, "cache")
        assert (directory is not None) == is_used
        assert directory is None or Path(directory).stat().st_mode & 0o777 == 0o700


def test_a_link_and_a_directory_that_others_can_open_are_no_caches(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "wide").mkdir(mode=0o750)
    (tmp_path / "file").touch(mode=0o600)
    assert [own_directory(tmp_path, name) for name in ("link", "wide", "file")] == [None] * 3
    assert own_directory(tmp_path / "link", "cache") == str(tmp_path / "elsewhere" / "cache")  # a linked home is fine


def test_no_directory_that_we_make_is_open_to_others_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert own_directory(tmp_path / "new" / "cache", "mine") is not None
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o755


def test_without_a_home_there_is_no_user_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "not/absolute")
    assert user_cache() is None
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification tells to ignore
    assert user_cache() == "/root/.cache"


@needs_other_users
def test_the_cache_goes_to_the_first_place_that_is_ours_and_its_absence_is_said_once(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    read_only(package)
    for name in ("home", "temporary", "chosen"):
        (tmp_path / name).mkdir()
        os.chown(tmp_path / name, USER, USER)
    home, temporary, chosen = (str(tmp_path / name) for name in ("home", "temporary", "chosen"))
    for environment, place in (
        ({"NUMBA_CACHE_DIR": chosen, "HOME": home}, chosen),
        ({"NUMBA_CACHE_DIR": "/proc/nowhere", "HOME": home, "TMPDIR": temporary}, f"{home}/.cache/tiny"),
        ({"HOME": "/", "TMPDIR": temporary}, f"{temporary}/megatron_packed_sft-{USER}"),
    ):
        done = start(tmp_path, user=USER, **environment)
        assert (done.returncode, done.stdout) == (0, "22\n"), done.stderr
        assert done.stderr.count("\n") == ("/proc/nowhere" in environment.values()), done.stderr
        [cache] = Path(place).glob("tiny-kernels-*")
        assert list(cache.rglob("*.nbc"))
        assert cache.stat().st_mode & 0o777 == 0o700
    done = start(tmp_path, user=USER, TMPDIR=str(tmp_path))  # without HOME, too
    assert (done.returncode, done.stdout) == (0, "22\n"), done.stderr
    assert done.stderr.count(SAID) == 1


@needs_other_users
@pytest.mark.parametrize("mode", [0o700, 0o777], ids=lambda value: f"{value:o}")
def test_code_that_another_user_has_planted_below_tmpdir_is_not_run(mode: int, tmp_path: Path) -> None:
    package = make_package(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    temporary.chmod(0o1777)
    assert run(tmp_path) == 22
    planted = temporary / f"megatron_packed_sft-{USER}"
    shutil.copytree(package / "__pycache__", planted)
    shutil.rmtree(package / "__pycache__")
    read_only(package)
    for path in (*planted.rglob("*"), planted):
        if path.suffix == ".nbi":
            path.write_bytes(b"cos\nsystem\n(S'echo planted >&2'\ntR.")
        path.chmod(0o777)
        os.chown(path, ATTACKER, ATTACKER)
    planted.chmod(mode)
    done = start(tmp_path, user=USER, HOME="/", TMPDIR=str(temporary))
    assert (done.returncode, done.stdout) == (0, "22\n"), done.stderr
    assert SAID in done.stderr
    assert "planted" not in done.stderr


def test_an_inner_kernel_is_compiled_once_for_all_constants_and_refuses_python(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    source = (package / "inner_kernel.py").read_text()
    (package / "inner_kernel.py").write_text(source.replace("kernel\n", "inner_kernel\n"))
    outer = (package / "outer_kernel.py").read_text()
    (package / "outer_kernel.py").write_text(outer.replace("2 * inner(value)", "inner(value) + inner(1) + inner(2)"))
    assert run(tmp_path) == 11 + 11 + 12
    [cache] = caches(package)
    assert len(list(cache.rglob("*inner_kernel*.nbc"))) == 1
    done = start(tmp_path, "from tiny.inner_kernel import inner; inner(1)")
    assert "TypeError: inner is called by kernels only" in done.stderr
