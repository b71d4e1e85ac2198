"""Slow twins of the normalizers: numpy in float64, one unit and one group at a time, written from the formulas.

``x`` is (N, C, *positions); gamma and beta are (C,). A twin sees no gradient: that is torch's part.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy.special import ndtr


def batch(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, eps: float) -> np.ndarray:
    out = np.empty_like(x)
    for j in range(x.shape[1]):
        values = x[:, j]
        variance = np.sum((values - values.mean()) ** 2) / values.size
        out[:, j] = gamma[j] * (values - values.mean()) / math.sqrt(variance + eps) + beta[j]
    return out


def ghost(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, eps: float, group: int) -> np.ndarray:
    return np.concatenate([batch(x[start : start + group], gamma, beta, eps) for start in range(0, len(x), group)])


def ghost_running(
    x: np.ndarray, mean: np.ndarray, variance: np.ndarray, group: int, momentum: float
) -> tuple[np.ndarray, np.ndarray]:
    """Running statistics after one batch: each group counts by its examples."""
    batch_mean, batch_variance = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for start in range(0, len(x), group):
        part = x[start : start + group]
        for j in range(x.shape[1]):
            batch_mean[j] += len(part) / len(x) * part[:, j].mean()
            batch_variance[j] += len(part) / len(x) * part[:, j].var(ddof=1)
    return mean + momentum * (batch_mean - mean), variance + momentum * (batch_variance - variance)


def lp_size(values: np.ndarray, p: float, centred: bool, gaussian: bool) -> float:
    """The average l_p norm d of one unit's values."""
    if centred:
        values = values - values.mean()
    n = values.size
    if p == 1:
        return float(np.abs(values).sum() / n) * (math.sqrt(math.pi / 2) if gaussian else 1)
    if p == 2:
        return math.sqrt((values**2).sum() / n)
    constant = (1 + math.sqrt(math.pi * math.log(4))) / (2 * math.sqrt(2 * math.log(n)))
    return float(np.abs(values).max()) * (constant if gaussian else 1)


def lp(
    x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, eps: float, p: float, centred: bool, gaussian: bool
) -> np.ndarray:
    out = np.empty_like(x)
    for j in range(x.shape[1]):
        size = lp_size(x[:, j], p, centred, gaussian)
        out[:, j] = gamma[j] * (x[:, j] - x[:, j].mean()) / math.sqrt(size**2 + eps) + beta[j]
    return out


def group(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, eps: float, groups: int) -> np.ndarray:
    out = np.empty_like(x)
    width = x.shape[1] // groups
    for i in range(len(x)):
        for k in range(0, x.shape[1], width):
            values = x[i, k : k + width]
            out[i, k : k + width] = (values - values.mean()) / math.sqrt(values.var() + eps)
    unit = (1, -1, *(1 for _ in x.shape[2:]))
    return out * gamma.reshape(unit) + beta.reshape(unit)


def shift_cdf(n_mu: float, r_mu: float) -> Callable[[np.ndarray], np.ndarray]:
    """Distribution function of m = U(-n_mu, n_mu) + U(-r_mu, r_mu), by integrating the trapezoid's density."""

    def ramp(x: np.ndarray) -> np.ndarray:  # second integral of a unit mass at 0
        return np.maximum(x, 0) ** 2 / 2

    def cdf(x: np.ndarray) -> np.ndarray:
        corners = ramp(x + n_mu + r_mu) - ramp(x + n_mu - r_mu) - ramp(x - n_mu + r_mu) + ramp(x - n_mu - r_mu)
        return corners / (4 * n_mu * r_mu)

    return cdf


def gain_cdf(n_sigma: float, deviation: float) -> Callable[[np.ndarray], np.ndarray]:
    """Distribution function of s = U(1, n_sigma) + N(0, deviation^2), by integrating the normal one over sigma."""

    def integral(z: np.ndarray) -> np.ndarray:  # of the normal distribution function, up to z
        return z * ndtr(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

    def cdf(x: np.ndarray) -> np.ndarray:
        return deviation / (n_sigma - 1) * (integral((x - 1) / deviation) - integral((x - n_sigma) / deviation))

    return cdf
