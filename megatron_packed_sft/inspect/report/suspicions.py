"""Sequences that deserve a look before they are trained on, each with its bin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packed_sft.encode.tokenizers.interface import control_pattern
from megatron_packed_sft.inspect.report.read_bins import Int64, TokensRead
from megatron_packed_sft.inspect.tokens_of_bin import TokenDecoder, visible
from megatron_packed_sft.support.wording import plural

_MOST_EXAMPLES = 12
_FEW_TRAINED, _FEW_SHARE, _FEW_LENGTH = 2, 0.01, 64
# As `prepare audit=true` has it: a short question before a short answer is nothing odd.
_LATE_SHARE, _LATE_LENGTH = 0.95, 512
_SHORTEST_REPEATED = 16
_RARE_SHARE, _MOST_ODD, _ENOUGH_PLACES = 0.0005, 0.02, 50
_MOST_DECODED = 3_000_000  # tokens, in which texts that look like control tokens are searched


class Example(NamedTuple):
    """One suspicious sequence."""

    bin: int
    sequence: int
    position: int
    note: str


@dataclass
class Suspicion:
    """One kind of suspicious thing.

    Args:
        kind: its name in links.
        title: what it is.
        meaning: why it matters and what to do, in a sentence or two.
        num_found: how many sequences have it.
        examples: some of them, from all over the data.
        unchecked: why it could not be looked for, if so.
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
    """Return everything that looks odd, by kind; kinds of which nothing was found are listed, too.

    Args:
        read: the tokens to look at.
        decoder: knows the control tokens and the texts, if there is a tokenizer.
        pad_id: fills sequences up where they are padded one by one.
        are_windows: whether sequences are windows of a stream, which end anywhere.
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
    """Return examples from all over the sequences that were found."""
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
        f"At most {_FEW_TRAINED} tokens, or less than {_FEW_SHARE:.0%} of the sequence. It costs as much as any other "
        "and teaches next to nothing: an empty answer, a role that is not trained, or a cut in the wrong place.",
        len(found),
        _examples(
            read,
            found,
            lambda one: int(read.first_trained[one]) if read.num_trained[one] else 0,
            lambda one: f"{int(read.num_trained[one]):,} of {plural(int(read.lengths[one]), 'token')} trained",
        ),
    )


def _late(read: TokensRead) -> Suspicion:
    late = (read.first_trained >= _LATE_SHARE * read.lengths) & (read.lengths >= _LATE_LENGTH) & (read.num_trained > 0)
    found = np.flatnonzero(late)
    return Suspicion(
        "late",
        "A very long untrained prefix",
        f"Nothing before the last {1 - _LATE_SHARE:.0%} of a sequence of {_LATE_LENGTH} tokens or more is trained. "
        "Usual for questions about long documents; otherwise check which roles are trained.",
        len(found),
        _examples(
            read,
            found,
            lambda one: int(read.first_trained[one]),
            lambda one: f"the first trained token is at {int(read.first_trained[one]):,} of {int(read.lengths[one]):,}",
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
        f"The same {_SHORTEST_REPEATED} tokens or more, id by id, as a sequence before it. Wanted where a source has a "
        "weight above 1; otherwise prepare with deduplicate=true.",
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
        "Ordinary tokens that read like a control token, such as a user who writes about chat templates. They were "
        "encoded as text, which is safe; make sure that inference does the same.",
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
        lambda one: f"{visible(found[one][1])} as ordinary text",
    )
    return suspicion


def _misplaced_control(read: TokensRead, decoder: TokenDecoder) -> Suspicion:
    suspicion = Suspicion(
        "misplaced_control",
        "Control tokens in unusual places",
        "A real control token among the given text, followed by a token that otherwise never follows it. Text of a "
        "message was probably encoded as control: the model sees a turn that nobody wrote.",
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
        lambda one: f"{visible(decoder.text(int(read.ids[odd[one]])))} inside given text",
    )
    return suspicion


def _oddly_placed(read: TokensRead, control_ids: Iterable[int]) -> Iterator[int]:
    """Yield the untrained control tokens with a neighbour behind them that others of their kind do not have.

    A role that is rare in the data is no sign of that, so the one before must be odd, too, where it tells anything: it
    does for the start of a turn, which follows the end of another, and not for the end of a turn, which follows text.
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
    """Return which neighbours are of a rare kind, and whether that tells anything: usually they are not."""
    kinds, number, counts = np.unique(neighbours, return_inverse=True, return_counts=True)
    odd = (counts <= max(2, _RARE_SHARE * len(neighbours)))[number]
    return odd, len(neighbours) >= _ENOUGH_PLACES and bool(odd.mean() <= _MOST_ODD) and len(kinds) > 1


def ends_of_turns(read: TokensRead, decoder: TokenDecoder) -> frozenset[int]:
    """Return the ids with which trained stretches end, whatever the template calls them; none if there are no such."""
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
        "The last token is trained and is not an end of turn, so the model learns to stop nowhere: a sequence that was "
        "cut, or a chunk of one that was split.",
    )
    if are_windows:
        suspicion.unchecked = "the windows of a token stream end anywhere"
        return suspicion
    ends = ends_of_turns(read, decoder)
    if not ends:
        suspicion.unchecked = "no token ends most of the trained stretches, so nobody can tell what an end of turn is"
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
    """Return the last token of each sequence, before the padding that makes its length a multiple."""
    last = read.ends - 1
    is_padding = (read.ids == (-1 if pad_id is None else pad_id)) & ~read.is_trained
    while (step := is_padding[last] & (last > read.starts)).any():
        last = last - step
    return last


def _ending(read: TokensRead, decoder: TokenDecoder, last: int, start: int) -> str:
    shown: Sequence[str] = decoder.texts(read.ids[max(start, last - 7) : last + 1])
    return f"ends with “{visible(''.join(shown)).strip()}”"
