"""The one wording for truncated files: what every reader says of a file that is too short or ends early."""

from __future__ import annotations

from megatron_packed_sft.errors import ShardError, ShardFileError

_TRUNCATED = "it was truncated or changed: copy it again"


def truncated_file(
    path: object, size: int, expected: int, source: str, kind: type[ShardError] = ShardFileError
) -> ShardError:
    """Return the error for a file that does not have the size it must have: the one wording for truncated files.

    Args:
        path: the file.
        size: how many bytes it has.
        expected: how many it must have.
        source: what says so.
        kind: the class of the error.

    Example:
        >>> print(truncated_file("ids.npy", 150, 168, "in its header"))
        ids.npy has 150 bytes instead of the 168 in its header; it was truncated or changed: copy it again
    """
    return kind(f"{path} {wrong_size(size, expected, source)}; {_TRUNCATED}")


def ends_early(path: object, place: str, kind: type[ShardError] = ShardFileError) -> ShardError:
    """Return the error for a file that ends in the middle of something; `place` says of what.

    Example:
        >>> print(ends_early("ids.npy", "inside its header"))
        ids.npy ends inside its header; it was truncated or changed: copy it again
    """
    return kind(f"{path} ends {place}; {_TRUNCATED}")


def wrong_size(size: int, expected: int, source: str) -> str:
    """Return what is wrong with a file of another size, for the findings of `validate`."""
    return f"has {size:,} bytes instead of the {expected:,} {source}"
