"""Tests check tokenizers anew: what this machine remembers of them is out of sight."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _nothing_remembered(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
