"""Slow twin of ``diagnostics.distances``: one unit at a time, plain loops, straight from the definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BINS = 20


def mean(x: Sequence[float]) -> float:
    return math.fsum(x) / len(x)


def sd(x: Sequence[float]) -> float:
    middle = mean(x)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in x) / len(x))


def below(x: Sequence[float], value: float) -> float:
    """The empirical distribution function of ``x`` at ``value``."""
    return sum(1 for one in x if one <= value) / len(x)


def integral(p: Sequence[float], q: Sequence[float], power: int) -> float:
    """integral |F - G|^power dx, one step of the pooled order after another."""
    points = sorted({*p, *q})
    return math.fsum(
        abs(below(p, low) - below(q, low)) ** power * (high - low) for low, high in itertools.pairwise(points)
    )


def energy_of_pairs(p: Sequence[float], q: Sequence[float]) -> float:
    """2 E|X - Y| - E|X - X'| - E|Y - Y'| over all pairs: the square of the energy distance, without an integral."""

    def expected(a: Sequence[float], b: Sequence[float]) -> float:
        return math.fsum(abs(x - y) for x in a for y in b) / (len(a) * len(b))

    return 2 * expected(p, q) - expected(p, p) - expected(q, q)


def histograms(p: Sequence[float], q: Sequence[float]) -> tuple[list[float], list[float]]:
    pool = sorted([*p, *q])
    edges = sorted({pool[math.ceil(k * len(pool) / BINS) - 1] for k in range(1, BINS + 1)})

    def shares(x: Sequence[float]) -> list[float]:
        counts = [0] * len(edges)
        for value in x:
            counts[next(k for k, edge in enumerate(edges) if value <= edge)] += 1
        return [(count + 0.5) / (len(x) + 0.5 * len(edges)) for count in counts]

    return shares(p), shares(q)


def kl(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * math.log(x / y) for x, y in zip(a, b, strict=True))


def kl_of_gaussians(mean_p: float, sd_p: float, mean_q: float, sd_q: float) -> float:
    return math.log(sd_q / sd_p) + (sd_p**2 + (mean_p - mean_q) ** 2) / (2 * sd_q**2) - 0.5


def distance(name: str, p: Sequence[float], q: Sequence[float]) -> float:
    """Of samples whose values all are finite, and neither of which is constant."""
    s, t = sd(p), sd(q)
    pooled = math.sqrt((s**2 + t**2) / 2)
    if name == "mean_shift":
        return abs(mean(p) - mean(q)) / pooled
    if name == "std_shift":
        return abs(math.log(s / t))
    if name == "wasserstein1":
        return integral(p, q, 1) / pooled
    if name == "energy":
        return math.sqrt(2 * integral(p, q, 2)) / math.sqrt(pooled)
    if name == "ks":
        return max(abs(below(p, value) - below(q, value)) for value in {*p, *q})
    if name == "kl_gaussian":
        return (kl_of_gaussians(mean(p), s, mean(q), t) + kl_of_gaussians(mean(q), t, mean(p), s)) / 2
    a, b = histograms(p, q)
    if name == "kl_histogram":
        return (kl(a, b) + kl(b, a)) / 2
    if name == "jensen_shannon":
        middle = [(x + y) / 2 for x, y in zip(a, b, strict=True)]
        return (kl(a, middle) + kl(b, middle)) / 2
    raise ValueError(name)
