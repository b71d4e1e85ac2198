"""The slow twin of ``diagnostics.quantiles``: one unit at a time, python's sort, numpy's quantile, exact moments.

Every finite float is an integer multiple of 2^-1074, so the moments are ratios of integers, rounded once. The
quantile is numpy's own on sorted float64; where numpy's difference of two neighbours overflows, the exact value stands
in. It cannot see an error shared with ``np.quantile`` itself, nor one of torch's own ``select`` and ``double``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch


@dataclass(frozen=True)
class Unit:
    """One unit's numbers, named as in ``Summary``."""

    count: int
    nonfinite: int
    mean: float
    variance: float
    minimum: float
    maximum: float
    quantiles: list[float]


def units(x: torch.Tensor, unit_dim: int) -> list[list[float]]:
    """The values of each unit, widened to float64 (exact)."""
    return [x.detach().select(unit_dim, unit).double().flatten().tolist() for unit in range(x.shape[unit_dim])]


def summarize(values: Sequence[float], q: Sequence[float]) -> Unit:
    """Summarize one unit's ``values``."""
    finite = sorted(value for value in values if math.isfinite(value))
    lost = len(values) - len(finite)
    if not finite:
        return Unit(0, lost, *[math.nan] * 4, [math.nan] * len(q))
    mean, variance = moments(finite)
    return Unit(len(finite), lost, mean, variance, finite[0], finite[-1], [quantile(finite, each) for each in q])


def moments(finite: Sequence[float]) -> tuple[float, float]:
    """Mean and biased variance, each rounded once from its exact value."""
    n = len(finite)
    ratios = [value.as_integer_ratio() for value in finite]
    smallest_steps = [above << (1075 - below.bit_length()) for above, below in ratios]
    total = sum(smallest_steps)
    squares = sum(k * k for k in smallest_steps)
    return rounded(Fraction(total, n * 2**1074)), rounded(Fraction(n * squares - total * total, n * n * 2**2148))


def quantile(finite: Sequence[float], q: float) -> float:
    """Numpy's quantile of sorted values."""
    with np.errstate(over="ignore", invalid="ignore"):
        value = float(np.quantile(np.array(finite), q))
    if math.isfinite(value):
        return value
    rank = (len(finite) - 1) * q
    low = int(rank)
    weight = Fraction(rank) - low
    return rounded(Fraction(finite[low]) * (1 - weight) + Fraction(finite[low + 1]) * weight)


def rounded(exact: Fraction) -> float:
    """The nearest float64, infinite beyond its range."""
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf
