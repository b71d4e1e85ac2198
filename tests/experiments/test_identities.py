"""Every statement of the papers: those that should hold do, those that should not are shown not to, and curves."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from torch import Tensor

from experiments import byhand, identities
from experiments.byhand import Gradients, Normalized, Population
from experiments.identities import (
    CHECKS,
    COUNTEREXAMPLES,
    EPSILON,
    TREATMENTS,
    check,
    coupling,
    failure,
    gradient_norms,
    invariance,
    reach,
)
from experiments.statements import STATEMENTS, Statement

CASES = 12
Array = NDArray[np.float64]


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda one: one.name)
def test_each_statement_is_as_it_is_expected(statement: Statement) -> None:
    found = check(statement.name, bound=statement.bound, cases=CASES, seed=1)
    assert math.isfinite(found.residual)
    assert (found.residual <= statement.bound) == (statement.expected == "holds"), found
    assert (found.exceeded == 0) == (statement.expected == "holds")


def test_every_check_has_its_statement() -> None:
    assert [one.name for one in STATEMENTS] == list(CHECKS)


def test_every_statement_says_what_and_where() -> None:
    for one in STATEMENTS:
        assert one.source.startswith(("Ioffe & Szegedy 2015, ", "Santurkar et al. 2018, "))
        assert len(one.claim) > 20


def test_of_every_false_form_it_is_said_what_it_is() -> None:
    found: dict[str, set[str]] = {}
    for one in STATEMENTS:
        if one.expected != "holds":
            found.setdefault(one.expected, set()).add(one.name)
    assert found == {
        "false as printed": {"scale_output_any", "theorem_4_4", "corollary_c1"},
        "false as read": {"theorem_4_1_at_y", "theorem_4_2_at_y", "theorem_4_4_proof", "corollary_c1_same"},
        "false, cut on purpose": {f"gradient_without_{path}" for path in ("direct", "variance", "mean")},
    }


def test_of_every_source_of_a_false_form_that_is_not_ours_the_correction_is_beside() -> None:
    theirs = {one.source for one in STATEMENTS if one.expected in ("false as printed", "false as read")}
    assert theirs == {one.source for one in STATEMENTS if one.expected == "holds" and "corrects" in one.claim}


def test_cases_and_seed_are_heeded() -> None:
    one, same, other = (check("theorem_4_1_at_y", bound=0.0, cases=9, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.residual != other.residual
    assert (one.cases, check("theorem_4_1", bound=0.0, cases=3, seed=1).cases) == (10, 3)  # with the counterexample
    assert check("theorem_4_1_at_y", bound=math.inf, cases=9, seed=1).exceeded == 0
    with pytest.raises(ValueError, match="no statement is named 'theorem_5'"):
        check("theorem_5", bound=0.0, cases=1, seed=0)
    with pytest.raises(ValueError, match="1 case or more, got 0"):
        check("lemma_4_5", bound=0.0, cases=0, seed=0)


def unbiased(y: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
    return (y - y.mean(0)) / (y.var(0) + epsilon).sqrt()


@pytest.mark.parametrize(
    "name", ["fact_c1", "theorem_4_1", "theorem_4_2", "corollary_c1_orthogonal", "theorem_4_4_equality"]
)
def test_another_variance_breaks_the_theorems(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "_bn", unbiased)
    assert check(name, bound=1e-8, cases=3, seed=0).residual > 1e-3


@pytest.mark.parametrize("name", ["scale_output", "scale_dw", "constant_bias", "radial", "inverse_norm", "scale_du"])
def test_an_epsilon_breaks_the_invariances(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = identities._bn
    monkeypatch.setattr(identities, "_bn", lambda y, epsilon=0.0: kept(y, 0.1) + 0.01 * y)
    assert check(name, bound=1e-10, cases=3, seed=0).residual > 1e-4


@pytest.mark.parametrize("name", ["gradient", "identity_recovery", "positions"])
def test_another_algorithm_1_breaks_its_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = identities.forward

    def other(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, *, epsilon: float) -> object:
        return kept(x, gamma, beta, epsilon=epsilon + 0.01)

    monkeypatch.setattr(identities, "forward", other)
    assert check(name, bound=1e-10, cases=3, seed=0).residual > 1e-4


# --- what is not a number is never passed over


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("name", ["lemma_4_5", "theorem_4_1_at_y"])
def test_a_residual_that_is_not_finite_is_the_worst(
    name: str, place: int, odd: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    residuals = iter([0.5 if k != place else odd for k in range(3)])
    monkeypatch.setitem(CHECKS, name, lambda generator: next(residuals))
    found = check(name, bound=1.0, cases=3, seed=0)
    assert math.isnan(found.residual)
    assert found.exceeded == 1


def test_so_is_a_counterexamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COUNTEREXAMPLES, "theorem_4_1_at_y", lambda: math.nan)
    assert math.isnan(check("theorem_4_1_at_y", bound=1e-10, cases=3, seed=0).residual)


def broken_fold(layer: torch.nn.Module, norm: torch.nn.Module) -> torch.nn.Module:
    found = byhand.fold(layer, norm)  # type: ignore[type-var]
    if isinstance(layer, torch.nn.Conv2d):
        found.weight.data[0] *= math.nan
    return found


def broken_population(batches: list[Tensor]) -> Population:
    found = byhand.population(batches)
    return replace(found, variance=found.variance * math.nan)


def broken_backward(*args: object, **named: object) -> Gradients:
    found = byhand.backward(*args, **named)  # type: ignore[arg-type]
    return replace(found, gamma=found.gamma * math.nan)


def broken_forward(*args: object, **named: object) -> Normalized:
    found = byhand.forward(*args, **named)  # type: ignore[arg-type]
    return replace(found, variance=found.variance * math.nan)


def broken_shares(generator: torch.Generator, m: int, count: int) -> Tensor:
    return shares_kept(generator, m, count) * (math.nan if m > 3 else 1)


shares_kept = identities._shares


@pytest.mark.parametrize(
    ("name", "part", "broken"),
    [
        ("fold", "fold", broken_fold),
        ("population", "population", broken_population),
        ("unbiased", "population", broken_population),
        ("gradient", "backward", broken_backward),
        ("gradient_without_mean", "backward", broken_backward),
        ("gradient", "forward", broken_forward),
        ("positions", "forward", broken_forward),
        ("coupling_share", "_shares", broken_shares),
    ],
)
def test_a_part_that_is_not_a_number_is_seen(
    name: str, part: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identities, part, broken)
    found = check(name, bound=1e-8, cases=4, seed=0)
    assert math.isnan(found.residual)
    assert found.exceeded > 0


NO_YHAT = ("batch_of_one", "lemma_4_5", "fold")


@pytest.mark.parametrize("name", [one.name for one in STATEMENTS if one.name not in NO_YHAT])
def test_a_normalization_that_is_not_a_number_makes_no_row_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever leans on y-hat: one entry of it is NaN in the last unit."""
    kept_bn, kept_forward, kept_shares = identities._bn, identities.forward, identities._shares

    def bn(y: Tensor, epsilon: float = 0.0) -> Tensor:
        found = kept_bn(y, epsilon)
        hole = torch.ones_like(found)
        hole[(-1,) * found.ndim] = math.nan
        return found * hole

    def forwards(*args: object, **named: object) -> Normalized:
        found = kept_forward(*args, **named)  # type: ignore[arg-type]
        hole = torch.ones_like(found.y)
        hole[(-1,) * hole.ndim] = math.nan
        return replace(found, y=found.y * hole, variance=found.variance * math.nan)

    def populations(batches: list[Tensor]) -> Population:
        return broken_population(batches)

    def shares(generator: torch.Generator, m: int, count: int) -> Tensor:
        return kept_shares(generator, m, count) * (math.nan if m > 3 else 1)

    monkeypatch.setattr(identities, "_bn", bn)
    monkeypatch.setattr(identities, "forward", forwards)
    monkeypatch.setattr(identities, "population", populations)
    monkeypatch.setattr(identities, "_shares", shares)
    try:
        found = check(name, bound=1e-8, cases=3, seed=0)
    except (ValueError, RuntimeError, np.linalg.LinAlgError):
        return  # refused: no row, no pass
    assert not math.isfinite(found.residual) or (name == "coupling" and found.residual == 1)


