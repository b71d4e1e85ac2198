"""The statements of `experiments.statements`, computed: in float64, with batch normalization from primitives.

``CHECKS`` holds one function a statement, of a generator (one case's random draws) to a residual. The worst case is
what counts. Curves for pictures are here too: invariance against epsilon, the gradient's norm against the weights', the
motivating failure of Ioffe & Szegedy (2015, section 2), and the coupling of a batch.

torch's own batch normalization refuses epsilon 0 in training, and several of its second derivatives are wrong under
`torch.func`; here y-hat is written out, and Hessians are `autograd.grad` twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.byhand import Path, backward, fold, forward, normalize, population

__all__ = ["CHECKS", "Checked", "Failure", "check", "coupling", "failure", "gradient_norms", "invariance"]

Check = Callable[[torch.Generator], float]
Loss = Callable[[Tensor], Tensor]
Treatment = Literal["centred", "scaled", "through"]


@dataclass(frozen=True)
class Checked:
    """One statement over all its cases."""

    residual: float  # the worst
    exceeded: int  # cases in which it exceeded the bound
    cases: int


def check(name: str, *, bound: float, cases: int, seed: int) -> Checked:
    """The worst residual of a statement over ``cases`` draws from ``seed``.

    Raises:
        ValueError: If there is no statement of that name, or no case.
    """
    if name not in CHECKS:
        raise ValueError(f"no statement is named {name!r}; there are {', '.join(CHECKS)}")
    if cases < 1:
        raise ValueError(f"a statement is checked on 1 case or more, got {cases}")
    generator = torch.Generator().manual_seed(seed)
    once = name in _ONCE
    residuals = [CHECKS[name](generator) for _ in range(1 if once else cases)]
    return Checked(max(residuals), sum(residual > bound for residual in residuals), len(residuals))


# --- tools


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _between(generator: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))


def _apart(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
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


def _unit(generator: torch.Generator, *, y: Tensor | None = None, convex: bool = False) -> _Unit:
    m = 7 if y is None else len(y)
    y = _between(generator, 0.3, 3) * _randn(generator, m) + _randn(generator, 1) if y is None else y
    gamma, beta = _between(generator, 0.3, 2), _between(generator, -1, 1)
    mix, push, size = _randn(generator, m, m), _randn(generator, m), _between(generator, 0.1, 3)

    def loss(z: Tensor) -> Tensor:
        if convex:
            return 0.5 * (mix @ z).square().sum() / m + size * push @ z
        return size * (push @ torch.tanh(mix @ z) + 0.1 * z @ mix @ z)

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
    leaves = [tensor.requires_grad_() for tensor in (x, gamma, beta)]
    wanted = torch.autograd.grad(forward(*leaves, epsilon=epsilon).y, leaves, grad)
    with torch.no_grad():
        done = forward(x, gamma, beta, epsilon=epsilon)
        found = backward(grad, x, gamma, done, epsilon=epsilon, cut=cut)
    parts = zip((found.x, found.gamma, found.beta), wanted, strict=True)
    return max(_apart(one, other) for one, other in parts)


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
    return max(_apart(found.y, wanted), _apart(found.y, theirs), _apart(found.variance, rows.variance))


def _population(generator: torch.Generator) -> float:
    batches = [_randn(generator, 6, 3) * 2 + _randn(generator, 3) for _ in range(5)]
    norm = nn.BatchNorm1d(3, momentum=None, dtype=torch.float64)  # a cumulative average
    for batch in batches:
        norm(batch)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    found = population(batches)
    return max(_apart(found.mean, norm.running_mean), _apart(found.variance, norm.running_var))


def _unbiased(generator: torch.Generator) -> float:
    m, batches = 4, 20_000
    x = _randn(generator, batches, m).exp()  # log-normal: nothing here is special to the normal law
    true = (math.e - 1) * math.e
    found = x.var(1, correction=0) * m / (m - 1)
    return abs(float((found.mean() - true) / (found.std() / math.sqrt(batches))))


def _fold(generator: torch.Generator) -> float:
    worst = 0.0
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
            worst = max(worst, _apart(fold(layer, norm)(x), both(x)))
    return worst


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
    wanted = _bn(one.u @ one.W.T)
    return _apart(_bn(one.u @ (a * one.W).T), math.copysign(1, a) * wanted if signed else wanted)


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
    """1 if an output stands still when another example of its batch is moved."""
    x = _randn(generator, 6, 3)
    moved = x.clone()
    moved[int(torch.randint(6, (), generator=generator))] += 0.1
    return float(bool(((_bn(moved) - _bn(x)).abs() < 1e-12).any()))


def _coupling_share(generator: torch.Generator) -> float:
    worst = 0.0
    for m in (3, 8, 32, 128):
        shares = _shares(generator, m, 400)
        spread = float(shares.std()) / math.sqrt(len(shares))
        worst = max(worst, abs(float(shares.mean()) - 2 / (m + 1)) / max(spread, 1e-12))
    return worst


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


def _theorem_4_1_at_y(generator: torch.Generator) -> float:
    one = _unit(generator)
    g, _ = _derivatives(one.loss, one.y)
    size = one.grad @ one.grad
    return float((size - one.bound_4_1(g)) / size)


def _theorem_4_2(generator: torch.Generator) -> float:
    one = _unit(generator)
    d = one.grad
    off = d @ one.hessian @ d - one.bound_4_2(one.g, one.H, d)
    return float(off.abs() / ((d @ d) * one.hessian.norm()))


def _theorem_4_2_at_y(generator: torch.Generator) -> float:
    one = _unit(generator)
    d = one.grad
    g, H = _derivatives(one.loss, one.y)
    return float((d @ one.hessian @ d - one.bound_4_2(g, H, d)) / ((d @ d) * one.hessian.norm()))


def _observation_4_3(generator: torch.Generator) -> float:
    one = _unit(generator)
    mean = one.y.mean()
    again = one.sigma * one.yhat + mean
    (g, _), (grad, _) = (
        _derivatives(one.loss, one.y),
        _derivatives(lambda v: one.loss(one.sigma * _bn(v) + mean), one.y),
    )
    reduced = g @ g - g.sum().square() / one.m - (g @ one.yhat).square() / one.m
    smaller = float(grad.norm() >= g.norm())  # the reduction is strict: a gradient has a part in the plane taken out
    return max(_apart(again, one.y), float((grad @ grad - reduced).abs() / (g @ g)), smaller)


@dataclass(frozen=True)
class _Weights:
    """y = X w, and the gradients with respect to w of both losses."""

    unit: _Unit
    size: float  # |X|_2
    grad: Tensor  # of L-hat, by autograd through X

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
    unit = _unit(generator, y=size * X @ _randn(generator, m))
    return _Weights(unit, size, size * X.T @ unit.grad)


def _theorem_4_4(generator: torch.Generator, reading: Literal["printed", "proof"]) -> float:
    """At X = lambda orthogonal |X' g|^2 = lambda^2 |g|^2 is its maximum over X, and |dL-hat/dW|^2 at most its own."""
    one = _weights(generator, orthogonal=True)
    g, m = one.unit.g, one.unit.m
    largest = one.size**2 * (g @ g)
    first = largest**2 if reading == "printed" else largest
    bound = one.factor * (first - m * g.mean().square() - one.size**2 * (g @ one.unit.yhat).square())
    size = one.grad @ one.grad
    return float((size - bound) / size)


