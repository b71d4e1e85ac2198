"""Distances between two samples of a unit's values: the numbers that drift is made of.

Per unit, ``p`` is a sample of n values and ``q`` one of m values; U units are compared at once. F and G are their
empirical distribution functions, mu and s their means and biased standard deviations, and
``sd = sqrt((s_p^2 + s_q^2) / 2)``. Every distance is symmetric to the last bit and exactly 0 between equal samples:

- ``mean_shift``      |mu_p - mu_q| / sd
- ``std_shift``       |log(s_p / s_q)|
- ``wasserstein1``    integral |F - G| dx / sd, exact
- ``kl_gaussian``     (KL(p, q) + KL(q, p)) / 2 of the Gaussians with these moments, in nats
- ``kl_histogram``    (KL(p, q) + KL(q, p)) / 2 of two histograms, in nats
- ``jensen_shannon``  divergence of the same two histograms, in nats: at most log 2
- ``ks``              max |F - G|
- ``energy``          sqrt(2 integral (F - G)^2 dx) / sqrt(sd), scipy's ``energy_distance`` over sqrt(sd)

All are unchanged by the same ``x -> a x + b`` with a > 0 in both samples, and all but the two histogram distances also
with a < 0. ``ks`` and the histogram distances depend on the order of the values only.

*Histograms.* Sort the N = n + m pooled values, ``z_1 <= ... <= z_N``. Edge k of K = 20 is ``z_ceil(k N / K)``; bin k
holds what lies above edge k - 1, up to and including edge k, so equal values always share a bin. Edges that coincide
are one edge: a bin into which no pooled value could fall does not exist. With B <= K bins left, the share of a bin in p
is (its count in p + 0.5) / (n + B / 2). The pool does not know which sample came first, so neither does the distance.

*Constant units.* Both s zero: every distance is 0 if the two constants are equal and inf if not, except ``ks`` (then 1)
and the histogram distances, which stay finite. One s zero: ``std_shift`` and ``kl_gaussian`` are inf; the others follow
their formula, with the other sample's s / sqrt(2) for sd.

*Non-finite values.* In paired samples (the same examples seen twice, so n = m) an example that is not finite in either
leaves both; in unpaired ones it leaves its own. Those left out are counted, and a unit with fewer than two values left
in either sample is NaN; no distance is NaN otherwise. A float64 beyond 2^900 counts as not finite: sums would overflow.

*Floor.* The same distances between random halves of one sample: what an unpaired measurement of half the size could not
tell from nothing.

How it is computed, and what the tests lean on. Sort both once; merge; walk the pooled order with
``lead_k = m #{p <= z_k} - n #{q <= z_k} = n m (F - G)(z_k)``, an exact integer. Then the integrals are sums of |lead|
and lead^2 over the gaps ``z_(k+1) - z_k``, ``ks`` is the largest |lead| that closes a tie, and the histograms are read
off ``lead``. With n = m, ``wasserstein1`` is the mean of ``|p_(i) - q_(i)|`` over the sorted samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["DISTANCES", "Comparison", "Floor", "Sample", "distance", "distances", "floor", "random_halves"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

DISTANCES = (
    "mean_shift",
    "std_shift",
    "wasserstein1",
    "kl_gaussian",
    "kl_histogram",
    "jensen_shannon",
    "ks",
    "energy",
)
_POOLED = frozenset(DISTANCES) - {"mean_shift", "std_shift", "kl_gaussian"}  # more than moments is needed
BINS = 20
_WALKING = 2**21  # steps of a walk that are kept at a time
LARGEST = 2.0**900  # of a float64: (largest difference) * (n m)^2 * N must not overflow


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and biased standard deviation of U units; the mean in two parts, so that differences of means stay exact."""

    center: Floats  # (U,) one of the unit's own values, near its median; NaN without any
    offset: Floats  # (U,) mean - center, at most one sd
    sd: Floats  # (U,) biased; exactly 0 for a constant unit; NaN without any value

    @property
    def mean(self) -> Floats:
        """(U,) mean."""
        return self.center + self.offset

    @property
    def variance(self) -> Floats:
        """(U,) biased variance."""
        with np.errstate(over="ignore"):
            return self.sd**2


