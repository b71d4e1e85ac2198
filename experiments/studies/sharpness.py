"""Sharpness: the largest eigenvalue of the loss's Hessian over training, with and without batch normalization.

Full-batch gradient descent with step size eta raises the largest eigenvalue to about 2/eta and keeps it there (Cohen et
al. 2021); heavy ball with momentum mu to 2 (1 + mu)/eta. Two networks at that edge have the same sharpness because they
were trained with the same eta. For minibatches the line is no theorem: what is reported to settle there is the
curvature along the batch's own gradient, g'Hg/|g|^2 (Andreyev & Beneventano 2024), so it is recorded beside the batch's
own largest eigenvalue and that on a fixed set of examples. For adaptive optimizers there is no line in these units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from experiments.config import Count, Frozen, MeasuresConfig, Positive, RunConfig
from experiments.protocols import (
    SOURCES_VGG,
    TINY_NETWORKS,
    GradientFields,
    Rates,
    gradient_arms,
    gradient_run,
    probe_examples,
)
from experiments.study import Arm, Device, Figure, Preset, Study

if TYPE_CHECKING:
    from diagnostics.probe import Probe
    from experiments.datasets import Dataset
    from experiments.seeds import Streams

__all__ = ["STUDY"]


class SharpnessFields(GradientFields):
    """The networks and rates, the optimizer, and on what and how often the Hessian is looked at."""

    mlp_lr: Rates = Field((0.1, 1.0), description="mlp: learning rates of plain SGD")
    optimizer: Literal["sgd", "adam"] = Field("sgd", description="adam: theory has no line for it in these units")
    sharpness_every: Count = Field(100, description="steps between two spectra of the step's own batch")
    fixed_every: Count = Field(200, description="mlp, vgg: steps between two spectra on the fixed examples")
    sample: Annotated[int, Field(ge=2, le=60_000)] = Field(
        2000, description="mlp, vgg: fixed training examples that stand for all"
    )
    tolerance: Positive = Field(0.01, description="residual of an eigenvalue, as a share of it")
    evaluate_every: Count = Field(500, description="steps between two held-out evaluations")

    def unused(self) -> Mapping[str, str]:
        """Fields of networks that are not asked for, and momentum where Adam has its own."""
        found = dict(super().unused())
        if self.network == ("linear",):
            found |= dict.fromkeys(("fixed_every", "sample"), "without network mlp or vgg: the batch is all there is")
        if self.optimizer == "adam":
            found["momentum"] = "with adam"
        return found


class SharpnessDrawing(Frozen):
    """Nothing to choose."""


class SharpnessMeasures(MeasuresConfig):
    """On what and how often the Hessian is looked at; ``sample`` 0 where every step's batch is all examples."""

    every: Count
    tolerance: Positive
    sample: Annotated[int, Field(ge=0)]
    fixed_every: Count = 200

    def unused(self) -> Mapping[str, str]:
        """The cadence of what is not looked at."""
        return {} if self.sample else {"fixed_every": "without fixed examples"}


def configure(fields: SharpnessFields, arm: Arm, seed: int, device: Device) -> RunConfig:
    """One arm with one seed: the two arms of a network and rate differ in the normalizer alone."""
    full = arm.name.startswith("linear")
    measures = SharpnessMeasures(
        every=fields.sharpness_every,
        tolerance=fields.tolerance,
        sample=0 if full else fields.sample,
        **({} if full else {"fixed_every": fields.fixed_every}),
    )
    made = gradient_run(fields, arm, seed, device, measures=measures, evaluate_every=fields.evaluate_every)
    training = made.training.model_copy(update={"optimizer": fields.optimizer})
    return made.model_copy(update={"training": training})


def probes(config: RunConfig, data: Dataset, streams: Streams) -> Sequence[Probe]:
    """The spectrum of the step's own batch, and where that is not everything, of fixed examples."""
    from diagnostics.schedules import every
    from diagnostics.sharpness import Sharpness

    measures = config.measures
    assert isinstance(measures, SharpnessMeasures)
    found: list[Probe] = [Sharpness(tolerance=measures.tolerance, seed=config.seed, when=every(measures.every))]
    if measures.sample:
        examples = probe_examples(data, measures.sample, streams)
        rarely = every(measures.fixed_every)
        found.append(Sharpness(on=examples, tolerance=measures.tolerance, seed=config.seed, when=rarely))
    return found


STUDY = Study(
    name="sharpness",
    question="Is the loss less sharp with batch normalization, or does training bring both networks to the same edge?",
    arms=gradient_arms,
    measures=(
        "the largest eigenvalue of the loss's Hessian, batch statistics in the normalizers: on the whole batch where"
        " training is full-batch; else on the step's own batch and on fixed training examples",
        "the curvature along the gradient of the step's batch, g'Hg/|g|^2 (batch sharpness) and |Hg|/|g|",
    ),
    rule=(
        "For each network and learning rate, eta x largest eigenvalue (median over a run's records) with BN over"
        " without, paired by seed: flatter where the 95% Student t interval of the ratio is below 1, sharper where it"
        " is above, else undecided. Full-batch gradient descent has a line, 2/eta (heavy ball: 2 (1 + mu)/eta): an arm"
        " is at the edge where more than half of the records of the second half of training lie within a quarter of"
        " it, interval over seeds included. Where both arms are, the verdict is that eta set the sharpness of both. For"
        " minibatches the line is shown and decides nothing: there it is a full-batch statement. Adam has none."
        " An eigenvalue that is not finite counts as larger than every other, and never as at the edge: where the"
        " median record is such in every seed of one arm and in none of the other, that decides; with others such, or"
        " one that is not positive, it is undecided. A run that diverged and its partner are compared on the records"
        " that both have; it is at the edge or not by those it has in the second half of training, and an arm of which"
        " a run has none there is not at the edge."
    ),
    control=(
        "The learning rate: what is a property of the network stays as eta changes, what the edge sets falls as 1/eta."
        " And the batch: under minibatches the batch's own eigenvalue and that on fixed examples are two quantities;"
        " a verdict that holds for one alone is stated as that one's."
    ),
    fields=SharpnessFields,
    presets={
        "smoke": Preset(
            seeds=2,
            fields={
                **TINY_NETWORKS,
                "steps": 9,
                "sharpness_every": 2,
                "fixed_every": 4,
                "sample": 100,
                "evaluate_every": 9,
            },
        ),
        "laptop": Preset(seeds=5, fields={}),
        "paper": Preset(seeds=5, fields={"network": ("linear",), "steps": 10_000, "sharpness_every": 100}),
        "paper-vgg": Preset(
            seeds=3,
            fields={
                **SOURCES_VGG,
                "sharpness_every": 500,
                "fixed_every": 2500,
            },
        ),
    },
    drawing=SharpnessDrawing,
    figures=(Figure("sharpness"),),
    configure=configure,
    probes=probes,
)
