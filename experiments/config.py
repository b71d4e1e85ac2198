"""What a run is: frozen models that hold every setting a number can depend on.

A run is an address. Its id is the hash of its whole configuration, defaults and seed included
(:func:`diagnostics.record.run_id`), so two runs with one id are the same run and the second is never computed. What
cannot change a number (how many jobs run beside it, where its folder lies, the preset's name, how a figure is drawn)
is not here.

Unknown keys are refused. So is a setting that the others make meaningless (a momentum for no normalizer), and it is
left out of the canonical form: a new kind's fields do not move the address of old runs.

The tests lean on two identities: equal configurations have equal ids however they were written down, and changing any
one field changes the id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

__all__ = [
    "Addressed",
    "Computation",
    "Count",
    "DataConfig",
    "DeepLinearConfig",
    "EvaluationConfig",
    "Frozen",
    "MLPConfig",
    "MachineConfig",
    "MeasuresConfig",
    "NetworkConfig",
    "NoiseConfig",
    "NonNegative",
    "NormalizerConfig",
    "Percentiles",
    "Positive",
    "RunConfig",
    "TrainingConfig",
    "VGGConfig",
    "Widths",
]


def _distinct_percentiles(values: tuple[float, ...]) -> tuple[float, ...]:
    for value in values:
        if not 0 <= value <= 100:  # also refuses NaN
            raise ValueError(f"a percentile lies between 0 and 100, got {value:g}")
    if len({f"{value:g}" for value in values}) != len(values):  # as records name them
        raise ValueError(f"each percentile is recorded once, got {' '.join(f'{value:g}' for value in values)}")
    return values


Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Widths = Annotated[tuple[Count, ...], Field(min_length=1)]
Percentiles = Annotated[tuple[float, ...], Field(min_length=1), AfterValidator(_distinct_percentiles)]


class Frozen(BaseModel):
    """A model that does not change after it was made, and refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def unused(self) -> Mapping[str, str]:
        """Fields that mean nothing beside the others' values, each with what takes its meaning away."""
        return {}

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> Self:
        for name, reason in self.unused().items():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value} means nothing {reason}")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_what_is_ignored(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {name: value for name, value in fields.items() if name not in self.unused()}


class MLPConfig(Frozen):
    """Fully connected layers; weights N(0, init_std^2), or orthogonal with that mean square; biases 0."""

    kind: Literal["mlp"] = "mlp"
    inputs: Count = 784
    hidden: Widths = (100, 100, 100)
    outputs: Count = 10
    activation: Literal["sigmoid", "tanh", "relu", "linear"] = "sigmoid"
    init_std: Positive = 0.05
    init: Literal["gaussian", "orthogonal"] = "gaussian"


class VGGConfig(Frozen):
    """Simonyan & Zisserman's convolutions; layout A has 8, D has 13 (VGG-16, what Santurkar et al. index up to)."""

    kind: Literal["vgg"] = "vgg"
    layout: Literal["A", "D"] = "D"
    width: Positive = 1.0
    channels: Count = 3
    size: Count = 32
    outputs: Count = 10
    activation: Literal["sigmoid", "tanh", "relu", "linear"] = "relu"
    glorot: Literal["uniform", "normal"] = "uniform"


class DeepLinearConfig(Frozen):
    """A product of square matrices (Santurkar et al. 2018, appendix A.1)."""

    kind: Literal["deep_linear"] = "deep_linear"
    width: Count = 10
    depth: Count = 25
    glorot: Literal["uniform", "normal"] = "uniform"
    normalize_last: bool = True


NetworkConfig = Annotated[MLPConfig | VGGConfig | DeepLinearConfig, Field(discriminator="kind")]


