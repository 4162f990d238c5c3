"""Tests that compile flex attention do not share torch's limit of eight shapes per process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _many_shapes_are_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    if "flex_attention" not in request.node.name:
        yield
        return
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=64):
        yield
