"""Drift inside the MNIST network with and without batch normalization, from the records of the study of that name.

Three pictures and one table. ``drift``: how far each hidden layer moves between two records, at three points, with the
sampling floor as a band, beside the percentiles of one unit. ``drift_referee``: the relative reductions on which the
referee's test turns, at every point and in every mode. ``drift_progress``: what remains of minibatch-to-minibatch
changes when sampling is taken out, and the path travelled between equal levels of training loss.

The referee's test, as read here. For a layer's input let ``m_k`` be a unit's mean over the fixed examples at the end of
epoch k, ``s_k`` its standard deviation. Drift is ``|m_k - m_{k-1}|`` and ``|s_k - s_{k-1}|``, averaged over units and
the first K epochs; the reduction is 1 - with/without BN per layer and moment, averaged over both, one number a seed.
The tests plant moments whose reductions are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from analysis import style
from analysis.load import Study, StudyError, load_records, load_study
from analysis.statistics import Estimate, first_passage, mean, mean_band, relative_reduction, typical_unit

NAME = "drift"
ARMS = ("none", "batch")
POINTS = {
    "before": "before the normalizer",
    "after": "after the normalizer",
    "nonlinear": "after the nonlinearity",
}
MODES = ("batch", "population")
DISTANCES = {
    "mean_shift": "mean",
    "std_shift": "sd",
    "wasserstein1": "W1",
    "shape_wasserstein1": "shape W1",
}
MOMENTS = ("mean", "sd")
BAR, ENDS = 0.25, (0, 1000, 2000, 3000, 4000, 5000)  # the referee's, in our reading

_STYLES = dict(zip(ARMS, (style.WITHOUT_BN, style.WITH_BN), strict=True))
# Where BN fixes a unit's mean and variance by construction, and where what it fixed is only passed on.
_PINNED = {("after", "batch"): "pinned by BN", ("nonlinear", "batch"): "follows from the pin"}
_LEVELS = 8
_FURTHEST = -3.0  # reductions below it are said, not drawn

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Reduction:
    """The referee's number at one point, in one mode and scale."""

    point: str
    mode: str
    scale: str  # "unscaled" | "in sd"
    estimate: Estimate
    without: float
    with_: float
    ends: tuple[int, ...]  # of the epochs, and the start

    @property
    def pinned(self) -> str:
        """Why the number proves nothing; empty where it may."""
        return _PINNED.get((self.point, self.mode), "")

    @property
    def verdict(self) -> str:
        """What the interval says about the referee's bar, where the test is the referee's."""
        if self.ends != ENDS:
            return f"no verdict from epochs that end at {style.and_list([str(end) for end in self.ends[1:]])}"
        if not self.estimate.has_interval:
            return "one seed, undecided"
        if self.estimate.high < BAR:
            return "under 25%"
        return "over 25%" if self.estimate.low > BAR else "undecided"


def draw(folder: Path) -> style.Drawn:
    """Draw the study in ``folder`` into the same folder: drift, drift_referee, drift_progress as .png, .pdf and .csv.

    Raises:
        ValueError: If ``folder`` holds another study, one that is not finished, or one with a run that diverged (drift
            between a network and infinity compares with nothing).
    """
    folder = Path(folder)
    study = load_study(folder)
    names = [arm.name for arm in study.arms]
    if study.name != NAME or not set(ARMS) <= set(names):
        raise StudyError(f"{NAME} shows arms {' and '.join(ARMS)}; {folder} holds {study.name!r}, {', '.join(names)}")
    lost = [run.path.name for run in study.runs if run.diverged]
    if lost:
        raise StudyError(f"drift is compared between whole trainings; diverged: {', '.join(lost)}")
    layers = len(study.setting("network", "hidden"))
    curves = _curves(study, layers)
    reductions = list(_referee(study, layers))
    minibatch, path = _minibatch(study, layers), _path(study, layers)
    with style.look():
        figures = {
            NAME: _figure(study, curves, layers),
            f"{NAME}_referee": _referee_figure(study, reductions),
            f"{NAME}_progress": _progress_figure(study, minibatch, path, layers),
        }
    numbers = {
        NAME: pd.concat([curves, _ribbons(study, layers)], ignore_index=True),
        f"{NAME}_referee": _referee_numbers(reductions),
        f"{NAME}_progress": pd.concat([minibatch, path], ignore_index=True),
    }
    paths: tuple[Path, ...] = ()
    for name, figure in figures.items():
        paths += style.save(figure, folder, name, numbers[name])
    return style.Drawn(paths, _table(study, curves, reductions), _title(study, reductions), _caption(study))


