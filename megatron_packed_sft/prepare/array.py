"""A preparation in many calls, started by any scheduler: each encodes a share of the slices, a last one publishes.

    executor=array executor.index=0 executor.count=3      a third of the input
    executor=array executor.index=1 executor.count=3      another third, at any time, on any machine
    executor=array executor.index=2 executor.count=3      the last one
    executor=array                                        plan and publish

They meet in the work directory only. Every slice has files and a receipt of its own, so the calls share no writes but
array.json, which says how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_packed_sft.errors import InvalidInputError
from megatron_packed_sft.prepare.config import PrepareConfig
from megatron_packed_sft.prepare.counts import Counts
from megatron_packed_sft.prepare.work_directory import WorkDirectory
from megatron_packed_sft.support.wording import plural

_RECEIPT = "array"


@dataclass(frozen=True)
class ArrayCall:
    """One call of an array.

    Args:
        index: of its share of the slices; None for the last call.
        count: of the shares; None in a last call that takes it from the others.
    """

    index: int | None
    count: int | None

    @classmethod
    def of(cls, config: PrepareConfig) -> ArrayCall | None:
        """Return the call of a configuration; None for another executor.

        Example:
            >>> from megatron_packed_sft.prepare.config import ExecutorConfig
            >>> ArrayCall.of(PrepareConfig(executor=ExecutorConfig("array", index=2, count=8)))
            ArrayCall(index=2, count=8)
        """
        index, count = config.executor.index, config.executor.count
        if config.executor.kind != "array":
            return None
        if count is not None and count < 1:
            raise InvalidInputError(f"executor.count is {count}; it must be at least 1")
        if index is not None and count is None:
            raise InvalidInputError(
                f"executor.index is {index}, but executor.count is missing; add the number of calls"
            )
        if index is not None and count is not None and not 0 <= index < count:
            raise InvalidInputError(
                f"executor.index is {index}; with executor.count={count} it must be from 0 to {count - 1}"
            )
        if config.limit is not None and not config.dry_run:
            raise InvalidInputError("limit takes one slice after the other; use executor=local for such a trial")
        if config.force and not config.dry_run:
            raise InvalidInputError(
                "force would remove what other calls of the array did; remove the work directory before the first call"
            )
        return cls(index, count)

    def join(self, work: WorkDirectory, fingerprint: str) -> ArrayCall:
        """Agree with the other calls on how many there are, and return this one with that number.

        Args:
            work: where they meet.
            fingerprint: of the encode stage; calls with another input or other settings do not belong together.
        """
        with work.one_at_a_time(_RECEIPT):
            noted = work.receipt(_RECEIPT, fingerprint)
            if noted is None:
                noted = self._begin(work, fingerprint)
        count = noted["count"]
        if self.count not in (None, count):
            raise InvalidInputError(
                f"executor.count is {self.count}, but earlier calls in {work.place} had executor.count={count}; use "
                f"{count}, or remove {work.place}/{_RECEIPT}.json when no call is running, to share the slices out anew"
            )
        if self.index is not None and not work.hold(f"calls/{self.index}_of_{count}"):
            raise InvalidInputError(
                f"another call with executor.index={self.index} is working in {work.place}; give every call an index "
                "of its own, or wait for it"
            )
        return replace(self, count=count)

    def _begin(self, work: WorkDirectory, fingerprint: str) -> dict[str, Any]:
        if self.index is None:
            others = " with this input and these settings" if work.receipt(_RECEIPT, None) else ""
            raise InvalidInputError(
                f"no call with executor.index has worked in {work.place} yet{others}; run those first, or use "
                "executor=local"
            )
        if work.receipt(_RECEIPT, None) is not None and not work.is_alone():
            raise InvalidInputError(
                f"calls with another input or other settings are working in {work.place}; wait for them, or choose "
                "another output or work_dir"
            )
        noted = {"count": self.count}
        work.write_receipt(_RECEIPT, fingerprint, noted)
        work.share()
        return noted


def incomplete(missing: Sequence[int], num_slices: int, count: int) -> InvalidInputError:
    """Return the error for slices that no call has encoded yet, with what to run again.

    Args:
        missing: the call that each of them belongs to.
        num_slices: of all calls.
        count: of the calls.
    """
    return InvalidInputError(
        f"{len(missing):,} of {plural(num_slices, 'slice')} are not encoded; run "
        f"executor.index={ranges(sorted(set(missing)))} of executor.count={count} again, then this call (or "
        "executor=local, which encodes the rest itself)"
    )


@dataclass(frozen=True)
class ShareReport:
    """What a call of an array did."""

    index: int
    count: int
    num_slices: int
    num_reused: int
    counts: Counts

    def lines(self) -> list[str]:
        """Return it as text."""
        made = self.num_slices - self.num_reused
        tokens = sum(one.num_tokens for one in self.counts.splits.values())
        return [
            f"encode   share {self.index} of {self.count}: {plural(self.num_slices, 'slice')}: "
            f"{self.num_reused:,} reused, {made:,} encoded",
            f"         {plural(self.counts.num_rows, 'record')}, {plural(tokens, 'token')}",
            "When all calls are done, run the same command without executor.index to plan and publish.",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return it in plain values."""
        return {
            "index": self.index,
            "count": self.count,
            "num_slices": self.num_slices,
            "num_reused": self.num_reused,
            "counts": self.counts.to_json(),
        }


def ranges(numbers: Iterable[int]) -> str:
    """Return sorted numbers as schedulers take them.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
