"""What `validate` says: findings that name file, bin and field, and the counts of what it looked at."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Level = Literal["structure", "full"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    file: str
    message: str
    bin: int | None = None
    field: str | None = None

    def __str__(self) -> str:
        place = self.file if self.bin is None else f"{self.file}, bin {self.bin}"
        return f"{place}: {self.message}"


@dataclass(slots=True)
class ValidationReport:
    """What `validate` looked at and found."""

    path: str
    level: Level
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_findings: int = 0
    num_shards: int = 0
    num_bins: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_loss_tokens: int = 0
    num_bytes: int = 0
    max_findings: int = 100

    @property
    def ok(self) -> bool:
        """Return whether nothing was found."""
        return self.num_findings == 0

    def add(self, finding: Finding) -> None:
        """Count a finding, and keep it while there are not too many."""
        self.num_findings += 1
        if len(self.findings) < self.max_findings:
            self.findings.append(finding)

    def add_strangers(self, directory: Path, expected: Collection[str]) -> None:
        """Add a finding for every file in a directory of ours that is not part of it."""
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            return  # what is missing is reported by whoever opens it
        for name in names:
            if name not in expected:
                self.add(Finding(str(directory / name), "is not part of the dataset; move it somewhere else"))

    def rename(self, path: str, at_home: Callable[[str], str]) -> None:
        """Speak of the place that the data came from, and not of a copy that was looked at."""
        self.path = path
        self.findings = [replace(one, file=at_home(one.file), message=at_home(one.message)) for one in self.findings]
        self.notes = [at_home(note) for note in self.notes]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data, as `packed-sft validate --json` prints it."""
        return {"ok": self.ok, **asdict(self)}