# --- reading


def _probe(kind: str, point: str, mode: str, arm: str) -> str:
    """A probe's name; a network without a normalizer was measured once for both modes."""
    return f"{kind}.{point}.{'batch' if arm == 'none' else mode}"


def _layer(point: str, index: int) -> str:
    return f"hidden{index}.{'nonlinearity' if point == 'nonlinear' else 'normalizer'}"


def _curves(study: Study, layers: int) -> pd.DataFrame:
    """Layer medians of every distance and of its floor: one row a point, mode, layer, arm, seed, step, statistic."""
    wanted = [name for distance in DISTANCES for name in (distance, f"{distance}_floor", f"{distance}_floor95")]
    tables = []
    for arm in ARMS:
        probes = {place: _probe("drift.previous", *place, arm) for place in product(POINTS, MODES)}
        table = load_records(study, probe=[*dict.fromkeys(probes.values())], statistic=wanted, unit=-1, arm=arm)
        for (point, mode), probe in probes.items():
            tables.append(table[table["probe"] == probe].assign(point=point, mode=mode))
    joined = pd.concat(tables, ignore_index=True)
    joined["layer"] = joined["layer"].astype(str).str.extract(r"hidden(\d+)", expand=False).astype(int)
    joined["panel"] = "drift"
    columns = ["panel", "point", "mode", "layer", "arm", "seed", "step", "statistic", "value"]
    found = joined[joined["layer"] <= layers][columns]
    return found.sort_values(columns[:-1], kind="stable", ignore_index=True)


def _matrix(curves: pd.DataFrame, **where: Any) -> tuple[NDArray[np.int64], Floats]:
    """(T,) steps and (S, T) values of the rows that match ``where``."""
    chosen = curves
    for column, value in where.items():
        chosen = chosen[chosen[column] == value]
    wide = chosen.pivot(index="seed", columns="step", values="value")
    return wide.columns.to_numpy(dtype=np.int64), wide.to_numpy(dtype=np.float64)


def _referee(study: Study, layers: int) -> Iterator[_Reduction]:
    measures = study.setting("measures")
    ends = [k * measures["epoch"] for k in range(measures["epochs"] + 1)]
    tables = {arm: _moments_at(study, arm, ends) for arm in ARMS}
    for point in POINTS:
        for mode in MODES:
            moments = {arm: _moments(study, tables[arm], point, mode, arm, layers, ends) for arm in ARMS}
            for scale in ("unscaled", "in sd"):
                drift = {arm: _epochwise(*moments[arm], scaled=scale == "in sd") for arm in ARMS}
                reduction = (1 - drift["batch"] / drift["none"]).mean(axis=(1, 2))  # (S,) over layers and moments
                without, with_ = (float(drift[arm].mean()) for arm in ARMS)
                yield _Reduction(point, mode, scale, mean(reduction), without, with_, tuple(ends))


def _moments_at(study: Study, arm: str, ends: Sequence[int]) -> pd.DataFrame:
    """Every mean and variance of one arm at the ends of epochs."""
    probes = dict.fromkeys(_probe("activations", point, mode, arm) for point, mode in product(POINTS, MODES))
    steps = (min(ends), max(ends) + 1)
    table = load_records(study, probe=[*probes], statistic=["mean", "variance"], arm=arm, steps=steps)
    return table[table["step"].isin(ends)]


