"""When packing happens; in a module of its own, because settings are checked before anything slow is imported."""

from __future__ import annotations

from typing import Final

PREPARED: Final = "prepared"  # before: bins on disk
STATIC: Final = "static"  # when raw samples are opened, by a plan that stays
MODES: Final = (PREPARED, STATIC)
