"""Which kinds of sizes should share a bin, and how often: Gilmore and Gomory's linear program, in whole numbers.

Sizes are put into some 64 buckets. A column is a multiset of buckets that fits into a bin; the program covers every
bucket's demand with as few bins as possible. Columns are made when needed: the dual prices of the buckets go into a
knapsack, and the best filling of a bin is a column that improves the solution (column generation).

The inverse of the basis is kept in fixed point, 24 bits after the point, and every operation is one on int64. So the
result is the same on every machine, whatever its compiler does with floating point. It does not have to be exact: it
only guides a search that is (guided_kernel.py).
"""

from __future__ import annotations

import numpy as np

from megatron_packed_sft.packing.search.bitset_kernel import Scalar
from megatron_packed_sft.packing.search.histogram_kernel import Int32, Int64
from megatron_packed_sft.support.compiled import inner_kernel, kernel

POINT = 24
ONE = 1 << POINT
# Improving the solution by less than a ten-thousandth of a bin per bin is not worth a pivot.
_TOLERANCE = ONE // 10_000
# Larger numbers than this in the inverse could overflow a product; a column that needs them is passed over.
_LARGEST = 1 << 31
_SMALLEST_PIVOT = 1 << 14

# The knapsack's capacity: sizes are rounded to this fraction of a bin.
RESOLUTION = 8192
_MOST_BUCKETS = 96
_MOST_COLUMNS = 4096


@kernel
def make_buckets(histogram: Int64, capacity: Scalar, target: Scalar) -> tuple[Int64, Int64, Int64, Int64]:
    """Cut the sizes, from the largest down, into buckets of about 1/target of all tokens, none too wide.

    Returns per bucket: lowest and highest size, number of sequences, and their sum.
    """
    total = np.int64(0)
    num_different = 0
    for size in range(1, capacity + 1):
        if histogram[size] > 0:
            total += size * histogram[size]
            num_different += 1
    low = np.zeros(_MOST_BUCKETS, np.int64)
    high = np.zeros(_MOST_BUCKETS, np.int64)
    demand = np.zeros(_MOST_BUCKETS, np.int64)
    tokens = np.zeros(_MOST_BUCKETS, np.int64)
    bucket = -1
    is_full = True
    for size in range(capacity, 0, -1):
        if histogram[size] == 0:
            continue
        if bucket >= 0 and (high[bucket] - size) * target > 2 * capacity:
            is_full = True
        if is_full and bucket < _MOST_BUCKETS - 1:
            bucket += 1
            high[bucket] = size
        low[bucket] = size
        demand[bucket] += histogram[size]
        tokens[bucket] += size * histogram[size]
        is_full = num_different <= target or tokens[bucket] * target >= total
    count = bucket + 1
    return low[:count].copy(), high[:count].copy(), demand[:count].copy(), tokens[:count].copy()


@inner_kernel
def _fill_knapsack(value: Int64, widths: Int64, prices: Int64) -> None:
    """value[c] = the most that buckets of these widths and prices bring in capacity c, each as often as wanted."""
    capacity = value.size - 1
    value[:] = 0
    for bucket in range(widths.size):
        width = widths[bucket]
        price = prices[bucket]
        if price <= 0:
            continue
        # In stretches of `width`, each of which reads only what the one before wrote: the compiler vectorises this.
        start = width
        while start <= capacity:
            stop = min(start + width, capacity + 1)
            for c in range(start, stop):
                value[c] = max(value[c], value[c - width] + price)
            start = stop


@inner_kernel
def _read_knapsack(value: Int64, widths: Int64, prices: Int64, capacity: Scalar, column: Int32, most: Scalar) -> Scalar:
    """Write one best filling of `capacity` into `column`; return its length, or -1 if it is longer than `most`."""
    length = 0
    while capacity > 0 and value[capacity] > 0:
        if value[capacity] == value[capacity - 1]:
            capacity -= 1
            continue
        if length == most:
            return -1
        for bucket in range(widths.size):
            width = widths[bucket]
            if prices[bucket] > 0 and width <= capacity and value[capacity] == value[capacity - width] + prices[bucket]:
                column[length] = bucket
                length += 1
                capacity -= width
                break
    return length


@inner_kernel
def _add_column(columns: Int32, lengths: Int32, num_columns: Scalar, first_new: Scalar) -> Scalar:
    """Keep the column just written behind the others, unless it is a repetition; return the new number."""
    length = lengths[num_columns]
    column = columns[num_columns]
    for k in range(1, length):
        bucket = column[k]
        place = k
        while place > 0 and column[place - 1] > bucket:
            column[place] = column[place - 1]
            place -= 1
        column[place] = bucket
    for other in range(first_new, num_columns):
        if lengths[other] == length:
            k = 0
            while k < length and columns[other, k] == column[k]:
                k += 1
            if k == length:
                return num_columns
    return num_columns + 1


