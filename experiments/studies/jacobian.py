"""Jacobian: are the singular values between consecutive normalized layers near 1, as Ioffe & Szegedy conjecture?

Section 3.3 of the paper: if the normalized vectors of two layers are uncorrelated and the map between them is about
linear, Cov[z-hat] = J Cov[x-hat] J^T gives J J^T = I, all singular values 1, which preserves gradients. The conjecture
is taken apart. Its *premise*: how many dimensions x-hat has. Its *rank*: whether no singular value is 0. Its *mean
square*: whether they are 1 on average. Its *spread*: whether those that are not 0 are equal. Networks without BN are
measured in the same form, from normalized vector to normalized vector, so that BN is judged by what it changes and not
by the scale it sets.

Arms are the nonlinearity, the law of the initial weights, and BN or not: ``tanh-gaussian-batch``. One more, ``init``,
trains nothing: networks of several widths at their initialization, seen with batches of several sizes, where theory
says for BN in wide layers and large batches that the mean square is E[g'^2] / Var[g].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field

from experiments.config import (
    Computation,
    Count,
    DataConfig,
    Frozen,
    MachineConfig,
    MeasuresConfig,
    MLPConfig,
    NormalizerConfig,
    Positive,
    RunConfig,
    Widths,
)
from experiments.protocols import MnistFields, mnist_run, probe_examples
from experiments.study import Arm, Device, Figure, Preset, Study

if TYPE_CHECKING:
    from torch import Tensor

    from diagnostics.probe import Probe, Rows
    from experiments.datasets import Dataset
    from experiments.seeds import Streams

__all__ = ["STUDY"]

Activation = Literal["linear", "sigmoid", "tanh", "relu"]
Init = Literal["gaussian", "orthogonal"]
Normalizer = Literal["none", "batch"]
Sizes = Annotated[tuple[Annotated[int, Field(ge=2)], ...], Field(min_length=1)]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
INITS: tuple[Init, ...] = get_args(Init)
NORMALIZERS: tuple[Normalizer, ...] = get_args(Normalizer)
AT_INIT = "init"
_LABELS = {"none": "without BN", "batch": "with BN", "relu": "ReLU"}


class JacobianFields(Frozen):
    """The MNIST protocol, and what of it is measured."""

    steps: Count = Field(2000, description="updates")
    batch: Annotated[int, Field(ge=2, le=60_000)] = Field(60, description="examples an update")
    lr: Positive = Field(0.1, description="learning rate of plain SGD")
    hidden: Widths = Field((100, 100, 100), description="units of each hidden layer; the last two maps are drawn")
    std: Positive = Field(0.05, description="standard deviation of the initial weights, whatever their law")
    records: Annotated[int, Field(ge=2)] = Field(12, description="records, evenly spaced in the logarithm of the step")
    sample: Annotated[int, Field(ge=2, le=60_000)] = Field(500, description="fixed examples that statistics come from")
    examples: Count = Field(24, description="how many of them have their Jacobian taken")
    widths: Widths = Field((50, 100, 200, 400), description="widths that are looked at untrained")
    batches: Sizes = Field((16, 64, 256, 1024), description="batch sizes that are looked at untrained")
    init_examples: Count = Field(4, description="examples an untrained network's Jacobian is taken of")
    threads: Count = Field(1, description="torch threads a run; sums depend on it")


class JacobianDrawing(Frozen):
    """Nothing to choose."""


class JacobianMeasures(MeasuresConfig):
    """What is measured in training."""

    sample: Count
    examples: Count
    records: Count


class InitMeasures(MeasuresConfig):
    """What is measured of networks that are not trained."""

    data: DataConfig = DataConfig()
    network: MLPConfig
    epsilon: Positive
    activations: tuple[Activation, ...] = ACTIVATIONS
    inits: tuple[Init, ...] = INITS
    widths: Widths
    batches: Sizes
    examples: Count


def configure(fields: JacobianFields, arm: Arm, seed: int, device: Device) -> RunConfig | Computation:
    """One arm with one seed.

    Raises:
        ValueError: If there is one hidden layer: a map has two ends.
    """
    if len(fields.hidden) < 2:
        raise ValueError(f"hidden must have 2 layers or more, the ends of a map, got {len(fields.hidden)}")
    if arm.name == AT_INIT:
        measures = InitMeasures(
            network=MLPConfig(hidden=fields.hidden, init_std=fields.std),
            epsilon=1e-5,
            widths=fields.widths,
            batches=fields.batches,
            examples=fields.init_examples,
        )
        return Computation(seed=seed, measures=measures, machine=MachineConfig(threads=fields.threads))
    activation, init, normalizer = arm.name.split("-")
    shared = fields.model_dump(include={"steps", "batch", "lr", "hidden", "std", "sample", "threads"})
    protocol = MnistFields.model_validate(shared | {"activation": activation, "evaluate_every": 500})
    config = mnist_run(
        protocol,
        protocol.batch_norm() if normalizer == "batch" else NormalizerConfig(),
        seed,
        device,
        measures=JacobianMeasures(sample=fields.sample, examples=fields.examples, records=fields.records),
    )
    network = config.network.model_copy(update={"init": init})
    return config.model_copy(update={"network": network})


def probes(config: RunConfig, data: Dataset, streams: Streams) -> Sequence[Probe]:
    """The maps between normalized vectors, and the weights they contain."""
    from diagnostics.jacobian import LayerJacobian, WeightSpectrum
    from diagnostics.schedules import log_spaced

    measures = config.measures
    assert isinstance(measures, JacobianMeasures)
    when = log_spaced(max(config.training.steps - 1, 1), measures.records)
    fixed = probe_examples(data, measures.sample, streams)
    maps = LayerJacobian("hidden*.normalizer", fixed, examples=measures.examples, when=when, name="jacobian")
    return [maps, WeightSpectrum("hidden*.linear", when=when, name="weights")]


def compute(config: Computation) -> Iterator[tuple[int, str, Rows]]:
    """The untrained networks: probe ``<activation>.<init>.<normalizer>``, layer ``w<width>.m<batch>``.

    Numbers are means over maps and examples. Arms of a width share weights, batch sizes are the first examples of one
    permutation.

    Raises:
        ValueError: If the training set has fewer examples than a batch.
    """
    from diagnostics.probe import Rows
    from experiments.assemble import make_data
    from experiments.seeds import Streams

    measures = config.measures
    assert isinstance(measures, InitMeasures)
    data = make_data(measures.data, Streams(config.seed))
    largest, _ = probe_examples(data, max(measures.batches), Streams(config.seed))
    for activation, init, normalizer, width in product(
        measures.activations, measures.inits, NORMALIZERS, measures.widths
    ):
        network = measures.network.model_copy(
            update={"activation": activation, "init": init, "hidden": (width,) * len(measures.network.hidden)}
        )
        batch_norm = NormalizerConfig(kind="batch", epsilon=measures.epsilon)
        kind = batch_norm if normalizer == "batch" else NormalizerConfig()
        for batch in measures.batches:
            numbers = _untrained(network, kind, config.seed, largest[:batch], measures.examples)
            yield 0, f"{activation}.{init}.{normalizer}", Rows(f"w{width}.m{batch}", numbers)


def _untrained(
    network: MLPConfig, normalizer: NormalizerConfig, seed: int, inputs: Tensor, examples: int
) -> dict[str, float]:
    """What `Spectrum` says of the maps between hidden layers, and the premise; means over maps and examples.

    A map that is zero at an example (every ReLU off) has no spread there, and does not count for it; where none counts
    it is NaN. Units that do not vary have rows of zeros, as in `layer_jacobians`.
    """
    import torch

    from diagnostics.guard import set_mode
    from diagnostics.jacobian import constant_units, layer_jacobians, singular_values
    from diagnostics.spectrum import effective_dimension
    from experiments.assemble import make_network
    from experiments.seeds import Streams

    model = make_network(network, normalizer, Streams(seed))
    set_mode(model, "batch")
    modules = dict(model.named_modules())
    found: dict[str, list[float]] = {}
    for one in layer_jacobians(model, "hidden*.normalizer", lambda: model(inputs), examples=examples):
        # The same map as a function of few examples: each row of the whole batch's would cost a pass over all of it.
        epsilon = normalizer.epsilon if normalizer.kind == "batch" else 0.0
        gain: Any = 1.0 if normalizer.kind == "batch" else one.inputs.std(0, correction=0)  # gamma is 1 at the start
        scale = (one.outputs.var(0, correction=0) + epsilon).sqrt()
        if normalizer.kind != "batch":
            gain = torch.where(constant_units(one.inputs), 0.0, gain)
            scale = torch.where(constant_units(one.outputs), math.inf, scale)
        before, after = (name.removesuffix("normalizer") for name in (one.source, one.target))
        part = torch.nn.Sequential(modules[f"{before}nonlinearity"], modules[f"{after}linear"])
        few = one.inputs[:examples]

        def apply(
            v: torch.Tensor, part: Any = part, few: torch.Tensor = few, gain: Any = gain, scale: torch.Tensor = scale
        ) -> torch.Tensor:
            moved: torch.Tensor = part(few + gain * v) / scale
            return moved

        spectrum = singular_values(apply, torch.zeros_like(few))
        found.setdefault("effective_dimension", []).append(effective_dimension(one.inputs))
        for name in ("mean_square", "spread", "rank", "smallest", "largest", "distance"):
            found.setdefault(name, []).append(_mean(name, getattr(spectrum, name)))
    return {name: _mean(name, torch.tensor(values, dtype=torch.float64)) for name, values in found.items()}


def _mean(name: str, values: Tensor) -> float:
    """Over all values, and of the spread over those that are defined."""
    return float(values.nanmean() if name == "spread" else values.mean())


def _arms() -> tuple[Arm, ...]:
    def label(*parts: str) -> str:
        return ", ".join(_LABELS.get(part, part) for part in parts)

    trained = (Arm("-".join(parts), label(*parts)) for parts in product(ACTIVATIONS, INITS, NORMALIZERS))
    return (*trained, Arm(AT_INIT, "untrained, several widths and batch sizes"))


STUDY = Study(
    name="jacobian",
    question="Are the singular values between consecutive normalized layers near 1 with BN, as its paper conjectures?",
    arms=_arms(),
    measures=(
        "singular values of the map between consecutive normalized vectors, per example with the batch's statistics"
        " frozen, at steps evenly spaced in their logarithm: all of them, mean square, spread (standard deviation of"
        " the logarithm of the nonzero ones), rank (how many are nonzero), smallest, largest, distance"
        " |J J^T - I|_F / sqrt(P)",
        "effective dimension and correlation of the normalized vectors",
        "singular values of the weights alone, against Marchenko and Pastur's law",
        "the same of untrained networks at several widths and batch sizes",
    ),
    rule=(
        "The conjecture (all singular values 1) has four parts, judged per nonlinearity, law of weights and map, at"
        " the start and at the end of training, over seeds. Premise: effective dimension above 0.9 of 1/(1/C + 1/N),"
        " which is what C independent units of unit variance show in N examples (500 examples of 100 units: 83). Rank:"
        " all K = min(P, Q) singular values of a P x Q map nonzero, at every example, in every seed. Mean square:"
        " between 0.9 and 1.1. Spread (of the nonzero values): below 0.1. A part holds, or fails, where the whole 95%"
        " interval says so; else it is undecided, and undefined where a value is not finite. The conjecture holds"
        " where all four do and is refuted where one fails. The weaker claim (better behaved with BN) is supported"
        " where the spread's ratio with to without BN, paired by seed, is below 1 with its interval, refuted where it"
        " is above; only where the ranks of both are equal, else the two spreads are over different numbers of values."
        " An earlier form of this rule put the premise's bar at 0.9 C, which independent units seen in N examples do"
        " not reach, and did not judge the rank."
    ),
    control=(
        "Both networks are put in the same form, so that a scale set by BN is no merit. Linear networks with orthogonal"
        " weights are as near to the conjecture as weights can bring them, Gaussian weights alone have Marchenko and"
        " Pastur's spread whatever is normalized, and at the start the mean square is known from theory."
    ),
    fields=JacobianFields,
    presets={
        "smoke": Preset(
            seeds=2,
            fields={
                "steps": 30,
                "hidden": (16, 16, 16),
                "records": 4,
                "sample": 100,
                "examples": 4,
                "widths": (8, 16),
                "batches": (8, 32),
            },
        ),
        "laptop": Preset(seeds=3, fields={}),
        "paper": Preset(
            seeds=5,
            fields={"steps": 50_000, "records": 24, "widths": (100, 200, 400, 1000), "examples": 60},
        ),
    },
    drawing=JacobianDrawing,
    figures=(Figure("jacobian"),),
    configure=configure,
    probes=probes,
    compute=compute,
)
