"""JSON documents with a checksum of themselves: manifests and dataset.json have limits and one canonical rendering.

The rendering is canonical (sorted keys, one line per top-level key, no NaN), and `self_checksum` covers every other
byte of it, so that reading detects any flipped bit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from megatron_packed_sft.errors import ManifestError
from megatron_packed_sft.support.checksum import DIGEST_LENGTHS, checksum

MANIFEST = "manifest.json"  # of shards, parts of token stores and length stores; always written last
SELF_CHECKSUM = "self_checksum"
_MAX_BYTES = (1 << 62) - 1


def render(document: Mapping[str, Any]) -> bytes:
    """Return the canonical bytes of a document, with its own checksum added.

    Example:
        >>> print(render({"b": 1, "a": [2]}).decode())
        {
        "a": [2],
        "b": 1,
        "self_checksum": "8927b19134309f8d6a2e5595e466d2c6"
        }
        <BLANKLINE>
    """
    body = {key: value for key, value in document.items() if key != SELF_CHECKSUM}
    body[SELF_CHECKSUM] = checksum(_lines(body))
    return _lines(body)


def _lines(document: Mapping[str, Any]) -> bytes:
    rows = [
        f"{json.dumps(key)}: {json.dumps(document[key], sort_keys=True, allow_nan=False)}" for key in sorted(document)
    ]
    return ("{\n" + ",\n".join(rows) + "\n}\n").encode("ascii")


def parse(data: bytes, file: str) -> dict[str, Any]:
    """Parse a document; refuse anything that our writers cannot have written.

    Duplicate keys, NaN, damage anywhere in a document that carries its checksum, and anything that is not one JSON
    object are a ManifestError. The caller caps the size of `data` before reading it.

    Example:
        >>> parse(render({"a": 1}), "x.json")["a"]
        1
    """

    def refuse_constant(text: str) -> NoReturn:
        raise ManifestError(f"{file} contains {text}, which is not JSON; write it again")

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            double = next(name for name in names if names.count(name) > 1)
            raise ManifestError(f"{file} has the key {double!r} twice; write it again")
        return result

    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=refuse_constant)
    except ManifestError:
        raise
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{file} is not valid JSON ({error}); restore it from the original") from None
    if not isinstance(document, dict):
        raise ManifestError(f"{file} is not a JSON object; restore it from the original")
    if SELF_CHECKSUM in document and not _is_intact(document, data):
        raise ManifestError(f"{file} was damaged or edited: its self_checksum does not match; restore the original")
    return document


def _is_intact(document: Mapping[str, Any], data: bytes) -> bool:
    try:
        return render(document) == data
    except ValueError:  # a float like 1e999 parses as infinity, which cannot be rendered
        return False


class Fields:
    """Typed access to a parsed document; every error names the file and the key.

    Example:
        >>> Fields({"num_bins": 3}, "manifest.json").integer("num_bins", 1, 10)
        3
    """

    def __init__(self, document: Mapping[str, Any], file: str) -> None:
        self._document = document
        self._file = file

    def error(self, key: str, problem: str) -> ManifestError:
        """Return the error to raise for a key."""
        return ManifestError(f"{self._file}: {key} {problem}; restore the file from the original")

    def integer(self, key: str, low: int, high: int) -> int:
        """Return a required integer in low..high."""
        value = self.optional_integer(key, low, high)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        """Return an integer in low..high, or None when the key is absent or null."""
        value = self._document.get(key)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"is {_short(value)}, not an integer in {low}..{high}")
        return value

    def optional_number(self, key: str) -> float | None:
        """Return a float of at least 0, or None when the key is absent or null."""
        value = self._document.get(key)
        if value is not None and (type(value) is not float or not 0 <= value < math.inf):
            raise self.error(key, f"is {_short(value)}, not a decimal number of at least 0")
        return value

    def text(self, key: str) -> str:
        """Return a required string."""
        value = self.optional_text(key)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def optional_text(self, key: str) -> str | None:
        """Return a string without control characters, or None when the key is absent or null."""
        value = self._document.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value.isprintable():
            raise self.error(key, f"is {_short(value)}, not plain text")
        return value

    def optional_object(self, key: str) -> dict[str, Any] | None:
        """Return a JSON object, or None when the key is absent or null."""
        value = self._document.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, f"is {_short(value)}, not an object")
        return value


class FileRecord(NamedTuple):
    """Size and content checksum of one file."""

    bytes: int
    checksum: str


def parse_file_records(values: Fields, names: Sequence[str]) -> tuple[str, dict[str, FileRecord]]:
    """Return the checksum algorithm and the record of each file.

    The caller gives the names; a document that lists others is refused.

    Example:
        >>> record = {"bytes": 3, "checksum": "06b05ab6733a618578af5f94892f3950"}
        >>> fields = Fields({"checksum_algorithm": "xxh3_128", "files": {"a.npy": record}}, "manifest.json")
        >>> parse_file_records(fields, ["a.npy"])[1]["a.npy"].bytes
        3
    """
    algorithm = values.optional_text("checksum_algorithm")
    listed = values.optional_object("files")
    if algorithm is None or listed is None:
        raise values.error("files" if listed is None else "checksum_algorithm", "is missing")
    if algorithm not in DIGEST_LENGTHS:
        raise values.error("checksum_algorithm", f"is {algorithm!r}, not one of {', '.join(sorted(DIGEST_LENGTHS))}")
    if set(listed) != set(names):
        odd = sorted(set(listed) ^ set(names))[0]
        raise values.error("files", f"must list exactly {', '.join(names)}; {odd[:80]!r} is wrong")
    digest = re.compile(f"[0-9a-f]{{{DIGEST_LENGTHS[algorithm]}}}")
    records = {}
    for name in names:
        record = listed[name]
        if not isinstance(record, dict):
            raise values.error(f"files.{name}", "is not an object")
        size = Fields(record, f"files.{name}").integer("bytes", 0, _MAX_BYTES)
        text = record.get("checksum")
        if not isinstance(text, str) or not digest.fullmatch(text):
            raise ManifestError(f"files.{name}: checksum is not {digest.pattern} of {algorithm}; restore the manifest")
        records[name] = FileRecord(size, text)
    return algorithm, records


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
