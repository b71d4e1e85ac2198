"""Two arms that differ in the normalizer alone, and what a positive quantity says about them.

Studies of the gradient name their arms ``<network>-<learning rate>-<none or batch>``. A network without normalization
may explode along a ray or in training, and what is not finite then is a finding: it counts as larger than any number,
as a median over records can take it, and a comparison says so instead of leaving it out.

`compare` is the one rule by which a quantity is judged: the geometric mean over seeds of with/without, with Student's t
interval on the paired logarithms, is below 1, above 1, or cannot be told from it. `combine` is the one by which several
such outcomes become a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from analysis.load import Study, StudyError, load_records
from analysis.statistics import NO_INTERVAL, Estimate, log_ratio, mean

Floats = NDArray[np.float64]
Key = tuple[str, int, str]
Outcome = Literal["smaller", "larger", "undecided"]

KINDS = ("none", "batch")
NAMES = {"none": "without BN", "batch": "with BN"}
WHOLE = -1  # the unit of what is not on a grid


@dataclass(frozen=True)
class Pair:
    """One network at one learning rate, without and with BN."""

    network: str
    rate: float

    @property
    def title(self) -> str:
        """As pictures and tables call it."""
        return f"{self.network}, lr {self.rate:g}"

    def arm(self, kind: str) -> str:
        """The arm's name: ``kind`` is one of `KINDS`."""
        return f"{self.network}-{self.rate:g}-{kind}"


def pairs_of(study: Study, name: str) -> tuple[Pair, ...]:
    """The pairs of the study called ``name``, in its order.

    Raises:
        StudyError: If it is another study, or an arm is without its partner.
    """
    arms = [arm.name for arm in study.arms]
    if study.name != name:
        raise StudyError(f"{name} is not what {study.folder} holds: {study.name!r}")
    found: list[Pair] = []
    for arm in arms:
        network, _, rest = arm.partition("-")
        rate, _, kind = rest.rpartition("-")
        pair = Pair(network, float(rate)) if kind in KINDS else None
        if pair is None or any(pair.arm(other) not in arms for other in KINDS):
            raise StudyError(f"{study.folder}: arm {arm} has no partner; there is {', '.join(arms)}")
        if pair not in found:
            found.append(pair)
    return tuple(found)


def read(
    study: Study, pairs: Iterable[Pair], probe: str, statistics: Sequence[str], *, grid: bool
) -> dict[Key, pd.DataFrame]:
    """What ``probe`` found of the whole network: (arm, seed, statistic) -> steps x units, or x one column `WHOLE`."""
    found = {}
    for pair in pairs:
        for kind in KINDS:
            arm = pair.arm(kind)
            table = load_records(study, probe=probe, layer="-", statistic=list(statistics), arm=arm)
            table = table[(table["unit"] != WHOLE) if grid else (table["unit"] == WHOLE)]
            table = table.astype({"statistic": str})
            wide = table.pivot(index=["seed", "step"], columns=["statistic", "unit"], values="value")
            for seed in wide.index.unique("seed"):
                for statistic in statistics:
                    found[arm, int(seed), statistic] = wide.loc[seed][statistic]
    return found


def exploded(frame: pd.DataFrame) -> pd.DataFrame:
    """Infinity in place of what is not finite: where a walk overflowed, NaN (inf - inf) is larger than any number."""
    return frame.where(np.isfinite(frame), math.inf)


def typical(values: ArrayLike) -> float:
    """The median over a run's records, infinities included; NaN marks what is undefined.

    It is NaN where half of the records or more are, or where there are none.
    """
    every = np.asarray(values, dtype=np.float64)
    defined = every[~np.isnan(every)]
    return float(np.median(defined)) if 2 * len(defined) > len(every) else math.nan


def stacked(curves: Sequence[pd.Series]) -> tuple[NDArray[np.int64], Floats]:
    """One curve a seed as (T,) steps and (S, T) values; NaN where a run has no record (it had diverged)."""
    wide = pd.concat(list(curves), axis=1).sort_index()
    return wide.index.to_numpy(dtype=np.int64), wide.to_numpy(dtype=np.float64).T


