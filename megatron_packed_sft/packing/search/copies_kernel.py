"""Keep copies of a sequence out of each other's bins, by exchanging items between bins.

Strategies see sizes only, and equal sizes that follow each other in the data tend to share a bin: most copies would.
An exchange with an item of the same size leaves every bin as full as it was. Where there is none, the nearest sizes are
tried that both bins have room for, then a bin with enough room left, and at last two items for one. Candidates near the
item in the data come first, so that bins that hold neighbours still do. No exchange brings other copies together.
"""

from __future__ import annotations

import numpy as np

from megatron_packed_sft.packing.search.bitset_kernel import Scalar
from megatron_packed_sft.packing.search.histogram_kernel import Int32, Int64
from megatron_packed_sft.support.compiled import inner_kernel, kernel

_PASSES = 3
# Candidates of the same size, and of each other size, that are looked at for one item.
_SAME_SIZE_TRIED = 512
_OTHER_SIZE_TRIED = 32


@kernel
def count_together(
    bin_of: Int32, sequence_of: Int32, group_offsets: Int64, members: Int32, seen: Int64, owner: Int32
) -> Scalar:
    """Count the sequences that share a bin with another copy; `seen` and `owner` are scratch, one entry per bin."""
    seen[:] = 0
    together = 0
    for group in range(group_offsets.size - 1):
        for k in range(group_offsets[group], group_offsets[group + 1]):
            item = members[k]
            number = bin_of[item]
            if seen[number] != group + 1:
                seen[number] = group + 1
                owner[number] = sequence_of[item]
            elif owner[number] != sequence_of[item]:
                together += 1
    return together


@inner_kernel
def _is_free(
    item: Scalar,
    number: Scalar,
    bin_of: Int32,
    group_of: Int32,
    sequence_of: Int32,
    group_offsets: Int64,
    members: Int32,
) -> bool:
    """Return whether `item` has no copy in bin `number`."""
    group = group_of[item]
    if group >= 0:
        for k in range(group_offsets[group], group_offsets[group + 1]):
            other = members[k]
            if bin_of[other] == number and sequence_of[other] != sequence_of[item]:
                return False
    return True


@inner_kernel
def _partner(
    item: Scalar,
    size: Scalar,
    tries: Scalar,
    bin_of: Int32,
    sizes: Int32,
    group_of: Int32,
    sequence_of: Int32,
    group_offsets: Int64,
    members: Int32,
    size_offsets: Int64,
    by_size: Int32,
    room: Int64,
    has_copy: Int64,
) -> Scalar:
    """Return an item of this size to exchange with, the nearest in the data first; -1 if none was found."""
    first, end = size_offsets[size], size_offsets[size + 1]
    number = bin_of[item]
    above = first + np.searchsorted(by_size[first:end], item)
    below = above - 1
    mark = group_of[item] + 1
    difference = size - sizes[item]  # what the item's own bin would take in addition
    for _ in range(tries):
        if below < first and above >= end:
            return -1
        if below < first or (above < end and by_size[above] - item <= item - by_size[below]):
            candidate = by_size[above]
            above += 1
        else:
            candidate = by_size[below]
            below -= 1
        there = bin_of[candidate]
        if there == number or has_copy[there] == mark or -difference > room[there]:
            continue
        if _is_free(candidate, number, bin_of, group_of, sequence_of, group_offsets, members):
            return candidate
    return -1


