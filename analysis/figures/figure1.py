"""Figure 1 of Ioffe & Szegedy (2015), section 4.1, from the records of the study of the same name.

(a) held-out accuracy against training steps, dashed without and solid with batch normalization: the mean over S seeds
and its pointwise Student interval, clipped to [0, 1]. (b, c) the 15th, 50th and 85th percentiles of the input to one
unit of the last hidden layer, without and with it, for the first seed.

The paper shows "a typical sigmoid". Here it is computed: per arm, of U units with trajectories over T steps and Q = 3
percentiles, the one nearest to the unit-wise median trajectory (`analysis.statistics.typical_unit`). All other units
are drawn behind it, so that nobody has to take its word for them. What leaves an axis is counted in the caption.

The tests lean on planted records: a known typical unit, known passages, runs that never arrive or diverge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from analysis import style
from analysis.load import NO_MODE, Run, Study, StudyError, load_records, load_study
from analysis.statistics import (
    Band,
    Passage,
    first_passage,
    mean,
    mean_band,
    median_passage,
    paired_difference,
    typical_unit,
)

NAME = "figure1"
TITLE = "Figure 1 of Ioffe & Szegedy (2015): a network on MNIST without and with batch normalization"
ARMS = ("none", "batch")
PROBE = "activations.input"
TARGETS = (0.90, 0.95)

_JUDGED_FROM = 1000  # the study's rule
_STYLES = (style.WITHOUT_BN, style.WITH_BN)
_FLOOR = 0.7  # where the paper's accuracy axis begins
_MILESTONES = tuple(m * 10**k for k in range(2, 7) for m in (1, 2, 5))
_GRID_COLUMNS = 10


@dataclass(frozen=True)
class _Accuracy:
    """Held-out accuracy of one arm: one curve a run, and their mean where all of them are."""

    label: str
    runs: tuple[Run, ...]
    curves: tuple[pd.Series, ...]  # step -> accuracy, one a run
    steps: NDArray[np.int64]  # (T,) evaluations that every run has
    band: Band  # (T,)

    @property
    def diverged(self) -> tuple[int, ...]:
        """Seeds whose run diverged."""
        return tuple(run.seed for run in self.runs if run.diverged)

    def passages(self, target: float) -> list[Passage]:
        return [
            first_passage(curve.index.to_numpy(), curve.to_numpy(), target, diverged=run.diverged)
            for run, curve in zip(self.runs, self.curves, strict=True)
        ]


@dataclass(frozen=True)
class _Inputs:
    """Percentiles of the input to each of U units of one arm's last hidden layer, in one run."""

    label: str
    run: Run
    layer: str
    activation: str
    mode: str
    examples: int
    percentiles: tuple[float, ...]  # Q of them, 0 to 100, increasing
    steps: NDArray[np.int64]  # (T,)
    values: NDArray[np.float64]  # (U, T, Q)
    typical: int
    shown: int


def draw(folder: Path, *, unit: int | None = None, grid: bool = False) -> style.Drawn:
    """Draw the study in ``folder`` into the same folder: figure1.png, .pdf and .csv.

    Args:
        folder: Holds study.json and the runs.
        unit: Show this unit of the last hidden layer instead of the typical one (files named figure1_unit<K>).
        grid: Also draw every unit of both arms as small multiples (figure1_grid).

    Raises:
        ValueError: If ``folder`` holds another study or one that is not finished, or the layer has no such ``unit``.
    """
    folder = Path(folder)
    study = load_study(folder)
    names = [arm.name for arm in study.arms]
    if study.name != NAME or not set(ARMS) <= set(names):
        raise StudyError(
            f"{NAME} shows arms {' and '.join(ARMS)}; {folder} holds {study.name!r} with {', '.join(names)}"
        )

    accuracies = [_read_accuracy(study, arm) for arm in ARMS]
    inputs = [_read_inputs(study, arm, unit) for arm in ARMS]
    view = _view(inputs)
    caption = _caption(study, accuracies, inputs, view)
    with style.look():
        figure = _figure(accuracies, inputs, view, caption)
    name = NAME if unit is None else f"{NAME}_unit{unit}"
    numbers = [rows for arm in accuracies for rows in _accuracy_numbers(arm)]
    numbers += [_unit_numbers(panel, arm) for panel, arm in zip("bc", inputs, strict=True)]
    paths = style.save(figure, folder, name, pd.concat(numbers))
    if grid:
        limits = _grid_limits(inputs)
        with style.look():
            figure = _grid(inputs, limits, _grid_caption(inputs, limits))
        paths += style.save(figure, folder, f"{NAME}_grid", pd.concat([_unit_numbers("grid", arm) for arm in inputs]))
    return style.Drawn(
        paths, _table(accuracies, inputs, _read_spreads(study, inputs[0])), f"{TITLE}. {_verdict(accuracies)}", caption
    )


