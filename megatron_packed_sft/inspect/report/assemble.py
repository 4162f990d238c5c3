"""The page: static files and the numbers put into one HTML file that needs nothing else.

The numbers are JSON in a script element that browsers do not run; `<` is escaped in it, so no text of a chat can end
the element. Scripts put text into the page as text only, and a content security policy names the hashes of the scripts
and styles that may run: nothing else does, and nothing is loaded from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

GENERATOR: Final = "packed-sft report"
_STYLES = ("vendor/uPlot.min.css", "static/report.css")
_SCRIPTS = {
    "dataset": ("page.js", "charts.js", "bins.js", "dataset.js"),
    "run": ("page.js", "charts.js", "run.js"),
}
_CHART_LIBRARY = "vendor/uPlot.iife.min.js"


def assemble(page: Mapping[str, Any]) -> bytes:
    """Return the HTML of a page; the same values give the same bytes.

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
        # Split and joined, so that a text with another part's mark in it is left as it is.
        before, after = html.split("{{" + name + "}}")
        parts[name] = before + text
        html = after
    return ("".join(parts.values()) + html).encode()


def embedded_json(value: Any) -> str:
    r"""Return JSON that can stand inside a script element.

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
