"""Internal covariate shift with and without BN, and what is left of the comparison after its controls.

Three pictures and one table from the records of the study of that name. ``ics``: Definition 2.1 in every layer against
steps. ``ics_controls``: which layers moved, virtual steps of equal size, measured over predicted. ``ics_readings``: the
numbers that the verdicts rest on.

A *pair* is a network at a learning rate, without and with BN. A *cell* is a layer at a record. A reading is the mean
over cells of the logarithm of a positive quantity, with BN minus without, one number a seed (the cosine: of the cosine
itself); a cell enters if it is defined, and positive, in both arms. The study's rule turns readings into verdicts; the
tests plant cells whose verdicts are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from analysis import style
from analysis.figures._curves import HUGE, TINY, count_steps, in_words, loggable, plain_ticks, write
from analysis.load import Run, Study, StudyError, load_records, load_study
from analysis.pairs import KINDS, NAMES, combine, pairs_of, unconverged, warned
from analysis.statistics import Estimate, mean, mean_band

NAME = "ics"
WHICH = ("preceding", "following", "own", "all")
UNITS = {"curvature": "1 / (|Hg|/|g|)", "sharpness": "1 / sharpness"}
STATISTICS = {"l2": "|G - G'|", "relative": "|G - G'| / |G|", "cosine": "cosine of G and G'"}
JUDGED = 1.0  # the size of virtual steps that the rule looks at

Says = Literal["less", "more", "undecided"]
UNPREDICTED = "with momentum a step is not eta times the gradient"
WORDS: Mapping[str, str] = {
    "less": "less shift with BN",
    "more": "more shift with BN",
    "undecided": "undecided",
    "inconclusive": "inconclusive, the readings disagree",
    "diverged": "no verdict, training diverged",
}

_LOOKS = dict(zip(KINDS, (style.WITHOUT_BN, style.WITH_BN), strict=True))
_WHICH_COLORS = dict(zip(WHICH, (style.BLACK, style.GREEN, style.PURPLE, style.GREY), strict=True))
_WHICH_DASHES = dict(zip(WHICH, ("solid", "dashed", "dotted", "dashdot"), strict=True))
_SHORT = {
    "beyond_following": "(1) preceding / following",
    "virtual_curvature_1": "(2) virtual steps by |Hg|/|g|",
    "virtual_sharpness_1": "by sharpness",
    "over_predicted": "(3) measured / predicted",
}
_LABELLED = 4  # layers that are named where there are many

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Arm:
    """All cells of one arm: S seeds, T records, L layers, C sizes; NaN where there is none (a run that diverged)."""

    name: str
    label: str
    runs: tuple[Run, ...]
    rate: float
    layers: tuple[str, ...]
    steps: NDArray[np.int64]  # (T,)
    ends: tuple[int, ...]  # (S,) the last record of each run
    shift: Mapping[str, Floats]  # statistic -> (S, T, L)
    whole: Mapping[str, Floats]  # statistic -> (S, T)
    sizes: Floats  # (C,)
    virtual: Mapping[str, Floats]  # statistic -> (S, T', C, L)
    sharpness: Floats  # (S, T')
    converged: Floats  # (S, T') whether the search for it did, 1 or 0

    @property
    def look(self) -> style.LineStyle:
        """How it is drawn."""
        return _LOOKS[self.name.rpartition("-")[2]]

    def relative(self, which: str = "preceding") -> Floats:
        """Log of |G - G'| / |G| (S, T, L) where these layers moved."""
        return _log(self.shift["relative" if which == "preceding" else f"relative_{which}"])

    def at_size(self, unit: str, size: int) -> Floats:
        """Log of the relative shift (S, T', L) for the ``size``-th virtual step."""
        return _log(self.virtual[f"relative_by_{unit}"][:, :, size])

    def over_predicted(self) -> Floats | None:
        """Log of measured over predicted (S, T, L); None where nothing was predicted."""
        predicted = self.shift.get("predicted")
        return None if predicted is None else self.relative() - _log(predicted)


@dataclass(frozen=True)
class _Pair:
    """A network at a learning rate, without and with BN."""

    name: str
    label: str
    none: _Arm
    batch: _Arm

    @property
    def arms(self) -> tuple[_Arm, _Arm]:
        """Without, with."""
        return self.none, self.batch

    @property
    def predicts(self) -> bool:
        """Whether anything was predicted: not with momentum, where a step is not eta times the gradient."""
        return all("predicted" in arm.shift for arm in self.arms)

    @property
    def shows_prediction(self) -> bool:
        """Whether there is a predicted number to draw."""
        return self.predicts and any(loggable(arm.shift["predicted"]).size for arm in self.arms)

    @property
    def diverged(self) -> list[Run]:
        """Runs that did."""
        return [run for arm in self.arms for run in arm.runs if run.diverged]

    @property
    def kept(self) -> NDArray[np.bool_]:
        """(S,) the seeds in which neither run diverged."""
        lost = {run.seed for run in self.diverged}
        return np.array([run.seed not in lost for run in self.none.runs])