def _verdict(accuracies: Sequence[_Accuracy]) -> str:
    """What the study's rule makes of the accuracies; a network that diverged is behind from there on."""
    ahead = {"with BN": 0, "without BN": 0}
    pairs = 0
    without, with_ = accuracies
    for a, b in zip(without.curves, with_.curves, strict=True):
        steps = sorted(step for step in {*a.index, *b.index} if step >= _JUDGED_FROM)
        pairs += len(steps)
        for step in steps:
            x, y = a.get(step, -1.0), b.get(step, -1.0)
            ahead["with BN"] += y > x
            ahead["without BN"] += x > y
    rule = f"higher held-out accuracy in every seed at every evaluation from step {_JUDGED_FROM} on"
    if not pairs:
        return f"No verdict: training ended before step {_JUDGED_FROM}"
    if ahead["with BN"] == pairs:
        return f"The claim that BN trains faster is supported: {rule} ({pairs} of {pairs})"
    if ahead["without BN"] == pairs:
        return f"The claim that BN trains faster is refuted: without it, {rule} ({pairs} of {pairs})"
    return f"Undecided whether BN trains faster: with BN higher accuracy at {ahead['with BN']} of {pairs} evaluations"


def _read_accuracy(study: Study, arm: str) -> _Accuracy:
    table = load_records(study, probe="log", statistic="test_accuracy", mode="population", arm=arm)
    runs = tuple(study.run(arm, seed) for seed in study.seeds)
    curves = tuple(table[table["seed"] == run.seed].set_index("step")["value"].sort_index() for run in runs)
    steps = sorted(set.intersection(*(set(curve.index) for curve in curves)))
    band = mean_band(np.stack([curve.loc[steps].to_numpy() for curve in curves]), within=(0.0, 1.0))
    return _Accuracy(study.label(arm), runs, curves, np.array(steps, dtype=np.int64), band)


def _read_inputs(study: Study, arm: str, unit: int | None) -> _Inputs:
    run = study.run(arm, study.seeds[0])
    layer = f"hidden{len(study.setting('network', 'hidden'))}.nonlinearity"
    percentiles = tuple(sorted(float(q) for q in study.setting("measures", "percentiles")))
    names = [f"p{q:g}" for q in percentiles]

    def read(statistic: list[str], stop: int | None = None) -> pd.DataFrame:
        return load_records(
            study,
            probe=PROBE,
            layer=layer,
            statistic=statistic,
            mode="batch",
            steps=(None, stop),
            arm=arm,
            seed=run.seed,
        )

    table = read(names)
    wide = table.pivot(index=["unit", "step"], columns="statistic", values="value")[names].sort_index()
    units, steps = wide.index.unique("unit"), wide.index.unique("step").sort_values()
    if len(wide) != len(units) * len(steps) or list(units) != list(range(len(units))):
        raise StudyError(f"run {run.path.name} does not hold every percentile of every unit of {layer} at every step")
    if unit is not None and not 0 <= unit < len(units):
        raise ValueError(f"unit must lie in 0..{len(units) - 1}, the units of {layer}, got {unit}")
    values = wide.to_numpy(dtype=np.float64).reshape(len(units), len(steps), len(names))
    typical = typical_unit(values)
    counts = read(["count", "nonfinite"], stop=int(steps[0]) + 1)
    return _Inputs(
        label=study.label(arm),
        run=run,
        layer=layer,
        activation=str(study.setting("network", "activation")),
        mode=str(table["mode"].iloc[0]),
        examples=int(counts.loc[counts["unit"] == typical, "value"].sum()),
        percentiles=percentiles,
        steps=steps.to_numpy(dtype=np.int64),
        values=values,
        typical=typical,
        shown=typical if unit is None else unit,
    )


