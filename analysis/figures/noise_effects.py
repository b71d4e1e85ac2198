"""What noise did to training, in numbers: every arm's steps and areas, paired contrasts, and the rules that judge them.

Per run: the first passage of a target by the accuracy on fixed training examples (population statistics, noise off),
the area under that curve and under the one with batch statistics and noise on, the accuracy on held-out images, and the
drift of the mean at the nonlinearities' inputs, in sd: the median over units, averaged over layers and records.

*Steps.* A passage is known to lie between two evaluations, and a run that never arrives has none. What is compared is
the restricted passage ``min(passage, length of training)``, known for every run up to the cadence; a contrast is the
mean log ratio over seeds, with an interval that holds for every passage between those evaluations
(`analysis.statistics.mean_of_intervals`). Where only the slower arm fails to arrive it understates the difference.

*Manipulation.* It passed if noisy BN's drift from one step to the next exceeds the plain network's, and also its own
sampling floor (95th percentile): the intervals of both differences, paired by seed, lie above 0. A stricter reading,
that it exceed the plain network's by more than the floor, does not decide: the floor is what an unpaired measurement
could not tell from nothing, and the drift is paired. Nor does the drift over the steps between records: the source's
metric is from one step to the next. Both can be had from the numbers of ``noise_dose``. The floor shrinks with the
square root of the number of examples, the drift does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.load import Run, Study, StudyError, load_records
from analysis.statistics import (
    Estimate,
    Passage,
    area_under_curve,
    first_passage,
    mean,
    mean_band,
    mean_of_intervals,
    median_passage,
    paired_difference,
)
from analysis.style import and_list

NAME = "noise"
ARMS = ("none", "batch", "noisy", "noise-only")
FORMS = {"per_step": "per step", "per_sample": "per sample", "fixed": "fixed"}
MEASURES = ("steps", "area", "area_trained")
_FEW = 4  # seeds below which Student's interval is wider than what it is about

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Effect:
    """One arm over S seeds."""

    arm: str
    label: str
    form: str | None  # of noisy BN; None for the other arms
    dose: float | None
    runs: tuple[Run, ...]
    curves: tuple[pd.Series, ...]  # step -> accuracy on fixed training examples, noise off; one a run
    trained: tuple[pd.Series, ...]  # the same as the network is trained: batch statistics, noise on
    passages: tuple[Passage, ...]
    horizon: float  # length of training, in updates
    held_out: Floats  # (S,) at the end; NaN where the run diverged, here and below
    area: Floats  # (S,) mean height of the curve
    area_trained: Floats  # (S,)
    drift: Floats  # (S,) from one step to the next, in sd
    far: Floats  # (S,) from one pair of records to the next
    start: Floats  # (S,) from the first record
    floor: Floats  # (S,) 95th percentile of what random halves of the examples differ by

    @property
    def restricted(self) -> tuple[Floats, Floats]:
        """(S,) bounds of min(passage, length of training); the target met by the first evaluation counts as it."""
        low = [p.after if math.isfinite(p.after) and p.reached else min(p.by, self.horizon) for p in self.passages]
        high = [min(p.by, self.horizon) for p in self.passages]
        return np.array(low, dtype=np.float64), np.array(high, dtype=np.float64)


@dataclass(frozen=True)
class Contrast:
    """First minus second arm, paired by seed.

    ``steps`` is the mean log ratio of restricted passages, ``area`` and ``area_trained`` the mean differences; None
    where a run diverged and has no area. ``censored`` counts runs that never arrived, of the first and the second arm;
    each has ``runs``.
    """

    name: str
    steps: Estimate
    area: Estimate | None
    area_trained: Estimate | None
    censored: tuple[int, int]
    runs: int

    @property
    def arrived(self) -> bool:
        """Whether any run did; else the ratio of steps compares nothing but the length of training with itself."""
        return sum(self.censored) < 2 * self.runs

    def outcome(self, measure: str) -> str:
        """The first arm is ``slower`` or ``faster`` (its area ``lower`` or ``higher``), or it is ``undecided``.

        Decided is what has an interval without 0. A higher area is no arrival: neither arm need have reached a target.
        """
        found: Estimate | None = getattr(self, measure)
        if found is None or not found.has_interval or found.low <= 0 <= found.high:
            return "undecided"
        low, high = ("faster", "slower") if measure == "steps" else ("lower", "higher")
        return high if found.low > 0 else low

    def verdict(self, measure: str) -> str:
        """What the outcome says about "the first arm's peculiarity slows training"."""
        said = {"slower": "supported", "lower": "supported", "faster": "refuted", "higher": "refuted"}
        return said.get(self.outcome(measure), "undecided")


@dataclass(frozen=True)
class Manipulation:
    """Whether noise made distributions less stable than the plain network's, beyond sampling."""

    excess: Estimate  # drift from one step to the next: noisy BN - the plain network, in sd
    above_floor: Estimate  # the same: noisy BN - its own floor
    drift: float  # noisy BN's, mean over seeds
    floor: float  # noisy BN's

    @property
    def passed(self) -> bool:
        """Whether both intervals lie above 0."""
        return all(one.has_interval and one.low > 0 for one in (self.excess, self.above_floor))

    @property
    def text(self) -> str:
        """Passed or failed, and by how much."""
        said = (
            f"noisy BN's drift a step, {self.drift:.3f} sd, minus the plain net's {self.excess.text('+.3f')}, minus "
            f"its own floor of {self.floor:.3f} sd {self.above_floor.text('+.3f')}; both must be above 0 (minus both, "
            f"which is stricter than the rule, {self.excess.estimate - self.floor:+.3f})"
        )
        if not self.excess.has_interval:
            return f"Manipulation undecided, no interval: {said}."
        return f"Manipulation {'passed' if self.passed else 'FAILED'}: {said}."


