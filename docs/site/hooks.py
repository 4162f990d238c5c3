"""What `mkdocs build` makes of this repository beside docs/: the API reference, and two files of the root as pages.

The API reference is generated from `megatron_packed_sft.__all__`, so that no public name can be missing from it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import megatron_packed_sft

ROOT = Path(__file__).parents[2]
# Page -> title, introduction, and the folders of the package whose public names it lists.
API_PAGES = {
    "datasets": ("API: datasets and loaders", "What gives samples and batches.", ("data", "caches")),
    "encode": ("API: records and encoding", "From files to token ids and train masks.", ("records", "encode")),
    "packing": ("API: packing and token stores", "From lengths to plans, from plans to shards.", ("packing", "tokens")),
    "storage": ("API: storage", "Shards, dataset directories, conversion and validation.", ("storage", "disk")),
    "errors": (
        "API: errors, plugins and Megatron",
        "The exception tree, and what touches Megatron.",
        ("errors", "megatron"),
    ),
}
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
    """Return one page per group of public names, each name from the module that defines it."""
    homes: dict[str, str] = megatron_packed_sft._HOMES
    pages = {}
    listed = set()
    for page, (title, introduction, folders) in API_PAGES.items():
        names = [name for name, home in homes.items() if home.split(".")[0] in folders]
        listed.update(names)
        if page == "errors":
            blocks = [
                "::: megatron_packed_sft.errors",
                *(_block(name, homes[name]) for name in names if homes[name] != "errors"),
            ]
        else:
            blocks = [_block(name, homes[name]) for name in sorted(names, key=str.lower)]
        pages[f"api/{page}.md"] = "\n\n".join([f"# {title}", introduction, *blocks]) + "\n"
    if missing := sorted(homes.keys() - listed):
        raise ValueError(f"no API page lists {', '.join(missing)}; add their folder to API_PAGES")
    return pages


def root_pages() -> dict[str, str]:
    """Return the pages that are files of the root, with links as seen from docs/."""
    pages = {}
    for page, file in ROOT_PAGES.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        pages[page] = text.replace("](docs/", "](").replace("](CONTRIBUTING.md", "](contributing.md")
    return pages


def _block(name: str, home: str) -> str:
    return f"::: megatron_packed_sft.{home}.{name}"
