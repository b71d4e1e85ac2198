"""The statements of `experiments.statements`, computed: in float64, with batch normalization from primitives.

``CHECKS`` holds one function a statement, of a generator (one case's random draws) to a residual. The worst case is
what counts, and a residual that is not finite is never passed over by a maximum. ``COUNTEREXAMPLES`` holds, for each
form that is expected to be false, one case in small numbers that anybody can work out; it is tried beside the random
ones, so that a false form is met however few those are. Curves for pictures are here too: invariance against epsilon,
the gradient's norm against the weights', the motivating failure of Ioffe & Szegedy (2015, section 2), and the coupling
of a batch.

torch's own batch normalization refuses epsilon 0 in training, and several of its second derivatives are wrong under
`torch.func`; here y-hat is written out, and Hessians are `autograd.grad` twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.byhand import Path, backward, fold, forward, normalize, population, population_of

__all__ = [
    "CHECKS",
    "COUNTEREXAMPLES",
    "TREATMENTS",
    "Checked",
    "Failure",
    "check",
    "coupling",
    "failure",
    "gradient_norms",
    "invariance",
    "reach",
]

Check = Callable[[torch.Generator], float]
Loss = Callable[[Tensor], Tensor]
Treatment = Literal["centred", "shrinking", "growing", "epsilon", "through"]


@dataclass(frozen=True)
class Checked:
    """One statement over all its cases."""

    residual: float  # the worst; NaN if one is not finite
    exceeded: int  # cases in which it did not keep the bound
    cases: int


def check(name: str, *, bound: float, cases: int, seed: int) -> Checked:
    """The worst residual of a statement over ``cases`` draws from ``seed``, and over its counterexample if it has one.

    Raises:
        ValueError: If there is no statement of that name, or no case.
    """
    if name not in CHECKS:
        raise ValueError(f"no statement is named {name!r}; there are {', '.join(CHECKS)}")
    if cases < 1:
        raise ValueError(f"a statement is checked on 1 case or more, got {cases}")
    generator = torch.Generator().manual_seed(seed)
    residuals = [COUNTEREXAMPLES[name]()] if name in COUNTEREXAMPLES else []
    residuals += [CHECKS[name](generator) for _ in range(1 if name in _ONCE else cases)]
    exceeded = sum(not (math.isfinite(residual) and residual <= bound) for residual in residuals)
    return Checked(_worst(residuals), exceeded, len(residuals))


# --- tools


def _worst(values: Iterable[float]) -> float:
    """The largest; NaN if one of them is not finite, which Python's ``max`` would pass over."""
    found = list(values)
    return max(found) if all(map(math.isfinite, found)) else math.nan


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _between(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))