def _moments(
    study: Study, table: pd.DataFrame, point: str, mode: str, arm: str, layers: int, ends: Sequence[int]
) -> tuple[list[Floats], list[Floats]]:
    """Means and standard deviations at the ends of epochs: for each layer an array (S, K + 1, U)."""
    table = table[table["probe"] == _probe("activations", point, mode, arm)]
    missing = sorted(set(ends) - set(table["step"]))
    if missing:
        raise StudyError(f"the referee's test needs records at steps {ends}; {missing} are missing: train longer")
    found: tuple[list[Floats], list[Floats]] = ([], [])
    for index in range(1, layers + 1):
        of_layer = table[table["layer"] == _layer(point, index)]
        for kept, statistic in zip(found, ("mean", "variance"), strict=True):
            wide = of_layer[of_layer["statistic"] == statistic].pivot(
                index=["seed", "step"], columns="unit", values="value"
            )
            values = wide.sort_index().to_numpy(dtype=np.float64).reshape(len(study.seeds), len(ends), -1)
            kept.append(values if statistic == "mean" else np.sqrt(values))
    return found


def _epochwise(means: list[Floats], sds: list[Floats], *, scaled: bool) -> Floats:
    """(S, L, 2) drift of means and standard deviations, averaged over units and epochs."""
    found = []
    for mu, sd in zip(means, sds, strict=True):
        size = np.sqrt((sd[:, 1:] ** 2 + sd[:, :-1] ** 2) / 2) if scaled else 1.0
        found.append([np.abs(np.diff(values, axis=1) / size).mean(axis=(1, 2)) for values in (mu, sd)])
    return np.array(found).transpose(2, 0, 1)


def _ribbons(study: Study, layers: int) -> pd.DataFrame:
    """Percentiles of the typical unit before each normalizer, first seed, as Figure 1 has them after it."""
    names = [f"p{q:g}" for q in sorted(study.setting("measures", "percentiles"))]
    tables = []
    for arm in ARMS:
        probe = _probe("activations", "before", "batch", arm)
        whole = load_records(study, probe=probe, statistic=names, arm=arm, seed=study.seeds[0])
        for index in range(1, layers + 1):
            table = whole[whole["layer"] == _layer("before", index)]
            wide = table.pivot(index=["unit", "step"], columns="statistic", values="value")[names].sort_index()
            units = len(wide.index.unique("unit"))
            chosen = typical_unit(wide.to_numpy(dtype=np.float64).reshape(units, -1, len(names)))
            one = table[table["unit"] == chosen].assign(panel="ribbon", point="before", mode="batch", layer=index)
            tables.append(one)
    columns = ["panel", "point", "mode", "layer", "arm", "seed", "step", "unit", "statistic", "value"]
    return pd.concat(tables, ignore_index=True)[columns]


def _minibatch(study: Study, layers: int) -> pd.DataFrame:
    """Root mean squares over units, averaged over hidden layers, per seed and step."""
    tables = []
    points = {point: f"minibatch_shift.{point}" for point in ("before", "nonlinear")}
    whole = load_records(study, probe=[*points.values()], unit=-1)
    for point, probe in points.items():
        wanted = [_layer(point, index) for index in range(1, layers + 1)]
        table = whole[(whole["probe"] == probe) & whole["layer"].isin(wanted)]
        averaged = table.groupby(["arm", "seed", "step", "statistic"], observed=True)["value"].mean().reset_index()
        tables.append(averaged.assign(panel="minibatch", point=point))
    return pd.concat(tables, ignore_index=True)


def _path(study: Study, layers: int) -> pd.DataFrame:
    """Path of the means from the start to first passages of levels of training loss, summed over records.

    A level is one that every run reaches; the path is the layers' mean. ``after`` and ``by`` bound the passage.
    """
    losses = load_records(study, probe="log", statistic="fixed_loss")
    runs = {
        (run.arm, run.seed): losses[(losses["arm"] == run.arm) & (losses["seed"] == run.seed)] for run in study.runs
    }
    highest = min(float(table.sort_values("step")["value"].iloc[0]) for table in runs.values())
    lowest = max(float(table["value"].min()) for table in runs.values())
    if not lowest < highest:
        return pd.DataFrame(columns=["panel", "point", "arm", "seed", "level", "after", "by", "value"])
    levels = np.linspace(highest, lowest, _LEVELS + 1)[1:]
    rows = []
    points = {point: f"drift.path.{point}" for point in ("before", "nonlinear")}
    whole = load_records(study, probe=[*points.values()], statistic="mean_shift", unit=-1)
    for point, probe in points.items():
        wanted = [_layer(point, index) for index in range(1, layers + 1)]
        drift = whole[(whole["probe"] == probe) & whole["layer"].isin(wanted)]
        for (arm, seed), table in runs.items():
            table = table.sort_values("step")
            mine = drift[(drift["arm"] == arm) & (drift["seed"] == seed)]
            steps = mine.groupby("step")["value"].mean().sort_index()
            for level in levels:
                passage = first_passage(table["step"], table["value"], float(level), rising=False)
                travelled = float(steps[steps.index <= passage.by].sum())
                rows.append(("path", point, arm, seed, float(level), passage.after, passage.by, travelled))
    return pd.DataFrame(rows, columns=["panel", "point", "arm", "seed", "level", "after", "by", "value"])


