"""The statements of the two papers that can be checked to the last digit: the claim, its place, the bound to keep.

Words and bounds only, fixed before anything is computed (they are part of a run's configuration, and so of its
address); `experiments.identities` holds the computation of the same name. A *residual* is relative: how far the two
sides of an identity are apart, or by how much an inequality is exceeded (negative where it holds with room), the worst
of all random cases; where a claim is about a mean it is the number of standard errors. ``expected`` says whether the
residual should keep the bound, and of a false form what it is: *as printed* in the paper; *as read*, where the print
leaves a choice (Theorems 4.1 and 4.2 write g = grad_{y_j} L, literally at y); or *cut on purpose*, printed by nobody,
so that the check is seen to see. The form that corrects a printed one names it. A residual that is not finite shows
nothing, neither that a statement holds nor that it is false.

Notation: y = Wx of one unit over a batch of m, y-hat normalized with epsilon 0 and biased variance sigma^2, z = gamma
y-hat + beta; g and H gradient and Hessian of the loss with respect to z; L-hat the loss as a function of y, or of the
weights W where y = XW; d = dL-hat/dy; kappa = <g,y-hat> |d|^2 / (m gamma), what Theorem 4.2 takes off.
"""

from __future__ import annotations

from typing import Final, Literal

from experiments.config import Frozen

__all__ = ["STATEMENTS", "Expected", "Statement"]

Expected = Literal["holds", "false as printed", "false as read", "false, cut on purpose"]

BN: Final = "Ioffe & Szegedy 2015"
SANTURKAR: Final = "Santurkar et al. 2018"
EXACT: Final = 1e-10  # of double precision's 1e-16, after sums over hundreds of terms and one or two derivatives
HESSIANS: Final = 1e-8  # an identity of second derivatives on both sides
SIGMAS: Final = 4.5  # standard errors: exceeded by chance once in 150,000 times


class Statement(Frozen):
    """One claim, its source, and what its residual is held to."""

    name: str
    source: str
    claim: str
    bound: float = EXACT
    expected: Expected = "holds"


def _statement(name: str, source: str, claim: str, bound: float = EXACT, expected: Expected = "holds") -> Statement:
    return Statement(name=name, source=source, claim=claim, bound=bound, expected=expected)


