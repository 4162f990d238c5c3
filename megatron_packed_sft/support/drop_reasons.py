"""Why a record or a part of it is not trained on: every reason, and how serious it is.

Summaries, receipts and plan files use the names, so a name never changes its meaning.
"""

from __future__ import annotations

import enum


class Severity(enum.Enum):
    """What a drop means for the run."""

    ERROR = "error"  # the record or the template is at fault: stops the run unless max_errors allows it
    ANNOUNCED = "announced"  # sound data is lost: counted, shown, and limited by max_drop_share
    HARMLESS = "harmless"  # exactly what the options asked for


class DropReason(enum.StrEnum):
    """Each reason with its severity.

    Example:
        >>> DropReason.named("duplicate").severity.value, str(DropReason.TOO_LONG)
        ('harmless', 'too_long')
    """

    severity: Severity

    def __new__(cls, name: str, severity: Severity) -> DropReason:
        """Make a reason that equals its name."""
        reason = str.__new__(cls, name)
        reason._value_ = name
        reason.severity = severity
        return reason

    @classmethod
    def named(cls, name: str) -> DropReason:
        """Return the reason with this name."""
        return next(reason for reason in cls if reason == name)

    # Records that cannot be read or encoded.
    BAD_RECORD = "bad_row", Severity.ERROR
    TEMPLATE_ERROR = "template_error", Severity.ERROR
    UNTRACEABLE_TEMPLATE = "untraceable_template", Severity.ERROR
    LOST_TEXT = "lost_text", Severity.ERROR  # the template leaves out what is to be trained
    UNESCAPABLE = "unescapable", Severity.ERROR
    INVALID_TEXT = "invalid_text", Severity.ERROR
    INVALID_IDS = "invalid_ids", Severity.ERROR
    # Sound records in which nothing is left to train on.
    EMPTY = "empty", Severity.ANNOUNCED
    NOTHING_TO_TRAIN = "nothing_to_train", Severity.ANNOUNCED
    ANSWER_CUT_AWAY = "answer_cut_away", Severity.ANNOUNCED
    # Sound records that the template does not show in full, with encode.on_lost=drop.
    LOST_TEXT_DROPPED = "lost_text_dropped", Severity.ANNOUNCED
    # Sound records that do not fit.
    TOO_LONG = "too_long", Severity.ANNOUNCED
    LONGER_THAN_PACK = "longer_than_pack", Severity.ANNOUNCED
    TRUNCATED = "truncated", Severity.ANNOUNCED  # tokens only: the sequences themselves are packed
    SHORT_TAIL = "short_tail", Severity.ANNOUNCED  # tokens only: last chunks of split sequences, below min_len
    # What the options ask for.
    DUPLICATE = "duplicate", Severity.HARMLESS
    NOT_TAKEN = "not_taken", Severity.HARMLESS  # the side of preference data that `take` leaves
    SAMPLED_OUT = "sampled_out", Severity.HARMLESS
    BELOW_MIN_LEN = "below_min_len", Severity.HARMLESS
    ABOVE_MAX_LEN = "above_max_len", Severity.HARMLESS
    HELD_BACK = "held_back", Severity.HARMLESS
