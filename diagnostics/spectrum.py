"""Singular values of a linear map: all of a matrix's, or the extreme ones of a map that is only known by what it does.

J is P x Q, K = min(P, Q), and s_1 >= ... >= s_K >= 0 are its singular values. Three ways to them, each with its doubt:

- `spectrum` takes matrices (any number, stacked) and gives every value, by LAPACK on J itself. Never by way of J J^T:
  squaring halves the digits, and below ``s_1 sqrt(eps)`` (3e-4 in single precision) nothing would be left.
- `extremes` takes the products v -> J v and u -> J^T u and gives the k largest or smallest values with their residuals,
  by Golub & Kahan's bidiagonalization (1965) with full reorthogonalization in double precision.
- `mean_square` takes v -> J v and gives |J|_F^2 / K with its standard error (Hutchinson 1990): for a v of independent
  signs, E |J v|^2 = |J|_F^2.

The identities the tests lean on: planted singular values come back; an orthogonal map has nothing but ones; a Gaussian
one fills Marchenko & Pastur's interval, sqrt(P/Q) -+ 1 for entries of variance 1/Q.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Extremes",
    "MeanSquare",
    "Spectrum",
    "correlation",
    "effective_dimension",
    "extremes",
    "mean_square",
    "spectrum",
]

Product = Callable[[Tensor], Tensor]
Which = Literal["largest", "smallest"]
Floats = NDArray[np.float64]
_CHECK_EVERY = 8  # steps from one look at the convergence to the next
_BLOCK = 32  # steps that memory is taken for at once


@dataclass(frozen=True)
class Spectrum:
    """All singular values of one matrix or of many stacked ones, and what is read off them.

    A matrix with an entry that is not finite has NaN for every value and every number below.
    """

    values: Tensor  # (..., K), descending
    shape: tuple[int, int]  # P, Q

    @property
    def rank(self) -> Tensor:
        """(...,) values above ``s_1 max(P, Q) eps``, eps that of the matrices' type."""
        least = self.values[..., :1] * max(self.shape) * torch.finfo(self.values.dtype).eps
        return self._defined((self.values > least).sum(-1).to(torch.float64))

    @property
    def spread(self) -> Tensor:
        """(...,) biased standard deviation of log s over the values that count for the rank; NaN for a zero matrix."""
        rank = self.rank
        counted = torch.arange(self.values.shape[-1], device=self.values.device) < rank[..., None]
        logs = torch.where(counted, self.values.double(), 1.0).log()
        deviations = torch.where(counted, logs - (logs.sum(-1) / rank)[..., None], 0.0)
        return (deviations.square().sum(-1) / rank).sqrt()

    @property
    def mean_square(self) -> Tensor:
        """(...,) |J|_F^2 / K."""
        return self.values.double().square().mean(-1)

    @property
    def largest(self) -> Tensor:
        """(...,) s_1."""
        return self.values[..., 0].double()

    @property
    def smallest(self) -> Tensor:
        """(...,) s_K."""
        return self.values[..., -1].double()

    @property
    def distance(self) -> Tensor:
        """(...,) |J J^T - I|_F / sqrt(P): 0 for orthonormal rows, 1 for the zero matrix."""
        rows = self.shape[0]
        missing = rows - self.values.shape[-1]  # directions of the output that J cannot reach
        off = (self.values.double().square() - 1).square().sum(-1)
        return ((off + missing) / rows).sqrt()

    def _defined(self, values: Tensor) -> Tensor:
        return torch.where(self.values[..., 0].isnan(), math.nan, values)


def spectrum(matrices: Tensor) -> Spectrum:
    """Every singular value of ``matrices`` (..., P, Q), in their own precision: exact to about ``eps s_1``.

    Raises:
        ValueError: If there is no row or no column, or fewer than two dimensions.
    """
    if matrices.ndim < 2 or 0 in matrices.shape[-2:]:
        raise ValueError(f"singular values need matrices (..., P, Q), got shape {tuple(matrices.shape)}")
    single = matrices if matrices.dtype in (torch.float32, torch.float64) else matrices.float()
    finite = single.isfinite().flatten(-2).all(-1)  # LAPACK may never return from anything else
    if finite.all():
        values = torch.linalg.svdvals(single)
    else:
        values = torch.linalg.svdvals(torch.where(finite[..., None, None], single, 0.0))
        values = torch.where(finite[..., None], values, math.nan)
    return Spectrum(values, (matrices.shape[-2], matrices.shape[-1]))


@dataclass(frozen=True)
class Extremes:
    """The k singular values at one end of a spectrum, and how far each can be trusted."""

    values: Tensor  # (k,) float64, descending
    residuals: Tensor  # (k,) max(|J v - s u|, |J^T u - s v|), measured: a singular value lies within it of s
    converged: bool  # every residual is at most tolerance times s_1
    products: int  # with J and J^T together
    steps: int


