"""S3's tag of an object that was uploaded in parts: the MD5 of the parts' MD5s, and how many there were.

With it, a large object is compared with its file without reading it back. The size of the parts is not told, so the
usual ones are tried: a tag that fits proves the content, one that does not fit proves nothing.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

_MIB = 1 << 20
_BLOCK = _MIB
# s3fs 50 MiB, boto3 and the AWS command line 8 MiB, then what other clients and settings take.
_PART_SIZES = tuple(size * _MIB for size in (50, 8, 5, 10, 16, 32, 64, 100, 128, 512))
_TAG = re.compile(r"([0-9a-f]{32})-([1-9][0-9]{0,4})")


def is_tag_of_parts(local: Path, tag: str) -> bool:
    """Return whether a tag proves that an object has the content of a local file.

    Example:
        >>> is_tag_of_parts(Path("not even opened"), "0123")
        False
    """
    found = _TAG.fullmatch(tag)
    if found is None:
        return False
    size, num_parts = local.stat().st_size, int(found[2])
    sizes = [one for one in _PART_SIZES if -(-size // one) == num_parts]
    return any(_tag(local, one) == tag for one in sizes)


def _tag(local: Path, part_size: int) -> str:
    parts = b""
    with open(local, "rb", buffering=0) as file:
        while True:
            digest, missing = hashlib.md5(usedforsecurity=False), part_size
            while missing and (block := file.read(min(_BLOCK, missing))):
                digest.update(block)
                missing -= len(block)
            if missing == part_size:
                break
            parts += digest.digest()
            if missing:
                break
    return f"{hashlib.md5(parts, usedforsecurity=False).hexdigest()}-{len(parts) // 16}"
