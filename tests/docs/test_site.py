"""The site builds in strict mode, without a network, and lists every public name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_packed_sft
from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("site")
    # No network: a proxy that nobody listens at.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    environment |= dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    yield folder
    shutil.rmtree(folder)


def test_every_page_is_in_the_site(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").exists(), f"{page.name} is not in the nav of mkdocs.yml"


def test_the_reference_lists_every_public_name(site: Path) -> None:
    text = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    ids = set(re.findall(r'id="megatron_packed_sft\.[\w.]*?(\w+)"', text))
    assert not set(megatron_packed_sft.__all__) - ids - {"__version__"}


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*src="(https?:[^"]*)', page.read_text())
        loaded += re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="(https?:[^"]*)', page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"
