"""reliability.md row 15: whatever is in a file, it is read or refused in one sentence. `make soak` looks longer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attacks.fuzzing import (
    TARGETS,
    changed_bytes,
    changed_document,
    read_or_refuse,
    render_or_refuse,
    templates,
)

# The same examples in every run of `make test`, so that it fails for a change and not by chance; new ones when asked.
EXAMPLES = os.environ.get("PACKED_SFT_FUZZ_EXAMPLES")


def bounded(num_examples: int) -> settings:
    return settings(
        max_examples=int(EXAMPLES or num_examples),
        derandomize=EXAMPLES is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("name", TARGETS)
def test_any_change_of_a_file_is_read_or_refused(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    file = target.build(tmp_path)
    sound = file.read_bytes()
    target.use(file)
    changes = changed_bytes(sound)

    @bounded(1000)
    @given(changes | changed_document(sound) | changed_document(sound) if target.is_sealed else changes)
    def fuzz(data: bytes) -> None:
        file.write_bytes(data)
        read_or_refuse(target, file)

    fuzz()


@bounded(250)  # one may loop up to its limit
@given(templates() | st.text(max_size=60))
def test_any_template_is_rendered_or_refused(source: str) -> None:
    render_or_refuse(source)
