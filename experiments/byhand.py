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
from typing import Any, Final, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from diagnostics.guard import guard, set_mode

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
_FOLLOWED_BY: Final[dict[type[nn.Module], type[_BatchNorm]]] = {
    nn.Linear: nn.BatchNorm1d,
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
}


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
        ctx.save_for_backward(x, gamma, beta)
        ctx.epsilon, ctx.cut = epsilon, cut
        return forward(x, gamma, beta, epsilon=epsilon).y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, beta = ctx.saved_tensors
        # Computed again, where autograd sees it: kept from the forward, the statistics would be constants to whoever
        # differentiates this gradient once more.
        done = forward(x, gamma, beta, epsilon=ctx.epsilon)
        found = backward(grads[0], x, gamma, done, epsilon=ctx.epsilon, cut=ctx.cut)
        return found.x, found.gamma, found.beta, None, None


def normalize(x: Tensor, gamma: Tensor, beta: Tensor, *, epsilon: float, cut: Collection[Path] = ()) -> Tensor:
    """Algorithm 1 whose gradient is the printed one, with paths ``cut``: what an optimizer sees that forgets them.

    Second derivatives are those of that gradient, cut or not, on all paths.

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
    sums = _Sums()
    for x in batches:
        sums.add(x)
    return sums.population()


class _Sums:
    """What of the batches is kept while they pass: two sums a unit, whatever their number."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.batches = 0
        self.mean: Tensor | float = 0.0  # (C,) times the weight
        self.variance: Tensor | float = 0.0  # (C,) unbiased, times the weight

    def add(self, x: Tensor) -> None:
        values = x.numel() // x.shape[1]
        if values < 2:
            raise ValueError(f"a variance needs more than one value a unit, got shape {tuple(x.shape)}")
        variance, mean = torch.var_mean(x.detach().double(), dim=_pooled(x), correction=0)
        self.weight += values
        self.batches += 1
        self.mean = self.mean + values * mean
        self.variance = self.variance + values * (variance * values / (values - 1))

    def population(self) -> Population:
        if not isinstance(self.mean, Tensor) or not isinstance(self.variance, Tensor):
            raise ValueError("population statistics need at least one batch")
        return Population(self.mean / self.weight, self.variance / self.weight, self.batches)


def population_of(
    model: nn.Module, batches: Sequence[Tensor], forward: Callable[[Tensor], Any]
) -> dict[str, Population]:
    """`population` at every batch normalization of ``model``, each fed as in training; the model stays as it was.

    Normalizers use the statistics of their batch; all else evaluates, so that dropout adds nothing of its own.
    ``forward`` runs the model on one of ``batches``; a normalizer that it calls twice has heard two. A module's own
    running statistics, beside these, are moving averages over networks that training has left behind.

    Raises:
        ValueError: If the model has no batch normalization, one of them never runs, there is no batch, or as
            `population`.
    """
    sums = {name: _Sums() for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not sums:
        raise ValueError("the model has no batch normalization")

    def listen(heard: _Sums) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        return lambda _, args, named: heard.add(args[0] if args else next(iter(named.values())))

    with guard(model), torch.no_grad():
        handles = [
            model.get_submodule(name).register_forward_pre_hook(listen(heard), with_kwargs=True)
            for name, heard in sums.items()
        ]
        try:
            set_mode(model, "batch")
            for batch in batches:
                forward(batch)
        finally:
            for handle in handles:
                handle.remove()
    if not len(batches):
        raise ValueError("population statistics need at least one batch")
    if silent := [name for name, heard in sums.items() if not heard.batches]:
        raise ValueError(f"no batch reaches the normalizer {silent[0]!r}: it has no population")
    return {name: heard.population() for name, heard in sums.items()}


def fold(layer: Layer, norm: _BatchNorm) -> Layer:
    """A copy of ``layer`` (Linear or convolution) that computes what ``layer`` and then ``norm`` in eval mode do.

    Algorithm 2, line 11: y = gamma / sqrt(Var + epsilon) x + (beta - gamma E / sqrt(Var + epsilon)), a scale and a
    shift for each unit, which the layer's weight and bias can carry. A Linear's units must be the second dimension,
    (N, C): fed with (N, L, C) the normalizer takes L for its units, and where L = C neither it nor `fold` can tell.
    That ``norm`` follows ``layer`` and nothing else reads the layer's output is the caller's to know, too.

    Raises:
        TypeError: If ``layer`` is neither, or a transposed convolution; or if it or ``norm`` is of a class that may
            compute something else (a subclass, a parametrized layer).
        ValueError: If ``norm`` tracks no statistics, has another number of units or is made for other dimensions, or
            if one of the two has hooks, which a copy of the weights does not know.
    """
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        raise TypeError(f"a normalizer folds into a Linear or a convolution, not into {type(layer).__name__}")
    if type(layer) not in _FOLLOWED_BY or "forward" in vars(layer):
        raise TypeError(
            f"{type(layer).__name__} may compute something else than the layer it is made of; fold into a plain"
            " Linear or convolution (a parametrized one after remove_parametrizations)"
        )
    if type(norm).forward is not _BatchNorm.forward or "forward" in vars(norm):
        raise TypeError(f"{type(norm).__name__} may compute something else than torch's batch normalization does")
    for module in (layer, norm):
        if module._forward_hooks or module._forward_pre_hooks:
            raise ValueError(f"{type(module).__name__} has forward hooks, which folding would leave out")
    if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and not isinstance(
        norm, _FOLLOWED_BY[type(layer)]
    ):
        raise ValueError(f"{type(norm).__name__} does not take what {type(layer).__name__} gives")
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
