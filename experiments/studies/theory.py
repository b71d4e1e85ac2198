"""Theory: every identity and theorem the two papers state, checked in float64, and what becomes of the false ones.

Nothing is trained. Statements, their sources and the bounds they are held to are in `experiments.statements`, the
computation of each in `experiments.identities`. Beside the table four curves: how scale invariance is lost to epsilon,
how gradients fall with the size of the weights, the motivating failure of Ioffe & Szegedy (2015, section 2) with the
question whether scaling makes it worse, and how much of a batch's Jacobian lies across its examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from experiments.config import Computation, Count, Frozen, MachineConfig, MeasuresConfig, Positive
from experiments.statements import STATEMENTS, Statement
from experiments.study import Arm, Device, Figure, Preset, Study

if TYPE_CHECKING:
    from diagnostics.probe import Rows

__all__ = ["STUDY"]

RATIOS = tuple(10 ** (k / 4) for k in range(-24, 13))  # epsilon over variance: 1e-6 to 1e3
SCALES = tuple(2 ** (k / 2) for k in range(-10, 11))  # of the weights: 1/32 to 32
BATCHES = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
FACTOR = 2.0  # a, where invariance to it is measured against epsilon
TREATMENTS: tuple[Literal["centred", "shrinking", "growing", "epsilon", "through"], ...] = (
    "centred",
    "shrinking",
    "growing",
    "epsilon",
    "through",
)
TIMES = tuple(2.0**k for k in range(-3, 9))  # rate times steps: where scaling is compared with centring
RATES = (0.01, 0.04, 0.16)


class TheoryFields(Frozen):
    """How hard each statement is tried."""

    cases: Count = Field(50, description="random cases each statement is checked on")
    draws: Annotated[int, Field(ge=2)] = Field(2000, description="batches a share of the Jacobian is averaged over")
    steps: Count = Field(1000, description="steps of gradient descent in the motivating failure")
    rate: Positive = Field(0.05, description="its learning rate")
    starts: Count = Field(50, description="starts of it, each with its own examples and weight")


class TheoryDrawing(Frozen):
    """Nothing to choose."""


class TheoryMeasures(MeasuresConfig):
    """The statements as they will be judged, and the curves' abscissae."""

    statements: tuple[Statement, ...] = STATEMENTS
    cases: Count
    draws: Count
    steps: Count
    rate: Positive
    starts: Count
    times: tuple[float, ...] = TIMES
    rates: tuple[float, ...] = RATES
    ratios: tuple[float, ...] = RATIOS
    factor: float = FACTOR
    scales: tuple[float, ...] = SCALES
    batches: tuple[int, ...] = BATCHES


def configure(fields: TheoryFields, arm: Arm, seed: int, device: Device) -> Computation:
    """The one arm there is; on the CPU, whatever the device: float64 is what these numbers need."""
    measures = TheoryMeasures(**dict(fields))
    return Computation(seed=seed, measures=measures, machine=MachineConfig(device="cpu"))


def compute(config: Computation) -> Iterator[tuple[int, str, Rows]]:
    """The table, as one row a statement under its name, then the curves: unit k is the k-th abscissa."""
    from diagnostics.probe import Rows
    from experiments import identities

    measures, seed = config.measures, config.seed
    assert isinstance(measures, TheoryMeasures)
    for statement in measures.statements:
        found = identities.check(statement.name, bound=statement.bound, cases=measures.cases, seed=seed)
        values = {"residual": found.residual, "exceeded": float(found.exceeded), "cases": float(found.cases)}
        yield 0, "statement", Rows(statement.name, values)
    invariance = identities.invariance(measures.ratios, a=measures.factor, seed=seed)
    norms = identities.gradient_norms(measures.scales, seed=seed)
    coupling = identities.coupling(measures.batches, draws=measures.draws, seed=seed)
    yield 0, "epsilon", Rows("-", {"ratio": measures.ratios, **invariance})
    yield 0, "scale", Rows("-", {"scale": measures.scales, **norms})
    yield 0, "coupling", Rows("-", {"m": measures.batches, **coupling})
    yield 0, "reach", Rows("-", {**identities.reach(measures.times, measures.rates, seed=seed)})
    descend = partial(identities.failure, steps=measures.steps, rate=measures.rate, starts=measures.starts, seed=seed)
    runs = {treatment: descend(treatment).summary() for treatment in TREATMENTS}
    for step in range(measures.steps + 1):
        for treatment, run in runs.items():
            yield step, f"failure.{treatment}", Rows("-", {name: float(values[step]) for name, values in run.items()})


STUDY = Study(
    name="theory",
    question="Which of the papers' identities and theorems hold as printed, and what holds where one does not?",
    arms=(Arm("float64", "checked in float64"),),
    measures=(
        "the residual of each statement, the worst of many random cases, beside the bound it must keep",
        "the loss of scale invariance as epsilon grows against the variance",
        "the norm of the gradient, and the angle one step turns the weights by, against the norm of the weights",
        "b, w and the loss where normalization is outside the gradient, and where it is inside, over many starts",
        "how far b gets with scaling over how far it gets without, at several rates and lengths",
        "the share of the Jacobian that lies across examples, against the batch size",
    ),
    rule=(
        "A statement holds if its residual keeps its bound in every case, and is false if one case breaks it; a"
        " residual that is not finite shows neither. Which of the two is expected is fixed beforehand, and so is what a"
        " false form is: 'false as printed', as the paper prints it; 'false as read', where the print leaves a choice;"
        " 'false, cut on purpose', ours, to try the check. Any other outcome is a failure of this toolkit, and the"
        " command's exit code is 1."
    ),
    control=(
        "False forms stand among the true ones: gradients with a path cut on purpose, forms that the papers print, and"
        " readings of them. If they passed, the check would be worth nothing."
    ),
    fields=TheoryFields,
    presets={
        "smoke": Preset(seeds=1, fields={"cases": 20, "draws": 50, "steps": 60, "starts": 10}),
        "laptop": Preset(seeds=1, fields={}),
        "paper": Preset(seeds=1, fields={"cases": 400}),
    },
    drawing=TheoryDrawing,
    figures=(Figure("theory"),),
    configure=configure,
    compute=compute,
)
