"""Tests that compile flex attention do not share torch's limit of eight shapes per process."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet(request: pytest.FixtureRequest) -> None:
    if "flex" in request.node.name:
        import torch

        torch.compiler.reset()