class NoiseConfig(Frozen):
    """The law of injected noise, Algorithm 1's by default; see `experiments.normalizers.NoiseLaw`."""

    n_mu: NonNegative = 0.5
    n_sigma: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.25
    r_mu: NonNegative = 0.1
    r_sigma: NonNegative = 0.1
    strength: NonNegative = 1.0
    form: Literal["per_step", "per_sample", "fixed"] = "per_step"
    place: Literal["after_affine", "before_affine"] = "after_affine"
    spread: Literal["deviation", "variance"] = "deviation"


class NormalizerConfig(Frozen):
    """What stands in each layer's normalizer slot: its kind, and the fields that this kind uses.

    ``noise`` belongs to ``noisy`` (batch normalization and noise) and ``noise_only``; ``ghost`` is the examples of a
    group, ``norm`` and ``centred`` are lp's, ``groups`` group normalization's.
    """

    kind: Literal["none", "batch", "noisy", "noise_only", "population", "ghost", "lp", "layer", "group"] = "none"
    momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    epsilon: Positive = 1e-5
    noise: NoiseConfig = NoiseConfig()
    ghost: Annotated[int, Field(ge=2)] = 16
    norm: Literal["l1", "l2", "linf"] = "l2"
    centred: bool = False
    groups: Count = 4

    USED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "none": (),
        "batch": ("momentum", "epsilon"),
        "noisy": ("momentum", "epsilon", "noise"),
        "noise_only": ("noise",),
        "population": ("momentum", "epsilon"),
        "ghost": ("momentum", "epsilon", "ghost"),
        "lp": ("momentum", "epsilon", "norm", "centred"),
        "layer": ("epsilon",),
        "group": ("epsilon", "groups"),
    }

    def unused(self) -> Mapping[str, str]:
        """Fields of other kinds."""
        fields = type(self).model_fields
        return {
            name: f"with normalizer {self.kind!r}"
            for name in fields
            if name != "kind" and name not in self.USED[self.kind]
        }

    @property
    def has_modes(self) -> bool:
        """Whether it computes otherwise in training than in evaluation; else the ``mode`` of a record is ``-``."""
        return self.kind not in ("none", "layer", "group")

    @property
    def needs_two(self) -> bool:
        """Whether it takes statistics over the batch, which needs 2 examples or more."""
        return self.kind in ("batch", "noisy", "population", "ghost", "lp")


class DataConfig(Frozen):
    """Which data, and how it is presented.

    ``binarize`` and ``threshold`` belong to the grey pictures, ``standardize`` to CIFAR-10; ``root`` is the folder of
    data that is not shipped (a recompressed copy gives other numbers, so it counts). The rest describes the Gaussian
    teacher's task. ``reduce`` replaces its training examples by ``2 dimension`` points with the same mean and
    covariance, each standing for several: a linear network's loss and gradients depend on no more.
    """

    name: Literal["mnist", "fashion-mnist", "cifar10", "gaussian"] = "mnist"
    binarize: bool = True
    threshold: Annotated[float, Field(ge=0, lt=1)] = 0.5
    standardize: bool = True
    root: str | None = None
    dimension: Count = 10
    examples: Annotated[int, Field(ge=2)] = 1000
    test_examples: Count = 1000
    scale: NonNegative = 1.0
    reduce: bool = True

    USED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "mnist": ("binarize", "threshold"),
        "fashion-mnist": ("binarize", "threshold", "root"),
        "cifar10": ("standardize", "root"),
        "gaussian": ("dimension", "examples", "test_examples", "scale", "reduce"),
    }

    def unused(self) -> Mapping[str, str]:
        """Fields of other data, and the threshold where pixels stay grey."""
        used = self.USED[self.name]
        ignored = {name: f"with {self.name}" for name in type(self).model_fields if name != "name" and name not in used}
        return ignored if self.binarize else {"threshold": "without binarize"} | ignored


