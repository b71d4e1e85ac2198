"""What the noise of Algorithm 1 costs a training step: noisy against plain batch normalization, one torch thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.networks import Layout, mlp, vgg
from experiments.normalizers import Batch, NoisyBatch
from tests.benchmarks.harness import Ratio, Row, Work

Build = Callable[[Callable[[int], nn.Module]], nn.Module]


def rows() -> Iterator[Row]:
    """The MNIST network of 3 x 100 units at batch 60; VGG at batch 128, a quarter as wide and whole."""
    yield Ratio("noisy BN vs BN, step of the MLP, batch 60", partial(_steps, _mlp, _digits), bar=1.5)
    layouts: tuple[Layout, ...] = ("A", "D")
    for layout in layouts:
        build = partial(_vgg, layout, 0.25)
        name = f"noisy BN vs BN, step of VGG {layout} at width 1/4, batch 128"
        yield Ratio(name, partial(_steps, build, _pictures), bar=1.6)
    # seconds a step: six rounds are the fewest whose range is an interval of 95 %
    build = partial(_vgg, "D", 1.0)
    yield Ratio(
        "noisy BN vs BN, step of VGG D at full width, batch 128", partial(_steps, build, _pictures), bar=1.3, pairs=6
    )


def _mlp(normalizer: Callable[[int], nn.Module]) -> nn.Module:
    return mlp(
        inputs=784,
        hidden=(100, 100, 100),
        outputs=10,
        activation="sigmoid",
        init_std=0.1,
        normalizer=normalizer,
        generator=torch.Generator().manual_seed(0),
    )


def _vgg(layout: Layout, width: float, normalizer: Callable[[int], nn.Module]) -> nn.Module:
    return vgg(
        layout=layout,
        width=width,
        channels=3,
        size=32,
        outputs=10,
        activation="relu",
        glorot="uniform",
        normalizer=normalizer,
        generator=torch.Generator().manual_seed(0),
    )


def _digits() -> Tensor:
    return torch.rand(60, 1, 28, 28, generator=torch.Generator().manual_seed(1))


def _pictures() -> Tensor:
    return torch.randn(128, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@contextmanager
def _steps(build: Build, inputs: Callable[[], Tensor]) -> Iterator[tuple[Work, Work]]:
    noise = torch.Generator().manual_seed(2)
    noisy = build(lambda features: NoisyBatch(features, generator=noise))
    yield _step(noisy, inputs()), _step(build(Batch), inputs())


def _step(network: nn.Module, x: Tensor) -> Work:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    targets = torch.arange(len(x)) % 10

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), targets)
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        optimizer.step()

    return step