def _theorem_4_4_corrected(generator: torch.Generator, *, orthogonal: bool) -> float:
    one = _weights(generator, orthogonal=orthogonal)
    excess = one.grad @ one.grad - one.size**2 * one.factor * one.reduced()
    relative = float(excess / (one.size**2 * one.factor * (one.unit.g @ one.unit.g)))
    return abs(relative) if orthogonal else relative


def _corollary_c1(generator: torch.Generator, *, same: bool) -> float:
    """Both maxima over |X|_2 <= lambda with y, and so d, g and the Hessians, given; lambda^4 cancels."""
    one = _unit(generator, convex=True)
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


def _corollary_c1_orthogonal(generator: torch.Generator) -> float:
    one = _weights(generator, orthogonal=True)
    unit, d = one.unit, one.unit.grad
    # At X = lambda orthogonal: dL-hat/dW = X'd and its Hessian X' H-hat X.
    left = one.size**4 * (d @ unit.hessian @ d)
    right = one.size**4 * unit.bound_4_2(unit.g, unit.H, d)
    return float((left - right).abs() / (one.size**4 * (d @ d) * unit.hessian.norm()))


def _lemma_4_5(generator: torch.Generator) -> float:
    w, best = _randn(generator, 6), _randn(generator, 6)
    k = (best @ w) / (best @ best)
    found = (w - k * best).square().sum()
    wanted = (w - best).square().sum() - (best @ best - best @ w).square() / (best @ best)
    other = _between(generator, -3, 3)
    nearer = float((w - other * best).square().sum() < found - 1e-12)  # k is the best there is
    return max(float((found - wanted).abs() / (w @ w)), nearer)


