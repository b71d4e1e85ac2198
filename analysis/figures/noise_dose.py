"""Steps to the target against measured drift: every dose of noise in every form.

If movement were what slows training, the form that moves more would be the slower one at each dose.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from analysis import style
from analysis.figures.noise_effects import FORMS, Effect
from analysis.load import Study
from analysis.statistics import mean, median_passage

_FORM_LOOKS = {"per_step": (style.ORANGE, "s"), "per_sample": (style.BLUE, "o"), "fixed": (style.GREY, "D")}
_OTHER_LOOKS = {"none": (style.VERMILION, "X"), "batch": ("#00466E", "P"), "noise-only": (style.PURPLE, "v")}
_PANELS = {
    "steps": "steps to the target",
    "error": "mean error, noise off",
    "error_trained": "mean error, noise on",
}
_TICKS = (1, 1.5, 2, 3, 4, 5, 6, 8)
_LEAST_TICKS = 3
_STILL = 1e-4  # a drift below it is drawn there: BN's is rounding


def dose_numbers(effects: Sequence[Effect]) -> pd.DataFrame:
    """One row an arm and seed, with what is known of its passage, and one an arm (seed empty) with what is drawn."""
    rows = []
    for effect in effects:
        common = (effect.arm, effect.label, effect.form or "", effect.dose if effect.dose is not None else np.nan)
        for k, run in enumerate(effect.runs):
            passage = effect.passages[k]
            steps = min(passage.by, effect.horizon)
            errors = (1 - effect.area[k], 1 - effect.area_trained[k])
            rows.append((*common, str(run.seed), effect.drift[k], passage.after, passage.by, steps, *errors))
        median = median_passage(effect.passages)
        drawn = min(median.estimate, effect.horizon)
        middle = (1 - _mean(effect.area), 1 - _mean(effect.area_trained))
        rows.append((*common, "all", _mean(effect.drift), median.after, median.estimate, drawn, *middle))
    columns = ["arm", "label", "form", "dose", "seed", "drift", "after", "by", "steps", "error", "error_trained"]
    drifts = [values for one in effects for values in zip(one.far, one.start, one.floor, strict=True)]
    runs = iter(drifts)  # the other drifts of each run and its sampling floor; and their means
    means = iter([(_mean(one.far), _mean(one.start), _mean(one.floor)) for one in effects])
    further = [next(means if row[4] == "all" else runs) for row in rows]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(**dict(zip(("far", "from_start", "floor"), zip(*further, strict=True), strict=True)))


def dose_figure(study: Study, effects: Sequence[Effect], numbers: pd.DataFrame, target: float) -> Figure:
    """Three panels against drift: steps to the target, and what is left of the two areas. Down is fast in all."""
    figure = style.new_figure(11.0, 3.9, _caption(study, effects, target))
    grid = figure.subplots(1, 3)
    for axes, (column, title) in zip(grid, _PANELS.items(), strict=True):
        for effect in effects:
            _draw_effect(axes, numbers[numbers["arm"] == effect.arm], effect, column)
        for form, (color, _) in _FORM_LOOKS.items():
            line = numbers[(numbers["form"] == form) & (numbers["seed"] == "all")].sort_values("dose")
            axes.plot(line["drift"].clip(lower=_STILL), line[column], color=color, lw=1.0, zorder=2)
        known = numbers[np.isfinite(numbers["drift"]) & np.isfinite(numbers[column])]
        if known.empty:  # every run diverged: there is no place for a mark
            axes.set_title(title)
            continue
        axes.set_xscale("log")
        axes.set_xlabel("drift of the mean from step to step, in sd")
        axes.set_title(title)
        axes.margins(0.1, 0.12)
        axes.set_yscale("log")
        axes.set_yticks(_ticks(*axes.get_ylim()))
        floor = numbers[(numbers["arm"] == "noisy") & (numbers["seed"] == "all")]["floor"].item()
        if np.isfinite(floor):
            axes.axvline(floor, color=style.BLACK, ls=":", lw=1.2, zorder=1.5, label="floor of the check")
        axes.yaxis.set_major_formatter(FuncFormatter(style.thousands))
        axes.yaxis.set_minor_locator(NullLocator())
    grid[0].set_ylabel(f"steps to a training accuracy of {target:g}")
    grid[1].set_ylabel("mean training error over training")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
    return figure


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers on a logarithmic axis; evenly spaced ones where it spans too little for three of the others."""
    found = [t for k in range(-4, 7) for t in (m * 10.0**k for m in _TICKS) if low <= t <= high]
    if len(found) >= _LEAST_TICKS:
        return found
    return [float(t) for t in MaxNLocator(5).tick_values(low, high) if low <= t <= high]


