"""Figure 1 of Ioffe & Szegedy (2015): a sigmoid network on MNIST, with and without batch normalization.

Section 4.1 gives the network (3 hidden layers of 100 sigmoid units, weights N(0, std^2), a 10-way output), the data
(binary 28x28 images), cross-entropy, 50,000 steps of batch 60. It leaves open the learning rate, std, the binarization
and the sample that percentiles are taken over: ours are plain SGD at 0.1, 0.05, a threshold of 0.5, and 1000 fixed
training examples in batch mode.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    Percentiles,
    Positive,
    RunConfig,
    TrainingConfig,
    Widths,
)
from experiments.study import Arm, Device, Figure, Preset, Study

if TYPE_CHECKING:
    from diagnostics.probe import Probe
    from experiments.datasets import Dataset
    from experiments.seeds import Streams

__all__ = ["STUDY"]


class Figure1Fields(Frozen):
    """The protocol; every field is an option of ``whybn figure1``."""

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
    percentiles: Percentiles = Field((15.0, 50.0, 85.0), description="of the sigmoids' inputs, 0 to 100")
    percentiles_every: Count = Field(100, description="steps between two measurements")
    sample: Annotated[int, Field(ge=1, le=60_000)] = Field(
        1000, description="fixed training examples that percentiles are taken over"
    )
    evaluate_every: Count = Field(1000, description="steps between two held-out accuracies")
    early_every: Count = Field(100, description="the same, at the start")
    early_until: Annotated[int, Field(ge=0)] = Field(1000, description="where the start ends, in steps")
    threads: Count = Field(1, description="torch threads a run; sums depend on it")


class Figure1Drawing(Frozen):
    """How the figure is drawn; the runs do not depend on it."""

    unit: Annotated[int, Field(ge=0)] | None = Field(None, description="show this unit instead of the typical one")
    grid: bool = Field(False, description="draw every unit, as small multiples, beside the figure")


class Figure1Measures(MeasuresConfig):
    """Percentiles and moments of every nonlinearity's input."""

    percentiles: Percentiles
    every: Count
    sample: Count
    mode: Literal["batch"] = "batch"


def configure(fields: Figure1Fields, arm: Arm, seed: int, device: Device) -> RunConfig:
    """One arm with one seed: the arms differ in the normalizer alone."""
    normalizer = NormalizerConfig()
    if arm.name == "batch":
        normalizer = NormalizerConfig(kind="batch", momentum=fields.bn_momentum, epsilon=fields.bn_epsilon)
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
        evaluation=EvaluationConfig(
            every=fields.evaluate_every, early_every=fields.early_every, early_until=fields.early_until
        ),
        measures=Figure1Measures(percentiles=fields.percentiles, every=fields.percentiles_every, sample=fields.sample),
        machine=MachineConfig(device=device, threads=fields.threads),
    )


def probes(config: RunConfig, data: Dataset, streams: Streams) -> Sequence[Probe]:
    """Percentiles on the first examples of the probe stream's permutation of the training set.

    Raises:
        ValueError: If the sample is larger than the training set.
    """
    import torch

    from diagnostics.activations import Activations
    from diagnostics.schedules import every

    measures = config.measures
    assert isinstance(measures, Figure1Measures)
    if measures.sample > len(data.train_inputs):
        raise ValueError(f"sample must be at most {len(data.train_inputs)}, the training set, got {measures.sample}")
    chosen = torch.randperm(len(data.train_inputs), generator=streams.torch("probe"))[: measures.sample]
    chosen = chosen.to(data.train_inputs.device)
    return [
        Activations(
            "hidden*.nonlinearity",
            "input",
            percentiles=measures.percentiles,
            on=(data.train_inputs[chosen], data.train_targets[chosen]),
            mode=measures.mode,
            when=every(measures.every),
        )
    ]


STUDY = Study(
    name="figure1",
    question="Does batch normalization make a sigmoid network train faster, and its sigmoids' inputs more stable?",
    arms=(Arm("none", "without BN"), Arm("batch", "with BN")),
    measures=(
        "held-out accuracy on the 10,000 test images, population statistics",
        "15th, 50th and 85th percentiles of the input to every sigmoid, on fixed training examples in batch mode",
    ),
    rule=(
        "Supported if, in every seed, the network with BN has the higher held-out accuracy at every evaluation from"
        " step 1000 on; refuted if the network without BN has. The percentiles are shown, not judged: with BN in batch"
        " mode a unit's mean and variance are pinned by construction."
    ),
    control=(
        "Stable percentiles prove nothing by themselves: BN pins them whatever the network does. Whether stability is"
        " what makes training faster is the question of other studies."
    ),
    fields=Figure1Fields,
    presets={
        "smoke": Preset(seeds=2, fields={"steps": 200, "percentiles_every": 20, "early_every": 50}),
        "laptop": Preset(seeds=3, fields={}),
        "paper": Preset(seeds=5, fields={"steps": 50_000}),
    },
    drawing=Figure1Drawing,
    figures=(Figure("figure1", ("unit", "grid")),),
    configure=configure,
    probes=probes,
)
