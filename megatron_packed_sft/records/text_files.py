"""Plain text files as documents: a whole file, each line, or each paragraph is one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.files import expand_path, size_and_checksum
from megatron_packed_sft.records.streams import read_blocks
from megatron_packed_sft.remote.filesystem import base_name
from megatron_packed_sft.support.paths import is_url

Documents = Literal["file", "line", "paragraph"]
LARGEST_DOCUMENT = 64 << 20
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_BYTE_ORDER_MARK = "\ufeff"


class TextFile(NamedTuple):
    """One text file.

    Args:
        path: absolute local path, or URL.
        size: in bytes, as stored.
        checksum: xxh3_128 of the stored bytes, in hex.
    """

    path: str
    size: int
    checksum: str

    @property
    def name(self) -> str:
        """Its last name, without folders and without the query of a URL."""
        return base_name(self.path) if is_url(self.path) else os.path.basename(self.path)


def find_text_files(paths: Sequence[str | os.PathLike[str]]) -> list[TextFile]:
    """Find text files by path, glob or URL, in the order given; matches of a glob are sorted.

    Example:
        >>> import tempfile, pathlib; home = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (home / "a.md").write_text("One.")
        >>> [file.size for file in find_text_files([f"{home}/*.md"])]
        [4]
    """
    found = []
    for path in dict.fromkeys(name for pattern in paths for name in expand_path(os.fspath(pattern))):
        if os.path.isdir(path):
            raise InvalidInputError(f"{path} is a folder; give its files, such as {path}/**/*.md")
        found.append(TextFile(path, *size_and_checksum([path])))
    return found


def read_text_file(path: str, documents: Documents = "file") -> Iterator[str]:
    r"""Yield the documents of a text file in UTF-8; blank ones are left out.

    Args:
        path: a local file or a URL; .gz and .zst are decompressed.
        documents: `file` for all of it as one document, `line` for each line, `paragraph` for what blank lines enclose.

    Example:
        >>> import tempfile, pathlib; path = pathlib.Path(tempfile.mkdtemp()) / "a.txt"
        >>> _ = path.write_text("One\ntwo.\n\nThree.\n")
        >>> [list(read_text_file(str(path), how)) for how in ("file", "line", "paragraph")]
        [['One\ntwo.\n\nThree.\n'], ['One', 'two.', 'Three.'], ['One\ntwo.', 'Three.']]
    """
    if documents == "file":
        text = _decoded(b"".join(_blocks_within(path)), path).removeprefix(_BYTE_ORDER_MARK)
        if text.strip():
            yield text
        return
    paragraph: list[str] = []
    for number, line in enumerate(_lines(path)):
        text = _decoded(line, path).rstrip("\r\n")
        if number == 0:
            text = text.removeprefix(_BYTE_ORDER_MARK)
        if documents == "line":
            if text.strip():
                yield text
        elif text.strip():
            paragraph.append(text)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []
    if paragraph:
        yield "\n".join(paragraph)


def _blocks(path: str) -> Iterator[bytes]:
    return read_blocks(path, _COMPRESSIONS.get(os.path.splitext(path.lower())[1]))


def _blocks_within(path: str) -> Iterator[bytes]:
    """Yield the blocks of a file that is not too large for one document."""
    size = 0
    for block in _blocks(path):
        size += len(block)
        if size > LARGEST_DOCUMENT:
            raise InvalidInputError(
                f"{path} has more than {LARGEST_DOCUMENT:,} bytes, too many for one document; read it with documents: "
                "line or documents: paragraph"
            )
        yield block


def _lines(path: str) -> Iterator[bytes]:
    rest = b""
    for block in _blocks(path):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
        if len(rest) > LARGEST_DOCUMENT:
            raise InvalidInputError(f"{path} has a line of more than {LARGEST_DOCUMENT:,} bytes; break it into lines")
    if rest:
        yield rest


def _decoded(data: bytes, path: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"{path} is not UTF-8 (0x{data[error.start]:02X}); write the file in UTF-8, or leave it out"
        ) from None