def spread(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Smallest, median and largest over seeds of (S, T) values, of those runs that have one; NaN where none has."""
    ends = []
    for column in values.T:
        known = column[~np.isnan(column)]
        ends.append((known.min(), np.median(known), known.max()) if len(known) else (math.nan,) * 3)
    low, middle, high = np.array(ends, dtype=np.float64).reshape(-1, 3).T
    return low, middle, high


@dataclass(frozen=True)
class Reading:
    """A positive quantity with BN over the same without.

    Attributes:
        without: One value a seed; may be infinite, NaN where undefined.
        with_: With BN.
        ratio: The geometric mean of with/without and its interval; NaN where some seed's is not positive and finite.
        outcome: What the interval says of the ratio and 1.
        doubt: Why there is no ratio; empty where there is one.
    """

    without: tuple[float, ...]
    with_: tuple[float, ...]
    ratio: Estimate
    outcome: Outcome
    doubt: str = ""

    @property
    def text(self) -> str:
        """``0.31 [0.2, 0.5]``, or why not."""
        return self.doubt or self.ratio.text(".3g")


def compare(without: Sequence[float], with_: Sequence[float]) -> Reading:
    """The rule: ``with_`` over ``without``, paired by seed, one value each."""
    x, y = np.asarray(with_, dtype=np.float64), np.asarray(without, dtype=np.float64)
    sides = tuple(map(float, y)), tuple(map(float, x))
    unknown = Estimate(math.nan, math.nan, math.nan, len(x), NO_INTERVAL)
    for name, side in (("with BN", x), ("without BN", y)):
        bad = int((np.isnan(side) | (side <= 0)).sum())
        if bad:
            doubt = f"undefined or not positive {name} in {bad} of {len(side)} seeds"
            return Reading(*sides, unknown, "undecided", doubt)
    over, under = np.isinf(x), np.isinf(y)
    if over.any() or under.any():
        doubt = f"not finite in {under.sum()} of {len(y)} seeds without BN, {over.sum()} of {len(x)} with"
        outcome: Outcome = "undecided"
        if len(x) > 1 and over.any() != under.any() and (over | under).all():
            outcome = "smaller" if under.all() else "larger"
        return Reading(*sides, unknown, outcome, doubt)
    ratio = exponential(log_ratio(x, y))
    return Reading(*sides, ratio, outcome_of(ratio, 1.0))


def outcome_of(found: Estimate, bar: float) -> Outcome:
    """On which side of ``bar`` the whole interval is; without one it is undecided."""
    if not found.has_interval or found.low <= bar <= found.high:
        return "undecided"
    return "smaller" if found.high < bar else "larger"


def combine(said: Iterable[str]) -> str:
    """What several outcomes say together, in whatever words they say it.

    The same, if all say the same; ``inconclusive`` if two contradict each other or one is inconclusive by itself; else
    ``undecided``: one that is undecided contradicts nothing, and supports nothing.
    """
    found = set(said)
    decided = found - {"undecided"}
    if len(decided) > 1 or "inconclusive" in found:
        return "inconclusive"
    return decided.pop() if decided and decided == found else "undecided"


def level(values: Sequence[float]) -> Estimate:
    """The geometric mean over seeds with its interval; NaN where a seed's value is not positive and finite."""
    side = np.asarray(values, dtype=np.float64)
    if not (np.isfinite(side) & (side > 0)).all():
        return Estimate(math.nan, math.nan, math.nan, len(side), NO_INTERVAL)
    return exponential(mean(np.log(side)))


def exponent(rates: Sequence[float], values: Sequence[Sequence[float]]) -> Estimate:
    """A in value ~ rate^a from the smallest to the largest rate: (S,) values at each rate, paired by seed.

    0 is what a property of the network has, -1 what is set by 2/rate. NaN where a value is not positive and finite.
    """
    first, last = int(np.argmin(rates)), int(np.argmax(rates))
    ends = np.asarray([values[last], values[first]], dtype=np.float64)
    if first == last or not (np.isfinite(ends) & (ends > 0)).all():
        return Estimate(math.nan, math.nan, math.nan, ends.shape[1], NO_INTERVAL)
    found = log_ratio(*ends)
    width = math.log(rates[last] / rates[first])
    return Estimate(found.estimate / width, found.low / width, found.high / width, found.n, found.method)


def exponential(found: Estimate) -> Estimate:
    """An estimate made on logarithms, on the scale of what was measured."""
    with np.errstate(over="ignore"):
        centre, low, high = (float(np.exp(part)) for part in (found.estimate, found.low, found.high))
    return Estimate(centre, low, high, found.n, found.method)


def number(values: Sequence[float]) -> str:
    """The geometric mean over seeds, for a table; ``inf`` where a seed's is, ``-`` where one is undefined."""
    side = np.asarray(values, dtype=np.float64)
    if np.isnan(side).any() or (side <= 0).any():
        return "-"
    return f"{np.exp(np.log(side).mean()):.3g}"


def lost(study: Study) -> str:
    """A sentence on the runs that diverged and how far they came; empty where none did."""
    found = [run for run in study.runs if run.diverged]
    if not found:
        return ""
    names = ", ".join(f"{run.arm} (seed {run.seed})" for run in found)
    return f"Diverged, and shown and compared up to there: {names}."


def unconverged(searches: Iterable[ArrayLike]) -> str:
    """A sentence on how many searches for an eigenvalue did not end below their tolerance; ``""`` where none was made.

    ``searches`` hold 1 where one did and 0 where not, and NaN where none was made.
    """
    bad, every = _ended(searches)
    return f"Eigenvalues whose residual did not come below the tolerance: {bad} of {every}." if every else ""


def warned(searches: Iterable[ArrayLike]) -> str:
    """`unconverged` where at least one did not converge, for what is printed; else empty."""
    every = list(searches)
    return unconverged(every) if _ended(every)[0] else ""


def _ended(searches: Iterable[ArrayLike]) -> tuple[int, int]:
    flags = np.concatenate([np.empty(0), *(np.asarray(part, dtype=np.float64).ravel() for part in searches)])
    flags = flags[~np.isnan(flags)]
    return int((flags != 1).sum()), len(flags)


def medians_of(study: Study) -> str:
    """How the numbers of a table, one a run, were put together."""
    if len(study.seeds) == 1:
        return f"Each run's median record; {seeds_of(study)}, so there is no interval and nothing is decided"
    return (
        "Geometric means over seeds of each run's median record; brackets: 95% Student t over "
        f"{seeds_of(study)}, paired"
    )


def lines_of(study: Study) -> str:
    """What lines and bands over seeds are, as a sentence."""
    if len(study.seeds) == 1:
        return f"Lines: {seeds_of(study)}, so there are no bands and nothing is decided."
    return f"Lines: median over {seeds_of(study)}, bands: range over seeds."


def seeds_of(study: Study) -> str:
    """``5 seeds (0 to 4)``, ``one seed (0)``."""
    seeds = study.seeds
    if len(seeds) == 1:
        return f"one seed ({seeds[0]})"
    listed = f"{seeds[0]} to {seeds[-1]}" if list(seeds) == list(range(seeds[0], seeds[-1] + 1)) else str(list(seeds))
    return f"{len(seeds)} seeds ({listed})"