# --- false forms, by hand: what each must show, from its definition, in numpy


def largest_by_climbing(matrix: Array, d: Array) -> float:
    """Maximum of v' A v over |X|_2 <= 1, v = X X' d: v is any point of the ball with diameter from 0 to d."""
    centre, radius = d / 2, np.linalg.norm(d) / 2
    rng, best = np.random.default_rng(0), 0.0
    for _ in range(12):
        v = centre + radius * rng.standard_normal(len(d)) / 2
        for _ in range(600):
            away = v + 0.5 * matrix @ v / np.linalg.norm(matrix, 2) - centre
            v = centre + away * min(1.0, radius / np.linalg.norm(away))
        best = max(best, float(v @ matrix @ v))
    return best


@dataclass(frozen=True)
class ByHand:
    """One unit: y, gamma, beta, and gradient and Hessian of L anywhere."""

    y: Array
    gamma: float
    beta: float
    g: Callable[[Array], Array]
    H: Callable[[Array], Array]
    lam: float = 1.0

    @property
    def sigma(self) -> float:
        return float(np.sqrt(np.mean((self.y - self.y.mean()) ** 2)))

    @property
    def yhat(self) -> Array:
        return (self.y - self.y.mean()) / self.sigma

    @property
    def z(self) -> Array:
        return self.gamma * self.yhat + self.beta

    def d_at(self, y: Array) -> Array:
        """dL-hat/dy, by the chain rule."""
        m, sigma = len(y), np.sqrt(np.mean((y - y.mean()) ** 2))
        yhat = (y - y.mean()) / sigma
        plane = np.eye(m) - np.ones((m, m)) / m - np.outer(yhat, yhat) / m
        return self.gamma / sigma * plane @ self.g(self.gamma * yhat + self.beta)

    def hessian(self) -> Array:
        """Of L-hat, by central differences of its gradient."""
        h = 1e-5
        rows = [(self.d_at(self.y + h * e) - self.d_at(self.y - h * e)) / (2 * h) for e in np.eye(len(self.y))]
        return np.array(rows)

    def residual(self, name: str) -> float:
        m, ratio, yhat = len(self.y), self.gamma**2 / self.sigma**2, self.yhat
        d = self.d_at(self.y)
        if name == "theorem_4_1_at_y":
            g = self.g(self.y)
            bound = ratio * (np.sum(g**2) - np.sum(g) ** 2 / m - (g @ yhat) ** 2 / m)
            return float((d @ d - bound) / (d @ d))
        if name == "theorem_4_2_at_y":
            g, H = self.g(self.y), self.H(self.y)
            bound = ratio * d @ H @ d - self.gamma / (m * self.sigma**2) * (g @ yhat) * (d @ d)
            return float((d @ self.hessian() @ d - bound) / (d @ d * np.linalg.norm(self.hessian())))
        g = self.g(self.z)
        if name.startswith("theorem_4_4"):
            # X = lambda orthogonal: |X'v| = lambda |v|
            largest = self.lam**2 * np.sum(g**2)
            first = largest if name == "theorem_4_4_proof" else largest**2
            bound = ratio * (first - m * np.mean(g) ** 2 - self.lam**2 * (g @ yhat) ** 2)
            return float((self.lam**2 * d @ d - bound) / (self.lam**2 * d @ d))
        kappa = (g @ yhat) * (d @ d) / (m * self.gamma)
        left = largest_by_climbing(self.hessian(), d)
        right = ratio * (largest_by_climbing(self.H(self.z), d if name == "corollary_c1_same" else g) - kappa)
        return float((left - right) / max(abs(left), abs(right)))


X = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 4


def example(w: tuple[int, ...], a: tuple[int, ...], p: tuple[int, ...]) -> ByHand:
    return ByHand(
        y=X @ np.array(w),
        gamma=0.5,
        beta=-1.0,
        g=lambda z: np.array(a) * z + np.array(p) + z**3 / 12,
        H=lambda z: np.diag(np.array(a) + z**2 / 4),
        lam=0.5,
    )


EXAMPLES = {
    **dict.fromkeys(
        ("theorem_4_1_at_y", "theorem_4_2_at_y", "theorem_4_4", "theorem_4_4_proof"),
        example((-2, -3, -2, 3), (0, 1, 1, 2), (-1, 0, -1, 0)),
    ),
    **dict.fromkeys(("corollary_c1", "corollary_c1_same"), example((-2, 1, 1, -1), (0, 2, 0, 1), (-1, 2, 3, 1))),
}


def test_every_false_form_has_a_counterexample() -> None:
    assert set(COUNTEREXAMPLES) == {one.name for one in STATEMENTS if one.expected != "holds"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_counterexample_is_what_it_is_by_hand(name: str) -> None:
    found = COUNTEREXAMPLES[name]()
    assert found == pytest.approx(EXAMPLES[name].residual(name), rel=1e-5)
    assert found > 0.4


@pytest.mark.parametrize("name", ["corollary_c1", "corollary_c1_same"])
def test_the_corollarys_premises_are_met_where_it_breaks(name: str) -> None:
    one = EXAMPLES[name]
    assert np.linalg.eigvalsh(one.H(one.z))[0] > 0
    assert one.g(one.z) @ one.yhat > 0


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("seed", range(3))
def test_a_random_case_is_what_it_is_by_hand(name: str, seed: int) -> None:
    """The same definitions at the draws of a case, L's own derivatives taken by autograd."""
    if name.startswith("theorem_4_4"):
        weights = identities._weights(draws(seed), orthogonal=True)
        unit, size = weights.unit, weights.size
    else:
        unit, size = identities._unit(draws(seed), convex=name.startswith("corollary")), 1.0
    z = unit.gamma * unit.yhat
    beta = search_beta(unit, z)
    one = ByHand(
        y=unit.y.numpy(),
        gamma=unit.gamma,
        beta=beta,
        g=lambda v: identities._derivatives(unit.loss, torch.from_numpy(v))[0].numpy(),
        H=lambda v: identities._derivatives(unit.loss, torch.from_numpy(v))[1].numpy(),
        lam=size,
    )
    assert CHECKS[name](draws(seed)) == pytest.approx(one.residual(name), rel=1e-4, abs=1e-6)


def search_beta(unit: identities._Unit, z: Tensor) -> float:
    """The beta of a drawn case: the one at which the gradient of its loss is the one recorded."""
    found = minimize_scalar(
        lambda beta: float((identities._derivatives(unit.loss, z + beta)[0] - unit.g).square().sum()),
        bounds=(-1, 1), method="bounded", options={"xatol": 1e-13},
    )  # fmt: skip
    return float(found.x)


@pytest.mark.parametrize("path", ["direct", "variance", "mean"])
def test_a_gradient_without_a_path_is_what_it_is_by_hand(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.array([[0.0, 1], [1, 0], [2, 3], [5, 0]])
    grad, gamma, epsilon = np.array([[1.0, 0], [0, 2], [-1, 0], [2, 1]]), np.array([2.0, 1]), 0.5
    scale = 1 / np.sqrt(x.var(0) + epsilon)
    xhat = (x - x.mean(0)) * scale
    parts = {
        "direct": gamma * scale * grad,
        "variance": -gamma * scale * xhat * (grad * xhat).mean(0),
        "mean": -gamma * scale * np.broadcast_to(grad.mean(0), x.shape),
    }
    wanted = np.abs(parts[path]).max() / np.abs(sum(parts.values())).max()
    assert COUNTEREXAMPLES[f"gradient_without_{path}"]() == pytest.approx(wanted, rel=1e-12)
    asked = []

    def backward(*args: object, cut: tuple[str, ...], **named: object) -> Gradients:
        asked.append(cut)
        return byhand.backward(*args, cut=cut, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(identities, "backward", backward)
    check(f"gradient_without_{path}", bound=0.0, cases=2, seed=0)
    assert asked == [(path,)] * 3


def test_a_negative_scalar_turns_the_output_round() -> None:
    assert COUNTEREXAMPLES["scale_output_any"]() == pytest.approx(2)
    assert CHECKS["scale_output_any"](draws(0)) == pytest.approx(2)


def test_of_a_loss_that_is_not_convex_the_corollary_says_nothing() -> None:
    for same in (True, False):
        assert math.isnan(identities._corollary_c1(identities._unit(draws(0)), same=same))
        assert math.isfinite(identities._corollary_c1(identities._unit(draws(0), convex=True), same=same))


@pytest.mark.parametrize("cases", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_false_forms_are_met_by_the_first_case(cases: int, seed: int) -> None:
    for one in STATEMENTS:
        if one.expected != "holds":
            assert check(one.name, bound=one.bound, cases=cases, seed=seed).exceeded >= 1, one.name


# --- each check sees what is planted


def test_observation_4_3_sees_each_of_its_parts() -> None:
    one = identities._unit(draws(0))
    assert identities._observation_4_3(one)["smaller"] == 0
    tilted = identities._observation_4_3(replace(one, yhat=1.1 * one.yhat))
    assert tilted["same"] > 0.01
    assert tilted["reduced"] > 1e-4
    assert identities._observation_4_3(replace(one, sigma=50 * one.sigma))["smaller"] == 1
    assert identities._observation_4_3(replace(one, loss=lambda z: one.loss(z) * math.nan))["smaller"] == 1


def test_lemma_4_5_sees_another_multiple() -> None:
    w, best = torch.tensor([1.0, 2, 0]).double(), torch.tensor([1.0, 1, 1]).double()
    assert identities._lemma_4_5_at(w, best, 1.0, 0.5) == {"distance": pytest.approx(0, abs=1e-15), "nearest": 0}
    # |w - 2 w*|^2 = 5, and the identity says 2; of |w|^2 = 5 the difference is 3 fifths
    assert identities._lemma_4_5_at(w, best, 2.0, 1.0) == {"distance": pytest.approx(0.6), "nearest": 1}


def test_fold_sees_what_is_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "fold", lambda layer, norm: layer)
    assert check("fold", bound=1e-10, cases=1, seed=0).residual > 0.1


def test_identity_recovery_sees_an_epsilon_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        identities, "forward", lambda x, gamma, beta, *, epsilon: byhand.forward(x, gamma, beta, epsilon=0.0)
    )
    assert check("identity_recovery_epsilon", bound=1e-10, cases=3, seed=0).residual > 1e-3
    assert check("identity_recovery", bound=1e-10, cases=3, seed=0).residual < 1e-10


@pytest.mark.parametrize("name", ["effective_rate", "inverse_norm"])
def test_rates_and_norms_see_a_gradient_of_another_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = identities._Layer.gradient
    monkeypatch.setattr(identities._Layer, "gradient", lambda self, W: kept(self, W) * W.norm())
    assert check(name, bound=1e-10, cases=3, seed=0).residual > 0.01


def test_coupling_sees_one_output_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.zeros(4, 2)
    assert identities._stood_still(before, before + 1) == 0
    for odd in (0.0, math.nan, math.inf):
        after = before + 1
        after[2, 1] = odd
        assert identities._stood_still(before, after) == 1
    kept = identities._bn

    def loose(y: Tensor, epsilon: float = 0.0) -> Tensor:
        found = kept(y, epsilon)
        return torch.cat([y[:2], found[2:]])  # two examples are not normalized: one of them is not moved

    monkeypatch.setattr(identities, "_bn", loose)
    assert check("coupling", bound=1e-10, cases=1, seed=0).residual == 1


@pytest.mark.parametrize("parts", [(1.0, 0.0, 0.0), (1.0, -1.0, 0.0), (0.0, 0.0, 1.0)])
def test_radial_sees_a_part_along_one_units_weights(parts: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one unit alone, and of two whose sum is 0."""
    kept = identities._Layer.gradient

    def gradient(self: identities._Layer, W: Tensor) -> Tensor:
        along = torch.tensor(parts, dtype=W.dtype)[:, None] * W / W.square().sum(1, keepdim=True)
        return kept(self, W) + along

    monkeypatch.setattr(identities._Layer, "gradient", gradient)
    assert check("radial", bound=1e-10, cases=1, seed=0).residual > 0.01


def test_a_batch_of_one_must_be_refused_for_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise ValueError("it is Monday")

    for other in (refuse, lambda *args, **named: args[0]):
        monkeypatch.setattr(identities, "normalize", other)
        assert check("batch_of_one", bound=1e-10, cases=1, seed=0).residual == 1


def test_weights_reach_their_loss_through_x() -> None:
    """|X|_2 is lambda, y = X w, and derivatives are X' d and X' H-hat X."""
    for orthogonal in (True, False):
        one = identities._weights(draws(2), orthogonal=orthogonal)
        assert one.size != pytest.approx(1, abs=0.05)
        sizes = (one.grad.norm() / one.unit.grad.norm()).item()
        assert (sizes == pytest.approx(one.size)) == orthogonal
    X = torch.tensor([[2.0, 0, 1], [0, 1, 0], [1, 0, 3]]).double()
    w, push = torch.tensor([1.0, -2, 1]).double(), torch.tensor([1.0, 2, -1]).double()
    one = identities._weighted(X, w, 1.5, 0.5, lambda z: (push * z.pow(3)).sum())
    assert torch.equal(one.unit.y, X @ w)
    assert one.size == pytest.approx(np.linalg.norm(X.numpy(), 2))
    assert torch.allclose(one.grad, X.T @ one.unit.grad)
    assert torch.allclose(one.hessian, X.T @ one.unit.hessian @ X)


@pytest.mark.parametrize("name", ["theorem_4_4_corrected", "theorem_4_4_equality", "corollary_c1_orthogonal"])
@pytest.mark.parametrize("part", ["grad", "unit"])
def test_corrected_forms_see_a_side_that_is_off(name: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = identities._weights

    def off(generator: torch.Generator, *, orthogonal: bool) -> identities._Weights:
        one = kept(generator, orthogonal=orthogonal)
        if part == "grad":
            return replace(one, grad=3 * one.grad)
        return replace(one, unit=replace(one.unit, gamma=one.unit.gamma / 3))

    monkeypatch.setattr(identities, "_weights", off)
    assert check(name, bound=1e-8, cases=5, seed=0).residual > 0.01


def test_unbiased_sees_a_correction_that_is_only_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """(m + 1)/m for m/(m - 1), 6% off at m = 4, and batches taken as they are."""
    kept = byhand.population
    for factor in (5 / 4 * 3 / 4, 3 / 4, 1.03):
        monkeypatch.setattr(
            identities,
            "population",
            lambda batches, f=factor: replace(kept(batches), variance=f * kept(batches).variance),
        )
        for seed in range(3):
            assert check("unbiased", bound=4.5, cases=1, seed=seed).residual > 6, factor


def equal_weights(batches: list[Tensor]) -> Population:
    each = [byhand.population([batch]) for batch in batches]
    mean, variance = (torch.stack([getattr(one, name) for one in each]).mean(0) for name in ("mean", "variance"))
    return Population(mean, variance, len(each))


def test_population_sees_weights_that_are_equal_where_batches_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identities, "population", equal_weights)
    assert check("population", bound=1e-10, cases=1, seed=0).residual > 1e-3


@pytest.mark.parametrize("part", ["set_mode", "guard"])
def test_population_sees_a_model_that_evaluates_and_one_that_is_moved(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins = {"set_mode": lambda model, mode: None, "guard": nullcontext}
    monkeypatch.setattr(byhand, part, stand_ins[part])
    assert check("population", bound=1e-10, cases=1, seed=0).residual > 1e-3


def test_sides_of_another_shape_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"one shape, got \(3,\) and \(1,\)"):
        identities._apart(torch.ones(3), torch.ones(1))


# --- the maximum over X in Corollary C.1


@pytest.mark.parametrize("seed", range(4))
def test_the_largest_form_is_reached_and_never_passed(seed: int) -> None:
    """Against explicit matrices X: none passes it, and the one that its maximizer names reaches it."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    matrix, d = matrix + matrix.T, torch.randn(4, generator=generator, dtype=torch.float64)
    found, best = identities._largest_form(matrix, d), -math.inf
    for _ in range(2000):
        X = torch.randn(4, 4, generator=generator, dtype=torch.float64)
        vector = X @ (X.T @ d) / torch.linalg.matrix_norm(X, 2) ** 2
        best = max(best, float(vector @ matrix @ vector))
    assert best <= found * (1 + 1e-9)
    # Rank one: X X' = v v', over directions v between d and the top eigenvector and beyond.
    for _ in range(2000):
        r = torch.randn(4, generator=generator, dtype=torch.float64)
        r = r * d.norm() / r.norm()
        vector = (d + r) / 2  # a reflection that takes d to r makes (I + R)/2 a projection
        best = max(best, float(vector @ matrix @ vector))
    assert best == pytest.approx(found, rel=0.05)
    assert best <= found * (1 + 1e-9)


def test_a_form_that_is_never_positive_is_largest_at_zero() -> None:
    assert identities._largest_form(-torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)) == 0


def test_of_the_identity_the_largest_form_is_at_an_orthogonal_x() -> None:
    d = torch.tensor([1.0, 2.0, -2.0], dtype=torch.float64)
    assert identities._largest_form(torch.eye(3, dtype=torch.float64), d) == pytest.approx(9)


# --- curves


def test_invariance_is_lost_as_predicted_and_regained_without_epsilon() -> None:
    found = invariance([0.0, 0.01, 1.0, 100.0], a=2.0, seed=0)
    assert found["output"] == pytest.approx(found["predicted"], rel=1e-9, abs=1e-14)
    assert found["predicted"][2] == pytest.approx(math.sqrt(2 / 1.25) - 1)
    for name in ("output", "du", "dw"):
        assert found[name][0] < 1e-12
        assert found[name] == sorted(found[name])
    assert invariance([1.0], a=1.0, seed=0)["du"][0] == 0
    assert invariance([1.0], a=2.0, seed=1)["du"] != [found["du"][2]]


def test_gradients_fall_with_the_weights_and_turns_with_their_square() -> None:
    found = gradient_norms([0.1, 1.0, 10.0], seed=0, rate=1e-4)
    norm, gradient, turned = (np.array(found[name]) for name in ("norm", "gradient", "turned"))
    assert norm[2] / norm[0] == pytest.approx(100)
    assert gradient * norm == pytest.approx(gradient[0] * norm[0])
    assert turned[1] / turned[2] == pytest.approx(100, rel=1e-3)
    assert gradient_norms([1.0], seed=0, rate=2e-4)["turned"][0] == pytest.approx(2 * turned[1], rel=1e-3)
    assert not np.allclose(np.array(found["plain_gradient"]) * norm, found["plain_gradient"][0] * norm[0], rtol=0.1)


def test_two_of_m_plus_one_parts_lie_across_examples() -> None:
    found = coupling([3, 8, 32], draws=3000, seed=0)
    for m, share, error in zip((3, 8, 32), found["share"], found["error"], strict=True):
        assert abs(share - 2 / (m + 1)) < 4 * error + 1e-12
    assert coupling([8], draws=30, seed=0)["error"][0] > found["error"][1]
    for m, reason in ((1, "no variance"), (2, "is 0")):
        with pytest.raises(ValueError, match=f"got m={m}: .*{reason}"):
            coupling([m], draws=3, seed=0)


def test_the_share_is_that_of_the_jacobian_itself() -> None:
    generator = torch.Generator().manual_seed(3)
    found = float(identities._shares(generator, 6, 1)[0])
    x = torch.randn(6, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)[:, 0]
    jacobian = torch.autograd.functional.jacobian(identities._bn, x)
    assert found == pytest.approx(1 - float(jacobian.diagonal().square().sum() / jacobian.square().sum()))


def test_the_error_of_a_share_is_that_of_its_mean() -> None:
    shares = identities._shares(draws(0), 8, 300).numpy()
    found = coupling([8], draws=300, seed=0)
    assert found["error"][0] == pytest.approx(shares.std(ddof=1) / math.sqrt(300))
    many = [coupling([8], draws=40, seed=seed) for seed in range(200)]
    spread = np.std([one["share"][0] for one in many])
    assert spread == pytest.approx(np.mean([one["error"][0] for one in many]), rel=0.2)


def test_a_step_turns_by_an_angle() -> None:
    found = gradient_norms([0.02], seed=0, rate=0.5)
    one = identities._layer(draws(0))
    W = 0.02 * one.W
    sides = 0.5 * one.gradient(W).norm(dim=1) / W.norm(dim=1)
    assert float(sides.min()) > 3  # large: where an angle and its tangent differ
    assert found["turned"][0] == pytest.approx(float(torch.atan(sides).mean()))
    assert found["turned"][0] < math.pi / 2


# --- the motivating failure


def test_outside_the_gradient_b_grows_without_bound_and_the_loss_stands_still() -> None:
    steps, rate = 120, 0.05
    centred = failure("centred", steps=steps, rate=rate, seed=0, starts=3)
    assert centred.b == pytest.approx(np.outer(rate * np.arange(steps + 1), np.ones(3)))
    assert centred.loss == pytest.approx(np.ones((steps + 1, 3)), abs=1e-12)
    assert (centred.w == 1).all()


def test_before_the_deviation_is_gone_the_flow_is_followed() -> None:
    """w^2 = w_0^2 - 2t, b = w_0 - w; and with a target that asks for more w^2 = w_0^2 + 2t, b = w - w_0."""
    rate = 1e-3
    for treatment, sign in (("shrinking", -1), ("growing", 1)):
        found = failure(treatment, steps=100, rate=rate, seed=0, starts=4)  # type: ignore[arg-type]
        w = np.sqrt(found.w[0] ** 2 + sign * 2 * rate * 100)
        assert found.w[-1] == pytest.approx(w, rel=1e-2)
        assert found.b[-1] == pytest.approx(sign * (w - found.w[0]), rel=2e-2)
        assert found.loss == pytest.approx(np.ones((101, 4)), abs=1e-9)


def test_growing_grows_as_the_root_and_nothing_is_thrown() -> None:
    found = failure("growing", steps=1500, rate=0.05, seed=1, starts=4)
    assert (np.diff(found.b, axis=0) > 0).all()
    assert found.b[-1] / found.b[375] == pytest.approx([2] * 4, rel=0.15)  # four times as long
    assert (found.b[-1] < 0.2 * 0.05 * 1500).all()  # far behind centring alone


def test_with_epsilon_w_dies_the_loss_falls_once_and_b_grows_faster_for_good() -> None:
    found = failure("epsilon", steps=300, rate=0.05, seed=0, starts=4)
    assert np.abs(found.w[-1]).max() < 1e-10
    assert found.loss[0] == pytest.approx(0.5 + 0.5 * found.w[0] ** 2 / (found.w[0] ** 2 + EPSILON))
    assert found.loss[-1] == pytest.approx([0.5] * 4)
    assert np.diff(found.b, axis=0)[-1] == pytest.approx([0.05 / math.sqrt(EPSILON)] * 4)


def test_paths_through_the_vanished_deviation_are_chaotic() -> None:
    """Starts a rounding error apart are together before and have parted after; that is why spreads are shown."""
    rate, near = 0.05, np.array([1.0, 1.0 + 1e-12])
    w = near
    paths = [w := w - rate / w for _ in range(200)]
    apart = np.abs(np.diff(np.array(paths), axis=1))[:, 0]
    assert apart[5] < 1e-11
    assert apart[100:].max() > 0.1


def test_reach_takes_the_steps_of_the_failure() -> None:
    rate, seed = 0.05, 3
    paths = failure("shrinking", steps=16, rate=rate, seed=seed, starts=30, examples=2)
    found = reach([0.4, 0.8], [rate], seed=seed, starts=30)
    for k, step in enumerate((8, 16)):
        ratio = paths.b[step] / (rate * step)
        low, middle, high = np.percentile(ratio, (10, 50, 90))
        assert [found[name][k] for name in ("low", "ratio", "high")] == pytest.approx([low, middle, high], rel=1e-6)
        assert found["share"][k] == pytest.approx((ratio > 1).mean())
    assert found["rate"] == [rate] * 2
    assert found["time"] == [0.4, 0.8]
    assert found["finite"] == [30, 30]


@pytest.mark.parametrize("rate", [0.01, 0.16])
@pytest.mark.parametrize("seed", [0, 1])
def test_scaling_is_worse_at_first_and_better_in_the_long_run(rate: float, seed: int) -> None:
    """What is found of the paper's "can get worse": nearly every start is further out at time 2, few are at 512."""
    found = reach([2.0, 512.0], [rate], seed=seed, starts=100)
    assert found["share"][0] > 0.95
    assert found["ratio"][0] > 2
    assert found["share"][1] < 0.3
    assert found["ratio"][1] < 0.7


def test_what_is_no_longer_finite_is_counted_and_kept_out() -> None:
    found = identities.Failure(
        b=np.array([[0.0, 0.0, 0.0], [1.0, np.nan, 3.0], [2.0, np.nan, np.inf]]),
        w=np.ones((3, 3)),
        loss=np.array([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [np.nan, 1.0, 1.0]]),
    ).summary()
    assert found["finite"].tolist() == [3, 2, 0]
    assert found["b"][:2].tolist() == [0, 2]
    assert found["b_far"][:2].tolist() == [0, 3]
    assert (found["b_low"][1], found["b_high"][1]) == pytest.approx((1.2, 2.8))
    assert all(np.isnan(found[name][2]) for name in found if name != "finite")
    thrown = failure("shrinking", steps=4, rate=1e308, seed=0, starts=5).summary()
    assert thrown["finite"][0] == 5
    assert thrown["finite"][-1] < 5
    assert reach([1e307], [1e307], seed=0, starts=5)["finite"][0] == 5


def test_through_the_statistics_nothing_moves_that_does_nothing() -> None:
    through = failure("through", steps=120, rate=0.05, seed=0, starts=3)
    assert np.abs(through.b).max() < 1e-12
    assert through.w == pytest.approx(np.tile(through.w[0], (121, 1)))
    assert through.loss == pytest.approx(np.ones((121, 3)))


def test_starts_and_seeds_are_heeded_and_unknown_treatments_refused() -> None:
    one, other = (failure("shrinking", steps=9, rate=0.05, seed=seed, starts=4) for seed in (0, 1))
    assert one.b.shape == one.w.shape == one.loss.shape == (10, 4)
    assert not np.allclose(one.w, other.w)
    assert len(set(one.w[0])) == 4
    assert ((one.w[0] > 0.5) & (one.w[0] < 1.5)).all()
    assert TREATMENTS == ("centred", "shrinking", "growing", "epsilon", "through")
    with pytest.raises(ValueError, match="centred, shrinking, growing, epsilon, through, got 'none'"):
        failure("none", steps=1, rate=0.1, seed=0)  # type: ignore[arg-type]


def test_the_rows_of_the_failure_see_what_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = identities._HOW["centred"]
    monkeypatch.setitem(identities._HOW, "centred", replace(kept, through=True))  # type: ignore[arg-type]
    assert check("failure_centred", bound=1e-10, cases=1, seed=0).residual > 0.1
    monkeypatch.setattr(identities._How, "loss", lambda self, u, w, b: (w * u + b).square().mean(0))
    for name in ("failure_scaled", "failure_through"):
        assert check(name, bound=1e-10, cases=1, seed=0).residual > 1e-3, name
