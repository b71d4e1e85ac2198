"""Vectors of parameters, as the blocks they come in.

A vector over D parameters is a tuple of tensors, one a parameter: a flat copy would cost as much memory again. Sums
over it are taken piece by piece, small blocks put together (a call a block is what costs in a deep narrow network), in
the blocks' own type, and in float64 where that overflows or underflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

Blocks = tuple[Tensor, ...]
GradientAt = Callable[[Blocks], tuple[Tensor, Blocks]]
_HALVES = (torch.float16, torch.bfloat16)
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


class Layout:
    """How blocks of certain shapes are put together to pieces: (n,) tensors that hold their numbers in order.

    A large block is a piece of its own, and shares its memory; small neighbours are copied into one.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._rooms: list[Tensor] = []
        self._blocks: Blocks = ()
        self._runs: list[tuple[int, int]] = []  # first and one past the last block of each piece
        first, size = 0, 0
        for index, block in enumerate(like):
            length = block.numel()
            large = length >= _LARGE
            if index > first and (large or size + length > _PIECE or block.dtype != like[first].dtype):
                self._runs.append((first, index))
                first, size = index, 0
            size += length
            if large:
                self._runs.append((index, index + 1))
                first, size = index + 1, 0
        if first < len(like):
            self._runs.append((first, len(like)))

    def pieces(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """The pieces of ``blocks``; half types as float32."""
        found = []
        for first, last in self._runs:
            piece = blocks[first].detach().reshape(-1) if last - first == 1 else _flatten(blocks[first:last])
            found.append(piece.float() if piece.dtype in _HALVES else piece)
        return found

    def moved(self, theta: Blocks, pieces: Sequence[Tensor], by: float, direction: Sequence[Tensor]) -> Blocks:
        """``theta + by * direction`` in blocks, from the pieces of both, in memory that is used again."""
        if not self._blocks:
            for (first, last), piece in zip(self._runs, pieces, strict=True):
                room = torch.empty_like(piece, dtype=theta[first].dtype)
                self._rooms.append(room)
                self._blocks += unflat(room, theta[first:last])
        for start, step, room in zip(pieces, direction, self._rooms, strict=True):
            torch.add(start, step, alpha=by, out=room)
        return self._blocks

    def rooms(self, pieces: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor | None]:
        """For each of ``pieces``, memory of its shape and type to write over; None where there is none to spare.

        ``others`` are pieces of this layout. Those put together of small blocks are spent themselves, for large ones
        what `moved` gave last, unless one of them lies in it.
        """
        lying = {piece.untyped_storage().data_ptr() for piece in others}
        spared = self._rooms if not any(r.untyped_storage().data_ptr() in lying for r in self._rooms) else []
        found: list[Tensor | None] = []
        for place, ((first, last), piece, other) in enumerate(zip(self._runs, pieces, others, strict=True)):
            room = other if last - first > 1 else spared[place] if spared else None
            found.append(room if room is not None and room.dtype == piece.dtype else None)
        return found


def _flatten(blocks: Sequence[Tensor]) -> Tensor:
    return cast("Tensor", _flatten_dense_tensors(blocks)).detach()  # type: ignore[no-untyped-call]  # torch types it not


def pieces(blocks: Sequence[Tensor]) -> list[Tensor]:
    """The numbers of ``blocks``, as `Layout` puts them together."""
    return Layout(blocks).pieces(blocks)


def moved(theta: Blocks, direction: Blocks, by: float) -> Blocks:
    """``theta + by * direction``."""
    return tuple(block.add(step, alpha=by) for block, step in zip(theta, direction, strict=True))


def _dot(a: Tensor, b: Tensor) -> float:
    total = torch.dot(a, b).item()
    if abs(total) > 1e-30 and abs(total) < math.inf:
        return total
    return torch.dot(a.double(), b.double()).item()


def _product(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return _sum(map(_dot, a, b))


def _sum(terms: Iterable[float]) -> float:
    """Their sum to the last place; infinite or NaN where floats have none."""
    every = list(terms)
    try:
        return math.fsum(every)
    except (OverflowError, ValueError):  # beyond the largest float, or infinities of both signs
        return sum(every)


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The inner product of two vectors."""
    return _product(pieces(a), pieces(b))


def norm(blocks: Sequence[Tensor]) -> float:
    """The Euclidean norm of a vector."""
    parts = pieces(blocks)
    return math.sqrt(_product(parts, parts))


def distance(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """|b - a|."""
    layout = Layout(a)
    differences = (y - x for x, y in zip(layout.pieces(a), layout.pieces(b), strict=True))
    return math.sqrt(_sum(_dot(difference, difference) for difference in differences))


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
        self.layout = Layout(a)
        self._rooms: dict[tuple[torch.dtype, int], Tensor] = {}
        self.pieces = self.layout.pieces(a)
        self.norm = math.sqrt(_product(self.pieces, self.pieces))

    def _scratch(self, like: Tensor) -> Tensor:
        """Room for a difference, the same each time: new memory would cost as much as the subtraction."""
        key = like.dtype, like.numel()
        if key not in self._rooms:
            self._rooms[key] = torch.empty_like(like)
        return self._rooms[key]

    def compare(self, b: Sequence[Tensor]) -> Comparison:
        """How ``b`` differs from it. What ``layout.moved`` gave last is written over."""
        squares, along = 0.0, 0.0  # |b - a|^2 and a'(b - a)
        others = self.layout.pieces(b)
        for x, y, room in zip(self.pieces, others, self.layout.rooms(self.pieces, others), strict=True):
            # Of a large block no whole copy more.
            whole = room is not None or x.numel() <= _PIECE
            parts = ((x, y),) if whole else zip(torch.split(x, _PIECE), torch.split(y, _PIECE), strict=True)
            for part, other in parts:
                difference = torch.sub(other, part, out=self._scratch(part) if room is None else room)
                squares += _dot(difference, difference)
                along += _dot(part, difference)
        distance = math.sqrt(squares)
        # |b|^2 and a'b follow, unless they are what is left of larger numbers.
        own = self.norm * self.norm
        product, square = own + along, own + 2 * along + squares
        if not square > 0.1 * (own + squares):
            others = self.layout.pieces(b)
            product, square = _product(self.pieces, others), _product(others, others)
        length = math.sqrt(square)
        cosine = product / self.norm / length if self.norm > 0 and length > 0 else math.nan
        if abs(cosine) > 1:  # by rounding; NaN is left
            cosine = math.copysign(1.0, cosine)
        relative = distance / self.norm if self.norm > 0 else math.nan
        return Comparison(self.norm, distance, relative, cosine)
