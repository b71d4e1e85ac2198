"""Noise injection in the layout of Santurkar et al. (2018), Figure 2, from the records of the study of that name.

``noise``: training accuracy of the source's four arms, as evaluated (population statistics, noise off) and as trained
(batch statistics, noise on); and below, for some layers, the distribution of one unit's values over training.
``noise_stability``: the source's stability metrics beside what sampling alone makes of them. ``noise_dose``: steps to
the target against measured drift for every dose and form.

The source shows "a random activation". Here it is the unit that moves as much as most do: of a layer's units the one
whose drift from step to step, averaged over records, is nearest to the median unit's. (Nearest to the median
*trajectory*, as in Figure 1, would choose the unit that noise moved least.) Its density is a Gaussian kernel estimate,
Scott's bandwidth, of the recorded percentiles' interpolated quantile function: the middle 95% of the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray
from scipy.stats import gaussian_kde

from analysis import style
from analysis.figures.noise_dose import dose_figure, dose_numbers
from analysis.figures.noise_effects import (
    ARMS,
    NAME,
    Effect,
    band_series,
    band_text,
    by_name,
    read_effects,
    seed_band,
    table,
    verdicts,
)
from analysis.figures.noise_stability import read_stability, stability_figure
from analysis.load import Study, load_records, load_study

_LOOKS = {
    "none": style.WITHOUT_BN,
    "batch": style.WITH_BN,
    "noisy": style.LineStyle(style.ORANGE, (0.0, (6.0, 1.5, 1.0, 1.5)), 5.0),
    # on top, with gaps in which what it covers shows: in mean it moves as noisy BN does, in accuracy as the plain net
    "noise-only": style.LineStyle(style.PURPLE, (0.0, (4.0, 6.0)), 6.0),
}
_PANELS = {"off": "as evaluated: noise off, population statistics", "on": "as trained: noise on, batch statistics"}
_DATA = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
_ALL = 3  # layers that are all shown
_POINTS = 160  # of a density
_RIDGES = 20  # of one panel, at most
_NARROW = 0.03  # of the axis: a density that is less wide is drawn as a line
_OVERLAP = 2.2  # height of the tallest in steps between two

Floats = NDArray[np.float64]


def draw(folder: Path, *, target: float = 0.9) -> style.Drawn:
    """Draw the study in ``folder`` into the same folder: noise, noise_stability, noise_dose as .png, .pdf and .csv.

    Args:
        folder: Holds study.json and the runs.
        target: Training accuracy that steps are counted to.

    Raises:
        ValueError: If ``folder`` holds another study or one that is not finished, or ``target`` is not between 0 and 1.
    """
    folder = Path(folder)
    if not 0 < target < 1:
        raise ValueError(f"target must lie between 0 and 1, got {target}")
    study = load_study(folder)
    effects = read_effects(study, target)
    layers = _layers(study)
    accuracies, ridges = _accuracies(effects), _ridges(study, list(layers))
    stability, doses = read_stability(study, ARMS, list(layers)), dose_numbers(effects)
    with style.look():
        figures = {
            NAME: _figure(study, effects, accuracies, ridges, layers),
            f"{NAME}_stability": stability_figure(study, stability, _LOOKS, layers),
            f"{NAME}_dose": dose_figure(study, effects, doses, target),
        }
    numbers = {
        NAME: pd.concat([accuracies, ridges], ignore_index=True),
        f"{NAME}_stability": stability,
        f"{NAME}_dose": doses,
    }
    paths: tuple[Path, ...] = ()
    for name, figure in figures.items():
        paths += style.save(figure, folder, name, numbers[name])
    return style.Drawn(paths, table(study, effects, target), _title(study, effects), _caption(study, ridges))


# --- reading


def _layers(study: Study) -> dict[str, str]:
    """Nonlinearities that are shown, with their labels: all of up to three, else the 2nd, one two thirds up, the last.

    Of 13 these are 2, 9 and 13, the source's.
    """
    count = _depth(study)
    form = "features.{}.nonlinearity" if study.setting("network", "kind") == "vgg" else "hidden{}.nonlinearity"
    chosen = range(1, count + 1) if count <= _ALL else (2, -(-2 * count // 3), count)
    return {form.format(k): f"layer {k}" for k in chosen}


def _depth(study: Study) -> int:
    network = study.setting("network")
    return {"A": 8, "D": 13}[network["layout"]] if network["kind"] == "vgg" else len(network["hidden"])


def _accuracies(effects: Sequence[Effect]) -> pd.DataFrame:
    """Curves of the four arms: every run, and mean and interval over the steps that every run has."""
    rows = []
    for arm in ARMS:
        effect = by_name(effects)[arm]
        for panel, curves in (("off", effect.curves), ("on", effect.trained)):
            common = {"panel": panel, "arm": arm}
            for run, curve in zip(effect.runs, curves, strict=True):
                one = {"series": "one seed", "seed": str(run.seed), "step": curve.index, "value": curve.to_numpy()}
                rows.append(pd.DataFrame(common | one))
            steps = sorted(set.intersection(*(set(curve.index) for curve in curves)))
            band = seed_band(np.stack([curve.loc[steps].to_numpy() for curve in curves]), within=(0.0, 1.0))
            for series, values in band.items():
                rows.append(pd.DataFrame(common | {"series": series, "seed": "all", "step": steps, "value": values}))
    return pd.concat(rows, ignore_index=True)


def _ridges(study: Study, layers: Sequence[str]) -> pd.DataFrame:
    """Densities over training of one unit an arm and layer, of the first seed; ``value`` is the density at ``at``."""
    seed = study.seeds[0]
    percentiles = sorted(float(q) for q in study.setting("measures", "percentiles"))
    names = [f"p{q:g}" for q in percentiles]
    rows = []
    for arm in ARMS:
        for layer in layers:
            unit = _typical_mover(study, arm, seed, layer)
            found = load_records(
                study, probe="activations.probe", layer=layer, statistic=names, unit=unit, arm=arm, seed=seed
            )
            wide = found.pivot(index="step", columns="statistic", values="value")[names].sort_index()
            wide = wide.loc[np.isfinite(wide.to_numpy()).all(axis=1)]
            common = {"panel": "ridge", "arm": arm, "seed": str(seed), "layer": layer, "unit": unit}
            stride = -(-len(wide) // _RIDGES)
            for step, quantiles in wide.iloc[::stride].iterrows():
                at, density = _density(np.array(percentiles) / 100, quantiles.to_numpy(dtype=np.float64))
                rows.append(pd.DataFrame(common | {"step": step, "at": at, "value": density}))
    return pd.concat(rows, ignore_index=True)


def _typical_mover(study: Study, arm: str, seed: int, layer: str) -> int:
    """The unit whose drift from step to step is the median one; the lowest of equals."""
    every = int(study.setting("measures", "every"))
    found = load_records(study, probe="drift.previous", statistic="mean_shift", layer=layer, arm=arm, seed=seed)
    found = found[(found["unit"] >= 0) & (found["step"] % every == 1) & np.isfinite(found["value"])]
    if found.empty:  # diverged before it moved
        return 0
    moved = found.groupby("unit")["value"].mean().sort_index()
    return int((moved - moved.median()).abs().idxmin())


def _density(levels: Floats, quantiles: Floats) -> tuple[Floats, Floats]:
    """(P,) places and densities there; all mass in one place is a spike of height 1."""
    if quantiles[-1] <= quantiles[0]:
        return np.full(3, quantiles[0]), np.array([0.0, 1.0, 0.0])
    sample = np.interp(np.linspace(levels[0], levels[-1], 400), levels, quantiles)
    kernel = gaussian_kde(sample)
    margin = 3 * sample.std(ddof=1) * kernel.factor
    at = np.linspace(quantiles[0] - margin, quantiles[-1] + margin, _POINTS)
    return at, kernel(at)


# --- drawing


def _figure(
    study: Study,
    effects: Sequence[Effect],
    accuracies: pd.DataFrame,
    ridges: pd.DataFrame,
    layers: Mapping[str, str],
) -> Figure:
    figure = style.new_figure(10.6, 2.7 + 1.9 * len(layers), _caption(study, ridges))
    grid = figure.add_gridspec(1 + len(layers), 8, height_ratios=(2.4, *(1.9 for _ in layers)))
    upper = [figure.add_subplot(grid[0, :4]), figure.add_subplot(grid[0, 4:])]
    for axes, (panel, title) in zip(upper, _PANELS.items(), strict=True):
        _draw_accuracy(axes, study, effects, accuracies[accuracies["panel"] == panel])
        axes.set_title(f"training accuracy, {title}", fontsize=8.5)
    # Nothing is trained at the last evaluation, so the curves to the right end sooner.
    ends = [axes.get_xlim() for axes in upper]
    for axes in upper:
        axes.set_xlim(min(low for low, _ in ends), max(high for _, high in ends))
    upper[0].set_ylabel("training accuracy")
    handles, labels = upper[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), handlelength=3)
    for row, (layer, label) in enumerate(layers.items(), start=1):
        here = ridges[ridges["layer"] == layer]
        limits = _limits(here)
        for column, arm in enumerate(ARMS):
            axes = figure.add_subplot(grid[row, 2 * column : 2 * column + 2])
            mine = here[here["arm"] == arm]
            _draw_ridges(axes, mine, _LOOKS[arm], limits)
            name = study.label(arm)
            axes.set_title(f"{label}, {name}: unit {mine['unit'].iloc[0]}", fontsize=8)
            if column == 0:
                axes.set_ylabel("training step")
            else:
                axes.tick_params(labelleft=False)
            if row == len(layers):
                axes.set_xlabel(f"input to the {study.setting('network', 'activation')}")
    return figure


def _draw_accuracy(axes: Axes, study: Study, effects: Sequence[Effect], numbers: pd.DataFrame) -> None:
    for arm in ARMS:
        look, mine = _LOOKS[arm], numbers[numbers["arm"] == arm]
        mean, low, high = band_series(mine)
        axes.plot(
            mean["step"], mean["value"], color=look.color, ls=look.dashes, zorder=look.order, label=study.label(arm)
        )
        axes.fill_between(mean["step"], low["value"], high["value"], color=look.color, alpha=0.18, lw=0)
        for run in by_name(effects)[arm].runs:
            if run.diverged:
                end = mine[mine["seed"] == str(run.seed)].iloc[-1]
                axes.plot(end["step"], end["value"], marker="X", ms=7, color=look.color, mec="white", zorder=6)
    axes.set_ylim(0, 1)
    axes.set_xlabel("training steps")
    axes.xaxis.set_major_formatter(FuncFormatter(style.thousands))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _limits(ridges: pd.DataFrame) -> tuple[float, float]:
    """What all arms' densities of a layer reach, but not more than three times as far as the middle arm's do."""
    ends = [(float(one["at"].min()), float(one["at"].max())) for _, one in ridges.groupby("arm", observed=True)]
    middle = float(np.median([(low + high) / 2 for low, high in ends]))
    reach = 1.5 * float(np.median([high - low for low, high in ends]))
    return max(min(low for low, _ in ends), middle - reach), min(max(high for _, high in ends), middle + reach)


def _draw_ridges(axes: Axes, table: pd.DataFrame, look: style.LineStyle, limits: tuple[float, float]) -> None:
    """Each density as tall as the others, at the height of its step; later ones lie behind."""
    steps = sorted(table["step"].unique())
    gap = float(np.diff(steps).min()) if len(steps) > 1 else 1.0
    for step in steps:
        one = table[table["step"] == step]
        at, height = one["at"].to_numpy(), one["value"].to_numpy()
        height = step + _OVERLAP * gap * height / height.max()
        order = 2 + (len(steps) - steps.index(step)) / (len(steps) + 1)
        narrow = at[-1] - at[0] < _NARROW * (limits[1] - limits[0])
        axes.fill_between(at, step, height, color=look.color, alpha=0.55, lw=0, zorder=order)
        axes.plot(at, height, color=look.color if narrow else "white", lw=1.4 if narrow else 0.6, zorder=order)
    axes.set_xlim(*limits)
    axes.set_ylim(-0.3 * gap, steps[-1] + (_OVERLAP + 0.3) * gap)
    axes.yaxis.set_major_formatter(FuncFormatter(style.thousands))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.grid(visible=False, axis="y")


# --- saying


def _title(study: Study, effects: Sequence[Effect]) -> str:
    seeds = len(study.seeds)
    brackets = (
        f"Brackets and \N{PLUS-MINUS SIGN}: 95% Student t over {seeds} seeds, paired"
        if seeds > 1
        else "One seed, no intervals"
    )
    sample = study.setting("measures", "sample")
    return (
        f"Noise after BN: what it did to training\n{verdicts(effects)}\n{brackets}. x: ratio of steps, min(passage, "
        "end of training). area: mean height of training accuracy, higher is faster. drift: of the inputs to the "
        "nonlinearities, in sd; its floor: 95% of random halves of the "
        f"{sample} examples it is measured on differ by less."
    )


def _caption(study: Study, ridges: pd.DataFrame) -> str:
    training, network, data = (study.setting(name) for name in ("training", "network", "data"))
    fixed, every = study.setting("evaluation", "fixed"), study.setting("evaluation", "fixed_every")
    sample, noise = study.setting("measures", "sample"), study.setting("normalizer", "noise", arm="noisy")
    lines = band_text(study.seeds)
    if network["kind"] == "vgg":
        net = f"VGG layout {network['layout']}, {network['width']:g} of its channels, Glorot"
    else:
        net = f"{len(network['hidden'])} hidden layers of {style.and_list([str(h) for h in network['hidden']])} units"
        net += f", weights N(0, {network['init_std']:g}\N{SUPERSCRIPT TWO})"
    outside = _outside(ridges)
    cut = (
        f" Densities leave the axes in part: {style.and_list([study.label(arm) for arm in outside])}."
        if outside
        else ""
    )
    lost = [run.path.name for run in study.runs if run.diverged and run.arm in ARMS]
    diverged = f" Diverged (crosses: the last evaluation): {', '.join(lost)}." if lost else ""
    return (
        f"Above: share of {fixed} fixed training examples classified rightly, every {every} steps, with the noise off "
        f"and running statistics; and, right, of {sample} others with batch statistics and noise, the "
        f"network that is being trained, up to the last step that is (the source shows training accuracy). "
        f"{lines}{diverged} {_DATA[data['name']]}, {net}, {network['activation']}; "
        f"SGD with learning rate {training['learning_rate']:g}, batches of "
        f"{training['batch']}. These arms tell whether unstable distributions slow training, not what movement does "
        "apart from noise: that is asked in noise_dose, per step against per sample at equal dose, where both were "
        "run.\n"
        f"Below: the distribution of one unit's input to the nonlinearity over those {sample} examples, batch "
        f"statistics and noise on, bottom to top = time, seed {study.seeds[0]}; each density is drawn equally tall, "
        f"and as a line where it is narrower than {_NARROW:.0%} of the axis. The unit is computed, not picked: the one "
        "whose movement from step to step is the median of its layer's units."
        f"{_layers_text(study)}{cut} Noise (Algorithm 1): a unit's shift U(-{noise['n_mu']:g}, {noise['n_mu']:g}) and "
        f"gain U(1, {noise['n_sigma']:g}) at each step, a sample's within {noise['r_mu']:g} of the shift and N(gain, "
        f"{noise['r_sigma']:g}" + ("\N{SUPERSCRIPT TWO})." if noise["spread"] == "deviation" else ").")
    )


def _layers_text(study: Study) -> str:
    """Which layers are shown, and why these."""
    count, shown = _depth(study), style.and_list([name.removeprefix("layer ") for name in _layers(study).values()])
    if count <= _ALL:
        return ""
    kind = "convolutions" if study.setting("network", "kind") == "vgg" else "hidden layers"
    return (
        f" Layers {shown} of {count} {kind} from the input on: the second, the one two thirds up and the last, by "
        "which rule the source's are 2, 9 and 13 of 13."
    )


def _outside(ridges: pd.DataFrame) -> list[str]:
    """Arms with a density that the axes cut."""
    found = []
    for _, here in ridges.groupby("layer", observed=True):
        low, high = _limits(here)
        cut = here[(here["at"] < low) | (here["at"] > high)]
        found += [arm for arm in cut["arm"].unique() if arm not in found]
    return found