# --- drawing


def _figure(study: Study, curves: pd.DataFrame, layers: int) -> Figure:
    figure = style.new_figure(11.0, 2.05 * layers + 0.7, _caption(study))
    grid = figure.subplots(layers, 4, squeeze=False, sharex=True)
    ribbons = _ribbons(study, layers)
    for row, index in zip(grid, range(1, layers + 1), strict=True):
        for axes, (point, label) in zip(row, POINTS.items(), strict=False):
            _draw_drift(axes, curves, point, index, study)
            pinned = _PINNED.get((point, "batch"), "")
            axes.set_title(f"{label}\n({pinned})" if index == 1 and pinned else label if index == 1 else "")
            if point == "before":
                axes.set_ylabel(f"hidden layer {index}\ndrift of the mean, in sd")
        _share_limits(row[:3])
        _draw_ribbon(row[3], ribbons[ribbons["layer"] == index])
        row[3].set_title("one unit before the normalizer" if index == 1 else "")
        row[3].set_ylabel("pre-activation")
    for axes in grid[-1]:
        axes.set_xlabel("training steps")
    for axes in grid.flat:
        _count_steps(axes)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
    return figure


def _draw_drift(axes: Axes, curves: pd.DataFrame, point: str, layer: int, study: Study) -> None:
    here = curves[(curves["point"] == point) & (curves["mode"] == "batch") & (curves["layer"] == layer)]
    for arm in ARMS:
        look, mine = _STYLES[arm], here[here["arm"] == arm]
        steps, values = _matrix(mine, statistic="mean_shift")
        moved = (values > 0).all(axis=0)  # a logarithm needs it; a network at rest has nothing to draw
        steps, band = steps[moved], mean_band(np.log(values[:, moved]))
        label = study.label(arm)
        centre, low, high = (np.exp(part) for part in (band.estimate, band.low, band.high))
        axes.plot(steps, centre, color=look.color, ls=look.dashes, lw=1.2, zorder=look.order, label=label)
        axes.fill_between(steps, low, high, color=look.color, alpha=0.16, lw=0)
    floors = [
        float(_matrix(here[here["arm"] == arm], statistic=f"mean_shift_{kind}")[1].mean())
        for kind in ("floor", "floor95")
        for arm in ARMS
    ]
    label = "sampling floor, mean to 95th percentile"
    axes.axhspan(min(floors[:2]), max(floors[2:]), color="#9A9A9A", alpha=0.35, lw=0, zorder=0.5, label=label)
    axes.set_yscale("log")


def _share_limits(row: Sequence[Axes]) -> None:
    """One vertical range for a layer's three points: the pinned one would otherwise be drawn as large as the others."""
    data = [line.get_ydata() for axes in row for line in axes.get_lines()]
    values = np.concatenate([np.asarray(part, dtype=np.float64) for part in data])
    values = values[np.isfinite(values) & (values > 0)]
    for axes in row:
        axes.set_ylim(values.min() / 1.5, values.max() * 1.5)
    for axes in row[1:]:
        axes.tick_params(labelleft=False)


