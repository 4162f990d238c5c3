"""Suspicious sequences: six checks of a dataset before it is trained on, each with examples to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.encode.tokenizers.interface import control_pattern
from megatron_packed_sft.inspect.report.read_bins import Int64, TokensRead
from megatron_packed_sft.inspect.tokens_of_bin import TokenDecoder, escape_invisible
from megatron_packed_sft.prepare.audit import LATE_LENGTH, LATE_SHARE
from megatron_packed_sft.support.wording import plural

_MOST_EXAMPLES = 12
_FEW_TRAINED, _FEW_SHARE, _FEW_LENGTH = 2, 0.01, 64
_SHORTEST_REPEATED = 16
_RARE_SHARE, _MOST_ODD, _ENOUGH_PLACES = 0.0005, 0.02, 50
_MOST_DECODED = 3_000_000  # tokens that are searched for texts like control tokens


class Example(NamedTuple):
    """One suspicious sequence."""

    bin: int
    sequence: int
    position: int
    note: str


@dataclass
class Suspicion:
    """One check and what it found.

    Args:
        kind: its name in links.
        title: its heading.
        meaning: why it matters and what to do.
        num_found: how many sequences it found.
        examples: some of them, from all over the data.
        unchecked: why it could not be done, if so.
    """

    kind: str
    title: str
    meaning: str
    num_found: int = 0
    examples: list[Example] = field(default_factory=list)
    unchecked: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values for the page."""
        return {**vars(self), "examples": [one._asdict() for one in self.examples]}


def find_suspicions(
    read: TokensRead, decoder: TokenDecoder, pad_id: int | None, *, are_windows: bool = False
) -> list[Suspicion]:
    """Return the result of every check, also of those that found nothing.

    Args:
        read: the tokens to check.
        decoder: knows control tokens and texts, if there is a tokenizer.
        pad_id: the id that pads sequences, where they are padded one by one.
        are_windows: whether sequences are windows of a token stream, which end anywhere.
    """
    return [
        _little_trained(read),
        _late(read),
        _repeated(read),
        _control_text(read, decoder),
        _misplaced_control(read, decoder),
        _truncated(read, decoder, pad_id, are_windows),
    ]


def _examples(
    read: TokensRead, sequences: Int64, position: Callable[[int], int], note: Callable[[int], str]
) -> list[Example]:
    """Return an even spread of the sequences found."""
    places = np.unique(np.linspace(0, len(sequences) - 1, min(len(sequences), _MOST_EXAMPLES)).astype(np.int64))
    return [
        Example(int(read.bin_of[one]), int(read.sequence_of[one]), position(one), note(one))
        for one in sequences[places].tolist()
    ]


def _little_trained(read: TokensRead) -> Suspicion:
    few = (read.num_trained <= _FEW_TRAINED) | (
        (read.num_trained < _FEW_SHARE * read.lengths) & (read.lengths >= _FEW_LENGTH)
    )
    found = np.flatnonzero(few)
    return Suspicion(
        "little_trained",
        "Almost nothing is trained",
        f"At most {_FEW_TRAINED} tokens, or less than {_FEW_SHARE:.0%} of the sequence, are trained. The usual reasons "
        "are an empty answer, a role that is not trained, or a cut in the wrong place.",
        len(found),
        _examples(
            read,
            found,
            lambda one: int(read.first_trained[one]) if read.num_trained[one] else 0,
            lambda one: f"{int(read.num_trained[one]):,} of {plural(int(read.lengths[one]), 'token')} trained",
        ),
    )


def _late(read: TokensRead) -> Suspicion:
    found = np.flatnonzero(read.is_late)
    return Suspicion(
        "late",
        "A very long untrained prefix",
        f"Only the last {1 - LATE_SHARE:.0%} of a sequence of {LATE_LENGTH} tokens or more is trained. This is normal "
        "for questions about long documents; otherwise check which roles are trained.",
        len(found),
        _examples(
            read,
            found,
            lambda one: int(read.first_trained[one]),
            lambda one: f"the first trained token is {int(read.first_trained[one]):,} of {int(read.lengths[one]):,}",
        ),
    )