@dataclass(frozen=True, eq=False)
class Sample:
    """n values of each of U units, sorted and summed once, ready for any number of comparisons.

    Made by ``Sample.of``; the arrays are read-only.
    """

    values: NDArray[np.floating[Any]]  # (n, U) as given (half types upcast to float32); not finite: NaN
    sorted: Floats  # (U, n) ascending; a unit's ``count`` finite values, then +inf
    count: Integers  # (U,) finite values
    moments: Moments

    def __post_init__(self) -> None:
        moments = self.moments
        for array in (self.values, self.sorted, self.count, moments.center, moments.offset, moments.sd):
            array.setflags(write=False)

    @classmethod
    def of(cls, x: torch.Tensor | NDArray[Any]) -> Self:
        """Take in ``x`` (n, U): floating point of up to 64 bits, integer or boolean, on any device. ``x`` is copied.

        Raises:
            ValueError: If ``x`` is not two-dimensional, has no unit or fewer than 2 examples, or is of another type.
        """
        rows = _rows(x)
        ordered = np.sort(rows, axis=1)
        limit = _limit(rows.dtype)
        count = np.full(len(rows), rows.shape[1], dtype=np.int64)
        # NaN and inf sort to the ends: two columns tell whether all is well.
        if not ((ordered[:, 0] >= -limit) & (ordered[:, -1] <= limit)).all():
            rows[~(np.abs(rows) <= limit)] = np.nan
            ordered = np.sort(rows, axis=1)
            missing = np.isnan(ordered)
            ordered[missing] = np.inf
            count -= missing.sum(axis=1)
        ordered = ordered.astype(np.float64, copy=False)
        return cls(rows.T, ordered, count, _moments(ordered, count))

    @property
    def size(self) -> int:
        """n, the number of examples, finite or not."""
        return int(self.sorted.shape[1])

    @property
    def mean(self) -> Floats:
        """(U,) mean of the finite values; NaN without any."""
        return self.moments.mean

    @property
    def variance(self) -> Floats:
        """(U,) biased variance of the finite values; NaN without any."""
        return self.moments.variance

    def standardized(self) -> Self:
        """(x - mean) / sd, with mean 0 and sd 1 exactly; a constant unit becomes 0 with sd 0.

        Distances between standardized samples are *shape drift*: what is left when moments cannot move.
        """
        center, offset, sd = self.moments.center, self.moments.offset, self.moments.sd
        unit = np.where(sd > 0, sd, 1.0)
        # In this order the map is monotonic also after rounding, so what was sorted stays sorted.
        values = np.ascontiguousarray(self.values.T, dtype=np.float64) - center[:, None]
        ordered = self.sorted - center[:, None]
        for x in (values, ordered):
            x -= offset[:, None]
            x /= unit[:, None]
        empty = self.count == 0
        ordered[empty] = np.inf
        zero = np.where(empty, np.nan, 0.0)
        return type(self)(values.T, ordered, self.count.copy(), Moments(zero, zero.copy(), np.where(sd > 0, 1.0, sd)))


@dataclass(frozen=True, eq=False)
class Comparison:
    """Distances between two samples of U units."""

    values: dict[str, Floats]  # distance -> (U,); dimensionless or nats
    nonfinite: Integers  # (U,) examples left out: of the pair if paired, else of both samples together


@dataclass(frozen=True, eq=False)
class Floor:
    """What distances random halves of one sample of U units have, over a number of splits."""

    mean: dict[str, Floats]  # distance -> (U,)
    percentile95: dict[str, Floats]  # distance -> (U,), which one more split exceeds with probability 0.05
    splits: int


def distance(
    name: str,
    p: Sample | torch.Tensor | NDArray[Any],
    q: Sample | torch.Tensor | NDArray[Any],
    *,
    paired: bool = True,
    shape: bool = False,
) -> Floats:
    """One distance (U,) between samples ``p`` (n, U) and ``q`` (m, U); see the module and ``distances``.

    Raises:
        ValueError: As ``distances``.
    """
    return distances((name,), p, q, paired=paired, shape=shape).values[name]