# --- reading


def read_effects(study: Study, target: float) -> tuple[Effect, ...]:
    """Every arm of the study, in its order.

    Raises:
        StudyError: If the study lacks one of the source's four arms.
    """
    missing = [arm for arm in ARMS if arm not in [known.name for known in study.arms]]
    if study.name != NAME or missing:
        lacking = f", which lacks {', '.join(missing)}" if missing else ""
        raise StudyError(f"{NAME} shows arms {', '.join(ARMS)}; {study.folder} holds {study.name!r}{lacking}")
    every = int(study.setting("measures", "every"))
    return tuple(_read_effect(study, arm.name, target, every) for arm in study.arms)


def _read_effect(study: Study, arm: str, target: float, every: int) -> Effect:
    normalizer = study.setting("normalizer", arm=arm)
    noise = normalizer.get("noise") if normalizer["kind"] == "noisy" else None
    runs = tuple(study.run(arm, seed) for seed in study.seeds)
    log = load_records(study, probe="log", statistic=["fixed_accuracy", "test_accuracy"], arm=arm)
    curves, held_out = (_curves(study, log[log["statistic"] == name]) for name in ("fixed_accuracy", "test_accuracy"))
    trained = _curves(study, load_records(study, probe="batch_accuracy", statistic="accuracy", arm=arm))
    moments = ["mean_shift", "mean_shift_floor95"]
    both = load_records(study, probe=["drift.previous", "drift.start"], statistic=moments, unit=-1, arm=arm)
    drift, start = (both[both["probe"] == f"drift.{reference}"] for reference in ("previous", "start"))
    floors = drift["statistic"] == "mean_shift_floor95"
    one_step = drift["step"] % every == 1
    return Effect(
        arm=arm,
        label=study.label(arm),
        form=None if noise is None else str(noise["form"]),
        dose=None if noise is None else float(noise["strength"]),
        runs=runs,
        curves=curves,
        trained=trained,
        passages=tuple(
            first_passage(curve.index.to_numpy(), curve.to_numpy(), target, diverged=run.diverged)
            for run, curve in zip(runs, curves, strict=True)
        ),
        horizon=float(study.setting("training", "steps")),
        held_out=_each(runs, held_out, lambda curve: float(curve.iloc[-1])),
        area=_each(runs, curves, _area),
        area_trained=_each(runs, trained, _area),
        drift=_per_seed(study, drift[one_step & ~floors]),
        far=_per_seed(study, drift[~one_step & ~floors]),
        start=_per_seed(study, start),
        floor=_per_seed(study, drift[floors]),
    )


def _curves(study: Study, table: pd.DataFrame) -> tuple[pd.Series, ...]:
    """Step -> value, one series a seed."""
    return tuple(table[table["seed"] == seed].set_index("step")["value"].sort_index() for seed in study.seeds)


def _each(runs: Sequence[Run], curves: Sequence[pd.Series], of: Callable[[pd.Series], float]) -> Floats:
    return np.array([math.nan if run.diverged else of(curve) for run, curve in zip(runs, curves, strict=True)])


def _area(curve: pd.Series) -> float:
    return area_under_curve(curve.index.to_numpy(), curve.to_numpy())


def _per_seed(study: Study, table: pd.DataFrame) -> Floats:
    """(S,) means over layers and records, of what is finite: a run that diverged has records that are not."""
    finite = table[np.isfinite(table["value"])]
    means = finite.groupby("seed")["value"].mean()
    return np.array([means.get(seed, math.nan) for seed in study.seeds], dtype=np.float64)


