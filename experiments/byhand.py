"""Batch normalization written out, as Ioffe & Szegedy (2015) print it: Algorithm 1, its gradient, and Algorithm 2.

x is (m, C) or (m, C, *positions): a unit is a feature, or a map pooled over the batch and its positions, so that m
below stands for all values of a unit (section 3.2). Algorithm 1 normalizes by the batch's mean and *biased* variance;
the gradient (section 3) reaches x on three paths,

- ``direct``: x_i -> x-hat_i,
- ``variance``: x_i -> sigma^2 -> every x-hat,
- ``mean``: x_i -> mu -> every x-hat,

each of which can be cut here to see what then breaks. Algorithm 2 takes the average of batch means and m/(m-1) times
the average of batch variances. torch's own batch normalization refuses epsilon 0 in training; `forward` does not, and
can be differentiated as often as one likes.

The tests lean on torch: gradients equal autograd's with all three paths and with no fewer, statistics equal those of a
cumulative average, and a folded layer computes what the two did.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from diagnostics.guard import guard

__all__ = [
    "Gradients",
    "Normalized",
    "Path",
    "Population",
    "backward",
    "fold",
    "forward",
    "normalize",
    "population",
    "population_of",
]

Path = Literal["direct", "variance", "mean"]
PATHS: tuple[Path, ...] = get_args(Path)
Layer = TypeVar("Layer", bound=nn.Module)


@dataclass(frozen=True)
class Normalized:
    """What Algorithm 1 computes on its way."""

    y: Tensor  # as x
    xhat: Tensor  # as x
    mean: Tensor  # (C,)
    variance: Tensor  # (C,) biased


@dataclass(frozen=True)
class Gradients:
    """Of a loss with respect to what went in."""

    x: Tensor
    gamma: Tensor  # (C,)
    beta: Tensor  # (C,)


def forward(x: Tensor, gamma: Tensor, beta: Tensor, *, epsilon: float) -> Normalized:
    """Algorithm 1 on ``x`` (m, C, *positions) with ``gamma`` and ``beta`` (C,), one of each a map.

    Raises:
        ValueError: If a unit has a single value: its variance is 0 and its normalized value says nothing.
    """
    if x.ndim < 2 or x.numel() <= x.shape[1]:
        raise ValueError(f"a variance needs more than one value a unit, got shape {tuple(x.shape)}")
    axes = _pooled(x)
    mean = x.mean(axes)
    variance = (x - _wide(mean, x)).square().mean(axes)
    xhat = (x - _wide(mean, x)) / _wide((variance + epsilon).sqrt(), x)
    return Normalized(_wide(gamma, x) * xhat + _wide(beta, x), xhat, mean, variance)


def backward(
    grad: Tensor, x: Tensor, gamma: Tensor, done: Normalized, *, epsilon: float, cut: Collection[Path] = ()
) -> Gradients:
    """The gradient as printed in section 3, from that of y; ``cut`` names paths to x that are left out.

    Raises:
        ValueError: If ``cut`` names no path.
    """
    unknown = [path for path in cut if path not in PATHS]
    if unknown:
        raise ValueError(f"the gradient's paths are {', '.join(PATHS)}, not {unknown[0]!r}")
    axes, count = _pooled(x), x.numel() // x.shape[1]
    centred, scale = x - _wide(done.mean, x), (done.variance + epsilon).rsqrt()
    of_xhat = grad * _wide(gamma, x)
    of_variance = (of_xhat * centred).sum(axes) * -0.5 * scale**3
    of_mean = -of_xhat.sum(axes) * scale + of_variance * -2 * centred.mean(axes)
    parts = {
        "direct": of_xhat * _wide(scale, x),
        "variance": _wide(of_variance, x) * 2 * centred / count,
        "mean": _wide(of_mean / count, x).expand_as(x),
    }
    whole = sum((part for path, part in parts.items() if path not in cut), start=torch.zeros_like(x))
    return Gradients(whole, (grad * done.xhat).sum(axes), grad.sum(axes))


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, cut: tuple[Path, ...]) -> Tensor:
        done = forward(x, gamma, beta, epsilon=epsilon)
        ctx.save_for_backward(x, gamma)
        ctx.done, ctx.epsilon, ctx.cut = done, epsilon, cut
        return done.y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma = ctx.saved_tensors
        found = backward(grads[0], x, gamma, ctx.done, epsilon=ctx.epsilon, cut=ctx.cut)
        return found.x, found.gamma, found.beta, None, None


def normalize(x: Tensor, gamma: Tensor, beta: Tensor, *, epsilon: float, cut: Collection[Path] = ()) -> Tensor:
    """Algorithm 1 whose gradient is the printed one, with paths ``cut``: what an optimizer sees that forgets them.

    Raises:
        ValueError: As `forward` and `backward`.
    """
    unknown = [path for path in cut if path not in PATHS]
    if unknown:
        raise ValueError(f"the gradient's paths are {', '.join(PATHS)}, not {unknown[0]!r}")
    found: Tensor = _ByHand.apply(x, gamma, beta, epsilon, tuple(cut))  # type: ignore[no-untyped-call]  # torch types it not
    return found


@dataclass(frozen=True)
class Population:
    """Algorithm 2's statistics of each unit."""

    mean: Tensor  # (C,) average of batch means
    variance: Tensor  # (C,) m/(m-1) times the average of biased batch variances
    batches: int


