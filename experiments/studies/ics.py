"""Internal covariate shift as Santurkar et al. (2018) define it, before and after the controls it lacks.

Definition 2.1 asks how far a layer's gradient turns when the layers before it take their step. They report it with and
without batch normalization at one learning rate, and find it similar or larger with BN. Three things stand between that
comparison and a conclusion, and each is measured beside it. Moving the layers *behind* a layer changes its gradient
too, and cannot shift its input. The two networks' losses are curved differently, so that one learning rate is two step
lengths: steps that are never taken, of equal size in the network's own unit, once |Hg|/|g| and once the largest
eigenvalue of the Hessian, are compared instead. And on any loss that is locally quadratic the relative difference is
eta (|Hg|/|g|) (i-1)/L, whatever the network is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from experiments.config import Count, Frozen, MeasuresConfig, Positive, RunConfig
from experiments.protocols import SOURCES_VGG, GradientFields, gradient_arms, gradient_run
from experiments.study import Arm, Device, Figure, Preset, Study

if TYPE_CHECKING:
    from diagnostics.probe import Probe
    from experiments.datasets import Dataset
    from experiments.seeds import Streams

__all__ = ["STUDY"]


def _judged(sizes: tuple[float, ...]) -> tuple[float, ...]:
    if len(set(sizes)) != len(sizes) or 1.0 not in sizes:
        raise ValueError(f"each size is taken once and 1, which is judged, is one of them; got {sizes}")
    return sizes


Sizes = Annotated[tuple[Positive, ...], AfterValidator(_judged)]


class IcsFields(GradientFields):
    """The networks, and what is measured on them how often."""

    steps: Count = Field(2000, description="linear, vgg: updates")
    mlp_steps: Count = Field(6000, description="mlp: updates; without BN it stands at chance for thousands of them")
    shift_every: Count = Field(80, description="steps between two records of Definition 2.1 and its controls")
    virtual_every: Count = Field(240, description="steps between two records of virtual steps")
    sizes: Sizes = Field((0.1, 0.5, 1.0, 2.0), description="of virtual steps, in units of 1 / curvature; 1 is judged")
    tolerance: Positive = Field(0.01, description="relative residual of the largest eigenvalue")
    evaluate_every: Count = Field(500, description="steps between two evaluations on held-out examples")

    def unused(self) -> Mapping[str, str]:
        """Fields of networks that are not asked for."""
        found = dict(super().unused())
        if "mlp" not in self.network:
            found["mlp_steps"] = "without network mlp"
        if self.network == ("mlp",):
            found["steps"] = "without network linear or vgg"
        return found


class IcsDrawing(Frozen):
    """Nothing to choose."""


class IcsMeasures(MeasuresConfig):
    """What is measured how often."""

    shift_every: Count
    virtual_every: Count
    sizes: Sizes
    tolerance: Positive


def configure(fields: IcsFields, arm: Arm, seed: int, device: Device) -> RunConfig:
    """One network at one rate with one seed; its two arms differ in the normalizer alone.

    Raises:
        ValueError: If a network has fewer than three layers: in two, no layer has others both before and behind it.
    """
    if "linear" in fields.network and fields.depth < 3:
        raise ValueError(f"depth must be 3 or more, a layer between others is needed, got {fields.depth}")
    if "mlp" in fields.network and len(fields.hidden) < 2:
        raise ValueError(f"hidden must name 2 layers or more, a layer between others is needed, got {fields.hidden}")
    measures = IcsMeasures(
        shift_every=fields.shift_every,
        virtual_every=fields.virtual_every,
        sizes=fields.sizes,
        tolerance=fields.tolerance,
    )
    if arm.name.startswith("mlp-"):
        fields = fields.model_copy(update={"steps": fields.mlp_steps})
    return gradient_run(fields, arm, seed, device, measures=measures, evaluate_every=fields.evaluate_every)


def probes(config: RunConfig, data: Dataset, streams: Streams) -> Sequence[Probe]:
    """Definition 2.1 with every control on the step's own batch, and virtual steps on the same batch more rarely."""
    from diagnostics.covariate_shift import CovariateShift, VirtualShift
    from diagnostics.schedules import every

    measures = config.measures
    assert isinstance(measures, IcsMeasures)
    shift = CovariateShift(
        ("preceding", "following", "own", "all"),
        predict=config.training.momentum == 0,  # with momentum the step is not eta times the gradient
        when=every(measures.shift_every),
    )
    virtual = VirtualShift(
        measures.sizes, tolerance=measures.tolerance, seed=config.seed, when=every(measures.virtual_every)
    )
    return [shift, virtual]


STUDY = Study(
    name="ics",
    question="Does batch normalization reduce internal covariate shift (Definition 2.1), before and after controls?",
    arms=gradient_arms,
    measures=(
        "l2, relative size and cosine of the change of every layer's gradient when the layers before it take their step"
        " (Definition 2.1), on the step's own batch",
        "the same when the layers behind it, it alone, or all layers do",
        "the same for virtual steps of equal size c in units of 1 / (|Hg|/|g|) and of 1 / the largest eigenvalue of the"
        " Hessian",
        "without momentum, the relative size that a locally quadratic loss predicts, eta (|Hg|/|g|) (i-1)/L",
    ),
    rule=(
        "For each network and rate; every reading is the logarithm of with BN over without, averaged over layers and"
        " records (so: geometric means), paired by seed, with a 95% Student t interval: below 0 it says less shift with"
        " BN, above 0 more, else undecided. As printed: the relative size over layers 2 to L, and the cosine, whose"
        " difference of means says less where it is above 0. After the controls: (1) preceding over following, layers 2"
        " to L-1, undecided unless its interval is above 1 in at least one arm; (2) virtual steps of size c = 1, layers"
        " 2 to L, in units of 1 / (|Hg|/|g|) and of 1 / sharpness; (3) measured over predicted, layers 2 to L."
        " With momentum a step is not eta times the gradient: no prediction is made, and (1) and (2) alone are the"
        " controls. A cell (a layer at a record) that is undefined or 0 in one arm is left out of both."
        " Readings that all say the same make the verdict; if one says less and another more it is inconclusive; else"
        " undecided. The verdict as printed, that after the controls and the one on both are made in this way. A pair"
        " of arms in which a run diverged has no verdict."
    ),
    control=(
        "Moving only the layers behind a layer cannot shift its input: if that changes its gradient as much, Definition"
        " 2.1 does not measure shift. And one learning rate is not one step length: if the two units of curvature order"
        " the arms in opposite ways, the comparison at equal rates says nothing about BN."
    ),
    fields=IcsFields,
    presets={
        "smoke": Preset(
            seeds=2,
            fields={
                "steps": 11,
                "mlp_steps": 11,
                "shift_every": 5,
                "virtual_every": 10,
                "linear_lr": (1e-6,),
                "depth": 5,
                "evaluate_every": 10,
            },
        ),
        "laptop": Preset(seeds=5, fields={}),
        "paper": Preset(
            seeds=5, fields={"network": ("linear",), "steps": 10_000, "shift_every": 50, "virtual_every": 500}
        ),
        "paper-vgg": Preset(
            seeds=3,
            fields={
                **SOURCES_VGG,
                "shift_every": 250,
                "virtual_every": 2500,
            },
        ),
    },
    drawing=IcsDrawing,
    figures=(Figure("ics"),),
    configure=configure,
    probes=probes,
)