def _apart(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest entry; NaN in either is NaN here."""
    if found.shape != wanted.shape:  # would be compared after broadcasting
        raise ValueError(f"sides of an identity have one shape, got {tuple(found.shape)} and {tuple(wanted.shape)}")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300))


def _bn(y: Tensor, epsilon: float = 0.0) -> Tensor:
    """y-hat over the first dimension."""
    centred = y - y.mean(0)
    return centred / (centred.square().mean(0) + epsilon).sqrt()


def _grad(value: Tensor, at: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(value, at, create_graph=True)
    return found


def _jacobian(apply: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    found: Tensor = torch.autograd.functional.jacobian(apply, at, vectorize=True)  # type: ignore[no-untyped-call]  # torch types it not
    return found


@dataclass(frozen=True)
class _Unit:
    """One unit's batch, and everything the theorems speak of, at a random smooth loss that is not convex."""

    y: Tensor  # (m,)
    yhat: Tensor
    gamma: float
    sigma: float
    loss: Loss  # of z, or of whatever stands in its place
    g: Tensor  # (m,) at z
    H: Tensor  # (m, m) at z
    grad: Tensor  # (m,) of L-hat at y
    hessian: Tensor  # (m, m) of L-hat at y

    @property
    def m(self) -> int:
        return len(self.y)

    def bound_4_1(self, g: Tensor) -> Tensor:
        along = g.sum().square() / self.m + (g @ self.yhat).square() / self.m
        return self.gamma**2 / self.sigma**2 * (g @ g - along)

    def bound_4_2(self, g: Tensor, H: Tensor, d: Tensor) -> Tensor:
        ratio = self.gamma / self.sigma**2
        return self.gamma * ratio * (d @ H @ d) - ratio / self.m * (g @ self.yhat) * (d @ d)


def _unit(generator: torch.Generator, *, convex: bool = False) -> _Unit:
    m = 7
    y = _between(generator, 0.3, 3) * _randn(generator, m) + _randn(generator, 1)
    gamma, beta = _between(generator, 0.3, 2), _between(generator, -1, 1)
    return _built(y, gamma, beta, _loss(generator, m, convex=convex))


def _loss(generator: torch.Generator, m: int, *, convex: bool = False) -> Loss:
    mix, push, size = _randn(generator, m, m), _randn(generator, m), _between(generator, 0.1, 3)

    def loss(z: Tensor) -> Tensor:
        if convex:
            return 0.5 * (mix @ z).square().sum() / m + size * push @ z
        return size * (push @ torch.tanh(mix @ z) + 0.1 * z @ mix @ z)

    return loss


def _built(y: Tensor, gamma: float, beta: float, loss: Loss) -> _Unit:
    def through(v: Tensor) -> Tensor:
        return loss(gamma * _bn(v) + beta)

    z = (gamma * _bn(y) + beta).detach()
    g, H = _derivatives(loss, z)
    grad, hessian = _derivatives(through, y)
    sigma = float(y.var(correction=0).sqrt())
    return _Unit(y.detach(), _bn(y).detach(), gamma, sigma, loss, g, H, grad, hessian)


def _derivatives(apply: Loss, at: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient and Hessian, by `autograd.grad` twice."""
    at = at.detach().requires_grad_()
    gradient = _grad(apply(at), at)
    (rows,) = torch.autograd.grad(gradient, at, torch.eye(len(at), dtype=at.dtype), is_grads_batched=True)
    return gradient.detach(), rows


@dataclass(frozen=True)
class _Layer:
    """u (m, Q) and W (P, Q), and a random loss of what BN makes of W u."""

    u: Tensor
    W: Tensor
    push: Tensor  # (m, P)

    def loss(self, W: Tensor) -> Tensor:
        return (self.push * torch.tanh(_bn(self.u @ W.T))).sum()

    def gradient(self, W: Tensor) -> Tensor:
        W = W.detach().requires_grad_()
        return _grad(self.loss(W), W).detach()


def _layer(generator: torch.Generator) -> _Layer:
    return _Layer(_randn(generator, 8, 5), _randn(generator, 3, 5), _randn(generator, 8, 3))


# --- the transform and its gradient


def _gradient(generator: torch.Generator, cut: tuple[Path, ...] = ()) -> float:
    shape = ((9, 4), (4, 3, 2, 2))[int(torch.randint(2, (), generator=generator))]
    x, gamma, beta = _randn(generator, *shape), _randn(generator, shape[1]), _randn(generator, shape[1])
    grad, epsilon = _randn(generator, *shape), _between(generator, 0, 0.1)
    return _gradient_at(x, gamma, beta, grad, epsilon, cut)


def _gradient_at(
    x: Tensor, gamma: Tensor, beta: Tensor, grad: Tensor, epsilon: float, cut: tuple[Path, ...] = ()
) -> float:
    leaves = [tensor.detach().requires_grad_() for tensor in (x, gamma, beta)]
    wanted = torch.autograd.grad(forward(*leaves, epsilon=epsilon).y, leaves, grad)
    with torch.no_grad():
        done = forward(x, gamma, beta, epsilon=epsilon)
        found = backward(grad, x, gamma, done, epsilon=epsilon, cut=cut)
    parts = zip((found.x, found.gamma, found.beta), wanted, strict=True)
    return _worst(_apart(one, other) for one, other in parts)


def _identity_recovery(generator: torch.Generator, *, with_epsilon: bool = False) -> float:
    x = _between(generator, 0.1, 5) * _randn(generator, 11, 4) + _randn(generator, 4)
    mean, sd = x.mean(0), x.var(0, correction=0).sqrt()
    epsilon = _between(generator, 0.01, 1) if with_epsilon else 0.0
    return _apart(forward(x, sd, mean, epsilon=epsilon).y, mean + (x - mean) / (1 + epsilon / sd**2).sqrt())


def _constant_bias(generator: torch.Generator) -> float:
    one, b = _layer(generator), 10 * _randn(generator, 3)
    return _apart(_bn(one.u @ one.W.T + b), _bn(one.u @ one.W.T))


def _positions(generator: torch.Generator) -> float:
    x, gamma, beta = _randn(generator, 4, 3, 5, 2), _randn(generator, 3), _randn(generator, 3)
    found = forward(x, gamma, beta, epsilon=1e-5)
    rows = forward(x.permute(0, 2, 3, 1).reshape(-1, 3), gamma, beta, epsilon=1e-5)
    theirs = torch.nn.functional.batch_norm(x, None, None, gamma, beta, training=True)
    wanted = rows.y.reshape(4, 5, 2, 3).permute(0, 3, 1, 2)
    return _worst((_apart(found.y, wanted), _apart(found.y, theirs), _apart(found.variance, rows.variance)))


def _population(generator: torch.Generator) -> float:
    return _worst((_population_equal(generator), _population_ragged(generator), _population_of(generator)))


def _population_equal(generator: torch.Generator) -> float:
    batches = [_randn(generator, 6, 3) * 2 + _randn(generator, 3) for _ in range(5)]
    norm = nn.BatchNorm1d(3, momentum=None, dtype=torch.float64)  # a cumulative average
    for batch in batches:
        norm(batch)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    found = population(batches)
    return _worst((_apart(found.mean, norm.running_mean), _apart(found.variance, norm.running_var)))


def _population_ragged(generator: torch.Generator) -> float:
    """Batches of other sizes weigh as many values as they have: the mean is that of all values."""
    batches = [_randn(generator, m, 3) + 3 * _randn(generator, 3) for m in (6, 2, 9)]
    found, values = population(batches), torch.cat(batches)
    variance = sum((len(batch) * batch.var(0) for batch in batches), start=torch.zeros(3, dtype=values.dtype))
    return _worst((_apart(found.mean, values.mean(0)), _apart(found.variance, variance / len(values))))


def _population_of(generator: torch.Generator) -> float:
    """A model that evaluates with other statistics: each normalizer is fed as in training, and nothing is moved."""
    first, second = (nn.BatchNorm1d(3, dtype=torch.float64) for _ in range(2))
    for norm in (first, second):
        assert norm.running_mean is not None
        norm.running_mean.copy_(_randn(generator, 3))
    model = nn.Sequential(first, nn.Tanh(), second).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [_randn(generator, 6, 3) for _ in range(2)]
    found = population_of(model, batches, model)
    wanted = population([torch.tanh(_bn(batch, first.eps)) for batch in batches])
    moved = [float(not torch.equal(value, before[name])) for name, value in model.state_dict().items()]
    parts = (_apart(found["2"].mean, wanted.mean), _apart(found["2"].variance, wanted.variance))
    return _worst((*parts, *moved, float(any(module.training for module in model.modules()))))


def _unbiased(generator: torch.Generator) -> float:
    """By `population`: 200,000 batches of 4 (4000 units beside each other), of a law that is not the normal one."""
    batches = [
        -torch.rand(4, 4000, generator=generator, dtype=torch.float64).clamp(min=1e-300).log() for _ in range(50)
    ]
    found = population(batches).variance  # of an exponential law, whose variance is 1
    return abs(float((found.mean() - 1) / (found.std() / math.sqrt(len(found)))))


def _fold(generator: torch.Generator) -> float:
    residuals = []
    kinds: list[tuple[nn.Linear | nn.Conv2d, nn.BatchNorm1d | nn.BatchNorm2d, Tensor]] = [
        (nn.Linear(5, 4, dtype=torch.float64), nn.BatchNorm1d(4, dtype=torch.float64), _randn(generator, 6, 5)),
        (
            nn.Conv2d(2, 4, 3, dtype=torch.float64),
            nn.BatchNorm2d(4, dtype=torch.float64),
            _randn(generator, 3, 2, 6, 6),
        ),
    ]
    for layer, norm, x in kinds:
        with torch.no_grad():
            for tensor in (*layer.parameters(), *norm.parameters()):
                tensor.copy_(_randn(generator, *tensor.shape))
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.copy_(_randn(generator, 4))
            norm.running_var.copy_(0.1 + torch.rand(4, generator=generator, dtype=torch.float64))
            both = nn.Sequential(layer, norm).eval()
            residuals.append(_apart(fold(layer, norm)(x), both(x)))
    return _worst(residuals)


# --- scale


def _scale(generator: torch.Generator, what: Literal["output", "du", "dw"]) -> float:
    one, a = _layer(generator), _between(generator, 0.01, 100)
    if what == "output":
        return _apart(_bn(one.u @ (a * one.W).T), _bn(one.u @ one.W.T))
    if what == "du":
        return _apart(_jacobian(lambda u: _bn(u @ (a * one.W).T), one.u), _jacobian(lambda u: _bn(u @ one.W.T), one.u))
    of_scaled = _jacobian(lambda W: _bn(one.u @ W.T), a * one.W)
    return _apart(of_scaled, _jacobian(lambda W: _bn(one.u @ W.T), one.W) / a)


def _scale_any(generator: torch.Generator, *, signed: bool) -> float:
    one, a = _layer(generator), -_between(generator, 0.01, 100)
    return _scale_at(one.u, one.W, a, signed=signed)


def _scale_at(u: Tensor, W: Tensor, a: float, *, signed: bool) -> float:
    wanted = _bn(u @ W.T)
    return _apart(_bn(u @ (a * W).T), math.copysign(1, a) * wanted if signed else wanted)


def _scale_epsilon(generator: torch.Generator) -> float:
    one, a, epsilon = _layer(generator), _between(generator, 0.1, 10), _between(generator, 0.01, 1)
    return _apart(_bn(one.u @ (a * one.W).T, epsilon), _bn(one.u @ one.W.T, epsilon / a**2))


def _radial(generator: torch.Generator) -> float:
    one = _layer(generator)
    grad = one.gradient(one.W)
    along = (one.W * grad).sum(1).abs() / (one.W.norm(dim=1) * grad.norm(dim=1))
    return float(along.max())


def _inverse_norm(generator: torch.Generator) -> float:
    one, a = _layer(generator), _between(generator, 0.01, 100)
    sizes = [one.gradient(W).norm(dim=1) * W.norm(dim=1) for W in (one.W, a * one.W)]
    return _apart(sizes[1], sizes[0])


def _effective_rate(generator: torch.Generator) -> float:
    one, a, rate = _layer(generator), _between(generator, 0.1, 10), 0.3
    small, large = one.W, a * one.W
    return _apart((large - a**2 * rate * one.gradient(large)) / a, small - rate * one.gradient(small))


# --- the batch


def _coupling(generator: torch.Generator) -> float:
    x = _randn(generator, 6, 3)
    moved = x.clone()
    moved[int(torch.randint(6, (), generator=generator))] += 0.1
    return _stood_still(_bn(x), _bn(moved))


def _stood_still(before: Tensor, after: Tensor) -> float:
    """1 if one output is where it was, or nowhere."""
    change = (after - before).abs()
    return float(not bool(((change >= 1e-12) & change.isfinite()).all()))


def _coupling_share(generator: torch.Generator) -> float:
    residuals = []
    for m in (3, 8, 32, 128):
        shares = _shares(generator, m, 400)
        error = (shares.std() / math.sqrt(len(shares))).clamp(min=1e-12)
        residuals.append(float((shares.mean() - 2 / (m + 1)).abs() / error))
    return _worst(residuals)


def _shares(generator: torch.Generator, m: int, count: int) -> Tensor:
    """(count,) share of |J|_F^2 that lies across examples, J of one normally distributed unit's batch of m."""
    yhat = _bn(_randn(generator, m, count)).T
    identity, ones = torch.eye(m, dtype=torch.float64), torch.ones(m, m, dtype=torch.float64) / m
    jacobians = identity - ones - yhat[:, :, None] * yhat[:, None, :] / m  # up to the factor 1/sigma
    own = jacobians.diagonal(dim1=1, dim2=2).square().sum(1)
    return 1 - own / jacobians.square().sum((1, 2))


def _batch_of_two(generator: torch.Generator) -> float:
    x = _randn(generator, 2, 3)
    # relative to 1/sigma, which is what the direct path alone would give
    sizes = _jacobian(_bn, x).abs().amax((0, 2, 3)) * x.std(0, correction=0)
    return float(sizes.max())


def _batch_of_one(generator: torch.Generator) -> float:
    try:
        normalize(_randn(generator, 1, 3), torch.ones(3), torch.zeros(3), epsilon=0.0)
    except ValueError as error:
        return 0.0 if "variance" in str(error) else 1.0
    return 1.0


# --- Santurkar et al.


def _fact_c1(generator: torch.Generator) -> float:
    one = _unit(generator)
    inner = one.m * one.g - one.g.sum() - one.yhat * (one.g @ one.yhat)
    return _apart(one.gamma / (one.m * one.sigma) * inner, one.grad)


def _theorem_4_1(generator: torch.Generator) -> float:
    one = _unit(generator)
    scale = one.gamma**2 / one.sigma**2 * (one.g @ one.g)
    return float((one.grad @ one.grad - one.bound_4_1(one.g)).abs() / scale)


def _theorem_4_1_at_y(one: _Unit) -> float:
    g, _ = _derivatives(one.loss, one.y)
    size = one.grad @ one.grad
    return float((size - one.bound_4_1(g)) / size)


def _theorem_4_2(generator: torch.Generator) -> float:
    one = _unit(generator)
    d = one.grad
    off = d @ one.hessian @ d - one.bound_4_2(one.g, one.H, d)
    return float(off.abs() / ((d @ d) * one.hessian.norm()))


def _theorem_4_2_at_y(one: _Unit) -> float:
    d = one.grad
    g, H = _derivatives(one.loss, one.y)
    return float((d @ one.hessian @ d - one.bound_4_2(g, H, d)) / ((d @ d) * one.hessian.norm()))


def _observation_4_3(one: _Unit) -> dict[str, float]:
    """``same``: z = y. ``reduced``: the gradient is what Theorem 4.1 makes it. ``smaller``: 0 if it is strictly."""
    mean = one.y.mean()
    (g, _), (grad, _) = (
        _derivatives(one.loss, one.y),
        _derivatives(lambda v: one.loss(one.sigma * _bn(v) + mean), one.y),
    )
    reduced = g @ g - g.sum().square() / one.m - (g @ one.yhat).square() / one.m
    return {
        "same": _apart(one.sigma * one.yhat + mean, one.y),
        "reduced": float((grad @ grad - reduced).abs() / (g @ g)),
        "smaller": float(not bool(grad.norm() < g.norm())),  # strict: a gradient has a part in the plane taken out
    }


@dataclass(frozen=True)
class _Weights:
    """y = X w, and the derivatives of L-hat with respect to w, by autograd through X."""

    unit: _Unit
    size: float  # |X|_2
    grad: Tensor
    hessian: Tensor

    def reduced(self) -> Tensor:
        """|g|^2 - m mu_g^2 - <g,y-hat>^2 / m."""
        g = self.unit.g
        return g @ g - self.unit.m * g.mean().square() - (g @ self.unit.yhat).square() / self.unit.m

    @property
    def factor(self) -> float:
        return self.unit.gamma**2 / self.unit.sigma**2


def _weights(generator: torch.Generator, *, orthogonal: bool) -> _Weights:
    size, m = _between(generator, 0.3, 2), 7
    X = _randn(generator, m, m)
    X = torch.linalg.qr(X)[0] if orthogonal else X / torch.linalg.matrix_norm(X, 2)
    gamma, beta = _between(generator, 0.3, 2), _between(generator, -1, 1)
    return _weighted(size * X, _randn(generator, m), gamma, beta, _loss(generator, m))


def _weighted(X: Tensor, w: Tensor, gamma: float, beta: float, loss: Loss) -> _Weights:
    grad, hessian = _derivatives(lambda v: loss(gamma * _bn(X @ v) + beta), w)
    return _Weights(_built(X @ w, gamma, beta, loss), float(torch.linalg.matrix_norm(X, 2)), grad, hessian)


def _theorem_4_4(one: _Weights, reading: Literal["printed", "proof"]) -> float:
    """At X = lambda orthogonal |X' g|^2 = lambda^2 |g|^2 is its maximum over X, and |dL-hat/dW|^2 at most its own."""
    g, m = one.unit.g, one.unit.m
    largest = one.size**2 * (g @ g)
    first = largest**2 if reading == "printed" else largest
    bound = one.factor * (first - m * g.mean().square() - one.size**2 * (g @ one.unit.yhat).square())
    size = one.grad @ one.grad
    return float((size - bound) / size)


def _theorem_4_4_corrected(one: _Weights, *, orthogonal: bool) -> float:
    excess = one.grad @ one.grad - one.size**2 * one.factor * one.reduced()
    relative = float(excess / (one.size**2 * one.factor * (one.unit.g @ one.unit.g)))
    return abs(relative) if orthogonal else relative


def _corollary_c1(one: _Unit, *, same: bool) -> float:
    """Both maxima over |X|_2 <= lambda with y, and so d, g and the Hessians, given; lambda^4 cancels.

    NaN where H is not positive semidefinite: of such a loss the corollary says nothing.
    """
    eigenvalues = torch.linalg.eigvalsh(one.H)
    if not bool(eigenvalues[0] >= -1e-12 * eigenvalues[-1].abs()):
        return math.nan
    d = one.grad
    kappa = float((one.g @ one.yhat) * (d @ d)) / (one.m * one.gamma)  # Theorem 4.2's gap, taken into the bracket
    left = _largest_form(one.hessian, d)
    right = one.gamma**2 / one.sigma**2 * (_largest_form(one.H, d if same else one.g) - kappa)
    return (left - right) / max(abs(left), abs(right))


def _largest_form(matrix: Tensor, d: Tensor) -> float:
    """Maximum over |X|_2 <= 1 of (X X' d)' A (X X' d).

    X X' is (I + R)/2 with R symmetric and |R|_2 <= 1, and R d may be any vector no longer than d: the maximum is of a
    quadratic form over a ball. Its maximizer r solves (mu I - A) r = A d on the sphere, mu the top eigenvalue or above.
    """
    values, vectors = np.linalg.eigh(matrix.numpy())
    centre: NDArray[np.float64] = vectors.T @ d.numpy()
    pull, radius = values * centre, float(np.linalg.norm(centre))
    top = float(values[-1])
    if top <= 0:
        return 0.0  # r = -d, X = 0

    def length(mu: float) -> float:
        return float(np.linalg.norm(pull / (mu - values)))

    low, high = top * (1 + 1e-13), top + float(np.linalg.norm(pull)) / radius + 1e-300
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if length(middle) > radius else (low, middle)
    at = centre + pull / (high - values)
    return float(values @ at**2) / 4


def _corollary_c1_orthogonal(one: _Weights) -> float:
    """Both sides with respect to w: the left by autograd through X, the right by Theorem 4.2 at y."""
    unit, d = one.unit, one.unit.grad
    left = one.grad @ one.hessian @ one.grad
    right = one.size**4 * unit.bound_4_2(unit.g, unit.H, d)
    return float((left - right).abs() / ((one.grad @ one.grad) * one.hessian.norm()))


def _lemma_4_5(generator: torch.Generator) -> float:
    w, best = _randn(generator, 6), _randn(generator, 6)
    return _worst(_lemma_4_5_at(w, best, (best @ w) / (best @ best), _between(generator, -3, 3)).values())


def _lemma_4_5_at(w: Tensor, best: Tensor, k: Tensor | float, other: float) -> dict[str, float]:
    """``distance``: of the identity. ``nearest``: 0 if no ``other`` multiple is nearer than ``k``."""
    found = (w - k * best).square().sum()
    wanted = (w - best).square().sum() - (best @ best - best @ w).square() / (best @ best)
    nearest = bool((w - other * best).square().sum() >= found - 1e-12)
    return {"distance": float((found - wanted).abs() / (w @ w)), "nearest": float(not nearest)}


# --- the motivating failure


@dataclass(frozen=True)
class _How:
    """Of x = w u + b: what normalizes it, and the target's slope ``slope`` in ``1 + slope u``."""

    scaled: bool = True
    slope: float = 0.0
    epsilon: float = 0.0
    through: bool = False

    def normalized(self, u: Tensor, w: Tensor, b: Tensor) -> Tensor:
        """x-hat (examples, starts) of u, and of w and b (starts,)."""
        x = w * u + b
        mean = x.mean(0)
        sd = (x.var(0, correction=0) + self.epsilon).sqrt() if self.scaled else torch.ones_like(mean)
        return (x - mean) / sd if self.through else (x - mean.detach()) / sd.detach()

    def loss(self, u: Tensor, w: Tensor, b: Tensor) -> Tensor:
        """(starts,) mean over the examples of (x-hat - 1 - slope u)^2 / 2."""
        return (self.normalized(u, w, b) - 1 - self.slope * u).square().mean(0) / 2


EPSILON: Final = 0.1  # in the failure's scale
_HOW: Final[Mapping[Treatment, _How]] = {
    "centred": _How(scaled=False),
    "shrinking": _How(),
    "growing": _How(slope=2.0),
    "epsilon": _How(epsilon=EPSILON),
    "through": _How(through=True),
}
TREATMENTS: Final = tuple(_HOW)


def _starts(generator: torch.Generator, examples: int, starts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw u (examples, starts) of mean 0 and variance 1, w between 0.5 and 1.5, b = 0."""
    u = _bn(_randn(generator, examples, starts))
    w = 0.5 + torch.rand(starts, generator=generator, dtype=torch.float64)
    return u, w, torch.zeros(starts, dtype=torch.float64)


def _descend(how: _How, u: Tensor, w: Tensor, b: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """One step of w and b; w stays where the normalization only centres, as in the paper's example."""
    w, b = w.detach().requires_grad_(), b.detach().requires_grad_()
    of_w, of_b = torch.autograd.grad(how.loss(u, w, b).sum(), (w, b))
    return (w - rate * of_w if how.scaled else w).detach(), (b - rate * of_b).detach()


def _failure_centred(generator: torch.Generator) -> float:
    u, w, b = _starts(generator, 9, 3)
    how, rate = _HOW["centred"], _between(generator, 0.01, 1)
    before, at_first = how.normalized(u, w, b), how.loss(u, w, b)
    for _ in range(5):
        w, b = _descend(how, u, w, b, rate)
    return _worst(
        (
            _apart(b, torch.full_like(b, 5 * rate)),
            _apart(how.normalized(u, w, b), before),
            _apart(how.loss(u, w, b), at_first),
        )
    )


def _failure_scaled(generator: torch.Generator) -> float:
    u, w, b = _starts(generator, 9, 3)
    how = _How(slope=_between(generator, -1, 3))
    rate = _between(generator, 0.01, 0.1)  # w >= 0.5 keeps its sign
    new_w, new_b = _descend(how, u, w, b, rate)
    return _worst(
        (
            _apart(new_w, w + rate * (how.slope - 1) / w),
            _apart(new_b, b + rate / w),
            _apart(how.normalized(u, new_w, new_b), how.normalized(u, w, b)),
        )
    )


def _failure_through(generator: torch.Generator) -> float:
    u, w, b = _starts(generator, 9, 3)
    new_w, new_b = _descend(_How(slope=_between(generator, -1, 3), through=True), u, w, b, 1.0)
    return _worst((_apart(new_w, w), float((new_b - b).abs().max())))


CHECKS: Final[dict[str, Check]] = {
    "failure_centred": _failure_centred,
    "failure_scaled": _failure_scaled,
    "failure_through": _failure_through,
    "gradient": _gradient,
    "gradient_without_direct": partial(_gradient, cut=("direct",)),
    "gradient_without_variance": partial(_gradient, cut=("variance",)),
    "gradient_without_mean": partial(_gradient, cut=("mean",)),
    "identity_recovery": _identity_recovery,
    "identity_recovery_epsilon": partial(_identity_recovery, with_epsilon=True),
    "constant_bias": _constant_bias,
    "positions": _positions,
    "population": _population,
    "unbiased": _unbiased,
    "fold": _fold,
    "scale_output": partial(_scale, what="output"),
    "scale_output_any": partial(_scale_any, signed=False),
    "scale_output_sign": partial(_scale_any, signed=True),
    "scale_du": partial(_scale, what="du"),
    "scale_dw": partial(_scale, what="dw"),
    "scale_epsilon": _scale_epsilon,
    "radial": _radial,
    "inverse_norm": _inverse_norm,
    "effective_rate": _effective_rate,
    "coupling": _coupling,
    "coupling_share": _coupling_share,
    "batch_of_two": _batch_of_two,
    "batch_of_one": _batch_of_one,
    "fact_c1": _fact_c1,
    "theorem_4_1": _theorem_4_1,
    "theorem_4_1_at_y": lambda generator: _theorem_4_1_at_y(_unit(generator)),
    "theorem_4_2": _theorem_4_2,
    "theorem_4_2_at_y": lambda generator: _theorem_4_2_at_y(_unit(generator)),
    "observation_4_3": lambda generator: _worst(_observation_4_3(_unit(generator)).values()),
    "theorem_4_4": lambda generator: _theorem_4_4(_weights(generator, orthogonal=True), "printed"),
    "theorem_4_4_proof": lambda generator: _theorem_4_4(_weights(generator, orthogonal=True), "proof"),
    "theorem_4_4_corrected": lambda generator: _theorem_4_4_corrected(
        _weights(generator, orthogonal=False), orthogonal=False
    ),
    "theorem_4_4_equality": lambda generator: _theorem_4_4_corrected(
        _weights(generator, orthogonal=True), orthogonal=True
    ),
    "corollary_c1": lambda generator: _corollary_c1(_unit(generator, convex=True), same=False),
    "corollary_c1_same": lambda generator: _corollary_c1(_unit(generator, convex=True), same=True),
    "corollary_c1_orthogonal": lambda generator: _corollary_c1_orthogonal(_weights(generator, orthogonal=True)),
    "lemma_4_5": _lemma_4_5,
}
_ONCE = ("unbiased", "coupling_share")  # these draw thousands of batches themselves, for one z


# --- counterexamples, in numbers that can be worked out by hand


def _tensor(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _example(w: Sequence[float], a: Sequence[float], p: Sequence[float]) -> _Weights:
    """Batch of 4, y = X w with X = Q / 2, Q orthogonal; L(z) = a z^2 / 2 + p z + z^4 / 48, summed; z = y-hat / 2 - 1.

    ``a`` and so the Hessian are not negative anywhere.
    """
    X = _tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 4
    curve, slope = _tensor(a), _tensor(p)

    def loss(z: Tensor) -> Tensor:
        return (curve * z.square() / 2 + slope * z + z.pow(4) / 48).sum()

    return _weighted(X, _tensor(w), 0.5, -1.0, loss)


def _wrong_place() -> _Weights:
    """Where Theorems 4.1 and 4.2 break at y, and 4.4 in both readings."""
    return _example((-2, -3, -2, 3), (0, 1, 1, 2), (-1, 0, -1, 0))


def _minimax() -> _Weights:
    """Where the corollary breaks in both readings, with <g, y-hat> > 0 and H positive semidefinite."""
    return _example((-2, 1, 1, -1), (0, 2, 0, 1), (-1, 2, 3, 1))


def _without(cut: Path) -> float:
    x, grad = _tensor([[0, 1], [1, 0], [2, 3], [5, 0]]), _tensor([[1, 0], [0, 2], [-1, 0], [2, 1]])
    return _gradient_at(x, _tensor([2, 1]), _tensor([0, 1]), grad, 0.5, (cut,))


COUNTEREXAMPLES: Final[dict[str, Callable[[], float]]] = {
    "gradient_without_direct": partial(_without, "direct"),
    "gradient_without_variance": partial(_without, "variance"),
    "gradient_without_mean": partial(_without, "mean"),
    "scale_output_any": lambda: _scale_at(_tensor([[1, 0], [0, 1], [2, 1]]), _tensor([[1, 3]]), -2.0, signed=False),
    "theorem_4_1_at_y": lambda: _theorem_4_1_at_y(_wrong_place().unit),
    "theorem_4_2_at_y": lambda: _theorem_4_2_at_y(_wrong_place().unit),
    "theorem_4_4": lambda: _theorem_4_4(_wrong_place(), "printed"),
    "theorem_4_4_proof": lambda: _theorem_4_4(_wrong_place(), "proof"),
    "corollary_c1": lambda: _corollary_c1(_minimax().unit, same=False),
    "corollary_c1_same": lambda: _corollary_c1(_minimax().unit, same=True),
}


# --- curves


def invariance(ratios: Sequence[float], *, a: float, seed: int) -> dict[str, list[float]]:
    """How far scale invariance is off when epsilon is ``ratios`` times a unit's variance, for weights times ``a``.

    ``output`` is max |BN((aW)u) - BN(Wu)| / max |BN(Wu)|, ``du`` and ``dw`` the same for the two derivatives,
    ``predicted`` what one unit's output must show: ``|sqrt((1 + r)/(1 + r/a^2)) - 1|``.
    """
    one = _layer(torch.Generator().manual_seed(seed))
    one = _Layer(one.u, one.W[:1], one.push[:, :1])
    variance = float((one.u @ one.W.T).var(correction=0))
    found: dict[str, list[float]] = {"output": [], "du": [], "dw": [], "predicted": []}
    for ratio in ratios:
        bn = partial(_bn, epsilon=ratio * variance)
        (output, du, dw), (of_scaled, scaled_du, scaled_dw) = (
            _derivatives_of(one.u, W, bn) for W in (one.W, a * one.W)
        )
        found["output"].append(_apart(of_scaled, output))
        found["du"].append(_apart(scaled_du, du))
        found["dw"].append(_apart(a * scaled_dw, dw))
        found["predicted"].append(abs(math.sqrt((1 + ratio) / (1 + ratio / a**2)) - 1))
    return found


def _derivatives_of(u: Tensor, W: Tensor, bn: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """BN(Wu) and its derivatives with respect to u and W."""
    return bn(u @ W.T), _jacobian(lambda v: bn(v @ W.T), u), _jacobian(lambda V: bn(u @ V.T), W)


def gradient_norms(scales: Sequence[float], *, seed: int, rate: float = 0.1) -> dict[str, list[float]]:
    """At weights times each of ``scales``: ``gradient`` |dl/dw| and ``turned``, the angle one step turns w by (rad).

    With BN the first falls as 1/|w| and the second as rate/|w|^2; ``plain_gradient`` is the same loss without BN.
    """
    one = _layer(torch.Generator().manual_seed(seed))
    found: dict[str, list[float]] = {"norm": [], "gradient": [], "turned": [], "plain_gradient": []}
    for scale in scales:
        W = scale * one.W
        grad = one.gradient(W)
        found["norm"].append(float(W.norm()))
        found["gradient"].append(float(grad.norm()))
        # w and its gradient are orthogonal, unit by unit
        found["turned"].append(float(torch.atan(rate * grad.norm(dim=1) / W.norm(dim=1)).mean()))
        leaf = W.detach().requires_grad_()
        plain = (one.push * torch.tanh(one.u @ leaf.T)).sum()
        found["plain_gradient"].append(float(_grad(plain, leaf).detach().norm()))
    return found


def coupling(batches: Sequence[int], *, draws: int, seed: int) -> dict[str, list[float]]:
    """For each batch size m: the mean ``share`` of |J|_F^2 across examples over ``draws`` units, and its ``error``.

    Raises:
        ValueError: If a batch has fewer than 3 examples: of 1 there is no variance, and of 2 the Jacobian is 0.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[float]] = {"share": [], "error": []}
    for m in batches:
        if m < 3:
            reason = "a batch of 1 has no variance" if m < 2 else "the Jacobian of a batch of 2 is 0"
            raise ValueError(f"a share across examples needs 3 of them or more, got m={m}: {reason}")
        shares = _shares(generator, m, draws)
        found["share"].append(float(shares.mean()))
        found["error"].append(float(shares.std()) / math.sqrt(draws))
    return found


@dataclass(frozen=True)
class Failure:
    """The motivating failure, step by step: (T + 1, starts) of each."""

    b: NDArray[np.float64]
    w: NDArray[np.float64]
    loss: NDArray[np.float64]

    def summary(self) -> dict[str, NDArray[np.float64]]:
        """(T + 1,) for each of b, w and loss: median, ``_low`` and ``_high`` (10th, 90th percentile), ``_far``.

        ``_far`` is the largest absolute value. All are of those starts in which b, w and loss are finite, whose number
        is ``finite``; NaN where there are none.
        """
        parts = {"b": self.b, "w": self.w, "loss": self.loss}
        kept = np.logical_and.reduce([np.isfinite(values) for values in parts.values()])
        found = {"finite": kept.sum(1).astype(np.float64)}
        for name, values in parts.items():
            rows = [row[keep] if keep.any() else np.array([np.nan]) for row, keep in zip(values, kept, strict=True)]
            low, middle, high = np.array([np.percentile(row, (10, 50, 90)) for row in rows]).T
            far = np.array([np.abs(row).max() for row in rows])
            found |= {name: middle, f"{name}_low": low, f"{name}_high": high, f"{name}_far": far}
        return found


def failure(
    treatment: Treatment, *, steps: int, rate: float, seed: int, starts: int = 50, examples: int = 100
) -> Failure:
    """Gradient descent on x = w u + b whose normalization the gradient does or does not see (paper, section 2).

    The loss is ``mean (x-hat - 1 - c u)^2 / 2``: a gradient that takes x-hat's mean for a constant wants b to grow, and
    nothing that b does can change x-hat; nor, at epsilon 0, what w does while it keeps its sign. u and the w it begins
    with differ from start to start.

    - ``centred`` subtracts the mean and learns b alone: b grows by the rate at every step.
    - ``shrinking`` also divides by the deviation, learns w too, and c = 0 asks for a smaller one: w <- w - rate/w. The
      flow reaches w = 0 at time w^2/2 with b = w, and an infinite speed; steps go through it, and w/sqrt(rate) is from
      then on Boole's transformation y <- y - 1/y, which is chaotic: single paths mean nothing, their spread does.
    - ``growing``: the same with c = 2, which asks for a larger w: w and b grow without bound, and as the root of time.
    - ``epsilon``: as ``shrinking``, with `EPSILON` in the scale: w goes to 0 and stays (if rate < 2 epsilon); by that
      the loss *does* fall once, and b then grows by rate/sqrt(epsilon) at every step.
    - ``through``: as ``shrinking``, with the gradient through the statistics: nothing moves.

    A start that is thrown out of the numbers there are stays in the result, as infinity or NaN.

    Raises:
        ValueError: For an unknown treatment.
    """
    if treatment not in _HOW:
        raise ValueError(f"treatment is one of {', '.join(TREATMENTS)}, got {treatment!r}")
    how = _HOW[treatment]
    u, w, b = _starts(torch.Generator().manual_seed(seed), examples, starts)
    if not how.scaled:
        w = torch.ones_like(w)
    rows = []
    for step in range(steps + 1):
        rows.append(torch.stack((b, w, how.loss(u, w, b))).numpy())
        if step < steps:
            w, b = _descend(how, u, w, b, rate)
    b_, w_, loss = np.stack(rows, axis=1)
    return Failure(b_, w_, loss)


def reach(times: Sequence[float], rates: Sequence[float], *, seed: int, starts: int = 200) -> dict[str, list[float]]:
    """Is scaling worse? b of ``shrinking`` over b of ``centred``, at rate times steps = each of ``times``.

    One entry for each rate and time, rates outermost: ``rate``, ``time``, of the starts' ratios the median ``ratio``,
    ``low`` and ``high`` (10th, 90th percentile), the ``share`` that is above 1, and how many are ``finite``. Steps are
    those that the statement *failure_scaled* checks: w <- w - rate/w, b <- b + rate/|w|.
    """
    _, start, _ = _starts(torch.Generator().manual_seed(seed), 2, starts)
    found: dict[str, list[float]] = {name: [] for name in ("rate", "time", "ratio", "low", "high", "share", "finite")}
    for rate in rates:
        w, b, done = start.numpy().copy(), np.zeros(starts), 0
        for time in times:
            with np.errstate(all="ignore"):
                while done < round(time / rate):
                    w, b, done = w - rate / w, b + rate / np.abs(w), done + 1
            ratio = b[np.isfinite(b)] / (rate * done)
            low, middle, high = np.percentile(ratio, (10, 50, 90)) if len(ratio) else (math.nan,) * 3
            share = float((ratio > 1).mean()) if len(ratio) else math.nan
            for name, value in zip(found, (rate, time, middle, low, high, share, len(ratio)), strict=True):
                found[name].append(float(value))
    return found