def population(batches: Iterable[Tensor]) -> Population:
    """Exact population statistics of a layer from the batches (m, C, *positions) that reach it.

    Batches of other sizes weigh as many values as they have, and each has its own m/(m-1).

    Raises:
        ValueError: If there is no batch, or a unit has a single value in one.
    """
    weights, means, variances = [], [], []
    for x in batches:
        values = x.numel() // x.shape[1]
        if values < 2:
            raise ValueError(f"a variance needs more than one value a unit, got shape {tuple(x.shape)}")
        variance, mean = torch.var_mean(x.detach().double(), dim=_pooled(x), correction=0)
        weights.append(float(values))
        means.append(mean)
        variances.append(variance * values / (values - 1))
    if not weights:
        raise ValueError("population statistics need at least one batch")
    share = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    return Population(share @ torch.stack(means), share @ torch.stack(variances), len(weights))


def population_of(
    model: nn.Module, batches: Sequence[Tensor], forward: Callable[[Tensor], Any]
) -> dict[str, Population]:
    """`population` at every batch normalization of ``model``, each fed as in training; the model stays as it was.

    ``forward`` runs the model on one of ``batches``. A module's own running statistics, beside these, are moving
    averages over networks that training has left behind.

    Raises:
        ValueError: If the model has no batch normalization, or as `population`.
    """
    seen: dict[str, list[Tensor]] = {}
    modules = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not modules:
        raise ValueError("the model has no batch normalization")

    def listen(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, args: seen.setdefault(name, []).append(args[0].detach().clone())

    with guard(model), torch.no_grad():
        handles = [module.register_forward_pre_hook(listen(name)) for name, module in modules.items()]
        try:
            model.train()
            for batch in batches:
                forward(batch)
        finally:
            for handle in handles:
                handle.remove()
    return {name: population(heard) for name, heard in seen.items()}


def fold(layer: Layer, norm: _BatchNorm) -> Layer:
    """A copy of ``layer`` (Linear or convolution) that computes what ``layer`` and then ``norm`` in eval mode do.

    Algorithm 2, line 11: y = gamma / sqrt(Var + epsilon) x + (beta - gamma E / sqrt(Var + epsilon)), a scale and a
    shift for each unit, which the layer's weight and bias can carry.

    Raises:
        TypeError: If ``layer`` is neither, or a transposed convolution.
        ValueError: If ``norm`` tracks no statistics, or has another number of units.
    """
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        raise TypeError(f"a normalizer folds into a Linear or a convolution, not into {type(layer).__name__}")
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("a normalizer without running statistics has nothing to fold")
    if norm.num_features != layer.weight.shape[0]:
        raise ValueError(f"the layer has {layer.weight.shape[0]} outputs, the normalizer {norm.num_features}")
    with torch.no_grad():
        scale = (norm.running_var + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight
        shift = -norm.running_mean * scale
        shift = shift if norm.bias is None else shift + norm.bias
        if layer.bias is not None:
            shift = shift + layer.bias * scale
        folded = copy.deepcopy(layer)
        assert isinstance(folded, nn.Linear | _ConvNd)
        folded.weight = nn.Parameter(layer.weight * scale.reshape(-1, *(1,) * (layer.weight.ndim - 1)))
        folded.bias = nn.Parameter(shift)
    return folded


def _pooled(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def _wide(unit: Tensor, x: Tensor) -> Tensor:
    return unit.reshape(-1, *(1,) * (x.ndim - 2))
