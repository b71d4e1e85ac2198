"""Protocols that several studies share: the fields they let people change, and the runs those make.

The MNIST network is that of Ioffe & Szegedy (2015), section 4.1: 3 hidden layers of 100 sigmoid units, weights
N(0, std^2), biases 0, a 10-way output, cross-entropy, binary 28x28 images, batches of 60. The paper leaves open the
learning rate, std and the binarization: ours are plain SGD at 0.1, 0.05, and a threshold of 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field

from experiments.config import (
    Count,
    DataConfig,
    DeepLinearConfig,
    EvaluationConfig,
    Frozen,
    MachineConfig,
    MeasuresConfig,
    MLPConfig,
    NetworkConfig,
    NonNegative,
    NormalizerConfig,
    Positive,
    RunConfig,
    TrainingConfig,
    VGGConfig,
    Widths,
)
from experiments.study import Arm, Device

if TYPE_CHECKING:
    from experiments.datasets import Dataset
    from experiments.seeds import Streams
    from experiments.train import Batch

__all__ = [
    "SOURCES_VGG",
    "TINY_NETWORKS",
    "GradientFields",
    "MnistFields",
    "Rates",
    "gradient_arms",
    "gradient_run",
    "mnist_run",
    "probe_examples",
]

T = TypeVar("T", float, str)


def _distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    names = [value if isinstance(value, str) else f"{value:g}" for value in values]  # as arms are named
    for value, name in zip(values, names, strict=True):
        if not isinstance(value, str) and float(name) != value:
            raise ValueError(f"a rate has at most six digits, got {value!r}")
    if len(set(names)) != len(names):
        raise ValueError(f"each is run once, got {' '.join(names)}")
    return values


Rates = Annotated[tuple[Positive, ...], Field(min_length=1), AfterValidator(_distinct)]


class MnistFields(Frozen):
    """The protocol's settings; every field is an option of the studies that use it."""

    steps: Count = Field(15_000, description="updates")
    batch: Annotated[int, Field(ge=2, le=60_000)] = Field(60, description="examples an update")
    lr: Positive = Field(0.1, description="learning rate of plain SGD (the paper does not say)")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="of SGD")
    weight_decay: NonNegative = Field(0.0, description="of SGD")
    hidden: Widths = Field((100, 100, 100), description="units of each hidden layer")
    activation: Literal["sigmoid", "tanh", "relu", "linear"] = Field("sigmoid", description="nonlinearity")
    std: Positive = Field(0.05, description="standard deviation of the initial weights (the paper: small)")
    bn_momentum: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="of BN's running statistics")
    bn_epsilon: Positive = Field(1e-5, description="added to BN's variance")
    binarize: bool = Field(True, description="black and white pixels, as in the paper; else grey")
    threshold: Annotated[float, Field(ge=0, lt=1)] = Field(0.5, description="a pixel above it is white")
    sample: Annotated[int, Field(ge=1, le=60_000)] = Field(
        1000, description="fixed training examples that are measured on"
    )
    evaluate_every: Count = Field(1000, description="steps between two held-out accuracies")
    early_every: Count = Field(100, description="the same, at the start")
    early_until: Annotated[int, Field(ge=0)] = Field(1000, description="where the start ends, in steps")
    threads: Count = Field(1, description="torch threads a run; sums depend on it")

    def batch_norm(self) -> NormalizerConfig:
        """Batch normalization with these fields' settings."""
        return NormalizerConfig(kind="batch", momentum=self.bn_momentum, epsilon=self.bn_epsilon)


def mnist_run(
    fields: MnistFields,
    normalizer: NormalizerConfig,
    seed: int,
    device: Device,
    *,
    measures: MeasuresConfig,
    fixed: int = 0,
    fixed_every: int = 50,
) -> RunConfig:
    """One run of the protocol; ``fixed`` training examples are assessed every ``fixed_every`` steps."""
    early = {"every": fields.evaluate_every, "early_every": fields.early_every, "early_until": fields.early_until}
    return RunConfig(
        seed=seed,
        network=MLPConfig(hidden=fields.hidden, activation=fields.activation, init_std=fields.std),
        normalizer=normalizer,
        data=DataConfig(binarize=fields.binarize, threshold=fields.threshold),
        training=TrainingConfig(
            steps=fields.steps,
            batch=fields.batch,
            learning_rate=fields.lr,
            momentum=fields.momentum,
            weight_decay=fields.weight_decay,
        ),
        evaluation=EvaluationConfig(**early, **({"fixed": fixed, "fixed_every": fixed_every} if fixed else {})),
        measures=measures,
        machine=MachineConfig(device=device, threads=fields.threads),
    )


def probe_examples(data: Dataset, count: int, streams: Streams) -> Batch:
    """The first ``count`` training examples of a permutation drawn from the probe stream, with their targets.

    Raises:
        ValueError: If the training set has fewer.
    """
    import torch

    if count > len(data.train_inputs):
        raise ValueError(f"sample must be at most {len(data.train_inputs)}, the training set, got {count}")
    chosen = torch.randperm(len(data.train_inputs), generator=streams.torch("probe"))[:count]
    chosen = chosen.to(data.train_inputs.device)
    return data.train_inputs[chosen], data.train_targets[chosen]


# What presets of studies of the gradient have in common: networks for a second's run, and the source's own VGG.
TINY_NETWORKS: Mapping[str, Any] = {
    "mlp_lr": (0.1,),
    "linear_lr": (1e-6,),
    "hidden": (12, 10),
    "depth": 4,
    "dimension": 4,
    "examples": 40,
}
SOURCES_VGG: Mapping[str, Any] = {
    "network": ("vgg",),
    "steps": 15_000,
    "layout": "D",
    "width": 1.0,
    "vgg_lr": (0.1, 0.01),
}


class GradientFields(Frozen):
    """The networks that gradients are measured on, each at one or more learning rates, without and with BN.

    ``mlp`` is the MNIST network, on minibatches. ``linear`` is Santurkar et al.'s deep linear network (2018, appendix
    A.1): 25 layers of 10x10, Glorot weights, full-batch gradient descent on the squared distance to a linear teacher,
    summed over 1000 Gaussian examples (the mean would not train at their rates). ``vgg`` learns CIFAR-10.
    """

    network: Annotated[tuple[Literal["mlp", "linear", "vgg"], ...], Field(min_length=1), AfterValidator(_distinct)] = (
        Field(("mlp", "linear"), description="which networks")
    )
    steps: Count = Field(2000, description="updates")
    mlp_lr: Rates = Field((0.1,), description="mlp: learning rates of plain SGD")
    linear_lr: Rates = Field((1e-6, 1e-7), description="linear: learning rates of full-batch gradient descent")
    vgg_lr: Rates = Field((0.1,), description="vgg: learning rates of plain SGD")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="of SGD")
    mlp_batch: Annotated[int, Field(ge=2, le=60_000)] = Field(60, description="mlp: examples an update")
    vgg_batch: Annotated[int, Field(ge=2)] = Field(128, description="vgg: examples an update")
    hidden: Widths = Field((100, 100, 100), description="mlp: units of each hidden layer")
    activation: Literal["sigmoid", "tanh", "relu", "linear"] = Field("sigmoid", description="mlp: nonlinearity")
    std: Positive = Field(0.05, description="mlp: standard deviation of the initial weights")
    binarize: bool = Field(True, description="mlp: black and white pixels; else grey")
    depth: Count = Field(25, description="linear: layers")
    dimension: Count = Field(10, description="linear: units of every layer")
    examples: Annotated[int, Field(ge=2)] = Field(1000, description="linear: examples, all in one batch")
    scale: NonNegative = Field(1.0, description="linear: standard deviation of the teacher's entries (source: silent)")
    reduce: bool = Field(True, description="linear: replace the examples by 2 x dimension points of equal moments")
    normalize_last: bool = Field(True, description="linear: BN after the last layer too (source: silent)")
    layout: Literal["A", "D"] = Field("A", description="vgg: 8 or 13 convolutions")
    width: Positive = Field(0.25, description="vgg: multiplies the channels")
    root: str | None = Field(None, description="vgg: folder of CIFAR-10; else data/cifar10, downloaded to if absent")
    glorot: Literal["uniform", "normal"] = Field("uniform", description="linear, vgg: law of the initial weights")
    bn_momentum: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="of BN's running statistics")
    bn_epsilon: Positive = Field(1e-5, description="added to BN's variance")
    threads: Count = Field(1, description="torch threads a run; sums depend on it")

    def unused(self) -> Mapping[str, str]:
        """Fields of networks that are not asked for."""
        of = {
            "mlp": ("mlp_lr", "mlp_batch", "hidden", "activation", "std", "binarize"),
            "linear": ("linear_lr", "depth", "dimension", "examples", "scale", "reduce", "normalize_last"),
            "vgg": ("vgg_lr", "vgg_batch", "layout", "width", "root"),
        }
        absent = {kind: names for kind, names in of.items() if kind not in self.network}
        found = {name: f"without network {kind}" for kind, names in absent.items() for name in names}
        if self.network == ("mlp",):
            found["glorot"] = "without network linear or vgg"
        return found

    def rates(self, network: str) -> tuple[float, ...]:
        """The learning rates of one of the networks."""
        return {"mlp": self.mlp_lr, "linear": self.linear_lr, "vgg": self.vgg_lr}[network]