def distances(
    names: Sequence[str],
    p: Sample | torch.Tensor | NDArray[Any],
    q: Sample | torch.Tensor | NDArray[Any],
    *,
    paired: bool = True,
    shape: bool = False,
) -> Comparison:
    """Compare samples ``p`` (n, U) and ``q`` (m, U) unit by unit, sharing one sort, one set of moments and one merge.

    ``paired`` says that row i of both is the same example; it decides what a non-finite value takes with it.
    ``shape`` standardizes both samples first, after the non-finite values have left. Values that tie after that do so
    only up to rounding, which ``ks`` and the histogram distances can see; the others cannot.

    Raises:
        ValueError: If a name is unknown or given twice, or there is none; if the samples differ in their number of
            units, or, paired, of examples; or as ``Sample.of``.
    """
    names = check_distances(names)
    p, q = _sample(p), _sample(q)
    if len(p.count) != len(q.count):
        raise ValueError(f"both samples need the same units, got {len(p.count)} and {len(q.count)}")
    if paired:
        if p.size != q.size:
            raise ValueError(f"paired samples need the same examples, got {p.size} and {q.size}; or say paired=False")
        p, q = _pair(p, q)
    nonfinite = p.size - p.count if paired else (p.size - p.count) + (q.size - q.count)
    if shape:
        p, q = p.standardized(), q.standardized()
    matched = p.size == q.size and np.array_equal(p.count, q.count)
    raw = {"wasserstein1": _matched_transport(p, q)} if matched and "wasserstein1" in names else {}
    pooled = _POOLED.intersection(names).difference(raw)
    if pooled:
        raw |= _merge(p, q).measures(pooled)
    values = _evaluate(names, p.moments, q.moments, raw)
    few = np.minimum(p.count, q.count) < 2
    for value in values.values():
        value[few] = np.nan
    return Comparison(values, nonfinite)


