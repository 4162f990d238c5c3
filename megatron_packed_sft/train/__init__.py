"""The training recipe. Its public names: `main`, the application behind `packed-sft train`, `export_model` and
`read_metrics`.

app ─▶ config, config_checks ─▶ data ─▶ step_schedule ─▶ model_and_optimizer ─▶ loop ─▶ checkpoint, metrics, report
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_packed_sft.train.app import main
    from megatron_packed_sft.train.export import export_model
    from megatron_packed_sft.train.metrics import read_metrics

_HOMES = {"export_model": "export", "main": "app", "read_metrics": "metrics"}

__all__ = ["export_model", "main", "read_metrics"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: metrics need torch, which `--help` should not wait for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