def _draw_ribbon(axes: Axes, table: pd.DataFrame) -> None:
    for arm in ARMS:
        look = _STYLES[arm]
        wide = table[table["arm"] == arm].pivot(index="step", columns="statistic", values="value")
        names = sorted(wide.columns, key=lambda name: float(str(name)[1:]))
        axes.fill_between(wide.index, wide[names[0]], wide[names[-1]], color=look.color, alpha=0.18, lw=0)
        for name in names[1:-1] or names[:1]:
            axes.plot(wide.index, wide[name], color=look.color, ls=look.dashes, lw=1.2, zorder=look.order)


def _referee_figure(study: Study, reductions: Sequence[_Reduction]) -> Figure:
    figure = style.new_figure(9.6, 0.32 * len(reductions) + 0.9, _referee_caption(study, reductions))
    axes = figure.subplots()
    for place, one in enumerate(reversed(reductions)):
        color = "#9A9A9A" if one.pinned else style.WITH_BN.color
        found = one.estimate
        if found.estimate < _FURTHEST:
            doubt = f" [{1 - found.high:.3g}, {1 - found.low:.3g}]" if found.has_interval else ""
            label = f"\N{LEFTWARDS ARROW} {1 - found.estimate:.3g}{doubt} times the drift"
            axes.annotate(label, (_FURTHEST, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
            continue
        if found.has_interval:
            axes.plot([found.low, found.high], [place, place], color=color, lw=2.2, solid_capstyle="butt")
        marker = "s" if one.scale == "unscaled" else "o"
        axes.plot(found.estimate, place, marker=marker, ms=6, color=color, mfc="white" if one.pinned else color)
    axes.axvline(BAR, color=style.VERMILION, ls="--", lw=1.2)
    axes.axvline(0, color="black", lw=0.8)
    labels = [
        f"{POINTS[one.point]}, {one.mode} mode, {one.scale}" + (f" ({one.pinned})" if one.pinned else "")
        for one in reversed(reductions)
    ]
    axes.set_yticks(range(len(labels)), labels)
    low = min([0.0, *(r.estimate.low if r.estimate.has_interval else r.estimate.estimate for r in reductions)])
    axes.set_xlim(max(low * 1.08 - 0.05, _FURTHEST), 1.05)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_xlabel("reduction of epoch-wise drift by BN (negative: BN moves more)")
    axes.annotate(
        "25%",
        (BAR, 1),
        xycoords=axes.get_xaxis_transform(),
        xytext=(3, 2),
        textcoords="offset points",
        color=style.VERMILION,
        fontsize=8,
    )
    return figure


def _progress_figure(study: Study, minibatch: pd.DataFrame, path: pd.DataFrame, layers: int) -> Figure:
    figure = style.new_figure(10.6, 3.7, _progress_caption(study, path))
    left, middle, right = figure.subplots(1, 3)
    for axes, point in zip((left, middle), ("before", "nonlinear"), strict=True):
        for arm in ARMS:
            look = _STYLES[arm]
            for statistic, width, name in (
                ("mean_change", 0.8, "total"),
                ("mean_change_parameters", 2.0, "parameters"),
            ):
                where = {"point": point, "arm": arm, "statistic": statistic}
                steps, values = _matrix(minibatch, **where)
                label = f"{study.label(arm)}: {name}"
                axes.plot(steps, values.mean(axis=0), color=look.color, ls=look.dashes, lw=width, label=label)
        axes.set_yscale("log")
        axes.set_title(f"batch to batch, {POINTS[point]}")
        axes.set_xlabel("training steps")
        _count_steps(axes)
    left.set_ylabel("change of a batch mean, in sd")
    for arm in ARMS:
        look = _STYLES[arm]
        for point, marker in (("before", "o"), ("nonlinear", "^")):
            mine = path[(path["arm"] == arm) & (path["point"] == point)]
            if mine.empty:
                continue
            wide = mine.pivot(index="seed", columns="level", values="value")
            values, levels = wide.to_numpy(dtype=np.float64), wide.columns.to_numpy(dtype=np.float64)
            moved = (values > 0).all(axis=0)
            levels, band = levels[moved], mean_band(np.log(values[:, moved]))
            label = f"{study.label(arm)}, {POINTS[point]}"
            centre, low, high = (np.exp(part) for part in (band.estimate, band.low, band.high))
            right.plot(levels, centre, color=look.color, ls=look.dashes, lw=1.3, marker=marker, ms=4, label=label)
            right.fill_between(levels, low, high, color=look.color, alpha=0.14, lw=0)
    right.invert_xaxis()
    right.set_title("path to equal training loss")
    right.set_xlabel("training loss reached, nats")
    right.set_ylabel("path of the means so far, in sd")
    right.set_yscale("log")
    for axes, handles in ((left, left), (right, right)):
        axes.legend(*handles.get_legend_handles_labels(), fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.17))
    return figure


def _count_steps(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(FuncFormatter(style.thousands))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))


