"""What a handful of seeds can say: estimates with their doubt.

A run is one arm with one seed. Arms share a seed's weights, batch order and probe batch, so S seeds give S *paired*
values per quantity, and S is small. With ``d_s`` the difference (or log ratio) of the two arms at seed s, the interval
is Student's: ``mean(d) +- t * sd(d) / sqrt(S)``, where t has S - 1 degrees of freedom, the divisor in sd. It is exact
for normal ``d`` at every S >= 2. One seed has no spread: the bounds are NaN and the method says so.

There is no bootstrap here on purpose. It resamples what was seen, and at S = 3 its best variant (BCa) covers 73% where
95% is promised; Student's t on log ratios covers 95 to 97%.

Steps to a target are known only up to the evaluations around them, and a run that ended below its target only bounds
them from below. Such numbers are never averaged. Every order statistic is monotone in each observation, so the median
of interval-censored values lies between the median of the lower ends and the median of the upper ends: that is the
whole treatment, and it needs no model. The tests lean on this, on scipy, on closed forms and on simulated coverage.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, stdtrit

Array = NDArray[np.float64]

NO_INTERVAL = "one seed, no interval"
_CORNERS = 16  # seeds up to which all 2^S corners of a box are tried


@dataclass(frozen=True)
class Estimate:
    """One number, its interval, and what made it. ``low`` and ``high`` are NaN where there is no interval."""

    estimate: float
    low: float
    high: float
    n: int
    method: str

    @property
    def has_interval(self) -> bool:
        """Whether there is an interval at all (one seed has none)."""
        return not (math.isnan(self.low) or math.isnan(self.high))

    def text(self, spec: str = ".3f") -> str:
        """``estimate [low, high]``, each in the format ``spec``; the estimate alone where there is no interval."""
        if not self.has_interval:
            return f"{self.estimate:{spec}}"
        return f"{self.estimate:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


@dataclass(frozen=True)
class Band:
    """A curve of T means over S seeds with an interval at each point (pointwise, not simultaneous)."""

    estimate: Array  # (T,)
    low: Array  # (T,) NaN where there is no interval
    high: Array  # (T,)
    n: int
    method: str


@dataclass(frozen=True)
class Passage:
    """The first passage of one run through a target, in steps: it lies in ``(after, by]``.

    ``after`` is the last evaluation before the target was met (-inf if the first one met it), ``by`` the first that
    met it (inf: none did). A run that ended there is right-censored at ``after``. A run that *diverged* there will
    never pass.
    """

    after: float
    by: float
    diverged: bool = False

    @property
    def reached(self) -> bool:
        """Whether any evaluation met the target."""
        return math.isfinite(self.by)

    def text(self) -> str:
        """The first evaluation that met the target, ``>15000`` where none did, ``never`` where the run diverged."""
        if self.reached:
            return f"{self.by:.0f}"
        return "never (diverged)" if self.diverged else f">{self.after:.0f}"


@dataclass(frozen=True)
class MedianPassage:
    """The median first passage of n runs, in steps: it lies in ``(after, estimate]``.

    ``estimate`` is the median of the first evaluations that met the target, inf where half of the runs or more did
    not; then ``after`` is all that is known. ``low`` and ``high`` bound the median of the law the runs came from, NaN
    where n is too small for the level (below 6 runs for 95%).
    """

    estimate: float
    after: float
    low: float
    high: float
    n: int
    reached: int
    method: str

    def text(self) -> str:
        """``3500-4000``; ``>15000`` where the median is censored; ``<=100`` where the first evaluation met it."""
        if math.isfinite(self.estimate):
            return f"<={self.estimate:.0f}" if math.isinf(self.after) else f"{self.after:.0f}-{self.estimate:.0f}"
        if math.isinf(self.after):
            return "never (diverged)" if self.after > 0 else "undetermined"
        return f">{self.after:.0f}"


def mean(values: ArrayLike, *, level: float = 0.95, within: tuple[float, float] | None = None) -> Estimate:
    """Mean of ``values`` (S,), one a seed, with Student's interval.

    ``within`` clips the interval to what the quantity can be (an accuracy: 0 to 1), which never lowers its coverage.

    Raises:
        ValueError: If there is no value, one is not finite, ``level`` is not in (0, 1), or a value is outside
        ``within``.
    """
    band = mean_band(_sample("values", values)[:, None], level=level, within=within)
    return Estimate(float(band.estimate[0]), float(band.low[0]), float(band.high[0]), band.n, band.method)


def mean_band(values: ArrayLike, *, level: float = 0.95, within: tuple[float, float] | None = None) -> Band:
    """Pointwise mean of S curves, ``values`` (S, T), with Student's interval at each point; ``within`` as in `mean`.

    Raises:
        ValueError: As `mean`, or if ``values`` has not two dimensions.
    """
    _check_level(level)
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or table.shape[0] == 0:
        raise ValueError(f"values must have shape (seeds, points) with at least one seed, got {table.shape}")
    _check_finite("values", table)
    if within is not None and table.size and (table.min() < within[0] or table.max() > within[1]):
        raise ValueError(f"values must lie within {within}, got {table.min()} to {table.max()}")
    seeds = table.shape[0]
    center = table.mean(axis=0)
    if seeds == 1:
        unknown = np.full_like(center, np.nan)
        return Band(center, unknown, unknown.copy(), 1, NO_INTERVAL)
    half = _student_quantile(seeds, level) * table.std(axis=0, ddof=1) / math.sqrt(seeds)
    low, high = center - half, center + half
    if within is not None:
        low, high = np.clip(low, *within), np.clip(high, *within)
    return Band(center, low, high, seeds, f"mean, {level:.0%} Student t over {seeds} seeds")


def mean_of_intervals(low: ArrayLike, high: ArrayLike, *, level: float = 0.95) -> Estimate:
    """Mean of S numbers of which only ``low <= x <= high`` (S,) is known, one a seed: first passages, say.

    The estimate is the mean of the midpoints. The interval is the smallest that holds Student's interval for *every*
    x in the box. With k = t / sqrt(S), ``mean(x) + k sd(x)`` is convex in x and ``mean(x) - k sd(x)`` concave, so their
    extremes lie at corners: up to 16 seeds all of them are tried. Beyond, sd is bounded by the triangle inequality,
    ``sd(middle + e) <= sd(middle) + |e| / sqrt(S - 1)``, and the interval is wider than it need be.

    Raises:
        ValueError: As `paired_difference`, or if a ``low`` exceeds its ``high``.
    """
    _check_level(level)
    least, most = _pair(low, high)
    if (least > most).any():
        where = int(np.argmax(least > most))
        raise ValueError(f"low must not exceed high, got {least[where]} and {most[where]} at seed {where}")
    seeds, middle, half = least.size, (least + most) / 2, (most - least) / 2
    if seeds == 1:
        return Estimate(float(middle[0]), math.nan, math.nan, 1, _named("mean of intervals", 1, level))
    scale = _student_quantile(seeds, level) / math.sqrt(seeds)
    if seeds <= _CORNERS:
        signs = 2.0 * ((np.arange(2**seeds)[:, None] >> np.arange(seeds)) & 1) - 1
        corners = middle + signs * half
        centre, reach = corners.mean(axis=1), scale * corners.std(axis=1, ddof=1)
        bottom, top = float((centre - reach).min()), float((centre + reach).max())
    else:
        spread = middle.std(ddof=1) + np.linalg.norm(half) / math.sqrt(seeds - 1)
        width = half.mean() + scale * spread
        bottom, top = float(middle.mean() - width), float(middle.mean() + width)
    name = _named("mean of intervals", seeds, level, "Student t, whatever the values in them,")
    return Estimate(float(middle.mean()), bottom, top, seeds, name)


def paired_difference(a: ArrayLike, b: ArrayLike, *, level: float = 0.95) -> Estimate:
    """Mean of ``a - b`` over S seeds, paired: entry s of both is seed s.

    Raises:
        ValueError: If the lengths differ, there is no seed, or a value is not finite.
    """
    x, y = _pair(a, b)
    found = mean(x - y, level=level)
    return Estimate(found.estimate, found.low, found.high, found.n, _named("paired difference", found.n, level))


def log_ratio(a: ArrayLike, b: ArrayLike, *, level: float = 0.95) -> Estimate:
    """Mean of ``log(a / b)`` over S paired seeds: the logarithm of the geometric mean of the ratios.

    Raises:
        ValueError: As `paired_difference`, or if a value is not positive.
    """
    x, y = _pair(a, b)
    for name, side in (("a", x), ("b", y)):
        if side.min() <= 0:
            raise ValueError(f"a log ratio needs positive values, {name} has {side.min()} at seed {int(side.argmin())}")
    found = mean(np.log(x) - np.log(y), level=level)
    return Estimate(found.estimate, found.low, found.high, found.n, _named("mean log ratio", found.n, level))


def relative_reduction(
    a: ArrayLike, b: ArrayLike, *, method: Literal["log_ratio", "fieller"] = "log_ratio", level: float = 0.95
) -> Estimate:
    """How much smaller ``a`` is than ``b``, as ``1 - a/b``, over S paired seeds.

    Two estimands, and neither takes the standard error of the S ratios at face value (a ratio is skewed, and with few
    seeds a symmetric interval around its mean misses):

    - ``"log_ratio"``, the default: 1 minus the *geometric mean of the ratios*, Student's t on the logarithms. For
      positive quantities whose seeds differ by factors, such as distances, norms and losses.
    - ``"fieller"``: 1 minus the *ratio of the means*. All ratios r that a paired t test of ``mean(a - r b) = 0`` does
      not reject. For quantities that may be zero or negative. If the mean of ``b`` cannot be told from zero, no finite
      bound exists, and the bounds are infinite.

    Raises:
        ValueError: As `log_ratio`; with ``"fieller"``, values may have any sign but the mean of ``b`` must not be 0.
    """
    if method == "log_ratio":
        found = log_ratio(a, b, level=level)
        low, high = 1 - _exp(found.high), 1 - _exp(found.low)
        name = _named("1 - geometric mean ratio", found.n, level, "Student t on log ratios")
        return Estimate(1 - _exp(found.estimate), low, high, found.n, name)
    if method != "fieller":
        raise ValueError(f"method must be 'log_ratio' or 'fieller', got {method!r}")
    _check_level(level)
    x, y = _pair(a, b)
    if y.mean() == 0:
        raise ValueError("a ratio of means needs a denominator: the mean of b is 0")
    ratio_low, ratio_high = _fieller(x, y, level)
    name = _named("1 - ratio of means", x.size, level, "Fieller, paired")
    return Estimate(float(1 - x.mean() / y.mean()), 1 - ratio_high, 1 - ratio_low, int(x.size), name)


def area_under_curve(
    steps: ArrayLike, values: ArrayLike, *, start: float | None = None, stop: float | None = None
) -> float:
    """Mean height of one run's curve from ``start`` to ``stop`` (default: all of it), by the trapezoidal rule.

    The area is divided by its width, so it has the unit of ``values`` (T,) and does not grow with the length of
    training. The ends are interpolated.

    Raises:
        ValueError: If ``steps`` (T,) does not strictly increase, has fewer than two entries, a value is not finite, or
        the
            run was not recorded over all of ``start`` to ``stop`` (one that diverged, say).
    """
    x, y = _curve(steps, values)
    _check_finite("values", y)
    first = float(x[0]) if start is None else float(start)
    last = float(x[-1]) if stop is None else float(stop)
    if not first < last:
        raise ValueError(f"the area needs start < stop, got {first:g} and {last:g}")
    if first < x[0] or last > x[-1]:
        raise ValueError(f"the curve is known from step {x[0]:g} to {x[-1]:g}, not from {first:g} to {last:g}")
    inside = (x > first) & (x < last)
    knots = np.concatenate(([first], x[inside], [last]))
    heights = np.interp(knots, x, y)
    return float(np.sum(np.diff(knots) * (heights[1:] + heights[:-1]) / 2) / (last - first))


def first_passage(
    steps: ArrayLike, values: ArrayLike, target: float, *, rising: bool = True, diverged: bool = False
) -> Passage:
    """First evaluation at which a run's ``values`` (T,) reach ``target``: at or above it (``rising``) or at or below.

    A NaN has not reached anything. ``diverged`` says how the run ended, so that a run that can no longer pass is not
    counted as one that was merely stopped too soon.

    Raises:
        ValueError: If ``steps`` (T,) does not strictly increase or is empty, or ``target`` is not finite.
    """
    x, y = _curve(steps, values, at_least=1)
    if not math.isfinite(target):
        raise ValueError(f"the target must be finite, got {target}")
    met = np.flatnonzero(y >= target if rising else y <= target)
    if met.size == 0:
        return Passage(after=float(x[-1]), by=math.inf, diverged=diverged)
    first = int(met[0])
    return Passage(after=float(x[first - 1]) if first else -math.inf, by=float(x[first]), diverged=diverged)


def median_passage(passages: Sequence[Passage], *, level: float = 0.95) -> MedianPassage:
    """Median first passage over runs, kept as what is known of it; censored runs count where they stand.

    The confidence bounds are order statistics (the sign test turned around), exact for any law: the k-th smallest and
    k-th largest, k the largest with ``P(Binomial(n, 1/2) < k) <= (1 - level)/2``, of the lower and upper ends
    respectively.

    Raises:
        ValueError: If there is no run or ``level`` is not in (0, 1).
    """
    _check_level(level)
    runs = len(passages)
    if runs == 0:
        raise ValueError("a median needs at least one run")
    # A diverged run is not "more than its last step": it never passes, so it stands above every run that was stopped.
    lower = np.sort([math.inf if p.diverged and not p.reached else p.after for p in passages])
    upper = np.sort([p.by for p in passages])
    rank = _sign_test_rank(runs, level)
    name = f"median of {runs} runs"
    low = high = math.nan
    if rank:
        low, high = float(lower[rank - 1]), float(upper[runs - rank])
        name += f", {level:.0%} by order statistics"
    else:
        name += f", too few for a {level:.0%} interval"
    reached = sum(p.reached for p in passages)
    return MedianPassage(_middle(upper), _middle_bound(lower), low, high, runs, reached, name)


def typical_unit(trajectories: ArrayLike) -> int:
    """Index of the unit whose trajectory is nearest to the unit-wise median one.

    ``trajectories`` (U, T, Q) holds Q percentiles of U units at T steps. The median is taken over units at each step
    and percentile; near means the Euclidean distance over all T x Q entries; ties go to the lowest index. Steps at
    which no unit is finite are left out (a run that diverged), and a unit that is not finite elsewhere is not a
    candidate.

    Raises:
        ValueError: If the shape is not (U, T, Q) or no unit can be judged.
    """
    table = np.asarray(trajectories, dtype=np.float64)
    if table.ndim != 3 or 0 in table.shape:
        raise ValueError(f"trajectories must have shape (units, steps, percentiles), none of them 0, got {table.shape}")
    finite = np.isfinite(table)
    table, finite = table[:, finite.any(axis=(0, 2))], finite[:, finite.any(axis=(0, 2))]
    candidates = np.flatnonzero(finite.all(axis=(1, 2)))
    if table.shape[1] == 0 or candidates.size == 0:
        raise ValueError("no unit has a finite trajectory, so none is typical")
    middle = np.nanmedian(np.where(finite, table, np.nan), axis=0)
    distance = np.sqrt(((table[candidates] - middle) ** 2).sum(axis=(1, 2)))
    return int(candidates[int(distance.argmin())])


def _student_quantile(seeds: int, level: float) -> float:
    return float(stdtrit(seeds - 1, (1 + level) / 2))


def _sign_test_rank(runs: int, level: float) -> int:
    """Largest k with ``P(Binomial(runs, 1/2) < k) <= (1 - level)/2``; 0 if there is none."""
    rank = 0
    while rank < runs // 2 and float(bdtr(rank, runs, 0.5)) <= (1 - level) / 2:
        rank += 1
    return rank


def _fieller(x: Array, y: Array, level: float) -> tuple[float, float]:
    """Smallest and largest r with ``mean(x - r y)^2 <= t^2 var(x - r y)/S``, a quadratic inequality in r."""
    seeds = x.size
    if seeds == 1:
        return math.nan, math.nan
    scale = _student_quantile(seeds, level) ** 2 / seeds
    cov = np.cov(x, y)
    a = y.mean() ** 2 - scale * cov[1, 1]
    b = x.mean() * y.mean() - scale * cov[0, 1]
    c = x.mean() ** 2 - scale * cov[0, 0]
    if a <= 0:  # zero is among the plausible means of y: the accepted ratios are unbounded
        return -math.inf, math.inf
    # The ratio of the means is always accepted: it lies between the ends and b^2 >= a c, both up to rounding.
    root = math.sqrt(max(b * b - a * c, 0.0))
    ratio = x.mean() / y.mean()
    return float(min((b - root) / a, ratio)), float(max((b + root) / a, ratio))


def _exp(x: float) -> float:
    """Exponential that ends at inf: with two seeds the upper end of a log ratio may be past the largest float."""
    return math.inf if x > math.log(sys.float_info.max) else math.exp(x)


def _middle(ordered: Array) -> float:
    """Median of sorted values that may be infinite (numpy's would turn inf - inf into NaN)."""
    left, right = float(ordered[(ordered.size - 1) // 2]), float(ordered[ordered.size // 2])
    return left if left == right else (left + right) / 2


def _middle_bound(ordered: Array) -> float:
    """As `_middle`, for lower ends: between a known end and a run that never passes, the known end still bounds."""
    left, right = float(ordered[(ordered.size - 1) // 2]), float(ordered[ordered.size // 2])
    return left if math.isinf(right) else (left + right) / 2


def _named(what: str, seeds: int, level: float, how: str = "Student t") -> str:
    return f"{what}, {NO_INTERVAL}" if seeds == 1 else f"{what}, {level:.0%} {how} over {seeds} paired seeds"


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")


def _check_finite(name: str, values: Array) -> None:
    if not np.isfinite(values).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise ValueError(f"{name} must be finite, got {values[where]} at {where if len(where) > 1 else where[0]}")


def _sample(name: str, values: ArrayLike) -> Array:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or sample.size == 0:
        raise ValueError(f"{name} must be a sequence with at least one value, got shape {sample.shape}")
    _check_finite(name, sample)
    return sample


def _pair(a: ArrayLike, b: ArrayLike) -> tuple[Array, Array]:
    x, y = _sample("a", a), _sample("b", b)
    if x.size != y.size:
        raise ValueError(f"pairs need one value of each arm per seed, got {x.size} and {y.size}")
    return x, y


def _curve(steps: ArrayLike, values: ArrayLike, at_least: int = 2) -> tuple[Array, Array]:
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape or x.size < at_least:
        raise ValueError(f"a curve needs {at_least} or more steps with a value each, got {x.shape} and {y.shape}")
    _check_finite("steps", x)
    if not (np.diff(x) > 0).all():
        raise ValueError("the steps of a curve must increase strictly")
    return x, y