@dataclass(frozen=True)
class _Reading:
    """One number with its interval, and what the rule makes of it."""

    name: str
    label: str
    without: float
    with_: float
    estimate: Estimate | None  # of the log ratio, or of the difference; None where it is not defined
    ratio: bool
    left_out: int  # cells
    says: str  # a `Says` of the shift with BN, or "" where it is only shown
    note: str = ""

    @property
    def short(self) -> str:
        """What sentences call it."""
        return _SHORT.get(self.name, self.label)

    @property
    def said(self) -> str:
        """What it says, and why it says no more."""
        return f"{self.says} ({self.note})" if self.note and self.says else self.says

    def bounds(self) -> tuple[float, float, float]:
        """Estimate, low, high as they are shown: a ratio or a difference; NaN where there is none."""
        if self.estimate is None:
            return math.nan, math.nan, math.nan
        numbers = self.estimate.estimate, self.estimate.low, self.estimate.high
        if not self.ratio:
            return numbers
        centre, low, high = (_exp(number) for number in numbers)
        return centre, low, high

    def text(self) -> str:
        """``0.51 [0.45, 0.57]``; with a sign where it is a difference."""
        spec = ".3g" if self.ratio else "+.3g"
        centre, low, high = self.bounds()
        if math.isnan(centre):
            return "not measured"
        return f"{centre:{spec}}" if math.isnan(low) else f"{centre:{spec}} [{low:{spec}}, {high:{spec}}]"


@dataclass(frozen=True)
class _Judged:
    """A pair with all that is said about it."""

    pair: _Pair
    printed: tuple[_Reading, ...]
    controls: tuple[_Reading, ...]
    shown: tuple[_Reading, ...]

    @property
    def verdicts(self) -> tuple[str, str, str]:
        """As printed, after the controls, on both."""
        if self.pair.diverged:
            return "diverged", "diverged", "diverged"
        printed, controls = (combine(one.says for one in part) for part in (self.printed, self.controls))
        return printed, controls, combine((printed, controls))

    def words(self) -> str:
        """One sentence."""
        printed, controls, both = self.verdicts
        if both == "diverged":
            return f"{self.pair.label}: {WORDS[both]} ({_named_runs(self.pair.diverged)})"
        first, second = (", ".join(f"{one.short} {one.says}" for one in part) for part in (self.printed, self.controls))
        return (
            f"{self.pair.label}: {WORDS[both]}. As printed: {WORDS[printed]} ({first}); after the controls: "
            f"{WORDS[controls]} ({second}). Meanwhile the loss fell to {self.progress()}"
        )

    def progress(self) -> str:
        """What is left of the loss at the last record: two arms that did not learn alike are compared all the same."""
        loss = next(one for one in self.shown if one.name == "loss")
        return f"{loss.without:.2g} of its start without and {loss.with_:.2g} with BN"


def draw(folder: Path) -> style.Drawn:
    """Draw the study in ``folder`` into the same folder: ics, ics_controls, ics_readings as .png, .pdf and .csv.

    Raises:
        ValueError: If ``folder`` holds another study, or one that is not finished.
    """
    folder = Path(folder)
    study = load_study(folder)
    judged = [_judge(pair) for pair in _pairs(study)]
    pairs = [one.pair for one in judged]
    curves, controls, readings = _curves(pairs), _controls(pairs), _numbers(judged)
    with style.look():
        figures = (
            (NAME, _figure(study, pairs, curves), curves),
            (f"{NAME}_controls", _controls_figure(study, pairs, controls), controls),
            (f"{NAME}_readings", _readings_figure(study, judged), readings),
        )
    paths: tuple[Path, ...] = ()
    for name, figure, numbers in figures:
        paths += style.save(figure, folder, name, numbers)
    return style.Drawn(paths, _table(judged), _title(study, judged), _caption(study, pairs))


# --- reading


def _pairs(study: Study) -> Iterator[_Pair]:
    for pair in pairs_of(study, NAME):
        none, batch = (_read_arm(study, pair.arm(kind)) for kind in KINDS)
        if len(none.layers) != len(batch.layers):
            raise StudyError(f"{none.name} has {len(none.layers)} layers, {batch.name} {len(batch.layers)}")
        yield _Pair(f"{pair.network}-{pair.rate:g}", pair.title, none, batch)


def _read_arm(study: Study, name: str) -> _Arm:
    shift = load_records(study, probe="covariate_shift", arm=name)
    virtual = load_records(study, probe="virtual_shift", arm=name)
    layers = tuple(layer for layer in dict.fromkeys(shift["layer"].astype(str)) if layer != "-")
    sizes = virtual[virtual["statistic"] == "c"].drop_duplicates("unit").sort_values("unit")["value"]
    of_layers = virtual[virtual["layer"] != "-"]
    steps, seeds = np.array(sorted(set(shift["step"]))), list(study.seeds)
    when = sorted(set(virtual["step"]))
    whole = shift[shift["layer"] == "-"]
    units, of_whole = list(range(len(sizes))), virtual[(virtual["layer"] == "-") & (virtual["unit"] == -1)]
    points = _cubes(of_whole, {"seed": seeds, "step": when})
    return _Arm(
        name=name,
        label=study.label(name),
        runs=tuple(study.run(name, seed) for seed in seeds),
        rate=float(study.setting("training", "learning_rate", arm=name)),
        layers=layers,
        steps=steps,
        ends=tuple(int(shift.loc[shift["seed"] == seed, "step"].max()) for seed in seeds),
        shift=_cubes(shift[shift["layer"] != "-"], {"seed": seeds, "step": list(steps), "layer": list(layers)}),
        whole=_cubes(whole, {"seed": seeds, "step": list(steps)}),
        sizes=sizes.to_numpy(dtype=np.float64),
        virtual=_cubes(of_layers, {"seed": seeds, "step": when, "unit": units, "layer": list(layers)}),
        sharpness=points["sharpness"],
        converged=points["converged"],
    )