# --- saying


def _table(study: Study, curves: pd.DataFrame, reductions: Sequence[_Reduction]) -> pd.DataFrame:
    """Point x mode x distance x layer, averaged over records; then the referee's numbers."""
    rows = []
    for (point, mode), distance, layer in product(product(POINTS, MODES), DISTANCES, sorted(curves["layer"].unique())):
        where = {"point": point, "mode": mode, "layer": layer}
        sides, floors = [], []
        for arm in ARMS:
            sides.append(_matrix(curves, arm=arm, statistic=distance, **where)[1].mean(axis=1))
            floors.append(_matrix(curves, arm=arm, statistic=f"{distance}_floor", **where)[1].mean())
        # What is pinned are mean and sd: the shape, which W1 sees too, is free.
        pinned = _PINNED.get((point, mode), "") if distance in ("mean_shift", "std_shift") else ""
        numbers = (f"{sides[0].mean():.2g}", f"{sides[1].mean():.2g}", _reduction_text(sides[1], sides[0]))
        star = "*" if pinned else ""
        rows.append(
            (f"{point}, {mode}", DISTANCES[distance], str(layer), *numbers[:2], numbers[2] + star, f"{max(floors):.2g}")
        )
    for one in reductions:
        text = _percent(one.estimate) + ("*" if one.pinned else "")
        scale = "epoch" if one.scale == "unscaled" else "epoch/sd"
        rows.append((f"{one.point}, {one.mode}", scale, "all", f"{one.without:.2g}", f"{one.with_:.2g}", text, ""))
    without, with_ = (study.label(arm) for arm in ARMS)
    return pd.DataFrame(rows, columns=["point, mode", "drift", "layer", without, with_, "reduction", "floor"])


def _reduction_text(a: Floats, b: Floats) -> str:
    if min(a.min(), b.min()) <= 0:
        return "a drift of 0"
    return _percent(relative_reduction(a, b))


def _percent(reduction: Estimate) -> str:
    """``84% [83%, 85%]``; as a factor where BN multiplies the drift by more than ten."""
    if reduction.estimate < -9:
        doubt = f" [{1 - reduction.high:.3g}, {1 - reduction.low:.3g}]" if reduction.has_interval else ""
        return f"{1 - reduction.estimate:.3g}{doubt} times the drift"
    return reduction.text(".0%")


def _readings(reductions: Sequence[_Reduction]) -> tuple[_Reduction, _Reduction]:
    """Inputs of layers 2 to L, unscaled as the source reads: in batch mode, where BN pins them, and in population."""
    by_mode = {r.mode: r for r in reductions if (r.point, r.scale) == ("nonlinear", "unscaled")}
    return by_mode["batch"], by_mode["population"]


def _title(study: Study, reductions: Sequence[_Reduction]) -> str:
    (batch, population), count = _readings(reductions), len(study.seeds)
    return (
        "Drift without and with BN (mean over records of the median over units; point: before or after the normalizer,"
        " or after the nonlinearity). Referee's 25% test, inputs of layers 2 to L, unscaled: batch mode"
        f" {_percent(batch.estimate)} ({batch.pinned}), population mode {_percent(population.estimate)}"
        f" ({population.verdict}). "
        + (f"Brackets: 95% Student t over {count} seeds" if count > 1 else "One seed, no intervals")
        + "; *: BN pins it, or passes the pin on"
    )


def _seeds(study: Study) -> str:
    seeds = style.and_list([str(seed) for seed in study.seeds])
    if len(study.seeds) == 1:
        return f"One seed ({seeds}), so there is no interval."
    return f"Mean of {len(study.seeds)} seeds ({seeds}); bands and bars: 95% Student t interval over seeds."


