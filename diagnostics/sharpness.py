"""Sharpness: the largest eigenvalue of the loss's Hessian, by Lanczos on Hessian-vector products.

Gradient descent with step size eta on a quadratic loss is stable only where the largest *algebraic* eigenvalue is below
2/eta (heavy ball with momentum mu: 2 (1 + mu)/eta); full-batch training climbs to that line and stays there (Cohen et
al. 2021). It says nothing as simple of mini-batches or adaptive optimizers. Units: loss / parameter^2.

`largest_eigenvalues` takes any symmetric ``matvec``, so that it is tested on matrices. From one vector ``start`` it
builds an orthonormal basis V of the Krylov space and diagonalizes the small matrix V'AV (Lanczos with full
reorthogonalization); when the basis is full it goes on from its best vectors (thick restart, Wu & Simon 2000). What is
returned is measured once more on the eigenvectors themselves: ``l = v'Av`` and the residual ``|Av - l v|``, which
for a symmetric matrix is no less than the distance from l to the nearest eigenvalue. A small residual cannot say that
this is the *largest*: a start that lacks an eigenvector finds it only by rounding, so a random part belongs in it, and
no result is accepted before ``least`` products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diagnostics._vectors import flat
from diagnostics.curvature import directional_curvature
from diagnostics.gradients import Chunks, GradientProbe
from diagnostics.probe import Rows, StepView, default_name
from diagnostics.schedules import Schedule

__all__ = ["Eigenvalues", "Sharpness", "largest_eigenvalues"]

Matvec = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Eigenvalues:
    """The k largest algebraic eigenvalues of a symmetric matrix over D parameters.

    Attributes:
        values: (k,) float64, the largest first; NaN where a product was not finite.
        residuals: (k,) |A v - l v| for the unit eigenvector v of each, in the unit of the eigenvalues.
        vectors: (k, D).
        iterations: Products with the matrix, those for the residuals included.
        converged: Whether every residual is at most ``tolerance`` times |l|.
        tolerance: As asked for.
    """

    values: Tensor
    residuals: Tensor
    vectors: Tensor
    iterations: int
    converged: bool
    tolerance: float

    @classmethod
    def unknown(cls, k: int, size: int, tolerance: float, iterations: int = 0) -> Eigenvalues:
        """Of a matrix that is not finite."""
        missing = torch.full((k,), math.nan, dtype=torch.float64)
        return cls(missing, missing, torch.full((k, size), math.nan), iterations, False, tolerance)


def largest_eigenvalues(
    matvec: Matvec,
    start: Tensor,
    k: int = 1,
    *,
    tolerance: float = 0.01,
    iterations: int = 200,
    basis: int = 32,
    least: int = 10,
    seed: int = 0,
) -> Eigenvalues:
    """The ``k`` largest algebraic eigenvalues of the symmetric matrix behind ``matvec``.

    Args:
        matvec: v (D,) -> A v (D,), in the type of ``start``.
        start: (D,) not zero, of any length; a part along every eigenvector sought is what finds it.
        k: How many, at most D.
        tolerance: Residual to reach, as a share of |l|.
        iterations: Products at most, besides those that measure the residuals. With k > 1 some go to making sure that
            no eigenvalue was passed over that several vectors have; where they run out first, ``converged`` is false.
        basis: Vectors of D numbers that are kept, at least k + 2; memory is these and two more.
        least: Products before a result is accepted.
        seed: Of the random vector that continues when the Krylov space is exhausted.

    Raises:
        ValueError: If the start is zero, not finite or no vector, or a number is out of range.
    """
    check_search(k, tolerance=tolerance, iterations=iterations, basis=basis, least=least)
    if start.ndim != 1 or not len(start):
        raise ValueError(f"start must be one vector (D,), got shape {tuple(start.shape)}")
    length = float(torch.linalg.vector_norm(start.double()))
    if length == 0 or not math.isfinite(length):
        raise ValueError(f"start must be finite and not zero, its length is {length}")
    if k > len(start):
        raise ValueError(f"there are {len(start)} eigenvalues, got k={k}")
    generator = torch.Generator().manual_seed(seed)
    if k > 1 and len(start) <= basis:
        least = len(start)  # the whole space, and with it every copy of every eigenvalue
    found = _search(matvec, start, k, iterations, tolerance=tolerance, basis=basis, least=least, generator=generator)
    if k == 1 or len(start) <= basis:
        return found
    # A Krylov space holds one vector of each eigenvalue, however many it has: look again outside what was found, from
    # elsewhere, until nothing larger than the last is there.
    while found.converged:
        if found.iterations >= iterations:
            return replace(found, converged=False)
        outside = _Outside(matvec, found.vectors)
        begin = outside.project(torch.randn(len(start), generator=generator, dtype=torch.float64).to(start))
        last = float(found.values[-1])
        bar = last + tolerance * abs(last)
        other = _search(
            outside, begin, 1, iterations - found.iterations, tolerance=tolerance, basis=basis, least=least,
            generator=generator, outside=outside, enough=bar,
        )  # fmt: skip
        products = found.iterations + other.iterations
        value, residual = float(other.values[0]), float(other.residuals[0])
        if value + residual <= bar:
            return replace(found, iterations=products)
        overlap = float((found.vectors @ other.vectors[0]).abs().max())
        if not other.converged or not overlap < 1e-3:
            return replace(found, converged=False, iterations=products)
        values, order = torch.cat((found.values[:-1], other.values)).sort(descending=True)
        residuals = torch.cat((found.residuals[:-1], other.residuals))[order]
        vectors = torch.cat((found.vectors[:-1], other.vectors))[order]
        found = Eigenvalues(values, residuals, vectors, products, True, tolerance)
    return found


class _Outside:
    """A symmetric matrix on the orthogonal complement of ``vectors`` (k, D), which it takes for eigenvectors."""

    def __init__(self, matvec: Matvec, vectors: Tensor) -> None:
        self._matvec = matvec
        self.vectors = vectors

    def project(self, vector: Tensor) -> Tensor:
        for _ in range(2):
            vector = vector - self.vectors.T @ (self.vectors @ vector)
        return vector

    def __call__(self, vector: Tensor) -> Tensor:
        return self.project(self._matvec(self.project(vector)))


def _search(
    matvec: Matvec,
    start: Tensor,
    k: int,
    iterations: int,
    *,
    tolerance: float,
    basis: int,
    least: int,
    generator: torch.Generator,
    outside: _Outside | None = None,
    enough: float = -math.inf,
) -> Eigenvalues:
    """One search from ``start``: of an eigenvalue that several vectors have, it finds one.

    It stays in the space of ``outside``, and ends early where it is sure of an upper end of at most ``enough``.
    """
    lanczos = _Lanczos(matvec, start, basis, generator, outside)
    least = max(least, k)
    while lanczos.products < iterations and lanczos.step():
        if lanczos.complete:
            break
        if lanczos.products >= least and lanczos.size >= k:
            values, residuals = lanczos.estimate(k)
            if bool((residuals <= tolerance * values.abs()).all()) or float(values[0] + residuals[0]) <= enough:
                break
        if lanczos.full:
            lanczos.restart(k)
    return lanczos.result(k, tolerance)


class _Lanczos:
    """An orthonormal basis, row after row, and the matrix as it looks from inside it."""

    def __init__(
        self, matvec: Matvec, start: Tensor, basis: int, generator: torch.Generator, outside: _Outside | None = None
    ) -> None:
        self._matvec = matvec
        self._generator = generator
        self._outside = outside
        self._dimension = len(start) - (0 if outside is None else len(outside.vectors))
        most = min(basis, self._dimension)
        self._most = most
        self._rows = start.new_empty(most, len(start))
        self._inside = torch.zeros(most, most, dtype=torch.float64)
        self._kept = 0  # vectors from before the last restart: the next product overlaps with all of them
        self._beta = 0.0  # length of what is left of the last product outside the basis
        self._next: Tensor | None = start / torch.linalg.vector_norm(start.double()).to(start.dtype)
        self._finite = True
        self.size = 0
        self.products = 0

    @property
    def full(self) -> bool:
        return self.size == self._most

    @property
    def complete(self) -> bool:
        """Whether the basis spans the whole space, so that nothing is left outside."""
        return self.size == self._dimension

    def step(self) -> bool:
        """One more vector and the product with it; False where the product is not finite."""
        row = self._next if self._next is not None else self._fresh()
        j = self.size
        self._rows[j] = row
        product = self._matvec(row)
        self.products += 1
        self.size = j + 1
        # First against those that exact arithmetic says it overlaps with, then against all for the rounding.
        near = 0 if j == self._kept else j - 1
        alpha = self._project(product, near, j + 1)
        self._inside[near : j + 1, j] = alpha
        self._inside[j, near : j + 1] = alpha
        scale = float(alpha.norm())
        correction = self._project(product, 0, j + 1)
        self._inside[j, j] += correction[j]
        self._beta = float(torch.linalg.vector_norm(product))
        if not math.isfinite(self._beta) or not math.isfinite(scale):
            self._finite = False
            return False
        eps = torch.finfo(product.dtype).eps
        # Nothing but rounding is left: the space is invariant, and the search goes on outside it.
        exhausted = self._beta <= 10 * eps * max(scale, self._beta) or self.complete
        if exhausted:
            self._beta = 0.0
        self._next = None if exhausted else product / self._beta
        if self._next is not None and self._outside is not None:  # what rounding left of what was found has grown
            self._next = self._outside.project(self._next)
            self._next /= torch.linalg.vector_norm(self._next)
        return True

    def _project(self, vector: Tensor, first: int, last: int) -> Tensor:
        """Take from ``vector`` its part along rows ``first`` to ``last``, in place; the coefficients, float64."""
        rows = self._rows[first:last]
        coefficients = torch.mv(rows, vector)
        vector.addmv_(rows.T, coefficients, alpha=-1)
        return coefficients.double().cpu()

    def _fresh(self) -> Tensor:
        """A random unit vector outside the basis."""
        vector = torch.randn(self._rows.shape[1], generator=self._generator, dtype=torch.float64)
        vector = vector.to(self._rows)
        for _ in range(2):
            if self._outside is not None:
                vector = self._outside.project(vector)
            self._project(vector, 0, self.size)
        vector /= torch.linalg.vector_norm(vector)
        return vector

    def _pairs(self, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` largest eigenvalues of the matrix inside, and their vectors as columns."""
        values, vectors = torch.linalg.eigh(self._inside[: self.size, : self.size])
        return values.flip(0)[:count], vectors.flip(1)[:, :count]

    def estimate(self, k: int) -> tuple[Tensor, Tensor]:
        """Eigenvalues and what their residuals must be, without another product."""
        values, vectors = self._pairs(k)
        return values, self._beta * vectors[-1].abs()

    def restart(self, k: int) -> None:
        """Keep the best vectors and what is left of the last product; forget the rest."""
        keep = min(k + (self._most - k) // 3, self._most - 2)
        values, vectors = self._pairs(keep)
        self._combine(vectors)
        self._inside.zero_()
        self._inside.diagonal()[:keep] = values
        self.size = self._kept = keep

    def _combine(self, vectors: Tensor) -> None:
        """Replace the first rows by combinations of all, some columns at a time so that no second basis is held."""
        weights = vectors.T.to(self._rows)
        for columns in torch.split(self._rows, 1 << 16, dim=1):
            columns[: len(weights)] = weights @ columns[: self.size]

    def result(self, k: int, tolerance: float) -> Eigenvalues:
        if not self._finite or self.size < k:
            return Eigenvalues.unknown(k, self._rows.shape[1], tolerance, self.products)
        _, weights = self._pairs(k)
        self._combine(weights)
        vectors = self._rows[:k].clone()
        values, residuals = [], []
        for vector in vectors:
            product = self._matvec(vector).double()
            exact = vector.double()
            exact = exact / exact.norm()
            value = torch.dot(exact, product)
            values.append(value)
            residuals.append(torch.linalg.vector_norm(product - value * exact))
        found, left = torch.stack(values).cpu(), torch.stack(residuals).cpu()
        converged = bool((left <= tolerance * found.abs()).all())
        return Eigenvalues(found, left, vectors, self.products + k, converged, tolerance)


def check_search(k: int, *, tolerance: float, iterations: int, basis: int, least: int = 1) -> None:
    """What `largest_eigenvalues` asks of its numbers, whatever the matrix.

    Raises:
        ValueError: If one is out of range.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    if iterations < k:
        raise ValueError(f"iterations must be at least k = {k}, got {iterations}")
    if basis < k + 2:
        raise ValueError(f"basis must be at least k + 2 = {k + 2}, got {basis}")
    if least < 1:
        raise ValueError(f"least must be at least 1, got {least}")


def search_start(gradient: Tensor, seed: int) -> Tensor:
    """The gradient's direction (D,) with a random vector of a tenth of its length; that alone where it is zero."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(gradient), generator=generator, dtype=torch.float64).to(gradient)
    noise /= torch.linalg.vector_norm(noise)
    length = float(torch.linalg.vector_norm(gradient.double()))
    return gradient / length + 0.1 * noise if length > 0 else noise


class Sharpness(GradientProbe):
    """The largest eigenvalues of the loss's Hessian at theta_t, and the curvature along the gradient.

    For the whole network (layer ``-``, unit -1) it writes ``sharpness``, its ``residual``, ``iterations``,
    ``converged`` (1 or 0), ``directional_curvature`` |Hg|/|g| and ``rayleigh`` g'Hg/|g|^2 (NaN where the gradient is
    zero), ``gradient_norm`` and ``loss``, all on the same examples. With k > 1 also ``eigenvalue`` and
    ``eigenvalue_residual`` with unit 0 for the largest, and ``ratio``, the first over the k-th.

    The search starts at the gradient with a random vector of a tenth of its length added, from ``seed``.

    Args:
        k: How many eigenvalues.
        on: ``"batch"``, the step's own; or a fixed batch, in the form the recorder's loss takes.
        mode: ``batch`` or ``population`` statistics in the normalizers, dropout off; or ``step``, flags as they are.
        tolerance: Residual to reach, as a share of the eigenvalue.
        iterations: Hessian-vector products at most.
        basis: Vectors kept, see `largest_eigenvalues`: so many copies of the parameters, and two more.
        least: Products before a result is accepted.
        chunks: Stream the examples.
        seed: Of the random part of the start.
        when: A schedule, step -> bool.
        name: The probe's name in the record; ``sharpness.batch`` or ``sharpness.fixed`` by default.

    Raises:
        ValueError: If a number is out of range, or ``mode`` or ``on`` is unknown.
    """

    def __init__(
        self,
        k: int = 1,
        on: Any = "batch",
        *,
        mode: str = "batch",
        tolerance: float = 0.01,
        iterations: int = 200,
        basis: int = 32,
        least: int = 10,
        chunks: Chunks | None = None,
        seed: int = 0,
        when: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        check_search(k, tolerance=tolerance, iterations=iterations, basis=basis, least=least)
        kind = "batch" if isinstance(on, str) else "fixed"
        super().__init__(
            on=on, mode=mode, chunks=chunks, when=when, name=default_name(self, kind) if name is None else name
        )
        self.k = k
        self.tolerance = tolerance
        self.iterations = iterations
        self.basis = basis
        self.least = least
        self.seed = seed

    def measure(self, view: StepView) -> Iterable[Rows]:
        """The spectrum's upper end at theta_t."""
        mode = self.mode_name(view)
        with self.gradients(view) as at:
            hessian = at.hessian()
            gradient = flat(hessian.gradient)
            length = float(torch.linalg.vector_norm(gradient.double()))
            values = {"loss": float(hessian.loss), "gradient_norm": length}
            along = math.nan, math.nan
            if length > 0:
                curvature = directional_curvature(hessian, gradient)
                along = curvature.directional, curvature.rayleigh
            values |= {"directional_curvature": along[0], "rayleigh": along[1]}
            if math.isfinite(length):
                found = largest_eigenvalues(
                    hessian,
                    search_start(gradient, self.seed),
                    self.k,
                    tolerance=self.tolerance,
                    iterations=self.iterations,
                    basis=self.basis,
                    least=self.least,
                    seed=self.seed,
                )
            else:
                found = Eigenvalues.unknown(self.k, len(gradient), self.tolerance)
        values |= {
            "sharpness": float(found.values[0]),
            "residual": float(found.residuals[0]),
            "iterations": float(found.iterations),
            "converged": float(found.converged),
        }
        if self.k == 1:
            return [Rows("-", values, mode=mode)]
        values["ratio"] = float(found.values[0] / found.values[-1])
        each = {"eigenvalue": found.values.numpy(), "eigenvalue_residual": found.residuals.numpy()}
        return [Rows("-", values, mode=mode), Rows("-", each, mode=mode)]
