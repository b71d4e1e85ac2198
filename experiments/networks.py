"""Networks with a slot for the normalizer between each layer and its nonlinearity.

Every arm of an experiment has the same module names; without a normalizer the slot holds ``nn.Identity``. A layer
whose normalizer shifts (its own beta, or a mean taken out) has no bias, as in Ioffe & Szegedy (2015), section 3.2.
Weights are drawn from the given generator alone, layer after layer, and biases are zero: arms with and without a
normalizer start from the same weights, and torch's default generator is left as it was.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

Activation = Literal["sigmoid", "tanh", "relu", "linear"]
Layout = Literal["A", "D"]
Glorot = Literal["uniform", "normal"]
Init = Literal["gaussian", "orthogonal"]


def mlp(
    *,
    inputs: int,
    hidden: Sequence[int],
    outputs: int,
    activation: Activation,
    init_std: float,
    normalizer: Callable[[int], nn.Module],
    generator: torch.Generator,
    init: Init = "gaussian",
) -> nn.Sequential:
    """A fully connected network: ``flatten``, ``hidden{i}.linear/normalizer/nonlinearity`` (i from 1), ``output``.

    Args:
        inputs: Values an example has, whatever its shape.
        hidden: Units of each hidden layer, in order.
        outputs: Units of the last layer, which is linear.
        activation: Nonlinearity of the hidden layers.
        init_std: Standard deviation of every weight; biases are zero.
        normalizer: Makes the normalizer for so many units; called once a hidden layer.
        generator: Where weights come from.
        init: Law of the weights: independent and normal with mean zero; or a random orthogonal matrix (orthonormal
            rows, or columns where there are more rows), scaled to the same mean square.

    Raises:
        ValueError: If a size is not positive, ``init_std`` is negative, or ``activation`` or ``init`` is unknown.
    """
    _positive(inputs=inputs, outputs=outputs, **{f"hidden[{i}]": size for i, size in enumerate(hidden)})
    if not init_std >= 0:
        raise ValueError(f"init_std is a standard deviation, not {init_std}")
    if init not in ("gaussian", "orthogonal"):
        raise ValueError(f"init is gaussian or orthogonal, not {init!r}")
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
                if init == "gaussian":
                    module.weight.normal_(0, init_std, generator=generator)
                else:
                    scale = init_std * math.sqrt(max(module.weight.shape))
                    nn.init.orthogonal_(module.weight, scale, generator=generator)
    return network


def vgg(
    *,
    layout: Layout,
    width: float,
    channels: int,
    size: int,
    outputs: int,
    activation: Activation,
    glorot: Glorot,
    normalizer: Callable[[int], nn.Module],
    generator: torch.Generator,
) -> nn.Sequential:
    """Simonyan & Zisserman's convolutional network for small pictures, with one linear layer on top.

    Convolutions are 3x3 with padding 1 and numbered from 1 as in Santurkar et al.: ``features.{i}.conv/normalizer/
    nonlinearity``, and ``features.{i}.pool`` (2x2 maximum) at the end of a stage; then ``flatten`` and ``output``.
    Layout A has 8 convolutions (VGG-11), D has 13 (VGG-16), both in 5 stages.

    Args:
        layout: Which of the two.
        width: Multiplies the 64 to 512 channels of the stages; each must come out whole.
        channels: Channels of the pictures.
        size: Height and width of the pictures, a multiple of 32.
        outputs: Units of the last layer.
        activation: Nonlinearity after each convolution.
        glorot: Law of the weights, uniform or normal, with variance 2 / (fan in + fan out); biases are zero.
        normalizer: Makes the normalizer for so many channels; called once a convolution.
        generator: Where weights come from.

    Raises:
        ValueError: If a size is not positive or does not fit, or a choice is unknown.
    """
    _positive(channels=channels, size=size, outputs=outputs)
    if layout not in ("A", "D"):
        raise ValueError(f"layout is A or D, not {layout!r}")
    if size % 32:
        raise ValueError(f"size must be a multiple of 32 for five stages of pooling, not {size}")
    convolutions = (1, 1, 2, 2, 2) if layout == "A" else (2, 2, 3, 3, 3)
    features: OrderedDict[str, nn.Module] = OrderedDict()
    incoming = channels
    for full, count in zip((64, 128, 256, 512, 512), convolutions, strict=True):
        outgoing = round(full * width)
        if outgoing < 1 or outgoing != full * width:
            raise ValueError(f"width must leave a whole number of the {full} channels of a stage, and {width} does not")
        for position in range(count):
            slot = normalizer(outgoing)
            parts: OrderedDict[str, nn.Module] = OrderedDict(
                conv=_convolution(incoming, outgoing, bias=not _shifts(slot)),
                normalizer=slot,
                nonlinearity=_nonlinearity(activation),
            )
            if position == count - 1:
                parts["pool"] = nn.MaxPool2d(2)
            features[str(len(features) + 1)] = nn.Sequential(parts)
            incoming = outgoing
    network = nn.Sequential(
        OrderedDict(
            features=nn.Sequential(features),
            flatten=nn.Flatten(),
            output=_linear(incoming * (size // 32) ** 2, outputs, bias=True),
        )
    )
    _draw_glorot(network, glorot, generator)
    return network


def deep_linear(
    *,
    width: int,
    depth: int,
    glorot: Glorot,
    normalizer: Callable[[int], nn.Module],
    normalize_last: bool,
    generator: torch.Generator,
) -> nn.Sequential:
    """A product of square matrices: ``layer{i}.linear/normalizer`` (i from 1), no bias, no nonlinearity.

    Santurkar et al. (2018, appendix A.1) have 25 layers of 10 units with the normalizer after each, and do not say
    whether the last has one.

    Args:
        width: Units of every layer, and of the input.
        depth: Number of layers.
        glorot: Law of the weights, uniform or normal, with variance 1 / width.
        normalizer: Makes the normalizer for so many units; called once a layer that has one.
        normalize_last: Whether the last layer has a normalizer; else its slot holds ``nn.Identity``.
        generator: Where weights come from.

    Raises:
        ValueError: If a size is not positive or ``glorot`` is unknown.
    """
    _positive(width=width, depth=depth)
    network = nn.Sequential(
        OrderedDict(
            (
                f"layer{i}",
                nn.Sequential(
                    OrderedDict(
                        linear=_linear(width, width, bias=False),
                        normalizer=normalizer(width) if i < depth or normalize_last else nn.Identity(),
                    )
                ),
            )
            for i in range(1, depth + 1)
        )
    )
    _draw_glorot(network, glorot, generator)
    return network


def _draw_glorot(network: nn.Module, law: Glorot, generator: torch.Generator) -> None:
    if law not in ("uniform", "normal"):
        raise ValueError(f"glorot is uniform or normal, not {law!r}")
    draw = nn.init.xavier_uniform_ if law == "uniform" else nn.init.xavier_normal_
    for module in network.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            draw(module.weight, generator=generator)


def _linear(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    """A linear layer with zero bias, whose weights are still to be drawn."""
    # built without memory first: torch would draw from its default generator
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device="cpu")
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def _convolution(inputs: int, outputs: int, *, bias: bool) -> nn.Conv2d:
    """The same for a 3x3 convolution that keeps the size of the picture."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias, device="meta").to_empty(device="cpu")
    if layer.bias is not None:
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