STATEMENTS: Final = (
    # --- the motivating failure
    _statement(
        "failure_centred",
        f"{BN}, section 2",
        "mean outside the gradient: b grows by eta a step, x-hat and loss stand still",
    ),
    _statement(
        "failure_scaled",
        f"{BN}, section 2",
        "deviation too, target 1 + c u: w > 0 gains eta (c - 1)/w a step, b eta/w, x-hat stands still",
    ),
    _statement("failure_through", f"{BN}, section 2", "through the statistics dl/dw = dl/db = 0: neither moves"),
    # --- the transform and its gradient
    _statement("gradient", f"{BN}, section 3", "the printed gradient, on three paths, is autograd's"),
    _statement(
        "gradient_without_direct",
        f"{BN}, section 3",
        "the gradient is still autograd's without its direct path",
        expected="false, cut on purpose",
    ),
    _statement(
        "gradient_without_variance",
        f"{BN}, section 3",
        "the gradient is still autograd's without its path through the variance",
        expected="false, cut on purpose",
    ),
    _statement(
        "gradient_without_mean",
        f"{BN}, section 3",
        "the gradient is still autograd's without its path through the mean",
        expected="false, cut on purpose",
    ),
    _statement("identity_recovery", f"{BN}, section 3", "gamma = sd, beta = mean give x back (epsilon 0)"),
    _statement(
        "identity_recovery_epsilon",
        f"{BN}, section 3",
        "with epsilon they give mean + (x - mean) / sqrt(1 + epsilon/variance)",
    ),
    _statement("constant_bias", f"{BN}, section 3.2", "BN(Wu + b) = BN(Wu): a constant bias is annihilated"),
    _statement("positions", f"{BN}, section 3.2", "a convolution's statistics are those of all positions as examples"),
    _statement("population", f"{BN}, Algorithm 2", "E = mean of batch means, Var = m/(m-1) times that of variances"),
    _statement("unbiased", f"{BN}, Algorithm 2", "m/(m-1) makes the variance unbiased (standard errors)", SIGMAS),
    _statement("fold", f"{BN}, Algorithm 2", "in inference BN is one linear map, and folds into the layer before"),
    # --- scale
    _statement("scale_output", f"{BN}, section 3.3", "BN((aW)u) = BN(Wu), a > 0"),
    _statement(
        "scale_output_any",
        f"{BN}, section 3.3",
        "as printed: BN((aW)u) = BN(Wu) for any scalar a",
        expected="false as printed",
    ),
    _statement(
        "scale_output_sign",
        f"{BN}, section 3.3",
        "corrects 'any scalar a': BN((aW)u) = sign(a) BN(Wu), a not 0, beta aside",
    ),
    _statement("scale_du", f"{BN}, section 3.3", "dBN((aW)u)/du = dBN(Wu)/du, a > 0"),
    _statement("scale_dw", f"{BN}, section 3.3", "dBN((aW)u)/d(aW) = (1/a) dBN(Wu)/dW, a > 0"),
    _statement("scale_epsilon", f"{BN}, section 3.3", "with epsilon: BN_e((aW)u) = BN_(e/a^2)(Wu)"),
    _statement("radial", f"{BN}, section 3.3", "the gradient has no part along the weights: <W, dl/dW> = 0"),
    _statement("inverse_norm", f"{BN}, section 3.3", "|dl/dw| |w| is the same at every scale of w"),
    _statement("effective_rate", f"{BN}, section 3.3", "a step at (aw, a^2 eta) is a times the step at (w, eta)"),
    # --- the batch
    _statement("coupling", f"{BN}, section 3", "one example changed moves every output of its batch"),
    _statement("coupling_share", f"{BN}, section 3", "2/(m+1) of |J|_F^2 across examples (standard errors)", SIGMAS),
    _statement("batch_of_two", f"{BN}, section 3", "at m = 2 the Jacobian vanishes (epsilon 0)"),
    _statement(
        "batch_of_one", f"{BN}, section 3", "at m = 1 there is no variance: our normalize raises an error saying so"
    ),
    # --- Santurkar et al.
    _statement("fact_c1", f"{SANTURKAR}, Fact C.1", "dL/dy = gamma/(m sigma) (m g - sum g - y-hat sum g y-hat)"),
    _statement(
        "theorem_4_1",
        f"{SANTURKAR}, Theorem 4.1",
        "corrects the printed <=, g at z: |dL-hat/dy|^2 = gamma^2/sigma^2 (|g|^2 - <1,g>^2/m - <g,y-hat>^2/m)",
    ),
    _statement(
        "theorem_4_1_at_y",
        f"{SANTURKAR}, Theorem 4.1",
        "the printed <=, with g at y as its symbol g = dL/dy literally says",
        expected="false as read",
    ),
    _statement(
        "theorem_4_2",
        f"{SANTURKAR}, Theorem 4.2",
        "corrects the printed <=, g and H at z: d'H-hat d = gamma^2/sigma^2 d'Hd - gamma/(m sigma^2) <g,y-hat> |d|^2",
        HESSIANS,
    ),
    _statement(
        "theorem_4_2_at_y",
        f"{SANTURKAR}, Theorem 4.2",
        "the printed <=, with g and H at y as their symbols literally say",
        expected="false as read",
    ),
    _statement("observation_4_3", f"{SANTURKAR}, Observation 4.3", "gamma = sd, beta = mean: z = y, gradient smaller"),
    _statement(
        "theorem_4_4",
        f"{SANTURKAR}, Theorem 4.4",
        "as printed: max |dL-hat/dW|^2 <= gamma^2/sigma^2 (g_j^2 - m mu_g^2 - lambda^2 <g,y-hat>^2), "
        "g_j = max |dL/dW|^2 (tried at X = lambda orthogonal)",
        expected="false as printed",
    ),
    _statement(
        "theorem_4_4_proof",
        f"{SANTURKAR}, Theorem 4.4",
        "as its proof reads: the same with g_j^2 = max |dL/dW|^2",
        expected="false as read",
    ),
    _statement(
        "theorem_4_4_corrected",
        f"{SANTURKAR}, Theorem 4.4",
        "corrects the printed bound, at any X: "
        "|dL-hat/dW|^2 <= |X|^2 gamma^2/sigma^2 (|g|^2 - m mu_g^2 - <g,y-hat>^2/m)",
    ),
    _statement(
        "theorem_4_4_equality",
        f"{SANTURKAR}, Theorem 4.4",
        "the corrected bound is an equality at X = lambda orthogonal",
    ),
    _statement(
        "corollary_c1",
        f"{SANTURKAR}, Corollary C.1",
        "as printed: max e'(d2L-hat/dW2)e < gamma^2/sigma^2 (max f'(d2L/dW2)f - lambda^4 kappa), "
        "e = dL-hat/dW, f = dL/dW (tried with H positive semidefinite, exact maxima at given y)",
        expected="false as printed",
    ),
    _statement(
        "corollary_c1_same",
        f"{SANTURKAR}, Corollary C.1",
        "the same read with one direction, e on both sides, as in Theorem 4.2",
        expected="false as read",
    ),
    _statement(
        "corollary_c1_orthogonal",
        f"{SANTURKAR}, Corollary C.1",
        "corrects the printed <, at X = lambda orthogonal: "
        "e'(d2L-hat/dW2)e = lambda^4 times the right side of Theorem 4.2",
        HESSIANS,
    ),
    _statement(
        "lemma_4_5",
        f"{SANTURKAR}, Lemma 4.5",
        "|w - k w*|^2 = |w - w*|^2 - (|w*|^2 - <w*,w>)^2 / |w*|^2 at the best k: an identity, of either sign",
    ),
)
