"""Singular values between consecutive normalized layers, from the records of the study of that name.

Three pictures and one table. ``jacobian`` and ``jacobian_orthogonal`` (one a law of the initial weights): how the
singular values of the last two maps are distributed, over training, without and with BN, beside what Gaussian weights
alone would have (Marchenko & Pastur). ``jacobian_parts``: the conjecture of Ioffe & Szegedy (2015, section 3.3) in its
parts: the premise (effective dimension of the normalized vectors), the rank, the mean square, the spread.
``jacobian_init``: untrained networks against batch size and width, where theory gives the mean square.

The verdict follows the study's rule: a part of the conjecture holds, or fails, where the whole Student interval over
seeds lies on one side of its bar, else it is undecided. Each map is judged on its own: ``jacobian_verdicts.csv`` has a
row a map, part and end of training, and the printed table two a net, its numbers and its maps' verdicts. The tests
plant values on each side.

A map of P x Q has K = min(P, Q) singular values. The spread is that of the nonzero ones, so a map with zeros could have
any spread at all: that none is zero, rank K, is a part of its own, and two spreads are compared only between equal
ranks. A value that is not finite (a map of zeros has no spread) is undefined: it is named, and the rest is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

from analysis import style
from analysis.load import Study, StudyError, load_records, load_study
from analysis.statistics import Estimate, log_ratio, mean, mean_band
from diagnostics.record import write_atomically

NAME = "jacobian"
ACTIVATIONS = {"linear": "linear", "sigmoid": "sigmoid", "tanh": "tanh", "relu": "ReLU"}
INITS = {"gaussian": "Gaussian", "orthogonal": "orthogonal"}
ARMS = {"none": "without BN", "batch": "with BN"}
PARTS = {"effective_dimension": "premise", "rank": "rank", "mean_square": "mean square", "spread": "spread"}
# Bars of the study's rule; the premise's is a share of what independent units show.
DIMENSION, SQUARE, SPREAD = 0.9, (0.9, 1.1), 0.1
# E[g'(x)^2] / Var[g(x)] for standard normal x.
THEORY = {"linear": 1.0, "sigmoid": 1.0336, "tanh": 1.1778, "relu": math.pi / (math.pi - 1)}
ENDS = {"start": 0, "end": -1}  # records that are judged
LETTERS = {"holds": "h", "fails": "f", "undecided": "u", "undefined": "n"}
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
NUMBERS = ("mean_square", "spread", "rank", "smallest", "largest", "distance", "nonfinite")

LOGARITHMIC = ("mean_square", "spread")

_BAR: dict[str, Any] = {"color": style.GREY, "lw": 1.0, "ls": ":"}
_THEORY: dict[str, Any] = {"color": style.BLACK, "lw": 0.9, "ls": (0, (6, 2))}
_LAW: dict[str, Any] = {"color": style.BLACK, "lw": 0.9, "ls": (0, (1, 1))}
# Both have one: a value between two that are undefined is a point, not a line.
_MARKERS: dict[str, dict[str, Any]] = {
    "gaussian": {"marker": ".", "ms": 4},
    "orthogonal": {"marker": "o", "ms": 4, "mfc": "white"},
}
_FARTHEST = (math.log(1e-100), math.log(1e100))
_SHADES = ((0.35, "90%"), (0.6, "50%"))
_STYLES = {"none": style.WITHOUT_BN, "batch": style.WITH_BN}

Floats = NDArray[np.float64]
Key = tuple[str, str, str]  # activation, init, arm


@dataclass(frozen=True)
class _Map:
    """One map of one arm: numbers over seeds (S,) at each step."""

    key: Key
    layer: int  # the one that receives
    count: int  # K, of its singular values
    ideal: float  # effective dimension that independent units would show in the sending layer
    steps: NDArray[np.int64]  # (T,)
    values: Mapping[str, Floats]  # statistic -> (S, T); effective_dimension is the sending layer's
    quantiles: Floats  # (S, T, Q) of the nonzero singular values


def draw(folder: Path) -> style.Drawn:
    """Draw the study in ``folder`` into the same folder, each picture as .png, .pdf and .csv.

    Raises:
        ValueError: If ``folder`` holds another study, one that is not finished, or one with a run that diverged.
    """
    folder = Path(folder)
    study = load_study(folder)
    if study.name != NAME:
        raise StudyError(f"{NAME} shows the study of that name; {folder} holds {study.name!r}")
    lost = [run.path.name for run in study.runs if run.diverged]
    if lost:
        raise StudyError(f"singular values are compared between whole trainings; diverged: {', '.join(lost)}")
    maps = [one for key in product(ACTIVATIONS, INITS, ARMS) for one in _maps(study, key)]
    weights, untrained = _weights(study), _untrained(study)
    with style.look():
        drawn = {
            NAME: (_distributions(study, maps, "gaussian"), _quantile_numbers(maps, "gaussian")),
            f"{NAME}_orthogonal": (
                _distributions(study, maps, "orthogonal"),
                _quantile_numbers(maps, "orthogonal"),
            ),
            f"{NAME}_parts": (_parts(study, maps), _part_numbers(maps)),
            f"{NAME}_init": (_at_init(study, untrained), untrained),
        }
        paths: tuple[Path, ...] = ()
        for name, (figure, numbers) in drawn.items():
            paths += style.save(figure, folder, name, numbers)
    verdicts = folder / f"{NAME}_verdicts.csv"
    write_atomically(verdicts, _verdict_numbers(maps).to_csv(index=False, lineterminator="\n").encode())
    paths += (verdicts,)
    return style.Drawn(paths, _table(maps, weights), _title(study, maps, untrained), _caption(study, "gaussian"))


def marchenko_pastur(ratio: float, count: int = 20_000) -> Floats:
    """``count`` equally likely singular values (the middles of as many quantiles) of wide Gaussian matrices.

    ``ratio`` is min(P, Q) / max(P, Q); the mean square is 1. For square matrices it is the quarter circle law on 0..2.
    """
    low, high = (1 - math.sqrt(ratio)) ** 2, (1 + math.sqrt(ratio)) ** 2
    angle = (np.arange(4 * count) + 0.5) * math.pi / (4 * count)
    eigenvalues = low + (high - low) * np.sin(angle / 2) ** 2
    # The density's square root in terms of the angle, with the change of variables: no end is singular.
    weight = ((high - low) * np.sin(angle)) ** 2 / eigenvalues
    cumulative = np.cumsum(weight) - weight / 2
    wanted = (np.arange(count) + 0.5) / count
    return np.sqrt(np.interp(wanted, cumulative / weight.sum(), eigenvalues))


def independent_dimension(units: int, examples: int) -> float:
    """Effective dimension that N examples show of C independent units, about ``1 / (1/C + 1/N)``: never C itself."""
    return 1 / (1 / units + 1 / examples)


# --- reading


def _arm(key: Key) -> str:
    return "-".join(key)


def _units(study: Study) -> tuple[int, ...]:
    arm = _arm(("linear", "gaussian", "none"))
    return tuple(study.setting("network", "hidden", arm=arm))


def _layers(study: Study) -> tuple[int, ...]:
    """The layers that receive the last two maps, or the only one."""
    last = len(_units(study))
    return (last - 1, last) if last > 2 else (last,)


def _maps(study: Study, key: Key) -> list[_Map]:
    """The last two maps of one arm."""
    arm = _arm(key)
    table = load_records(study, probe="jacobian", arm=arm)
    table = table.assign(layer=table["layer"].astype(str).str.extract(r"hidden(\d+)", expand=False).astype(int))
    units, sample = _units(study), study.setting("measures", "sample", arm=arm)
    found = []
    for layer in _layers(study):
        mine = table[table["layer"] == layer]
        values = {name: _over_seeds(mine, name) for name in NUMBERS}
        values["effective_dimension"] = _over_seeds(table[table["layer"] == layer - 1], "effective_dimension")
        singular = mine[mine["statistic"] == "singular_value"]
        steps = np.sort(singular["step"].unique())
        sending, receiving = units[layer - 2 : layer]
        ideal = independent_dimension(sending, sample)
        quantiles = _quantiles(singular, len(study.seeds))
        found.append(_Map(key, layer, min(sending, receiving), ideal, steps, values, quantiles))
    return found


def _over_seeds(table: pd.DataFrame, statistic: str) -> Floats:
    rows = table[(table["statistic"] == statistic) & (table["unit"] == -1)]
    return rows.pivot(index="seed", columns="step", values="value").sort_index().to_numpy(dtype=np.float64)


def _quantiles(singular: pd.DataFrame, seeds: int) -> Floats:
    """(S, T, Q) of the values above 1e-5 of the largest: a ReLU that is off makes a zero, which has no logarithm."""
    wide = singular.pivot(index=["seed", "step"], columns="unit", values="value").sort_index()
    values = wide.to_numpy(dtype=np.float64)
    values = np.where(values > 1e-5 * values.max(axis=1, keepdims=True), values, np.nan)
    defined = np.isfinite(values).any(axis=1)
    found = np.full((len(values), len(QUANTILES)), np.nan)
    found[defined] = np.nanquantile(values[defined], QUANTILES, axis=1).T
    return found.reshape(seeds, -1, len(QUANTILES))


def _weights(study: Study) -> dict[Key, tuple[float, float]]:
    """Spread of the weights alone at the first and the last record, mean over seeds and the last two layers."""
    found = {}
    for key in product(ACTIVATIONS, INITS, ARMS):
        table = load_records(study, probe="weights", statistic="spread", unit=-1, arm=_arm(key))
        mine = table[table["layer"].isin([f"hidden{k}.linear" for k in _layers(study)])]
        ends = [mine[mine["step"] == step]["value"].mean() for step in (mine["step"].min(), mine["step"].max())]
        found[key] = float(ends[0]), float(ends[1])
    return found


def _untrained(study: Study) -> pd.DataFrame:
    """One row an activation, init, arm, width, batch, seed and statistic."""
    tables = []
    for key in product(ACTIVATIONS, INITS, ARMS):
        table = load_records(study, probe=".".join(key), arm="init")
        size = table["layer"].astype(str).str.extract(r"w(\d+)\.m(\d+)").astype(int)
        labelled = table.assign(activation=key[0], init=key[1], normalizer=key[2], width=size[0], batch=size[1])
        tables.append(labelled)
    columns = ["activation", "init", "normalizer", "width", "batch", "seed", "statistic", "value"]
    return pd.concat(tables, ignore_index=True)[columns]


# --- drawing


def _distributions(study: Study, maps: Sequence[_Map], init: str) -> Figure:
    figure = style.new_figure(10.4, 7.6, _caption(study, init))
    columns = [(layer, arm) for layer in _layers(study) for arm in ARMS]
    grid = figure.subplots(len(ACTIVATIONS), len(columns), sharex=True, sharey="row")
    law = np.quantile(marchenko_pastur(1.0), QUANTILES)
    for row, (activation, name) in zip(grid, ACTIVATIONS.items(), strict=True):
        for axes, (layer, arm) in zip(row, columns, strict=True):
            one = next(m for m in maps if m.key == (activation, init, arm) and m.layer == layer)
            _draw_distribution(axes, one, law)
            if activation == "linear":
                axes.set_title(f"hidden {layer - 1} to {layer}, {ARMS[arm]}", fontsize=9, pad=14)
        row[0].set_ylabel(f"{name}\nsingular value")
    for axes in grid[-1]:
        axes.set_xlabel("training steps")
    handles = [
        *(
            Line2D([], [], color=_STYLES[arm].color, ls=_STYLES[arm].dashes, label=f"{ARMS[arm]}: median")
            for arm in ARMS
        ),
        *(Patch(color=style.GREY, alpha=a, lw=0, label=f"{share} of the nonzero") for a, share in _SHADES),
        Line2D([], [], color=style.GREY, lw=0.7, label="largest"),
        Line2D([], [], color=style.BLACK, lw=0.8, label="conjecture"),
        Line2D([], [], color=style.GREY, lw=4.5, label="Gaussian matrices alone"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=4)
    return figure


def _draw_distribution(axes: Axes, one: _Map, law: Floats) -> None:
    look = _STYLES[one.key[2]]
    logs = np.log(one.quantiles).mean(axis=0)  # over seeds
    places = np.exp(logs)
    for low, high, alpha in ((0, 4, 0.18), (1, 3, 0.3)):
        axes.fill_between(one.steps, places[:, low], places[:, high], color=look.color, alpha=alpha, lw=0)
    axes.plot(one.steps, places[:, 2], color=look.color, ls=look.dashes, lw=1.4)
    axes.plot(one.steps, one.values["largest"].mean(axis=0), color=look.color, lw=0.7)
    axes.axhline(1, color=style.BLACK, lw=0.8)
    last = max(int(one.steps[-1]), 1)
    place = last * 2.2
    axes.plot([place, place], [law[0], law[4]], color=style.GREY, lw=1.6, solid_capstyle="butt")
    axes.plot([place, place], [law[1], law[3]], color=style.GREY, lw=4.5, solid_capstyle="butt")
    axes.plot(place, law[2], "_", color=style.BLACK, ms=7)
    first, end = (float(np.mean(one.values["rank"][:, at])) / one.count for at in (0, -1))
    axes.annotate(
        f"nonzero {_percent(first)} to {_percent(end)}", (0, 1.02), xycoords="axes fraction", fontsize=7,
        color=style.BLACK, va="bottom",
    )  # fmt: skip
    _log_axis(axes)
    _step_axis(axes, last)


def _percent(share: float) -> str:
    return "undefined" if math.isnan(share) else f"{share:.0%}"


def _log_axis(axes: Axes, subs: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


def _step_axis(axes: Axes, last: int) -> None:
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(-0.12, last * 3.4)
    ticks = [0, *(10**k for k in range(int(math.log10(last)) + 1))]
    axes.set_xticks(ticks, [style.thousands(tick) for tick in ticks])
    axes.minorticks_off()


def _parts(study: Study, maps: Sequence[_Map]) -> Figure:
    figure = style.new_figure(10.4, 8.2, _parts_caption(study, maps))
    grid = figure.subplots(len(PARTS), len(ACTIVATIONS), sharex=True, sharey="row")
    law = float(np.log(marchenko_pastur(1.0)).std())
    premise = float(np.mean([DIMENSION * one.ideal for one in maps]))
    for column, (activation, name) in enumerate(ACTIVATIONS.items()):
        for row, statistic in zip(grid, PARTS, strict=True):
            axes = row[column]
            for init, arm in product(INITS, ARMS):
                _draw_part(axes, [m for m in maps if m.key == (activation, init, arm)], statistic)
            if statistic == "effective_dimension":
                axes.axhline(premise, **_BAR)
                axes.set_title(name)
                axes.set_ylim(bottom=0)
            elif statistic == "rank":
                axes.axhline(1, **_BAR)
                axes.set_ylim(0, 1.08)
            elif statistic == "mean_square":
                axes.axhspan(*SQUARE, color=style.GREY, alpha=0.25, lw=0)
                axes.axhline(THEORY[activation], **_THEORY)
            else:
                axes.axhline(SPREAD, **_BAR)
                axes.axhline(law, **_LAW)
    names = ("effective dimension", "rank / K", "mean square", "spread (sd of log)")
    for row, label in zip(grid, names, strict=True):
        row[0].set_ylabel(label)
    _log_row(grid[-2])
    _log_row(grid[-1])
    for axes in grid[-1]:
        axes.set_xlabel("training steps")
    handles, _ = grid[0][0].get_legend_handles_labels()
    handles += [
        Line2D([], [], label="bar of the conjecture", **_BAR),
        Patch(color=style.GREY, alpha=0.25, lw=0, label="mean square it asks for"),
        Line2D([], [], label="theory, with BN at the start", **_THEORY),
        Line2D([], [], label="Gaussian matrices alone", **_LAW),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=4)
    return figure


def _draw_part(axes: Axes, maps: Sequence[_Map], statistic: str) -> None:
    _, init, arm = maps[0].key
    look = _STYLES[arm]
    scale = [one.count if statistic == "rank" else 1 for one in maps]
    values = np.mean([one.values[statistic] / k for one, k in zip(maps, scale, strict=True)], axis=0)  # the two maps
    centre, low, high = _band(values, logarithmic=statistic in LOGARITHMIC)
    steps, label = maps[0].steps, f"{ARMS[arm]}, {INITS[init]}"
    axes.plot(steps, centre, color=look.color, ls=look.dashes, lw=1.3, label=label, **_MARKERS[init])
    axes.fill_between(steps, low, high, color=look.color, alpha=0.15, lw=0)
    _step_axis(axes, max(int(steps[-1]), 1))


def _band(values: Floats, *, logarithmic: bool) -> tuple[Floats, Floats, Floats]:
    """Mean over seeds of (S, T) values and its interval; of their logarithms, where the axis is one.

    NaN where a seed's value is undefined, or has no logarithm.
    """
    defined = np.isfinite(values).all(axis=0)
    if logarithmic:
        defined &= (values > 0).all(axis=0)
    centre, low, high = (np.full(values.shape[1], np.nan) for _ in range(3))
    if defined.any():
        kept = np.log(values[:, defined]) if logarithmic else values[:, defined]
        band = mean_band(kept)
        centre[defined], low[defined], high[defined] = band.estimate, band.low, band.high
    if logarithmic:
        # Two seeds that are far apart have an interval whose ends are no floating-point numbers, nor its axis's.
        low, high = (np.exp(np.clip(one, *_FARTHEST)) for one in (low, high))
        centre = np.exp(centre)
    return centre, low, high


def _log_row(row: Sequence[Axes]) -> None:
    """Logarithmic axes that reach no farther than a factor of 10 beyond the lines, however wide a band is."""
    for axes in row:
        axes.set_yscale("log")
    heights = np.concatenate([np.asarray(line.get_ydata(), dtype=np.float64) for axes in row for line in axes.lines])
    heights = heights[np.isfinite(heights) & (heights > 0)]
    low, high = row[0].get_ylim()
    low, high = max(low, heights.min() / 10), min(high, heights.max() * 10)
    row[0].set_ylim(low, high)
    decades = math.log10(high / low)
    subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if decades < 1.3 else (1.0, 2.0, 5.0) if decades < 3.5 else (1.0,)
    for axes in row:
        _log_axis(axes, subs)


def _at_init(study: Study, untrained: pd.DataFrame) -> Figure:
    width, batch = int(untrained["width"].max()), int(untrained["batch"].max())
    figure = style.new_figure(10.4, 4.6, _init_caption(study, untrained, width, batch))
    grid = figure.subplots(2, len(ACTIVATIONS), sharey="row")
    for column, (activation, name) in enumerate(ACTIVATIONS.items()):
        for row, (statistic, x, fixed) in zip(
            grid, (("mean_square", "batch", ("width", width)), ("spread", "width", ("batch", batch))), strict=True
        ):
            axes = row[column]
            for init, arm in product(INITS, ARMS):
                where = (
                    (untrained["activation"] == activation)
                    & (untrained["init"] == init)
                    & (untrained["normalizer"] == arm)
                    & (untrained["statistic"] == statistic)
                    & (untrained[fixed[0]] == fixed[1])
                )
                _draw_curve(axes, untrained[where], x, init, arm)
            axes.set_xscale("log", base=2)
            places = sorted(untrained[x].unique())
            axes.set_xticks(places, [str(place) for place in places])
            axes.set_xlim(places[0] / 1.15, places[-1] * 1.15)
            axes.minorticks_off()
            axes.set_xlabel("examples in the batch" if x == "batch" else "units a layer")
        grid[0][column].axhline(THEORY[activation], **_THEORY)
        grid[0][column].set_title(name)
    grid[0][0].set_ylabel("mean square")
    grid[1][0].set_ylabel("spread (sd of log)")
    for row in grid:
        _log_row(row)
    handles, _ = grid[0][0].get_legend_handles_labels()
    handles.append(Line2D([], [], label="theory, with BN", **_THEORY))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))
    return figure


def _draw_curve(axes: Axes, table: pd.DataFrame, x: str, init: str, arm: str) -> None:
    look = _STYLES[arm]
    wide = table.pivot(index="seed", columns=x, values="value")
    centre, low, high = _band(wide.to_numpy(dtype=np.float64), logarithmic=True)
    label = f"{ARMS[arm]}, {INITS[init]}"
    axes.plot(wide.columns, centre, color=look.color, ls=look.dashes, lw=1.3, label=label, **_MARKERS[init])
    axes.fill_between(wide.columns, low, high, color=look.color, alpha=0.15, lw=0)


# --- judging


def _side(estimate: Estimate, low: float, high: float) -> str:
    """Where the whole interval lies: ``holds`` within low..high, ``fails`` outside, else ``undecided``."""
    if not estimate.has_interval:
        return "undecided"
    if low <= estimate.low and estimate.high <= high:
        return "holds"
    return "fails" if estimate.high < low or estimate.low > high else "undecided"


def _bars(one: _Map) -> dict[str, tuple[float, float]]:
    """Lowest and highest value that each part of the conjecture allows."""
    return {
        "effective_dimension": (DIMENSION * one.ideal, math.inf),
        "rank": (one.count * (1 - 1e-9), math.inf),  # no rank is above K: only K in every seed, at every example, holds
        "mean_square": SQUARE,
        "spread": (-math.inf, SPREAD),
    }


def _verdicts(one: _Map, at: int) -> dict[str, str]:
    """Each part of the conjecture and the whole of it, at record ``at``; ``undefined`` where a seed's value is.

    An example whose map is not finite is left out of the means, which then are not of all examples: undefined too.
    """
    whole = not (one.values["nonfinite"][:, at] > 0).any()
    found = {}
    for name, bar in _bars(one).items():
        values = one.values[name][:, at]
        defined = np.isfinite(values).all() and (whole or name == "effective_dimension")
        found[PARTS[name]] = _side(mean(values), *bar) if defined else "undefined"
    parts = set(found.values())
    worst = next((word for word in ("fails", "undefined", "undecided") if word in parts), "holds")
    return found | {"all": worst}


def _better(plain: _Map, normalized: _Map, at: int) -> str:
    """The weaker claim for one pair of maps: ``supported``, ``refuted``, ``undecided``, or why there is no answer."""
    a, b = normalized.values["spread"][:, at], plain.values["spread"][:, at]
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return "undefined"
    ranks = normalized.values["rank"][:, at], plain.values["rank"][:, at]
    if not np.allclose(*ranks, rtol=0, atol=1e-9):
        return "ranks differ"
    if min(a.min(), b.min()) <= 0:
        return "undecided"
    ratio = log_ratio(a, b)
    if not ratio.has_interval or ratio.low <= 0 <= ratio.high:
        return "undecided"
    return "supported" if ratio.high < 0 else "refuted"


def _undefined(maps: Sequence[_Map]) -> list[str]:
    """What has no value in training, each net and map once: ``relu-gaussian-none 1 to 2 (spread)``."""
    found = []
    for one in maps:
        lost = [name for part, name in PARTS.items() if not np.isfinite(one.values[part]).all()]
        if lost:
            found.append(f"{_arm(one.key)} {one.layer - 1} to {one.layer} ({', '.join(lost)})")
    return found


def _undefined_at_init(untrained: pd.DataFrame) -> list[str]:
    """Likewise of untrained nets: ``relu-gaussian-none width 2, batch 16 (spread)``."""
    lost = untrained[untrained["statistic"].isin(PARTS) & ~np.isfinite(untrained["value"])]
    found = []
    for key, rows in lost.groupby(["activation", "init", "normalizer", "width", "batch"], sort=False):
        names = [name for part, name in PARTS.items() if part in set(rows["statistic"])]
        found.append(f"{_arm((key[0], key[1], key[2]))} width {key[3]}, batch {key[4]} ({', '.join(names)})")
    return found


# --- saying


def _title(study: Study, maps: Sequence[_Map], untrained: pd.DataFrame) -> str:
    normalized = [one for one in maps if one.key[2] == "batch"]
    said = {}
    for when, at in ENDS.items():
        verdicts = [_verdicts(one, at) for one in normalized]
        counts = [f"{part} {_count([v[part] for v in verdicts])}" for part in (*PARTS.values(), "all")]
        said[when] = f"{when}: {'; '.join(counts)}"
    pairs = [
        _better(next(m for m in maps if m.key == (*one.key[:2], "none") and m.layer == one.layer), one, -1)
        for one in normalized
    ]
    answers = ("supported", "refuted", "undecided", "ranks differ", "undefined")
    weaker = ", ".join(f"{word} {pairs.count(word)}" for word in answers if word != "undefined" or word in pairs)
    seeds = "One seed, no intervals" if len(study.seeds) == 1 else f"{len(study.seeds)} seeds"
    letters = ", ".join(f"{letter} {word}" for word, letter in LETTERS.items())
    return (
        f"Singular values between normalized layers. Conjecture (all 1) for {len(normalized)} maps with BN, by its"
        f" parts,\nat the {said['start']}.\nAt the {said['end']}.\nWeaker claim (spread smaller with BN, at the end,"
        f" where the ranks are equal): {weaker}. {seeds}.{_lost(_undefined(maps) + _undefined_at_init(untrained))}\n"
        f"{_definitions(normalized)}\nTable: start to end, {_which(study)}; W's is the spread of the weights alone,"
        " distance |J J^T - I|_F / sqrt(P), which is 0 where all are 1. Below each net's numbers the verdicts on"
        f" its parts, and on all of them together, a letter a map: {letters}"
    )


def _definitions(maps: Sequence[_Map]) -> str:
    """The parts and their bars, with what they come to for ``maps``."""
    bars = style.and_list([f"{bar:.3g}" for bar in sorted({DIMENSION * one.ideal for one in maps})])
    counts = style.and_list([str(count) for count in sorted({one.count for one in maps})])
    return (
        f"Premise: effective dimension (dim.) of the C units that enter, seen in N examples, above {DIMENSION:g} of"
        f" 1/(1/C + 1/N), here {bars}. Rank: all K = min(P, Q) singular values of a P x Q map nonzero, here {counts}."
        f" Mean square (square) of all K: {SQUARE[0]:g} to {SQUARE[1]:g}. Spread, the standard deviation of the"
        f" logarithm of the nonzero ones: below {SPREAD:g}."
    )


def _which(study: Study) -> str:
    return "means over the last two maps" if len(_layers(study)) > 1 else "of the only map"


def _count(verdicts: Sequence[str]) -> str:
    said = f"{verdicts.count('holds')} hold, {verdicts.count('fails')} fail, {verdicts.count('undecided')} undecided"
    return said + (f", {verdicts.count('undefined')} undefined" if "undefined" in verdicts else "")


def _lost(undefined: Sequence[str], most: int = 6) -> str:
    """A sentence that names what is not drawn, with a space before; nothing where nothing is."""
    if not undefined:
        return ""
    more = f"; and {len(undefined) - most} more" if len(undefined) > most else ""
    return f" Undefined (not finite), not drawn: {'; '.join(undefined[:most])}{more}."


def _table(maps: Sequence[_Map], weights: Mapping[Key, tuple[float, float]]) -> pd.DataFrame:
    rows = []
    for key in product(ACTIVATIONS, INITS, ARMS):
        mine = [one for one in maps if one.key == key]

        def change(name: str, form: str, mine: Sequence[_Map] = mine) -> str:
            first, last = (np.mean([one.values[name][:, at] for one in mine]) for at in (0, -1))
            return _arrow(*(_cell(float(x), form) for x in (first, last)))

        rows.append(
            (
                f"{ACTIVATIONS[key[0]]} {INITS[key[1]]}{' BN' if key[2] == 'batch' else ''}",
                change("effective_dimension", ".0f"),
                change("mean_square", ".2f"),
                change("spread", ".2f"),
                _arrow(*(_cell(spread, ".2f") for spread in weights[key])),
                change("rank", ".0f"),
                change("smallest", ".1g"),
                change("largest", ".2f"),
                change("distance", ".2f"),
            )
        )
        ends = [[_verdicts(one, at) for one in mine] for at in ENDS.values()]
        letters = {
            part: _arrow(*("".join(LETTERS[verdict[part]] for verdict in end) for end in ends))
            for part in (*PARTS.values(), "all")
        }
        parts = letters["premise"], letters["mean square"], letters["spread"], "", letters["rank"], "", "", ""
        rows.append((f"  verdicts; all {letters['all']}", *parts))
    columns = ["net", "dim.", "square", "spread", "W's", "rank", "smallest", "largest", "distance"]
    return pd.DataFrame(rows, columns=columns)


def _zeros(drawn: Sequence[Floats]) -> str:
    """A sentence where a number that is drawn by its logarithm has none; a single value has spread 0."""
    return " A spread or square of 0 has no logarithm and no place." if any((one == 0).any() for one in drawn) else ""


def _cell(value: float, form: str) -> str:
    if not math.isfinite(value):
        return "undefined"
    return "0" if abs(value) < 1e-6 else f"{value:{form}}"


def _arrow(first: str, last: str) -> str:
    return f"{first}\N{RIGHTWARDS ARROW}{last}"


def _quantile_numbers(maps: Sequence[_Map], init: str) -> pd.DataFrame:
    rows = []
    for one in maps:
        if one.key[1] != init:
            continue
        for seed, k in product(range(len(one.quantiles)), range(len(one.steps))):
            places = dict(zip((f"q{100 * q:g}" for q in QUANTILES), one.quantiles[seed, k], strict=True))
            largest = one.values["largest"][seed, k]
            rows.append((*one.key, one.layer, seed, one.steps[k], *places.values(), largest))
    law = np.quantile(marchenko_pastur(1.0), QUANTILES)
    rows.append(("Marchenko-Pastur", init, "", 0, 0, 0, *law, 2.0))
    columns = ["activation", "init", "arm", "layer", "seed_index", "step", *(f"q{100 * q:g}" for q in QUANTILES)]
    return pd.DataFrame(rows, columns=[*columns, "largest"])


def _part_numbers(maps: Sequence[_Map]) -> pd.DataFrame:
    rows = [
        (*one.key, one.layer, seed, step, name, one.values[name][seed, k])
        for one in maps
        for name in ("effective_dimension", *NUMBERS)
        for seed in range(len(one.quantiles))
        for k, step in enumerate(one.steps)
    ]
    columns = ["activation", "init", "arm", "layer", "seed_index", "step", "statistic", "value"]
    return pd.DataFrame(rows, columns=columns)


def _verdict_numbers(maps: Sequence[_Map]) -> pd.DataFrame:
    """One row a map, end of training and part: the verdict, the mean over seeds, its interval, and the bars."""
    rows = []
    for one, (when, at) in product(maps, ENDS.items()):
        verdicts, bars = _verdicts(one, at), _bars(one)
        head = (*one.key, one.layer, when, one.steps[at])
        for name, part in PARTS.items():
            values = one.values[name][:, at]
            found = mean(values) if np.isfinite(values).all() else None
            numbers = (found.estimate, found.low, found.high) if found else (math.nan,) * 3
            low, high = (bar if math.isfinite(bar) else math.nan for bar in bars[name])
            rows.append((*head, part, verdicts[part], *numbers, one.count if name == "rank" else low, high))
        rows.append((*head, "all", verdicts["all"], *(math.nan,) * 5))
    columns = ["activation", "init", "arm", "layer", "when", "step", "part", "verdict"]
    return pd.DataFrame(rows, columns=[*columns, "estimate", "low", "high", "at_least", "at_most"])


def _setting(study: Study) -> str:
    arm = _arm(("linear", "gaussian", "none"))
    training, measures = study.setting("training", arm=arm), study.setting("measures", arm=arm)
    return (
        f"MNIST, {' x '.join(str(n) for n in _units(study))} units, SGD with learning rate "
        f"{training['learning_rate']:g}, batches of {training['batch']}; the Jacobians of {measures['examples']} fixed "
        f"training examples, the statistics of {measures['sample']}."
    )


def _seeds(study: Study) -> str:
    count = len(study.seeds)
    return "One seed, so there is no interval." if count == 1 else f"{count} seeds."


def _caption(study: Study, init: str) -> str:
    return (
        f"Singular values of the map from one layer's normalized vector to the next one's, {INITS[init]} initial "
        "weights, per example with the statistics of the batch frozen. Networks without BN are put in the same form. "
        "Bands are not intervals: they hold 90% and 50% of the nonzero values (k-th largest: median over examples; "
        f"quantiles: geometric mean over seeds), the line is their median, the thin line the largest. {_seeds(study)} "
        "A ReLU that is off makes a zero, which is left out; above each panel is the share that is nonzero at start "
        "and end. The conjecture is the black line at 1. Grey at the right: "
        f"square Gaussian matrices alone (Marchenko & Pastur), 90%, 50% and median. {_setting(study)}"
    )


def _parts_caption(study: Study, maps: Sequence[_Map]) -> str:
    band = "" if len(study.seeds) == 1 else " Bands: 95% Student t interval over seeds, of logarithms in the lower two."
    nets = [[one for one in maps if one.key == key] for key in product(ACTIVATIONS, INITS, ARMS)]
    zeros = _zeros([np.mean([one.values[name] for one in net], axis=0) for net in nets for name in LOGARITHMIC])
    drawn = (
        "the only map"
        if len(_layers(study)) == 1
        else "means of the last two maps (the rule judges each map on its own, see jacobian_verdicts.csv)"
    )
    law = float(np.log(marchenko_pastur(1.0)).std())
    units, sample = _units(study)[-2], study.setting("measures", "sample", arm=_arm(("linear", "gaussian", "none")))
    return (
        f"The conjecture in its parts, {drawn}. Top: effective dimension (participation ratio of "
        f"the correlation matrix) of the vectors that enter, of {units} units; {units} independent units show "
        f"1/(1/C + 1/N) = {independent_dimension(units, sample):.3g} in N = {sample} examples, and the dotted line is "
        f"{DIMENSION:.0%} of what they show. Second: rank as a share of the K = min(P, Q) singular values of a "
        "P x Q map; the conjecture asks for all of them. Third: mean squared singular value; the conjecture asks for "
        f"the grey band, {SQUARE[0]:g} to {SQUARE[1]:g}; theory for wide layers with BN at "
        "the start gives the dashed line. Bottom: standard deviation of the log of "
        "the nonzero singular values, which are fewer where the rank is lower; the conjecture asks for less than the "
        f"dotted grey line ({SPREAD:g}), square Gaussian matrices alone have the dotted black one ({law:.2f}). "
        f"{_seeds(study)}{band}{_lost(_undefined(maps))}{zeros} {_setting(study)}"
    )


def _init_caption(study: Study, untrained: pd.DataFrame, width: int, batch: int) -> str:
    band = "" if len(study.seeds) == 1 else " Bands: 95% Student t interval over seeds, of logarithms."
    zeros = _zeros([untrained[untrained["statistic"].isin(LOGARITHMIC)]["value"].to_numpy(dtype=np.float64)])
    return (
        f"Untrained networks, means over maps and examples. Top: mean squared singular value, {width} units a layer, "
        "against the batch whose statistics are used; dashed: theory for wide layers and large batches with BN: "
        "E[g' squared] / Var[g] for a standard normal input, 1, 1.0336, 1.1778 and pi/(pi - 1). Vectors of d "
        f"effective dimensions raise it by about 2/d. Bottom: spread of the nonzero values, batches of {batch}. "
        f"{_seeds(study)}{band}{_lost(_undefined_at_init(untrained))}{zeros}"
    )