def _cubes(table: pd.DataFrame, axes: Mapping[str, Sequence[int] | Sequence[str]]) -> dict[str, Floats]:
    """Each statistic as an array over ``axes``; NaN where there is no row."""
    places: list[NDArray[Any]] = []
    for name, entries in axes.items():
        order = {entry: place for place, entry in enumerate(entries)}
        places.append(np.asarray(table[name].map(order), dtype=np.intp))
    shape = [len(values) for values in axes.values()]
    names, values = table["statistic"].astype(str).to_numpy(), table["value"].to_numpy(dtype=np.float64)
    cubes = {}
    for statistic in dict.fromkeys(names):
        chosen = names == statistic
        cube = np.full(shape, np.nan)
        cube[tuple(place[chosen] for place in places)] = values[chosen]
        cubes[str(statistic)] = cube
    return cubes


def _log(values: Floats) -> Floats:
    """Natural logarithm; NaN where a value is not finite or not positive."""
    usable = np.isfinite(values) & (values > 0)
    return np.log(values, where=usable, out=np.full(values.shape, np.nan))


def _exp(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)


# --- judging


def _judge(pair: _Pair) -> _Judged:
    inner, all_but_first = slice(1, len(pair.none.layers) - 1), slice(1, None)
    printed = (
        _reading(pair, "relative", "relative size", lambda arm: arm.relative()[..., all_but_first]),
        _reading(pair, "cosine", "cosine", lambda arm: arm.shift["cosine"][..., all_but_first], ratio=False),
    )
    excess = _reading(pair, "beyond_following", "(1) preceding / following", lambda arm: _beyond(arm)[..., inner])
    controls = [_unless_nothing_is_beyond(pair, excess, inner)]
    shown = [_reading(pair, "l2", "l2", lambda arm: _log(arm.shift["l2"])[..., all_but_first], judge=False)]
    shown.append(_reading(pair, "relative_late", "relative size, later half", _late, judge=False))
    for unit, label in UNITS.items():
        for place, size in enumerate(pair.none.sizes):
            judge = size == JUDGED
            one = _reading(
                pair,
                f"virtual_{unit}_{size:g}",
                f"(2) c = {size:g}, in {label}",
                partial(_at_size, unit=unit, size=place, layers=all_but_first),
                judge=judge,
            )
            (controls if judge else shown).append(one)
    if pair.predicts:
        controls.append(_over_predicted(pair, all_but_first))
    if all("directional_curvature" in arm.whole for arm in pair.arms):
        shown.append(
            _reading(pair, "eta_curvature", "eta |Hg|/|g|", lambda arm: _steplength(arm, "curvature"), judge=False)
        )
    shown += [
        _reading(pair, "eta_sharpness", "eta x sharpness", lambda arm: _steplength(arm, "sharpness"), judge=False),
        _reading(pair, "loss", "loss, last / first record", _progress, judge=False),
    ]
    return _Judged(pair, printed, tuple(controls), tuple(shown))


def _reading(
    pair: _Pair, name: str, label: str, cells: Callable[[_Arm], Floats], *, ratio: bool = True, judge: bool = True
) -> _Reading:
    """``cells`` gives an arm's numbers, (S, ...) with seeds first: logarithms, or with ``ratio=False`` the numbers."""
    if not pair.kept.any():  # and then an arm may have fewer records than the other
        return _Reading(name, label, math.nan, math.nan, None, ratio, 0, "undecided" if judge else "")
    none, batch = (_by_seed(cells(arm)[pair.kept]) for arm in pair.arms)
    defined = np.isfinite(none) & np.isfinite(batch)
    left_out = int((~defined).sum())
    if not defined.any(axis=1).all():
        return _Reading(name, label, math.nan, math.nan, None, ratio, left_out, "undecided" if judge else "")
    sides = [np.where(defined, side, 0.0).sum(axis=1) / defined.sum(axis=1) for side in (none, batch)]
    found = mean(sides[1] - sides[0])
    without, with_ = (_exp(float(side.mean())) if ratio else float(side.mean()) for side in sides)
    says = _says(found if ratio else _turned(found)) if judge else ""
    return _Reading(name, label, without, with_, found, ratio, left_out, says)


def _progress(arm: _Arm) -> Floats:
    """Log of the loss at the last record over that at the first (S, 1)."""
    loss = _log(arm.whole["loss"])
    return loss[:, -1:] - loss[:, :1]


def _by_seed(cells: Floats) -> Floats:
    """(S, ...) as (S, cells); S may be 0."""
    return cells.reshape(len(cells), math.prod(cells.shape[1:]))