CHECKS: Final[dict[str, Check]] = {
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
    "theorem_4_1_at_y": _theorem_4_1_at_y,
    "theorem_4_2": _theorem_4_2,
    "theorem_4_2_at_y": _theorem_4_2_at_y,
    "observation_4_3": _observation_4_3,
    "theorem_4_4": partial(_theorem_4_4, reading="printed"),
    "theorem_4_4_proof": partial(_theorem_4_4, reading="proof"),
    "theorem_4_4_corrected": partial(_theorem_4_4_corrected, orthogonal=False),
    "theorem_4_4_equality": partial(_theorem_4_4_corrected, orthogonal=True),
    "corollary_c1": partial(_corollary_c1, same=False),
    "corollary_c1_same": partial(_corollary_c1, same=True),
    "corollary_c1_orthogonal": _corollary_c1_orthogonal,
    "lemma_4_5": _lemma_4_5,
}
_ONCE = ("unbiased", "coupling_share")  # these draw thousands of batches themselves, for one z


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
    """The motivating failure, step by step: T + 1 values of each."""

    b: list[float]
    w: list[float]
    loss: list[float]


def failure(treatment: Treatment, *, steps: int, rate: float, seed: int, examples: int = 100) -> Failure:
    """Gradient descent on x = w u + b whose normalization the gradient does or does not see (paper, section 2).

    The loss is ``mean (x-hat - 1)^2 / 2``: the gradient that takes x-hat's mean for a constant wants b to grow, and
    nothing that b does can change x-hat. ``centred`` subtracts the mean and learns b alone; ``scaled`` also divides by
    the standard deviation and learns w too; both outside the gradient. ``through`` is ``scaled`` with the gradient
    through the statistics.

    Raises:
        ValueError: For an unknown treatment.
    """
    if treatment not in get_args(Treatment):
        raise ValueError(f"treatment is one of {', '.join(get_args(Treatment))}, got {treatment!r}")
    u = _randn(torch.Generator().manual_seed(seed), examples)
    u = (u - u.mean()) / u.std(correction=0)
    w, b = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (1.0, 0.0))
    learned = [b] if treatment == "centred" else [w, b]
    found = Failure([], [], [])
    for step in range(steps + 1):
        x = w * u + b
        mean, sd = x.mean(), x.var(correction=0).sqrt() if treatment != "centred" else torch.ones((), dtype=x.dtype)
        if treatment != "through":
            mean, sd = mean.detach(), sd.detach()
        loss = ((x - mean) / sd - 1).square().mean() / 2
        for values, value in ((found.b, b), (found.w, w), (found.loss, loss)):
            values.append(float(value.detach()))
        if step < steps:
            grads = torch.autograd.grad(loss, learned)
            with torch.no_grad():
                for parameter, grad in zip(learned, grads, strict=True):
                    parameter -= rate * grad
    return found