def _view(inputs: Sequence[_Inputs]) -> tuple[float, float]:
    """The common vertical range of (b) and (c).

    It holds the shown units' percentiles whole, and of the others as much as fits without shrinking the shown ones
    below half of the height: the others' middle 90% at most.
    """
    shown = np.concatenate([arm.values[arm.shown].ravel() for arm in inputs])
    low, high = float(np.nanmin(shown)), float(np.nanmax(shown))
    others = np.concatenate([arm.values.ravel() for arm in inputs])
    wide_low, wide_high = (float(v) for v in np.nanquantile(others, (0.05, 0.95)))
    room = max(high - low, 1e-3)
    bottom, top = min(low, max(wide_low, low - room / 2)), max(high, min(wide_high, high + room / 2))
    margin = 0.04 * (top - bottom)
    return bottom - margin, top + margin


def _figure(
    accuracies: Sequence[_Accuracy], inputs: Sequence[_Inputs], view: tuple[float, float], caption: str
) -> Figure:
    figure = style.new_figure(9.6, 3.3, caption)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.12, 1, 1))
    _draw_accuracy(left, accuracies)
    right.sharey(middle)
    for letter, axes, arm, look in zip("bc", (middle, right), inputs, _STYLES, strict=True):
        _draw_inputs(axes, arm, look, view)
        axes.set_title(f"({letter}) {arm.label}: unit {arm.shown}")
    middle.set_ylim(*view)
    middle.set_ylabel(f"input to the {inputs[0].activation}")
    right.tick_params(labelleft=False)
    last = max(int(curve.index[-1]) for arm in accuracies for curve in arm.curves)
    for axes in (left, middle, right):
        axes.set_xlim(0, last)
        axes.set_xlabel("training steps")
        axes.xaxis.set_major_formatter(FuncFormatter(style.thousands))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return figure


def _draw_accuracy(axes: Axes, accuracies: Sequence[_Accuracy]) -> None:
    bottom = _accuracy_floor(accuracies)
    for arm, look in zip(accuracies, _STYLES, strict=True):
        axes.plot(arm.steps, arm.band.estimate, color=look.color, ls=look.dashes, zorder=look.order, label=arm.label)
        axes.fill_between(arm.steps, arm.band.low, arm.band.high, color=look.color, alpha=0.16, lw=0, zorder=1)
    for arm, look in zip(accuracies, _STYLES, strict=True):
        for curve in arm.curves:  # after the first divergence there is no mean of all seeds
            alone = curve[curve.index >= arm.steps[-1]]
            axes.plot(alone.index, alone, color=look.color, ls=look.dashes, lw=0.9, alpha=0.7, zorder=look.order)
        ends = [(c.index[-1], max(c.iloc[-1], bottom)) for r, c in zip(arm.runs, arm.curves, strict=True) if r.diverged]
        if ends:
            seeds = style.and_list([str(seed) for seed in arm.diverged])
            axes.plot(
                *np.array(ends).T,
                ls="none",
                marker="X",
                ms=7,
                color=look.color,
                mec="white",
                mew=0.8,
                zorder=6,
                clip_on=False,
                label=f"diverged: seed{'s' * (len(ends) > 1)} {seeds}",
            )
    axes.set_ylim(bottom, 1.0)
    axes.set_ylabel("held-out accuracy")
    axes.set_title(f"(a) accuracy, {_seed_count(accuracies[0])}")
    axes.legend(loc="lower right" if bottom else "best", handlelength=2.6)