def _says(found: Estimate) -> Says:
    if found.has_interval and found.high < 0:
        return "less"
    return "more" if found.has_interval and found.low > 0 else "undecided"


def _turned(found: Estimate) -> Estimate:
    """Of the opposite number: a larger cosine is less shift."""
    return Estimate(-found.estimate, -found.high, -found.low, found.n, found.method)


def _at_size(arm: _Arm, *, unit: str, size: int, layers: slice) -> Floats:
    return arm.at_size(unit, size)[..., layers]


def _late(arm: _Arm) -> Floats:
    """Log of the relative size in the later half of the records: a plateau at the start is not in it."""
    cells = arm.relative()
    return cells[:, cells.shape[1] // 2 :, 1:]


def _beyond(arm: _Arm) -> Floats:
    return arm.relative() - arm.relative("following")


def _unless_nothing_is_beyond(pair: _Pair, excess: _Reading, inner: slice) -> _Reading:
    """Undecided where neither arm's gradient changes more by what precedes than by what follows: there is no shift."""
    for arm in pair.arms:
        cells = _by_seed(_beyond(arm)[pair.kept][..., inner])
        if len(cells) and np.isfinite(cells).any(axis=1).all() and _says(mean(np.nanmean(cells, axis=1))) == "more":
            return excess
    note = "not above 1 in either arm" if excess.estimate is not None and excess.estimate.has_interval else ""
    return replace(excess, says="undecided", note=note)


def _over_predicted(pair: _Pair, layers: slice) -> _Reading:
    def cells(arm: _Arm) -> Floats:
        found = arm.over_predicted()
        assert found is not None
        return found[..., layers]

    return _reading(pair, "over_predicted", "(3) measured / predicted", cells)


def _steplength(arm: _Arm, unit: str) -> Floats:
    """Log of eta times what the loss is curved by, per seed and record."""
    return _log(arm.rate * (arm.sharpness if unit == "sharpness" else arm.whole["directional_curvature"]))


# --- the numbers that are drawn


def _band(values: Floats) -> tuple[NDArray[np.int64], Floats, Floats, Floats]:
    """n, mean, low, high (T,) over the seeds of (S, T) that have a value there; NaN where none has."""
    finite = np.isfinite(values)
    count = finite.sum(axis=0)
    found = np.full((3, values.shape[1]), np.nan)
    patterns, inverse = np.unique(finite, axis=1, return_inverse=True)
    for k, pattern in enumerate(patterns.T):
        if pattern.any():
            here = inverse.ravel() == k
            band = mean_band(values[pattern][:, here])
            found[:, here] = band.estimate, band.low, band.high
    return count, found[0], found[1], found[2]


def _rows(log: bool, values: Floats, x: Sequence[float] | NDArray[np.int64] | Floats, **labels: object) -> pd.DataFrame:
    """One row a point of a curve; ``values`` (S, len(x)) are logarithms if ``log`` says so."""
    count, *numbers = _band(values)
    with np.errstate(over="ignore"):
        centre, low, high = (np.exp(part) if log else part for part in numbers)
    if not log:
        low, high = np.clip(low, -1.0, 1.0), np.clip(high, -1.0, 1.0)  # a cosine
    return pd.DataFrame({**labels, "x": np.asarray(x), "n": count, "value": centre, "low": low, "high": high})


def _curves(pairs: Sequence[_Pair]) -> pd.DataFrame:
    """Figure ``ics``: l2, relative, cosine and the prediction, of every layer from the second on, against steps."""
    tables = []
    for pair in pairs:
        for arm in pair.arms:
            for statistic in (*STATISTICS, "predicted"):
                if statistic not in arm.shift:
                    continue
                log = statistic != "cosine"
                cube = _log(arm.shift[statistic]) if log else arm.shift[statistic]
                for place in range(1, len(arm.layers)):
                    labels = {"pair": pair.name, "arm": arm.name, "layer": place + 1, "module": arm.layers[place]}
                    tables.append(_rows(log, cube[:, :, place], arm.steps, **labels, statistic=statistic))
    return pd.concat(tables, ignore_index=True).rename(columns={"x": "step"})


def _over_records(logs: Floats) -> Floats:
    """Mean over axis 1 of what is defined; NaN where nothing is."""
    defined = np.isfinite(logs)
    count = defined.sum(axis=1)
    total = np.where(defined, logs, 0.0).sum(axis=1)
    found: Floats = np.divide(total, count, where=count > 0, out=np.full(total.shape, np.nan))
    return found


def _controls(pairs: Sequence[_Pair]) -> pd.DataFrame:
    """Figure ``ics_controls``: geometric means over records, and over layers where the axis is the step's size."""
    tables = []
    for pair in pairs:
        for arm in pair.arms:
            labels = {"pair": pair.name, "arm": arm.name}
            depths = np.arange(1, len(arm.layers) + 1)
            for which in WHICH:
                logs = _over_records(arm.relative(which))
                tables.append(_rows(True, logs, depths, panel="which", **labels, series=which))
            for unit in UNITS:
                at_sizes = [arm.at_size(unit, place)[..., 1:] for place in range(len(arm.sizes))]
                logs = np.stack([_over_records(_by_seed(cells)) for cells in at_sizes], axis=1)
                tables.append(_rows(True, logs, arm.sizes, panel="virtual", **labels, series=unit))
            share = np.exp(np.mean(np.log(depths[:-1] / len(depths)))) if len(depths) > 1 else math.nan
            tables.append(
                pd.DataFrame(
                    {"panel": "virtual", **labels, "series": "predicted", "x": arm.sizes, "value": share * arm.sizes}
                )
            )
            over = arm.over_predicted()
            if over is not None:
                tables.append(_rows(True, _over_records(over), depths, panel="predicted", **labels, series="ratio"))
    return pd.concat(tables, ignore_index=True)


def _numbers(judged: Sequence[_Judged]) -> pd.DataFrame:
    """Every reading, and the verdicts."""
    rows = []
    for one in judged:
        parts = (("as printed", one.printed), ("control", one.controls), ("shown", one.shown))
        for part, readings in parts:
            for r in readings:
                kind, n = ("ratio" if r.ratio else "difference"), (r.estimate.n if r.estimate else 0)
                rows.append(
                    (one.pair.name, part, r.name, r.label, r.without, r.with_, kind, *r.bounds(), n, r.left_out, r.says)
                )
        for name, verdict in zip(("as printed", "after the controls", "both"), one.verdicts, strict=True):
            blank = (math.nan,) * 2
            rows.append((one.pair.name, "verdict", name, "", *blank, "", *blank, math.nan, 0, 0, verdict))
    columns = ["pair", "part", "reading", "label", "without", "with", "kind", "estimate", "low", "high", "seeds"]
    return pd.DataFrame(rows, columns=[*columns, "cells_left_out", "says"])


# --- drawing


def _labelled(layers: int) -> list[int]:
    """The layers (from 1) that are named: all from the second on if they are few, else four from 2 to the last."""
    if layers <= _LABELLED + 1:
        return list(range(2, layers + 1))
    return [int(place) for place in np.linspace(2, layers, _LABELLED)]


def _depth_color(layer: int, layers: int) -> tuple[float, float, float, float]:
    """From dark to light with depth, so that a grey print keeps the order."""
    red, green, blue, alpha = matplotlib.colormaps["viridis"](0.85 * (layer - 2) / max(layers - 2, 1))
    return red, green, blue, alpha


def _figure(study: Study, pairs: Sequence[_Pair], curves: pd.DataFrame) -> Figure:
    figure = style.new_figure(10.6, 3.9 * len(pairs) + 0.2, _caption(study, pairs))
    grid = figure.subplots(2 * len(pairs), 3, squeeze=False)
    for index, pair in enumerate(pairs):
        for half, arm in enumerate(pair.arms):
            row = grid[2 * index + half]
            mine = curves[curves["arm"] == arm.name]
            for axes, (statistic, label) in zip(row, STATISTICS.items(), strict=True):
                _draw_layers(axes, mine, statistic, len(arm.layers))
                axes.set_ylabel(label)
            row[0].set_title(arm.label, fontweight="bold")
            row[0].set_ylabel(f"{STATISTICS['l2']}\nloss / parameter")
            if not half:
                _legend(row[2], pair)
        for column, statistic in enumerate(STATISTICS):
            panels = grid[2 * index : 2 * index + 2, column]
            if statistic == "cosine":
                _fixed(*panels)
            else:
                _share(*panels, across=True)
            for axes, arm in zip(panels, pair.arms, strict=True):
                _mark_divergences(axes, arm)
                count_steps(axes, max(int(each.steps[-1]) for each in pair.arms))
    for axes in grid[-1]:
        axes.set_xlabel("training steps")
    return figure


def _draw_layers(axes: Axes, table: pd.DataFrame, statistic: str, layers: int) -> None:
    named = _labelled(layers)
    for layer in range(2, layers + 1):
        one = table[(table["layer"] == layer) & (table["statistic"] == statistic)]
        color, strong = _depth_color(layer, layers), layer in named
        steps = one["step"].to_numpy()
        axes.plot(steps, one["value"], color=color, lw=1.5 if strong else 0.6, alpha=1.0 if strong else 0.5,
                  zorder=4 if strong else 3)  # fmt: skip
        if strong:
            axes.fill_between(steps, one["low"], one["high"], color=color, alpha=0.15, lw=0, zorder=2)
            if statistic == "relative":
                expected = table[(table["layer"] == layer) & (table["statistic"] == "predicted")]
                axes.plot(expected["step"], expected["value"], color=color, lw=1.1, ls=(0, (2.0, 1.5)), zorder=5)


def _mark_divergences(axes: Axes, arm: _Arm) -> None:
    for end in {end for run, end in zip(arm.runs, arm.ends, strict=True) if run.diverged}:
        axes.axvline(end, color="black", ls=":", lw=1.0)


def _drawn(axes: Axes) -> Floats:
    return np.concatenate([np.empty(0), *(np.asarray(line.get_ydata(), float) for line in axes.get_lines())])


def _share(*panels: Axes, also: Sequence[float] | pd.Series = (), across: bool = False) -> bool:
    """One logarithmic range, from what is drawn as lines (an interval of few seeds may span all) and ``also``.

    A panel without a number that has a place there says so; False where that is every one.
    """
    own = [loggable(_drawn(axes)) for axes in panels]
    data = np.concatenate([*own, loggable(also)])
    for axes, mine in zip(panels, own, strict=True):
        if not mine.size:
            in_words(axes, across=across)
            continue
        axes.set_yscale("log")
        axes.set_ylim(max(data.min() / 2, TINY), min(data.max() * 2, HUGE))
    return any(mine.size for mine in own)


def _fixed(*panels: Axes) -> None:
    """The range of a cosine."""
    for axes in panels:
        if np.isfinite(_drawn(axes)).any():
            axes.set_ylim(-1.08, 1.08)
        else:
            in_words(axes, "no finite number", across=True)


def _legend(axes: Axes, pair: _Pair) -> None:
    layers = len(pair.none.layers)
    handles = [
        Line2D([], [], color=_depth_color(layer, layers), lw=1.8, label=f"layer {layer}") for layer in _labelled(layers)
    ]
    if pair.shows_prediction:
        handles.append(Line2D([], [], color="black", lw=1.1, ls=(0, (2.0, 1.5)), label="predicted"))
    if layers > _LABELLED + 1:
        handles.append(Line2D([], [], color=style.GREY, lw=0.6, label="others"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)


def _controls_figure(study: Study, pairs: Sequence[_Pair], numbers: pd.DataFrame) -> Figure:
    figure = style.new_figure(11.6, 2.55 * len(pairs) + 0.7, _controls_caption(study, pairs))
    grid = figure.subplots(len(pairs), 4, squeeze=False)
    for row, pair in zip(grid, pairs, strict=True):
        mine = numbers[numbers["pair"] == pair.name]
        for axes, arm, short in zip(row, pair.arms, NAMES.values(), strict=False):
            for which in WHICH:
                one = _series(mine, "which", arm.name, which)
                _draw_line(axes, one, _WHICH_COLORS[which], _WHICH_DASHES[which], which)
            axes.set_title(f"{pair.label}\n{short}: which layers moved")
            axes.set_xlabel("layer")
            axes.set_ylabel(STATISTICS["relative"])
        _share(row[0], row[1])
        _draw_virtual(row[2], pair, mine)
        _draw_over_predicted(row[3], pair, mine)
        for axes in (row[0], row[1], row[3]):
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    above, below = (grid[0][column].get_legend_handles_labels() for column in (0, 2))
    # Filled column by column: which layers moved (and the prediction) above, the arms of virtual steps below.
    handles, labels = (
        [one for both in zip_longest(up, down) for one in both if one is not None]
        for up, down in zip(above, below, strict=True)
    )
    figure.legend(handles, labels, loc="outside upper left", ncols=(len(labels) + 1) // 2, fontsize=8)
    return figure


def _series(numbers: pd.DataFrame, panel: str, arm: str, series: str) -> pd.DataFrame:
    chosen = (numbers["panel"] == panel) & (numbers["arm"] == arm) & (numbers["series"] == series)
    return numbers[chosen & numbers["value"].notna()]


def _draw_line(
    axes: Axes, one: pd.DataFrame, color: str, dashes: str | tuple[float, tuple[float, ...]], label: str,
    *, marker: str = "", fill: bool = True,
) -> None:  # fmt: skip
    axes.plot(one["x"], one["value"], color=color, ls=dashes, lw=1.4, label=label, marker=marker, ms=4,
              mfc=color if fill else "white", zorder=4)  # fmt: skip
    axes.fill_between(one["x"], one["low"], one["high"], color=color, alpha=0.14, lw=0)


def _draw_virtual(axes: Axes, pair: _Pair, numbers: pd.DataFrame) -> None:
    for unit, marker, fill in (("curvature", "o", True), ("sharpness", "s", False)):
        for arm in pair.arms:
            one = _series(numbers, "virtual", arm.name, unit)
            label = f"{arm.label.rpartition(', ')[2]}, {UNITS[unit]}"
            _draw_line(axes, one, arm.look.color, arm.look.dashes, label, marker=marker, fill=fill)
    one = _series(numbers, "virtual", pair.none.name, "predicted")
    if _share(axes, also=one["value"]):
        axes.plot(one["x"], one["value"], color="black", lw=1.0, ls=":", label="predicted, 1 / (|Hg|/|g|)", zorder=3)
    plain_ticks(axes, pair.none.sizes)
    axes.set_title("\nvirtual steps")
    axes.set_xlabel("size c of the step, in the unit named")
    axes.set_ylabel(STATISTICS["relative"])


def _draw_over_predicted(axes: Axes, pair: _Pair, numbers: pd.DataFrame) -> None:
    axes.set_title("\nmeasured / predicted")
    axes.set_xlabel("layer")
    if not pair.predicts:
        in_words(axes, "nothing is predicted:\n" + UNPREDICTED.replace(" is ", "\nis "))
        return
    for arm in pair.arms:
        one = _series(numbers, "predicted", arm.name, "ratio")
        _draw_line(axes, one, arm.look.color, arm.look.dashes, arm.label.rpartition(", ")[2], marker="o")
    axes.set_ylabel("ratio")
    if _share(axes, also=[1.0]):
        axes.axhline(1.0, color="black", lw=0.8)


def _readings_figure(study: Study, judged: Sequence[_Judged]) -> Figure:
    """Ratios left, the cosine's difference right; one block a pair."""
    count = sum(len(one.printed) + len(one.controls) for one in judged)
    figure = style.new_figure(10.6, 0.27 * (count + len(judged)) + 0.9, _readings_caption(study, judged))
    left, right = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
    place, ticks, labels = 0, [], []
    for one in judged:
        ticks.append(place)
        labels.append(_headline(one))
        place -= 1
        for reading in (*one.printed, *one.controls):
            ticks.append(place)
            words = reading.note if one.pair.diverged else reading.said
            labels.append(f"{reading.label}: {words}" if words else reading.label)
            _draw_reading(left if reading.ratio else right, reading, place)
            place -= 1
    left.set_yticks(ticks, labels)
    for label in left.get_yticklabels():
        if label.get_text() in {_headline(one) for one in judged}:
            label.set_fontweight("bold")
    left.set_xscale("log")
    left.axvline(1.0, color="black", lw=0.8)
    right.axvline(0.0, color="black", lw=0.8)
    right.xaxis.set_major_locator(MaxNLocator(3))
    left.set_xlabel("with BN / without BN (left of 1: less with BN)")
    right.set_xlabel("cosine, with - without\n(right of 0: less)")
    left.set_ylim(place + 0.4, 0.6)
    return figure


def _headline(one: _Judged) -> str:
    return f"{one.pair.label}: {WORDS[one.verdicts[2]]}"


def _draw_reading(axes: Axes, reading: _Reading, place: int) -> None:
    colors = {"less": style.WITH_BN.color, "more": style.WITHOUT_BN.color}
    color = colors.get(reading.says, style.GREY)
    centre, low, high = reading.bounds()
    if math.isnan(centre):
        write(axes, reading.text(), place, axes.get_yaxis_transform(), color=style.GREY, fontsize=7)
        return
    if math.isfinite(low) and math.isfinite(high):
        axes.plot([low, high], [place, place], color=color, lw=2.0, solid_capstyle="butt")
    marker = {"less": "<", "more": ">"}.get(reading.says, "o")
    if not reading.ratio:
        marker = {"<": ">", ">": "<"}.get(marker, marker)
    axes.plot(centre, place, marker=marker, ms=6, color=color, mfc="white" if reading.says == "undecided" else color)


# --- saying


def _table(judged: Sequence[_Judged]) -> pd.DataFrame:
    rows = []
    for one in judged:
        for reading in (*one.printed, *one.controls, *one.shown):
            if reading.name.startswith("virtual") and not reading.says:
                continue  # other sizes: in the figure and its CSV
            says = "" if one.pair.diverged else reading.said
            numbers = ("" if math.isnan(x) else f"{x:.3g}" for x in (reading.without, reading.with_))
            rows.append((one.pair.label, reading.label, *numbers, reading.text(), says))
        names = ("VERDICT as printed", "VERDICT after the controls", "VERDICT on both")
        for name, verdict in zip(names, one.verdicts, strict=True):
            rows.append((one.pair.label, name, "", "", "", WORDS[verdict]))
    columns = ["network", "reading", "without BN", "with BN", "with / without (cosine: -)", "says"]
    return pd.DataFrame(rows, columns=columns)


def _title(study: Study, judged: Sequence[_Judged]) -> str:
    said = [f"{one.words()}." for one in judged]
    return "\n".join(
        part for part in ("Internal covariate shift with BN against without.", *said, warned(_searches(judged))) if part
    )


def _searches(judged: Sequence[_Judged]) -> list[Floats]:
    """How those for the largest eigenvalue ended."""
    return [arm.converged for one in judged for arm in one.pair.arms]


def _seeds(study: Study) -> str:
    seeds = style.and_list([str(seed) for seed in study.seeds])
    if len(study.seeds) == 1:
        return f"One seed ({seeds}), so there is no interval and nothing is decided."
    return f"n = {len(study.seeds)} seeds ({seeds}); bands and bars: 95% Student t interval over seeds."


def _named_runs(runs: Sequence[Run]) -> str:
    return style.and_list([f"{run.arm} seed {run.seed}" for run in runs])


def _lost(pairs: Sequence[_Pair], what: str) -> str:
    """A sentence on the runs that diverged and ``what`` a figure does with them; empty where none did."""
    lost = [run for pair in pairs for run in pair.diverged]
    return f" Diverged: {_named_runs(lost)}; {what}. Their pairs have no verdict." if lost else ""


def _nothing_kept(pairs: Sequence[_Pair]) -> str:
    """Of the pairs of which no seed is left."""
    gone = [pair.label for pair in pairs if not pair.kept.any()]
    return f", which leaves none of {style.and_list(gone)}" if gone else ""


def _ended(pairs: Sequence[_Pair]) -> str:
    """What a curve over seeds is where some of them ended."""
    gone = [arm.name for pair in pairs for arm in pair.arms if all(run.diverged for run in arm.runs)]
    left = f", and of {style.and_list(gone)} none came to the end" if gone else ""
    return f"dotted: the last record of each; a mean is over the seeds that still train{left}"


def _protocol(study: Study, pairs: Sequence[_Pair]) -> str:
    """Networks and batches, in words."""
    said = []
    for name in dict.fromkeys(pair.name.partition("-")[0] for pair in pairs):
        arm = next(pair.none.name for pair in pairs if pair.name.startswith(f"{name}-"))
        training = study.setting("training", arm=arm)
        batch = "full batch" if training["batch"] == "full" else f"batches of {training['batch']}"
        layers = len(next(pair.none.layers for pair in pairs if pair.name.startswith(f"{name}-")))
        data = {"mlp": "MNIST", "linear": "a linear teacher, squared distance summed over examples", "vgg": "CIFAR-10"}
        momentum = f", momentum {training['momentum']:g}" if training["momentum"] else ""
        said.append(f"{name}: {layers} layers on {data.get(name, name)}, {batch}, SGD{momentum}")
    return "; ".join(said) + "."


def _caption(study: Study, pairs: Sequence[_Pair]) -> str:
    many = any(len(pair.none.layers) > _LABELLED + 1 for pair in pairs)
    every = study.setting("measures", "shift_every")
    means = "Lines are means over seeds, geometric but for the cosine. " if len(study.seeds) > 1 else ""
    predicted = (
        "Dashed: the relative size that a locally quadratic loss predicts for layer i of L, eta (|Hg|/|g|) (i-1)/L "
        "(eta is the learning rate, g the loss's whole gradient, H its Hessian), which knows nothing of normalizers. "
    )
    if not any(pair.predicts for pair in pairs):
        predicted = f"Nothing is predicted: {UNPREDICTED}. "
    elif not any(pair.shows_prediction for pair in pairs):
        predicted = ""
    return (
        "Internal covariate shift, Definition 2.1 of Santurkar et al. (2018): G is the gradient by a layer's "
        "parameters (with its normalizer's), G' the same on the same batch after all layers before it have taken their "
        "step, the layer itself and those behind it not. Every layer from the second on (the first has none before it: "
        f"exactly 0), every {every} steps; colour: depth, from dark to light"
        + (", four layers heavy and the others thin. " if many else ". ")
        + f"{_seeds(study)} {means}{predicted}Both arms of a network share their axes' range."
        f"{_lost(pairs, _ended(pairs))}\n{_protocol(study, pairs)}"
    )


def _controls_caption(study: Study, pairs: Sequence[_Pair]) -> str:
    measures = study.setting("measures")
    right = (
        "Right: Definition 2.1 as measured over eta (|Hg|/|g|) (i-1)/L, one if the loss is a quadratic and nothing "
        "else. "
    )
    if not any(pair.predicts for pair in pairs):
        right = f"Right: no prediction to compare with, {UNPREDICTED}. "
    dotted = "Dotted: c (i-1)/L, what a quadratic loss predicts in the unit of |Hg|/|g|, for either arm. "
    if not any(
        loggable(arm.virtual[f"relative_by_{unit}"]).size for pair in pairs for arm in pair.arms for unit in UNITS
    ):
        dotted = ""
    searches = [arm.converged for pair in pairs for arm in pair.arms]
    lost = _lost(pairs, "their records up to there are in the means")
    return (
        "Left half: relative change of a layer's gradient when other layers take their step: those before it "
        "(Definition 2.1), those behind it (which cannot shift its input), it alone, or all. Third: steps that are not "
        "taken, theta - (c/b) g with b the curvature along the gradient |Hg|/|g| (filled circles) or the largest "
        "eigenvalue of the Hessian (hollow squares), so that c is the step in the network's own unit; preceding layers "
        f"moved, geometric mean over layers 2 to L. {dotted}{right}Geometric means over records "
        f"({measures['shift_every']} steps apart, virtual steps {measures['virtual_every']}). {unconverged(searches)} "
        f"{_seeds(study)}{lost}\n{_protocol(study, pairs)}"
    )


def _readings_caption(study: Study, judged: Sequence[_Judged]) -> str:
    left_out = sum(r.left_out for one in judged for r in (*one.printed, *one.controls))
    pairs = [one.pair for one in judged]
    over = "; (3) measured over predicted. " if any(pair.predicts for pair in pairs) else f"; no third, {UNPREDICTED}. "
    if len(study.seeds) > 1:
        marks = (
            "Triangles point to less or more: the interval excludes 1 (or 0). Circles: undecided, the interval does "
            "not exclude it, or there is none, or the label says why it does not count. "
        )
    else:
        marks = "Circles: undecided, there is no interval. "
    said = (
        "What the verdicts rest on, paired by seed: ratios of geometric means over layers and records, with BN over "
        "without, and the difference of mean cosines. As printed: relative size and cosine, layers 2 to L. Controls: "
        "(1) preceding over following layers moved, layers 2 to L-1 (on average as many move before as behind); (2) "
        f"virtual steps of size c = 1 in either unit{over}{marks}Where readings contradict each other the verdict is "
        f"inconclusive. {unconverged(_searches(judged))} {_seeds(study)}"
    )
    if left_out:
        said += f" {left_out} cells (layer x record x seed) are undefined or 0 in one arm and are left out of both."
    what = f"these seeds are in no reading of their pair, with or without BN{_nothing_kept(pairs)}"
    return said + _lost(pairs, what) + "\n" + "\n".join(one.words() + "." for one in judged)