def _caption(study: Study) -> str:
    measures, training = study.setting("measures"), study.setting("training")
    return (
        f"Drift of the mean between records {measures['every']} steps apart, |difference| / sd of a unit over "
        f"{measures['sample']} training images that stay the same, median over units, batch mode. {_seeds(study)} "
        "Means and intervals are taken on the logarithm. Grey: what two random halves of the images differ by at one "
        "step, from its mean to its 95th percentile (averaged over training, the wider of both arms): an unpaired "
        "measurement on half of the images could not tell "
        "less from nothing.\n"
        "Middle left: after BN in batch mode a unit's mean is beta and its variance gamma squared, whatever the layers "
        "below do, and what the nonlinearity passes on is a function of it. That stillness is a construction, not a "
        "finding.\n"
        f"Right: the 15th to 85th percentile and the median of one unit's values before the normalizer, seed "
        f"{study.seeds[0]}; per arm and layer the typical unit, nearest (L2) to the unit-wise median curves. MNIST, "
        f"SGD with learning rate {training['learning_rate']:g}, batches of {training['batch']}."
    )


def _referee_caption(study: Study, reductions: Sequence[_Reduction]) -> str:
    measures, (batch, population) = study.setting("measures"), _readings(reductions)
    outcomes = {
        "under 25%": "reduced covariate shift does not account for the speed-up, by this test",
        "over 25%": "the explanation is not refuted by this test",
    }
    outcome = outcomes.get(population.verdict, f"the test does not decide ({population.verdict})")
    free = [r for r in reductions if not r.pinned]
    over, under = (sum(r.verdict == verdict for r in free) for verdict in ("over 25%", "under 25%"))
    return (
        "A test proposed in a review of the paper: if BN reduces the epoch-wise drift of layer inputs' means and "
        "standard deviations over the first 5000 steps by less than 25% on average, reduced covariate shift does not "
        f"account for the speed-up. Our reading: an epoch is {measures['epoch']} steps, {measures['epochs']} of them; "
        "the inputs of layers 2 to L are the values after the nonlinearity; |differences| averaged over units and "
        "epochs; reduction = 1 - with/without BN per layer and moment, averaged; paired by seed. "
        f"{_seeds(study)} Squares: in the activations' own unit, as the source reads; circles: divided by sd. Hollow "
        "grey: BN fixes mean and variance there, or just before, whatever the network does; it does not count.\n"
        f"Outcome for the inputs of layers 2 to L, unscaled: {_percent(batch.estimate)} in batch mode, which follows "
        f"from the construction; {_percent(population.estimate)} in population mode, where it does not: {outcome}. "
        f"Of the {len(free)} readings that are free to move, {over} are over 25% and {under} under. The source says "
        "ImageNet and Inception; this is MNIST and a sigmoid network."
    )


def _progress_caption(study: Study, path: pd.DataFrame) -> str:
    measures = study.setting("measures")
    said = (
        "Left, middle: the change of a unit's mean from one minibatch at step t to another at step t + 1 (thin, what "
        "is often plotted as drift) and the part of it that the parameters made (thick: the same images at both "
        "steps); "
        f"the rest is sampling. Root mean square over units, averaged over hidden layers, mean of {len(study.seeds)} "
        f"seed{'s' * (len(study.seeds) > 1)}, batch mode.\n"
    )
    if path.empty:
        return said + "Right: no level of training loss was reached by all runs."
    return said + (
        f"Right: |drift| of the means summed over records {measures['path_every']} steps apart, from the start to the "
        f"first passage of a level of the loss on fixed training images (population statistics), for levels that every "
        f"run reaches. {_seeds(study)} A network that learns faster moves faster; at one level both learned as much."
    )


def _referee_numbers(reductions: Sequence[_Reduction]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            (r.point, r.mode, r.scale, r.pinned, r.without, r.with_, r.estimate.estimate, r.estimate.low,
             r.estimate.high, r.estimate.n, r.verdict)
            for r in reductions
        ],
        columns=["point", "mode", "scale", "pinned", "without", "with", "reduction", "low", "high", "seeds", "verdict"],
    )  # fmt: skip