def _draw_inputs(axes: Axes, arm: _Inputs, look: style.LineStyle, view: tuple[float, float]) -> None:
    behind = np.delete(arm.values, arm.shown, axis=0)
    halo = [withStroke(linewidth=3.4, foreground="white")]
    for q, percentile in enumerate(arm.percentiles):
        middle = percentile == 50
        lines = [np.column_stack([arm.steps, curve]) for curve in behind[:, :, q]]
        faint = LineCollection(lines, colors="#555555", linewidths=0.5, alpha=0.2 if middle else 0.11, rasterized=True)
        axes.add_collection(faint)
        curve = arm.values[arm.shown, :, q]
        axes.plot(arm.steps, curve, color=look.color, lw=2.0 if middle else 1.3, zorder=4, path_effects=halo)
    known = np.flatnonzero(np.isfinite(arm.values[arm.shown]).all(axis=1))
    if known.size:
        end = int(known[-1])
        heights = style.apart(arm.values[arm.shown, end].tolist(), gap=0.045 * (view[1] - view[0]))
        for percentile, height in zip(arm.percentiles, heights, strict=True):
            axes.annotate(
                style.ordinal(percentile),
                (arm.steps[end], height),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=look.color,
                annotation_clip=False,
            )
    if arm.run.diverged:
        axes.axvline(arm.steps[-1], color=look.color, lw=0.9, ls=":", zorder=3)
        axes.annotate(
            "diverged",
            (arm.steps[-1], 0.02),
            xycoords=axes.get_xaxis_transform(),
            xytext=(2, 0),
            textcoords="offset points",
            rotation=90,
            fontsize=7.5,
            color=look.color,
        )


def _accuracy_floor(accuracies: Sequence[_Accuracy]) -> float:
    """The paper's axis, unless an arm ends below or barely above its beginning: then all of 0 to 1."""
    return _FLOOR if min(arm.band.estimate[-1] for arm in accuracies) > _FLOOR + 0.05 else 0.0


def _grid_limits(inputs: Sequence[_Inputs]) -> tuple[float, float]:
    """The vertical range of every cell: 99% of what is drawn, and zero."""
    everything = np.concatenate([arm.values.ravel() for arm in inputs])
    low, high = (float(v) for v in np.nanquantile(everything, (0.005, 0.995)))
    low, high = min(low, 0.0), max(high, 0.0)
    return (low, high) if high > low else (-1.0, 1.0)


