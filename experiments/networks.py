"""Networks with a slot for the normalizer between each layer and its nonlinearity.

Every arm of an experiment has the same module names; without a normalizer the slot holds ``nn.Identity``. A layer
whose normalizer shifts (its own beta, or a mean taken out) has no bias, as in Ioffe & Szegedy (2015), section 3.2.
Weights are drawn from the given generator alone, layer after layer, and biases are zero: arms with and without a
normalizer start from the same weights, and torch's default generator is left as it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

Activation = Literal["sigmoid", "tanh", "relu", "linear"]


def mlp(
    *,
    inputs: int,
    hidden: Sequence[int],
    outputs: int,
    activation: Activation,
    init_std: float,
    normalizer: Callable[[int], nn.Module],
    generator: torch.Generator,
) -> nn.Sequential:
    """A fully connected network: ``flatten``, ``hidden{i}.linear/normalizer/nonlinearity`` (i from 1), ``output``.

    Args:
        inputs: Values an example has, whatever its shape.
        hidden: Units of each hidden layer, in order.
        outputs: Units of the last layer, which is linear.
        activation: Nonlinearity of the hidden layers.
        init_std: Standard deviation of every weight, normal with mean zero; biases are zero.
        normalizer: Makes the normalizer for so many units; called once a hidden layer.
        generator: Where weights come from.

    Raises:
        ValueError: If a size is not positive, ``init_std`` is negative, or ``activation`` is unknown.
    """
    _positive(inputs=inputs, outputs=outputs, **{f"hidden[{i}]": size for i, size in enumerate(hidden)})
    if not init_std >= 0:
        raise ValueError(f"init_std is a standard deviation, not {init_std}")
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = inputs
    for i, size in enumerate(hidden, start=1):
        slot = normalizer(size)
        layers[f"hidden{i}"] = nn.Sequential(
            OrderedDict(
                linear=_linear(width, size, bias=not _shifts(slot)),
                normalizer=slot,
                nonlinearity=_nonlinearity(activation),
            )
        )
        width = size
    layers["output"] = _linear(width, outputs, bias=True)
    network = nn.Sequential(layers)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, init_std, generator=generator)
    return network


def _linear(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    """A linear layer with zero bias, whose weights are still to be drawn."""
    # built without memory first: torch would draw from its default generator
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device="cpu")
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def _shifts(normalizer: nn.Module) -> bool:
    """Whether a constant added before ``normalizer`` is redundant: it adds its own, or takes a mean out."""
    return getattr(normalizer, "bias", None) is not None or hasattr(normalizer, "running_mean")


def _nonlinearity(name: Activation) -> nn.Module:
    match name:
        case "sigmoid":
            return nn.Sigmoid()
        case "tanh":
            return nn.Tanh()
        case "relu":
            return nn.ReLU()
        case "linear":
            return nn.Identity()
        case _:
            raise ValueError(f"activation is sigmoid, tanh, relu or linear, not {name!r}")


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")