def floor(
    sample: Sample | torch.Tensor | NDArray[Any],
    names: Sequence[str],
    splits: int = 20,
    *,
    seed: int,
    block: int = 1,
    shape: bool = False,
) -> Floor:
    """Distances between random halves of ``sample`` (n, U): their mean and 95th percentile over ``splits``.

    Each ``block`` of consecutive rows belongs to one example (its positions in a map, say) and stays together. A split
    is the same for every unit, see `random_halves`. A unit with fewer than two finite values in some half is NaN.

    Raises:
        ValueError: If n is not a multiple of ``block``, or as ``random_halves`` and ``distances``.
    """
    names = check_distances(names)
    sample = _sample(sample)
    if block < 1 or sample.size % block:
        raise ValueError(f"blocks of {block} do not divide a sample of {sample.size}")
    halves = np.repeat(random_halves(sample.size // block, splits, seed=seed), block, axis=1)
    found = {name: np.empty((splits, len(sample.count))) for name in names}
    whole = np.full(len(sample.count), not shape) & (sample.count == sample.size)
    if whole.any():
        _floor_of_whole(sample, whole, halves, found)
    if not whole.all():
        rest = np.ascontiguousarray(sample.values.T[~whole])
        for s, half in enumerate(halves):
            compared = distances(names, rest[:, half].T, rest[:, ~half].T, paired=False, shape=shape)
            for name in names:
                found[name][s, ~whole] = compared.values[name]
    mean = {name: value.mean(axis=0) for name, value in found.items()}
    return Floor(mean, {name: _percentile95(value) for name, value in found.items()}, splits)


@lru_cache(maxsize=4)  # a probe asks for the same at every floor
def random_halves(examples: int, splits: int, *, seed: int) -> NDArray[np.bool_]:
    """Membership (splits, examples) in the first half of each split; the first half has ``examples // 2`` members.

    Raises:
        ValueError: If there are fewer than 4 examples (two for each half), no split, or ``seed`` is negative.
    """
    if examples < 4:
        raise ValueError(f"a floor needs at least 4 examples, two in each half, got {examples}")
    if splits < 1:
        raise ValueError(f"a floor needs at least one split, got splits={splits}")
    if seed < 0:
        raise ValueError(f"a seed is not negative, got {seed}")
    generator = np.random.default_rng(seed)
    halves = np.zeros((splits, examples), dtype=np.bool_)
    for half in halves:
        half[generator.permutation(examples)[: examples // 2]] = True
    halves.setflags(write=False)
    return halves


def check_distances(names: Sequence[str]) -> tuple[str, ...]:
    """Return ``names`` as a tuple.

    Raises:
        ValueError: If there is none, one is unknown, or one is given twice.
    """
    if isinstance(names, str):
        raise ValueError(f"distances are a sequence of names, got the string {names!r}")
    names = tuple(names)
    unknown = [name for name in names if name not in DISTANCES]
    if unknown:
        raise ValueError(f"unknown distance {unknown[0]!r}; there are {', '.join(DISTANCES)}")
    if not names:
        raise ValueError(f"no distance given; there are {', '.join(DISTANCES)}")
    if len(set(names)) < len(names):
        raise ValueError(f"a distance is given twice: {', '.join(names)}")
    return names


# Taking samples in.


def _rows(x: torch.Tensor | NDArray[Any]) -> NDArray[np.floating[Any]]:
    """Copy ``x`` (n, U) to (U, n), one unit's values side by side, as float32 or float64."""
    if isinstance(x, torch.Tensor):
        x = x.detach()
        if x.is_floating_point() and x.element_size() < 4:
            x = x.float()  # numpy knows no bfloat16
        x = x.cpu().numpy()
    else:
        x = np.asarray(x)
    if x.ndim != 2:
        raise ValueError(f"a sample is (examples, units), got shape {x.shape}")
    if x.dtype.kind not in "fiub" or x.dtype.itemsize > 8:
        raise ValueError(f"a sample is floating point of up to 64 bits, integer or boolean, got {x.dtype}")
    examples, units = x.shape
    if examples < 2:
        raise ValueError(f"a sample needs at least 2 examples, got {examples}")
    if units < 1:
        raise ValueError("a sample needs at least one unit, got none")
    narrow = x.dtype.kind == "f" and x.dtype.itemsize <= 4
    return np.array(x.T, dtype=np.float32 if narrow else np.float64, order="C")


def _limit(dtype: np.dtype[Any]) -> np.floating[Any]:
    """The largest magnitude that counts as finite, in ``dtype`` itself: 2^900 in float32 would be inf."""
    limit: np.floating[Any] = dtype.type(min(LARGEST, float(np.finfo(dtype).max)))
    return limit


def _moments(ordered: Floats, count: Integers) -> Moments:
    """Moments of the first ``count`` (U,) values of each row of ``ordered`` (U, n), which ascends."""
    unit = np.arange(len(ordered))
    center = np.where(count > 0, ordered[unit, count // 2], np.nan)
    deviation = ordered - center[:, None]
    if count.min() < ordered.shape[1]:
        deviation[np.arange(ordered.shape[1]) >= count[:, None]] = 0.0
    deviation, exponent = _scaled(deviation, np.maximum(-deviation[:, 0], deviation[unit, count - 1]))
    divisor = np.maximum(count, 1)
    mean = deviation.sum(axis=1) / divisor
    # A mean is at most one sd away from a median, so no more than one bit cancels here.
    variance = np.einsum("ij,ij->i", deviation, deviation) / divisor - mean**2
    sd = np.ldexp(np.sqrt(variance), exponent)
    return Moments(center, np.ldexp(mean, exponent), np.where(count > 0, sd, np.nan))


def _scaled(deviation: Floats, reach: Floats) -> tuple[Floats, NDArray[np.int32]]:
    """``deviation`` (U, n) with the exponents (U,) that were taken out, where squares would over- or underflow."""
    exponent = np.frexp(reach)[1]
    exponent = np.where(np.abs(exponent) > 400, exponent, 0).astype(np.int32)
    if exponent.any():
        deviation = np.ldexp(deviation, -exponent[:, None])
    return deviation, exponent


def _sample(x: Sample | torch.Tensor | NDArray[Any]) -> Sample:
    return x if isinstance(x, Sample) else Sample.of(x)


def _pair(p: Sample, q: Sample) -> tuple[Sample, Sample]:
    """Both without the values that are not finite in the other."""
    if (p.count == p.size).all() and (q.count == q.size).all():
        return p, q
    missing = np.isnan(p.values) | np.isnan(q.values)
    return Sample.of(np.where(missing, np.nan, p.values)), Sample.of(np.where(missing, np.nan, q.values))


# Two samples in one order.


@dataclass(frozen=True, eq=False)
class _Pool:
    """N pooled values of U units in ascending order, missing ones last and equal to the largest."""

    gaps: Floats  # (U, N) from one pooled value to the next; 0 within a tie and after the last
    lead: Floats  # (U, N) m #{p <= z_k} - n #{q <= z_k}, exact integers; means nothing inside a tie
    n: Integers  # (U,) finite values of p
    m: Integers  # (U,) finite values of q

    def measures(self, names: Collection[str]) -> dict[str, Floats]:
        """Those of ``names`` a pool knows, (U,), ``wasserstein1`` and ``energy`` not yet scaled. Uses up ``lead``."""
        found: dict[str, Floats] = {}
        scale = np.maximum(self.n.astype(np.float64) * self.m, 1.0)
        if not {"kl_histogram", "jensen_shannon"}.isdisjoint(names):
            shares = self.shares()
            found |= {"kl_histogram": _kl_histogram(*shares), "jensen_shannon": _jensen_shannon(*shares)}
        size = np.abs(self.lead, out=self.lead)
        if "wasserstein1" in names:  # integral |F - G| dx
            found["wasserstein1"] = np.einsum("ij,ij->i", size, self.gaps) / scale
        if "ks" in names:
            found["ks"] = (size * (self.gaps > 0)).max(axis=1) / scale
        if "energy" in names:  # sqrt(2 integral (F - G)^2 dx)
            found["energy"] = np.sqrt(2 * np.einsum("ij,ij->i", np.square(size, out=size), self.gaps)) / scale
        return found

    def shares(self) -> tuple[Floats, Floats]:
        """The histograms of p and q, each (U, BINS); 1 in both for a bin that does not exist."""
        units, total = self.lead.shape
        n, m, pooled = self.n[:, None], self.m[:, None], (self.n + self.m)[:, None]
        rank = np.maximum(-(-np.arange(1, BINS + 1) * pooled // BINS), 1) - 1
        # Where the tie of each edge ends: the next place in the flattened array that a gap follows.
        closing = self.gaps > 0
        closing[:, -1] = True
        places = np.flatnonzero(closing)
        start = total * np.arange(units)[:, None]
        end = places[np.searchsorted(places, start + rank)] - start
        below = np.minimum(end + 1, pooled)
        below_p = (np.take_along_axis(self.lead, end, axis=1) + below * n) / np.maximum(pooled, 1)
        count_p = np.diff(below_p, axis=1, prepend=0)
        count_q = np.diff(below - below_p, axis=1, prepend=0)
        exists = count_p + count_q > 0
        smoothing = 0.5 * exists.sum(axis=1, keepdims=True)
        share_p = np.where(exists, (count_p + 0.5) / np.maximum(n + smoothing, 1), 1.0)
        share_q = np.where(exists, (count_q + 0.5) / np.maximum(m + smoothing, 1), 1.0)
        return share_p, share_q


def _merge(p: Sample, q: Sample) -> _Pool:
    both = np.concatenate([p.sorted, q.sorted], axis=1)
    units, total = both.shape
    order = both.argsort(axis=1, kind="stable")  # two ascending runs: timsort merges them in O(N)
    from_p = order < p.size
    n, m = p.count[:, None], q.count[:, None]
    step: Floats = np.multiply(from_p, n + m, dtype=np.float64)
    step -= n  # m for a value of p, -n for one of q
    ragged = p.count.min() < p.size or q.count.min() < q.size
    if ragged:
        step *= np.where(from_p, order, order - p.size) < np.where(from_p, n, m)
    order += total * np.arange(units)[:, None]
    pooled = both.ravel().take(order)
    if ragged:
        largest = pooled[np.arange(units), np.maximum(p.count + q.count, 1) - 1]
        np.minimum(pooled, np.where(np.isinf(largest), 0.0, largest)[:, None], out=pooled)
    return _Pool(_gaps(pooled), _running_sum(step), p.count, q.count)


def _gaps(ordered: Floats) -> Floats:
    """(U, N) from each of ``ordered`` (U, N) to the next of its row, and 0 after the last."""
    gaps = np.zeros_like(ordered)
    np.subtract(ordered[:, 1:], ordered[:, :-1], out=gaps[:, :-1])
    return gaps


def _running_sum(x: Floats) -> Floats:
    """Cumulative sum along each row of ``x`` (U, N), in place; torch's is four times as fast as numpy's."""
    torch.from_numpy(x).cumsum_(dim=1)
    return x


def _matched_transport(p: Sample, q: Sample) -> Floats:
    """(U,) integral |F - G| dx of samples with as many values each: the sorted ones are transported in order."""
    with np.errstate(invalid="ignore"):
        moved = p.sorted - q.sorted
    np.abs(moved, out=moved)
    if p.count.min() < p.size:
        moved[np.arange(p.size) >= p.count[:, None]] = 0.0
    total: Floats = moved.sum(axis=1)
    return total / np.maximum(p.count, 1)


# The distances.


def _evaluate(names: tuple[str, ...], p: Moments, q: Moments, raw: Mapping[str, Floats]) -> dict[str, Floats]:
    """Every distance of ``names``, in the shape of the moments; ``raw`` is what comes from the order of the values."""
    sd = np.hypot(np.maximum(p.sd, q.sd), np.minimum(p.sd, q.sd)) / np.sqrt(2.0)
    moved = np.abs((p.center - q.center) + (p.offset - q.offset))

    def value(name: str) -> Floats:
        match name:
            case "mean_shift":
                return _per(moved, sd)
            case "std_shift":
                return _std_shift(p.sd, q.sd, moved)
            case "kl_gaussian":
                return _kl_gaussian(p.sd, q.sd, moved)
            case "wasserstein1":
                return _per(raw[name], sd)
            case "energy":
                return _per(raw[name], np.sqrt(sd))
            case _:
                return raw[name]

    return {name: value(name) for name in names}


def _per(x: Floats, sd: Floats) -> Floats:
    """``x / sd`` for x >= 0; without spread, 0 for nothing and inf for something."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(sd > 0, x / sd, np.where(x > 0, np.inf, 0.0))


def _std_shift(sd_p: Floats, sd_q: Floats, moved: Floats) -> Floats:
    low, high = np.minimum(sd_p, sd_q), np.maximum(sd_p, sd_q)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # log1p keeps the digits of a small change; the difference of logarithms does not overflow for a huge one.
        shift = np.where(high < 2 * low, np.log1p((high - low) / low), np.log(high) - np.log(low))
    return np.where(high > 0, shift, np.where(moved > 0, np.inf, 0.0))


def _kl_gaussian(sd_p: Floats, sd_q: Floats, moved: Floats) -> Floats:
    """((s_p/s_q - s_q/s_p)^2 + (d/s_p)^2 + (d/s_q)^2) / 4 with d = mu_p - mu_q: no cancellation, no sign to lose."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        spread = (sd_p - sd_q) / sd_p + (sd_p - sd_q) / sd_q
        value = (spread**2 + ((moved / sd_p) ** 2 + (moved / sd_q) ** 2)) / 4
        one = np.where(np.minimum(sd_p, sd_q) > 0, value, np.inf)
    return np.where(np.maximum(sd_p, sd_q) > 0, one, np.where(moved > 0, np.inf, 0.0))


def _kl_histogram(p: Floats, q: Floats) -> Floats:
    divergence: Floats = ((p - q) * (np.log(p) - np.log(q))).sum(axis=1)
    return divergence / 2


def _jensen_shannon(p: Floats, q: Floats) -> Floats:
    """With r = (p - q) / (p + q) a bin adds (p + q)/4 ((1 + r) log(1 + r) + (1 - r) log(1 - r)), never below 0."""
    r = (p - q) / (p + q)
    part = (1 + r) * np.log1p(r) + (1 - r) * np.log1p(-r)
    total: Floats = ((p + q) * part).sum(axis=1)
    return total / 4


# The floor.


def _floor_of_whole(
    sample: Sample, whole: NDArray[np.bool_], halves: NDArray[np.bool_], found: dict[str, Floats]
) -> None:
    """Fill the columns ``whole`` (units without missing values) of ``found``: distance -> (splits, U).

    Both halves together are the sample, whatever the split: its order is the pooled order of all of them, so nothing is
    sorted again, and sums over halves are matrix products.
    """
    names = tuple(found)
    rows = np.ascontiguousarray(sample.values.T[whole])
    raw = _half_pools(rows, sample.sorted[whole], halves, _POOLED.intersection(names))
    first, second = _half_moments(rows, sample.moments.center[whole], halves)
    for name, value in _evaluate(names, first, second, raw).items():
        found[name][:, whole] = value


def _half_pools(
    rows: NDArray[np.floating[Any]], ordered: Floats, halves: NDArray[np.bool_], names: Collection[str]
) -> dict[str, Floats]:
    """What `_Pool.measures` finds between the halves of ``rows`` (U, n), and of the same ``ordered``: (splits, U)."""
    found = {name: np.empty((len(halves), len(rows))) for name in names}
    if not found:
        return found
    if set(names) == {"wasserstein1"}:
        return {"wasserstein1": _transport_between_halves(rows, ordered, halves)}
    n, m = int(halves[0].sum()), int((~halves[0]).sum())
    sizes = [np.full(len(rows), size, dtype=np.int64) for size in (n, m)]
    order, gaps = rows.argsort(axis=1), _gaps(ordered)
    lead = np.empty(rows.shape)  # the same for every split: fresh memory costs as much as the sums
    for s, half in enumerate(halves):
        np.where(half, float(m), float(-n)).take(order, out=lead, mode="clip")  # "raise" would not write to it directly
        measured = _Pool(gaps, _running_sum(lead), *sizes).measures(names)
        for name, value in found.items():
            value[s] = measured[name]
    return found


def _transport_between_halves(rows: NDArray[np.floating[Any]], ordered: Floats, halves: NDArray[np.bool_]) -> Floats:
    """(splits, U) integral |F - G| dx between the halves of ``rows`` (U, n), and of the same ``ordered``.

    F - G at the k-th value is a walk with a step up for each member of the first half and one down for each of the
    second. All splits walk at once, in whole numbers, a few units at a time so that they stay in the cache.
    """
    splits, examples = halves.shape
    n, m = int(halves[0].sum()), int((~halves[0]).sum())
    up, down = (1, 1) if n == m else (m, n)
    kind: type[np.signedinteger[Any]] = np.int16 if up * n <= np.iinfo(np.int16).max else np.int64
    steps = np.where(halves.T, up, -down).astype(kind)  # (n, splits)
    order = np.ascontiguousarray(rows.argsort(axis=1).T)
    gaps = np.ascontiguousarray(_gaps(ordered).T)
    total = np.empty((len(rows), splits))
    few = max(1, _WALKING // (examples * splits))
    for first in range(0, len(rows), few):
        part = slice(first, first + few)
        walk: NDArray[np.signedinteger[Any]] = steps.take(order[:, part], axis=0)  # (n, units, splits)
        for before, here in itertools.pairwise(walk):
            np.add(before, here, out=here)
        np.abs(walk, out=walk)
        total[part] = np.einsum("kus,ku->us", walk, gaps[:, part])  # whole numbers times floats: in float64
    return total.T / (up * n)


def _half_moments(
    rows: NDArray[np.floating[Any]], center: Floats, halves: NDArray[np.bool_]
) -> tuple[Moments, Moments]:
    """Moments (splits, U) of both halves of ``rows`` (U, n), which are all finite, for each of ``halves``."""
    deviation = rows - center[:, None]
    deviation, exponent = _scaled(deviation, np.abs(deviation).max(axis=1))
    # torch.tensor copies into memory of its own alignment, on which the last bits of a matrix product can depend.
    powers = [torch.tensor(power).T for power in (deviation, np.square(deviation))]

    def moments(members: NDArray[np.bool_]) -> Moments:
        weight = torch.tensor(members, dtype=torch.float64)
        mean, square = ((weight @ power).numpy() / members.sum(axis=1, keepdims=True) for power in powers)
        variance = square - mean**2
        # The sample's median need not lie within a half: where digits cancelled, look at the half itself.
        thin = variance < 0.01 * square
        variance[thin] = 0.0
        found = Moments(
            np.repeat(center[None], len(members), axis=0),
            np.ldexp(mean, exponent),
            np.ldexp(np.sqrt(variance), exponent),
        )
        for s in np.flatnonzero(thin.any(axis=1)):
            ordered = np.sort(rows[thin[s]][:, members[s]], axis=1).astype(np.float64)
            exact = _moments(ordered, np.full(len(ordered), ordered.shape[1], dtype=np.int64))
            for whole, part in (
                (found.center, exact.center),
                (found.offset, exact.offset),
                (found.sd, exact.sd),
            ):
                whole[s, thin[s]] = part
        return found

    return moments(halves), moments(~halves)


def _percentile95(values: Floats) -> Floats:
    """(U,) of (splits, U): the value that one more split exceeds with probability 0.05.

    One more split is as likely to fall into each of the ``splits + 1`` intervals between those seen: wanted is order
    statistic number 0.95 (splits + 1), between two of them linearly (numpy's "weibull"). numpy's default would be
    exceeded by 9% after 20 splits. With fewer than 19 the largest is the best there is.
    """
    ordered = np.sort(values, axis=0)
    position = min(0.95 * (len(ordered) + 1), len(ordered)) - 1
    low, high = ordered[math.floor(position)], ordered[math.ceil(position)]
    with np.errstate(invalid="ignore"):  # between inf and inf
        found: Floats = np.where(low == high, low, low + position % 1 * (high - low))
    return found
