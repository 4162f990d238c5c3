"""What `mkdocs build` makes of this repository beside docs/: the API reference, and two files of the root as pages.

The API reference is generated from the names of the package root, so that no public name can be missing from it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import megatron_packed_sft

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for name, text in {**api_pages(), **root_pages()}.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name files of the repository that are no pages instead of linking to them."""
    return re.sub(r"\[([^\]]+)\]\(\.\./(?!api/)[^)]*\)", r"\1", markdown)


def api_pages() -> dict[str, str]:
    """Return one page per task, as the package's `__init__` groups its names; each name from its own module."""
    _, *sections = re.split(r"^    # ([A-Z][\w ]*): (.*)$", megatron_packed_sft._SOURCE, flags=re.MULTILINE)
    pages = {}
    for task, introduction, imports in zip(sections[::3], sections[1::3], sections[2::3], strict=True):
        blocks = [_block(name) for name in re.findall(r"(\w+) as \1", imports) if name in megatron_packed_sft._HOMES]
        if task == "Errors":
            blocks = ["::: megatron_packed_sft.errors"]
        page = task.lower().replace(" ", "_")
        opening = introduction[0].upper() + introduction[1:]
        pages[f"api/{page}.md"] = "\n\n".join([f"# API: {task.lower()}", opening, *blocks]) + "\n"
    return pages


def root_pages() -> dict[str, str]:
    """Return the pages that are files of the root, with links as seen from docs/."""
    pages = {}
    for page, file in ROOT_PAGES.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        pages[page] = text.replace("](docs/", "](").replace("](CONTRIBUTING.md", "](contributing.md")
    return pages


def _block(name: str) -> str:
    return f"::: megatron_packed_sft.{megatron_packed_sft._HOMES[name]}.{name}"