def _grid(inputs: Sequence[_Inputs], limits: tuple[float, float], caption: str) -> Figure:
    """All cells of an arm in one set of axes: hundreds of axes would take a minute to lay out."""
    rows = max(-(-len(arm.values) // _GRID_COLUMNS) for arm in inputs)
    figure = style.new_figure(13.0, 0.62 * rows + 0.75, caption)
    for axes, arm, look in zip(figure.subplots(1, 2), inputs, _STYLES, strict=True):
        _draw_grid(axes, arm, look, limits)
        ending = f", diverged after step {arm.steps[-1]}" if arm.run.diverged else ""
        axes.set_title(f"{arm.label}, seed {arm.run.seed}{ending}", fontsize=11)
        axes.set_xlim(-0.45, _GRID_COLUMNS - 0.08)
        axes.set_ylim(-rows - 0.3, 0.0)
    return figure


def _draw_grid(axes: Axes, arm: _Inputs, look: style.LineStyle, limits: tuple[float, float]) -> None:
    """Cell u stands at column u mod 10, row u div 10; in it, time runs right and the input up, cut at ``limits``."""
    cell = 0.9
    low, high = limits
    span = max(int(arm.steps[-1] - arm.steps[0]), 1)
    across = cell * (arm.steps - arm.steps[0]) / span
    up = cell * (np.clip(arm.values, low, high) - low) / (high - low)
    zero = cell * (0.0 - low) / (high - low)
    bands, curves, zeros = [], [], []
    for u in range(len(arm.values)):
        x, y = float(u % _GRID_COLUMNS), -1.0 - u // _GRID_COLUMNS
        known = np.isfinite(up[u]).all(axis=1)
        right, height = x + across[known], y + up[u, known]
        bands.append(np.column_stack([np.r_[right, right[::-1]], np.r_[height[:, 0], height[::-1, -1]]]))
        curves += [np.column_stack([right, height[:, q]]) for q in _inner(arm.percentiles)]
        zeros.append([(x, y + zero), (x + cell, y + zero)])
        marked = u == arm.typical
        axes.add_patch(
            Rectangle(
                (x, y), cell, cell, fill=False, ec="black" if marked else "#C8C8C8", lw=1.8 if marked else 0.5, zorder=5
            )
        )
        weight = "bold" if marked else "normal"
        axes.text(x + 0.03, y + cell - 0.03, str(u), fontsize=6, va="top", ha="left", weight=weight, zorder=6)
    axes.add_collection(LineCollection(zeros, colors="#B0B0B0", linewidths=0.5, zorder=1))
    axes.add_collection(PolyCollection(bands, facecolors=look.color, alpha=0.3, linewidths=0, zorder=2))
    axes.add_collection(LineCollection(curves, colors=look.color, linewidths=0.9, zorder=3))
    corner = -1.0 - (len(arm.values) - 1) // _GRID_COLUMNS
    for value, height in ((low, 0.0), (high, cell), (0.0, zero)):
        if value == 0 or abs(height - zero) > 0.12:
            axes.text(-0.06, corner + height, f"{value:.2g}", fontsize=7, va="center", ha="right")
    for step, right, side in ((arm.steps[0], 0.0, "left"), (arm.steps[-1], cell, "right")):
        axes.text(right, corner - 0.05, style.thousands(int(step)), fontsize=7, va="top", ha=side)
    axes.set_axis_off()


def _inner(percentiles: Sequence[float]) -> Sequence[int]:
    """Which percentiles are lines rather than the edges of the band: all but the outermost, or the only one."""
    return range(1, len(percentiles) - 1) if len(percentiles) > 1 else (0,)


def _seed_count(arm: _Accuracy) -> str:
    return "1 seed" if len(arm.runs) == 1 else f"{len(arm.runs)} seeds"


def _unit_numbers(panel: str, arm: _Inputs) -> pd.DataFrame:
    """Every percentile of every unit, in the figure's long format; the shown unit is marked."""
    units, steps, percentiles = arm.values.shape
    unit = np.repeat(np.arange(units), steps * percentiles)
    return pd.DataFrame(
        {
            "panel": panel,
            "arm": arm.run.arm,
            "seed": str(arm.run.seed),
            "series": np.where(unit == arm.shown, "shown unit", "other unit"),
            "unit": pd.array(unit, dtype="Int64"),
            "statistic": np.tile([f"p{q:g}" for q in arm.percentiles], units * steps),
            "step": np.tile(np.repeat(arm.steps, percentiles), units),
            "value": arm.values.ravel(),
        }
    )


def _accuracy_numbers(arm: _Accuracy) -> Iterable[pd.DataFrame]:
    def rows(
        series: str, seed: str, statistic: str, steps: NDArray[np.int64], values: NDArray[np.float64]
    ) -> pd.DataFrame:
        columns = {"panel": "a", "arm": arm.runs[0].arm, "seed": seed, "series": series, "unit": pd.NA}
        return pd.DataFrame(columns | {"statistic": statistic, "step": steps, "value": values})

    pooled = " ".join(str(run.seed) for run in arm.runs)
    yield rows("mean over seeds", pooled, "test_accuracy", arm.steps, arm.band.estimate)
    if len(arm.runs) > 1:
        yield rows("interval low", pooled, "test_accuracy", arm.steps, arm.band.low)
        yield rows("interval high", pooled, "test_accuracy", arm.steps, arm.band.high)
    for run, curve in zip(arm.runs, arm.curves, strict=True):
        steps, values = curve.index.to_numpy(dtype=np.int64), curve.to_numpy(dtype=np.float64)
        yield rows("one seed", str(run.seed), "test_accuracy", steps, values)


def _read_spreads(study: Study, arm: _Inputs) -> list[tuple[int, list[NDArray[np.float64]]]]:
    """Distance of the outer percentiles at the first and last step that every run has: median unit, (S,) per arm."""
    outer = [f"p{q:g}" for q in (arm.percentiles[0], arm.percentiles[-1])]
    if outer[0] == outer[1]:
        return []
    clock = load_records(study, probe=PROBE, layer=arm.layer, statistic=outer[0], unit=0, mode="batch")
    steps = set.intersection(*(set(run["step"]) for _, run in clock.groupby(["arm", "seed"], observed=True)))
    found = []
    for step in sorted({min(steps), max(steps)}):
        table = load_records(study, probe=PROBE, layer=arm.layer, statistic=outer, mode="batch", steps=(step, step + 1))
        wide = table.pivot(index=["arm", "seed", "unit"], columns="statistic", values="value")
        spread = (wide[outer[1]] - wide[outer[0]]).groupby(["arm", "seed"], observed=True).median()
        found.append((step, [spread[name].loc[list(study.seeds)].to_numpy(dtype=np.float64) for name in ARMS]))
    return found


def _table(
    accuracies: Sequence[_Accuracy], inputs: Sequence[_Inputs], spreads: list[tuple[int, list[NDArray[np.float64]]]]
) -> pd.DataFrame:
    """The figure in numbers: accuracy on the way and at the end, steps to targets, how far the inputs spread."""
    rows = []
    for step in _milestones(accuracies):
        cells, sides = [], []
        for arm in accuracies:
            side = [float(curve.loc[step]) for curve in arm.curves if step in curve.index]
            lost = len(arm.curves) - len(side)
            cells.append(f"{lost} of {len(arm.curves)} diverged" if lost else mean(side, within=(0.0, 1.0)).text())
            sides.append([] if lost else side)
        difference = paired_difference(sides[1], sides[0]).text("+.3f") if all(sides) else ""
        rows.append((f"accuracy at {step}", *cells, difference))
    for target in TARGETS:
        found = [median_passage(arm.passages(target)) for arm in accuracies]
        cells = [f"{one.text()} ({one.reached} of {one.n})" for one in found]
        rows.append((f"steps to {target:.2f}, median", *cells, ""))
    low, high = (style.ordinal(inputs[0].percentiles[k]) for k in (0, -1))
    for step, spread in spreads:
        name = f"{high} - {low} percentile at {step}"
        finite = [bool(np.isfinite(side).all()) for side in spread]
        cells = [mean(side).text(".2f") if ok else "not finite" for side, ok in zip(spread, finite, strict=True)]
        rows.append((name, *cells, paired_difference(spread[1], spread[0]).text("+.2f") if all(finite) else ""))
    labels = [arm.label for arm in accuracies]
    return pd.DataFrame(rows, columns=["", *labels, f"{labels[1]} minus {labels[0]}"])


def _milestones(accuracies: Sequence[_Accuracy]) -> list[int]:
    """The last evaluation of all, and up to three round step counts before it."""
    evaluated = {int(step) for arm in accuracies for curve in arm.curves for step in curve.index}
    last = max(evaluated)
    return [*[step for step in _MILESTONES if step in evaluated and step < last][-3:], last]


def _caption(
    study: Study, accuracies: Sequence[_Accuracy], inputs: Sequence[_Inputs], view: tuple[float, float]
) -> str:
    return "\n".join((_caption_accuracy(accuracies), _caption_inputs(inputs, view), _caption_choices(study)))


def _caption_accuracy(accuracies: Sequence[_Accuracy]) -> str:
    runs = accuracies[0].runs
    seeds = style.and_list([str(run.seed) for run in runs])
    said = ["(a) Share of the test images classified correctly (population statistics) against training steps."]
    if len(runs) == 1:
        said.append(f"One run a curve (seed {seeds}), so there is no interval.")
    else:
        said.append(
            f"Lines: mean of {len(runs)} seeds ({seeds}). Bands: 95% Student t interval of that mean, point by point, "
            "clipped to [0, 1]."
        )
    bottom = _accuracy_floor(accuracies)
    hidden = [(arm.label, arm.steps[arm.band.estimate < bottom]) for arm in accuracies]
    below = [
        f"{label} {'at' if steps.size == 1 else 'until'} step {steps[-1]}" for label, steps in hidden if steps.size
    ]
    if bottom == 0:
        said.append(f"The axis shows all of 0 to 1; the paper's begins at {_FLOOR}.")
    elif below:
        said.append(
            f"The axis begins at {bottom} as in the paper; lower means, {style.and_list(below)}, are in the CSV."
        )
    for arm in accuracies:
        if not arm.diverged:
            continue
        ends = [
            f"seed {run.seed} after step {curve.index[-1]}"
            for run, curve in zip(arm.runs, arm.curves, strict=True)
            if run.diverged
        ]
        said.append(f"Training {arm.label} diverged (crosses: the last evaluation): {style.and_list(ends)}.")
        if len(arm.diverged) < len(arm.runs):
            said.append("There the mean and its band end; thin lines are the other seeds, one by one.")
    return " ".join(said)


def _caption_inputs(inputs: Sequence[_Inputs], view: tuple[float, float]) -> str:
    first = inputs[0]
    percentiles = style.and_list([style.ordinal(q) for q in first.percentiles])
    normalized = [letter for letter, arm in zip("bc", inputs, strict=True) if arm.mode != NO_MODE]
    said = [
        f"(b, c) {percentiles} percentiles of the input to one {first.activation} unit of the last hidden layer, seed "
        f"{first.run.seed}, over {first.examples} training images that stay the same"
        + (f"; in ({', '.join(normalized)}) normalized by their own statistics (batch mode)." if normalized else ".")
    ]
    rule = f"of {len(first.values)} units the one whose curves lie nearest (L2) to the unit-wise median curves"
    named = style.and_list([f"{arm.typical} {arm.label}" for arm in inputs])
    if all(arm.shown == arm.typical for arm in inputs):
        said.append(f"Coloured: the typical unit, computed and not picked: {rule}, {named}.")
    else:
        said.append(f"Coloured: unit {first.shown}, as asked for. The typical unit ({rule}) is {named}.")
    said.append("Grey: all other units.")
    leaving = []
    for arm in inputs:
        others = np.delete(arm.values, arm.shown, axis=0)
        outside = ((others < view[0]) | (others > view[1])).any(axis=(1, 2))
        if outside.any():
            leaving.append(f"{int(outside.sum())} of {len(others)} {arm.label}")
    if leaving:
        said.append(f"Some leave the axis for a time or for good ({style.and_list(leaving)}).")
    said += [f"Dotted: the last step before the run {arm.label} diverged." for arm in inputs if arm.run.diverged]
    return " ".join(said)


def _caption_choices(study: Study) -> str:
    """What the paper leaves open, what it fixes, and what these runs did about both."""
    training, data, network = (study.setting(name) for name in ("training", "data", "network"))
    normalizer = study.setting("normalizer", arm=ARMS[1])
    plain = training["momentum"] == 0 and training["weight_decay"] == 0
    optimizer = f"{'plain ' if plain else ''}SGD with learning rate {training['learning_rate']:g}"
    if not plain:
        optimizer += f", momentum {training['momentum']:g}, weight decay {training['weight_decay']:g}"
    pixels = f"binary pixels (white above {data['threshold']:g})" if data["binarize"] else "grey pixels"
    hidden = network["hidden"]
    layers = f"{len(hidden)} x {hidden[0]}" if len(set(hidden)) == 1 else " + ".join(str(width) for width in hidden)
    layers += f" {network['activation']} units"
    facts = (  # ours, the paper's, whether they are the same
        (pixels, "binary", data["binarize"]),
        (layers, "3 x 100 sigmoid units", layers == "3 x 100 sigmoid units"),
        (f"batches of {training['batch']}", "60", training["batch"] == 60),
        (f"{training['steps']} steps", "50000", training["steps"] == 50_000),
    )
    kept = [ours for ours, _, same in facts if same]
    changed = [f"{ours} (there {theirs})" for ours, theirs, same in facts if not same]
    weights = f"weights N(0, {network['init_std']:g}\N{SUPERSCRIPT TWO})"
    said = [
        f"Chosen where the paper is silent: {optimizer}; {weights}, biases 0; BN momentum {normalizer['momentum']:g} "
        f"and epsilon {normalizer['epsilon']:g}; the images of (b, c)."
    ]
    if kept:
        said.append(f"As in the paper: MNIST, {style.and_list(kept)}.")
    if changed:
        said.append(f"Unlike it: {style.and_list(changed)}.")
    return " ".join(said)


def _grid_caption(inputs: Sequence[_Inputs], limits: tuple[float, float]) -> str:
    first = inputs[0]
    names = [style.ordinal(q) for q in first.percentiles]
    inner = style.and_list([names[q] for q in _inner(first.percentiles)] or ["none"])
    band = f"Band: {names[0]} to {names[-1]} percentile; line: {inner}." if len(names) > 1 else f"Line: {inner}."
    cut = style.and_list(
        [
            f"{int(((arm.values < limits[0]) | (arm.values > limits[1])).any(axis=(1, 2)).sum())} {arm.label}"
            for arm in inputs
        ]
    )
    return (
        f"Every unit of the last hidden layer, seed {first.run.seed}: percentiles of the input to the "
        f"{first.activation} over {first.examples} training images that stay the same, against training steps. {band} "
        "The number is the unit's (--unit K draws it large). Heavy frame: the typical unit, whose curves lie nearest "
        f"(L2) to the unit-wise median curves. All share one scale, {limits[0]:.2g} to {limits[1]:.2g}, with a line "
        f"at 0; what lies beyond is cut at the frame (units touched: {cut})."
    )