def extremes(
    matvec: Product,
    rmatvec: Product,
    shape: tuple[int, int],
    k: int = 1,
    *,
    which: Which = "largest",
    generator: torch.Generator,
    tolerance: float = 1e-3,
    max_steps: int = 300,
) -> Extremes:
    """The ``k`` largest or smallest singular values of a map that is known by its products.

    The start is a random direction, so a value that occurs many times may be found fewer times. The smallest values are
    found last: unless they stand apart, give ``max_steps`` of about K.

    Args:
        matvec: v (Q,) -> J v (P,). It is handed float64.
        rmatvec: u (P,) -> J^T u (Q,), likewise.
        shape: (P, Q).
        k: How many values.
        which: Which end.
        generator: Of the random start, on the CPU.
        tolerance: Residual, as a share of the largest value, at which a value counts as found. A value is off by at
            most its residual, and where no other is near by its square over the gap.
        max_steps: Of the bidiagonalization; it holds ``8 (P + Q)`` bytes a step.

    Raises:
        ValueError: If ``k`` is not within 1..K, ``which`` or a bound makes no sense, or a product is not finite.
    """
    rows, columns = shape
    smaller = min(rows, columns)
    if not 1 <= k <= smaller:
        raise ValueError(f"a {rows} x {columns} map has {smaller} singular values, asked for k={k}")
    if which not in get_args(Which):
        raise ValueError(f"which must be 'largest' or 'smallest', got {which!r}")
    if not tolerance > 0 or max_steps < 1:
        raise ValueError(f"tolerance and max_steps must be positive, got {tolerance} and {max_steps}")
    # The recurrence ends, and every value is exact, when the domain is used up: let it be the smaller side.
    turned = rows < columns
    forth, back = (rmatvec, matvec) if turned else (matvec, rmatvec)
    work = _Bidiagonal(_Counted(forth), _Counted(back), max(shape), smaller, generator)
    most = min(max(max_steps, k), smaller)
    while work.steps < most:
        work.step()
        if work.steps >= k and (work.steps % _CHECK_EVERY == 0 or work.steps == most):
            values, residuals = work.ritz()
            chosen = residuals[:k] if which == "largest" else residuals[-k:]
            # A smallest value of a subspace is an upper bound only: its residual says when it is a value of J.
            if (chosen <= tolerance * values[0]).all():
                break
    values, residuals = work.triplets(k, which)
    largest = float(work.ritz()[0][0])
    return Extremes(
        torch.from_numpy(values),
        torch.from_numpy(residuals),
        bool((residuals <= tolerance * largest).all()),
        work.forth.count + work.back.count,
        work.steps,
    )


class _Counted:
    """A product that counts its calls and speaks numpy."""

    def __init__(self, product: Product) -> None:
        self.product, self.count = product, 0

    def __call__(self, vector: Floats) -> Floats:
        self.count += 1
        found: Floats = self.product(torch.from_numpy(vector)).detach().double().cpu().numpy().reshape(-1)
        if not np.isfinite(found).all():
            raise ValueError("a product with the map is not finite")
        return found


