"""What a summary of one layer's signal costs: against sorting it, and against the layer itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from diagnostics.quantiles import prepare, summarize, summarize_many, summarize_rows
from tests.benchmarks.harness import Ratio, Row, Work

Q = (0.15, 0.5, 0.85)
IMAGES = (128, 64, 32, 32)


def rows() -> Iterator[Row]:
    """Three quantiles and all moments of (128, 64, 32, 32) and of (60, 100), float32."""
    size = "(128, 64, 32, 32)"
    for threads in (1, 2):
        beside = f"{threads} thread" + "s" * (threads > 1)
        one = partial(Ratio, threads=threads)
        yield one(
            f"summarize {size} vs torch.sort per channel, {beside}", _against_sort, bar=12.0, goal=20.0, faster=True
        )
        yield one(
            f"summarize {size} vs F.batch_norm in training, {beside}", partial(_against_norm, _same), bar=1.5, goal=1.0
        )
        yield one(
            f"summarize {size} after ReLU vs F.batch_norm in training, {beside}",
            partial(_against_norm, torch.relu),
            bar=1.5,
            goal=1.0,
        )
    yield Ratio("prepare (128, 64, 32, 32) vs F.batch_norm in training", _copy_against_norm, bar=1.0)
    yield Ratio("summarize (60, 100) vs np.sort of its rows", _small_against_sort, bar=8.0, goal=5.0)
    yield Ratio("summarize_many of 3 x (60, 100) vs one", _three_against_one, bar=2.5, goal=2.0)


def _images() -> torch.Tensor:
    return torch.randn(IMAGES, generator=torch.Generator().manual_seed(0))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@contextmanager
def _against_sort() -> Iterator[tuple[Work, Work]]:
    x = _images()
    yield lambda: summarize(x, Q), lambda: torch.sort(x.transpose(0, 1).reshape(x.shape[1], -1), dim=1)


def _norm(x: torch.Tensor) -> Work:
    channels = x.shape[1]
    mean, variance, weight, bias = (torch.full((channels,), value) for value in (0.0, 1.0, 1.0, 0.0))
    return lambda: F.batch_norm(x, mean, variance, weight, bias, training=True)


@contextmanager
def _against_norm(signal: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[tuple[Work, Work]]:
    x = signal(_images())
    yield lambda: summarize(x, Q), _norm(x)


@contextmanager
def _copy_against_norm() -> Iterator[tuple[Work, Work]]:
    x = _images()
    yield lambda: prepare(x), _norm(x)


def _small() -> torch.Tensor:
    return torch.randn(60, 100, generator=torch.Generator().manual_seed(0))


@contextmanager
def _small_against_sort() -> Iterator[tuple[Work, Work]]:
    x = _small()
    values = np.ascontiguousarray(x.numpy().T)
    yield lambda: summarize(x, Q), lambda: np.sort(values, axis=1)


@contextmanager
def _three_against_one() -> Iterator[tuple[Work, Work]]:
    one = prepare(_small())
    yield lambda: summarize_many([one, one, one], Q), lambda: summarize_rows(one, Q)
