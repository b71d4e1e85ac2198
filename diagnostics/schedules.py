"""When a probe is due: a schedule is any function ``step -> bool``.

Step ``t`` counts optimizer updates already done, so 0 is the network as it was initialized. The schedules made here are
frozen dataclasses, so that a record can say how it was sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Schedule", "at", "every", "log_spaced"]

Schedule = Callable[[int], bool]


@dataclass(frozen=True)
class _Every:
    n: int

    def __call__(self, step: int) -> bool:
        return step % self.n == 0

    def __repr__(self) -> str:
        return f"every({self.n})"


@dataclass(frozen=True)
class _At:
    steps: frozenset[int]
    text: str = field(compare=False)

    def __call__(self, step: int) -> bool:
        return step in self.steps

    def __repr__(self) -> str:
        return self.text


def every(n: int) -> Schedule:
    """Due at steps 0, n, 2n, ...

    Raises:
        ValueError: If ``n`` is not a positive integer.
    """
    return _Every(_integer("n", n, least=1))


def at(*steps: int) -> Schedule:
    """Due at exactly these steps.

    Raises:
        ValueError: If there are none, or one is negative.
    """
    if not steps:
        raise ValueError("at() needs at least one step")
    wanted = [_integer("step", step, least=0) for step in steps]
    return _At(frozenset(wanted), f"at({', '.join(map(str, wanted))})")


def log_spaced(last: int, count: int) -> Schedule:
    """Due at step 0 and at up to ``count`` steps from 1 to ``last``, evenly spaced in the logarithm.

    Neighbours that round to the same integer are one step, so there may be fewer.

    Raises:
        ValueError: If ``last`` is below 1 or ``count`` below 2.
    """
    _integer("last", last, least=1)
    _integer("count", count, least=2)
    grid = np.unique(np.rint(np.geomspace(1, last, count)).astype(int))
    return _At(frozenset({0, *map(int, grid)}), f"log_spaced({last}, {count})")


def _integer(name: str, value: int, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return int(value)