class TrainingConfig(Frozen):
    """Plain SGD unless told otherwise; one step is one update on ``batch`` examples, ``full`` meaning all of them.

    ``reduction`` says whether the loss is the mean or the sum over examples (of the cross-entropy, or of the squared
    distance to the target).
    """

    steps: Count = 15_000
    batch: Count | Literal["full"] = 60
    optimizer: Literal["sgd", "adam"] = "sgd"
    learning_rate: Positive = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NonNegative = 0.0
    reduction: Literal["mean", "sum"] = "mean"

    def unused(self) -> Mapping[str, str]:
        """Momentum, where Adam has its own."""
        return {"momentum": "with adam"} if self.optimizer == "adam" else {}


class EvaluationConfig(Frozen):
    """Held-out accuracy and training loss: every ``every`` steps, and every ``early_every`` up to ``early_until``.

    Besides, where ``fixed`` is not 0, accuracy and loss on so many fixed training examples, every ``fixed_every``
    steps: what steps to a target are counted with.
    """

    every: Count = 1000
    early_every: Count = 100
    early_until: Annotated[int, Field(ge=0)] = 1000
    fixed: Annotated[int, Field(ge=0)] = 0
    fixed_every: Count = 50

    def unused(self) -> Mapping[str, str]:
        """The cadence of what is not evaluated."""
        return {} if self.fixed else {"fixed_every": "without fixed examples"}

    def due(self, step: int) -> bool:
        """Whether ``step`` (updates done so far) is one to evaluate at; the last step always is, by the loop."""
        return step % self.every == 0 or (step <= self.early_until and step % self.early_every == 0)


class MeasuresConfig(Frozen):
    """What a study measures along the way. A study derives its own from this and adds its probes' settings."""


class MachineConfig(Frozen):
    """What of the machine shows in the last digits: sums depend on the thread count, kernels on the device."""

    device: Literal["cpu", "cuda"] = "cpu"
    threads: Count = 1


class Addressed(Frozen):
    """A configuration with an address; everything that can change a number is in it."""

    def canonical(self) -> dict[str, Any]:
        """Every field with its default, as JSON types: what config.json holds and the id is the hash of."""
        return self.model_dump(mode="json")

    @property
    def id(self) -> str:
        """Ten hexadecimal digits; equal for equal configurations only."""
        from diagnostics.record import run_id  # configurations are made to answer --help; records are not needed there

        return run_id(self.canonical())


class Computation(Addressed):
    """One arm of a study with one seed, where nothing is trained: what is computed is all in ``measures``."""

    seed: Annotated[int, Field(ge=0, lt=2**63)]
    measures: SerializeAsAny[MeasuresConfig]
    machine: MachineConfig = MachineConfig()


class RunConfig(Addressed):
    """One arm of a study with one seed."""

    seed: Annotated[int, Field(ge=0, lt=2**63)]
    network: NetworkConfig = MLPConfig()
    normalizer: NormalizerConfig = NormalizerConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    measures: SerializeAsAny[MeasuresConfig] = MeasuresConfig()
    machine: MachineConfig = MachineConfig()

    @model_validator(mode="after")
    def _a_batch_has_a_variance(self) -> Self:
        if self.normalizer.needs_two and self.training.batch == 1:
            raise ValueError("a batch of 1 has no variance to normalize by: batch normalization needs 2 or more")
        return self

    @model_validator(mode="after")
    def _the_network_fits_the_data(self) -> Self:
        network, data = self.network, self.data
        if (network.kind == "deep_linear") != (data.name == "gaussian"):
            raise ValueError(f"{network.kind} does not learn {data.name}: deep_linear and gaussian go together")
        if network.kind == "deep_linear" and network.width != data.dimension:
            raise ValueError(f"width is {network.width} and the data's dimension {data.dimension}: they are one number")
        if network.kind == "vgg" and (network.channels, network.size) != {"cifar10": (3, 32)}.get(data.name):
            raise ValueError(f"vgg takes cifar10's pictures, 3x32x32, not those of {data.name} or of other sizes")
        return self
