"""Networks that are awkward to measure, and one way to train them that leaves nothing to chance but its streams."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


class OwnNoise(nn.Module):
    """Draws from a generator it holds itself: random state that torch.get_rng_state does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)
        self.numpy = np.random.default_rng(5)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        noise = torch.randn(x.shape, generator=self.generator) + float(self.numpy.normal())
        return x + 0.01 * noise * random.random() * float(np.random.rand())


class Awkward(nn.Module):
    """Batch normalization, an in-place ReLU used twice, dropout, own generators, tied weights, a dict as output.

    What it computes depends on plain attributes that it changes in place, a list with a tensor and a generator in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.2)
        self.noise = OwnNoise()
        self.first = nn.Linear(4 * 16, 12)
        self.middle = nn.Linear(12, 12)
        self.norm1 = nn.BatchNorm1d(12)
        self.again = nn.Linear(12, 12)
        self.again.weight = self.middle.weight
        self.out = nn.Linear(12, 3)
        self.calls = 0
        self.history: list[Any] = [torch.zeros(2), torch.Generator().manual_seed(6), {"seen": []}]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        if self.training:
            total, source, notes = self.history
            total += torch.rand(2, generator=source)
            notes["seen"].append(self.calls)
            x = x + 0.001 * (total[0] + self.calls)
        x = self.relu(self.norm(self.conv(x)))
        x = self.noise(self.drop(x)).flatten(1)
        x = self.relu(self.norm1(self.middle(self.first(x))))
        return {"logits": self.out(self.again(x))}


def awkward(seed: int = 0) -> Awkward:
    torch.manual_seed(seed)
    return Awkward()


def awkward_batches(count: int, seed: int = 1, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 1, 6, 6, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch[0])
    return F.cross_entropy(output["logits"] if isinstance(output, dict) else output, batch[1])


def seed_everything(seed: int = 0) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All state that looking may not change, copied."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        grad = None if parameter.grad is None else parameter.grad.clone()
        state[name] = (parameter.detach().clone(), grad, parameter.requires_grad)
    for name, buffer in model.named_buffers():
        state[f"buffer {name}"] = buffer.clone()
    for name, module in model.named_modules():
        state[f"module {name}"] = module.training
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        state[f"hooks {name}"] = [len(held) for held in hooks]
        for key, value in vars(module).items():
            if isinstance(value, torch.Generator):
                state[f"{name}.{key}"] = value.get_state()
            elif isinstance(value, np.random.Generator):
                state[f"{name}.{key}"] = value.bit_generator.state
            elif isinstance(value, int | float):
                state[f"{name}.{key}"] = value
            elif key == "history":
                total, source, notes = value
                state[key] = [total.clone(), source.get_state(), list(notes["seen"])]
    for index, held in enumerate(optimizer.state_dict()["state"].values()):
        for key, value in held.items():
            state[f"optimizer {index} {key}"] = value.clone() if isinstance(value, Tensor) else value
    return state


def assert_same(found: Any, wanted: Any, where: str = "state") -> None:
    """Equal to the bit, through nested containers; says where not."""
    if isinstance(wanted, Tensor):
        assert isinstance(found, Tensor), where
        assert found.dtype == wanted.dtype, where
        assert torch.equal(found, wanted), where
    elif isinstance(wanted, np.ndarray):
        assert np.array_equal(found, wanted), where
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key, value in wanted.items():
            assert_same(found[key], value, f"{where}[{key!r}]")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    else:
        assert found == wanted, where


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    step: Callable[[Batch], Any],
    *,
    loss: Callable[[nn.Module, Batch], Tensor] = cross_entropy,
) -> list[float]:
    """The plainest loop; ``step(batch)`` is a context manager. Returns the losses."""
    losses = []
    for batch in batches:
        with step(batch):
            optimizer.zero_grad()
            value = loss(model, batch)
            value.backward()
            optimizer.step()
        losses.append(float(value.detach()))
    return losses


class PrimitiveBatchNorm(nn.Module):
    """Batch normalization of (N, C, *positions) from means and squares alone: no torch.nn.functional.batch_norm."""

    def __init__(self, features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        axes = (0, *range(2, x.ndim))
        unit = (1, -1, *(1 for _ in x.shape[2:]))
        centred = x - x.mean(axes, keepdim=True)
        scaled = centred / (centred.square().mean(axes, keepdim=True) + self.eps).sqrt()
        return scaled * self.weight.view(unit) + self.bias.view(unit)
