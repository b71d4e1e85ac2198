"""Landscape: how loss and gradient change along the gradient, with and without batch normalization.

Santurkar et al. (2018, section 3.2) walk from the parameters along the gradient of the step's own batch and show the
range of the loss, the range of the gradient's change, and the effective smoothness, the largest change over the length
of the step (their Figure 4). All three are shown here in their layout, at several learning rates, and then with what
that figure lacks: the level that training itself brings the smoothness to (2/eta, the edge of stability), a random
direction of the same length, and steps whose size is equal in each network's own unit of curvature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from experiments.config import Count, Frozen, MeasuresConfig, Positive, RunConfig
from experiments.protocols import SOURCES_VGG, TINY_NETWORKS, GradientFields, Rates, gradient_arms, gradient_run
from experiments.study import Arm, Device, Figure, Preset, Study

if TYPE_CHECKING:
    from diagnostics.probe import Probe
    from experiments.datasets import Dataset
    from experiments.seeds import Streams

__all__ = ["STUDY"]


class LandscapeFields(GradientFields):
    """The networks and rates, the grid of the walk, and how often it is taken."""

    mlp_lr: Rates = Field((0.1, 1.0), description="mlp: learning rates of plain SGD")
    lowest: Positive = Field(0.25, description="mlp, vgg: first step of the walk, in learning rates")
    highest: Positive = Field(4.0, description="mlp, vgg: last step of the walk, in learning rates")
    linear_lowest: Positive = Field(0.01, description="linear: first step of the walk, in learning rates")
    linear_highest: Positive = Field(30.0, description="linear: last step of the walk, in learning rates")
    points: Annotated[int, Field(ge=2)] = Field(8, description="steps of the walk, evenly spaced in the logarithm")
    sizes: Rates = Field((0.1, 0.5, 1.0, 2.0), description="virtual steps c, in units of the network's curvature")
    walk_every: Count = Field(50, description="training steps between two walks")
    virtual_every: Count = Field(100, description="training steps between two sets of virtual steps")
    evaluate_every: Count = Field(500, description="training steps between two held-out evaluations")

    def unused(self) -> Mapping[str, str]:
        """Fields of networks that are not asked for."""
        found = dict(super().unused())
        if "linear" not in self.network:
            found |= dict.fromkeys(("linear_lowest", "linear_highest"), "without network linear")
        if self.network == ("linear",):
            found |= dict.fromkeys(("lowest", "highest"), "without network mlp or vgg")
        return found

    def grid(self, network: str, rate: float) -> tuple[float, ...]:
        """The walk's step sizes eta_k.

        Raises:
            ValueError: If the last is not beyond the first.
        """
        linear = network == "linear"
        first, last = (self.linear_lowest, self.linear_highest) if linear else (self.lowest, self.highest)
        if not first < last:
            prefix = "linear_" if linear else ""
            raise ValueError(f"{prefix}highest must be more than {prefix}lowest, {first:g}, got {last:g}")
        return tuple(rate * first * (last / first) ** (k / (self.points - 1)) for k in range(self.points))


class LandscapeDrawing(Frozen):
    """Nothing to choose."""


class LandscapeMeasures(MeasuresConfig):
    """Where the walk looks around, the virtual steps, and how often."""

    grid: tuple[float, ...]
    sizes: tuple[float, ...]
    walk_every: Count
    virtual_every: Count


def configure(fields: LandscapeFields, arm: Arm, seed: int, device: Device) -> RunConfig:
    """One arm with one seed: the two arms of a network and rate differ in the normalizer alone.

    Raises:
        ValueError: If the walk's last step is not beyond its first.
    """
    network, _, rest = arm.name.partition("-")
    measures = LandscapeMeasures(
        grid=fields.grid(network, float(rest.rpartition("-")[0])),
        sizes=fields.sizes,
        walk_every=fields.walk_every,
        virtual_every=fields.virtual_every,
    )
    return gradient_run(fields, arm, seed, device, measures=measures, evaluate_every=fields.evaluate_every)


def probes(config: RunConfig, data: Dataset, streams: Streams) -> Sequence[Probe]:
    """The walk along the gradient, the one along a random direction, and the virtual steps, on the step's own batch."""
    from diagnostics.covariate_shift import VirtualShift
    from diagnostics.landscape import AlongGradient
    from diagnostics.schedules import every

    measures = config.measures
    assert isinstance(measures, LandscapeMeasures)
    often = every(measures.walk_every)
    return (
        AlongGradient(measures.grid, "gradient", when=often),
        AlongGradient(measures.grid, "random", seed=config.seed, when=often),
        # Only what happens to the whole gradient is wanted of it: moving all layers together is the cheapest choice.
        VirtualShift(measures.sizes, ("all",), seed=config.seed, when=every(measures.virtual_every)),
    )


STUDY = Study(
    name="landscape",
    question="Is the loss smoother along the gradient with batch normalization, beyond what the step size itself sets?",
    arms=gradient_arms,
    measures=(
        "along the gradient of the step's own batch, at steps from 1/4 to 4 learning rates (deep linear network: 1/100"
        " to 30): the loss, the gradient's change |g' - g|, the effective smoothness |g' - g|/(eta |g|), its maximum"
        " over the steps, and the training's learning rate times it",
        "the same along a random direction of the gradient's length",
        "virtual steps (c/b) g that are not taken, b once |Hg|/|g| and once the largest eigenvalue of the Hessian H:"
        " the gradient's relative change |g' - g|/|g| and the loss",
    ),
    rule=(
        "For each network and learning rate, the effective smoothness (maximum over the grid, median over a run's"
        " records) with BN over without, paired by seed: smaller where the 95% Student t interval of the ratio is below"
        " 1, larger where it is above, else undecided. That is the reading before the controls. After them: the largest"
        " |g' - g|/(c |g|) over virtual steps c, in units of |Hg|/|g| and in units of the largest eigenvalue, compared"
        " in the same way. Where both say the same, that is the verdict; if one says smaller and the other larger it is"
        " inconclusive; else undecided. In units of |Hg|/|g| the ratio tends to 1 as c goes to 0 in every network, by"
        " construction: that reading tells only how far beyond its own quadratic a network is. A value that is not"
        " finite counts as larger than every other; where only some seeds have one, it is undecided, and so it is where"
        " a run has no virtual steps in half of its records or more. A run that diverged and its partner are compared"
        " on the records that both have."
    ),
    control=(
        "The edge of stability: training moves to where eta x smoothness is about 2, so that the smoothness says what"
        " eta was. Where that holds with BN (the second half of training within a quarter of 2, interval included), or"
        " where the smoothness falls in proportion as eta rises, the level is not BN's. Also the random direction: what"
        " is smoother there too is not about gradients."
    ),
    fields=LandscapeFields,
    presets={
        "smoke": Preset(
            seeds=2,
            fields={
                **TINY_NETWORKS,
                "steps": 9,
                "points": 3,
                "walk_every": 2,
                "virtual_every": 4,
                "evaluate_every": 9,
            },
        ),
        "laptop": Preset(seeds=5, fields={}),
        "paper": Preset(
            seeds=5, fields={"network": ("linear",), "steps": 10_000, "walk_every": 100, "virtual_every": 500}
        ),
        "paper-vgg": Preset(
            seeds=3,
            fields={
                **SOURCES_VGG,
                "lowest": 0.5,
                "walk_every": 250,
                "virtual_every": 2500,
            },
        ),
    },
    drawing=LandscapeDrawing,
    figures=(Figure("landscape"),),
    configure=configure,
    probes=probes,
)
