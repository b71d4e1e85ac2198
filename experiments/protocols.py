"""Protocols that several studies share: the fields they let people change, and the runs those make.

The MNIST network is that of Ioffe & Szegedy (2015), section 4.1: 3 hidden layers of 100 sigmoid units, weights
N(0, std^2), biases 0, a 10-way output, cross-entropy, binary 28x28 images, batches of 60. The paper leaves open the
learning rate, std and the binarization: ours are plain SGD at 0.1, 0.05, and a threshold of 0.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from experiments.config import (
    Count,
    DataConfig,
    EvaluationConfig,
    Frozen,
    MachineConfig,
    MeasuresConfig,
    MLPConfig,
    NonNegative,
    NormalizerConfig,
    Positive,
    RunConfig,
    TrainingConfig,
    Widths,
)

if TYPE_CHECKING:
    from experiments.datasets import Dataset
    from experiments.seeds import Streams
    from experiments.study import Device
    from experiments.train import Batch

__all__ = ["MnistFields", "mnist_run", "probe_examples"]


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
