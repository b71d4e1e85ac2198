"""From configuration to objects: the data, the network and the loss that a run's settings name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from torch import nn

from experiments import datasets, networks, normalizers
from experiments.config import DataConfig, NetworkConfig, NoiseConfig, NormalizerConfig
from experiments.datasets import Dataset
from experiments.normalizers import NoiseLaw
from experiments.seeds import Streams

__all__ = ["make_data", "make_network"]

CIFAR10_ROOT = "data/cifar10"  # where it is looked for, and fetched to, if no root is named
_ORDERS = {"l1": 1.0, "l2": 2.0, "linf": math.inf}


def make_data(config: DataConfig, streams: Streams) -> Dataset:
    """The data that ``config`` names, in memory; nobody writes to it. What is drawn comes from the stream ``data``.

    Raises:
        ValueError: If it is absent or damaged; says where it was looked for.
    """
    if config.name != "gaussian":
        return _pictures(config)
    drawn = datasets.gaussian(
        dimension=config.dimension,
        examples=config.examples,
        test_examples=config.test_examples,
        scale=config.scale,
        generator=streams.torch("data"),
    )
    return datasets.reduced(drawn) if config.reduce else drawn


@lru_cache(maxsize=1)  # a worker's runs share their data
def _pictures(config: DataConfig) -> Dataset:
    if config.name == "mnist":
        return datasets.mnist(binarize=config.binarize, threshold=config.threshold)
    if config.name == "fashion-mnist":
        return datasets.fashion_mnist(config.root, binarize=config.binarize, threshold=config.threshold)
    root = CIFAR10_ROOT if config.root is None else config.root
    # Only a place of our own is filled without being asked: a folder that was named is expected to hold the files.
    return datasets.cifar10(Path(root), download=config.root is None, standardize=config.standardize)


def make_network(config: NetworkConfig, normalizer: NormalizerConfig, streams: Streams) -> nn.Module:
    """The network that ``config`` names, with ``normalizer`` in its slots.

    Weights are drawn from the stream ``init``; noise comes from the stream ``noise``, one for all layers.
    """
    slot, generator = make_slot(normalizer, streams), streams.torch("init")
    match config.kind:
        case "mlp":
            return networks.mlp(
                inputs=config.inputs,
                hidden=config.hidden,
                outputs=config.outputs,
                activation=config.activation,
                init_std=config.init_std,
                normalizer=slot,
                generator=generator,
                init=config.init,
            )
        case "vgg":
            return networks.vgg(
                layout=config.layout,
                width=config.width,
                channels=config.channels,
                size=config.size,
                outputs=config.outputs,
                activation=config.activation,
                glorot=config.glorot,
                normalizer=slot,
                generator=generator,
            )
        case "deep_linear":
            return networks.deep_linear(
                width=config.width,
                depth=config.depth,
                glorot=config.glorot,
                normalizer=slot,
                normalize_last=config.normalize_last,
                generator=generator,
            )


def make_slot(config: NormalizerConfig, streams: Streams) -> Callable[[int], nn.Module]:
    """What makes the normalizer for so many units."""
    eps, momentum = config.epsilon, config.momentum

    def slot(features: int) -> nn.Module:
        match config.kind:
            case "none":
                return normalizers.none(features)
            case "batch":
                return normalizers.Batch(features, eps=eps, momentum=momentum)
            case "noisy":
                source, law = streams.torch("noise"), noise_law(config.noise)
                return normalizers.NoisyBatch(features, generator=source, law=law, eps=eps, momentum=momentum)
            case "noise_only":
                return normalizers.NoiseOnly(features, generator=streams.torch("noise"), law=noise_law(config.noise))
            case "population":
                return normalizers.Population(features, eps=eps, momentum=momentum)
            case "ghost":
                return normalizers.Ghost(features, group=config.ghost, eps=eps, momentum=momentum)
            case "lp":
                order = _ORDERS[config.norm]
                return normalizers.Lp(features, p=order, centred=config.centred, eps=eps, momentum=momentum)
            case "layer":
                return normalizers.Layer(features, eps=eps)
            case "group":
                return normalizers.Group(features, groups=config.groups, eps=eps)

    return slot


def noise_law(config: NoiseConfig) -> NoiseLaw:
    """The law that ``config`` describes: field by field the same."""
    return NoiseLaw(**config.model_dump())