def gradient_arms(fields: GradientFields) -> tuple[Arm, ...]:
    """Each network at each of its learning rates without and with BN: ``<network>-<rate>-<none or batch>``."""
    return tuple(
        Arm(f"{network}-{rate:g}-{kind}", f"{network}, lr {rate:g}, {'with' if kind == 'batch' else 'without'} BN")
        for network in fields.network
        for rate in fields.rates(network)
        for kind in ("none", "batch")
    )


def gradient_run(
    fields: GradientFields, arm: Arm, seed: int, device: Device, *, measures: MeasuresConfig, evaluate_every: int
) -> RunConfig:
    """The run of one of `gradient_arms`; the two arms of a network and rate differ in the normalizer alone."""
    network, _, rest = arm.name.partition("-")
    rate, _, kind = rest.rpartition("-")
    training: dict[str, Any] = {"steps": fields.steps, "learning_rate": float(rate), "momentum": fields.momentum}
    made: NetworkConfig
    if network == "mlp":
        made = MLPConfig(hidden=fields.hidden, activation=fields.activation, init_std=fields.std)
        data, training["batch"] = DataConfig(binarize=fields.binarize), fields.mlp_batch
    elif network == "linear":
        made = DeepLinearConfig(
            width=fields.dimension, depth=fields.depth, glorot=fields.glorot, normalize_last=fields.normalize_last
        )
        data = DataConfig(
            name="gaussian",
            dimension=fields.dimension,
            examples=fields.examples,
            scale=fields.scale,
            reduce=fields.reduce,
        )
        training |= {"batch": "full", "reduction": "sum"}
    else:
        made = VGGConfig(layout=fields.layout, width=fields.width, glorot=fields.glorot)
        data, training["batch"] = DataConfig(name="cifar10", root=fields.root), fields.vgg_batch
    normalizer = NormalizerConfig()
    if kind == "batch":
        normalizer = NormalizerConfig(kind="batch", momentum=fields.bn_momentum, epsilon=fields.bn_epsilon)
    return RunConfig(
        seed=seed,
        network=made,
        normalizer=normalizer,
        data=data,
        training=TrainingConfig(**training),
        evaluation=EvaluationConfig(every=evaluate_every, early_until=0),
        measures=measures,
        machine=MachineConfig(device=device, threads=fields.threads),
    )