@inner_kernel
def _any_partner(
    item: Scalar,
    bin_of: Int32,
    sizes: Int32,
    group_of: Int32,
    sequence_of: Int32,
    group_offsets: Int64,
    members: Int32,
    size_offsets: Int64,
    by_size: Int32,
    room: Int64,
    has_copy: Int64,
    most_room: Scalar,
) -> Scalar:
    """Return an item to exchange with, of the same size or of the nearest that fits; -1 if none was found."""
    size = np.int64(sizes[item])
    largest = size_offsets.size - 2
    found = _partner(
        item,
        size,
        _SAME_SIZE_TRIED,
        bin_of,
        sizes,
        group_of,
        sequence_of,
        group_offsets,
        members,
        size_offsets,
        by_size,
        room,
        has_copy,
    )
    own_room = room[bin_of[item]]
    difference = 1
    while found < 0 and difference <= max(own_room, most_room):
        larger, smaller = size + difference, size - difference
        if difference <= own_room and larger <= largest and size_offsets[larger] < size_offsets[larger + 1]:
            found = _partner(
                item,
                larger,
                _OTHER_SIZE_TRIED,
                bin_of,
                sizes,
                group_of,
                sequence_of,
                group_offsets,
                members,
                size_offsets,
                by_size,
                room,
                has_copy,
            )
        if found < 0 and smaller > 0 and size_offsets[smaller] < size_offsets[smaller + 1]:
            found = _partner(
                item,
                smaller,
                _OTHER_SIZE_TRIED,
                bin_of,
                sizes,
                group_of,
                sequence_of,
                group_offsets,
                members,
                size_offsets,
                by_size,
                room,
                has_copy,
            )
        difference += 1
    return found


@inner_kernel
def _bin_with_room(
    size: Scalar, mark: Scalar, max_per_bin: Scalar, room: Int64, num_items: Int64, has_copy: Int64
) -> Scalar:
    """Return the first bin that has room for `size` and no copy of the marked group; -1 if there is none."""
    for number in range(room.size):
        if room[number] >= size and num_items[number] < max_per_bin and has_copy[number] != mark:
            return number
    return -1


@inner_kernel
def _partner_for_two(
    item: Scalar,
    bin_of: Int32,
    sizes: Int32,
    group_of: Int32,
    sequence_of: Int32,
    group_offsets: Int64,
    members: Int32,
    size_offsets: Int64,
    by_size: Int32,
    room: Int64,
    has_copy: Int64,
    num_items: Int64,
    max_per_bin: Scalar,
) -> tuple[Scalar, Scalar]:
    """Return an item of the same bin, and one of another bin that is as large as both together; -1 if there is none."""
    number = bin_of[item]
    mark = group_of[item] + 1
    for other in range(bin_of.size):
        if bin_of[other] != number or group_of[other] + 1 == mark:
            continue
        size = np.int64(sizes[item]) + sizes[other]
        for larger in range(size, min(size + room[number], size_offsets.size - 2) + 1):
            for k in range(
                size_offsets[larger], min(size_offsets[larger + 1], size_offsets[larger] + _OTHER_SIZE_TRIED)
            ):
                candidate = by_size[k]
                there = bin_of[candidate]
                if there == number or has_copy[there] == mark or num_items[there] >= max_per_bin:
                    continue
                if _is_free(candidate, number, bin_of, group_of, sequence_of, group_offsets, members) and _is_free(
                    other, there, bin_of, group_of, sequence_of, group_offsets, members
                ):
                    return np.int64(other), np.int64(candidate)
    return np.int64(-1), np.int64(-1)


@inner_kernel
def _two_partners(
    item: Scalar,
    bin_of: Int32,
    sizes: Int32,
    group_of: Int32,
    sequence_of: Int32,
    group_offsets: Int64,
    members: Int32,
    size_offsets: Int64,
    by_size: Int32,
    has_copy: Int64,
    num_items: Int64,
    max_per_bin: Scalar,
) -> tuple[Scalar, Scalar]:
    """Return two items of one other bin that are together as large as `item`; -1 if there are none."""
    number = bin_of[item]
    mark = group_of[item] + 1
    if num_items[number] >= max_per_bin:
        return np.int64(-1), np.int64(-1)
    for other in range(bin_of.size):
        there = bin_of[other]
        rest = np.int64(sizes[item]) - sizes[other]
        if rest <= 0 or there == number or has_copy[there] == mark:
            continue
        first = size_offsets[rest]
        for k in range(first, min(size_offsets[rest + 1], first + _OTHER_SIZE_TRIED)):
            second = by_size[k]
            if bin_of[second] != there or second == other:
                continue
            if group_of[second] >= 0 and group_of[second] == group_of[other]:
                continue
            if _is_free(second, number, bin_of, group_of, sequence_of, group_offsets, members) and _is_free(
                other, number, bin_of, group_of, sequence_of, group_offsets, members
            ):
                return np.int64(other), np.int64(second)
    return np.int64(-1), np.int64(-1)


