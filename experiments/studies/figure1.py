"""Figure 1 of Ioffe & Szegedy (2015): a sigmoid network on MNIST, with and without batch normalization.

The protocol is `experiments.protocols.MnistFields`; the paper trains for 50,000 steps. It leaves open the sample that
percentiles are taken over: ours is 1000 fixed training examples in batch mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from experiments.config import Count, Frozen, MeasuresConfig, NormalizerConfig, Percentiles, RunConfig
from experiments.protocols import MnistFields, mnist_run, probe_examples
from experiments.study import Arm, Device, Figure, Preset, Study

if TYPE_CHECKING:
    from diagnostics.probe import Probe
    from experiments.datasets import Dataset
    from experiments.seeds import Streams

__all__ = ["STUDY"]


class Figure1Fields(MnistFields):
    """The protocol; every field is an option of ``whybn figure1``."""

    percentiles: Percentiles = Field((15.0, 50.0, 85.0), description="of the sigmoids' inputs, 0 to 100")
    percentiles_every: Count = Field(100, description="steps between two measurements")


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
    normalizer = fields.batch_norm() if arm.name == "batch" else NormalizerConfig()
    measures = Figure1Measures(percentiles=fields.percentiles, every=fields.percentiles_every, sample=fields.sample)
    return mnist_run(fields, normalizer, seed, device, measures=measures)


def probes(config: RunConfig, data: Dataset, streams: Streams) -> Sequence[Probe]:
    """Percentiles on fixed training examples.

    Raises:
        ValueError: If the sample is larger than the training set.
    """
    from diagnostics.activations import Activations
    from diagnostics.schedules import every

    measures = config.measures
    assert isinstance(measures, Figure1Measures)
    return [
        Activations(
            "hidden*.nonlinearity",
            "input",
            percentiles=measures.percentiles,
            on=probe_examples(data, measures.sample, streams),
            mode=measures.mode,
            when=every(measures.every),
        )
    ]


def refuse(fields: Figure1Fields, drawing: Figure1Drawing) -> None:
    """Refuse to show a unit that the last hidden layer does not have.

    Raises:
        ValueError: If ``unit`` is too large.
    """
    if drawing.unit is not None and drawing.unit >= fields.hidden[-1]:
        raise ValueError(f"--unit {drawing.unit} is not in the last hidden layer: 0 to {fields.hidden[-1] - 1}")


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
    refuse=refuse,
)
