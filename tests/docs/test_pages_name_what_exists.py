"""README and docs: names that exist, imports that a user may rely on, command lines that are accepted."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import shlex
from pathlib import Path

import pytest

import megatron_packed_sft
from megatron_packed_sft.cli.main import PROGRAM, command_line
from megatron_packed_sft.cli.main import main as packed_sft
from megatron_packed_sft.errors import MissingDependencyError
from tests.docs.pages import PAGES, ROOT, blocks

# The modules, beside the package itself, that documents may import from: those of the table in docs/api.md.
DOCUMENTED = set(re.findall(r"`(megatron_packed_sft\.[\w.]+)`", (ROOT / "docs/api.md").read_text()))
SHELL_WORDS = {">", "||", "&&", "|"}
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def texts(page: Path, *languages: str) -> list[str]:
    """Of excerpts, too."""
    return [block.text for block in blocks(page) if block.language in languages]


def commands(page: Path) -> list[list[str]]:
    """Every `packed-sft` command of a page: of its shell blocks, joined over backslashes and without comments."""
    lines = "\n".join(texts(page, "bash")).replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        words = list(itertools.takewhile(lambda word: word not in SHELL_WORDS, shlex.split(line, comments=True)))
        if words[:1] == ["packed-sft"]:
            found.append(words[1:])
        elif "-m" in words and "megatron_packed_sft" in words:  # of python or torchrun
            found.append(words[words.index("megatron_packed_sft") + 1 :])
        elif "recipes/sft.py" in words:
            found.append(["train", *words[words.index("recipes/sft.py") + 1 :]])
    return found


def exists(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except MissingDependencyError:  # a name that is made when it is asked for, such as Megatron-Bridge's provider
        return True


@pages
def test_python_blocks_import_public_names_only(page: Path) -> None:
    for block in texts(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_packed_sft"):
                assert node.module is not None
                for alias in node.names:
                    if node.module == "megatron_packed_sft":
                        assert alias.name in megatron_packed_sft.__all__, f"{page.name} imports {alias.name}"
                    else:
                        assert node.module in DOCUMENTED, f"{page.name} imports from {node.module}"
                        assert exists(node.module, alias.name), f"{page.name} imports {node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("megatron_packed_sft.") for alias in node.names), page.name


@pages
def test_dotted_names_in_the_text_exist(page: Path) -> None:
    for name in set(re.findall(r"\bmegatron_packed_sft(?:\.\w+)+", page.read_text())):
        if name.endswith((".storages", ".strategies", ".schemas", ".families")):  # groups of entry points
            continue
        module, _, attribute = name.rpartition(".")
        if module == "megatron_packed_sft" and attribute in megatron_packed_sft.__all__:
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert exists(module, attribute), f"{page.name} names {name}"


@pages
def test_command_lines_are_accepted(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(page):
        if words[0] in ("prepare", "train"):
            given = [word for word in words if not word.startswith(("--config-name", "--config-dir"))]
            assert packed_sft([*given, *([] if "--help" in given else ["--cfg", "job"])]) == 0, (
                page.name,
                words,
                capsys.readouterr().err,
            )
        elif words[0].startswith("-"):
            context = command_line.make_context(PROGRAM, ["env"])
            assert words[0] in {name for one in command_line.get_params(context) for name in one.opts}
        elif "--help" in words:
            assert packed_sft(words) == 0
        else:
            with command_line.make_context(PROGRAM, list(words)) as context:
                name, verb, rest = command_line.resolve_command(context, [*words])
                assert verb is not None
                verb.make_context(name, rest, parent=context)  # refuses wrong options


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_there_are_commands_to_check() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 10