# --- judging


def by_name(effects: Sequence[Effect]) -> dict[str, Effect]:
    """The effects by their arm."""
    return {effect.arm: effect for effect in effects}


def manipulation(effects: Sequence[Effect]) -> Manipulation:
    """The check, from the arms ``noisy`` and ``none``."""
    noisy, none = by_name(effects)["noisy"], by_name(effects)["none"]
    return Manipulation(
        excess=_mean_known(noisy.drift - none.drift),
        above_floor=_mean_known(noisy.drift - noisy.floor),
        drift=_mean_known(noisy.drift).estimate,
        floor=_mean_known(noisy.floor).estimate,
    )


def _mean_known(values: Floats) -> Estimate:
    if np.isfinite(values).all():
        return mean(values)
    return Estimate(math.nan, math.nan, math.nan, 0, "not measured in every run")


def contrast(name: str, first: Effect, second: Effect) -> Contrast:
    """First minus second arm."""
    return _pooled(name, [(first, second)])


def movement(effects: Sequence[Effect]) -> tuple[Contrast, ...]:
    """Per step minus per sample at each dose that has both forms; then all these doses together, if they are several.

    Together: per seed the mean over doses of the log ratio, and of the difference.
    """
    pairs = [(dose, forms["per_step"], forms["per_sample"]) for dose, forms in _doses(effects) if len(forms) == 2]
    found = [_pooled(f"per step - per sample, dose {dose:g}", [(a, b)]) for dose, a, b in pairs]
    if len(pairs) > 1:
        found.append(_pooled("per step - per sample, all doses", [(a, b) for _, a, b in pairs]))
    return tuple(found)


def _doses(effects: Sequence[Effect]) -> Iterator[tuple[float, dict[str, Effect]]]:
    for dose in sorted({effect.dose for effect in effects if effect.dose is not None}):
        forms = {effect.form: effect for effect in effects if effect.dose == dose}
        yield dose, {name: forms[name] for name in ("per_step", "per_sample") if name in forms}


def _pooled(name: str, pairs: Sequence[tuple[Effect, Effect]]) -> Contrast:
    lows, highs = [], []
    for first, second in pairs:
        (a_low, a_high), (b_low, b_high) = first.restricted, second.restricted
        # At step 0 no logarithm: an evaluation before the first update bounds a passage from below by half a step.
        lows.append(np.log(np.maximum(a_low, 0.5)) - np.log(np.maximum(b_high, 0.5)))
        highs.append(np.log(np.maximum(a_high, 0.5)) - np.log(np.maximum(b_low, 0.5)))
    areas: list[Estimate | None] = []
    for measure in MEASURES[1:]:
        first_mean = np.mean([getattr(first, measure) for first, _ in pairs], axis=0)
        second_mean = np.mean([getattr(second, measure) for _, second in pairs], axis=0)
        known = np.isfinite(first_mean).all() and np.isfinite(second_mean).all()
        areas.append(paired_difference(first_mean, second_mean) if known else None)
    return Contrast(
        name,
        mean_of_intervals(np.mean(lows, axis=0), np.mean(highs, axis=0)),
        areas[0],
        areas[1],
        (
            sum(not p.reached for first, _ in pairs for p in first.passages),
            sum(not p.reached for _, second in pairs for p in second.passages),
        ),
        sum(len(first.passages) for first, _ in pairs),
    )


def stability_verdict(check: Manipulation, noisy_to_none: Contrast) -> str:
    """The rule on "stable distributions are needed for speed", from noisy BN minus the plain network."""
    if not check.passed:
        return "nothing follows"
    return {"slower": "supported", "faster": "refuted"}.get(noisy_to_none.outcome("steps"), "undecided")


# --- saying


def seed_band(values: Floats, *, within: tuple[float, float] | None = None) -> dict[str, Floats]:
    """Mean (T,) of S curves, ``values`` (S, T), and the edges of a band around it, by name.

    ``low`` and ``high`` are Student's 95% interval, NaN of one seed. Of two or three it would be many times wider than
    the seeds are apart (t is 12.7 and 4.3) and hide everything else: there the edges are ``min`` and ``max``.
    """
    band = mean_band(values, within=within)
    if 1 < len(values) < _FEW:
        return {"mean": band.estimate, "min": values.min(axis=0), "max": values.max(axis=0)}
    return {"mean": band.estimate, "low": band.low, "high": band.high}