def _draw_effect(axes: Axes, table: pd.DataFrame, effect: Effect, column: str) -> None:
    if effect.form is None:
        color, marker = _OTHER_LOOKS[effect.arm]
        label = effect.label
    else:
        color, marker = _FORM_LOOKS[effect.form]
        label = f"noisy BN, {FORMS[effect.form]}"
    known = axes.get_legend_handles_labels()[1]
    runs, middle = table[table["seed"] != "all"], table[table["seed"] == "all"]
    axes.plot(
        runs["drift"].clip(lower=_STILL), runs[column], ls="none", marker=".", ms=4, color=color, alpha=0.6, zorder=3
    )
    censored = column == "steps" and not np.isfinite(middle["by"].item())
    axes.plot(
        middle["drift"].clip(lower=_STILL),
        middle[column],
        ls="none",
        marker=marker,
        ms=11 if effect.form else 8,
        color=color,
        mfc="white" if censored else color,
        mew=1.5,
        zorder=4 if effect.form else 6,  # the smaller marks, which have no number, on the larger
        label=label if label not in known else "_",
    )
    if effect.dose is not None:
        place = (middle["drift"].clip(lower=_STILL).item(), middle[column].item())
        ink = color if censored else "black" if color == style.ORANGE else "white"
        axes.annotate(f"{effect.dose:g}", place, fontsize=7, color=ink, ha="center", va="center", zorder=5)


def _mean(values: np.ndarray) -> float:
    return mean(values).estimate if np.isfinite(values).all() else float("nan")


def _caption(study: Study, effects: Sequence[Effect], target: float) -> str:
    every, fixed = study.setting("evaluation", "fixed_every"), study.setting("evaluation", "fixed")
    sample, seeds = study.setting("measures", "sample"), style.and_list([str(seed) for seed in study.seeds])
    still = [effect.label for effect in effects if _mean(effect.drift) < _STILL]
    rest = f" Drawn at {_STILL:g}, being less: {style.and_list(still)}." if still else ""
    floor = _mean(next(effect for effect in effects if effect.arm == "noisy").floor)
    checked = (
        f" Dotted: the floor that the manipulation check compares noisy BN's drift with, {floor:.3f} sd; 95% of random "
        "halves of these examples differ by less."
        if np.isfinite(floor)
        else ""
    )
    return (
        f"{_question(effects)}\n"
        f"Drift: |change of a unit's mean from one step to the next| / sd over {sample} fixed training examples, with "
        "normalizers and noise as in training, median over units, mean over layers and records. Dots: single runs, "
        f"seeds {seeds}. Marks: mean of drift and errors, median of steps; hollow: half of the runs or more did not "
        f"arrive in {effects[0].horizon:.0f} steps and stand at that number.{rest}{checked}\n"
        f"Steps: first evaluation (every {every} steps) at which {target:.0%} of {fixed} fixed training examples are "
        "classified rightly, population statistics, noise off. Mean error: 1 - area under that curve, and under the "
        "one with batch statistics and the noise on, as the network is trained (on the examples of the drift); less is "
        "faster."
    )


def _question(effects: Sequence[Effect]) -> str:
    """What is compared with what, of the forms that were run."""
    forms = {effect.form for effect in effects}
    draws = {
        "per_step": "per step (squares) draws a unit's shift and gain at every step, so that its distribution moves",
        "per_sample": "per sample (circles) draws them for each example, so that it hardly moves",
        "fixed": "fixed (diamonds) draws them once",
    }
    if not forms & {"per_sample", "fixed"}:
        return "Noisy BN (the dose is the number in its mark) beside the source's other arms; no other form was run."
    said = "Noise of one marginal law in several forms: " + "; ".join(t for form, t in draws.items() if form in forms)
    said += ". The number in a mark is the dose."
    if "per_sample" in forms:
        said += (
            " What movement does apart from noise: compare the square with the circle of the same number. If movement "
            "slowed training, the square would stand higher."
        )
    if "fixed" in forms:
        said += (
            " The network comes to count on a fixed shift and gain, and evaluation takes them away: the form's error "
            "with noise off holds that cost too."
        )
    return said
