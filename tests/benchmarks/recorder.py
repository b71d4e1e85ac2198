"""What recording costs a training step: between due steps, every hundred steps, and at every step."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

from diagnostics.activations import Activations
from diagnostics.probe import Probe
from diagnostics.recorder import Recorder
from diagnostics.schedules import Schedule, every
from experiments import networks
from experiments.normalizers import none
from experiments.train import Batch, Objective
from tests.benchmarks.harness import Number, Ratio, Row, Work

cross_entropy = Objective()

STEPS = 100  # steps a timed call: a probe due every hundred is due once in it
Made = tuple[nn.Module, torch.optim.Optimizer, Batch]


def rows() -> Iterator[Row]:
    """The recorder on the MNIST network and on a small VGG; its memory over 20,000 recorded steps."""
    yield Ratio("recorder, never due, vs the bare step, MNIST net", partial(_beside, mlp, _sigmoids(_never)), bar=1.03)
    yield Ratio(
        "Activations on 3 layers every 100 steps, MNIST net", partial(_beside, mlp, _sigmoids(every(100))), bar=1.05
    )
    yield Ratio(
        "Activations on 3 layers at every step, MNIST net",
        partial(_beside, mlp, _sigmoids(every(1))),
        bar=2.0,
        goal=1.5,
    )
    for threads in (1, 2):
        yield Ratio(
            f"Activations on all convolutions at every step, small VGG, {threads} torch thread" + "s" * (threads > 1),
            partial(_beside, small_vgg, lambda: [Activations("*.conv", "output")], steps=1),
            bar=1.25,
            threads=threads,
        )
    yield Number("resident memory from recorded step 2,000 to 20,000", _growth, unit="MiB", bar=16)
    yield Number("most bytes buffered in 2,000 recorded steps", _buffered, unit="MiB", bar=64)


def mlp() -> Made:
    """The MNIST network of Figure 1 without BN, its optimizer, a batch of 60."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"inputs": 784, "hidden": (100, 100, 100), "outputs": 10}
    model = networks.mlp(**sizes, activation="sigmoid", init_std=0.05, normalizer=none, generator=generator)
    batch = torch.rand(60, 1, 28, 28, generator=generator), torch.randint(10, (60,), generator=generator)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batch


def small_vgg() -> Made:
    """A VGG with batch normalization at a quarter of the width, its optimizer, 128 images of 32 x 32."""
    torch.manual_seed(0)
    layers = nn.ModuleDict()
    channels = 3
    for index, (width, pool) in enumerate(
        [(16, True), (32, True), (64, False), (64, True), (128, False), (128, True), (128, False), (128, True)]
    ):
        parts = {
            "conv": nn.Conv2d(channels, width, 3, padding=1, bias=False),
            "norm": nn.BatchNorm2d(width),
            "relu": nn.ReLU(inplace=True),
        }
        if pool:
            parts["pool"] = nn.MaxPool2d(2)
        layers[f"block{index + 1}"] = nn.Sequential()
        for name, part in parts.items():
            layers[f"block{index + 1}"].add_module(name, part)
        channels = width
    model = nn.Sequential(*layers.values(), nn.Flatten(), nn.Linear(128, 10))
    batch = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), batch


def train(made: Made, step: Callable[[Batch], AbstractContextManager[None]] | None, steps: int) -> None:
    """So many steps on one batch, inside ``step`` or bare."""
    model, optimizer, batch = made
    for _ in range(steps):
        if step is None:
            _update(model, optimizer, batch)
        else:
            with step(batch):
                _update(model, optimizer, batch)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    cross_entropy(model, batch).backward()
    optimizer.step()


def _never(step: int) -> bool:
    return False


def _sigmoids(when: Schedule) -> Callable[[], list[Probe]]:
    return lambda: [Activations("hidden*.nonlinearity", when=when)]


@contextmanager
def _beside(
    make: Callable[[], Made], probes: Callable[[], list[Probe]], *, steps: int = STEPS
) -> Iterator[tuple[Work, Work]]:
    recorded, bare = make(), make()
    with tempfile.TemporaryDirectory() as folder, Recorder(recorded[0], Path(folder) / "run", probes()) as recorder:
        yield lambda: train(recorded, recorder.step, steps), lambda: train(bare, None, steps)


@contextmanager
def _growth() -> Iterator[Callable[[], float]]:
    def growth() -> float:
        made, probes = mlp(), _sigmoids(every(1))()
        with tempfile.TemporaryDirectory() as folder, Recorder(made[0], Path(folder) / "run", probes) as recorder:
            train(made, recorder.step, 2_000)
            before = _resident()
            train(made, recorder.step, 18_000)
            return (_resident() - before) / 2**20

    yield growth


@contextmanager
def _buffered() -> Iterator[Callable[[], float]]:
    def most() -> float:
        made, probes, seen = mlp(), _sigmoids(every(1))(), 0
        with tempfile.TemporaryDirectory() as folder:
            with Recorder(made[0], Path(folder) / "run", probes, part_every=2_000) as recorder:
                for _ in range(1_999):
                    train(made, recorder.step, 1)
                    writer = recorder._open_writer()
                    seen = max(seen, writer._parts.buffered_bytes if writer._parts else 0)
        return seen / 2**20

    yield most


def _resident() -> int:
    """Bytes of this process in memory now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
