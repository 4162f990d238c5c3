"""`packed-sft report`: write the page of a dataset or a run as one HTML file that needs nothing else.

The numbers are JSON in a script element that browsers do not run; `<` is escaped in it, so that no text of a chat can
end the element. Scripts insert text as text only. A content security policy names the hashes of the scripts and styles
of the page: browsers run no others, and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.inspect.opened_data import open_data
from megatron_packed_sft.inspect.report.dataset_page import TOKENS_IN_PAGE, dataset_page
from megatron_packed_sft.inspect.report.run_page import is_run, run_page
from megatron_packed_sft.remote.filesystem import base_name, refuse_read_only
from megatron_packed_sft.remote.objects import object_info, read_range
from megatron_packed_sft.remote.uploads import uploading
from megatron_packed_sft.support.atomic import os_errors, replace_file
from megatron_packed_sft.support.paths import is_url, local_path, redacted

GENERATOR: Final = "packed-sft report"
SUFFIX = ".report.html"
_HEAD_BYTES = 2048  # they contain the generator's name
LARGEST_PAGE = 5_000_000  # bytes; larger pages are slow on a phone and hard to send
_STYLES = ("vendor/uPlot.min.css", "static/report.css")
_SCRIPTS = {
    "dataset": ("page.js", "charts.js", "bins.js", "dataset.js"),
    "run": ("page.js", "charts.js", "run.js"),
}
_CHART_LIBRARY = "vendor/uPlot.iife.min.js"


@dataclass(frozen=True)
class WrittenReport:
    """A written page.

    Args:
        path: where it is.
        kind: dataset or run.
        num_bytes: its size.
        num_bins_shown, num_bins: bins in the page and in the data; None for runs.
        num_suspicious: suspicious sequences by kind; None for runs.
        notes: sentences for the user.
    """

    path: str
    kind: str
    num_bytes: int
    num_bins_shown: int | None = None
    num_bins: int | None = None
    num_suspicious: dict[str, int] | None = None
    notes: tuple[str, ...] = ()


def write_report(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    tokenizer: str | None = None,
    work_dir: str | os.PathLike[str] | None = None,
    global_batch: int | None = None,
    ranks: int | None = None,
    bins: Sequence[int] = (),
) -> WrittenReport:
    """Write the page of a dataset or of a run.

    Args:
        source: packed data of any storage or its URL, or the output directory of a training run.
        output: the page or its URL; by default NAME.report.html in the current directory. An earlier page is replaced.
        tokenizer: the path of the data's tokenizer; by default it is found where the data was prepared.
        work_dir: the work directory of prepare, if it is not beside the data.
        global_batch: bins per step, for the balance over ranks.
        ranks: data-parallel ranks.
        bins: bins to include.
    """
    location = source if is_url(source) else local_path(source)
    if output is None:
        name = base_name(os.fspath(location)) if is_url(location) else Path(location).resolve().name
        target: Path | str = Path.cwd() / f"{name}{SUFFIX}"
    else:
        target = os.fspath(output) if is_url(output) else local_path(output, "output")
    refuse_other_file(target)
    if isinstance(location, Path) and is_run(location):
        page = run_page(location)
        return _write(page, assemble(page), target)
    data = open_data(location, work_dir=work_dir)
    tokens_in_page = TOKENS_IN_PAGE
    while True:
        page = dataset_page(
            data,
            tokenizer=tokenizer,
            global_batch=global_batch,
            ranks=ranks,
            bins=bins,
            tokens_in_page=tokens_in_page,
        )
        html = assemble(page)
        # Random ids and masks take more bytes than real ones.
        if len(html) <= LARGEST_PAGE or page["num_bins_shown"] <= max(1, len(bins)):
            return _write(page, html, target)
        tokens_in_page //= 2


def _write(page: dict[str, Any], html: bytes, target: Path | str) -> WrittenReport:
    if isinstance(target, str):
        with uploading(target, overwrite=True) as local:
            local.write_bytes(html)
    else:
        with os_errors("create a directory for", target):
            target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, html)
    place = redacted(str(target))
    if page["kind"] == "run":
        return WrittenReport(place, "run", len(html))
    suspicious: dict[str, int] = {}
    for split in page["splits"].values():
        for one in split["suspicions"]:
            suspicious[one["kind"]] = suspicious.get(one["kind"], 0) + one["num_found"]
    return WrittenReport(
        place,
        "dataset",
        len(html),
        page["num_bins_shown"],
        sum(split["shown"]["of"] for split in page["splits"].values()),
        suspicious,
        tuple(filter(None, [page["tokenizer_note"]])),
    )


def refuse_other_file(path: Path | str) -> None:
    """Raise an error if something other than an earlier page is at the target."""
    mark = f'content="{GENERATOR}"'.encode()
    if isinstance(path, str):
        refuse_read_only(path)
        if object_info(path) is None or mark in read_range(path, 0, _HEAD_BYTES):
            return
    elif not path.exists():
        return
    elif path.is_file():
        with os_errors("read", path), open(path, "rb") as file:
            if mark in file.read(_HEAD_BYTES):
                return
    raise InvalidInputError(f"{path} exists and is not a page of `packed-sft report`; choose another file with -o")


def assemble(page: Mapping[str, Any]) -> bytes:
    """Return the HTML of a page; equal values give equal bytes.

    Args:
        page: what `dataset_page` or `run_page` returned.
    """
    styles = [_static(name) for name in _STYLES]
    scripts = [_static(name) for name in (_CHART_LIBRARY, *(f"static/{name}" for name in _SCRIPTS[page["kind"]]))]
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {' '.join(map(_hash, styles))}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    parts = {
        "generator": GENERATOR,
        "policy": policy,
        "title": _escaped(f"{page['title']} | packed-sft report"),
        "styles": "\n".join(f"<style>{text}</style>" for text in styles),
        "data": embedded_json(page),
        "scripts": "\n".join(f"<script>{text}</script>" for text in scripts),
    }
    html = _static("static/page.html")
    for name, text in parts.items():
        # Each part is inserted once: a text that contains the mark of another part stays as it is.
        before, after = html.split("{{" + name + "}}")
        parts[name] = before + text
        html = after
    return ("".join(parts.values()) + html).encode()


def embedded_json(value: Any) -> str:
    r"""Return JSON that is safe inside a script element.

    Example:
        >>> embedded_json({"text": "</script><!--"})
        '{"text":"\\u003c/script>\\u003c!--"}'
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _static(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
