"""The pages of the documentation, taken apart into their code blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = {"bash", "python", "yaml", "toml", "json"}
_BLOCK = re.compile(r"^```(\w*)([^\n`]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    is_excerpt: bool
    text: str
    line: int

    @property
    def file_name(self) -> str | None:
        """Of a YAML block that says in its first line which file it is: `# my_prepare.yaml: what it is`."""
        found = re.match(r"# (\w+\.yaml)\b", self.text)
        return found and found[1]


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(found[1], 'title="Excerpt"' in found[2], found[3], text.count("\n", 0, found.start()) + 2)
        for found in _BLOCK.finditer(text)
    ]


def runnable(page: Path) -> list[Block]:
    """The blocks of a page that a reader can paste."""
    return [block for block in blocks(page) if block.language in CODE and not block.is_excerpt]
