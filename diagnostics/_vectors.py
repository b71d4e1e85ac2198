"""Vectors of parameters, as the blocks they come in.

A vector over D parameters is a tuple of tensors, one a parameter: a flat copy would cost as much memory again. Sums
over it are taken piece by piece, small blocks put together (a call a block is what costs in a deep narrow network), in
the blocks' own type, and in float64 where that overflows or underflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Blocks = tuple[Tensor, ...]
GradientAt = Callable[[Blocks], tuple[Tensor, Blocks]]
_LARGE = 1 << 14  # numbers from which a block is a piece of its own
_PIECE = 1 << 18  # numbers that a piece of small blocks holds, at most


def as_blocks(vector: Tensor | Sequence[Tensor]) -> Blocks:
    """One tensor, or a sequence of them, as blocks."""
    return (vector.detach(),) if isinstance(vector, Tensor) else tuple(block.detach() for block in vector)


def flat(blocks: Sequence[Tensor]) -> Tensor:
    """All blocks as one (D,) vector, a copy."""
    return torch.cat([block.detach().reshape(-1) for block in blocks])


def unflat(vector: Tensor, like: Sequence[Tensor]) -> Blocks:
    """(D,) as blocks of the shapes of ``like``: views, not copies."""
    parts = torch.split(vector, [block.numel() for block in like])
    return tuple(part.view(block.shape) for part, block in zip(parts, like, strict=True))


def moved(theta: Blocks, direction: Blocks, by: float) -> Blocks:
    """``theta + by * direction``."""
    return tuple(block.add(step, alpha=by) for block, step in zip(theta, direction, strict=True))


def pieces(blocks: Sequence[Tensor]) -> list[Tensor]:
    """Flat tensors that hold the numbers of ``blocks`` in order; those of large blocks are no copies."""
    found: list[Tensor] = []
    waiting: list[Tensor] = []
    size = 0

    def flush() -> None:
        nonlocal size
        if waiting:
            found.append(torch.cat(waiting) if len(waiting) > 1 else waiting[0])
        waiting.clear()
        size = 0

    for block in blocks:
        part = block.detach().reshape(-1)
        if part.dtype in (torch.float16, torch.bfloat16):
            part = part.float()
        if part.numel() >= _LARGE:
            flush()
            found.append(part)
            continue
        if waiting and (size + part.numel() > _PIECE or part.dtype != waiting[0].dtype):
            flush()
        waiting.append(part)
        size += part.numel()
    flush()
    return found


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    total = math.fsum(torch.dot(x, y).item() for x, y in zip(a, b, strict=True))
    if math.isfinite(total) and abs(total) > 1e-30:
        return total
    return math.fsum(torch.dot(x.double(), y.double()).item() for x, y in zip(a, b, strict=True))


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The inner product of two vectors."""
    return _dot(pieces(a), pieces(b))


def norm(blocks: Sequence[Tensor]) -> float:
    """The Euclidean norm of a vector."""
    parts = pieces(blocks)
    return math.sqrt(_dot(parts, parts))


@dataclass(frozen=True)
class Comparison:
    """How a vector ``b`` differs from ``a``.

    Attributes:
        norm: |a|.
        distance: |b - a|.
        relative: |b - a| / |a|; NaN where |a| is 0.
        cosine: Of the angle between them; NaN where either is 0.
    """

    norm: float
    distance: float
    relative: float
    cosine: float


class Reference:
    """A vector ``a`` that others are compared with; small blocks are put together once."""

    def __init__(self, a: Sequence[Tensor]) -> None:
        self._pieces = pieces(a)
        self.norm = math.sqrt(_dot(self._pieces, self._pieces))

    def compare(self, b: Sequence[Tensor]) -> Comparison:
        """How ``b`` differs from it."""
        others = pieces(b)
        squares = 0.0
        for x, y in zip(self._pieces, others, strict=True):
            # Of a large block no whole copy more.
            for part, other in zip(torch.split(x, _PIECE), torch.split(y, _PIECE), strict=True):
                difference = [other - part]
                squares += _dot(difference, difference)
        distance, length = math.sqrt(squares), math.sqrt(_dot(others, others))
        product = _dot(self._pieces, others)
        cosine = product / self.norm / length if self.norm > 0 and length > 0 else math.nan
        if abs(cosine) > 1:  # by rounding; NaN is left
            cosine = math.copysign(1.0, cosine)
        relative = distance / self.norm if self.norm > 0 else math.nan
        return Comparison(self.norm, distance, relative, cosine)
