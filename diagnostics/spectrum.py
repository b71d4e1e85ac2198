"""Singular values of a linear map: all of a matrix's, or the extreme ones of a map that is only known by what it does.

J is P x Q, K = min(P, Q), and s_1 >= ... >= s_K >= 0 are its singular values. Three ways to them, each with its doubt:

- `spectrum` takes matrices (any number, stacked) and gives every value, by LAPACK on J itself. Never by way of J J^T:
  squaring halves the digits, and below ``s_1 sqrt(eps)`` (3e-4 in single precision) nothing would be left.
- `extremes` takes the products v -> J v and u -> J^T u and gives the k largest or smallest values with their residuals,
  by Golub & Kahan's bidiagonalization (1965) of a block of vectors with full reorthogonalization in double precision.
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
_CHECK_EVERY = 8  # steps from one look at the convergence to the next, or an eighth of what is done
WORKSPACE = 2**20  # bytes of matrices that are decomposed at once; one matrix, where it is larger
_ROOM = 32  # steps that memory is taken for at once
_NOTHING = 1e-12  # of the largest product: what is left of a vector below it is rounding


@dataclass(frozen=True, repr=False)
class Spectrum:
    """All singular values of one matrix or of many stacked ones, and what is read off them.

    ``values`` are descending, K = min(P, Q) a matrix; ``rank``, ``spread``, ``mean_square``, ``smallest``, ``largest``
    and ``distance`` are a number a matrix. A matrix with an entry that is not finite has NaN for every value and every
    number.
    """

    values: Tensor  # (..., K), descending
    shape: tuple[int, int]  # P, Q
    eps: float | None = None  # of the matrices' type; None: of the values' type

    def __repr__(self) -> str:
        of = " x ".join(str(n) for n in self.values.shape[:-1])
        return f"Spectrum({of or 'one'} of {self.shape[0]} x {self.shape[1]}, values {tuple(self.values.shape)})"

    @property
    def rank(self) -> Tensor:
        """(...,) values above ``s_1 max(P, Q) eps``, eps that of the matrices' type, not of what they were cast to."""
        eps = torch.finfo(self.values.dtype).eps if self.eps is None else self.eps
        least = self.values[..., :1] * max(self.shape) * eps
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
    rows, columns = matrices.shape[-2:]
    eps = torch.finfo(matrices.dtype).eps
    flat = matrices.reshape(-1, rows, columns)
    # Few at a time: LAPACK overwrites what it is given, so a copy of all of them would be taken.
    group = max(1, WORKSPACE // (rows * columns * max(4, matrices.element_size())))
    values = [_values(flat[start : start + group]) for start in range(0, len(flat), group)]
    kept = torch.cat(values) if values else flat.new_empty((0, min(rows, columns)))
    return Spectrum(kept.reshape(*matrices.shape[:-2], min(rows, columns)), (rows, columns), eps)


def _values(matrices: Tensor) -> Tensor:
    """(n, K) of (n, P, Q)."""
    single = matrices if matrices.dtype in (torch.float32, torch.float64) else matrices.float()
    finite = single.isfinite().flatten(-2).all(-1)  # LAPACK may never return from anything else
    whole = single if finite.all() else torch.where(finite[..., None, None], single, 0.0)
    values: Tensor = torch.linalg.svdvals(whole)
    return torch.where(finite[..., None], values, math.nan)


@dataclass(frozen=True)
class Extremes:
    """The k singular values at one end of a spectrum, and how far each can be trusted."""

    values: Tensor  # (k,) float64, descending
    residuals: Tensor  # (k,) max(|J v - s u|, |J^T u - s v|), measured (of a zero |J v|): a value of J is within it
    converged: bool  # every residual is within its bound, see `extremes`
    products: int  # with J and J^T together
    steps: int  # dimensions of the subspace


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
    batched: bool = False,
) -> Extremes:
    """The ``k`` largest or smallest singular values of a map that is known by its products.

    A residual says that a value is one of J's, not that none beyond it was missed: from one starting vector, a value
    that occurs m times is found once. The start therefore is a block of k + 1 random directions, of whose Krylov space
    every value has k + 1 copies if J has as many.

    The smallest values are found last, and a vanishing residual beside the largest value is none beside them. So where
    K is at most ``max_steps`` all of the space is searched, and nothing can be missed; where it is more, they count as
    converged only by a residual that is small beside themselves, which asks for values that stand apart.

    Args:
        matvec: v (Q,) -> J v (P,). It is handed float64.
        rmatvec: u (P,) -> J^T u (Q,), likewise.
        shape: (P, Q).
        k: How many values.
        which: Which end.
        generator: Of the random start, on the CPU.
        tolerance: Residual at which a value counts as found, as a share of the largest value, or, of the smallest
            values, of each itself (or, if more, max(P, Q) eps of the largest, eps that of the products' floating-point
            type and 1e-11 at least in all: such a value cannot be told from 0). A value is off by at most its
            residual, and where no other is near by its square over the gap.
        max_steps: Dimensions of the subspace, each taking ``8 (P + Q)`` bytes and two products.
        batched: The products take many vectors at once, (b, Q) -> (b, P) and (b, P) -> (b, Q), b being k + 1 or less.

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
    size = max(shape), smaller
    work = _Bidiagonal(_Products(forth, batched), _Products(back, batched), size, min(k + 1, smaller), generator)
    most = min(max(max_steps, k), smaller)
    whole = which == "smallest" and most == smaller

    def found(values: Floats, residuals: Floats, largest: float) -> bool:
        if which == "largest":
            return bool((residuals <= tolerance * largest).all())
        return bool((residuals <= np.maximum(tolerance * values, work.rounding * largest)).all())

    look = k
    while work.steps < most:
        work.step(most - work.steps)
        if look <= work.steps < most and not whole:
            look = work.steps + max(_CHECK_EVERY, work.steps // 8)
            # A smallest value of a subspace is an upper bound only: its residual says when it is a value of J.
            if found(*work.ritz(k, which)):
                break
    values, residuals, largest = work.triplets(k, which)
    return Extremes(
        torch.from_numpy(values * work.scale),
        torch.from_numpy(residuals * work.scale),
        found(values, residuals, largest),
        work.forth.count + work.back.count,
        work.steps,
    )


class _Products:
    """Products with many vectors, (b, Q) -> (b, P), divided by ``scale``; counts vectors and speaks numpy."""

    def __init__(self, product: Product, batched: bool) -> None:
        self.product, self.batched = product, batched
        self.count, self.scale, self.rounding = 0, 1.0, float(np.finfo(np.float64).eps)

    def __call__(self, vectors: Floats) -> Floats:
        self.count += len(vectors)
        handed = torch.from_numpy(vectors)
        found = self.product(handed) if self.batched else torch.stack([self.product(vector) for vector in handed])
        self.rounding = max(self.rounding, torch.finfo(found.dtype).eps)
        numbers: Floats = found.detach().double().cpu().numpy().reshape(len(vectors), -1)
        if not np.isfinite(numbers).all():
            raise ValueError("a product with the map is not finite")
        return numbers / self.scale


class _Bidiagonal:
    """J V = U B and J^T U = V B^T + E R^T, B upper block bidiagonal, grown by a block of columns of U and V at a time.

    V and U are kept as rows. R leads from the last block of U out of the subspace, to ``next``, the block of V to come.
    The map is divided by ``scale``, its first product's largest entry: squares of numbers near the ends of the
    floating-point range are no numbers.
    """

    def __init__(
        self, forth: _Products, back: _Products, size: tuple[int, int], block: int, generator: torch.Generator
    ) -> None:
        self.forth, self.back, self.block, self.generator = forth, back, block, generator
        rows, self.columns = size
        self.steps, self.size, self.scale = 0, 0.0, 1.0
        self.left: Floats = np.empty((0, rows))  # grown by _ROOM rows at a time
        self.right: Floats = np.empty((0, self.columns))
        self.small: Floats = np.zeros((0, 0))  # B
        self.beyond: Floats = np.zeros((0, 0))  # R
        self.next = self._fresh(block, self.right)

    @property
    def rounding(self) -> float:
        """Below it a value cannot be told from 0: what is rounded away or left out, as a share of the largest."""
        rounding: float = self.left.shape[1] * max(self.forth.rounding, self.back.rounding)
        return max(rounding, 10 * _NOTHING)

    def step(self, most: int) -> None:
        """Grow by a block, of ``most`` columns or fewer."""
        done, fresh = self.steps, self.next[:most]
        self.steps = end = done + len(fresh)
        self._make_room(end)
        self.right[done:end] = fresh
        images = self.forth(fresh)
        if not done:
            self._set_scale(float(np.abs(images).max()))
            images /= self.scale
        self.size = max(self.size, float(np.linalg.norm(images, axis=1).max()))
        inside, images = _project(images, self.left[:done])
        self.small[:done, done:end] = inside.T
        self.left[done:end], shares = self._orthonormal(images, self.left[:done], keep=len(fresh))
        self.small[done:end, done:end] = shares.T
        room = min(self.block, self.columns - end)
        _, outside = _project(self.back(self.left[done:end]), self.right[:end])
        self.next, self.beyond = self._orthonormal(outside, self.right[:end], most=room)
        if not len(self.next):  # an invariant subspace: go on from a new direction in its complement
            self.next = self._fresh(room, self.right[:end])

    def ritz(self, k: int, which: Which) -> tuple[Floats, Floats, float]:
        """The k values of B at one end, descending, the residual of each by the recurrence, and the largest of all."""
        small = self.small[: self.steps, : self.steps]
        if which == "largest":  # these lose no digit by squaring, and are had at a quarter of the price
            matrix = torch.from_numpy(small)
            squares, every = (part.numpy() for part in torch.linalg.eigh(matrix @ matrix.T))
            values, left = np.sqrt(np.maximum(squares[: -k - 1 : -1], 0)), every[:, : -k - 1 : -1]
            largest = float(values[0])
        else:
            left, values, _ = _svd(small)
            largest, left, values = float(values[0]), left[:, -k:], values[-k:]
        residuals = np.linalg.norm(left[-len(self.beyond) :].T @ self.beyond, axis=1)
        return values, np.minimum(residuals, values), largest  # as below: |J v| is the value

    def triplets(self, k: int, which: Which) -> tuple[Floats, Floats, float]:
        """Likewise, with residuals measured by two more products each."""
        left, values, right = _svd(self.small[: self.steps, : self.steps])
        chosen = slice(0, k) if which == "largest" else slice(-k, None)
        u, v = _times(left.T[chosen], self.left[: self.steps]), _times(right[chosen], self.right[: self.steps])
        found: Floats = values[chosen].copy()
        images = self.forth(v)
        off = (
            np.linalg.norm(images - found[:, None] * u, axis=1),
            np.linalg.norm(self.back(u) - found[:, None] * v, axis=1),
        )
        # Of a zero any u will do, and the one that is at hand is as good as random; but with v of the smaller side,
        # some singular value is at most |J v|.
        residuals = np.minimum(np.maximum(*off), np.maximum(found, np.linalg.norm(images, axis=1)))
        return found, residuals, float(values[0])

    def _set_scale(self, largest: float) -> None:
        if largest > 0:
            self.scale = self.forth.scale = self.back.scale = largest

    def _make_room(self, steps: int) -> None:
        more = max(_ROOM, steps - len(self.left))
        if steps > len(self.left):
            self.left = np.vstack([self.left, np.empty((more, self.left.shape[1]))])
            self.right = np.vstack([self.right, np.empty((more, self.columns))])
            self.small = np.pad(self.small, (0, more))

    def _orthonormal(self, vectors: Floats, basis: Floats, *, keep: int = 0, most: int = 0) -> tuple[Floats, Floats]:
        """Directions (c, n) orthogonal to each other and to ``basis``, and shares (b, c) of what they make up.

        ``vectors`` (b, n) are orthogonal to ``basis``. Where they depend on each other there are fewer directions, at
        most ``most``, or ``keep`` of them with random ones in place of those that are missing.
        """
        most = keep or most
        found: Floats = np.empty((most, basis.shape[1]))
        shares: Floats = np.zeros((len(vectors), most))
        count = 0
        for index, one in enumerate(vectors):
            share, vector = _project(one[None], found[:count])
            shares[index, :count] = share[0]
            length = float(np.linalg.norm(vector))
            if 0 < length < 1e-3 * np.linalg.norm(one):  # most of it is gone, and the rest is less orthogonal
                _, vector = _project(_project(vector, basis)[1], found[:count])
                length = float(np.linalg.norm(vector))
            if count == most or length <= _NOTHING * self.size:
                if not keep:
                    continue
                found[count] = self._fresh(1, np.vstack([basis, found[:count]]))[0]
            else:
                found[count] = vector[0] / length
                shares[index, count] = length
            count += 1
        return found[:count], shares[:, :count]

    def _fresh(self, count: int, basis: Floats) -> Floats:
        """``count`` random directions that are orthogonal to each other and to ``basis``."""
        vectors: Floats = torch.randn(count, basis.shape[1], generator=self.generator, dtype=torch.float64).numpy()
        for _ in range(2):
            vectors = torch.linalg.qr(torch.from_numpy(_project(vectors, basis)[1]).T)[0].T.contiguous().numpy()
        return vectors


def _svd(matrix: Floats) -> tuple[Floats, Floats, Floats]:
    left, values, right = (part.numpy() for part in torch.linalg.svd(torch.from_numpy(matrix)))
    return left, values, right


def _times(a: Floats, b: Floats) -> Floats:
    product: Floats = (torch.from_numpy(np.ascontiguousarray(a)) @ torch.from_numpy(b)).numpy()
    return product


def _project(vectors: Floats, basis: Floats) -> tuple[Floats, Floats]:
    """The shares (b, m) of ``vectors`` (b, n) in ``basis`` (m, n), and what is left of them."""
    # By torch, whose threads the products have just used: numpy's would wait for them to stop spinning.
    left, rows = torch.from_numpy(vectors), torch.from_numpy(basis)
    inside = torch.zeros(len(vectors), len(basis), dtype=torch.float64)
    for _ in range(2):  # twice is enough (Kahan, Parlett)
        share = left @ rows.T
        left, inside = left - share @ rows, inside + share
    return inside.numpy(), left.numpy()


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

    The estimate is unbiased and so is its squared standard error, but for a map of few large values a product's square
    is skewed (at rank one, that of a normal variable), and then few samples give an error that is too small just where
    the estimate is too low: of 32 samples at rank one, the deviation in standard errors has a standard deviation of
    about 1.3, not 1. Bounds for such a map ask for more samples, or for more standard errors.

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
