"""The source's stability metrics (Santurkar et al. 2018, Figure 8) on training batches, and what sampling makes of it.

With ``m(B, t)`` a unit's mean over minibatch B at theta_t and with step t's noise, the source plots the change from the
batch of step t to that of step t + 1. A second minibatch A, which stays the same, splits it exactly:

    m(B', t+1) - m(B, t)  =  [m(B', t+1) - m(A, t+1)]  +  [m(A, t+1) - m(A, t)]  +  [m(A, t) - m(B, t)]
           total          =          sampling                  movement                 sampling

Shown are the total and one sampling part, ``|m(A, t) - m(B, t)|``: two batches of one network with one noise. The same
for the variance, and for the distance from the first record. Each is the mean over units of the absolute value, in the
activation's own unit (variance: in its square).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from analysis import style
from analysis.figures.noise_effects import band_series, band_text, seed_band
from analysis.load import Study, load_records

PARTS = ("total", "sampling", "movement")
METRICS = {
    ("mean", "step"): "mean, step to step",
    ("variance", "step"): "variance, step to step",
    ("mean", "start"): "mean, from the start",
    ("variance", "start"): "variance, from the start",
}
_LOWEST = 1e-5  # what is less is rounding

Floats = NDArray[np.float64]


def read_stability(study: Study, arms: Sequence[str], layers: Sequence[str]) -> pd.DataFrame:
    """One row an arm, seed, layer, step, moment, reference (``step`` or ``start``) and part; and means over seeds.

    A change from step t to t + 1 stands at t; in a run that diverged, only finite numbers are averaged. Where ``seed``
    is ``all``, ``series`` is ``mean`` or an edge of the band around it, at the steps that every run has.
    """
    every = int(study.setting("measures", "every"))
    found = []
    for arm in arms:
        for seed in study.seeds:
            own, other = (
                load_records(
                    study, probe=f"activations.{on}", statistic=["mean", "variance"], arm=arm, seed=seed
                ).pivot(index=["layer", "statistic", "step"], columns="unit", values="value")
                for on in ("batch", "other")
            )
            for layer in layers:
                for moment in ("mean", "variance"):
                    parts = _parts(_of(own, layer, moment), _of(other, layer, moment), every)
                    found.append(parts.assign(arm=arm, seed=str(seed), layer=layer, moment=moment, series="one seed"))
    columns = ["arm", "seed", "layer", "moment", "reference", "part", "series", "step", "value"]
    runs = pd.concat(found, ignore_index=True)[columns]
    return pd.concat([runs, *_bands(runs)], ignore_index=True)


def _of(moments: pd.DataFrame, layer: str, moment: str) -> pd.DataFrame:
    """(T, U) of one layer and moment."""
    levels = moments.index.get_level_values
    return moments[(levels("layer") == layer) & (levels("statistic") == moment)].droplevel(["layer", "statistic"])


def _bands(runs: pd.DataFrame) -> Iterator[pd.DataFrame]:
    names = ["arm", "layer", "moment", "reference", "part"]
    for key, table in runs.groupby(names, sort=False):
        wide = table.pivot(index="seed", columns="step", values="value").dropna(axis=1)
        band = seed_band(wide.to_numpy(dtype=np.float64))
        common = dict(zip(names, key, strict=True)) | {"seed": "all", "step": wide.columns.to_numpy(dtype=np.int64)}
        for series, values in band.items():
            yield pd.DataFrame(common | {"series": series, "value": values})


def _parts(own: pd.DataFrame, other: pd.DataFrame, every: int) -> pd.DataFrame:
    """From a unit's moments on the step's batches and on the one that stays, (T, U) each."""
    firsts = [step for step in own.index if step % every == 0]
    paired = [step for step in firsts if step + 1 in own.index]
    nexts = [step + 1 for step in paired]
    sampling = {"step": paired, "start": firsts[1:]}
    values = {
        ("step", "total"): own.loc[nexts].to_numpy() - own.loc[paired].to_numpy(),
        ("step", "movement"): other.loc[nexts].to_numpy() - other.loc[paired].to_numpy(),
        ("start", "total"): own.loc[firsts[1:]].to_numpy() - own.iloc[0].to_numpy(),
        ("start", "movement"): other.loc[firsts[1:]].to_numpy() - other.iloc[0].to_numpy(),
    }
    values |= {
        (r, "sampling"): other.loc[steps].to_numpy() - own.loc[steps].to_numpy() for r, steps in sampling.items()
    }
    rows = []
    for (reference, part), change in values.items():
        size = np.where(np.isfinite(change), np.abs(change), np.nan)
        known = np.isfinite(size).any(axis=1)
        averaged = np.nanmean(size[known], axis=1)
        steps = np.array(sampling[reference], dtype=np.int64)[known]
        rows.append(pd.DataFrame({"reference": reference, "part": part, "step": steps, "value": averaged}))
    return pd.concat(rows, ignore_index=True)


def stability_figure(
    study: Study, numbers: pd.DataFrame, looks: Mapping[str, style.LineStyle], layers: Mapping[str, str]
) -> Figure:
    """Layers downwards, metrics to the right; solid the total, dotted what sampling alone makes."""
    figure = style.new_figure(11.0, 2.0 * len(layers) + 0.7, _caption(study, numbers))
    grid = figure.subplots(len(layers), len(METRICS), squeeze=False, sharex=True)
    below = dict.fromkeys(looks, "")
    for arm in looks:
        sampled = numbers[(numbers["arm"] == arm) & (numbers["part"] == "sampling") & (numbers["series"] == "mean")]
        lost = [moment for moment, one in sampled.groupby("moment", sort=False) if (one["value"] < _LOWEST).all()]
        below[arm] = f" ({style.and_list([str(moment) for moment in lost])}: below the axes)" if lost else ""
    for row, (layer, label) in zip(grid, layers.items(), strict=True):
        for axes, ((moment, reference), title) in zip(row, METRICS.items(), strict=True):
            here = numbers[
                (numbers["layer"] == layer) & (numbers["moment"] == moment) & (numbers["reference"] == reference)
            ]
            for arm, look in looks.items():
                mine = here[here["arm"] == arm]
                name = study.label(arm)
                mean, low, high = map(_places, band_series(mine[mine["part"] == "total"]))
                axes.plot(*mean, color=look.color, ls=look.dashes, lw=1.3, zorder=look.order, label=name)
                axes.fill_between(*low, high[1], color=look.color, alpha=0.16, lw=0)
                sampling = _places(mine[(mine["part"] == "sampling") & (mine["series"] == "mean")])
                name = f"{name}: sampling alone{below[arm]}"
                axes.plot(*sampling, color=look.color, ls=":", lw=1.6, zorder=look.order, label=name)
            shown = here[(here["part"] != "movement") & (here["series"] == "mean") & (here["value"] > 0)]["value"]
            if len(shown):  # nothing is where every run diverged at once
                axes.set_yscale("log")
                axes.set_ylim(max(float(shown.min()) / 1.5, _LOWEST), float(shown.max()) * 1.5)
            axes.xaxis.set_major_formatter(FuncFormatter(style.thousands))
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            if layer == next(iter(layers)):
                axes.set_title(title)
            if layer == list(layers)[-1]:
                axes.set_xlabel("training steps")
        row[0].set_ylabel(f"{label}\n|change of the mean|")
        row[1].set_ylabel("|change of the variance|")
        row[2].set_ylabel("|distance of the mean|")
        row[3].set_ylabel("|distance of the variance|")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4, fontsize=7.5)
    return figure


def _places(chosen: pd.DataFrame) -> tuple[Floats, Floats]:
    """(T,) steps and values."""
    return chosen["step"].to_numpy(dtype=np.float64), chosen["value"].to_numpy(dtype=np.float64)


def _caption(study: Study, numbers: pd.DataFrame) -> str:
    training, every = study.setting("training"), study.setting("measures", "every")
    hidden = numbers[(numbers["part"] == "total") & (numbers["series"] == "mean") & (numbers["value"] < _LOWEST)]
    labels = [study.label(arm) for arm in hidden["arm"].unique()]
    below = f" Totals below {_LOWEST:g}, {style.and_list(labels)}, leave the axes." if labels else ""
    return (
        "The source's stability metrics of the inputs to the nonlinearities, on the training batches as they come "
        f"({training['batch']} examples): the change of a unit's mean and variance from one step to the next (every "
        f"{every} steps), and their distance from the first record. Mean over units of the absolute value, in the "
        f"activation's own unit (variance: its square). {band_text(study.seeds)} Bands are of the totals.\n"
        "Dotted: what sampling alone makes, the same metric between two batches of one step's network with one step's "
        "noise. Where a line lies on its dots, the network was not seen to move. After BN in batch mode a unit's mean "
        "is beta and its variance gamma squared on any batch, by construction: sampling does not show, and nothing but "
        "beta and gamma moves."
        f"{below}\n"
        "The manipulation check does not judge by these dots but by the drift on fixed examples and its floor, and "
        "what movement does apart from noise is asked at equal noise, per step against per sample, where both were "
        "run: see noise_dose."
    )
