"""What the measures of the gradient cost, in evaluations of one gradient of the same network on the same batch.

The copies and the guard that the recorder makes around a due step, whatever the probe, are not in it.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from diagnostics._vectors import moved
from diagnostics.covariate_shift import CovariateShift
from diagnostics.landscape import AlongGradient
from diagnostics.probe import ActiveProbe, Before, Loss, Site, StepView
from diagnostics.sharpness import Sharpness
from diagnostics.taps import named_parameters
from experiments import networks
from experiments.normalizers import Batch, none
from experiments.train import Objective
from tests.benchmarks.harness import Number, Ratio, Row, Work

cross_entropy = Objective()
POINTS = 8


@dataclass(frozen=True)
class Case:
    """A network, what it is trained on, and with what step size."""

    model: nn.Module
    batch: tuple[Tensor, Tensor]
    loss: Loss
    rate: float


def rows() -> Iterator[Row]:
    """Internal covariate shift of all layers, a walk of 8 points, sharpness, and what they hold in memory."""
    # L + 1 gradients is what the definition asks for, taken literally.
    for case, layers, share in (("MLP", 4, 0.75), ("deep linear net", 25, 0.6)):
        for arm in ("without BN", "with BN"):
            yield Ratio(
                f"CovariateShift, preceding, all {layers} layers of the {case} {arm}, vs one gradient",
                partial(_beside, partial(_CASES[case], _ARMS[arm]), _shift),
                bar=share * (layers + 1),
            )
    for case, bar in (("MLP", 11.5), ("deep linear net", 10.0)):
        yield Ratio(
            f"AlongGradient, {POINTS} points, {case} without BN, vs one gradient",
            partial(_beside, partial(_CASES[case], none), _walk),
            bar=bar,
        )
    yield Ratio(
        f"AlongGradient, {POINTS} points, small VGG with BN, vs one gradient",
        partial(_beside, _vgg, _walk),
        bar=9.2,
        pairs=8,
    )
    for arm in _ARMS:
        yield Ratio(
            f"Sharpness to 1% residual, from the gradient, MLP {arm}, vs one gradient",
            partial(_beside, partial(_mlp, _ARMS[arm]), _top),
            bar=60,
        )
    for name, probe in (("AlongGradient", _walk), ("CovariateShift, preceding", _shift)):
        yield Number(
            f"{name}: extra memory, in copies of the parameters",
            partial(_copies, probe),
            unit="x",
            bar=3.0,
        )


def _walk(rate: float) -> ActiveProbe:
    return AlongGradient([rate * 4 ** (2 * k / (POINTS - 1) - 1) for k in range(POINTS)])


def _shift(rate: float) -> ActiveProbe:
    return CovariateShift()


def _top(rate: float) -> ActiveProbe:
    return Sharpness()


def _mlp(normalizer: Callable[[int], nn.Module]) -> Case:
    """The MNIST network of Figure 1 and a batch of 60."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"inputs": 784, "hidden": (100, 100, 100), "outputs": 10}
    model = networks.mlp(**sizes, activation="sigmoid", init_std=0.05, normalizer=normalizer, generator=generator)
    batch = torch.rand(60, 1, 28, 28, generator=generator), torch.randint(10, (60,), generator=generator)
    return Case(model, batch, cross_entropy, 0.1)


def _deep_linear(normalizer: Callable[[int], nn.Module]) -> Case:
    """25 layers of 10 units, 1000 examples and the loss summed over them (Santurkar et al., appendix A.1)."""
    generator = torch.Generator().manual_seed(0)
    model = networks.deep_linear(
        width=10, depth=25, glorot="normal", normalizer=normalizer, normalize_last=False, generator=generator
    )
    x = torch.randn(1000, 10, generator=generator)
    batch = x, x @ torch.randn(10, 10, generator=generator)
    return Case(model, batch, lambda model, batch: (model(batch[0]) - batch[1]).square().sum(), 1e-7)


def _vgg() -> Case:
    """Eight convolutions at a quarter of the width with batch normalization, and 128 images of 32 x 32."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    channels = 3
    for width, pool in zip((16, 32, 64, 64, 128, 128, 128, 128), (1, 1, 0, 1, 0, 1, 0, 1), strict=True):
        parts += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        parts += [nn.MaxPool2d(2)] * pool
        channels = width
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(channels, 10))
    return Case(model, (torch.randn(128, 3, 32, 32), torch.randint(10, (128,))), cross_entropy, 0.1)


_CASES = {"MLP": _mlp, "deep linear net": _deep_linear}
_ARMS: dict[str, Callable[[int], nn.Module]] = {"without BN": none, "with BN": Batch}


def _view(case: Case) -> StepView:
    """A finished step of gradient descent, as the recorder shows it to a probe."""
    parameters = named_parameters(case.model)
    site = Site(case.model, case.loss, torch.optim.SGD(case.model.parameters(), lr=case.rate))
    before = Before(site)
    theta = tuple(before.parameters.values())
    after = dict(zip(parameters, moved(theta, _gradient(case), -case.rate), strict=True))
    return StepView(0, case.batch, site, before.parameters, after, case.rate, before, parameters)


def _gradient(case: Case) -> tuple[Tensor, ...]:
    return torch.autograd.grad(case.loss(case.model, case.batch), list(case.model.parameters()))


@contextmanager
def _beside(make: Callable[[], Case], probe: Callable[[float], ActiveProbe]) -> Iterator[tuple[Work, Work]]:
    case = make()
    view = _view(case)
    made = probe(case.rate)
    made.bind(view.site)
    yield lambda: list(made.measure(view)), lambda: _gradient(case)


@contextmanager
def _copies(probe: Callable[[float], ActiveProbe]) -> Iterator[Callable[[], float]]:
    """On a network whose parameters are all there is to its memory: 16 layers of 1000 units, two examples."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(16)))
    batch = torch.randn(2, 1000), torch.randint(1000, (2,))
    case = Case(model, batch, cross_entropy, 0.1)
    view, measure = _view(case), probe(case.rate)

    def copies() -> float:
        list(measure.measure(view))  # the first time it looks the network over
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        return _peak(lambda: list(measure.measure(view))) / size

    yield copies


def _peak(work: Work) -> int:
    """Bytes by which ``work`` raises this process's resident memory, at most."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before would hide what is taken now
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark falls to what is held now
    held = _status("VmRSS")
    work()
    return _status("VmHWM") - held


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    if found is None:
        raise OSError(f"/proc/self/status tells no {name}")
    return 1024 * int(found[1])
