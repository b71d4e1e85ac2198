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
from typing import Annotated, Any, Literal, Self

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
    "Count",
    "DataConfig",
    "EvaluationConfig",
    "Frozen",
    "MLPConfig",
    "MachineConfig",
    "MeasuresConfig",
    "NetworkConfig",
    "NonNegative",
    "NormalizerConfig",
    "Percentiles",
    "Positive",
    "RunConfig",
    "TrainingConfig",
    "Widths",
]


def _distinct_percentiles(values: tuple[float, ...]) -> tuple[float, ...]:
    for value in values:
        if not 0 <= value <= 100:  # also refuses NaN
            raise ValueError(f"a percentile lies between 0 and 100, got {value:g}")
    if len(set(values)) != len(values):
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
    """Fully connected layers; weights N(0, init_std^2), biases 0."""

    kind: Literal["mlp"] = "mlp"
    inputs: Count = 784
    hidden: Widths = (100, 100, 100)
    outputs: Count = 10
    activation: Literal["sigmoid", "tanh", "relu", "linear"] = "sigmoid"
    init_std: Positive = 0.05


NetworkConfig = MLPConfig


class NormalizerConfig(Frozen):
    """What stands in each layer's normalizer slot: its kind, and the fields that this kind uses."""

    kind: Literal["none", "batch"] = "none"
    momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    epsilon: Positive = 1e-5

    def unused(self) -> Mapping[str, str]:
        """Fields of other kinds."""
        used = {"none": (), "batch": ("momentum", "epsilon")}[self.kind]
        return {
            name: f"with normalizer {self.kind!r}"
            for name in type(self).model_fields
            if name != "kind" and name not in used
        }


class DataConfig(Frozen):
    """Which data, and how its pixels are presented; ``root`` is where to look, None the copy that is shipped."""

    name: Literal["mnist"] = "mnist"
    binarize: bool = True
    threshold: Annotated[float, Field(ge=0, lt=1)] = 0.5
    root: str | None = None

    def unused(self) -> Mapping[str, str]:
        """The threshold, where pixels stay grey."""
        return {} if self.binarize else {"threshold": "without binarize"}


class TrainingConfig(Frozen):
    """Plain SGD unless told otherwise; one step is one update on ``batch`` examples."""

    steps: Count = 15_000
    batch: Count = 60
    learning_rate: Positive = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NonNegative = 0.0


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


class RunConfig(Frozen):
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
        if self.normalizer.kind == "batch" and self.training.batch < 2:
            raise ValueError(
                f"a batch of {self.training.batch} has no variance to normalize by: batch normalization needs 2 or more"
            )
        return self

    def canonical(self) -> dict[str, Any]:
        """Every field with its default, as JSON types: what config.json holds and the id is the hash of."""
        return self.model_dump(mode="json")

    @property
    def id(self) -> str:
        """Ten hexadecimal digits; equal for equal configurations only."""
        from diagnostics.record import run_id  # configurations are made to answer --help; records are not needed there

        return run_id(self.canonical())