@inner_kernel
def _move(item: Scalar, target: Scalar, bin_of: Int32, sizes: Int32, room: Int64, num_items: Int64) -> None:
    number = bin_of[item]
    bin_of[item] = target
    room[number] += sizes[item]
    room[target] -= sizes[item]
    num_items[number] -= 1
    num_items[target] += 1


@kernel
def part_copies(
    bin_of: Int32,
    sizes: Int32,
    group_of: Int32,
    sequence_of: Int32,
    group_offsets: Int64,
    members: Int32,
    size_offsets: Int64,
    by_size: Int32,
    room: Int64,
    num_items: Int64,
    max_per_bin: Scalar,
    most_failures: Scalar,
) -> Scalar:
    """Move copies out of each other's bins, in `bin_of`; return how many were moved.

    group_of names the group of copies that an item belongs to, or -1; members[group_offsets[g] : group_offsets[g + 1]]
    are a group's items; by_size lists the items of each size. After `most_failures` items that nothing could be done
    about it gives up: data that cannot be parted must not take forever.
    """
    has_copy = np.zeros(room.size, np.int64)
    seen = np.zeros(room.size, np.int64)
    owner = np.zeros(room.size, np.int32)
    moved = 0
    failures = 0
    for _ in range(_PASSES):
        moved_before, failed_before = moved, failures
        has_copy[:] = 0
        seen[:] = 0
        most_room = room.max()
        for group in range(group_offsets.size - 1):
            mark = group + 1
            for k in range(group_offsets[group], group_offsets[group + 1]):
                has_copy[bin_of[members[k]]] = mark
            for k in range(group_offsets[group], group_offsets[group + 1]):
                item = members[k]
                number = bin_of[item]
                if seen[number] == mark and owner[number] != sequence_of[item] and failures < most_failures:
                    target = np.int64(-1)
                    partner = _any_partner(
                        item,
                        bin_of,
                        sizes,
                        group_of,
                        sequence_of,
                        group_offsets,
                        members,
                        size_offsets,
                        by_size,
                        room,
                        has_copy,
                        most_room,
                    )
                    companion = second = np.int64(-1)
                    if partner < 0:
                        target = _bin_with_room(sizes[item], mark, max_per_bin, room, num_items, has_copy)
                    if partner < 0 and target < 0:
                        companion, partner = _partner_for_two(
                            item,
                            bin_of,
                            sizes,
                            group_of,
                            sequence_of,
                            group_offsets,
                            members,
                            size_offsets,
                            by_size,
                            room,
                            has_copy,
                            num_items,
                            max_per_bin,
                        )
                        if partner < 0:
                            second, partner = _two_partners(
                                item,
                                bin_of,
                                sizes,
                                group_of,
                                sequence_of,
                                group_offsets,
                                members,
                                size_offsets,
                                by_size,
                                has_copy,
                                num_items,
                                max_per_bin,
                            )
                    if partner >= 0:
                        target = np.int64(bin_of[partner])
                    if target < 0:
                        failures += 1
                    else:
                        _move(item, target, bin_of, sizes, room, num_items)
                        if companion >= 0:
                            _move(companion, target, bin_of, sizes, room, num_items)
                        if partner >= 0:
                            _move(partner, number, bin_of, sizes, room, num_items)
                        if second >= 0:
                            _move(second, number, bin_of, sizes, room, num_items)
                        most_room = max(most_room, max(room[number], room[target]))
                        has_copy[target] = mark
                        number = target
                        moved += 1
                if seen[number] != mark:
                    seen[number] = mark
                    owner[number] = sequence_of[item]
        if failures == failed_before or moved == moved_before:
            break
    return moved