def band_series(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The rows of a table with the column ``series`` that hold a `seed_band`: mean, lower and upper edge."""
    edges = ("min", "max") if (table["series"] == "min").any() else ("low", "high")
    mean_rows, low, high = (table[table["series"] == name] for name in ("mean", *edges))
    return mean_rows, low, high


def band_text(seeds: Sequence[int]) -> str:
    """What lines and bands of these seeds are, for a caption."""
    named = and_list([str(seed) for seed in seeds])
    if len(seeds) == 1:
        return f"One seed ({named}), so there is no interval."
    kind = "the lowest to the highest seed, too few for an interval" if len(seeds) < _FEW else "95% Student t interval"
    return f"Lines: mean of {len(seeds)} seeds ({named}); bands: {kind}."


def table(study: Study, effects: Sequence[Effect], target: float) -> pd.DataFrame:
    """The arms, the contrasts of movement, and the source's; every interval is Student's at 95% over seeds."""
    columns = ["", f"steps to {target:g}", "area", "area, noise on", "held-out"]
    columns += ["drift a step", "its floor", "from start"]
    rows = [_effect_row(effect) for effect in effects]
    rows += [_contrast_row(one) for one in chain(movement(effects), source_contrasts(effects))]
    return pd.DataFrame(rows, columns=columns)


def source_contrasts(effects: Sequence[Effect]) -> tuple[Contrast, ...]:
    """Noisy BN against the plain network and against BN; noise alone against the plain network."""
    known = by_name(effects)
    return (
        contrast("noisy BN - without BN", known["noisy"], known["none"]),
        contrast("noisy BN - BN", known["noisy"], known["batch"]),
        contrast("noise only - without BN", known["noise-only"], known["none"]),
    )


def _effect_row(effect: Effect) -> tuple[str, ...]:
    passage = median_passage(effect.passages)
    areas = [_mean_text(values, ".3f", ".3f") for values in (effect.area, effect.area_trained, effect.held_out)]
    steps = f"{passage.text()} ({passage.reached} of {passage.n})"
    drifts = (_mean_text(values, ".2g", ".1g") for values in (effect.drift, effect.floor, effect.start))
    return effect.label, steps, *areas, *drifts


def _contrast_row(one: Contrast) -> tuple[str, ...]:
    known = {measure: (measure == "steps" and not one.arrived) or getattr(one, measure) is None for measure in MEASURES}
    cells = [_size(one, m) + ("" if lacking else f" {one.outcome(m)}") for m, lacking in known.items()]
    return one.name, *cells, *[""] * 4


def _size(one: Contrast, measure: str) -> str:
    """The contrast by one measure with its interval, or why there is none."""
    if measure == "steps":
        return _ratio(one) if one.arrived else "no run arrived"
    found: Estimate | None = getattr(one, measure)
    return "a run diverged" if found is None else found.text("+.3f")


def _ratio(one: Contrast) -> str:
    log = one.steps
    factor = replace(log, estimate=math.exp(log.estimate), low=math.exp(log.low), high=math.exp(log.high))
    sign = {(True, False): " (at least)", (False, True): " (at most)"} if one.outcome("steps") != "undecided" else {}
    return f"x{factor.text('.2f')}{sign.get((bool(one.censored[0]), bool(one.censored[1])), '')}"


def _mean_text(values: Floats, spec: str, doubt: str) -> str:
    """``0.894 ±0.006``, half of the interval: a row of brackets would not fit a terminal."""
    if lost := int((~np.isfinite(values)).sum()):
        return f"{lost} of {len(values)} diverged"
    found = mean(values)
    half = f" \N{PLUS-MINUS SIGN}{found.high - found.estimate:{doubt}}" if found.has_interval else ""
    return f"{found.estimate:{spec}}{half}"


def verdicts(effects: Sequence[Effect]) -> str:
    """The rules' outcomes, one question a line; first what movement did apart from noise."""
    check, source = manipulation(effects), source_contrasts(effects)
    moved = movement(effects)
    if moved:
        last, which = moved[-1], moved[-1].name.rpartition(", ")[2]
        outcomes = (
            f"{last.verdict(measure)} by {name}, {_size(last, measure)}"
            for measure, name in zip(MEASURES, ("steps", "area", "area with noise on"), strict=True)
        )
        said = f"Movement apart from noise (per step minus per sample, {which}) slows training: {'; '.join(outcomes)}."
    else:
        said = "Movement apart from noise: not asked, no dose has both forms."
    needed = stability_verdict(check, source[0])
    why = f", {_size(source[0], 'steps')}" if check.passed else ": the manipulation check did not pass"
    if moved and not check.passed:
        said += " But the manipulation check did not pass."
    return f"{said}\nStability is needed for speed (noisy BN - without BN, by steps): {needed}{why}.\n{check.text}"
