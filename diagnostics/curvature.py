"""Curvature along one direction: the Hessian times a vector, and what the gradient sees of it.

With ``g`` the gradient and ``H`` the Hessian of the loss at theta (D parameters),

    directional curvature  |H g| / |g|       how fast the gradient changes along itself
    Rayleigh quotient      g'H g / |g|^2     how fast the loss bends along it

both in loss / parameter^2. A step of length eta along -g changes a quadratic loss's gradient by eta |H g| exactly, so
eta times the first is the relative change; neither exceeds the largest |eigenvalue|, and both can lie far below it.
The second, on the batch of a step, is what Andreyev & Beneventano (arXiv 2412.20553) call batch sharpness, before the
mean over batches.

Products with the Hessian are double backward passes (Pearlmutter 1994) with ``torch.autograd.grad`` twice: several
compositions of ``torch.func`` transforms are silently wrong through batch normalization in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diagnostics._vectors import Blocks

__all__ = ["Curvature", "directional_curvature", "hessian_vector_product"]

Matvec = Callable[[Tensor], Tensor]


def hessian_vector_product(
    gradient: Sequence[Tensor], parameters: Sequence[Tensor], vector: Sequence[Tensor]
) -> Blocks:
    """H v, in the shapes of ``parameters``.

    Args:
        gradient: The loss's gradient, taken with ``create_graph=True``; its graph is kept for further products.
        parameters: What it was differentiated by.
        vector: v, one tensor a parameter.

    Raises:
        ValueError: If the numbers of tensors differ.
    """
    if not len(gradient) == len(parameters) == len(vector):
        raise ValueError(f"{len(gradient)} gradients, {len(parameters)} parameters and {len(vector)} parts of a vector")
    # Where the loss is linear the gradient is a constant, without a graph.
    bent = [(g, v) for g, v in zip(gradient, vector, strict=True) if g.requires_grad]
    if not bent:
        return tuple(torch.zeros_like(parameter) for parameter in parameters)
    return torch.autograd.grad(
        [g for g, _ in bent],
        list(parameters),
        grad_outputs=[v for _, v in bent],
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )


@dataclass(frozen=True)
class Curvature:
    """The Hessian along one direction g, in loss / parameter^2.

    Attributes:
        directional: |H g| / |g|.
        rayleigh: g'H g / |g|^2.
    """

    directional: float
    rayleigh: float


def directional_curvature(matvec: Matvec, direction: Tensor) -> Curvature:
    """What ``matvec`` (v (D,) -> H v) does to ``direction`` (D,), whatever its length; one product.

    Raises:
        ValueError: If the direction is zero.
    """
    # Divided first: the square of a small gradient may not be a number of its type.
    length = float(torch.linalg.vector_norm(direction.double()))
    if length == 0:
        raise ValueError("the curvature along a zero gradient is undefined")
    unit = direction / length
    if not math.isfinite(length):
        return Curvature(math.nan, math.nan)
    product = matvec(unit).double()
    return Curvature(float(torch.linalg.vector_norm(product)), float(torch.dot(unit.double(), product)))
