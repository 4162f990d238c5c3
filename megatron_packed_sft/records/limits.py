"""How large and how much expanded input may be: what exceeds a limit costs neither memory nor hours."""

from __future__ import annotations

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.records.record import RecordError
from megatron_packed_sft.support.wording import byte_count

MAX_RECORD_BYTES = 16_000_000
# Chats are compressed 3 to 20 times. What expands more than this is repetition, or was made to exhaust a machine.
LARGEST_EXPANSION = 200
ALWAYS_EXPANDED = 256 << 20  # bytes that any file may expand to
_MOST_TINY_RECORDS = 100_000  # that any table may have, however small it is


def too_many_bytes(limit: int) -> RecordError:
    """Return the error for a record that is too large to be parsed.

    Example:
        >>> print(too_many_bytes(16_000_000))
        the record has more than max_record_bytes=16,000,000 bytes; split it, remove it, or raise max_record_bytes
    """
    return RecordError(
        "", f"has more than max_record_bytes={limit:,} bytes; split it, remove it, or raise max_record_bytes"
    )


def refuse_expansion(path: str, num_stored: int, num_bytes: int) -> None:
    """Refuse a compressed file that expands far more than text does, before all of it is there.

    Args:
        path: for the error.
        num_stored: bytes read of the file.
        num_bytes: bytes that they became.
    """
    if num_bytes > ALWAYS_EXPANDED and num_bytes > LARGEST_EXPANSION * num_stored:
        raise InvalidInputError(
            f"{path} expands to more than {LARGEST_EXPANSION} times its size ({byte_count(num_bytes)} from "
            f"{byte_count(num_stored)} so far), which text does not; if that is right, give it as plain JSON lines"
        )


def refuse_tiny_records(path: str, num_stored: int, num_records: int) -> None:
    """Refuse a table that claims more records than it has bytes.

    Args:
        path: for the error.
        num_stored: bytes of the file.
        num_records: what its metadata say.
    """
    if num_records > _MOST_TINY_RECORDS and num_records > num_stored:
        raise InvalidInputError(
            f"{path} claims {num_records:,} records in {num_stored:,} bytes; get the file again, or if it is what you "
            "mean, write it as JSON lines"
        )