@inner_kernel
def _generate(
    value: Int64, widths: Int64, prices: Int64, columns: Int32, lengths: Int32, num_columns: Scalar
) -> Scalar:
    """Add every improving column of the form "bucket b and the best filling of the rest"; return the new number."""
    _fill_knapsack(value, widths, prices)
    capacity = value.size - 1
    first_new = num_columns
    most = columns.shape[1]
    for bucket in range(-1, widths.size):
        if num_columns == _MOST_COLUMNS - 1:
            break
        rest = capacity
        price = np.int64(0)
        if bucket >= 0:
            rest -= widths[bucket]
            price = prices[bucket]
            if price <= 0:
                continue
        if value[rest] + price <= ONE + _TOLERANCE:
            continue
        length = _read_knapsack(value, widths, prices, rest, columns[num_columns], most - 1)
        if length < 0:
            continue
        if bucket >= 0:
            columns[num_columns, length] = bucket
            length += 1
        lengths[num_columns] = length
        num_columns = _add_column(columns, lengths, num_columns, first_new)
    return num_columns


@inner_kernel
def _pivot(inverse: Int64, solution: Int64, entering: Int64) -> Scalar:
    """Bring the column whose image is `entering` into the basis; return the row it takes, or -1 if that is unsafe."""
    num_rows = solution.size
    row = -1
    step = np.int64(0)
    largest = np.int64(0)
    for i in range(num_rows):
        largest = max(largest, abs(entering[i]))
        if entering[i] > _SMALLEST_PIVOT:
            candidate = (solution[i] << POINT) // entering[i]
            if row < 0 or candidate < step or (candidate == step and entering[i] > entering[row]):
                row = i
                step = candidate
    if row < 0 or largest >= _LARGEST:
        return -1
    pivot = entering[row]
    for j in range(num_rows):
        if (abs(inverse[row, j]) << POINT) // pivot >= _LARGEST:
            return -1
    for j in range(num_rows):
        inverse[row, j] = ((inverse[row, j] << POINT) + (pivot >> 1)) // pivot
    half = np.int64(1) << (POINT - 1)
    for i in range(num_rows):
        factor = entering[i]
        if i != row and factor != 0:
            for j in range(num_rows):
                inverse[i, j] -= (factor * inverse[row, j] + half) >> POINT
            solution[i] = max(np.int64(0), solution[i] - ((factor * step + half) >> POINT))
    solution[row] = step
    return row


@kernel
def solve_program(widths: Int64, demand: Int64, max_per_bin: Scalar, max_pivots: Scalar) -> tuple[Int32, Int32, Int64]:
    """Cover `demand` by columns of at most RESOLUTION units; return the basis: columns, lengths, bins of each.

    Bins are in 256ths. Columns never hold more than `max_per_bin` buckets.
    """
    num_rows = widths.size
    most = min(max_per_bin, 256)
    columns = np.empty((_MOST_COLUMNS, most), np.int32)
    lengths = np.zeros(_MOST_COLUMNS, np.int32)
    inverse = np.zeros((num_rows, num_rows), np.int64)
    basis = np.arange(num_rows)
    total = np.int64(0)
    for i in range(num_rows):
        total += demand[i]
    # Demands are scaled to 2^29 in all, so that products with fixed-point numbers stay inside 63 bits.
    scaled = np.empty(num_rows, np.int64)
    solution = np.empty(num_rows, np.int64)
    up = 0
    while (total << (up + 1)) < (1 << 29):
        up += 1
    down = 0
    while (total >> down) >= (1 << 30):
        down += 1
    for i in range(num_rows):
        scaled[i] = (demand[i] << up) >> down
        repeat = min(RESOLUTION // widths[i], most)
        for k in range(repeat):
            columns[i, k] = i
        lengths[i] = repeat
        inverse[i, i] = ONE // repeat
        solution[i] = scaled[i] // repeat
    num_columns = num_rows
    is_refused = np.zeros(_MOST_COLUMNS, np.bool_)
    prices = np.empty(num_rows, np.int64)
    entering = np.empty(num_rows, np.int64)
    value = np.empty(RESOLUTION + 1, np.int64)
    for _ in range(max_pivots):
        prices[:] = 0
        for i in range(num_rows):
            for j in range(num_rows):
                prices[j] += inverse[i, j]
        best = np.int64(ONE + _TOLERANCE)
        chosen = -1
        for attempt in range(2):
            for column in range(num_columns):
                if is_refused[column]:
                    continue
                worth = np.int64(0)
                for k in range(lengths[column]):
                    worth += prices[columns[column, k]]
                if worth > best:
                    best = worth
                    chosen = column
            if chosen >= 0 or attempt == 1:
                break
            num_columns = _generate(value, widths, prices, columns, lengths, num_columns)
        if chosen < 0:
            break
        entering[:] = 0
        for k in range(lengths[chosen]):
            for i in range(num_rows):
                entering[i] += inverse[i, columns[chosen, k]]
        row = _pivot(inverse, solution, entering)
        if row < 0:
            is_refused[chosen] = True
        else:
            basis[row] = chosen
    bins = np.empty(num_rows, np.int64)
    basis_columns = np.empty((num_rows, most), np.int32)
    basis_lengths = np.empty(num_rows, np.int32)
    for i in range(num_rows):
        for k in range(most):
            basis_columns[i, k] = columns[basis[i], k]
        basis_lengths[i] = lengths[basis[i]]
        bins[i] = ((solution[i] << down) << 8) >> up
    return basis_columns, basis_lengths, bins