def _hashes(read: TokensRead) -> npt.NDArray[np.uint64]:
    """Return a hash of the ids of each sequence."""
    position = np.arange(len(read.ids), dtype=np.uint64) - np.repeat(read.starts, read.lengths).astype(np.uint64)
    mixed = _mix(read.ids.astype(np.uint64) + np.uint64(1)) * (_mix(position + np.uint64(1)) | np.uint64(1))
    return np.add.reduceat(mixed, read.starts)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _repeated(read: TokensRead) -> Suspicion:
    _, first, number = np.unique(_hashes(read), return_index=True, return_inverse=True)
    earlier = first[number]  # the first sequence with the same hash
    is_copy = (earlier != np.arange(len(earlier))) & (read.lengths >= _SHORTEST_REPEATED)
    found = np.array([one for one in np.flatnonzero(is_copy).tolist() if _same(read, one, int(earlier[one]))], np.int64)

    def note(one: int) -> str:
        other = int(earlier[one])
        where = f"bin {int(read.bin_of[other]):,}, sequence {int(read.sequence_of[other]) + 1}"
        return f"equals {where}; {plural(int(read.lengths[one]), 'token')}"

    return Suspicion(
        "repeated",
        "Repeated sequences",
        f"A copy, id by id, of an earlier sequence of {_SHORTEST_REPEATED} tokens or more. This is right if a source "
        "has a weight above 1; otherwise prepare with deduplicate=true.",
        len(found),
        _examples(read, found, lambda one: 0, note),
    )


def _same(read: TokensRead, one: int, other: int) -> bool:
    own, others = (read.ids[read.starts[number] : read.ends[number]] for number in (one, other))
    return np.array_equal(own, others)


def _control_text(read: TokensRead, decoder: TokenDecoder) -> Suspicion:
    suspicion = Suspicion(
        "control_text",
        "Text that spells a control token",
        "Ordinary tokens that read like a control token, for example where a user writes about chat templates. They "
        "were encoded as text, which is safe; make sure that inference does the same.",
    )
    if decoder.tokenizer is None:
        suspicion.unchecked = "needs the tokenizer"
        return suspicion
    names = [name for name in decoder.tokenizer.control_tokens if len(name) > 2]
    pattern = control_pattern(names)
    first_characters = {name[0] for name in names}
    used = np.unique(read.ids)
    opens = [one for one in used.tolist() if first_characters & {*decoder.text(one)} and one not in decoder.control_ids]
    candidates = np.unique(read.sequence_at(np.flatnonzero(np.isin(read.ids, opens))))
    within = np.cumsum(read.lengths[candidates]) <= _MOST_DECODED
    found = {}
    for one in candidates[within].tolist():
        ids = read.ids[read.starts[one] : read.ends[one]].tolist()
        texts = ["\0" if number in decoder.control_ids else decoder.text(number) for number in ids]
        if match := pattern.search("".join(texts)):
            ends = np.cumsum([len(text) for text in texts])
            found[one] = (int(np.searchsorted(ends, match.start(), side="right")), match[0])
    suspicion.num_found = len(found)
    suspicion.examples = _examples(
        read,
        np.array(list(found), np.int64),
        lambda one: found[one][0],
        lambda one: f"{escape_invisible(found[one][1])} as ordinary text",
    )
    return suspicion


def _misplaced_control(read: TokensRead, decoder: TokenDecoder) -> Suspicion:
    suspicion = Suspicion(
        "misplaced_control",
        "Control tokens in unusual places",
        "A real control token inside given text, followed by a token that never follows it elsewhere. The text of a "
        "message was probably encoded as control tokens, so the model sees a turn that is not in the chat.",
    )
    if decoder.tokenizer is None:
        suspicion.unchecked = "needs the tokenizer"
        return suspicion
    odd: dict[int, int] = {}
    for place in _oddly_placed(read, decoder.control_ids):
        odd.setdefault(int(read.sequence_at(np.array([place]))[0]), place)
    suspicion.num_found = len(odd)
    suspicion.examples = _examples(
        read,
        np.array(sorted(odd), np.int64),
        lambda one: int(odd[one] - read.starts[one]),
        lambda one: f"{escape_invisible(decoder.text(int(read.ids[odd[one]])))} inside given text",
    )
    return suspicion


