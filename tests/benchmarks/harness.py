"""What something costs, as a ratio to something else, and whether that keeps within its bar.

One round times a block of calls of the *subject* (what the row is about), one of the *reference*, and another of the
subject, in this order or the reverse, by turns. Subject over reference gives the round's ratio (the inverse for a bar
"at least so many times faster"); the subject's two blocks give its A/A ratio, the spread of a machine that had nothing
to tell apart. Of n rounds the median is shown, with the distribution-free interval between two order statistics that
holds the true median with probability at least 95 % (binomial; ranks 10 and 21 of 30). Fewer than 6 rounds have no such
pair: then the interval is their range and says less.

A bar is missed when the whole interval lies beyond it, met when none of it does, and open in between.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

Work = Callable[[], object]
Clock = Callable[[], float]
Verdict = Literal["missed", "open", "met", "goal"]


@dataclass(frozen=True)
class Ratio:
    """A row that sets the cost of a subject against that of a reference."""

    name: str
    setup: Callable[[], AbstractContextManager[tuple[Work, Work]]]  # entered for the row alone; (subject, reference)
    bar: float  # the largest ratio allowed, or with faster=True the smallest
    goal: float | None = None
    faster: bool = False  # the ratio is reference / subject, and the bar a lower one
    threads: int = 1  # torch's, while the row runs
    pairs: int = 30
    block: float = 0.02  # seconds a timed block should last; at least one call
    returned: bool = False  # the cost is the number a call returns (a count, its own stopwatch), not its time; no A/A


@dataclass(frozen=True)
class Number:
    """A row whose cost is one number in a unit of its own, such as the growth of memory in MiB."""

    name: str
    setup: Callable[[], AbstractContextManager[Callable[[], float]]]
    unit: str
    bar: float
    goal: float | None = None
    at_least: bool = False
    threads: int = 1
    repeats: int = 1


Row = Ratio | Number


@dataclass(frozen=True)
class Median:
    """The median of n values and an interval for the true one."""

    value: float
    low: float
    high: float
    coverage: float  # probability that (low, high) holds the true median; 0 for a single value
    n: int


@dataclass(frozen=True)
class Result:
    """What a row came to."""

    name: str
    unit: str
    bar: float
    goal: float | None
    at_least: bool
    threads: int
    measured: Median
    control: Median | None  # A/A
    verdict: Verdict
    subject: Median | None  # seconds a call, or what the call returned
    reference: Median | None
    values: list[float]  # every ratio or number, in the order measured


def median(values: Sequence[float]) -> Median:
    """Median with the narrowest symmetric pair of order statistics that covers at least 95 %.

    Raises:
        ValueError: If there are no values, or one is not finite.
    """
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"a median needs finite values, got {list(values)}")
    ordered, n = sorted(values), len(values)
    # Both tails beyond ranks k and n + 1 - k: fewer than k of n fair coins are heads, or fewer than k tails.
    k, tail = 1, 2 * 0.5**n
    while True:
        further = tail + 2 * math.comb(n, k) * 0.5**n
        if further > 0.05 or k >= n // 2:
            break
        k, tail = k + 1, further
    return Median(statistics.median(ordered), ordered[k - 1], ordered[n - k], max(0.0, 1 - tail), n)


def judge(measured: Median, bar: float, goal: float | None, *, at_least: bool) -> Verdict:
    """Whether the interval lies beyond the bar (missed), across it (open) or within it (met); goal: within that too."""
    if at_least:
        measured = Median(-measured.value, -measured.high, -measured.low, measured.coverage, measured.n)
        bar, goal = -bar, None if goal is None else -goal
    if measured.low > bar:
        return "missed"
    if measured.high > bar:
        return "open"
    return "goal" if goal is not None and measured.value <= goal else "met"


@contextmanager
def quiet(threads: int) -> Iterator[None]:
    """No garbage collection and ``threads`` torch threads inside; afterwards as before."""
    collecting, before = gc.isenabled(), torch.get_num_threads()
    gc.collect()
    gc.disable()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if collecting:
            gc.enable()


def measure(row: Row, clock: Clock = time.perf_counter) -> Result:
    """Run one row.

    Raises:
        ValueError: If a cost is zero, negative or not finite where a ratio is asked for.
    """
    if isinstance(row, Number):
        with row.setup() as number, quiet(row.threads):
            values = [float(number()) for _ in range(row.repeats)]
        measured = median(values)
        verdict = judge(measured, row.bar, row.goal, at_least=row.at_least)
        about = (row.name, row.unit, row.bar, row.goal, row.at_least, row.threads)
        return Result(*about, measured, None, verdict, None, None, values)
    with row.setup() as (subject, reference):
        rounds = _returned(row, subject, reference) if row.returned else _timed(row, subject, reference, clock)
    for costs in rounds:
        if not all(0 < cost < math.inf for cost in costs):
            raise ValueError(f"{row.name}: no ratio of the costs {costs}")
    subjects, references, again = zip(*rounds, strict=True)
    ratios = [r / s if row.faster else s / r for s, r, _ in rounds]
    measured = median(ratios)
    control = None if row.returned else median([a / s for s, a in zip(subjects, again, strict=True)])
    verdict = judge(measured, row.bar, row.goal, at_least=row.faster)
    about = (row.name, "x", row.bar, row.goal, row.faster, row.threads)
    return Result(*about, measured, control, verdict, median(subjects), median(references), ratios)


def _returned(row: Ratio, subject: Work, reference: Work) -> list[tuple[float, float, float]]:
    """What each returned, by turns."""
    rounds = []
    with quiet(row.threads):
        for turn in range(row.pairs):
            costs: dict[bool, Any] = {}
            for first in (True, False) if turn % 2 == 0 else (False, True):
                costs[first] = (subject if first else reference)()
            rounds.append((float(costs[True]), float(costs[False]), float(costs[True])))
    return rounds


def _timed(row: Ratio, subject: Work, reference: Work, clock: Clock) -> list[tuple[float, float, float]]:
    """Seconds a call of (subject, reference, subject again) in each round."""
    rounds = []
    with quiet(row.threads):
        calls = [_calls(work, row.block, clock) for work in (subject, reference)]
        for turn in range(row.pairs):
            gc.collect(1)  # what the last round left, between blocks
            before = _block(subject, calls[0], clock)
            against = _block(reference, calls[1], clock)
            after = _block(subject, calls[0], clock)
            # By turns the first and the last block stands for the subject, so that neither a cold start nor a machine
            # that drifts favours a side.
            rounds.append((before, against, after) if turn % 2 == 0 else (after, against, before))
    return rounds


def _calls(work: Work, block: float, clock: Clock) -> int:
    """How many calls fill a block, after one to warm up."""
    work()
    return max(1, round(block / max(_block(work, 1, clock), 1e-7)))


def _block(work: Work, calls: int, clock: Clock) -> float:
    start = clock()
    for _ in range(calls):
        work()
    return (clock() - start) / calls
