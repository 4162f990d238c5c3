"""The text of a record that was dropped, read from its input file while that is still there."""

from __future__ import annotations

import re
from itertools import islice

from megatron_packed_sft.inspect.tokens_of_bin import visible

_WHERE = re.compile(r"(?P<file>[^\0]+?\.jsonl), line (?P<line>\d+)\b")
_LAST_LINE = 1_000_000  # files are read from their beginning
_LONGEST = 600


def record_text(where: str) -> str | None:
    r"""Return the beginning of a record that a message such as `chats.jsonl, line 3: ...` names.

    Only lines of plain JSONL files are looked up; None for anything else, and for files that are gone.

    Example:
        >>> import pathlib, tempfile; path = pathlib.Path(tempfile.mkdtemp()) / "chats.jsonl"
        >>> _ = path.write_text('{"a": 1}\n{"b": 2}\n')
        >>> record_text(f"{path}, line 2: it has no messages")
        '{"b": 2}'
    """
    found = _WHERE.match(where)
    if found is None or int(found["line"]) > _LAST_LINE:
        return None
    try:
        with open(found["file"], "rb") as file:
            line = next(islice(file, int(found["line"]) - 1, None), b"")
    except OSError:
        return None
    text = line.decode("utf-8", errors="replace").strip()
    return visible(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...") or None
