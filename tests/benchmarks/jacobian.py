"""What singular values cost: against LAPACK on matrices that are there already, and without a matrix against with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from diagnostics.guard import guard, set_mode
from diagnostics.jacobian import extreme_values, layer_jacobians, singular_values
from experiments.datasets import mnist
from experiments.networks import mlp
from experiments.normalizers import Batch
from experiments.train import Objective
from tests.benchmarks.harness import Ratio, Row, Work

EXAMPLES, WIDTH = 60, 2048
cross_entropy = Objective()


def rows() -> Iterator[Row]:
    """The 100x100 layers of the MNIST net for 60 examples, and one 2048x2048 layer; one thread."""
    yield Ratio(
        "singular values of the MNIST net's 100x100 layers, 60 examples, vs svdvals and 10 gradients",
        _against_lapack,
        bar=1.3,
    )
    yield Ratio(
        "matrix-free top 5 of a 2048x2048 layer vs dense", _against_dense, bar=8.0, faster=True, pairs=6, block=0.0
    )


@contextmanager
def _against_lapack() -> Iterator[tuple[Work, Work]]:
    data = mnist()
    batch = data.train_inputs[:EXAMPLES], data.train_targets[:EXAMPLES]
    model = mlp(
        inputs=784, hidden=(100, 100, 100), outputs=10, activation="sigmoid", init_std=0.05, normalizer=Batch,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    with guard(model):
        set_mode(model, "batch")
        layers = "hidden*.normalizer"

        def subject() -> None:
            for one in layer_jacobians(model, layers, lambda: cross_entropy(model, batch)):
                one.jacobian.singular_values()

        found = layer_jacobians(model, layers, lambda: cross_entropy(model, batch))
        matrices = torch.cat([one.jacobian.dense() for one in found])

        def reference() -> None:
            torch.linalg.svdvals(matrices)
            for _ in range(10):
                model.zero_grad()
                cross_entropy(model, batch).backward()

        yield subject, reference


@contextmanager
def _against_dense() -> Iterator[tuple[Work, Work]]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH, generator=generator) / math.sqrt(WIDTH)
    x = torch.randn(1, WIDTH, generator=generator)

    def layer(v: torch.Tensor) -> torch.Tensor:
        return torch.tanh(v) @ weight.T

    def subject() -> None:
        (found,) = extreme_values(layer, x, 5, generator=torch.Generator().manual_seed(1))
        assert found.converged

    yield subject, lambda: singular_values(layer, x)
