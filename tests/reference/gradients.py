"""Slow twins of the measures of the gradient: whole copies of the model, one backward each, dense matrices."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, Any], Tensor]


def gradient(model: nn.Module, loss: Loss, batch: Any, values: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradient by name) of a copy of ``model`` whose parameters are ``values``; streams as they are now."""
    twin = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                parameter.copy_(values.get(name, parameter))
                parameter.grad = None
        value = loss(twin, batch)
        value.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in twin.named_parameters()}
    return value.item(), grads


def shift(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    after: Mapping[str, Tensor],
    layers: Sequence[Sequence[str]],
    which: str = "preceding",
) -> list[dict[str, float]]:
    """Definition 2.1 for each layer (a list of names of parameters), from the words of the paper."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = gradient(model, loss, batch, before)[1]
    found = []
    for i, layer in enumerate(layers):
        values = dict(before)
        for j, other in enumerate(layers):
            moves = {"preceding": j < i, "following": j > i, "own": j == i, "all": True}[which]
            for name in other:
                values[name] = after[name] if moves else before[name]
        changed = gradient(model, loss, batch, values)[1]
        found.append(compare(vector(plain, layer), vector(changed, layer)))
    return found


def vector(grads: Mapping[str, Tensor], names: Sequence[str]) -> np.ndarray:
    return np.concatenate([grads[name].detach().double().numpy().ravel() for name in names])


def compare(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    size, other = math.sqrt(a @ a), math.sqrt(b @ b)
    distance = math.sqrt((a - b) @ (a - b))
    return {
        "gradient_norm": size,
        "l2": distance,
        "relative": distance / size if size else math.nan,
        "cosine": float(a @ b) / size / other if size and other else math.nan,
    }


def along(
    model: nn.Module, loss: Loss, batch: Any, steps: Sequence[float], direction: Mapping[str, Tensor] | None = None
) -> list[dict[str, float]]:
    """The walk against the gradient, or against ``direction`` as it is, point by point."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = list(before)
    _, g = gradient(model, loss, batch, before)
    d = g if direction is None else direction
    found = []
    for eta in steps:
        value, there = gradient(model, loss, batch, {name: before[name] - eta * d[name] for name in names})
        apart = compare(vector(g, names), vector(there, names))
        length = float(np.linalg.norm(vector(d, names)))
        found.append(
            {
                "loss": value,
                "gradient_difference": apart["l2"],
                "cosine": apart["cosine"],
                "effective_smoothness": apart["l2"] / (eta * length),
            }
        )
    return found


def hessian(model: nn.Module, loss: Loss, batch: Any, *, step: float = 1e-5) -> np.ndarray:
    """The dense (D, D) Hessian by central differences of the gradient; for models in float64."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = list(before)
    columns = []
    for name in names:
        for index in range(before[name].numel()):
            ends = []
            for sign in (1, -1):
                moved = before[name].clone()
                moved.view(-1)[index] += sign * step
                ends.append(vector(gradient(model, loss, batch, {**before, name: moved})[1], names))
            columns.append((ends[0] - ends[1]) / (2 * step))
    return np.stack(columns, axis=1)
