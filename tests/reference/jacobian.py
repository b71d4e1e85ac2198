"""Slow twin of ``diagnostics.jacobian`` and ``diagnostics.spectrum``: a column at a time, by central differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]


def by_differences(apply: Callable[[Tensor], Tensor], x: Tensor, step: float = 1e-6) -> Floats:
    """(N P, N Q) of a function (N, ...) -> (N, ...) at ``x`` in float64."""
    flat = x.double().reshape(-1)
    columns = []
    for index in range(flat.numel()):
        sides = []
        for sign in (1, -1):
            moved = flat.clone()
            moved[index] += sign * step
            sides.append(apply(moved.reshape(x.shape)).reshape(-1))
        columns.append(((sides[0] - sides[1]) / (2 * step)).numpy())
    return np.stack(columns, axis=1)


def numbers(matrix: Floats) -> dict[str, float]:
    """What `Spectrum` says of one matrix, from its definition, in float64."""
    rows = matrix.shape[0]
    values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    least = values[0] * max(matrix.shape) * np.finfo(matrix.dtype).eps
    logs = [math.log(value) for value in values if value > least]
    middle = math.fsum(logs) / len(logs)
    return {
        "rank": len(logs),
        "spread": math.sqrt(math.fsum((one - middle) ** 2 for one in logs) / len(logs)),
        "mean_square": math.fsum(value**2 for value in values) / len(values),
        "largest": values[0],
        "smallest": values[-1],
        "distance": float(np.linalg.norm(matrix @ matrix.T - np.eye(rows)) / math.sqrt(rows)),
    }


def correlations(values: Floats) -> Floats:
    """Correlation matrix of (N, C) values, pair by pair."""
    units = values.shape[1]
    return np.array([[np.corrcoef(values[:, i], values[:, j])[0, 1] for j in range(units)] for i in range(units)])
