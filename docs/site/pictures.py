"""The pictures of the documentation, made by our own commands: `python -m docs.site.pictures`, a part of `make docs`.

preview.svg    what `packed-sft preview` shows on a terminal
report.png     the page of `packed-sft report`, as Chromium shows it; left as it is where there is no Chromium
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).parents[1] / "pictures"
COLUMNS = 100
WINDOW = {"width": 1280, "height": 900}
MILLISECONDS_TO_SETTLE = 1500
BIN = "#bin/train/60"  # the page opens at its browser of bins
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Make all pictures from sample chats."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        home = str(Path(folder, "first_look"))  # part of what the pictures show
        os.mkdir(home)
        run(home, "sample-data", "chats", "--rows", "400", "--tokenizer", "tokenizer.model")
        settings = ("tokenizer.path=tokenizer.model", "template=chatml")
        preview = ("preview", "chats/chats.jsonl", *settings, "--row", "2")
        shown = on_terminal(home, *preview).replace(f"{home}/", "")
        (PICTURES / "preview.svg").write_text(drawn(shown, f"packed-sft {' '.join(preview)}"))
        run(home, "prepare", "input=chats/*", "output=my_dataset", *settings, "packing.pack_size=2048")
        run(home, "report", "my_dataset", "-o", "report.html")
        photograph(Path(home, "report.html"), PICTURES / "report.png")


def run(home: str, *words: str) -> None:
    """Run a command in a directory."""
    subprocess.run(
        [sys.executable, "-m", "megatron_packed_sft", *words], cwd=home, check=True, stdout=subprocess.DEVNULL
    )


def on_terminal(home: str, *words: str) -> str:
    """Return what a command writes to a terminal, colours included."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": str(COLUMNS)}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "megatron_packed_sft", *words]
    with subprocess.Popen(command, cwd=home, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        while some := _read(ours):
            written += some
    os.close(ours)
    if process.returncode:
        sys.exit(written.decode())
    return written.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other side has closed
        return b""


def drawn(text: str, title: str) -> str:
    """Return coloured text as an SVG that loads nothing."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(text.replace("\r\n", "\n").rstrip()))
    picture = console.export_svg(title=title, unique_id="preview")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


def photograph(page: Path, picture: Path) -> None:
    """Take a picture of a page at its browser of bins, if there is a browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"no Chromium: {picture} is left as it is", file=sys.stderr)
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        tab = chromium.new_page(viewport=WINDOW, reduced_motion="reduce")
        tab.goto(page.as_uri() + BIN)
        tab.wait_for_timeout(MILLISECONDS_TO_SETTLE)
        tab.screenshot(path=picture)
        chromium.close()


if __name__ == "__main__":
    main()
