"""What `validate` says: findings that name file, row and field, and the counts of what it looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["structure", "full"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    file: str
    message: str
    row: int | None = None
    field: str | None = None

    def __str__(self) -> str:
        place = self.file if self.row is None else f"{self.file}, row {self.row}"
        return f"{place}: {self.message}"


@dataclass(slots=True)
class ValidationReport:
    """What `validate` looked at and found.

    Example:
        >>> ValidationReport(path="x", level="full").ok
        True
    """

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
        """Whether nothing was found."""
        return self.num_findings == 0

    def add(self, finding: Finding) -> None:
        """Count a finding, and keep it while there are not too many."""
        self.num_findings += 1
        if len(self.findings) < self.max_findings:
            self.findings.append(finding)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, as `packed-sft validate --json` prints it."""
        return {"ok": self.ok, **asdict(self)}
