"""Drift: how far the distributions inside the MNIST network move, with and without batch normalization.

Ioffe & Szegedy (2015, section 1) name the covariate shift they set out to reduce, and do not measure it. Here it is
measured on fixed training examples, so that only parameters move between two records, at three points of each hidden
layer: before the normalizer, after it, after the nonlinearity (the next layer's input); in batch and in population
mode; against the record before and against the first. After BN in batch mode a unit's mean and variance are beta and
gamma^2 by construction: their drift there is the drift of two parameters and says nothing about the layers below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from experiments.config import Count, Frozen, MeasuresConfig, NormalizerConfig, RunConfig
from experiments.protocols import MnistFields, mnist_run, probe_examples
from experiments.study import Arm, Device, Figure, Preset, Study

if TYPE_CHECKING:
    from diagnostics.probe import Probe
    from experiments.datasets import Dataset
    from experiments.seeds import Streams

__all__ = ["STUDY"]

Mode = Literal["batch", "population"]
Signal = Literal["input", "output"]
# point -> (layers, signal)
POINTS: dict[str, tuple[str, Signal]] = {
    "before": ("hidden*.normalizer", "input"),
    "after": ("hidden*.normalizer", "output"),
    "nonlinear": ("hidden*.nonlinearity", "output"),
}


class DriftFields(MnistFields):
    """The protocol of Figure 1, and what is measured how often."""

    steps: Count = Field(6500, description="updates")
    drift_every: Count = Field(100, description="steps between two records of drift")
    floor_every: Count = Field(20, description="records between two measurements of the sampling floor")
    path_every: Count = Field(50, description="steps between the records whose drifts add up to a path")
    epoch_records: Count = Field(10, description="records of drift that make an epoch of the referee's test")
    epochs: Count = Field(5, description="epochs the referee's test looks at")
    sample: Annotated[int, Field(ge=4, le=60_000)] = Field(
        1000, description="fixed training examples that are measured on"
    )
    pool: Annotated[int, Field(ge=1, le=60_000)] = Field(6000, description="examples that other minibatches come from")
    fixed: Annotated[int, Field(ge=1, le=60_000)] = Field(2000, description="training examples the loss is followed on")
    fixed_every: Count = Field(50, description="steps between two losses on them")


class DriftDrawing(Frozen):
    """Nothing to choose."""


class DriftMeasures(MeasuresConfig):
    """What is measured, on which examples, how often."""

    every: Count
    floor_every: Count
    path_every: Count
    epoch: Count
    epochs: Count
    sample: Count
    pool: Count
    distances: tuple[str, ...] = ("mean_shift", "std_shift", "wasserstein1")
    shape: tuple[str, ...] = ("wasserstein1",)
    percentiles: tuple[float, ...] = (15.0, 50.0, 85.0)


def configure(fields: DriftFields, arm: Arm, seed: int, device: Device) -> RunConfig:
    """One arm with one seed: the arms differ in the normalizer alone.

    Raises:
        ValueError: If training ends before the last epoch of the referee's test does: its end would not be measured.
    """
    epoch = fields.epoch_records * fields.drift_every
    if fields.steps <= epoch * fields.epochs:
        raise ValueError(f"steps must be more than {fields.epochs} epochs of {epoch}, got {fields.steps}")
    measures = DriftMeasures(
        every=fields.drift_every,
        floor_every=fields.floor_every,
        path_every=fields.path_every,
        epoch=epoch,
        epochs=fields.epochs,
        sample=fields.sample,
        pool=fields.pool,
    )
    normalizer = fields.batch_norm() if arm.name == "batch" else NormalizerConfig()
    return mnist_run(
        fields, normalizer, seed, device, measures=measures, fixed=fields.fixed, fixed_every=fields.fixed_every
    )


def probes(config: RunConfig, data: Dataset, streams: Streams) -> Sequence[Probe]:
    """Drift, moments and percentiles at every point and mode; without a normalizer there is one mode."""
    from diagnostics.activations import Activations
    from diagnostics.drift import Drift
    from diagnostics.minibatch import MinibatchShift
    from diagnostics.schedules import every

    measures = config.measures
    assert isinstance(measures, DriftMeasures)
    examples = probe_examples(data, measures.sample, streams)
    pool = probe_examples(data, measures.pool, streams)
    modes: tuple[Mode, ...] = ("batch",) if config.normalizer.kind == "none" else ("batch", "population")
    often, rarely = every(measures.path_every), every(measures.every)
    found: list[Probe] = []
    for point, (layers, signal) in POINTS.items():
        for mode in modes:
            for reference in ("previous", "start"):
                drift = Drift(
                    layers,
                    examples,
                    measures.distances,
                    shape=measures.shape,
                    reference=reference,
                    signal=signal,
                    mode=mode,
                    floor_every=measures.floor_every if reference == "previous" else None,  # the same for both
                    seed=config.seed,
                    when=rarely,
                    name=f"drift.{reference}.{point}.{mode}",
                )
                found.append(drift)
            name = f"activations.{point}.{mode}"
            found.append(
                Activations(
                    layers, signal, percentiles=measures.percentiles, on=examples, mode=mode, when=rarely, name=name
                )
            )
        found.append(MinibatchShift(layers, pool, signal=signal, when=rarely, name=f"minibatch_shift.{point}"))
    for point in ("before", "nonlinear"):
        layers, signal = POINTS[point]
        path = Drift(
            layers, examples, ("mean_shift",), signal=signal, floor_every=None, when=often, name=f"drift.path.{point}"
        )
        found.append(path)
    return found


STUDY = Study(
    name="drift",
    question="Do the distributions inside the network move less with batch normalization, beyond what it pins itself?",
    arms=(Arm("none", "without BN"), Arm("batch", "with BN")),
    measures=(
        "drift between records and from the start on fixed training examples, before and after the normalizer and after"
        " the nonlinearity, in batch and population mode: mean, standard deviation, Wasserstein-1, and shape",
        "the sampling floor: the distance between random halves of the examples at one step",
        "means and standard deviations at the ends of epochs, for the referee's test",
        "the change from one minibatch to the next, split into sampling and parameters",
        "the path of the means between first passages of training-loss levels that both arms reach",
    ),
    rule=(
        "The referee's test: the average relative reduction of the epoch-wise drift of layer inputs' means and standard"
        " deviations over the first 5 epochs, paired by seed. Below 25%, interval included, the explanation by reduced"
        " covariate shift does not account for the speed-up; above 25%, interval included, it is not refuted by this"
        " test; else undecided. Points and modes that BN pins by construction are shown and do not count."
    ),
    control=(
        "The tautology: after BN in batch mode means and variances stand still whatever the network does. And progress:"
        " a network that learns faster moves faster, so drift is also compared between equal levels of training loss."
    ),
    fields=DriftFields,
    presets={
        "smoke": Preset(
            seeds=2,
            fields={
                "steps": 220,
                "drift_every": 20,
                "floor_every": 5,
                "path_every": 20,
                "epoch_records": 2,
                "early_every": 50,
                "sample": 200,
                "pool": 600,
                "fixed": 500,
                "fixed_every": 20,
            },
        ),
        "laptop": Preset(seeds=3, fields={}),
        "paper": Preset(seeds=5, fields={"steps": 50_000}),
    },
    drawing=DriftDrawing,
    figures=(Figure("drift"),),
    configure=configure,
    probes=probes,
)
