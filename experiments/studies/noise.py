"""Noise: give a batch-normalized network the unstable distributions back, and see whether training slows down.

Santurkar, Tsipras, Ilyas & Madry (2018, section 2.2, Algorithm 1) inject noise after batch normalization whose law
changes at every step. The distributions of the activations then move more than without BN, and training stays fast: so
it is not their stability that makes training fast. Two controls go beyond the source. Noise *perturbs* and *moves* at
once; so each dose c of it comes in three forms with one marginal law for each activation (`experiments.normalizers`):
per step (Algorithm 1: the distribution moves at every step), per sample (the same noise, almost no movement) and fixed
(a distribution that is displaced once). The effect of movement is the contrast per step minus per sample at equal dose.

Drift is measured on fixed training examples, with normalizers and noise as in training: at step t the noise is drawn
anew, of the same law, from where the step found the stream (in the first layer that is the step's own shift and gain;
further on a larger sample has used up more of the stream). Two records follow each other by one step, and the next two
come ``drift_every`` steps later: so there is a drift from one step to the next, as the source has it, and one over
``drift_every - 1`` steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from experiments.config import (
    Count,
    DataConfig,
    EvaluationConfig,
    Frozen,
    MachineConfig,
    MeasuresConfig,
    MLPConfig,
    NetworkConfig,
    NoiseConfig,
    NonNegative,
    NormalizerConfig,
    Percentiles,
    Positive,
    RunConfig,
    TrainingConfig,
    VGGConfig,
    Widths,
)
from experiments.protocols import probe_examples
from experiments.study import Arm, Device, Figure, Preset, Study

if TYPE_CHECKING:
    from diagnostics.probe import Probe, Rows, Site, StepView
    from diagnostics.schedules import Schedule
    from experiments.datasets import Dataset
    from experiments.seeds import Streams
    from experiments.train import Batch

__all__ = ["STUDY"]

Form = Literal["per_step", "per_sample", "fixed"]
LAYERS = {"mlp": "hidden*.nonlinearity", "vgg": "features.*.nonlinearity"}


def _distinct(doses: tuple[float, ...]) -> tuple[float, ...]:
    if len({f"{dose:g}" for dose in doses}) != len(doses):  # as arms are named
        raise ValueError(f"each dose is run once, got {' '.join(f'{dose:g}' for dose in doses)}")
    for dose in doses:
        if float(f"{dose:g}") != dose:
            raise ValueError(f"a dose has at most six digits, got {dose!r}")
    return doses


class NoiseFields(Frozen):
    """The protocol of Figure 1, or VGG on CIFAR-10; the law of the noise; what is measured how often."""

    network: Literal["mlp", "vgg"] = Field("mlp", description="sigmoid layers, or convolutions as in the source")
    dataset: Literal["mnist", "fashion-mnist", "cifar10"] = Field("mnist", description="vgg takes cifar10")
    doses: Annotated[tuple[Positive, ...], AfterValidator(_distinct)] = Field(
        (1.0, 2.0, 4.0),
        description="strengths of the noise that come in three forms; the flag without values: the source's arms alone",
    )
    steps: Count = Field(2000, description="updates")
    batch: Annotated[int, Field(ge=2)] | None = Field(None, description="examples an update; else 60 (mlp), 128 (vgg)")
    lr: Positive = Field(0.1, description="learning rate of plain SGD")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="of SGD")
    weight_decay: NonNegative = Field(0.0, description="of SGD")
    hidden: Widths = Field((100, 100, 100), description="mlp: units of each hidden layer")
    std: Positive = Field(0.05, description="mlp: standard deviation of the initial weights")
    layout: Literal["A", "D"] = Field("A", description="vgg: 8 or 13 convolutions (the source's has 13 or more)")
    width: Positive = Field(0.25, description="vgg: multiplies the channels")
    glorot: Literal["uniform", "normal"] = Field("uniform", description="vgg: law of the initial weights")
    activation: Literal["sigmoid", "tanh", "relu", "linear"] | None = Field(
        None, description="nonlinearity; else sigmoid (mlp), relu (vgg)"
    )
    bn_momentum: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="of BN's running statistics")
    bn_epsilon: Positive = Field(1e-5, description="added to BN's variance")
    n_mu: NonNegative = Field(0.5, description="noise: a unit's shift is U(-n_mu, n_mu)")
    n_sigma: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        1.25, description="noise: a unit's gain is U(1, n_sigma)"
    )
    r_mu: NonNegative = Field(0.1, description="noise: a sample's shift is within r_mu of its unit's")
    r_sigma: NonNegative = Field(0.1, description="noise: spread of a sample's gain around its unit's")
    spread: Literal["deviation", "variance"] = Field("deviation", description="noise: what r_sigma is (source: silent)")
    place: Literal["after_affine", "before_affine"] = Field(
        "after_affine", description="noise: after gamma and beta or before (source: silent)"
    )
    binarize: bool = Field(True, description="grey pictures: black and white pixels")
    threshold: Annotated[float, Field(ge=0, lt=1)] = Field(0.5, description="a pixel above it is white")
    standardize: bool = Field(True, description="cifar10: zero mean and unit variance a channel")
    root: str | None = Field(
        None,
        description="folder of fashion-mnist or cifar10; left out: the folder of Debian's package, or data/cifar10, "
        "which is downloaded where there is none",
    )
    sample: Annotated[int, Field(ge=4)] = Field(1000, description="fixed training examples that drift is measured on")
    drift_every: Annotated[int, Field(ge=3)] = Field(100, description="steps between two pairs of records of drift")
    floor_every: Count = Field(10, description="records between two measurements of the sampling floor")
    ridge_every: Count = Field(100, description="steps between two records of percentiles")
    percentiles: Percentiles = Field(
        (2.5, *(5.0 * k for k in range(1, 20)), 97.5), description="that densities are drawn from"
    )
    fixed: Count = Field(2000, description="fixed training examples that progress is followed on")
    fixed_every: Count = Field(50, description="steps between two accuracies on them")
    evaluate_every: Count = Field(500, description="steps between two held-out accuracies")
    threads: Count = Field(1, description="torch threads a run; sums depend on it")

    def unused(self) -> Mapping[str, str]:
        """Fields of the other network and of other data."""
        found = {name: "with network mlp" for name in ("layout", "width", "glorot") if self.network == "mlp"}
        found |= {name: "with network vgg" for name in ("hidden", "std") if self.network == "vgg"}
        if self.dataset == "cifar10":
            return found | {"binarize": "with cifar10", "threshold": "with cifar10"}
        found |= {"standardize": f"with {self.dataset}"}
        found |= {} if self.binarize else {"threshold": "without binarize"}
        return found | ({"root": "with mnist, which is embedded"} if self.dataset == "mnist" else {})


class NoiseDrawing(Frozen):
    """How the figures are drawn; the runs do not depend on it."""

    target: Annotated[float, Field(gt=0, lt=1)] = Field(0.9, description="training accuracy that steps are counted to")


class NoiseMeasures(MeasuresConfig):
    """What is measured, on which examples, how often."""

    every: Count
    floor_every: Count
    ridge_every: Count
    sample: Count
    percentiles: Percentiles
    distances: tuple[str, ...] = ("mean_shift", "std_shift", "wasserstein1")


def arms(fields: NoiseFields) -> tuple[Arm, ...]:
    """The source's four, and each dose in each form; dose 1 per step is the source's noisy BN and runs once."""
    found = [
        Arm("none", "without BN"),
        Arm("batch", "with BN"),
        Arm("noisy", "noisy BN"),
        Arm("noise-only", "noise only"),
    ]
    cells = [(form, dose) for form in get_args(Form) for dose in fields.doses]
    found += [Arm(f"{f}-{c:g}", f"{f.replace('_', ' ')}, dose {c:g}") for f, c in cells if (f, c) != ("per_step", 1.0)]
    return tuple(found)


def configure(fields: NoiseFields, arm: Arm, seed: int, device: Device) -> RunConfig:
    """One arm with one seed: the arms differ in the normalizer alone."""
    mlp = fields.network == "mlp"
    least = max(fields.drift_every + 2, fields.fixed_every + 1)
    if fields.steps < least:
        raise ValueError(
            f"steps must be at least {least}, so that there is drift to compare and a curve of accuracy: more than "
            f"drift_every + 1 and fixed_every ({fields.drift_every} and {fields.fixed_every}), got {fields.steps}"
        )
    measures = NoiseMeasures(
        every=fields.drift_every,
        floor_every=fields.floor_every,
        ridge_every=fields.ridge_every,
        sample=fields.sample,
        percentiles=fields.percentiles,
    )
    return RunConfig(
        seed=seed,
        network=_network(fields),
        normalizer=_normalizer(fields, arm),
        data=_data(fields),
        training=TrainingConfig(
            steps=fields.steps,
            batch=fields.batch or (60 if mlp else 128),
            learning_rate=fields.lr,
            momentum=fields.momentum,
            weight_decay=fields.weight_decay,
        ),
        evaluation=EvaluationConfig(
            every=fields.evaluate_every, early_until=0, fixed=fields.fixed, fixed_every=fields.fixed_every
        ),
        measures=measures,
        machine=MachineConfig(device=device, threads=fields.threads),
    )


def _network(fields: NoiseFields) -> NetworkConfig:
    if fields.network == "vgg":
        activation = fields.activation or "relu"
        return VGGConfig(layout=fields.layout, width=fields.width, activation=activation, glorot=fields.glorot)
    return MLPConfig(
        inputs=3072 if fields.dataset == "cifar10" else 784,
        hidden=fields.hidden,
        activation=fields.activation or "sigmoid",
        init_std=fields.std,
    )


def _data(fields: NoiseFields) -> DataConfig:
    names = ("binarize", "threshold", "standardize", "root")
    used = {name: getattr(fields, name) for name in names if name not in fields.unused()}
    return DataConfig(name=fields.dataset, **used)


def _normalizer(fields: NoiseFields, arm: Arm) -> NormalizerConfig:
    if arm.name == "none":
        return NormalizerConfig()
    if arm.name == "batch":
        return NormalizerConfig(kind="batch", momentum=fields.bn_momentum, epsilon=fields.bn_epsilon)
    form, _, dose = arm.name.partition("-")
    if arm.name in ("noisy", "noise-only"):
        form, dose = "per_step", "1"
    place = "after_affine" if arm.name == "noise-only" else fields.place  # without BN there is no affine map
    names = ("n_mu", "n_sigma", "r_mu", "r_sigma", "spread")
    law = {name: getattr(fields, name) for name in names} | {"place": place, "form": form, "strength": float(dose)}
    if arm.name == "noise-only":
        return NormalizerConfig(kind="noise_only", noise=NoiseConfig(**law))
    return NormalizerConfig(
        kind="noisy", noise=NoiseConfig(**law), momentum=fields.bn_momentum, epsilon=fields.bn_epsilon
    )


class BatchAccuracy:
    """Accuracy on fixed examples with the batch's statistics and noise of the same law: what the source plots.

    Evaluation takes the noise away and normalizes by running statistics; this is the network that is being trained.
    """

    name = "batch_accuracy"
    active = True

    def __init__(self, examples: Batch, when: Schedule) -> None:
        self.examples, self.when = examples, when

    def bind(self, site: Site) -> None:
        """Nothing to resolve."""

    def measure(self, view: StepView) -> Iterable[Rows]:
        """The share of examples classified rightly at theta_t."""
        import torch

        from diagnostics.probe import Rows

        inputs, targets = self.examples
        with view.at(mode="batch") as model, torch.no_grad():
            right = (model(inputs).argmax(dim=1) == targets).double().mean().item()
        return [Rows("-", {"accuracy": right}, mode=view.site.mode_name("batch"))]


def probes(config: RunConfig, data: Dataset, streams: Streams) -> Sequence[Probe]:
    """Drift, minibatch moments, percentiles at the input of every nonlinearity; accuracy as in training."""
    from diagnostics.activations import Activations
    from diagnostics.drift import Drift
    from diagnostics.schedules import every

    measures = config.measures
    assert isinstance(measures, NoiseMeasures)
    assert isinstance(config.training.batch, int)
    examples = probe_examples(data, measures.sample, streams)
    # As many as the step's batch: the same random state then draws the same noise for both.
    minibatch = probe_examples(data, config.training.batch, streams)
    layers, rarely = LAYERS[config.network.kind], every(measures.every)

    def pairs(step: int) -> bool:
        return step % measures.every in (0, 1)

    return [
        Drift(layers, examples, measures.distances, floor_every=measures.floor_every, seed=config.seed, when=pairs),
        Drift(layers, examples, measures.distances, reference="start", floor_every=None, seed=config.seed, when=rarely),
        Activations(layers, "input", percentiles=(50,), when=pairs, name="activations.batch"),
        Activations(
            layers, "input", percentiles=(50,), on=minibatch, mode="batch", when=pairs, name="activations.other"
        ),
        Activations(
            layers,
            "input",
            percentiles=measures.percentiles,
            on=examples,
            mode="batch",
            when=every(measures.ridge_every),
            name="activations.probe",
        ),
        BatchAccuracy(examples, every(config.evaluation.fixed_every)),
    ]


STUDY = Study(
    name="noise",
    question="Does training slow down when noise makes a batch-normalized network's distributions unstable again?",
    arms=arms,
    measures=(
        "accuracy on fixed training examples (population statistics, noise off): steps to a target, interval-censored"
        " by the cadence and right-censored by the end of training; and the area under the curve, its mean height",
        "the same with batch statistics and noise, as the source plots it; held-out accuracy",
        "drift of the nonlinearities' inputs on fixed training examples, normalizers and noise as in training, from one"
        " step to the next, over the steps between records, and from the start, in sd, with the sampling floor",
        "the source's stability metrics on the training batches: |change| of a unit's mean and variance from one step"
        " to the next, their distance from the start, and the part that sampling alone makes",
        "percentiles of the nonlinearities' inputs over training",
    ),
    rule=(
        "Manipulation check: noisy BN's drift from one step to the next minus the plain network's, paired by seed, has"
        " an interval above 0, and so has noisy BN's minus its sampling floor (95th percentile of what random halves of"
        " the fixed examples differ by); else the manipulation failed and nothing follows. Stability is needed for"
        " speed: refuted if the check passed and the log ratio of noisy BN's steps to the target to the plain network's"
        " has an interval below 0; supported if above; else undecided. Movement slows"
        " training: per step minus per sample at equal dose, paired by seed, supported if the interval (log ratio of"
        " steps; area under the curve) excludes 0 in that direction, refuted if it excludes 0 in the other, else"
        " undecided. A run that never arrives counts with the length of training, and intervals hold for every passage"
        " between two evaluations."
    ),
    control=(
        "Noise perturbs and moves at once: the same noise drawn per sample perturbs as much and hardly moves. If"
        " stability were what matters, per step would be the slower form. And the same noise without BN."
    ),
    fields=NoiseFields,
    presets={
        "smoke": Preset(
            seeds=2,
            fields={
                "steps": 60,
                "doses": (1.0, 2.0),
                "hidden": (30, 20),
                "drift_every": 10,
                "floor_every": 6,
                "ridge_every": 20,
                "fixed": 500,
                "fixed_every": 20,
                "evaluate_every": 60,
            },
        ),
        "laptop": Preset(seeds=5, fields={}),
        "paper": Preset(
            seeds=5,
            fields={
                "network": "vgg",
                "dataset": "cifar10",
                "layout": "D",
                "width": 1.0,
                "steps": 15_000,
                "doses": (1.0, 2.0, 4.0, 8.0),
                "drift_every": 500,
                "ridge_every": 500,
                "evaluate_every": 1000,
            },
        ),
    },
    drawing=NoiseDrawing,
    figures=(Figure("noise", ("target",)),),
    configure=configure,
    probes=probes,
)
