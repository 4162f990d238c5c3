"""Every code block of the documentation runs as pasted, or is marked as an excerpt."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import CODE, PAGES, ROOT, blocks, runnable

LANGUAGES = {*CODE, "", "text"}
# Pages with a test of their own, which also looks at what their blocks show.
RUN_ELSEWHERE = {
    "look_at_your_data": "tests/inspect/test_look_at_your_data.py",
    "huggingface": "tests/data/test_causal_lm_collator.py",
}
RUN_HERE = [page for page in PAGES if runnable(page) and page.stem not in RUN_ELSEWHERE]
pages = pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.stem)


@pages
def test_the_blocks_of_a_page_run_from_top_to_bottom(page: Path, workshop: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(workshop, folder, symlinks=True)
    if page.stem == "quickstart":  # it makes everything itself
        shutil.rmtree(folder)
        folder.mkdir()
    script = "\n".join(steps(page))
    (tmp_path / "page.sh").write_text("set -euo pipefail\n" + script)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", tmp_path / "page.sh"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}", pytrace=False)


def steps(page: Path) -> Iterator[str]:
    """The blocks as parts of a shell script that says where it is; Python blocks in a sequence share their names."""
    for language, group in itertools.groupby(runnable(page), key=lambda block: block.language):
        together = list(group)
        for block in together if language != "python" else together[:1]:
            where = f"{page.name}, line {block.line}"
            yield f"echo '{where}' >&2"
            if language == "bash":
                yield block.text
            elif language == "python":
                yield here_document("python -", "\n".join(one.text for one in together))
            else:
                assert language == "yaml", f"{where}: mark this {language} block as an excerpt"
                assert block.file_name, f"{where}: say in a first comment which file this is, or mark it as an excerpt"
                yield here_document(f"cat > {block.file_name}", block.text)


def here_document(command: str, text: str) -> str:
    return f"{command} <<'END OF BLOCK'\n{text}\nEND OF BLOCK"


@pytest.mark.parametrize("name", RUN_ELSEWHERE)
def test_a_page_that_runs_elsewhere_is_read_there(name: str) -> None:
    assert f"{name}.md" in (ROOT / RUN_ELSEWHERE[name]).read_text()


def test_every_block_is_of_a_known_language() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.language in LANGUAGES, f"{page.name}, line {block.line}: {block.language}"


def test_most_blocks_run() -> None:
    every = [block for page in PAGES for block in blocks(page) if block.language in CODE]
    assert sum(not block.is_excerpt for block in every) > len(every) / 2