class _Bidiagonal:
    """J V = U B and J^T U = V B^T + beta v e^T, B upper bidiagonal, grown a column of U and V at a time."""

    def __init__(self, forth: _Counted, back: _Counted, rows: int, columns: int, generator: torch.Generator) -> None:
        self.forth, self.back, self.generator = forth, back, generator
        self.columns = columns
        self.left: Floats = np.empty((0, rows))  # u_1, u_2, ... as rows; grown in blocks
        self.right: Floats = np.empty((0, columns))
        self.diagonal: list[float] = []
        self.above: list[float] = []  # beta_1, beta_2, ...; the last one leads out of the subspace
        self.next = self._fresh(self.right)

    @property
    def steps(self) -> int:
        return len(self.diagonal)

    def step(self) -> None:
        done = self.steps
        if done == len(self.left):
            self.left = np.vstack([self.left, np.empty((_BLOCK, self.left.shape[1]))])
            self.right = np.vstack([self.right, np.empty((_BLOCK, self.columns))])
        self.right[done] = self.next
        alpha, u = self._beyond(self.forth(self.next), self.left[:done])
        self.left[done] = u
        self.diagonal.append(alpha)
        if done + 1 == self.columns:
            self.above.append(0.0)
            return
        beta, self.next = self._beyond(self.back(u), self.right[: done + 1])
        self.above.append(beta)

    def ritz(self) -> tuple[Floats, Floats]:
        """Values of B, descending, and the residual of each by the recurrence."""
        left, values, _ = self._solve()
        return values, self.above[-1] * np.abs(left[-1])

    def triplets(self, k: int, which: Which) -> tuple[Floats, Floats]:
        """The k values at one end, descending, with residuals measured by two more products each."""
        left, values, right = self._solve()
        chosen = slice(0, k) if which == "largest" else slice(len(values) - k, None)
        residuals = []
        for value, u_small, v_small in zip(values[chosen], left.T[chosen], right[chosen], strict=True):
            u, v = u_small @ self.left[: self.steps], v_small @ self.right[: self.steps]
            off = np.linalg.norm(self.forth(v) - value * u), np.linalg.norm(self.back(u) - value * v)
            residuals.append(max(off))
        return values[chosen].copy(), np.array(residuals, dtype=np.float64)

    def _solve(self) -> tuple[Floats, Floats, Floats]:
        bidiagonal = np.diag(self.diagonal) + np.diag(self.above[:-1], 1)
        left, values, right = np.linalg.svd(bidiagonal)
        return left, values, right

    def _beyond(self, vector: Floats, basis: Floats) -> tuple[float, Floats]:
        """Length and direction of what of ``vector`` lies outside ``basis``; any new direction where nothing does."""
        size = float(np.linalg.norm(vector))
        for _ in range(2):  # twice is enough (Kahan, Parlett)
            vector = vector - (basis @ vector) @ basis
        length = float(np.linalg.norm(vector))
        if length <= 1e-12 * max(size, max((abs(a) for a in self.diagonal), default=0.0)):
            return 0.0, self._fresh(basis)
        return length, vector / length

    def _fresh(self, basis: Floats) -> Floats:
        vector: Floats = torch.randn(basis.shape[1], generator=self.generator, dtype=torch.float64).numpy()
        for _ in range(2):
            vector = vector - (basis @ vector) @ basis
        found: Floats = vector / np.linalg.norm(vector)
        return found


@dataclass(frozen=True)
class MeanSquare:
    """An estimate of |J|_F^2 / K and the standard deviation of its error."""

    value: float
    standard_error: float
    samples: int


def mean_square(
    matvec: Product, shape: tuple[int, int], *, samples: int = 32, generator: torch.Generator
) -> MeanSquare:
    """Estimate the mean squared singular value from ``samples`` products with random signs.

    Args:
        matvec: v (Q,) float64 -> J v (P,).
        shape: (P, Q).
        samples: Products to take; 2 or more, or there is no standard error.
        generator: Of the signs, on the CPU.

    Raises:
        ValueError: If there are fewer than two samples or a side of the map is empty.
    """
    if samples < 2:
        raise ValueError(f"a standard error needs 2 samples or more, got {samples}")
    if min(shape) < 1:
        raise ValueError(f"the mean squared singular value of an empty map is undefined, got shape {shape}")
    found = []
    for _ in range(samples):
        signs = torch.randint(2, (shape[1],), generator=generator).double() * 2 - 1
        found.append(float(matvec(signs).detach().double().square().sum()) / min(shape))
    sample = np.array(found)
    return MeanSquare(float(sample.mean()), float(sample.std(ddof=1) / math.sqrt(samples)), samples)


def effective_dimension(values: Tensor) -> float:
    """Participation ratio ``tr(R)^2 / tr(R^2)`` of the correlation matrix R of ``values`` (N, C).

    C if the units are uncorrelated, 1 if they all are one. A sample of N examples can show no more than N - 1, and of
    independent Gaussian units shows about ``1 / (1/C + 1/N)``. Units that do not vary are left out; NaN if none does.

    Raises:
        ValueError: If there are fewer than two examples or the shape is not (N, C).
    """
    matrix = _correlations(values)
    if not len(matrix):
        return math.nan
    return float(len(matrix) ** 2 / matrix.square().sum())


def correlation(values: Tensor) -> float:
    """Root mean square of the correlations between different units of ``values`` (N, C); units as above.

    0 for uncorrelated units, about ``1 / sqrt(N)`` for independent ones seen in N examples; NaN for fewer than two
    units.

    Raises:
        ValueError: As `effective_dimension`.
    """
    matrix = _correlations(values)
    units = len(matrix)
    if units < 2:
        return math.nan
    return math.sqrt(max(0.0, float(matrix.square().sum()) - units) / (units * (units - 1)))


def _correlations(values: Tensor) -> Tensor:
    if values.ndim != 2 or len(values) < 2:
        raise ValueError(f"correlations need values (N, C) of 2 examples or more, got shape {tuple(values.shape)}")
    centred = values.double() - values.double().mean(0)
    size = centred.square().sum(0).sqrt()
    varies = size > 0
    standard = centred[:, varies] / size[varies]
    return standard.T @ standard
