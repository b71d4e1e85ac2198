"""Every statement of the papers: those that should hold do, those that should not are shown not to, and curves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from experiments import identities
from experiments.identities import CHECKS, check, coupling, failure, gradient_norms, invariance
from experiments.statements import STATEMENTS, Statement

CASES = 12


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


def test_cases_and_seed_are_heeded() -> None:
    one, same, other = (check("theorem_4_1_at_y", bound=0.0, cases=9, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.residual != other.residual
    assert (one.cases, check("theorem_4_1_at_y", bound=0.0, cases=3, seed=1).cases) == (9, 3)
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


def test_outside_the_gradient_b_grows_without_bound_and_the_loss_stands_still() -> None:
    steps, rate = 120, 0.05
    centred = failure("centred", steps=steps, rate=rate, seed=0)
    assert centred.b == pytest.approx([rate * t for t in range(steps + 1)])  # the gradient is -1 at every step
    assert np.ptp(centred.loss) < 1e-12
    assert set(centred.w) == {1.0}
    scaled = failure("scaled", steps=steps, rate=rate, seed=0)
    assert np.ptp(scaled.loss) < 1e-9
    assert max(map(abs, scaled.b)) > centred.b[-1]  # worse
    assert min(map(abs, scaled.w)) < 0.2


def test_through_the_statistics_nothing_moves_that_does_nothing() -> None:
    through = failure("through", steps=120, rate=0.05, seed=0)
    assert max(map(abs, through.b)) < 1e-12
    assert through.w == pytest.approx([1.0] * 121)
    assert np.ptp(through.loss) < 1e-12
    assert failure("scaled", steps=9, rate=0.05, seed=0).b != failure("scaled", steps=9, rate=0.05, seed=1).b
    assert len(failure("centred", steps=9, rate=0.05, seed=0, examples=7).b) == 10
    with pytest.raises(ValueError, match="centred, scaled, through, got 'none'"):
        failure("none", steps=1, rate=0.1, seed=0)  # type: ignore[arg-type]