def _oddly_placed(read: TokensRead, control_ids: Iterable[int]) -> Iterator[int]:
    """Yield the untrained control tokens whose next token never follows the same control token elsewhere.

    A rare role would look like that, too. So the token before must also be rare, unless it tells nothing: it does for a
    start of turn, which follows an end of turn, but not for an end of turn, which follows any text.
    """
    places = np.flatnonzero(np.isin(read.ids, list(control_ids)))
    is_first = np.zeros(len(read.ids), np.bool_)
    is_first[read.starts] = True
    before = np.where(is_first[places], -1, read.ids[places - 1])
    after = np.where(read.is_last[places], -1, np.append(read.ids, -1)[places + 1])
    for one in np.unique(read.ids[places]).tolist():
        own = read.ids[places] == one
        odd_after, tells_after = _odd_ones(after[own])
        odd_before, tells_before = _odd_ones(before[own])
        if tells_after:
            odd = odd_after & (odd_before | (not tells_before)) & ~read.is_trained[places[own]]
            yield from places[own][odd].tolist()


def _odd_ones(neighbours: npt.NDArray[Any]) -> tuple[npt.NDArray[np.bool_], bool]:
    """Return which neighbours are rare, and whether that tells anything: it does if most of them are common."""
    kinds, number, counts = np.unique(neighbours, return_inverse=True, return_counts=True)
    odd = (counts <= max(2, _RARE_SHARE * len(neighbours)))[number]
    return odd, len(neighbours) >= _ENOUGH_PLACES and bool(odd.mean() <= _MOST_ODD) and len(kinds) > 1


def ends_of_turns(read: TokensRead, decoder: TokenDecoder) -> frozenset[int]:
    """Return the ids that end trained stretches, whatever the template calls them; none if they end with any id."""
    following = np.append(read.is_trained[1:], False)
    last = read.is_trained & (~following | read.is_last)
    ids, counts = np.unique(read.ids[last], return_counts=True)
    shares = counts / max(1, counts.sum())
    ends = {int(one) for one, share in zip(ids.tolist(), shares.tolist(), strict=True) if share > 0.5}
    if decoder.tokenizer is not None:
        known = decoder.tokenizer.control_tokens
        usual = {int(one) for one, share in zip(ids.tolist(), shares.tolist(), strict=True) if share >= 0.01}
        ends |= usual & decoder.control_ids
        ends |= {known[text] for text in decoder.tokenizer.stop_tokens if text in known}
        ends |= {decoder.tokenizer.eos_id} - {None}  # type: ignore[arg-type]
    return frozenset(ends)


def _truncated(read: TokensRead, decoder: TokenDecoder, pad_id: int | None, are_windows: bool) -> Suspicion:
    suspicion = Suspicion(
        "truncated",
        "Answers without an end",
        "The last token is trained but does not end a turn, so the model does not learn to stop there. The sequence "
        "was cut, or is a chunk of a longer one.",
    )
    if are_windows:
        suspicion.unchecked = "windows of a token stream end anywhere"
        return suspicion
    ends = ends_of_turns(read, decoder)
    if not ends:
        suspicion.unchecked = "trained stretches end with many different tokens, so the end of turn is unknown"
        return suspicion
    last = _last_places(read, pad_id)
    is_cut = read.is_trained[last] & ~np.isin(read.ids[last], list(ends))
    found = np.flatnonzero(is_cut)
    suspicion.num_found = len(found)
    suspicion.examples = _examples(
        read,
        found,
        lambda one: int(last[one] - read.starts[one]),
        lambda one: _ending(read, decoder, int(last[one]), int(read.starts[one])),
    )
    return suspicion


def _last_places(read: TokensRead, pad_id: int | None) -> Int64:
    """Return the place of each sequence's last token, without padding."""
    last = read.ends - 1
    is_padding = (read.ids == (-1 if pad_id is None else pad_id)) & ~read.is_trained
    while (step := is_padding[last] & (last > read.starts)).any():
        last = last - step
    return last


def _ending(read: TokensRead, decoder: TokenDecoder, last: int, start: int) -> str:
    shown: Sequence[str] = decoder.texts(read.ids[max(start, last - 7) : last + 1])
    return f"ends with “{escape_invisible(''.join(shown)).strip()}”"
