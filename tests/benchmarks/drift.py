"""What drift costs: the distances against a sort of one sample, and the probe against the training it watches."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn

from diagnostics.distances import DISTANCES, Sample, distances, floor
from diagnostics.drift import Drift
from diagnostics.recorder import Recorder
from diagnostics.schedules import every
from experiments.datasets import mnist
from experiments.networks import mlp
from experiments.normalizers import Batch, none
from experiments.train import Objective
from tests.benchmarks.harness import Ratio, Row, Work

cross_entropy = Objective()

DEFAULT = ("mean_shift", "std_shift", "wasserstein1")
STEPS = 1000  # a call of the training rows: 10 records, one floor among them


def rows() -> Iterator[Row]:
    """Distances of (1000, 100) float32 in one thread; Drift with its default distances at 3 layers every 100 steps."""
    yield Ratio("all distances of 2 x (1000, 100) vs torch.sort of one", partial(_against_sort, DISTANCES), bar=3.0)
    yield Ratio("default distances of 2 x (1000, 100) vs torch.sort of one", partial(_against_sort, DEFAULT), bar=3.0)
    yield Ratio("floor of the default distances vs their 20 halves one by one", _floor_against_halves, bar=0.5)
    for arm, normalizer in ("without BN", none), ("with BN", Batch):
        yield Ratio(
            f"Drift, 1000 examples, 3 layers every 100 steps, MNIST net {arm}, vs the bare step",
            partial(_against_training, normalizer),
            bar=1.10,
        )


def _pair() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 100, generator=generator)
    return x, x + 0.1 * torch.randn(1000, 100, generator=generator)


@contextmanager
def _against_sort(names: tuple[str, ...]) -> Iterator[tuple[Work, Work]]:
    x, y = _pair()
    yield lambda: distances(names, x, y), lambda: torch.sort(x, dim=0)


@contextmanager
def _floor_against_halves() -> Iterator[tuple[Work, Work]]:
    x, y = _pair()
    sample = Sample.of(x)

    def one_by_one() -> None:
        for _ in range(20):
            distances(DEFAULT, x[:500], y[:500], paired=False)

    yield lambda: floor(sample, DEFAULT, seed=0), one_by_one


@contextmanager
def _against_training(normalizer: Callable[[int], nn.Module]) -> Iterator[tuple[Work, Work]]:
    """Two equal networks on the same batches; their averages stay in memory, as in a plain loop."""
    data = mnist()
    probe_batch = data.train_inputs[:1000], data.train_targets[:1000]
    batches = list(zip(data.train_inputs[:60_000].split(60), data.train_targets[:60_000].split(60), strict=True))

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(
            inputs=784, hidden=(100, 100, 100), outputs=10, activation="sigmoid", init_std=0.05, normalizer=normalizer,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad()
        cross_entropy(model, batches[step % len(batches)]).backward()
        optimizer.step()

    watched, bare = made(), made()
    steps = count()
    probe = Drift("hidden?.nonlinearity", probe_batch, when=every(100))
    with tempfile.TemporaryDirectory() as folder:
        with Recorder(watched[0], Path(folder) / "run", [probe], loss=cross_entropy) as recorder:

            def subject() -> None:
                for _ in range(STEPS):
                    step = next(steps)
                    with recorder.step(batches[step % len(batches)]):
                        update(*watched, step)

            def reference() -> None:
                for step in range(STEPS):
                    update(*bare, step)

            yield subject, reference
