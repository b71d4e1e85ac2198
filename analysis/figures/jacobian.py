"""Singular values between consecutive normalized layers, from the records of the study of that name.

Three pictures and one table. ``jacobian`` and ``jacobian_orthogonal`` (one a law of the initial weights): how the
singular values of the last two maps are distributed, over training, without and with BN, beside what Gaussian weights
alone would have (Marchenko & Pastur). ``jacobian_parts``: the conjecture of Ioffe & Szegedy (2015, section 3.3) in its
parts: the premise (effective dimension of the normalized vectors), the mean square, the spread. ``jacobian_init``:
untrained networks against batch size and width, where theory gives the mean square.

The verdict follows the study's rule: a part of the conjecture holds, or fails, where the whole Student interval over
seeds lies on one side of its bar, else it is undecided. The tests plant values on each side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

from analysis import style
from analysis.load import Study, StudyError, load_records, load_study
from analysis.statistics import Estimate, log_ratio, mean, mean_band

NAME = "jacobian"
ACTIVATIONS = {"linear": "linear", "sigmoid": "sigmoid", "tanh": "tanh", "relu": "ReLU"}
INITS = {"gaussian": "Gaussian", "orthogonal": "orthogonal"}
ARMS = {"none": "without BN", "batch": "with BN"}
PARTS = {"effective_dimension": "premise", "mean_square": "mean square", "spread": "spread"}
# Bars of the study's rule; the premise's is a share of the units.
DIMENSION, SQUARE, SPREAD = 0.9, (0.9, 1.1), 0.1
# E[g'(x)^2] / Var[g(x)] for standard normal x.
THEORY = {"linear": 1.0, "sigmoid": 1.0336, "tanh": 1.1778, "relu": math.pi / (math.pi - 1)}
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
NUMBERS = ("mean_square", "spread", "rank", "smallest", "largest", "distance", "nonfinite")

_STYLES = {"none": style.WITHOUT_BN, "batch": style.WITH_BN}

Floats = NDArray[np.float64]
Key = tuple[str, str, str]  # activation, init, arm


@dataclass(frozen=True)
class _Map:
    """One map of one arm: numbers over seeds (S,) at each step."""

    key: Key
    layer: int  # the one that receives
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
    units = _units(study)
    with style.look():
        drawn = {
            NAME: (_distributions(study, maps, "gaussian"), _quantile_numbers(maps, "gaussian")),
            f"{NAME}_orthogonal": (
                _distributions(study, maps, "orthogonal"),
                _quantile_numbers(maps, "orthogonal"),
            ),
            f"{NAME}_parts": (_parts(study, maps, units), _part_numbers(maps)),
            f"{NAME}_init": (_at_init(study, untrained), untrained),
        }
        paths: tuple[Path, ...] = ()
        for name, (figure, numbers) in drawn.items():
            paths += style.save(figure, folder, name, numbers)
    return style.Drawn(paths, _table(maps, weights), _title(study, maps, units), _caption(study, "gaussian"))


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
    found = []
    for layer in _layers(study):
        mine = table[table["layer"] == layer]
        values = {name: _over_seeds(mine, name) for name in NUMBERS}
        values["effective_dimension"] = _over_seeds(table[table["layer"] == layer - 1], "effective_dimension")
        singular = mine[mine["statistic"] == "singular_value"]
        steps = np.sort(singular["step"].unique())
        found.append(_Map(key, layer, steps, values, _quantiles(singular, len(study.seeds))))
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
                axes.set_title(f"hidden {layer - 1} to {layer}, {ARMS[arm]}", fontsize=9)
        row[0].set_ylabel(f"{name}\nsingular value")
    for axes in grid[-1]:
        axes.set_xlabel("training steps")
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
    _log_axis(axes)
    _step_axis(axes, last)


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


def _parts(study: Study, maps: Sequence[_Map], units: tuple[int, ...]) -> Figure:
    figure = style.new_figure(10.4, 6.4, _parts_caption(study, units))
    grid = figure.subplots(len(PARTS), len(ACTIVATIONS), sharex=True, sharey="row")
    law = float(np.log(marchenko_pastur(1.0)).std())
    for column, (activation, name) in enumerate(ACTIVATIONS.items()):
        for row, statistic in zip(grid, PARTS, strict=True):
            axes = row[column]
            for init, arm in product(INITS, ARMS):
                _draw_part(axes, [m for m in maps if m.key == (activation, init, arm)], statistic)
            if statistic == "effective_dimension":
                axes.axhline(DIMENSION * units[-2], color=style.GREY, lw=1.0, ls=":")
                axes.set_title(name)
                axes.set_ylim(bottom=0)
            elif statistic == "mean_square":
                axes.axhspan(*SQUARE, color=style.GREY, alpha=0.25, lw=0)
                axes.axhline(THEORY[activation], color=style.BLACK, lw=0.9, ls=(0, (6, 2)))
                _log_axis(axes, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
            else:
                axes.axhline(SPREAD, color=style.GREY, lw=1.0, ls=":")
                axes.axhline(law, color=style.BLACK, lw=0.9, ls=(0, (1, 1)))
                _log_axis(axes)
    for row, label in zip(grid, ("effective dimension", "mean square", "spread (sd of log)"), strict=True):
        row[0].set_ylabel(label)
    for axes in grid[-1]:
        axes.set_xlabel("training steps")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4)
    return figure


def _draw_part(axes: Axes, maps: Sequence[_Map], statistic: str) -> None:
    _, init, arm = maps[0].key
    look = _STYLES[arm]
    values = np.mean([one.values[statistic] for one in maps], axis=0)  # over the two maps
    centre, low, high = _band(values, logarithmic=statistic != "effective_dimension")
    steps, marker = maps[0].steps, None if init == "gaussian" else "o"
    label = f"{ARMS[arm]}, {INITS[init]}"
    axes.plot(steps, centre, color=look.color, ls=look.dashes, lw=1.3, marker=marker, ms=3.5, mfc="white", label=label)
    axes.fill_between(steps, low, high, color=look.color, alpha=0.15, lw=0)
    _step_axis(axes, max(int(steps[-1]), 1))


def _band(values: Floats, *, logarithmic: bool) -> tuple[Floats, Floats, Floats]:
    """Mean over seeds of (S, T) values and its interval; of their logarithms, where the axis is one."""
    if not logarithmic:
        band = mean_band(values)
        return band.estimate, band.low, band.high
    band = mean_band(np.log(np.maximum(values, 1e-300)))
    return np.exp(band.estimate), np.exp(band.low), np.exp(band.high)


def _at_init(study: Study, untrained: pd.DataFrame) -> Figure:
    width, batch = int(untrained["width"].max()), int(untrained["batch"].max())
    figure = style.new_figure(10.4, 4.6, _init_caption(study, width, batch))
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
            axes.minorticks_off()
            axes.set_xlabel("examples in the batch" if x == "batch" else "units a layer")
        grid[0][column].axhline(THEORY[activation], color=style.BLACK, lw=0.9, ls=(0, (6, 2)))
        grid[0][column].set_title(name)
    grid[0][0].set_ylabel("mean square")
    grid[1][0].set_ylabel("spread (sd of log)")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4)
    return figure


def _draw_curve(axes: Axes, table: pd.DataFrame, x: str, init: str, arm: str) -> None:
    look = _STYLES[arm]
    wide = table.pivot(index="seed", columns=x, values="value")
    centre, low, high = _band(wide.to_numpy(dtype=np.float64), logarithmic=False)
    marker = None if init == "gaussian" else "o"
    label = f"{ARMS[arm]}, {INITS[init]}"
    axes.plot(
        wide.columns, centre, color=look.color, ls=look.dashes, lw=1.3, marker=marker, ms=4, mfc="white",
        label=label,
    )  # fmt: skip
    axes.fill_between(wide.columns, low, high, color=look.color, alpha=0.15, lw=0)


# --- judging


def _side(estimate: Estimate, low: float, high: float) -> str:
    """Where the whole interval lies: ``holds`` within low..high, ``fails`` outside, else ``undecided``."""
    if not estimate.has_interval:
        return "undecided"
    if low <= estimate.low and estimate.high <= high:
        return "holds"
    return "fails" if estimate.high < low or estimate.low > high else "undecided"


def _verdicts(one: _Map, at: int, units: int) -> dict[str, str]:
    """Each part of the conjecture and the whole of it, at record ``at``; ``units`` send."""
    bars = {
        "effective_dimension": (DIMENSION * units, math.inf),
        "mean_square": SQUARE,
        "spread": (-math.inf, SPREAD),
    }
    found = {PARTS[name]: _side(mean(one.values[name][:, at]), *bar) for name, bar in bars.items()}
    parts = set(found.values())
    found["all"] = "fails" if "fails" in parts else "holds" if parts == {"holds"} else "undecided"
    return found


def _better(plain: _Map, normalized: _Map, at: int) -> str:
    """The weaker claim for one pair of maps: ``supported``, ``refuted`` or ``undecided``."""
    a, b = normalized.values["spread"][:, at], plain.values["spread"][:, at]
    if min(a.min(), b.min()) <= 0:
        return "undecided"
    ratio = log_ratio(a, b)
    if not ratio.has_interval or ratio.low <= 0 <= ratio.high:
        return "undecided"
    return "supported" if ratio.high < 0 else "refuted"


# --- saying


def _title(study: Study, maps: Sequence[_Map], units: tuple[int, ...]) -> str:
    normalized = [one for one in maps if one.key[2] == "batch"]
    said = []
    for when, at in (("start", 0), ("end", -1)):
        verdicts = [_verdicts(one, at, units[one.layer - 2]) for one in normalized]
        counts = [
            f"{part} {sum(v[part] == 'holds' for v in verdicts)} hold, {sum(v[part] == 'fails' for v in verdicts)} fail"
            for part in (*PARTS.values(), "all")
        ]
        said.append(f"{when}: {'; '.join(counts)}")
    pairs = [
        _better(next(m for m in maps if m.key == (*one.key[:2], "none") and m.layer == one.layer), one, -1)
        for one in normalized
    ]
    weaker = ", ".join(f"{word} {pairs.count(word)}" for word in ("supported", "refuted", "undecided"))
    seeds = "One seed, no intervals" if len(study.seeds) == 1 else f"{len(study.seeds)} seeds"
    return (
        f"Singular values between normalized layers. Conjecture (all 1) for {len(normalized)} maps with BN, by its"
        f" parts, at the {said[0]}. At the {said[1]}. Weaker claim (spread smaller with BN, at the end): {weaker}."
        f" {seeds}. Table: start to end, means over the last two maps; dim. is the effective dimension, W's the spread"
        " of the weights alone"
    )


def _table(maps: Sequence[_Map], weights: Mapping[Key, tuple[float, float]]) -> pd.DataFrame:
    rows = []
    for key in product(ACTIVATIONS, INITS, ARMS):
        mine = [one for one in maps if one.key == key]

        def change(name: str, form: str, mine: Sequence[_Map] = mine) -> str:
            first, last = (np.mean([one.values[name][:, at] for one in mine]) for at in (0, -1))
            return _arrow(*("0" if abs(x) < 1e-6 else f"{x:{form}}" for x in (first, last)))

        rows.append(
            (
                f"{ACTIVATIONS[key[0]]} {INITS[key[1]]}{' BN' if key[2] == 'batch' else ''}",
                change("effective_dimension", ".0f"),
                change("mean_square", ".2f"),
                change("spread", ".2f"),
                _arrow(*(f"{spread:.2f}" for spread in weights[key])),
                change("rank", ".0f"),
                change("smallest", ".1g"),
                change("largest", ".2f"),
                change("distance", ".2f"),
            )
        )
    columns = ["net", "dim.", "square", "spread", "W's", "rank", "smallest", "largest", "distance"]
    return pd.DataFrame(rows, columns=columns)


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
        "A ReLU that is off makes a zero, which is left out. The conjecture is the black line at 1. Grey at the right: "
        f"square Gaussian matrices alone (Marchenko & Pastur), 90%, 50% and median. {_setting(study)}"
    )


def _parts_caption(study: Study, units: tuple[int, ...]) -> str:
    band = "" if len(study.seeds) == 1 else " Bands: 95% Student t interval over seeds, of logarithms below the top."
    return (
        "The conjecture in its parts, means over the last two maps. Top: effective dimension (participation ratio of "
        f"the correlation matrix) of the vectors that enter, of {units[-2]} units; uncorrelated vectors "
        f"would lie above the dotted line ({DIMENSION:.0%}). Middle: mean squared singular value; the conjecture asks "
        "for the grey band, theory for wide layers with BN at the start gives the dashed line. Bottom: standard "
        f"deviation of the logarithm of the nonzero singular values; the conjecture asks for less than the dotted grey "
        f"line ({SPREAD:g}), square Gaussian matrices alone have the dotted black one. {_seeds(study)}{band} "
        f"{_setting(study)}"
    )


def _init_caption(study: Study, width: int, batch: int) -> str:
    band = "" if len(study.seeds) == 1 else " Bands: 95% Student t interval over seeds."
    return (
        f"Untrained networks, means over maps and examples. Top: mean squared singular value, {width} units a layer, "
        "against the batch whose statistics are used; dashed: theory for wide layers and large batches with BN: "
        "E[g' squared] / Var[g] for a standard normal input, 1, 1.0336, 1.1778 and pi/(pi - 1). Vectors of d "
        f"effective dimensions raise it by about 2/d. Bottom: spread, batches of {batch}. {_seeds(study)}{band}"
    )
