"""Estimates against scipy, closed forms, and the coverage they promise.

Simulated coverage: 4,000 repetitions, and a z score below 4 in absolute value, both fixed beforehand.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from analysis import statistics
from analysis.statistics import Passage

REPETITIONS = 4000
Z_BOUND = 4.0
FINITE = st.floats(-1e3, 1e3, allow_nan=False)


def z_of_coverage(covered: int, level: float = 0.95) -> float:
    return (covered - level * REPETITIONS) / math.sqrt(REPETITIONS * level * (1 - level))


@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
@pytest.mark.parametrize("values", [[0.2, 0.9], [3.0, 1.0, 4.0, 1.5, 9.2], [1e6, 1e6 + 1, 1e6 + 3]])
def test_the_interval_of_a_mean_is_scipys(values, level):
    found = statistics.mean(values, level=level)
    low, high = stats.t.interval(level, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)
    assert found.estimate == pytest.approx(np.mean(values), rel=1e-15)
    assert found.n == len(values)
    assert f"{level:.0%}" in found.method
    assert f"{len(values)} seeds" in found.method


def test_two_seeds_obey_the_closed_form():
    # With one degree of freedom t is Cauchy, its 0.975 quantile tan(0.475 pi); sd of (0, 2) over sqrt 2 is 1.
    found = statistics.mean([0.0, 2.0])
    assert found.high == pytest.approx(1 + math.tan(0.475 * math.pi), rel=1e-12)


def test_a_paired_difference_is_scipys_paired_test():
    rng = np.random.default_rng(0)
    b = rng.normal(size=6)
    a = b + rng.normal(0.5, 0.2, size=6)
    found = statistics.paired_difference(a, b)
    reference = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((reference.low, reference.high), rel=1e-12)
    assert found.estimate == pytest.approx(np.mean(a - b))
    assert "6 paired seeds" in found.method


def test_a_log_ratio_is_a_paired_test_on_logarithms():
    rng = np.random.default_rng(1)
    a, b = rng.lognormal(size=5), rng.lognormal(size=5)
    found = statistics.log_ratio(a, b, level=0.9)
    reference = stats.ttest_rel(np.log(a), np.log(b)).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((reference.low, reference.high), rel=1e-10)


def test_pairing_removes_what_the_seeds_share():
    shared = np.array([0.0, 10.0, -20.0, 5.0])
    found = statistics.paired_difference(shared + 1, shared)
    assert (found.estimate, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0))


def test_one_seed_has_an_estimate_and_no_interval():
    for found in (
        statistics.mean([0.4]),
        statistics.paired_difference([1.0], [0.6]),
        statistics.relative_reduction([1.0], [2.0]),
        statistics.relative_reduction([1.0], [2.0], method="fieller"),
    ):
        assert not found.has_interval
        assert found.n == 1
        assert "one seed" in found.method
        assert "[" not in found.text()
    assert statistics.relative_reduction([1.0], [2.0]).estimate == 0.5
    assert np.isnan(statistics.mean_band([[0.1, 0.2]]).low).all()


def test_bounds_clip_the_interval_and_not_the_estimate():
    free = statistics.mean([0.90, 0.99, 0.95])
    clipped = statistics.mean([0.90, 0.99, 0.95], within=(0.0, 1.0))
    assert free.high > 1 == clipped.high
    assert (clipped.low, clipped.estimate) == (free.low, free.estimate)
    assert statistics.mean([0.01, 0.1], within=(0.0, 1.0)).low == 0


@given(arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=FINITE))
def test_a_band_is_a_mean_at_each_point(values):
    band = statistics.mean_band(values)
    for t, column in enumerate(values.T):
        point = statistics.mean(column)
        expected = (point.estimate, point.low, point.high)
        assert (band.estimate[t], band.low[t], band.high[t]) == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)


@given(
    arrays(np.float64, 4, elements=st.floats(0.1, 100)),
    arrays(np.float64, 4, elements=st.floats(0.1, 100)),
    st.floats(0.01, 100),
    st.sampled_from(["log_ratio", "fieller"]),
)
def test_a_relative_reduction_has_no_unit_and_swaps_like_a_ratio(a, b, scale, method):
    found = statistics.relative_reduction(a, b, method=method)
    assert found.low <= found.estimate <= found.high
    scaled = statistics.relative_reduction(scale * a, scale * b, method=method)
    assert scaled.estimate == pytest.approx(found.estimate, rel=1e-6, abs=1e-9)
    swapped = statistics.relative_reduction(b, a, method=method)
    assert (1 - swapped.estimate) * (1 - found.estimate) == pytest.approx(1)


def test_a_relative_reduction_inverts_the_log_ratio_end_for_end():
    a, b = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 9.0])
    found, logs = statistics.relative_reduction(a, b), statistics.log_ratio(a, b)
    assert (found.estimate, found.low, found.high) == pytest.approx(
        (1 - np.exp(logs.estimate), 1 - np.exp(logs.high), 1 - np.exp(logs.low))
    )
    assert found.estimate == pytest.approx(1 - stats.gmean(a / b))


def test_fiellers_ends_are_ratios_that_a_paired_t_test_just_accepts():
    rng = np.random.default_rng(2)
    b = rng.normal(3, 0.4, size=7)
    a = 0.7 * b + rng.normal(0, 0.3, size=7)
    found = statistics.relative_reduction(a, b, method="fieller")
    assert found.estimate == pytest.approx(1 - a.mean() / b.mean())
    for end in (found.low, found.high):
        assert stats.ttest_1samp(a - (1 - end) * b, 0.0).pvalue == pytest.approx(0.05, rel=1e-6)


def test_fieller_says_so_when_the_denominator_may_be_zero():
    found = statistics.relative_reduction([1.0, 1.1, 0.9], [0.2, -0.3, 0.4], method="fieller")
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_a_ratio_too_wide_for_a_float_is_infinite():
    found = statistics.relative_reduction([1e-150, 1e150], [1.0, 1.0])
    assert (found.low, found.high) == (-math.inf, 1.0)


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("what", ["mean", "log_ratio", "fieller"])
def test_intervals_cover_what_they_promise(seeds, what):
    """Normal, lognormal and normal pairs: there all three methods are exact, so a wrong quantile or divisor shows."""
    rng = np.random.default_rng([seeds, len(what)])
    covered = 0
    for _ in range(REPETITIONS):
        shared = rng.normal(size=seeds)
        if what == "mean":
            found, truth = statistics.mean(2 + shared), 2.0
        elif what == "log_ratio":
            a, b = np.exp(shared + rng.normal(-1, 0.5, seeds)), np.exp(shared + rng.normal(0, 0.5, seeds))
            found, truth = statistics.relative_reduction(a, b), 1 - math.exp(-1)
        else:
            b = 100 + shared  # far from 0: an unbounded set is widened to its hull and covers more than promised
            a = 60 + 0.5 * shared + rng.normal(0, 0.5, seeds)
            found, truth = statistics.relative_reduction(a, b, method="fieller"), 0.4
        covered += found.low <= truth <= found.high
    assert abs(z_of_coverage(covered)) < Z_BOUND


def test_an_area_is_the_mean_height_of_the_curve():
    steps = np.array([0, 100, 400, 1000])
    assert statistics.area_under_curve(steps, [5.0] * 4) == pytest.approx(5.0)
    line = 2.0 + 0.01 * steps
    assert statistics.area_under_curve(steps, line) == pytest.approx(2 + 0.01 * 500)
    assert statistics.area_under_curve(steps, line, start=50, stop=250) == pytest.approx(2 + 0.01 * 150)
    assert statistics.area_under_curve(steps, line, stop=400) == pytest.approx(2 + 0.01 * 200)
    values = [0.1, 0.7, 0.4, 0.9]
    assert statistics.area_under_curve(steps, values) == pytest.approx(np.trapezoid(values, steps) / 1000)


def test_an_area_is_not_taken_beyond_the_record():
    for start, stop in ((0, 500), (-1, 100)):
        with pytest.raises(ValueError, match="known from step 0 to 200"):
            statistics.area_under_curve([0, 200], [1.0, 2.0], start=start, stop=stop)
    with pytest.raises(ValueError, match="start < stop"):
        statistics.area_under_curve([0, 200], [1.0, 2.0], start=100, stop=100)


def test_a_planted_first_passage_is_found_between_its_evaluations():
    steps, rising = [0, 100, 200, 300], [0.1, 0.89, 0.90, 0.95]
    assert statistics.first_passage(steps, rising, 0.9) == Passage(100, 200)
    assert statistics.first_passage(steps, [3.0, 2.0, 1.0, 0.5], 1.0, rising=False) == Passage(100, 200)
    assert statistics.first_passage(steps, [0.1, 0.95, 0.2, 0.95], 0.9).by == 100, "the first, not the last"
    assert statistics.first_passage(steps, [0.1, math.nan, 0.95, 0.95], 0.9) == Passage(100, 200)


def test_what_never_arrived_is_censored_where_it_stopped():
    stopped = statistics.first_passage([0, 15000], [0.1, 0.8], 0.9)
    assert (stopped.after, stopped.by, stopped.reached) == (15000, math.inf, False)
    assert stopped.text() == ">15000"
    diverged = statistics.first_passage([0, 300], [0.1, 0.2], 0.9, diverged=True)
    assert diverged.text() == "never (diverged)"
    at_once = statistics.first_passage([0, 300], [0.9, 0.2], 0.9)
    assert (at_once.after, at_once.by) == (-math.inf, 0)


def test_a_median_passage_keeps_its_censoring():
    early, late, never = Passage(400, 500), Passage(900, 1000), Passage(15000, math.inf)
    diverged = Passage(300, math.inf, diverged=True)
    found = statistics.median_passage([never, early, late])
    assert (found.after, found.estimate, found.n, found.reached) == (900, 1000, 3, 2)
    assert found.text() == "900-1000"
    assert statistics.median_passage([never, never, early]).text() == ">15000"
    assert statistics.median_passage([early, late]).text() == "650-750"
    assert statistics.median_passage([early, never]).text() == ">7700", "no less than midway to what the other reached"
    # a run that diverged at step 300 is later than any other, not earlier
    assert statistics.median_passage([diverged, early, late]).text() == "900-1000"
    assert statistics.median_passage([diverged, early]).text() == ">400"
    assert statistics.median_passage([diverged, diverged, early]).text() == "never (diverged)"
    assert statistics.median_passage([Passage(-math.inf, 0)]).text() == "<=0"
    assert statistics.median_passage([Passage(-math.inf, 0), never]).text() == "undetermined"


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=9), st.integers(1, 500), st.integers(500, 2000))
def test_the_median_of_the_hidden_times_lies_within_the_bounds(times, cadence, last):
    steps = np.arange(0, last + 1, cadence)
    passages = [statistics.first_passage(steps, steps >= time, 1.0) for time in times]
    found = statistics.median_passage(passages)
    assert found.after <= np.median(times) <= found.estimate


def test_a_median_interval_needs_six_runs_for_95_percent():
    passages = [Passage(100 * k, 100 * k + 100) for k in range(1, 7)]
    five, six = statistics.median_passage(passages[:5]), statistics.median_passage(passages)
    assert math.isnan(five.low)
    assert math.isnan(five.high)
    assert "too few" in five.method
    assert (six.low, six.high) == (100, 700)  # smallest and largest of six miss with probability 2 / 64
    assert not math.isnan(statistics.median_passage(passages[:5], level=0.9).low)


@pytest.mark.parametrize(("runs", "rank"), [(6, 1), (9, 2), (20, 6), (50, 18)])
def test_the_ranks_are_those_of_the_published_table(runs, rank):
    """Two-sided 5% critical values of the sign test (for example Conover 1999, table A3) plus one."""
    passages = [Passage(k - 1, k) for k in range(1, runs + 1)]
    found = statistics.median_passage(passages)
    assert (found.low, found.high) == (rank - 1, runs + 1 - rank)


def test_a_planted_typical_unit_is_found():
    rng = np.random.default_rng(3)
    middle = rng.normal(size=(1, 30, 3))
    offsets = rng.permutation(np.r_[-np.arange(1, 6), np.arange(1, 6), 0.01]).reshape(-1, 1, 1)
    assert statistics.typical_unit(middle + offsets) == int(np.abs(offsets).argmin())


def test_typical_is_judged_by_all_percentiles_and_all_steps():
    flat = np.zeros((5, 4, 3))
    flat[0, 0, 0], flat[1, 3, 2], flat[3, 2, 1], flat[4] = 0.5, 0.5, 0.4, 9.0
    assert statistics.typical_unit(flat) == 2


def test_near_means_euclidean():
    rng = np.random.default_rng(4)
    tables = rng.standard_t(2, size=(50, 9, 6, 3))  # heavy tails: the other distances often choose another unit
    chosen = [statistics.typical_unit(table) for table in tables]
    for power, same in ((2, True), (1, False), (math.inf, False)):
        reference = []
        for table in tables:
            median = [[np.median([unit[t][q] for unit in table]) for q in range(3)] for t in range(6)]
            distances = [np.linalg.norm((unit - median).ravel(), ord=power) for unit in table]
            reference.append(distances.index(min(distances)))
        assert (chosen == reference) == same


def test_ties_go_to_the_lowest_index():
    symmetric = np.array([3.0, 1.0, -1.0, -3.0]).reshape(4, 1, 1)
    assert statistics.typical_unit(symmetric) == 1


def test_what_is_not_finite_is_not_typical():
    table = np.zeros((4, 3, 2))
    table[1:] += np.array([1.0, 2.0, 4.0]).reshape(3, 1, 1)
    table[:, 2] = np.nan  # the last step of a run that diverged
    table[1, 1, 0] = np.inf
    assert statistics.typical_unit(table) == 2
    table[1, 1, 0] = np.nan
    assert statistics.typical_unit(table) == 2
    with pytest.raises(ValueError, match="no unit"):
        statistics.typical_unit(np.full((2, 2, 2), np.nan))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics.mean([]), "at least one value"),
        (lambda: statistics.mean([1.0, math.nan]), "finite, got nan at 1"),
        (lambda: statistics.mean([1.0], level=1.0), "level must lie between 0 and 1, got 1.0"),
        (lambda: statistics.mean([1.2, 0.3], within=(0, 1)), "within"),
        (lambda: statistics.mean_band([1.0, 2.0]), r"got \(2,\)"),
        (lambda: statistics.paired_difference([1.0, 2.0], [1.0]), "got 2 and 1"),
        (lambda: statistics.log_ratio([1.0, 0.0], [1.0, 1.0]), "a has 0.0 at seed 1"),
        (lambda: statistics.log_ratio([1.0, 2.0], [-3.0, 1.0]), "b has -3.0 at seed 0"),
        (lambda: statistics.relative_reduction([1.0], [1.0], method="delta"), "'delta'"),
        (lambda: statistics.relative_reduction([1.0, 2.0], [-1.0, 1.0], method="fieller"), "mean of b is 0"),
        (lambda: statistics.area_under_curve([0, 0], [1.0, 1.0]), "increase strictly"),
        (lambda: statistics.area_under_curve([0, 1], [1.0, math.inf]), "finite, got inf"),
        (lambda: statistics.first_passage([], [], 0.5), "1 or more steps"),
        (lambda: statistics.first_passage([0], [1.0], math.nan), "target must be finite"),
        (lambda: statistics.median_passage([]), "at least one run"),
        (lambda: statistics.median_passage([Passage(0, 1)], level=0), "level"),
        (lambda: statistics.typical_unit(np.zeros((2, 3))), r"got \(2, 3\)"),
    ],
)
def test_what_cannot_be_estimated_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_estimate_prints_with_its_interval():
    assert statistics.Estimate(0.91234, 0.9, 0.95, 3, "").text() == "0.912 [0.900, 0.950]"
    assert statistics.Estimate(0.91234, math.nan, math.nan, 1, "").text(".1f") == "0.9"


def student(values, level=0.95):
    return stats.t.interval(level, len(values) - 1, loc=np.mean(values), scale=stats.sem(values))


def test_known_numbers_are_intervals_without_width():
    values = [1.0, 2.5, 2.0, 4.0]
    found, known = statistics.mean_of_intervals(values, values), statistics.mean(values)
    assert (found.estimate, found.low, found.high) == pytest.approx((known.estimate, known.low, known.high))
    assert found.n == 4
    assert statistics.mean_of_intervals(values, values, level=0.5).low == pytest.approx(student(values, 0.5)[0])


def test_two_intervals_obey_the_closed_form():
    """For two, k sd = t |x1 - x2| / 2 with t = 12.7 at 95%: the ends that lie furthest apart decide."""
    found = statistics.mean_of_intervals([0.0, 2.0], [1.0, 5.0])
    t = stats.t.ppf(0.975, 1)
    assert found.estimate == 2
    assert (found.low, found.high) == pytest.approx((2.5 - t * 2.5, 2.5 + t * 2.5))


@pytest.mark.parametrize("seeds", [3, 5, 16, 18])
def test_the_interval_holds_every_completions(seeds):
    rng = np.random.default_rng(seeds)
    low = rng.normal(size=seeds)
    high = low + rng.exponential(0.5, seeds)
    found = statistics.mean_of_intervals(low, high)
    share = np.concatenate([rng.integers(0, 2, (2000, seeds)), rng.random((500, seeds))])
    values = low + share * (high - low)
    half = stats.t.ppf(0.975, seeds - 1) * values.std(axis=1, ddof=1) / np.sqrt(seeds)
    lows, highs = values.mean(axis=1) - half, values.mean(axis=1) + half
    assert found.low <= lows.min() + 1e-12
    assert found.high >= highs.max() - 1e-12
    if seeds <= 5:  # and is no wider than that: among so many, every corner was met
        assert (found.low, found.high) == pytest.approx((lows.min(), highs.max()))


def test_beyond_the_corners_the_bound_is_wider_and_not_wild(monkeypatch):
    rng = np.random.default_rng(1)
    low = rng.normal(size=10)
    high = low + 0.2
    exact = statistics.mean_of_intervals(low, high)
    monkeypatch.setattr(statistics, "_CORNERS", 9)
    bound = statistics.mean_of_intervals(low, high)
    assert bound.low <= exact.low < exact.high <= bound.high
    assert bound.high - bound.low < 1.3 * (exact.high - exact.low)


def test_intervals_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"low must not exceed high, got 3.0 and 2.0 at seed 1"):
        statistics.mean_of_intervals([1.0, 3.0], [1.0, 2.0])
    one = statistics.mean_of_intervals([1.0], [2.0])
    assert (one.estimate, one.has_interval) == (1.5, False)
    with pytest.raises(ValueError, match="must be finite"):
        statistics.mean_of_intervals([1.0, 3.0], [1.0, np.inf])
